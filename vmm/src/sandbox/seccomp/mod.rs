//! System call filters (seccomp): which calls each thread of a VM's process may make.
//!
//! `table.rs` has the calls of each kind of thread as data, with the reasons, and `compile.rs`
//! makes the kernel's programs of it. This file installs them. It must not know who runs a thread.
//!
//! ```text
//!   install, on the main thread             the filter of Thread::Vmm, the union of all
//!       │  clone: a thread inherits              + the calls that fail (REFUSED)
//!       v
//!   enter(Thread::Api)                      + its own, with what it starts
//!       │
//!       v
//!   enter(Thread::ApiWorker)                + its own; a call needs the consent of all
//! ```
//! Threads without a kind of their own keep the filters of their creator.
//!
//! **A live upgrade keeps the filters**, because execve does. So the next program adds none to the
//! main thread: it could not hand the VM back otherwise. `needed` tells the running program which
//! calls the next one makes. Its own table takes effect at the VM's next start.

mod compile;
mod kvm;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::sync::OnceLock;

use seccompiler::{BpfProgram, SeccompAction};

pub use self::table::Thread;
use crate::Error;

/// What happens at a system call that no filter allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// There are no filters.
    Off,
    /// The kernel logs the call and allows it: for developers.
    Log,
    /// SIGSYS ends the process, and the kernel logs the call.
    On,
}

impl FromStr for Mode {
    type Err = &'static str;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "off" => Ok(Self::Off),
            "log" => Ok(Self::Log),
            "on" => Ok(Self::On),
            _ => Err("expected on, off or log"),
        }
    }
}

/// The compiled filters, once [`install`] has run.
static FILTERS: OnceLock<BTreeMap<Thread, BpfProgram>> = OnceLock::new();

/// Installs the filters of `mode`: on the calling thread, which must be the only one, that of
/// [`Thread::Vmm`]; other threads call [`enter`]. With `inherited`, the calling thread has the
/// filters of the program that handed a VM over, and keeps them.
///
/// # Errors
/// This kernel has no filters, or they were installed before.
pub fn install(mode: Mode, inherited: bool) -> Result<(), Error> {
    let otherwise = match mode {
        Mode::Off => return Ok(()),
        Mode::Log => SeccompAction::Log,
        Mode::On => SeccompAction::KillProcess,
    };
    let compiled = "cannot compile the system call filters";
    let filters: BTreeMap<Thread, BpfProgram> = Thread::ALL
        .into_iter()
        .map(|thread| Ok((thread, compile::filter(thread, otherwise.clone())?)))
        .collect::<Result<_, _>>()
        .map_err(|error: seccompiler::BackendError| Error::host(compiled).because(error))?;
    let refused = compile::refused().map_err(|error| Error::host(compiled).because(error))?;
    let main = if inherited {
        None
    } else {
        filters.get(&Thread::Vmm).cloned()
    };
    FILTERS
        .set(filters)
        .map_err(|_| Error::host("the system call filters are installed already"))?;
    devices::virtio::vdpa::at_relay_start(|| enter(Thread::Relay));
    for program in main.iter().chain(refused.iter().filter(|_| !inherited)) {
        seccompiler::apply_filter(program).map_err(|error| {
            Error::host(
                "cannot install the system call filters: this kernel may lack \
                 CONFIG_SECCOMP_FILTER; without them (BELLHOP_SECCOMP=off) a captured VMM can \
                 attack the kernel through every system call",
            )
            .because(error)
        })?;
    }
    Ok(())
}

/// Installs the filters of this kind on the calling thread, of a process that is no VMM, with
/// [limited memory](super::privileges::limit_memory).
///
/// # Errors
/// This kernel has no filters.
pub fn confine(thread: Thread) -> Result<(), Error> {
    let failed = "cannot install the system call filter";
    let programs = compile::confined(thread);
    for program in programs.map_err(|error| Error::host(failed).because(error))? {
        seccompiler::apply_filter(&program).map_err(|error| Error::host(failed).because(error))?;
    }
    Ok(())
}

/// Adds the filter of `thread` to the calling thread, if [`install`] has run. Call it at the start
/// of the thread. A thread must not run without its filter: a failure ends the process.
pub fn enter(thread: Thread) {
    let Some(program) = FILTERS.get().and_then(|filters| filters.get(&thread)) else {
        return;
    };
    if let Err(error) = seccompiler::apply_filter(program) {
        tracing::error!(?thread, %error, "cannot install a thread's system call filter");
        std::process::abort();
    }
}

/// The calls that this program makes, as a running VMM compares them before an upgrade.
pub(crate) fn needed() -> BTreeSet<String> {
    let rules = compile::rules(Thread::Vmm);
    rules.iter().map(ToString::to_string).collect()
}

/// The first of these calls that the filters of this process deny.
pub(crate) fn first_denied<'a>(calls: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    FILTERS.get()?;
    denied(&needed(), calls)
}

fn denied<'a>(
    allowed: &BTreeSet<String>,
    mut calls: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    // A call without conditions allows all arguments.
    let is_allowed = |call: &str| {
        let name = call.split(' ').next().unwrap_or(call);
        allowed.contains(call) || allowed.contains(name)
    };
    calls.find(|call| !is_allowed(call))
}
