//! Stands for a VMM that its guest has captured. It enters the jail of a running VMM with all of
//! its descriptors, and tries to leave it.
//!
//! ```text
//!   lab-captive PID UID DIRECTORY OTHERS [TARGET …]
//!       descriptor KIND            a line for each descriptor of the VMM
//!       jail NAME: RESULT          two lines for each attempt: without Landlock and filters,
//!       vmm NAME: RESULT           and with both
//!   RESULT   allowed | denied: ERROR | ended by a filter | WRONG: …
//! ```
//! It takes the descriptors of the process, and enters all of its namespaces and its root. It
//! becomes its user without capabilities, and joins its PID namespace by a fork.
//!
//! DIRECTORY belongs to the VM. OTHERS are processes that the VM must not reach, separated by
//! commas. TARGET is a file, a socket or a TCP address that root reaches outside the jail, which
//! the helper checks first.
//!
//! Each attempt has a process of its own and the only error that may deny it, in either layer. The
//! filters are those of the VMM's main thread, which allow more than those of other threads.
//! Attempts that succeed show that others are not denied for another reason.

mod attempts;
mod descriptors;

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitOptions};
use rustix::thread::ThreadNameSpaceType;
use vmm::sandbox::landlock::{self, Tcp};
use vmm::sandbox::seccomp::{self, Thread};

/// The exit codes of an attempt. Other codes are numbers of errors.
const ALLOWED: i32 = 0;
const BROKEN: i32 = 255;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: lab-captive PID UID DIRECTORY OTHERS [TARGET …]";
    let mut next = || arguments.next().ok_or(usage);
    let (pid, uid) = (process(&next()?)?, next()?.parse()?);
    let own = PathBuf::from(next()?);
    let others: Vec<Pid> = next()?.split(',').map(process).collect::<Result<_, _>>()?;
    let descriptors = descriptors::of(pid)?;
    for descriptor in &descriptors {
        show("descriptor", &descriptor.kind)?;
    }
    let processes = others.iter().copied();
    let mut attempts: Vec<Attempt> = processes.flat_map(attempts::on_process).collect();
    attempts.extend(descriptors::attempts(&descriptors, &others));
    attempts.push(descriptors::by_rings(&descriptors, &own)?);
    for target in arguments {
        attempts.extend(attempts::on_target_outside(&target)?);
    }
    attempts.extend(attempts::on_files_inside(&own));
    attempts.extend(attempts::by_calls(&own));
    attempts.extend(attempts::on_network()?);
    enter(pid)?;
    vmm::sandbox::privileges::become_user(uid)?;
    vmm::sandbox::enter(None)?;
    for attempt in &attempts {
        for (layer, wanted) in [(Layer::Jail, attempt.in_jail), (Layer::Vmm, attempt.as_vmm)] {
            let end = in_child(attempt, layer)?;
            let result = if end == wanted {
                end.to_string()
            } else {
                format!("WRONG: {end}, not {wanted}")
            };
            show(layer.name(), &format!("{}: {result}", attempt.name))?;
        }
    }
    Ok(())
}

fn process(number: &str) -> Result<Pid, Box<dyn Error>> {
    Ok(Pid::from_raw(number.parse()?).ok_or("process 0")?)
}

/// Prints a line at once: a child must not print it again.
fn show(kind: &str, text: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{kind} {text}")
}

/// What holds an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layer {
    /// Namespaces, root and user.
    Jail,
    /// Also Landlock and the system call filters, as in a real VMM.
    Vmm,
}

impl Layer {
    const fn name(self) -> &'static str {
        match self {
            Self::Jail => "jail",
            Self::Vmm => "vmm",
        }
    }
}

/// The end of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Allowed,
    Denied(Errno),
    /// A filter has ended the process.
    Killed,
    /// The attempt was not made.
    Broken,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allowed => f.write_str("allowed"),
            Self::Denied(error) => write!(f, "denied: {error}"),
            Self::Killed => f.write_str("ended by a filter"),
            Self::Broken => f.write_str("not made"),
        }
    }
}

/// An attempt, in a process of its own.
struct Attempt {
    name: String,
    in_jail: End,
    as_vmm: End,
    run: Box<dyn Fn() -> std::io::Result<()>>,
}

impl Attempt {
    /// An attempt that succeeds.
    fn new(name: impl Into<String>, run: impl Fn() -> std::io::Result<()> + 'static) -> Self {
        Self {
            name: name.into(),
            in_jail: End::Allowed,
            as_vmm: End::Allowed,
            run: Box::new(run),
        }
    }

    /// Both layers deny it by this error.
    fn denied_by(self, error: Errno) -> Self {
        Self {
            in_jail: End::Denied(error),
            as_vmm: End::Denied(error),
            ..self
        }
    }

    /// Landlock or a filter denies it by this error.
    fn denied_to_vmm_by(self, error: Errno) -> Self {
        Self {
            as_vmm: End::Denied(error),
            ..self
        }
    }

    /// A filter ends it.
    fn ended_by_filter(self) -> Self {
        Self {
            as_vmm: End::Killed,
            ..self
        }
    }
}

/// Runs an attempt in a child. Only a child is in the PID namespace.
fn in_child(attempt: &Attempt, layer: Layer) -> Result<End, Box<dyn Error>> {
    // SAFETY: needed because only a process can enter a PID namespace, and a filter stays until its
    // process ends. This process has one thread, so the child may do anything.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = match confine(layer).map(|()| (attempt.run)()) {
            Ok(Ok(())) => ALLOWED,
            Ok(Err(error)) => error.raw_os_error().unwrap_or_else(|| broken(&error)),
            Err(error) => broken(&error),
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
        _ => End::Broken,
    })
}

fn broken(error: &dyn Error) -> i32 {
    eprintln!("{error}");
    BROKEN
}

/// Confines this process as `bellhop run` does.
fn confine(layer: Layer) -> Result<(), vmm::Error> {
    if layer == Layer::Vmm {
        landlock::restrict(Path::new("/"), Tcp::Denied)?;
        seccomp::confine(Thread::Vmm)?;
    }
    Ok(())
}

/// Enters the namespaces of a process, and its root.
fn enter(pid: Pid) -> Result<(), Box<dyn Error>> {
    let root = File::open(format!("/proc/{pid}/root"))?;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
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
