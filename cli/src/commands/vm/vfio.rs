//! `bellhop vm vfio`: PCI functions of a VM, which can be added and removed while it runs.

mod add;
mod list;

use bellhop_common::client::Node;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::removal;

/// Add, remove and list PCI functions that a VM drives by VFIO
///
/// The VM may run. Each later start has the functions that it has now.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm vfio add web host=0000:03:10.1,id=vf
  bellhop vm vfio list web
  bellhop vm vfio remove web vf")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Add(add::Arguments),
    /// Remove a function from a VM
    ///
    /// The guest of a running VM is asked to release it. Then the function gets its former driver
    /// again.
    #[command(
        visible_alias = "rm",
        alias = "delete",
        after_long_help = "\
The command waits up to 30 s until the guest has released the function. A slower guest keeps it
until it releases it, or until a reset or stop.

Examples:
  bellhop vm vfio remove web vf"
    )]
    Remove(removal::Arguments),
    List(list::Arguments),
}

/// Runs the subcommand.
pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    match &arguments.command {
        Command::Add(arguments) => add::execute(arguments, node, format),
        Command::Remove(arguments) => arguments.execute(node, "function", "vfio", format),
        Command::List(arguments) => list::execute(arguments, node, format),
    }
}
