//! Stands for a VMM that its guest has captured: enters the jail of a running VMM, and tries to
//! leave it.
//!
//! ```text
//!   lab-captive PID UID [FILE …]     a line for each attempt: NAME: denied | NAME: ALLOWED
//! ```
//! It enters all namespaces and the root of the process, becomes its user without capabilities, and
//! joins its PID namespace by a fork. FILE is a path that it must not reach; also a socket.

use std::error::Error;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = || -> Option<u32> { arguments.next()?.parse().ok() };
    let usage = "usage: lab-captive PID UID [FILE …]";
    let (pid, uid) = (number().ok_or(usage)?, number().ok_or(usage)?);
    let files: Vec<PathBuf> = arguments.map(PathBuf::from).collect();
    enter(pid)?;
    become_captive(uid)?;
    // Only a child is in the PID namespace.
    // SAFETY: needed because only a process can enter a PID namespace. This one has one thread, so
    // the child may do anything.
    match unsafe { libc::fork() } {
        0 => {
            attempts(pid, &files)?;
            Ok(())
        }
        child => {
            let child = Pid::from_raw(child).ok_or("fork")?;
            rustix::process::waitpid(Some(child), WaitOptions::empty())?;
            Ok(())
        }
    }
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
    let own = vmm::sandbox::Jail::default();
    vmm::sandbox::privileges::become_user(uid)?;
    own.enter()?;
    Ok(())
}

/// Prints the result of an attempt.
fn report<T, E: std::fmt::Display>(name: &str, tried: Result<T, E>) -> std::io::Result<()> {
    let mut output = std::io::stdout();
    match tried {
        Ok(_) => writeln!(output, "{name}: ALLOWED"),
        Err(error) => writeln!(output, "{name}: denied ({error})"),
    }
}

fn attempts(pid: u32, files: &[PathBuf]) -> std::io::Result<()> {
    for file in files {
        report(&format!("read {}", file.display()), fs::read(file))?;
        report(
            &format!("connect {}", file.display()),
            UnixStream::connect(file),
        )?;
    }
    let process = |number: u32| i32::try_from(number).ok().and_then(Pid::from_raw);
    let kill = |number: u32| match process(number) {
        Some(pid) => rustix::process::kill_process(pid, Signal::KILL),
        None => Err(rustix::io::Errno::SRCH),
    };
    // The VMM is process 1 of its namespace, which ignores a signal from within.
    report("signal the process by its number on the host", kill(pid))?;
    report("read the memory of the VMM", File::open("/proc/1/mem"))?;
    report(
        "read the environment of the VMM",
        fs::read("/proc/1/environ"),
    )?;
    report("see the descriptors of the VMM", fs::read_dir("/proc/1/fd"))?;
    // SAFETY: ptrace(2) with these arguments touches no memory of this process.
    let traced = unsafe { libc::ptrace(libc::PTRACE_ATTACH, 1, 0, 0) };
    let traced = if traced == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    };
    report("trace the VMM", traced)?;
    for (name, flags) in [
        ("create a user namespace", UnshareFlags::NEWUSER),
        ("create a mount namespace", UnshareFlags::NEWNS),
        ("create a network namespace", UnshareFlags::NEWNET),
        ("create a PID namespace", UnshareFlags::NEWPID),
    ] {
        // SAFETY: none of these flags takes descriptors away.
        report(name, unsafe { rustix::thread::unshare_unsafe(flags) })?;
    }
    report("change the root", rustix::process::chroot("/sys"))?;
    let tmpfs = rustix::mount::MountFlags::empty();
    report(
        "mount",
        rustix::mount::mount("tmpfs", "/dev", "tmpfs", tmpfs, c""),
    )?;
    report(
        "remove a mount",
        rustix::mount::unmount("/sys/devices", rustix::mount::UnmountFlags::DETACH),
    )?;
    let root = rustix::process::Uid::ROOT;
    report("become root", rustix::thread::set_thread_uid(root))?;
    let device = CString::new("/dev/node")?;
    // SAFETY: the path is a C string that outlives the call.
    let made = unsafe { libc::mknod(device.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 1)) };
    report(
        "create a device node",
        if made == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        },
    )?;
    report("create a file in the root", File::create("/file"))?;
    report("create a file in /dev", File::create("/dev/file"))?;
    for path in [
        "/dev/mem",
        "/dev/sda",
        "/dev/vda",
        "/etc/passwd",
        "/etc/shadow",
        "/proc/kcore",
    ] {
        report(&format!("open {path}"), File::open(path))?;
    }
    let knobs = [
        "/proc/sys/kernel/core_pattern",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    ];
    for path in knobs.map(Path::new) {
        report(
            &format!("write {}", path.display()),
            File::options().write(true).open(path),
        )?;
    }
    // Of the program `ls`: no program of the host exists here.
    report(
        "execute a program",
        std::process::Command::new("/bin/ls").status(),
    )?;
    Ok(())
}
