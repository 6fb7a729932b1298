//! `bellhop vm nic`: NICs of a VM, which can be added and removed while it runs.

pub(crate) mod add;
mod list;
pub(crate) mod swap;

use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::removal;

/// Add, remove, list and move a VM's NICs
///
/// The VM may run. Each later start has the NICs that it has now.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm nic add web from=pci/0000:01:00.0,bridge=br0,vlan=100
  bellhop vm nic list web
  bellhop vm nic swap web net1 --path /dev/vhost-vdpa-7
  bellhop vm nic remove web net1")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Add(Box<add::Arguments>),
    /// Remove a NIC from a VM
    ///
    /// The guest of a running VM is asked to release it. The daemon then deletes the device that it
    /// created for the NIC.
    #[command(
        visible_alias = "rm",
        alias = "delete",
        after_long_help = "\
The command waits up to 30 s until the guest has released the NIC. A slower guest keeps it until it
releases it, or until a reset or stop.

Examples:
  bellhop vm nic remove web net1"
    )]
    Remove(removal::Arguments),
    List(list::Arguments),
    Swap(swap::Arguments),
}

/// Runs the subcommand.
pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    match &arguments.command {
        Command::Add(add) => {
            let add::Arguments { vm, options } = &**add;
            add::execute(vm, options, which, node, format)
        }
        Command::Remove(arguments) => arguments.execute(node, "NIC", "nics", format),
        Command::List(arguments) => list::execute(arguments, node, format),
        Command::Swap(swap::Arguments { vm, options }) => {
            swap::execute(vm, options, which, node, format)
        }
    }
}
