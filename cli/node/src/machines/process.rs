//! Processes that run VMs: started, found again, ended.
//!
//! ```text
//!   start ──> own session, marked in its environment ──> Identity (pid, start time)
//!   find the mark in /proc ─────────────────────────────────^   a daemon that was killed
//!   Identity ──open──> Process (a pidfd: its number cannot be reused)
//!                        └─ SIGTERM ─ grace ─> SIGKILL ─> reaped if it is ours
//! ```
//! A pid alone names its current holder. So pid and start time identify a process. Signals go
//! through a pidfd that was opened before the comparison of the start time.
//!
//! Owns pids, pidfds and `/proc/PID`.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal,
};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

/// The environment variable that marks a process, even before it does anything.
const MARK: &str = "BELLHOP_VM";
/// The environment variable with the path of the log file, which the process rotates. It is a
/// variable because a program of another version ignores unknown ones when it takes over.
const LOG_FILE: &str = "BELLHOP_LOG_FILE";
/// Maximum size of an environment in bytes. This program never passes a longer one.
const ENVIRONMENT_MAX: u64 = 256 * 1024;
/// The kernel ends a VM before the daemon, whose value is lower.
const OOM_SCORE_ADJ: &[u8] = b"100";
/// Index of the start time, the 22nd field of `/proc/PID/stat`, counted from the field after the
/// name in parentheses (proc_pid_stat(5)).
const START_TIME_BEHIND_NAME: usize = 19;

/// Identifies a process across daemons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// The process ID.
    pub(crate) pid: u32,
    /// When it started, in clock ticks since the host's boot.
    pub(crate) start_time: u64,
}

impl Identity {
    /// Its age in whole seconds of the host, including time in suspend.
    pub(crate) fn age_s(self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let started = self.start_time / rustix::param::clock_ticks_per_second().max(1);
        u64::try_from(now.tv_sec)
            .unwrap_or_default()
            .saturating_sub(started)
    }
}

#[cfg(test)]
impl Identity {
    /// That of this process.
    pub(crate) fn own() -> Self {
        let pid = std::process::id();
        let start_time = start_time(pid).unwrap();
        Self { pid, start_time }
    }
}

/// An opened process: its number is not reused while this exists.
#[derive(Debug)]
pub(crate) struct Process {
    identity: Identity,
    pidfd: OwnedFd,
}

/// The parameters of a new process.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    /// The arguments after the program's name.
    pub(crate) arguments: Vec<OsString>,
    /// The mark that identifies it.
    pub(crate) mark: &'a Path,
    /// The file to which its log lines, standard output and standard error are appended.
    pub(crate) log: &'a Path,
    /// The user to whom it changes, which then owns the log.
    pub(crate) user: Option<u32>,
    /// Moves it into its control group.
    pub(crate) group: Option<File>,
}

/// Variables of the daemon's environment that a VM's process receives. The others may be secrets.
const KEPT: [&str; 3] = ["BELLHOP_LOG_FORMAT", "BELLHOP_SECCOMP", "RUST_BACKTRACE"];

/// The path of this program, to start another process of it.
///
/// After an update another file is at the path that started this process; the new process must run
/// that one. If the path is gone, the file of this process still exists without a name.
pub(crate) fn program() -> PathBuf {
    let running = PathBuf::from("/proc/self/exe");
    let Ok(path) = std::env::current_exe() else {
        return running;
    };
    const DELETED: &[u8] = b" (deleted)";
    let name = path.as_os_str().as_bytes();
    let name = name.strip_suffix(DELETED).unwrap_or(name);
    let path = PathBuf::from(OsStr::from_bytes(name));
    if path.is_file() { path } else { running }
}

/// Starts a process of this program in a session of its own, so that it outlives this one.
///
/// # Errors
/// The program or its log cannot be used.
pub(crate) fn start(start: Start<'_>) -> io::Result<Process> {
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(start.log)?;
    if let Some(user) = start.user {
        fchown(&log, Some(user), Some(user))?;
    }
    let mut command = Command::new(program());
    command
        .arg0("bellhop")
        .args(&start.arguments)
        .env_clear()
        .envs(
            KEPT.iter()
                .filter_map(|name| Some((name, std::env::var_os(name)?))),
        )
        .env(MARK, start.mark)
        .env(LOG_FILE, start.log)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let group = start.group;
    // SAFETY: there is no safe way to begin a session or to change the control group in a child.
    // The closure runs between fork and exec. It makes four system calls, setsid(2), open(2),
    // write(2) and close(2), which are async-signal-safe; it allocates nothing.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            if let Some(group) = &group {
                rustix::io::write(group, b"0")?;
            }
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let score = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
            match rustix::io::write(score, OOM_SCORE_ADJ) {
                // In a container the daemon may have a higher value, which it may not lower.
                Ok(_) | Err(Errno::ACCESS) => Ok(()),
                Err(error) => Err(error.into()),
            }
        });
    }
    let child = if start.user.is_some() {
        spawn_first(&mut command)?
    } else {
        command.spawn()?
    };
    // Not reaped yet, so its number is not reused.
    let pid = child.id();
    let pidfd = pidfd_open(pid_of(pid)?, PidfdFlags::empty())?;
    let start_time = start_time(pid)?;
    Ok(Process {
        identity: Identity { pid, start_time },
        pidfd,
    })
}

/// Spawns the first process of a new PID namespace: it sees and signals no other process. When it
/// ends, the kernel kills all that it has started.
fn spawn_first(command: &mut Command) -> io::Result<Child> {
    // Children of this thread get the namespace, those of other threads do not.
    let spawned = thread::scope(|scope| {
        let thread = thread::Builder::new().name("spawn".to_owned());
        let thread = thread.spawn_scoped(scope, || {
            // SAFETY: needed because rustix has no safe call: CLONE_FILES would invalidate
            // descriptors that threads share. It is not among the flags.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID) }?;
            command.spawn()
        });
        Ok::<_, io::Error>(thread?.join())
    })?;
    spawned.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// The processes that have this mark.
///
/// # Errors
/// `/proc` cannot be read.
pub(crate) fn find(mark: &Path) -> io::Result<Vec<Identity>> {
    let marked = all_marked()?;
    let found = marked.into_iter().filter(|(one, _)| one == mark);
    Ok(found.map(|(_, identity)| identity).collect())
}

/// The processes that have a mark, with their marks. Any user can start a process with a mark. So a
/// process only counts if it has the daemon's user, or the owner of the directory that its mark
/// names.
///
/// # Errors
/// `/proc` cannot be read.
pub(crate) fn all_marked() -> io::Result<Vec<(PathBuf, Identity)>> {
    let own = rustix::process::geteuid().as_raw();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // A process may exit during the check.
        let (Some(user), Some(mark), Ok(start_time)) =
            (user_of(pid), mark_of(pid), start_time(pid))
        else {
            continue;
        };
        let is_given = || fs::symlink_metadata(&mark).is_ok_and(|mark| mark.uid() == user);
        if user == own || is_given() {
            found.push((mark, Identity { pid, start_time }));
        }
    }
    Ok(found)
}

/// The user of a process. None: it ended, or it has several: another user started a set-user-ID
/// program.
fn user_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let mut users = users.split_whitespace().map(str::parse);
    let user: u32 = users.next()?.ok()?;
    users.all(|other| other == Ok(user)).then_some(user)
}

fn mark_of(pid: u32) -> Option<PathBuf> {
    let file = fs::File::open(format!("/proc/{pid}/environ")).ok()?;
    let mut environment = Vec::new();
    file.take(ENVIRONMENT_MAX)
        .read_to_end(&mut environment)
        .ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| {
        let value = variable.strip_prefix(MARK.as_bytes())?.strip_prefix(b"=")?;
        Some(PathBuf::from(OsStr::from_bytes(value)))
    })
}

fn start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat"))?;
    parse_start_time(&stat).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// A process may have given itself a name with spaces and parentheses: fields are counted from
/// the last one.
fn parse_start_time(stat: &[u8]) -> Option<u64> {
    let stat = std::str::from_utf8(stat.rsplit(|byte| *byte == b')').next()?).ok()?;
    stat.split_ascii_whitespace()
        .nth(START_TIME_BEHIND_NAME)?
        .parse()
        .ok()
}

/// The memory of a process, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Resident in RAM.
    pub(crate) resident: u64,
    /// Pinned for devices, including guest RAM of vDPA devices.
    pub(crate) pinned: u64,
}

/// The memory of a process, if it exists.
pub(crate) fn memory(identity: Identity) -> Option<Memory> {
    let status = fs::read(format!("/proc/{}/status", identity.pid)).ok()?;
    // The status was read before this check, so it is not that of a process that reuses the number.
    let is_it = start_time(identity.pid).is_ok_and(|time| time == identity.start_time);
    let memory = || parse_memory(&String::from_utf8_lossy(&status));
    is_it.then(memory).flatten()
}

/// A name cannot add lines: the kernel escapes line breaks in it.
fn parse_memory(status: &str) -> Option<Memory> {
    let bytes = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
        kib.checked_mul(1024)
    };
    Some(Memory {
        resident: bytes("VmRSS:")?,
        pinned: bytes("VmPin:")?,
    })
}

/// Whether a process has a handler for SIGTERM.
fn catches_term(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    parse_caught(&status).is_some_and(|caught| caught & (1 << (libc::SIGTERM - 1)) != 0)
}

/// The mask of caught signals.
fn parse_caught(status: &str) -> Option<u64> {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigCgt:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

fn pid_of(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

impl Process {
    /// Opens the process, if it still exists.
    ///
    /// # Errors
    /// The kernel has no free descriptor, or no pidfds.
    pub(crate) fn open(identity: Identity) -> io::Result<Option<Self>> {
        let pidfd = match pidfd_open(pid_of(identity.pid)?, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            pidfd => pidfd?,
        };
        // Another process may already have the number; from here on it cannot be reused.
        match start_time(identity.pid) {
            Ok(start_time) if start_time == identity.start_time => {
                Ok(Some(Self { identity, pidfd }))
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// Readable once the process has exited.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Waits for its exit. Returns whether it has exited.
    ///
    /// # Errors
    /// Those of poll(2).
    pub(crate) fn wait(&self, patience: Duration) -> io::Result<bool> {
        let start = Instant::now();
        loop {
            let left = patience.saturating_sub(start.elapsed());
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            let mut wanted = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match poll(&mut wanted, Some(&timeout)) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Ends it: sends SIGTERM, then SIGKILL if it does not exit in time. Returns when it is gone.
    ///
    /// # Errors
    /// It does not exit although it was killed, for example because it sleeps in the kernel.
    pub(crate) fn end(&self, grace: Duration) -> io::Result<()> {
        // The first process of a PID namespace ignores a signal that it does not catch.
        let grace_of_term = if catches_term(self.identity.pid) {
            grace
        } else {
            Duration::ZERO
        };
        let steps = [
            (Signal::TERM, grace_of_term),
            (Signal::KILL, grace.max(KILL_TIME)),
        ];
        for (signal, patience) in steps {
            match pidfd_send_signal(&self.pidfd, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
            if self.wait(patience)? {
                self.reap();
                return Ok(());
            }
        }
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!(
                "process {} does not end after SIGKILL: it waits in the kernel, for example for \
                 the storage of a disk (`cat /proc/{}/stack`)",
                self.identity.pid, self.identity.pid
            ),
        ))
    }

    /// Takes the exit status of a process that has ended, if it is a child of this one. A daemon
    /// that started after its VMs is not their parent.
    pub(crate) fn reap(&self) -> Option<ExitStatus> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let status = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options).ok()??;
        if let Some(code) = status.exit_status() {
            return Some(ExitStatus::from_raw(code.wrapping_shl(8)));
        }
        status.terminating_signal().map(ExitStatus::from_raw)
    }
}

/// How long the kernel may take to end a killed process: it releases pinned memory.
const KILL_TIME: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn sleeper(mark: &Path, ignores: bool) -> std::process::Child {
        let script = if ignores {
            "trap '' TERM; while :; do sleep 1; done"
        } else {
            "exec sleep 60"
        };
        Command::new("sh")
            .args(["-c", script])
            .env(MARK, mark)
            .spawn()
            .unwrap()
    }

    #[test]
    fn start_times_are_behind_any_name() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        for name in ["bellhop", "a b", "a) R 1 (b", ")))"] {
            let stat = format!("1 ({name}) {}", fields.join(" "));
            assert_eq!(parse_start_time(stat.as_bytes()), Some(22));
        }
        for bad in ["", "1", "1 (a", "1 (a) R 2 3", "\u{fffd}"] {
            assert_eq!(parse_start_time(bad.as_bytes()), None);
        }
    }

    #[test]
    fn memory_is_that_of_the_process() {
        let pid = std::process::id();
        let own = Identity {
            pid,
            start_time: start_time(pid).unwrap(),
        };
        assert!(memory(own).unwrap().resident > 0);
        let other = Identity {
            start_time: own.start_time + 1,
            ..own
        };
        assert_eq!(memory(other), None);
        let status = "Name:\tVmPin: 9 kB\nVmPin:\t     8 kB\nVmRSS:\t    12 kB\n";
        let parsed = Memory {
            resident: 12 << 10,
            pinned: 8 << 10,
        };
        assert_eq!(parse_memory(status), Some(parsed));
        // A zombie has none.
        assert_eq!(parse_memory("Name:\tbellhop\n"), None);
    }

    #[test]
    fn caught_signals_are_a_mask() {
        assert_eq!(
            parse_caught("SigIgn:\t1\nSigCgt:\t0000000000004002\n"),
            Some(0x4002)
        );
        assert_eq!(parse_caught("Name:\tSigCgt: 1\n"), None);
        assert!(!catches_term(0));
    }

    #[test]
    fn a_marked_process_is_found_and_ended() {
        let mark = PathBuf::from(format!("/nowhere/marked-{}", std::process::id()));
        assert!(find(&mark).unwrap().is_empty());
        for ignores in [false, true] {
            let mut child = sleeper(&mark, ignores);
            let found = loop {
                // The mark is in its environment from exec on.
                match find(&mark).unwrap().as_slice() {
                    [] => std::thread::sleep(Duration::from_millis(5)),
                    found => break found.to_vec(),
                }
            };
            assert!(found.iter().any(|one| one.pid == child.id()));
            let identity = found.into_iter().find(|one| one.pid == child.id()).unwrap();
            let process = Process::open(identity).unwrap().unwrap();
            assert!(!process.wait(Duration::ZERO).unwrap());
            // Gives the shell time to set its trap.
            std::thread::sleep(Duration::from_millis(100));
            process.end(Duration::from_millis(300)).unwrap();
            assert!(process.wait(Duration::ZERO).unwrap());
            assert!(Process::open(identity).unwrap().is_none());
            // Its status is taken already.
            assert!(child.wait().is_err());
            for left in find(&mark).unwrap() {
                Process::open(left)
                    .unwrap()
                    .unwrap()
                    .end(KILL_TIME)
                    .unwrap();
            }
        }
    }

    /// Only root can start a process of another user.
    #[test]
    fn a_process_of_another_user_needs_the_directory_of_its_mark() {
        const USER: u32 = 1_900_000_000;
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let mark = std::env::temp_dir().join(format!("mark-{}", std::process::id()));
        fs::create_dir(&mark).unwrap();
        let mut child = Command::new("sleep")
            .arg("60")
            .env(MARK, &mark)
            .uid(USER)
            .spawn()
            .unwrap();
        // The mark is in its environment when `spawn` returns.
        assert_eq!(find(&mark).unwrap(), []);
        std::os::unix::fs::chown(&mark, Some(USER), None).unwrap();
        let found = find(&mark).unwrap();
        assert_eq!(
            found.iter().map(|one| one.pid).collect::<Vec<_>>(),
            [child.id()]
        );
        child.kill().unwrap();
        child.wait().unwrap();
        fs::remove_dir(&mark).unwrap();
    }

    #[test]
    fn a_reused_number_is_not_taken_for_the_process() {
        let own = Identity {
            pid: std::process::id(),
            start_time: start_time(std::process::id()).unwrap(),
        };
        assert!(Process::open(own).unwrap().is_some());
        let other = Identity {
            start_time: own.start_time + 1,
            ..own
        };
        assert!(Process::open(other).unwrap().is_none());
        assert!(Process::open(Identity { pid: 0, ..own }).is_err());
    }
}
