//! `bellhop vm disk`: disks of a VM, which can be added and removed while it runs.

mod add;
mod list;

use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::removal;

/// Add, remove and list a VM's disks
///
/// The VM may run. Each later start has the disks that it has now.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm disk add web path=/var/lib/images/data.img,id=data
  bellhop vm disk list web
  bellhop vm disk remove web data")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Add(add::Arguments),
    /// Remove a disk from a VM
    ///
    /// The guest of a running VM is asked to release it. The image stays.
    #[command(
        visible_alias = "rm",
        alias = "delete",
        after_long_help = "\
The command waits up to 30 s until the guest has released the disk. A slower guest keeps it until it
releases it, or until a reset or stop. Unmount the disk in the guest first.

Examples:
  bellhop vm disk remove web data"
    )]
    Remove(removal::Arguments),
    List(list::Arguments),
}

/// Runs the subcommand.
pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    match &arguments.command {
        Command::Add(arguments) => add::execute(arguments, which, node, format),
        Command::Remove(arguments) => arguments.execute(node, "disk", "disks", format),
        Command::List(arguments) => list::execute(arguments, node, format),
    }
}
