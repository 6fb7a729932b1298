//! The lab host: a virtual machine with real KVM and real vDPA drivers.
//!
//! ```text
//!            boot                     greeted
//!   (none) ───────▶ booting ────────────────────▶ ready ──▶ switched off
//!                     │  ▲                          │ dropped: killed
//!      known fault of │  │ once, counted            ▼
//!       the emulation └──┘                        (gone)
//! ```
//!
//! Several lab hosts may run at once, in one process or in several. Each host has its own console
//! log, its own sockets (unnamed pairs) and its own links (in an unnamed namespace). They share the
//! root, the cache and the repository, which are read-only or the developer's own. Only this
//! machine's memory is divided ([`LabHost::boot_beside`]).
//!
//! This module owns QEMU's process, which dies with the thread that booted it, and QEMU's monitor.
//! Commands run through [`crate::agent::client`].

use crate::accelerator::{Accelerator, PROBE_LIMIT};
use crate::agent::protocol::{BOOTED, Frame, Hello, Request, Setup, Share};
use crate::emulator;
use crate::error::{Error, Result};
use crate::files;
use crate::process::die_with_parent;
use crate::progress::Progress;
use crate::qmp::Qmp;
use crate::rig::{Equipment, PLAIN_HUB, Rig};
use crate::setup::Lab;
use serde_json::json;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A boot whose console is silent for this long hangs. The limit is longer than the host's kernel
/// takes to report a stuck processor ([`STUCK`]).
const SILENCE_LIMIT: Duration = Duration::from_secs(75);

/// A boot that takes longer hangs in another way.
const BOOT_LIMIT: Duration = Duration::from_secs(180);

/// With less memory, in bytes, a machine carries only one lab host: "8 GiB" less what firmware and
/// kernel reserve.
const TWO_HOSTS_MEMORY: u64 = 7 << 30;

/// How long the host may take to switch itself off.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(10);

/// How long the host may take to release a device.
const UNPLUG_LIMIT: Duration = Duration::from_secs(30);

/// A host whose kernel has been stuck for a minute (twice the threshold) panics, so that the lab
/// runs its tests again. The emulation sometimes loses an interrupt between processors, and one of
/// them then waits forever.
const STUCK: &str = "softlockup_panic=1 watchdog_thresh=30";

/// Two NUMA nodes, which the host's kernel creates: each has half of the memory and all processors.
/// NUMA balancing is off: it unmaps memory to observe its use. The emulation is slow at the faults
/// of a guest, and loses some guests there.
const NUMA: &str = "numa=fake=2 numa_balancing=disable";

/// At start Linux counts timer interrupts for a few milliseconds and panics when too few arrive. An
/// emulated host on a busy machine (a second lab host is enough) receives them late. On KVM, Linux
/// skips the check.
const TIMER: &str = "no_timer_check";

/// An emulated host on a busy machine compares its clocks late and marks the TSC as unstable. It
/// and its guests then read a slow clock. The emulated TSC is as good as this machine's.
const CLOCK: &str = "tsc=nowatchdog";

/// The lab host's address on the network of [`LabHost::forward`]: the first one of QEMU's.
pub const FORWARD_ADDRESS: &str = "10.0.2.15";

/// A lab host that has greeted.
#[derive(Debug)]
pub struct LabHost {
    qemu: Qemu,
    /// The agent's port.
    port: UnixStream,
    monitor: Qmp,
    rig: Rig,
    hello: Hello,
    retried: Option<String>,
    accelerator: Accelerator,
}

/// QEMU's process and the files it writes. Dropping it kills the process.
#[derive(Debug)]
struct Qemu {
    child: Child,
    console: PathBuf,
    /// False to remove the log with the process; true when it shows why something failed.
    keep_console: bool,
}

impl LabHost {
    /// Boots a lab host with the given rig, on the accelerator that works here.
    ///
    /// # Errors
    /// [`Error::Boot`] with the cause, also when QEMU cannot be started. A known fault of the
    /// emulation becomes an error only the second time.
    pub fn boot(lab: &Lab, rig: Rig) -> Result<Self> {
        Self::boot_beside(lab, rig, 1)
    }

    /// Boots like [`Self::boot`] where up to `hosts` lab hosts run on this machine at once.
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn boot_beside(lab: &Lab, rig: Rig, hosts: u8) -> Result<Self> {
        let memory = memory_mib(hosts);
        let accelerator = Accelerator::choose(&lab.cache, || {
            let _progress = Progress::start("trying nested KVM");
            attempt(lab, rig, memory, Accelerator::Kvm, PROBE_LIMIT)
                .is_ok_and(|(_, hello)| hello.kvm)
        });
        let progress = Progress::start("booting the lab host");
        let mut retried = None;
        loop {
            let (qemu, why) = match attempt(lab, rig, memory, accelerator, BOOT_LIMIT) {
                Ok((started, hello)) => {
                    drop(progress);
                    for problem in &hello.problems {
                        eprintln!("lab: in the lab host: {problem}");
                    }
                    return Ok(Self {
                        qemu: started.qemu,
                        port: started.port,
                        monitor: started.monitor,
                        rig,
                        hello,
                        retried,
                        accelerator,
                    });
                }
                Err(failed) => failed,
            };
            let mut console = PathBuf::new();
            let mut evidence = None;
            if let Some(mut qemu) = qemu {
                qemu.keep_console = true;
                console.clone_from(&qemu.console);
                if accelerator == Accelerator::Tcg && retried.is_none() {
                    evidence = qemu.emulator_fault(&why);
                }
            }
            let Some(evidence) = evidence else {
                return Err(Error::Boot { why, console });
            };
            eprintln!(
                "lab: boot retry: {evidence}; its console: {}",
                console.display()
            );
            retried = Some(evidence);
        }
    }

    /// The agent's greeting.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// The evidence of a fault of the emulation that failed the boot before this one.
    pub fn retried(&self) -> Option<&str> {
        self.retried.as_deref()
    }

    /// The process ID of its QEMU.
    pub fn pid(&self) -> u32 {
        self.qemu.child.id()
    }

    /// The accelerator that the host runs on.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The agent's port: frames in both directions.
    pub fn port(&mut self) -> &mut UnixStream {
        &mut self.port
    }

    /// Executes a request of a program in the host.
    ///
    /// # Errors
    /// [`Error::Usage`] for a link or a device that the rig does not have; those of
    /// [`Qmp::execute`].
    pub fn obey(&mut self, request: &Request) -> Result<()> {
        match request {
            Request::SetLink { link, up } => self.set_link(link, *up),
            Request::SetIgb { present } => self.set_igb(*present),
        }
    }

    fn set_link(&mut self, link: &str, up: bool) -> Result<()> {
        if !self.rig.links().contains(&link) {
            return Err(Error::Usage(format!(
                "the rig {} has no link {link:?}; its links: {}",
                self.rig.name(),
                match self.rig.links() {
                    [] => "none (use --rig sriov)".to_owned(),
                    links => links.join(" "),
                }
            )));
        }
        let arguments = json!({ "name": link, "up": up });
        self.monitor.execute("set_link", &arguments).map(drop)
    }

    /// Returns from unplugging when QEMU has deleted the device.
    fn set_igb(&mut self, present: bool) -> Result<()> {
        let Some(igb) = self.rig.igb() else {
            let rig = self.rig.name();
            return Err(Error::Usage(format!(
                "the rig {rig} has no igb NIC (use --rig sriov)"
            )));
        };
        if present {
            return self.monitor.execute("device_add", &igb).map(drop);
        }
        self.monitor
            .execute("device_del", &json!({ "id": igb["id"] }))?;
        let deadline = Instant::now() + UNPLUG_LIMIT;
        while Instant::now() < deadline {
            let devices = json!({ "path": "/machine/peripheral" });
            let devices = self.monitor.execute("qom-list", &devices)?;
            let mut devices = devices.as_array().into_iter().flatten();
            if !devices.any(|device| device["name"] == igb["id"]) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(Error::invalid(
            "the lab host",
            "it does not release the igb NIC",
        ))
    }

    /// Forwards a free TCP port of this machine's loopback interface to a port of the lab host, and
    /// returns it. The lab host needs the rig `sim`: it connects that rig's NIC without a cable,
    /// with the address [`FORWARD_ADDRESS`]. It reaches nothing through this network.
    ///
    /// # Errors
    /// [`Error::System`] without a free port; those of [`Qmp::execute`].
    pub fn forward(&mut self, port: u16) -> Result<u16> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|listener| listener.local_addr())
            .map_err(Error::system("find a free port"))?
            .port();
        let rule = format!("tcp:127.0.0.1:{free}-{FORWARD_ADDRESS}:{port}");
        let user = json!({
            "type": "user", "id": "forward", "restrict": true, "hostfwd": [{ "str": rule }],
        });
        let hub = json!({
            "type": "hubport", "id": "forward-hub", "hubid": PLAIN_HUB, "netdev": "forward",
        });
        for netdev in [user, hub] {
            self.monitor.execute("netdev_add", &netdev)?;
        }
        Ok(free)
    }

    /// For `map_err`: the agent's port broke.
    pub fn lost(&mut self, error: &io::Error) -> Error {
        self.qemu.keep_console = true;
        let why = match self.qemu.child.try_wait() {
            Ok(Some(status)) => format!("QEMU ended: {status}"),
            _ => error.to_string(),
        };
        Error::HostLost {
            why,
            console: self.qemu.console.clone(),
        }
    }

    /// Keeps the serial console's log and returns its path.
    pub fn keep_console(&mut self) -> &Path {
        self.qemu.keep_console = true;
        &self.qemu.console
    }

    /// Switches the host off and waits until its writes are here.
    ///
    /// # Errors
    /// [`Error::HostLost`] when it does not switch itself off in time.
    pub fn power_off(mut self) -> Result<()> {
        if let Err(error) = Frame::PowerOff.write(&mut self.port) {
            return Err(self.lost(&error));
        }
        let deadline = Instant::now() + POWER_OFF_LIMIT;
        while Instant::now() < deadline {
            if !matches!(self.qemu.child.try_wait(), Ok(None)) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(self.lost(&io::Error::other("it did not switch itself off")))
    }
}

impl Qemu {
    /// Evidence that the emulation failed a boot, not the lab's own code. It is a crash of a known
    /// kind, or a kernel that hangs before it starts that code.
    fn emulator_fault(&mut self, why: &str) -> Option<String> {
        let console = files::read_text(&self.console).unwrap_or_default();
        let runs = matches!(self.child.try_wait(), Ok(None));
        let hangs = runs && !console.contains(BOOTED);
        emulator::fault(&console).or_else(|| hangs.then(|| format!("{why}, before init ran")))
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // A process that has already ended is no error.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if !self.keep_console {
            let _ = std::fs::remove_file(&self.console);
            let _ = std::fs::remove_file(said_by_qemu(&self.console));
        }
    }
}

/// The file with QEMU's own messages.
fn said_by_qemu(console: &Path) -> PathBuf {
    console.with_extension("qemu")
}

type Failed = (Option<Qemu>, String);

/// A QEMU that has just started.
struct Started {
    qemu: Qemu,
    port: UnixStream,
    monitor: Qmp,
    setup: Setup,
}

/// Boots once, with this many MiB of memory.
fn attempt(
    lab: &Lab,
    rig: Rig,
    memory: u64,
    accelerator: Accelerator,
    limit: Duration,
) -> std::result::Result<(Started, Hello), Failed> {
    let mut started = start(lab, rig, memory, accelerator)
        .map_err(|error| (None, crate::error::report(&error)))?;
    match greeting(&mut started, limit) {
        Ok(hello) => Ok((started, hello)),
        Err(why) => Err((Some(started.qemu), why)),
    }
}

fn start(lab: &Lab, rig: Rig, memory: u64, accelerator: Accelerator) -> Result<Started> {
    let shares = shares(lab);
    let (port, agent) = UnixStream::pair().map_err(Error::system("create a socket"))?;
    let (monitor, control) = UnixStream::pair().map_err(Error::system("create a socket"))?;
    let Equipment {
        arguments,
        descriptors,
    } = rig.equip(&lab.root)?;
    let console = lab.cache.log(&console_name());
    if let Some(parent) = console.parent() {
        files::create_directory(parent)?;
    }
    files::write(&console, "")?;
    let messages = said_by_qemu(&console);
    let messages = std::fs::File::create(&messages).map_err(Error::file("create", &messages))?;
    let tree = lab.root.tree();
    let mut command = lab.root.program("usr/bin/qemu-system-x86_64");
    command
        .arg("-nodefaults")
        .arg("-no-user-config")
        .arg("-no-reboot")
        .args(["-display", "none", "-machine", rig.machine(), "-smp", "2"])
        .args(accelerator.qemu_arguments())
        .args(["-m", &format!("{memory}M")])
        .arg("-L")
        .arg(tree.join("usr/share/qemu"))
        .arg("-L")
        .arg(tree.join("usr/share/seabios"))
        .arg("-kernel")
        .arg(lab.root.kernel_image()?)
        .arg("-initrd")
        .arg(&lab.initramfs.host)
        .args([
            "-append",
            &format!(
                "console=ttyS0 loglevel=6 panic=-1 {STUCK} {TIMER} {CLOCK} {NUMA} \
                 mitigations=off {}",
                rig.kernel_parameters()
            ),
        ])
        .arg("-chardev")
        .arg(format!("file,id=console,path={}", escaped(&console)))
        .args(["-serial", "chardev:console"])
        .args(["-device", "virtio-serial-pci"])
        .args([
            "-chardev",
            &format!("socket,id=agent,fd={}", agent.as_raw_fd()),
        ])
        .args(["-device", "virtserialport,chardev=agent,name=lab"])
        .args([
            "-chardev",
            &format!("socket,id=monitor,fd={}", control.as_raw_fd()),
        ])
        .args(["-qmp", "chardev:monitor"])
        .args(["-object", "rng-random,id=rng,filename=/dev/urandom"])
        .args(["-device", "virtio-rng-pci,rng=rng"]);
    share(&mut command, "root", &tree, false);
    for one in &shares {
        share(&mut command, &one.tag, Path::new(&one.path), one.writable);
    }
    command
        .args(arguments)
        .env(
            "QEMU_MODULE_DIR",
            tree.join("usr/lib/x86_64-linux-gnu/qemu"),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(messages)
        // Ctrl-C on the terminal goes to the command in the host, not to QEMU.
        .process_group(0);
    let mut inherited = descriptors;
    inherited.extend([OwnedFd::from(agent), OwnedFd::from(control)]);
    // SAFETY: needed because the descriptors must survive exec in the child and
    // in no other one. The closure runs between fork and exec and makes system
    // calls on descriptors that it owns: no lock, no allocation.
    unsafe {
        command.pre_exec(move || {
            for descriptor in &inherited {
                rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::empty())?;
            }
            Ok(())
        });
    }
    let child = die_with_parent(&mut command)
        .spawn()
        .map_err(|source| Error::Start {
            program: "QEMU of the lab host's root".into(),
            source,
        })?;
    let setup = Setup {
        shares,
        modules: rig.modules(lab.kernels.modules()),
    };
    let qemu = Qemu {
        child,
        console,
        keep_console: false,
    };
    Ok(Started {
        qemu,
        port,
        monitor: Qmp::new(monitor)?,
        setup,
    })
}

/// Sends the setup and waits for the agent's greeting, watching the console.
fn greeting(started: &mut Started, limit: Duration) -> std::result::Result<Hello, String> {
    let Started {
        qemu, port, setup, ..
    } = started;
    let failed = |error: io::Error| format!("the agent's port: {error}");
    Frame::Setup(setup.clone()).write(port).map_err(failed)?;
    port.set_read_timeout(Some(Duration::from_millis(50)))
        .map_err(failed)?;
    let begin = Instant::now();
    let mut silent_since = begin;
    let mut size = 0;
    let mut first = [0; 1];
    loop {
        // Peeks whether the greeting has begun. The code below reads it in one piece, without the
        // timeout that could cut it.
        match rustix::net::recv(&*port, &mut first, rustix::net::RecvFlags::PEEK) {
            Ok((1.., _)) => break,
            // Closed or reset: QEMU ends, and its own message is the better reason.
            Ok(_)
            | Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNRESET,
            ) => {}
            Err(error) => return Err(failed(error.into())),
        }
        if let Ok(Some(status)) = qemu.child.try_wait() {
            let said = files::read_text(&said_by_qemu(&qemu.console)).unwrap_or_default();
            return Err(format!(
                "QEMU ended ({status}): {}",
                files::last_lines(&said, 5)
            ));
        }
        let now = Instant::now();
        let length = std::fs::metadata(&qemu.console).map_or(0, |data| data.len());
        if length != size {
            size = length;
            silent_since = now;
        }
        if now.duration_since(silent_since) > SILENCE_LIMIT {
            return Err(format!(
                "its console was silent for {} s",
                SILENCE_LIMIT.as_secs()
            ));
        }
        if now.duration_since(begin) > limit {
            return Err(format!("it took more than {} s", limit.as_secs()));
        }
    }
    port.set_read_timeout(None).map_err(failed)?;
    match Frame::read(port).map_err(failed)? {
        Frame::Hello(hello) => Ok(hello),
        _ => Err("the agent did not greet first".into()),
    }
}

/// The directories that the lab host mounts at their own paths. The repository and the build are
/// writable, because tests leave logs and snapshots there; the cache is read-only.
fn shares(lab: &Lab) -> Vec<Share> {
    let mut shares = vec![Share {
        tag: "repository".into(),
        path: lab.repository.to_string_lossy().into_owned(),
        writable: true,
    }];
    if !lab.bellhop.starts_with(&lab.repository) {
        // CARGO_TARGET_DIR is elsewhere: TARGET/TRIPLE/PROFILE/bellhop.
        if let Some(target) = lab.bellhop.ancestors().nth(3) {
            shares.push(Share {
                tag: "build".into(),
                path: target.to_string_lossy().into_owned(),
                writable: true,
            });
        }
    }
    shares.push(Share {
        tag: "cache".into(),
        path: lab.cache.directory().to_string_lossy().into_owned(),
        writable: false,
    });
    shares
}

fn share(command: &mut Command, tag: &str, path: &Path, writable: bool) {
    let readonly = if writable { "off" } else { "on" };
    command
        .arg("-fsdev")
        .arg(format!(
            "local,id={tag},path={},security_model=none,multidevs=remap,readonly={readonly}",
            escaped(path)
        ))
        .arg("-device")
        .arg(format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"));
}

/// A path as the value of a QEMU option: commas are doubled.
fn escaped(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// A name for the console log, unique for each QEMU of each process.
fn console_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("console-{}-{number}", std::process::id())
}

/// The lab host's memory in MiB, 2 to 6 GiB. One host gets half of this machine's memory; several
/// hosts get equal shares of three quarters.
fn memory_mib(hosts: u8) -> u64 {
    let machine = machine_memory() >> 20;
    let part = match hosts {
        0 | 1 => machine / 2,
        hosts => machine / 4 * 3 / u64::from(hosts),
    };
    part.clamp(2048, 6144)
}

/// How many lab hosts this machine carries at once by default: two with two processors and memory
/// for both, else one.
pub fn hosts_at_once() -> u8 {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if processors >= 2 && machine_memory() >= TWO_HOSTS_MEMORY {
        2
    } else {
        1
    }
}

/// This machine's memory in bytes.
fn machine_memory() -> u64 {
    let information = rustix::system::sysinfo();
    u64::from(information.mem_unit).saturating_mul(information.totalram)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled() {
        assert_eq!(escaped(Path::new("/a,b")), "/a,,b");
    }

    #[test]
    fn memory_stays_in_bounds() {
        for hosts in [0, 1, 2, u8::MAX] {
            assert!((2048..=6144).contains(&memory_mib(hosts)), "{hosts}");
        }
    }

    #[test]
    fn every_console_has_its_own_log() {
        assert_ne!(console_name(), console_name());
    }
}
