//! The jail of a VM's process: what a guest that takes over its VMM can reach.
//!
//! ```text
//!   bellhop run ── enter ──> own IPC, UTS, cgroup and mount namespaces, an empty root
//!                              own user and group, no capability, no_new_privs, no core
//!                                ──> only then a log, a socket or the VM
//!   node daemon ── JailFiles::show ──> a file appears in the jail of a running VM
//! ```
//! The process jails itself, as minijail does, while it has one thread. So no second program is
//! needed. Files keep their paths in the jail, so code that opens them by path does not change.
//!
//! Owns the order of the steps. It must not know a VM's configuration.

pub mod cgroup;
pub mod landlock;
pub mod namespaces;
pub mod privileges;
pub mod seccomp;

/// The io_urings of disks, which a process creates before its [filters](seccomp).
pub use devices::virtio::block::rings;

use std::io;
use std::path::PathBuf;

/// The user of a jail, and its directories.
#[derive(Debug, Clone)]
pub struct Own {
    /// The user ID, and the group ID.
    pub user: u32,
    /// Directories in which the process may write.
    pub directories: Vec<PathBuf>,
}

/// A step into the jail that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} of the sandbox")]
pub struct JailError {
    step: &'static str,
    #[source]
    source: io::Error,
}

fn failed(step: &'static str) -> impl FnOnce(io::Error) -> JailError {
    move |source| JailError { step, source }
}

/// Moves this process into a jail, for good. It must have one thread. Without `own` it keeps its
/// user, and sees the host's files. A process that is in its jail already, because another program
/// hands its VM over, only gives up privileges again.
///
/// # Errors
/// A step failed. The process must end: it is in a part of the jail.
pub fn enter(own: Option<&Own>) -> Result<(), JailError> {
    if let Some(own) = own
        && rustix::process::geteuid().as_raw() != own.user
    {
        namespaces::enter(own).map_err(failed("build the root directory"))?;
        privileges::become_user(own.user).map_err(failed("change to the user"))?;
    }
    privileges::give_up().map_err(failed("give up the privileges"))
}

/// Moves this process, which is no VMM and has all files open that it needs, into a jail with an
/// empty root and little memory. It must have one thread. It ends with its parent, which has set
/// the same signal in the child. A [filter](seccomp::confine) is the next step, of each thread.
///
/// # Errors
/// A step failed. The process must end: it is in a part of the jail.
pub fn enter_empty(user: u32) -> Result<(), crate::Error> {
    let failed = |step| {
        move |source| {
            let error = JailError { step, source };
            crate::Error::host("cannot enter the sandbox").because(error)
        }
    };
    let parent = rustix::process::getppid();
    // Before the namespaces, which have no `/proc`.
    privileges::limit_memory().map_err(failed("limit the memory"))?;
    namespaces::enter_empty().map_err(failed("build the root directory"))?;
    privileges::become_user(user).map_err(failed("change to the user"))?;
    privileges::give_up().map_err(failed("give up the privileges"))?;
    // After the change of the user, which clears it.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| failed("follow the parent")(error.into()))?;
    if rustix::process::getppid() != parent {
        // It ended before the request.
        return Err(failed("follow the parent")(io::ErrorKind::NotFound.into()));
    }
    Ok(())
}
