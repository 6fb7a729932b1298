//! A node daemon of a test, and its traces on the host.

pub(crate) mod steps;

use self::steps::{Shown, Steps};
use lab::api::Client;
use lab::guest::Guest;
use lab::node::small;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long an action may take; it is emulated twice.
pub(crate) const NOTICE: Duration = Duration::from_secs(60);

/// Waits until the condition holds.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < NOTICE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A NIC that is created on the simulator.
pub(crate) fn nic(id: &str, mac: &str) -> Value {
    json!({ "id": id, "from": "vdpasim_net", "mac": mac, "mtu": 1500 })
}

/// A daemon with its own directories. Dropping it kills the daemon and its VMs.
#[derive(Debug)]
pub(crate) struct Daemon {
    directory: PathBuf,
    child: Option<Child>,
    pub(crate) api: Client,
}

impl Daemon {
    /// Starts a daemon.
    pub(crate) fn start(test: &str) -> Self {
        let mut daemon = Self::prepare(test);
        daemon.start_again();
        daemon
    }

    /// A daemon that does not run yet.
    pub(crate) fn prepare(test: &str) -> Self {
        let directory =
            std::env::temp_dir().join(format!("lab-node-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        Self {
            api: Client::new(&directory.join("run/node.socket")),
            directory,
            child: None,
        }
    }

    /// Its state directory.
    #[allow(dead_code, reason = "not every test looks at files")]
    pub(crate) fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// Its process.
    #[allow(dead_code, reason = "not every test looks at the process")]
    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(self.child.as_ref().unwrap())
    }

    /// Starts it again, with the same directories.
    pub(crate) fn start_again(&mut self) {
        self.spawn(None);
        until("the daemon serves", || self.api.get("/v1/version").is_ok());
    }

    /// Starts it again and shows its steps.
    pub(crate) fn start_observed(&mut self, steps: &Steps) -> Shown {
        self.spawn(Some(steps));
        let mut shown = steps.accept();
        // Its work on existing VMs comes first.
        let api = self.api.clone();
        let served = std::thread::spawn(move || {
            until("the daemon serves", || api.get("/v1/version").is_ok());
        });
        while !served.is_finished() {
            if shown.is_there() {
                shown.next();
                shown.resume();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        served.join().unwrap();
        shown
    }

    /// A file outside the daemon's directories.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.directory.with_extension(name)
    }

    fn command(&self, state: &str) -> Command {
        let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
        command
            .args(["--log-level", "info", "serve"])
            .args(["--machine-log-level", "info"])
            .arg("--state-dir")
            .arg(self.directory.join(state))
            .arg("--runtime-dir")
            .arg(self.directory.join("run"))
            .stdin(Stdio::null());
        command
    }

    /// Starts its process, and does not wait.
    pub(crate) fn spawn(&mut self, steps: Option<&Steps>) {
        let mut command = self.command("state");
        command
            .args(steps.map(|_| "--step-observer"))
            .args(steps.map(Steps::path));
        self.child = Some(command.spawn().unwrap());
    }

    /// Starts it with an empty state directory, which it refuses. Returns its log.
    pub(crate) fn refused_with_empty_state(&self) -> String {
        let mut command = self.command("empty");
        let mut refused = command.stderr(Stdio::piped()).spawn().unwrap();
        let begin = Instant::now();
        while refused.try_wait().unwrap().is_none() {
            if begin.elapsed() > NOTICE {
                // It would serve for ever.
                refused.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let refused = refused.wait_with_output().unwrap();
        fs::remove_dir_all(self.directory.join("empty")).unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        said
    }

    /// The control groups of its VMs.
    pub(crate) fn groups(&self) -> PathBuf {
        let runtime = self.directory.join("run").display().to_string();
        let name = runtime.trim_matches('/').replace('/', "-");
        PathBuf::from(format!("/sys/fs/cgroup/bellhop:{name}"))
    }

    /// Processes that are marked as VMs of this daemon.
    #[allow(dead_code, reason = "not every test kills single processes")]
    pub(crate) fn processes(&self) -> BTreeSet<u32> {
        marked(&self.directory)
    }

    /// Kills all processes that are marked as VMs of this daemon.
    pub(crate) fn kill_marked(&self) {
        for pid in marked(&self.directory) {
            let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    /// Ends it with SIGKILL.
    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Ends it, with SIGKILL or SIGTERM, and starts it again.
    pub(crate) fn restart(&mut self, kill: bool) {
        if kill {
            self.kill();
        } else {
            let mut child = self.child.take().unwrap();
            let pid = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            assert!(child.wait().unwrap().success());
        }
        self.start_again();
    }

    /// A VM whose guest does nothing, with these NICs, which it ignores.
    pub(crate) fn tiny(&self, nics: &Value) -> Value {
        let kernel = lab::tiny::write_kernel(&std::env::temp_dir()).unwrap();
        let spec = json!({ "kernel": kernel, "memory": "32M", "nics": nics });
        json!({ "spec": spec })
    }

    /// A VM with the lab's small guest and these NICs.
    pub(crate) fn small(&self, nics: &Value) -> Value {
        small(nics).unwrap()
    }

    /// Waits until the guest of a VM is ready, and connects to its console.
    #[allow(dead_code, reason = "not every test has guests that answer")]
    #[track_caller]
    pub(crate) fn guest(&self, vm: &str) -> Guest {
        let info = self.await_phase(vm, "Running");
        attach(&info).unwrap()
    }

    /// Deletes a VM, running or not.
    #[track_caller]
    pub(crate) fn delete(&self, vm: &str) {
        let path = format!("/v1/vms/{vm}?force=true");
        self.api.done("DELETE", &path, None).unwrap();
    }

    /// Waits until a VM is in this phase.
    #[track_caller]
    pub(crate) fn await_phase(&self, vm: &str, phase: &str) -> Value {
        let mut last = Value::Null;
        let start = Instant::now();
        while start.elapsed() < NOTICE {
            last = self.api.get(&format!("/v1/vms/{vm}")).unwrap();
            if last["status"]["phase"] == phase {
                return last;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{vm} is not {phase}: {last:#}");
    }

    /// Waits until a guest has printed these words.
    #[track_caller]
    pub(crate) fn await_console(&self, vm: &str, words: &str) {
        let info = self.api.get(&format!("/v1/vms/{vm}")).unwrap();
        let log = PathBuf::from(info["status"]["console"]["log"].as_str().unwrap());
        until(words, || {
            let text = fs::read(&log).unwrap_or_default();
            String::from_utf8_lossy(&text).contains(words)
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Deletes what a failed test has left.
            let all = self.api.get("/v1/vms").unwrap_or_default();
            for vm in all["items"].as_array().into_iter().flatten() {
                let name = vm["name"].as_str().unwrap_or_default();
                let path = format!("/v1/vms/{name}?force=true");
                let _ = self.api.ask("DELETE", &path, None);
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Connects to the console of a VM, as the API describes it.
#[allow(dead_code, reason = "not every test has guests that answer")]
pub(crate) fn attach(vm: &Value) -> lab::Result<Guest> {
    let status = &vm["status"];
    let console = Path::new(status["console"]["socket"].as_str().unwrap_or_default());
    let pid = status["pid"]
        .as_u64()
        .and_then(|pid| u32::try_from(pid).ok());
    Guest::attach(console, pid.unwrap_or_default(), 2 * NOTICE)
}

/// Kills a machine's process.
pub(crate) fn kill_vm(vm: &Value) {
    let pid = i32::try_from(vm["status"]["pid"].as_i64().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// What a node's VMs may leave behind on the host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Traces {
    devices: BTreeSet<String>,
    files: BTreeSet<PathBuf>,
    processes: BTreeSet<u32>,
    groups: BTreeSet<PathBuf>,
    descriptors: usize,
}

impl Traces {
    /// The current traces.
    pub(crate) fn now(daemon: &Daemon) -> Self {
        let mut files = BTreeSet::new();
        list(&daemon.directory, &mut files);
        // The daemon creates the VMs' directories and the lock with the first VM.
        files.retain(|file| {
            let name = file.file_name().unwrap();
            name != "vms" && name != "nics" && name != "lock"
        });
        let devices = fs::read_dir("/sys/bus/vdpa/devices").unwrap();
        let names = devices.map(|entry| entry.unwrap().file_name());
        let daemon_pid = daemon.child.as_ref().map(Child::id);
        Self {
            devices: names
                .map(|name| name.to_string_lossy().into_owned())
                .collect(),
            files,
            processes: marked(&daemon.directory),
            groups: directories(&daemon.groups()),
            descriptors: daemon_pid.map_or(0, |pid| {
                fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
            }),
        }
    }

    /// Waits for the same traces. A worker of the daemon may have held a descriptor when `self` was
    /// taken, so fewer descriptors are accepted.
    #[track_caller]
    pub(crate) fn same(&self, daemon: &Daemon) {
        let start = Instant::now();
        loop {
            let mut now = Self::now(daemon);
            now.descriptors = now.descriptors.max(self.descriptors);
            if now == *self {
                return;
            }
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "before: {self:#?}\nnow: {now:#?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The directories in a directory.
fn directories(directory: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let entries = entries.map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).collect()
}

fn list(directory: &Path, files: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten() {
        let entry = entry.unwrap();
        files.insert(entry.path());
        if entry.file_type().unwrap().is_dir() {
            list(&entry.path(), files);
        }
    }
}

/// Processes whose environment names this directory, including zombies.
fn marked(directory: &Path) -> BTreeSet<u32> {
    let mark = format!("BELLHOP_VM={}", directory.display());
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").unwrap() {
        let entry = entry.unwrap();
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        if variables.any(|variable| variable.starts_with(mark.as_bytes())) {
            found.insert(pid);
        }
    }
    found
}
