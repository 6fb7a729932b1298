//! `bellhop vm replace`.

use bellhop_common::client::{Address, Condition, Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::create::{VmArguments, Wanted, put};
use super::say;
use crate::confirm::Confirmation;

/// Put another VM, with its NICs, in the place of one that is stopped
///
/// The arguments describe the new VM as a whole: what they leave out has its default, and is not
/// taken from the former VM. Boot files, disks and the sources of NICs are checked first. If the
/// new VM cannot be created nevertheless, the former one is put back with its NICs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Keys of --nic, and keys in a file, are those of `bellhop vm create`. A VM that runs is not replaced:
stop it first. The same VM again is started, or with --stopped stays stopped.

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
        let question = format!("Replace {} and the NICs made for it?", wanted.name);
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
