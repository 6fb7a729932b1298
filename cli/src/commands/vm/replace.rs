//! `bellhop vm replace`.

use bellhop_common::client::{Address, Condition, Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::create::{VmArguments, Wanted, put};
use super::say;
use crate::confirm::Confirmation;

/// Replace a stopped VM, with its NICs, by another one
///
/// The arguments describe the whole new VM: it takes nothing from the former VM, and omitted
/// settings have their defaults. The daemon first checks boot files, disks and the sources of NICs.
/// If it cannot create the new VM, it restores the former one with its NICs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Keys of --nic, and keys in a file, are those of `bellhop vm create`. The daemon refuses to replace a
running VM: stop it first. An identical VM is only started, or stays stopped with --stopped.

Examples:
  bellhop vm stop web && bellhop vm replace web --kernel /boot/vmlinuz --memory 2G
  bellhop vm replace web --file web.toml")]
pub(crate) struct Arguments {
    #[command(flatten)]
    vm: VmArguments,

    #[command(flatten)]
    confirmation: Confirmation,
}

impl Arguments {
    /// The new VM.
    pub(super) fn wanted(&self, node: &Address) -> Result<Wanted, Error> {
        self.vm.wanted(node)
    }

    /// Requests confirmation from the user.
    pub(super) fn confirm(&self, wanted: &Wanted) -> Result<(), Error> {
        let question = format!("Replace {} and the NICs created for it?", wanted.name);
        self.confirmation.ask(question)
    }
}

pub(super) fn execute(
    wanted: &Wanted,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    say(&put(wanted, Condition::Present, which, node)?, format)
}
