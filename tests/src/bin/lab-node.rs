//! `cargo lab schemathesis` inside the lab host: a node daemon on a TCP port, whose VMs have vDPA
//! NICs.
//!
//! ```text
//!   lab-node DIRECTORY      prints READY; ends when DIRECTORY has the file `ended`
//!
//!   QEMU's user network ──▶ 10.0.2.15:8077, socat ──▶ the daemon's socket
//! ```
//! A tester stops, changes and deletes all that the API offers. So this program creates each of its
//! VMs again when its NIC has not worked for a while, and deletes old VMs and snapshots. At the end
//! it reports how long VMs ran, and checks that the daemon still works. The daemon's log is in
//! DIRECTORY.

use lab::api::Client;
use lab::error::{Error, Result, report};
use lab::files;
use lab::guest::BellhopArguments;
use lab::process::{die_with_parent, output};
use lab::rig::PLAIN_SLOT;
use launcher::host::FORWARD_ADDRESS;
use launcher::verbs::schemathesis::{ENDED, PORT, READY};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// The VMs that are kept. `tests/schemathesis.toml` has their names, too.
const VMS: [&str; 3] = ["web-1", "web-2", "web-3"];

/// No zero bytes: the simulator compares addresses as if they were strings. Each VM's device sends
/// only to itself.
const MAC: &str = "52:54:5e:11:60:01";

/// A VM is created again if its NIC has not worked for so long. It is longer than a boot and than
/// any sequence of requests in which the tester expects a deleted VM to stay deleted.
const ABSENT: Duration = Duration::from_secs(30);

/// How long the first boots may take, and the last one.
const BOOT: Duration = Duration::from_secs(180);

/// How many VMs and snapshots may exist.
const VMS_MAX: usize = 12;
const SNAPSHOTS_MAX: usize = 6;

/// The least part of the time, in percent, in which the NIC of a VM works.
const LEAST: usize = 50;

/// Lines of the daemon's log that show a fault of a process: a panic also aborts.
const FAULTS: [&str; 3] = ["panicked", "killed by signal", "ended with code 101"];

/// How many lines of a log an error shows.
const SHOWN: usize = 20;

fn main() -> ExitCode {
    let directory = std::env::args_os().nth(1).map(PathBuf::from);
    let done = directory
        .ok_or_else(|| Error::Usage("usage: lab-node DIRECTORY".into()))
        .and_then(|directory| serve(&directory));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-node: {}", report(&error));
            ExitCode::FAILURE
        }
    }
}

fn serve(directory: &Path) -> Result<()> {
    lab::sim::require_lab()?;
    let mut node = Node::start(directory)?;
    let mut keeper = Keeper::new(node.api.clone())?;
    for vm in VMS {
        keeper.create(vm)?;
    }
    keeper.until_all_work()?;
    set_up_network()?;
    let _forwarder = forward(node.api.socket())?;
    println!("{READY}");
    let ended = directory.join(ENDED);
    while !ended.exists() {
        node.lives()?;
        keeper.look()?;
        std::thread::sleep(Duration::from_secs(1));
    }
    keeper.show(&node.log_text()?);
    // The node still creates VMs, whatever the tester has left.
    for vm in VMS {
        keeper.create(vm)?;
    }
    keeper.until_all_work()?;
    node.lives()?;
    node.check_log()?;
    if keeper.share() < LEAST {
        let share = keeper.share();
        let why = format!("a NIC worked {share} % of the time only, less than {LEAST} %");
        return Err(Error::invalid("the test", why));
    }
    Ok(())
}

/// Gives the NIC that QEMU forwards to its address.
fn set_up_network() -> Result<()> {
    output(Command::new("modprobe").arg("virtio_net"))?;
    let function = format!("/sys/bus/pci/devices/0000:00:{PLAIN_SLOT:02x}.0");
    let links = files::list(Path::new(&function))?
        .into_iter()
        .filter_map(|path| files::list(&path.join("net")).ok())
        .flatten();
    let link = links.last().ok_or_else(|| {
        Error::missing(
            format!("{function} has no link"),
            "run it with `cargo lab schemathesis`",
        )
    })?;
    let name = link.file_name().unwrap_or_default();
    let address = format!("{FORWARD_ADDRESS}/24");
    let ip = || Command::new("ip");
    output(ip().args(["address", "add", &address, "dev"]).arg(name))?;
    output(ip().args(["link", "set", "up", "dev"]).arg(name)).map(drop)
}

/// Forwards connections to the daemon's socket.
fn forward(socket: &Path) -> Result<Child> {
    let mut command = Command::new("socat");
    command
        .arg(format!("TCP-LISTEN:{PORT},fork,reuseaddr"))
        .arg(format!("UNIX-CONNECT:{}", socket.display()))
        .stdin(Stdio::null());
    start(&mut command)
}

fn start(command: &mut Command) -> Result<Child> {
    let program = command.get_program().to_string_lossy().into_owned();
    die_with_parent(command)
        .spawn()
        .map_err(|source| Error::Start { program, source })
}

/// The daemon.
struct Node {
    child: Child,
    log: PathBuf,
    api: Client,
}

impl Node {
    fn start(directory: &Path) -> Result<Self> {
        let program = std::env::var_os("BELLHOP")
            .ok_or_else(|| Error::missing("BELLHOP is not set", "run `cargo lab schemathesis`"))?;
        let log = directory.join("daemon.log");
        let file = std::fs::File::create(&log).map_err(Error::file("create", &log))?;
        let own = std::env::temp_dir().join("lab-node");
        let runtime = own.join("run");
        let mut command = Command::new(program);
        command
            .args(["--log-level", "info", "serve", "--state-dir"])
            .arg(own.join("state"))
            .arg("--runtime-dir")
            .arg(&runtime)
            .stdin(Stdio::null())
            .stderr(file);
        let node = Self {
            child: start(&mut command)?,
            log,
            api: Client::new(&runtime.join("node.socket")),
        };
        lab::node::until("the daemon serves", || node.api.get("/v1/version").is_ok())?;
        Ok(node)
    }

    fn log_text(&self) -> Result<String> {
        files::read(&self.log).map(|log| String::from_utf8_lossy(&log).into_owned())
    }

    /// # Errors
    /// [`Error::Program`] if the daemon has ended.
    fn lives(&mut self) -> Result<()> {
        let ended = self.child.try_wait();
        match ended.map_err(Error::system("wait for the daemon"))? {
            None => Ok(()),
            Some(status) => Err(Error::Program {
                program: "bellhop serve".into(),
                status: status.to_string(),
                tail: files::last_lines(&self.log_text()?, SHOWN),
            }),
        }
    }

    /// # Errors
    /// [`Error::Invalid`] with the lines that show a fault of the daemon or of a VM's process.
    fn check_log(&self) -> Result<()> {
        let text = self.log_text()?;
        let faults = text.lines();
        let faults: Vec<&str> = faults
            .filter(|line| FAULTS.iter().any(|fault| line.contains(fault)))
            .take(SHOWN)
            .collect();
        if faults.is_empty() {
            Ok(())
        } else {
            Err(Error::invalid("the daemon's log", faults.join("\n")))
        }
    }
}

/// Keeps the VMs.
struct Keeper {
    api: Client,
    vm: Value,
    /// When each NIC worked last, or its VM was created.
    last: [Instant; VMS.len()],
    samples: usize,
    working: usize,
    created: usize,
}

impl Keeper {
    fn new(api: Client) -> Result<Self> {
        let guest = BellhopArguments::small()?;
        let vm = json!({ "spec": {
            "kernel": guest.kernel_image(),
            "initramfs": guest.ramdisk(),
            "cmdline": guest.kernel_words(),
            "memory": "128M",
            "nics": [{ "id": "net0", "from": "vdpasim_net", "mac": MAC, "mtu": 1500 }],
        } });
        Ok(Self {
            api,
            vm,
            last: [Instant::now(); VMS.len()],
            samples: 0,
            working: 0,
            created: 0,
        })
    }

    /// Creates a VM in place of one that may exist. The tester may prevent it, so a refusal is only
    /// shown.
    fn create(&mut self, vm: &str) -> Result<()> {
        let path = format!("/v1/vms/{vm}");
        for path in ["/v1/cordon", &format!("{path}?force=true")] {
            self.api.ask("DELETE", path, None)?;
        }
        let answer = self.api.ask("PUT", &path, Some(&self.vm))?;
        if answer.status != 201 {
            eprintln!("lab-node: {vm}: {} {}", answer.status, answer.body);
        }
        self.created += 1;
        Ok(())
    }

    /// The VMs that run and whose guests' drivers use a NIC.
    fn working(&self, all: &Value) -> Result<BTreeSet<String>> {
        let metrics = self.api.get("/v1/metrics")?;
        Ok(working(all, metrics.as_str().unwrap_or_default()))
    }

    fn until_all_work(&self) -> Result<()> {
        let start = Instant::now();
        loop {
            let all = self.api.get("/v1/vms")?;
            let working = self.working(&all)?;
            if VMS.iter().all(|vm| working.contains(*vm)) {
                return Ok(());
            }
            if start.elapsed() > BOOT {
                let why = format!("only {working:?} work: {all:#}");
                return Err(Error::invalid("the state of the VMs", why));
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Counts, creates and deletes.
    fn look(&mut self) -> Result<()> {
        let all = self.api.get("/v1/vms")?;
        let working = self.working(&all)?;
        self.samples += 1;
        self.working += usize::from(!working.is_empty());
        for (index, vm) in VMS.into_iter().enumerate() {
            let Some(last) = self.last.get_mut(index) else {
                continue;
            };
            let is_due = last.elapsed() > ABSENT;
            if working.contains(vm) || is_due {
                *last = Instant::now();
            }
            if is_due && !working.contains(vm) {
                self.create(vm)?;
            }
        }
        let others = names(&all).into_iter();
        let others = others.filter(|name| !VMS.contains(&name.as_str()));
        self.prune("vms", others.collect(), VMS_MAX)?;
        let snapshots = self.api.get("/v1/snapshots")?;
        self.prune("snapshots", names(&snapshots), SNAPSHOTS_MAX)
    }

    /// Deletes as many objects as there are too many of. Those in use stay for now.
    fn prune(&self, kind: &str, names: Vec<String>, most: usize) -> Result<()> {
        let excess = names.len().saturating_sub(most);
        let query = if kind == "vms" { "?force=true" } else { "" };
        for name in names.into_iter().take(excess) {
            let path = format!("/v1/{kind}/{name}{query}");
            self.api.ask("DELETE", &path, None)?;
        }
        Ok(())
    }

    /// The part of the time in which a NIC worked, in percent.
    fn share(&self) -> usize {
        100 * self.working / self.samples.max(1)
    }

    fn show(&self, log: &str) {
        let done = log.lines().filter(|line| line.contains("INFO done who="));
        let of_vms = done.filter(|line| VMS.iter().any(|vm| line.contains(vm)));
        let of_vms: Vec<&str> = of_vms.collect();
        let of_nics = of_vms.iter().filter(|line| line.contains("/nics/"));
        println!(
            "lab-node: a NIC worked {} % of the time; VMs were created {} times; {} requests \
             changed them, {} of these a NIC",
            self.share(),
            self.created,
            of_vms.len(),
            of_nics.count()
        );
    }
}

/// The names of a list's items.
fn names(all: &Value) -> Vec<String> {
    let items = all["items"].as_array().into_iter().flatten();
    items
        .filter_map(|item| item["name"].as_str().map(str::to_owned))
        .collect()
}

/// The running VMs of a list that have a NIC whose driver works, by the node's metrics.
fn working(all: &Value, metrics: &str) -> BTreeSet<String> {
    let items = all["items"].as_array().into_iter().flatten();
    let running = items.filter(|vm| vm["status"]["phase"] == "Running");
    running
        .filter_map(|vm| vm["name"].as_str())
        .filter(|name| {
            let sample = format!("bellhop_nic_driver_ok{{vm=\"{name}\",");
            let mut lines = metrics.lines();
            lines.any(|line| line.starts_with(&sample) && line.ends_with(" 1"))
        })
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_works_if_it_runs_and_its_driver_does() {
        let all = json!({"items": [
            { "name": "a", "status": { "phase": "Running" } },
            { "name": "b", "status": { "phase": "Paused" } },
            { "name": "c", "status": { "phase": "Running" } },
            { "name": "d", "status": { "phase": "Running" } },
        ]});
        let metrics = "bellhop_nic_driver_ok{vm=\"a\",nic=\"x\"} 0\n\
                       bellhop_nic_driver_ok{vm=\"a\",nic=\"y\"} 1\n\
                       bellhop_nic_driver_ok{vm=\"b\",nic=\"x\"} 1\n\
                       bellhop_nic_driver_ok{vm=\"c\",nic=\"x\"} 0\n";
        assert_eq!(working(&all, metrics), BTreeSet::from(["a".to_owned()]));
        assert_eq!(names(&all), ["a", "b", "c", "d"]);
        assert!(names(&Value::Null).is_empty());
    }
}
