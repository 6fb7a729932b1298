//! The sandbox of `bellhop run`, entered before the log, the sockets and the VM exist.
//!
//! Owns its options, and which directories stay visible.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bellhop_common::error::Error;
use clap::ValueEnum;
use vmm::sandbox::landlock::Tcp;
use vmm::sandbox::{self, Own, seccomp};

/// Whether this process confines itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum Sandbox {
    /// It gives up its capabilities, system calls and access to files
    On,
    /// It keeps the privileges of its user
    #[default]
    Off,
}

/// The options of the sandbox.
#[derive(Debug, clap::Args)]
pub(super) struct SandboxArguments {
    /// on: give up all capabilities, and the system calls that no VM needs, before the VM exists.
    /// Write no core file (the guest's memory). The user stays: run this as a user of its own, who
    /// may use the devices
    #[arg(
        long,
        value_name = "on|off",
        env = "BELLHOP_SANDBOX",
        default_value = "off",
        hide_possible_values = true
    )]
    sandbox: Sandbox,

    /// Also become this user and group, with an empty root: only the directories of the sockets and
    /// logs stay, and must belong to the user. The daemon brings in the VM's files
    #[arg(long, value_name = "UID", hide = true, requires = "api_socket")]
    sandbox_user: Option<u32>,

    /// System call filters: on, off, or log for developers; the default is that of --sandbox
    #[arg(long, value_name = "MODE", env = "BELLHOP_SECCOMP", hide = true)]
    seccomp: Option<seccomp::Mode>,
}

impl SandboxArguments {
    /// The mode of the system call filters.
    pub(super) fn filters(&self) -> seccomp::Mode {
        self.seccomp.unwrap_or(match self.sandbox {
            Sandbox::On => seccomp::Mode::On,
            Sandbox::Off => seccomp::Mode::Off,
        })
    }

    /// A VM of the daemon has no network, and connects nothing.
    pub(super) fn tcp(&self) -> Tcp {
        self.sandbox_user.map_or(Tcp::Allowed, |_| Tcp::Denied)
    }

    /// Enters the sandbox, if the options request it. `files` are the sockets and logs.
    pub(super) fn enter(&self, files: &[Option<&Path>]) -> Result<(), Error> {
        if self.sandbox == Sandbox::Off {
            return Ok(());
        }
        let directories = files.iter().flatten().filter_map(|file| file.parent());
        let directories: BTreeSet<PathBuf> = directories.map(Path::to_owned).collect();
        let own = self.sandbox_user.map(|user| Own {
            user,
            directories: directories.into_iter().collect(),
        });
        let entered = sandbox::enter(own.as_ref());
        entered.map_err(Error::context("cannot confine the VM's process"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// System call filters are the part that a developer may override.
    #[test]
    fn a_sandbox_has_filters_unless_another_mode_is_given() {
        for (sandbox, given, wanted) in [
            (Sandbox::On, None, seccomp::Mode::On),
            (Sandbox::Off, None, seccomp::Mode::Off),
            (Sandbox::On, Some(seccomp::Mode::Log), seccomp::Mode::Log),
            (Sandbox::Off, Some(seccomp::Mode::On), seccomp::Mode::On),
        ] {
            let arguments = SandboxArguments {
                sandbox,
                sandbox_user: None,
                seccomp: given,
            };
            assert_eq!(arguments.filters(), wanted, "{arguments:?}");
        }
    }
}
