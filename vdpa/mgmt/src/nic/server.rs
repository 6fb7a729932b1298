//! The process that serves a software NIC: started, found again, ended.
//!
//! ```text
//!   start ── PROGRAM swnic NAME --serve … ──> lock on NAME.lock ─> tap, VDUSE device ─> "ready"
//!   holder ── F_GETLK ──> the process that has the lock: no other process can have its number
//!   stop   ── SIGTERM through a pidfd ──> the lock is free
//!   resume ── SIGCONT through a pidfd ──> a process that was stopped continues
//! ```
//! The process outlives its parent. A process that follows a killed one continues with the device
//! and the tap that are there, so a guest notices nothing. The directory is [`DIRECTORY`]: the
//! lock, the log and the in-flight record of each.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, FlockOperation, fcntl_lock};
use rustix::process::{
    Flock, FlockType, Pid, PidfdFlags, Signal, fcntl_getlk, pidfd_open, pidfd_send_signal,
};
use serde::{Deserialize, Serialize};
use vdpa::vduse::nic::IN_FLIGHT_SIZE;

use super::port_queue::PortQueue;
use crate::connectivity::Connectivity;
use crate::new_device::check_name;

/// Locks, logs and in-flight records of the processes that serve software NICs.
pub const DIRECTORY: &str = "/run/bellhop/swnic";
/// The word by which a process says that it serves its NIC. Any other text is its error.
const READY: &str = "ready";
/// Most bytes of an error.
const ERROR_MAX: u64 = 4096;
/// Variables that the process receives. The others may be secrets.
const KEPT: [&str; 2] = ["BELLHOP_LOG_FORMAT", "RUST_BACKTRACE"];
/// The interval of checks of a process that should end.
const PAUSE: Duration = Duration::from_millis(5);

/// The settings of a software NIC: those that its process needs, beside the name, and those of its
/// tap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// The tap. `None`: the NIC has a queue of a port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Whether the tap was created for the NIC, and is deleted with it.
    pub is_own_tap: bool,
    /// The queue of a port, for a NIC without a tap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<PortQueue>,
    /// The address of the guest's interface.
    pub mac: [u8; 6],
    /// The largest packet, in bytes, without the Ethernet header.
    pub mtu: u16,
    /// The virtio features to offer, as a mask.
    pub features: u64,
    /// The queue pairs. Records of older programs do not have them.
    #[serde(default = "one_pair")]
    pub pairs: u16,
    /// The share of a processor that each pair may spend on polling, in percent.
    #[serde(default)]
    pub poll_percent: u8,
    /// The connection of the tap. Records of older programs do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connectivity: Option<Connectivity>,
    /// The interface index of the tap, once that is connected. `None`: the tap may be new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap_index: Option<u32>,
}

const fn one_pair() -> u16 {
    1
}

impl fmt::Display for Service {
    /// Where its frames go.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.port, &self.tap) {
            (Some(PortQueue { interface, queue }), _) => {
                write!(f, "queue {queue} of the port {interface}")
            }
            (None, tap) => write!(f, "the tap {}", tap.as_deref().unwrap_or_default()),
        }
    }
}

impl Service {
    /// The tap, if it is deleted with the NIC.
    pub(super) fn own_tap(&self) -> Option<&str> {
        self.tap.as_deref().filter(|_| self.is_own_tap)
    }

    /// Whether nothing is left to connect.
    pub(super) fn is_connected(&self) -> bool {
        self.tap.is_none() || self.tap_index.is_some()
    }

    /// The words of the command line that serve it, after the program's name.
    fn arguments(&self, name: &str) -> Vec<String> {
        let mut words: Vec<String> = ["swnic", name, "--serve"].map(str::to_owned).into();
        if let Some(tap) = &self.tap {
            words.extend(["--tap".to_owned(), tap.clone()]);
        }
        if let Some(PortQueue { interface, queue }) = &self.port {
            words.extend(["--port".to_owned(), interface.clone()]);
            words.extend(["--queue".to_owned(), queue.to_string()]);
        }
        words.extend(["--mac".to_owned(), crate::error::mac(self.mac).to_string()]);
        words.extend(["--mtu".to_owned(), self.mtu.to_string()]);
        let features = format!("{:#x}", self.features);
        words.extend(["--device-features".to_owned(), features]);
        words.extend(["--queue-pairs".to_owned(), self.pairs.to_string()]);
        if self.poll_percent > 0 {
            words.extend(["--poll".to_owned(), self.poll_percent.to_string()]);
        }
        if self.is_own_tap {
            words.push("--own-tap".to_owned());
        }
        words
    }
}

fn file(name: &str, suffix: &str) -> io::Result<PathBuf> {
    check_name(name).map_err(io::Error::other)?;
    Ok(Path::new(DIRECTORY).join(format!("{name}.{suffix}")))
}

/// Files of root only; links are not followed.
fn own() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW);
    options
}

/// Starts the process, and waits until it serves the NIC.
///
/// # Errors
/// The program cannot be executed, does not answer in time, or reports an error.
pub(super) fn start(
    program: &Path,
    name: &str,
    service: &Service,
    patience: Duration,
) -> io::Result<()> {
    let log = file(name, "log")?;
    fs::create_dir_all(DIRECTORY)?;
    let errors = own().append(true).open(&log)?;
    let mut command = Command::new(program);
    command
        .arg0("bellhop")
        .args(service.arguments(name))
        .env_clear()
        .envs(
            KEPT.iter()
                .filter_map(|name| Some((name, std::env::var_os(name)?))),
        )
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors);
    // SAFETY: there is no safe way to begin a session in a child. The closure runs between fork
    // and exec, and makes one system call, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::setsid().map(drop)?));
    }
    let mut child = command.spawn()?;
    let said = match child.stdout.take() {
        Some(output) => answer(output, patience),
        None => Err(io::ErrorKind::BrokenPipe.into()),
    };
    match said.as_deref().map(str::trim) {
        Ok(READY) => reap(child),
        Ok("") => {
            let status = child.wait()?;
            Err(io::Error::other(format!(
                "the process that serves it ended with {status}; its log is {}",
                log.display()
            )))
        }
        Ok(error) => {
            child.wait()?;
            Err(io::Error::other(error.to_owned()))
        }
        Err(_) => {
            child.kill()?;
            child.wait()?;
            said.map(drop)
        }
    }
}

/// The text of a child until it closes its output.
fn answer(output: ChildStdout, patience: Duration) -> io::Result<String> {
    let mut ready = [PollFd::new(&output, PollFlags::IN)];
    let limit = Timespec::try_from(patience).map_err(io::Error::other)?;
    // A signal that ends this program must not look like an error of the child.
    if rustix::io::retry_on_intr(|| poll(&mut ready, Some(&limit)))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut text = String::new();
    output.take(ERROR_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// Waits for the end of a child in a thread, so that it leaves no zombie while this process runs.
fn reap(mut child: Child) -> io::Result<()> {
    let thread = thread::Builder::new().name("swnic-end".to_owned());
    thread.spawn(move || child.wait()).map(drop)
}

/// The process that serves the NIC, if there is one.
///
/// # Errors
/// The lock cannot be read.
pub fn holder(name: &str) -> io::Result<Option<Pid>> {
    let lock = match File::open(file(name, "lock")?) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        lock => lock?,
    };
    let held = fcntl_getlk(&lock, &Flock::from(FlockType::ReadLock))?;
    Ok(held.and_then(|held| held.pid))
}

/// Whether a process serves the NIC: there is one, and it is not stopped.
///
/// # Errors
/// The lock cannot be read.
pub fn is_served(name: &str) -> io::Result<bool> {
    Ok(holder(name)?.is_some_and(|pid| !is_stopped(pid)))
}

/// Whether a signal has stopped a process.
fn is_stopped(pid: Pid) -> bool {
    let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    // A name may have spaces and parentheses, so the state follows the last one.
    let state = stat.rsplit(|byte| *byte == b')').next();
    state.is_some_and(|state| state.starts_with(b" T"))
}

/// Continues the process that serves the NIC if it was stopped. `false`: there is none.
///
/// # Errors
/// It cannot be signalled.
pub(super) fn resume(name: &str) -> io::Result<bool> {
    let pid = holder(name)?;
    pid.map_or(Ok(false), |pid| signal(name, pid, &[Signal::CONT]))
}

/// Sends signals to the process that serves the NIC. `false`: it is not this one any more.
fn signal(name: &str, pid: Pid, signals: &[Signal]) -> io::Result<bool> {
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(false),
        pidfd => pidfd?,
    };
    // Still the holder, so the number is that of the process behind the pidfd.
    if holder(name)? != Some(pid) {
        return Ok(false);
    }
    for &signal in signals {
        pidfd_send_signal(&pidfd, signal)?;
    }
    Ok(true)
}

/// Ends the process that serves the NIC, if there is one. A stopped one continues for that.
///
/// # Errors
/// It cannot be signalled, or does not end in time.
pub(super) fn stop(name: &str, patience: Duration) -> io::Result<()> {
    let begin = Instant::now();
    let mut signalled = None;
    while let Some(pid) = holder(name)? {
        if signalled != Some(pid) {
            if !signal(name, pid, &[Signal::TERM, Signal::CONT])? {
                continue;
            }
            signalled = Some(pid);
        }
        if begin.elapsed() > patience {
            return Err(io::Error::other(format!(
                "process {} does not end",
                pid.as_raw_pid()
            )));
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Removes the files of a NIC that is deleted.
pub(super) fn forget(name: &str) {
    for suffix in ["lock", "log", "in-flight"] {
        if let Ok(path) = file(name, suffix) {
            // It may be gone.
            let _ = fs::remove_file(path);
        }
    }
}

/// The lock of the process that serves a NIC, until it ends.
#[derive(Debug)]
pub struct ServerLock {
    name: String,
    /// Its only descriptor: closing another one of this file would release the lock (fcntl(2)).
    _file: File,
}

impl ServerLock {
    /// Takes the lock.
    ///
    /// # Errors
    /// Another process has it, or the directory cannot be used.
    pub fn take(name: &str) -> io::Result<Self> {
        fs::create_dir_all(DIRECTORY)?;
        let file = own()
            .write(true)
            .truncate(false)
            .open(file(name, "lock")?)?;
        match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => Err(io::Error::other(
                format!("another process serves {name}: choose another name"),
            )),
            locked => {
                locked?;
                Ok(Self {
                    name: name.to_owned(),
                    _file: file,
                })
            }
        }
    }

    /// Opens the in-flight record for a worker ([`IN_FLIGHT_SIZE`]). That of a new NIC is empty.
    ///
    /// # Errors
    /// The directory is full, or cannot be used.
    pub fn in_flight(&self, is_new: bool) -> io::Result<OwnedFd> {
        let path = file(&self.name, "in-flight")?;
        let record = own().read(true).write(true).truncate(is_new).open(path)?;
        // A worker without the whole file would end with SIGBUS.
        rustix::fs::fallocate(&record, FallocateFlags::empty(), 0, IN_FLIGHT_SIZE)?;
        Ok(record.into())
    }

    /// Reports to the process that started this one that the NIC is served, and closes the output.
    ///
    /// # Errors
    /// The parent has ended.
    pub fn ready(&self) -> io::Result<()> {
        let mut output = io::stdout();
        output.write_all(READY.as_bytes())?;
        output.flush()?;
        let null = OpenOptions::new().write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdout(null)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_all_that_is_recorded() {
        let service = Service {
            tap: Some("tap0".to_owned()),
            is_own_tap: true,
            port: None,
            mac: [2, 0, 0, 0, 0, 7],
            mtu: 9000,
            features: 1 << 33,
            pairs: 4,
            poll_percent: 25,
            connectivity: Some("bridge=br0,vlan=100,mtu=9000".parse().unwrap()),
            tap_index: Some(7),
        };
        let words = service.arguments("sw0").join(" ");
        let expected = "swnic sw0 --serve --tap tap0 --mac 02:00:00:00:00:07 --mtu 9000 \
                        --device-features 0x200000000 --queue-pairs 4 --poll 25 --own-tap";
        assert_eq!(words, expected);
        let record = serde_json::to_string(&service).unwrap();
        assert_eq!(serde_json::from_str::<Service>(&record).unwrap(), service);
        let service = Service {
            tap: None,
            is_own_tap: false,
            port: Some("port=eth1,queue=3".parse().unwrap()),
            pairs: 1,
            poll_percent: 0,
            ..service
        };
        let words = service.arguments("sw0").join(" ");
        let expected = "swnic sw0 --serve --port eth1 --queue 3 --mac 02:00:00:00:00:07 --mtu 9000 \
                        --device-features 0x200000000 --queue-pairs 1";
        assert_eq!(words, expected);
        let record = serde_json::to_string(&service).unwrap();
        assert_eq!(serde_json::from_str::<Service>(&record).unwrap(), service);
    }

    #[test]
    fn a_record_of_an_older_program_is_read() {
        let record =
            r#"{"tap":"tap0","is_own_tap":true,"mac":[2,0,0,0,0,7],"mtu":1500,"features":0}"#;
        let service: Service = serde_json::from_str(record).unwrap();
        assert_eq!((service.pairs, service.poll_percent), (1, 0));
        assert_eq!((&service.connectivity, service.tap_index), (&None, None));
        let service = Service {
            pairs: 16,
            ..service
        };
        let record = serde_json::to_string(&service).unwrap();
        assert_eq!(serde_json::from_str::<Service>(&record).unwrap(), service);
    }

    #[test]
    fn a_stopped_process_is_found() {
        let own = rustix::process::getpid();
        assert!(!is_stopped(own));
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        rustix::process::kill_process(pid, Signal::STOP).unwrap();
        let begin = Instant::now();
        while !is_stopped(pid) {
            assert!(begin.elapsed() < Duration::from_secs(20));
            thread::sleep(PAUSE);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_stopped(pid));
    }

    #[test]
    fn names_stay_in_the_directory() {
        for name in ["", "..", "a/b", "a\0b"] {
            file(name, "lock").unwrap_err();
        }
    }
}
