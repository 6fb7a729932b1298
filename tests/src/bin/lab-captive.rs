//! Stands for a VMM that its guest has captured: enters the jail of a running VMM, and tries to
//! leave it.
//!
//! ```text
//!   lab-captive PID UID DIRECTORY [FILE …]     a line for each attempt:
//!                                      jail NAME: denied | jail NAME: WRONG …
//!                                      filter NAME: denied (SIGSYS) | filter NAME: WRONG …
//!                                      control NAME: allowed | control NAME: WRONG …
//! ```
//! It enters all namespaces and the root of the process, becomes its user without capabilities, and
//! joins its PID namespace by a fork. DIRECTORY belongs to the VM. FILE is a path that the VM must
//! not reach; root can open it outside the jail, or it is a socket.
//!
//! Each attempt has a process of its own and the only error that may deny it. Controls are attempts
//! that succeed: they show that others are not denied for another reason. Some attempts are made
//! again with the system call filters of the VMM's main thread. These allow more than those of
//! other threads.

use std::error::Error;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
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

/// The exit codes of an attempt. Other codes are numbers of errors.
const ALLOWED: i32 = 0;
const BROKEN: i32 = 255;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = || -> Option<u32> { arguments.next()?.parse().ok() };
    let usage = "usage: lab-captive PID UID DIRECTORY [FILE …]";
    let (pid, uid) = (number().ok_or(usage)?, number().ok_or(usage)?);
    let own = PathBuf::from(arguments.next().ok_or(usage)?);
    let mut attempts = Vec::new();
    for file in arguments.map(PathBuf::from) {
        attempts.push(on_file_outside(file)?);
    }
    attempts.extend(on_files_inside());
    attempts.extend(by_calls(pid, &own));
    enter(pid)?;
    become_captive(uid)?;
    let controls = controls(&own);
    for attempt in attempts.iter().chain(&controls) {
        let name = &attempt.name;
        let layer = attempt.denied_by.map_or("control", |_| "jail");
        let result = match (in_child(attempt, false)?, attempt.denied_by) {
            (End::Allowed, None) => "allowed".to_owned(),
            (End::Denied(error), Some(wanted)) if error == wanted => "denied".to_owned(),
            (end, wanted) => format!("WRONG: {end:?}, expected {wanted:?}"),
        };
        show(layer, name, &result)?;
        if FILTERED.contains(&name.as_str()) {
            let result = match in_child(attempt, true)? {
                End::Killed => "denied (SIGSYS)".to_owned(),
                end => format!("WRONG: {end:?}"),
            };
            show("filter", name, &result)?;
        }
    }
    let create = create(&own.join("filtered"));
    let result = match in_child(&create, true)? {
        End::Allowed => "allowed".to_owned(),
        end => format!("WRONG: {end:?}"),
    };
    show("control", "create a file under filters", &result)?;
    Ok(())
}

/// Prints a result at once: a child must not print it again.
fn show(layer: &str, name: &str, result: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{layer} {name}: {result}")
}

/// The end of an attempt.
#[derive(Debug)]
enum End {
    Allowed,
    Denied(Errno),
    /// A filter has ended the process.
    Killed,
    /// The attempt was not made.
    #[expect(dead_code, reason = "for its debug format")]
    Broken(String),
}

/// Runs an attempt in a child. Only a child is in the PID namespace.
fn in_child(attempt: &Attempt, filtered: bool) -> Result<End, Box<dyn Error>> {
    // SAFETY: needed because only a process can enter a PID namespace, and a filter stays until its
    // process ends. This process has one thread, so the child may do anything.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mode = if filtered {
            seccomp::Mode::On
        } else {
            seccomp::Mode::Off
        };
        let installed = seccomp::install(mode, false);
        let code = match installed.map(|()| (attempt.run)()) {
            Ok(Ok(())) => ALLOWED,
            Ok(Err(error)) => error.raw_os_error().unwrap_or(BROKEN),
            Err(_) => BROKEN,
        };
        // SAFETY: ends this process at once, in which nothing else runs.
        unsafe { libc::_exit(code) };
    }
    let child = Pid::from_raw(child).ok_or("fork")?;
    let waited = rustix::process::waitpid(Some(child), WaitOptions::empty())?;
    let (_, status) = waited.ok_or("waitpid")?;
    Ok(match (status.terminating_signal(), status.exit_status()) {
        (Some(libc::SIGSYS), _) => End::Killed,
        (None, Some(ALLOWED)) => End::Allowed,
        (None, Some(error)) if error != BROKEN => End::Denied(Errno::from_raw_os_error(error)),
        _ => End::Broken(format!("{status:?}")),
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

/// An attempt, in a process of its own.
struct Attempt {
    name: String,
    /// The error that must deny it; none for a control.
    denied_by: Option<Errno>,
    run: Box<dyn Fn() -> std::io::Result<()>>,
}

impl Attempt {
    /// A control.
    fn new(name: impl Into<String>, run: impl Fn() -> std::io::Result<()> + 'static) -> Self {
        Self {
            name: name.into(),
            denied_by: None,
            run: Box::new(run),
        }
    }

    fn denied_by(self, error: Errno) -> Self {
        Self {
            denied_by: Some(error),
            ..self
        }
    }
}

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
    let process = process.ok_or(ErrorKind::InvalidInput)?;
    Ok(rustix::process::kill_process(process, Signal::KILL)?)
}

fn open(path: &Path) -> Attempt {
    let (name, path) = (format!("open {}", path.display()), path.to_owned());
    Attempt::new(name, move || File::open(&path).map(drop))
}

fn connect(path: &Path) -> Attempt {
    let (name, path) = (format!("connect {}", path.display()), path.to_owned());
    Attempt::new(name, move || UnixStream::connect(&path).map(drop))
}

/// Creates a file, and removes it again.
fn create(path: &Path) -> Attempt {
    let (name, path) = (format!("create {}", path.display()), path.to_owned());
    Attempt::new(name, move || {
        File::create(&path)?;
        fs::remove_file(&path)
    })
}

/// Checks that a file exists outside the jail. Inside, its path does not exist.
fn on_file_outside(file: PathBuf) -> Result<Attempt, Box<dyn Error>> {
    let missing = |error| format!("{}: {error}", file.display());
    if fs::metadata(&file)
        .map_err(missing)?
        .file_type()
        .is_socket()
    {
        return Ok(connect(&file).denied_by(Errno::NOENT));
    }
    File::open(&file).map_err(missing)?;
    Ok(open(&file).denied_by(Errno::NOENT))
}

/// Attempts on files that the jail shows, or whose paths lead to other files there.
fn on_files_inside() -> Vec<Attempt> {
    let vmm = "see the descriptors of the VMM";
    let mut all = vec![
        // The VMM is process 1 of its namespace. /proc hides processes that this one cannot trace.
        open(Path::new("/proc/1/mem")).denied_by(Errno::NOENT),
        open(Path::new("/proc/1/environ")).denied_by(Errno::NOENT),
        Attempt::new(vmm, || fs::read_dir("/proc/1/fd").map(drop)).denied_by(Errno::NOENT),
        open(Path::new("/proc/kcore")).denied_by(Errno::ACCESS),
        // Root owns both directories.
        create(Path::new("/file")).denied_by(Errno::ACCESS),
        create(Path::new("/dev/file")).denied_by(Errno::ACCESS),
    ];
    for (path, denied_by) in [
        // This file system is read-only, which the kernel checks before the owner.
        ("/proc/sys/kernel/core_pattern", Errno::ROFS),
        (
            "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
            Errno::ACCESS,
        ),
    ] {
        let run = move || File::options().write(true).open(path).map(drop);
        all.push(Attempt::new(format!("write {path}"), run).denied_by(denied_by));
    }
    all
}

/// Attempts by calls that need a privilege, or reach another process.
fn by_calls(pid: u32, own: &Path) -> Vec<Attempt> {
    let flags = [
        ("create a user namespace", UnshareFlags::NEWUSER),
        ("create a mount namespace", UnshareFlags::NEWNS),
        ("create a network namespace", UnshareFlags::NEWNET),
        ("create a PID namespace", UnshareFlags::NEWPID),
    ];
    let namespaces = flags.map(|(name, flags)| {
        Attempt::new(name, move || {
            // SAFETY: none of these flags takes descriptors away.
            Ok(unsafe { rustix::thread::unshare_unsafe(flags) }?)
        })
    });
    let tmpfs = rustix::mount::MountFlags::empty();
    let detach = rustix::mount::UnmountFlags::DETACH;
    let root = rustix::process::Uid::ROOT;
    let node = own.join("node");
    let privileged = [
        Attempt::new("trace the VMM", || {
            // SAFETY: ptrace(2) with these arguments touches no memory of this process.
            result(unsafe { libc::ptrace(libc::PTRACE_ATTACH, 1, 0, 0) })
        }),
        Attempt::new("change the root", || Ok(rustix::process::chroot("/sys")?)),
        Attempt::new("mount", move || {
            Ok(rustix::mount::mount("tmpfs", "/dev", "tmpfs", tmpfs, c"")?)
        }),
        Attempt::new("remove a mount", move || {
            Ok(rustix::mount::unmount("/sys/devices", detach)?)
        }),
        Attempt::new("become root", move || {
            Ok(rustix::thread::set_thread_uid(root)?)
        }),
        // In a directory where it may create files.
        Attempt::new("create a device node", move || {
            let device = CString::new(node.as_os_str().as_bytes())?;
            let (mode, number) = (libc::S_IFCHR | 0o600, libc::makedev(1, 1));
            // SAFETY: the path is a C string that outlives the call.
            result(unsafe { libc::mknod(device.as_ptr(), mode, number) }.into())
        }),
        Attempt::new("capture all frames", || {
            // SAFETY: socket(2) touches no memory of this process.
            result(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 3) }.into())
        }),
    ];
    let privileged = namespaces.into_iter().chain(privileged);
    let others = [
        // The VMM ignores a signal from its own namespace, where this number does not exist.
        Attempt::new("signal the VMM by its number on the host", move || {
            kill(pid)
        })
        .denied_by(Errno::SRCH),
        // No program of the host exists here.
        Attempt::new("execute a program", || {
            std::process::Command::new("/bin/ls").status().map(drop)
        })
        .denied_by(Errno::NOENT),
    ];
    let privileged = privileged.map(|attempt| attempt.denied_by(Errno::PERM));
    privileged.chain(others).collect()
}

/// Attempts that succeed: files, sockets and /proc work in the jail.
fn controls(own: &Path) -> [Attempt; 3] {
    [
        create(&own.join("node")),
        connect(&own.join("api.socket")),
        open(Path::new("/proc/self/status")),
    ]
}
