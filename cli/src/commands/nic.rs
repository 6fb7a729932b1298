//! `bellhop nic`: creates a vDPA device for a guest from a NIC in one command, and deletes it.

pub(crate) mod keep;
mod list;
mod make;
mod of_vm;
mod remove;
mod show;
pub(crate) mod watch;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use self::of_vm::OfVm;
use super::vm::nic::{add, swap};

/// Create a vDPA device on a NIC in one command, and undo it
///
/// The command runs all steps in order and records them. It creates virtual functions, sets the
/// function's address and binds a vDPA driver (or creates a subfunction). Then it adds the device
/// and attaches its representor to a bridge. If a step fails, it undoes the earlier ones.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop nic create nic0 --from enp1s0f0             prints /dev/vhost-vdpa-N
  bellhop run --vdpa path=$(bellhop nic create nic1 --from pci/0000:01:00.0) …
  bellhop nic create nic2 --from enp6s0f0np0 --connect bridge=br0,vlan=100
  bellhop nic list
  bellhop nic delete nic0

The node daemon creates and deletes the NICs of its VMs itself: `bellhop vm nic`.

`nic create` writes a record in /run/bellhop/nics before each step. So `nic delete` can undo the
steps even if the command was killed halfway. Both need root.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(make::Arguments),
    /// As `bellhop vm nic add`
    #[command(hide = true)]
    Add(Box<OfVm<add::Options>>),
    /// As `bellhop vm nic swap`
    #[command(hide = true)]
    Swap(OfVm<swap::Options>),
    Delete(remove::Arguments),
    List(list::Arguments),
    Show(show::Arguments),
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    match &arguments.command {
        Command::Create(arguments) => make::execute(arguments, format),
        Command::Add(add) => {
            let OfVm { vm, options, node } = &**add;
            let which = node.resolved()?;
            add::execute(vm, options, &which, &which.connect()?, format)
        }
        Command::Swap(OfVm { vm, options, node }) => {
            let which = node.resolved()?;
            swap::execute(vm, options, &which, &which.connect()?, format)
        }
        Command::Delete(arguments) => remove::execute(arguments, format),
        Command::List(_) => list::execute(format),
        Command::Show(arguments) => show::execute(arguments, format),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn earlier_spellings_of_a_vms_nics_are_understood() {
        for line in [
            "nic add --vm web id=a,from=b",
            "nic swap --vm web net1 --path /dev/vhost-vdpa-7",
            "nic swap net1 --vm web --device spare0",
            "nic remove --vm web net1",
            "nic delete net1 --vm web",
        ] {
            Line::try_parse_from(line.split(' ')).unwrap();
        }
        for line in ["nic add web id=a,from=b", "nic swap --vm web net1"] {
            Line::try_parse_from(line.split(' ')).unwrap_err();
        }
    }
}
