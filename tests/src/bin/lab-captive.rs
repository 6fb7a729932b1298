//! Stands for a VMM that its guest has captured: enters the jail of a running VMM, and tries to
//! leave it.
//!
//! ```text
//!   lab-captive PID UID [FILE …]     a line for each attempt:
//!                                      jail NAME: denied | jail NAME: ALLOWED
//!                                      filter NAME: denied (SIGSYS) | filter NAME: …
//! ```
//! It enters all namespaces and the root of the process, becomes its user without capabilities, and
//! joins its PID namespace by a fork. FILE is a path that it must not reach; also a socket. Each
//! attempt has a process of its own. Some are made again with the system call filters of the VMM's
//! main thread. These allow more than those of other threads.

use std::error::Error;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags};
use vmm::sandbox::seccomp;

/// The attempts that are also made under filters. The lab takes a second to compile these.
const FILTERED: [&str; 6] = [
    "create a user namespace",
    "trace the VMM",
    "change the root",
    "mount",
    "become root",
    "capture all frames",
];

/// The exit codes of an attempt.
const ALLOWED: i32 = 0;
const DENIED: i32 = 1;
const BROKEN: i32 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = || -> Option<u32> { arguments.next()?.parse().ok() };
    let usage = "usage: lab-captive PID UID [FILE …]";
    let (pid, uid) = (number().ok_or(usage)?, number().ok_or(usage)?);
    let files: Vec<PathBuf> = arguments.map(PathBuf::from).collect();
    enter(pid)?;
    become_captive(uid)?;
    for (name, attempt) in on_files(files) {
        show("jail", &name, &in_child(&attempt, false)?)?;
    }
    for (name, attempt) in by_calls(pid) {
        show("jail", &name, &in_child(&attempt, false)?)?;
        if FILTERED.contains(&name.as_str()) {
            show("filter", &name, &in_child(&attempt, true)?)?;
        }
    }
    Ok(())
}

/// Prints a result at once: a child must not print it again.
fn show(layer: &str, name: &str, result: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{layer} {name}: {result}")
}

/// Runs an attempt in a child. Only a child is in the PID namespace.
fn in_child(attempt: &Attempt, filtered: bool) -> Result<String, Box<dyn Error>> {
    // SAFETY: needed because only a process can enter a PID namespace, and a filter stays until its
    // process ends. This process has one thread, so the child may do anything.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mode = if filtered {
            seccomp::Mode::On
        } else {
            seccomp::Mode::Off
        };
        let code = match seccomp::install(mode, false) {
            Ok(()) if attempt().is_ok() => ALLOWED,
            Ok(()) => DENIED,
            Err(_) => BROKEN,
        };
        // SAFETY: ends this process at once, in which nothing else runs.
        unsafe { libc::_exit(code) };
    }
    let child = Pid::from_raw(child).ok_or("fork")?;
    let waited = rustix::process::waitpid(Some(child), WaitOptions::empty())?;
    let (_, status) = waited.ok_or("waitpid")?;
    let code = status.exit_status();
    Ok(match status.terminating_signal() {
        Some(libc::SIGSYS) => "denied (SIGSYS)".to_owned(),
        None if code == Some(DENIED) => "denied".to_owned(),
        None if code == Some(ALLOWED) => "ALLOWED".to_owned(),
        _ => format!("BROKEN ({status:?})"),
    })
}

/// Enters the namespaces of a process, and its root.
fn enter(pid: u32) -> Result<(), Box<dyn Error>> {
    let root = File::open(format!("/proc/{pid}/root"))?;
    let process = Pid::from_raw(i32::try_from(pid)?).ok_or("PID 0")?;
    let pidfd = rustix::process::pidfd_open(process, PidfdFlags::empty())?;
    let all = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::CONTROL_GROUP
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::PROCESS_ID
        | ThreadNameSpaceType::NETWORK;
    rustix::thread::move_into_thread_name_spaces(pidfd.as_fd(), all)?;
    rustix::process::fchdir(root)?;
    rustix::process::chroot(".")?;
    Ok(())
}

/// Becomes the user, as the VMM has.
fn become_captive(uid: u32) -> Result<(), Box<dyn Error>> {
    vmm::sandbox::privileges::become_user(uid)?;
    vmm::sandbox::enter(None)?;
    Ok(())
}

/// An attempt, which succeeds if the jail has a hole.
type Attempt = Box<dyn Fn() -> std::io::Result<()>>;

/// The result of a C function.
fn result(returned: i64) -> std::io::Result<()> {
    if returned == -1 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn kill(number: u32) -> std::io::Result<()> {
    let process = i32::try_from(number).ok().and_then(Pid::from_raw);
    let process = process.ok_or(rustix::io::Errno::SRCH)?;
    Ok(rustix::process::kill_process(process, Signal::KILL)?)
}

/// Attempts with their names.
type Attempts = Vec<(String, Attempt)>;

fn named(name: &str, attempt: impl Fn() -> std::io::Result<()> + 'static) -> (String, Attempt) {
    (name.to_owned(), Box::new(attempt))
}

fn read(path: PathBuf) -> (String, Attempt) {
    let name = format!("read {}", path.display());
    (name, Box::new(move || fs::read(&path).map(drop)))
}

/// Attempts to reach a file, by calls that a VMM makes, too.
fn on_files(files: Vec<PathBuf>) -> Attempts {
    let mut all = Attempts::new();
    for file in files {
        let name = format!("connect {}", file.display());
        all.push(read(file.clone()));
        all.push((name, Box::new(move || UnixStream::connect(&file).map(drop))));
    }
    let secrets = [
        "/proc/1/mem",
        "/proc/1/environ",
        "/dev/mem",
        "/dev/sda",
        "/dev/vda",
        "/etc/passwd",
        "/etc/shadow",
        "/proc/kcore",
    ];
    all.extend(secrets.map(|path| read(path.into())));
    all.push(named("see the descriptors of the VMM", || {
        fs::read_dir("/proc/1/fd").map(drop)
    }));
    for path in ["/file", "/dev/file"] {
        let attempt = move || File::create(path).map(drop);
        all.push(named(&format!("create {path}"), attempt));
    }
    for path in [
        "/proc/sys/kernel/core_pattern",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    ] {
        let attempt = move || File::options().write(true).open(path).map(drop);
        all.push(named(&format!("write {path}"), attempt));
    }
    all
}

/// Attempts by calls that need a privilege, or reach another process.
fn by_calls(pid: u32) -> Attempts {
    let flags = [
        ("create a user namespace", UnshareFlags::NEWUSER),
        ("create a mount namespace", UnshareFlags::NEWNS),
        ("create a network namespace", UnshareFlags::NEWNET),
        ("create a PID namespace", UnshareFlags::NEWPID),
    ];
    let namespaces = flags.map(|(name, flags)| {
        named(name, move || {
            // SAFETY: none of these flags takes descriptors away.
            Ok(unsafe { rustix::thread::unshare_unsafe(flags) }?)
        })
    });
    let tmpfs = rustix::mount::MountFlags::empty();
    let detach = rustix::mount::UnmountFlags::DETACH;
    let root = rustix::process::Uid::ROOT;
    let others = [
        // The VMM is process 1 of its namespace, which ignores a signal from within.
        named("signal the process by its number on the host", move || {
            kill(pid)
        }),
        named("trace the VMM", || {
            // SAFETY: ptrace(2) with these arguments touches no memory of this process.
            result(unsafe { libc::ptrace(libc::PTRACE_ATTACH, 1, 0, 0) })
        }),
        named("change the root", || Ok(rustix::process::chroot("/sys")?)),
        named("mount", move || {
            Ok(rustix::mount::mount("tmpfs", "/dev", "tmpfs", tmpfs, c"")?)
        }),
        named("remove a mount", move || {
            Ok(rustix::mount::unmount("/sys/devices", detach)?)
        }),
        named("become root", move || {
            Ok(rustix::thread::set_thread_uid(root)?)
        }),
        named("create a device node", || {
            let device = CString::new("/dev/node")?;
            let (mode, number) = (libc::S_IFCHR | 0o600, libc::makedev(1, 1));
            // SAFETY: the path is a C string that outlives the call.
            result(unsafe { libc::mknod(device.as_ptr(), mode, number) }.into())
        }),
        named("capture all frames", || {
            // SAFETY: socket(2) touches no memory of this process.
            result(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 3) }.into())
        }),
        // Of the program `ls`: no program of the host exists here.
        named("execute a program", || {
            std::process::Command::new("/bin/ls").status().map(drop)
        }),
    ];
    namespaces.into_iter().chain(others).collect()
}
