//! `bellhop nic`: from a NIC to a vDPA device for a guest in one command, and back.

mod add;
mod list;
mod make;
mod remove;
mod show;
mod swap;
mod watch;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

/// Make a vDPA device out of a NIC in one command, and take everything back in another one
///
/// What is needed in between is done in order and remembered: virtual functions counted, the
/// function's address set, a vDPA driver bound (or a subfunction made), the device added, its
/// representor put on a bridge. If a step fails, those before it are undone.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop nic create nic0 --from enp1s0f0             prints /dev/vhost-vdpa-N
  bellhop run --vdpa path=$(bellhop nic create nic1 --from pci/0000:01:00.0) …
  bellhop nic create nic2 --from enp6s0f0np0 --connect bridge=br0,vlan=100
  bellhop nic list
  bellhop nic delete nic0

NICs of a VM, which the node daemon makes and takes back itself:
  bellhop nic add --vm web from=pci/0000:01:00.0,bridge=br0,vlan=100
  bellhop nic swap --vm web net1 --path /dev/vhost-vdpa-7
  bellhop nic delete --vm web net1

`nic create` leaves a record in /run/bellhop/nics before each step, so that `nic delete` can undo
what was done even if the command was killed in the middle. Both need root.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    format: Format,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(make::Arguments),
    Add(add::Arguments),
    Swap(swap::Arguments),
    Delete(remove::Arguments),
    List(list::Arguments),
    Show(show::Arguments),
}

/// Does what was asked.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let format = arguments.format;
    match &arguments.command {
        Command::Create(arguments) => make::execute(arguments, format),
        Command::Add(arguments) => add::execute(arguments, format),
        Command::Swap(arguments) => swap::execute(arguments, format),
        Command::Delete(arguments) => remove::execute(arguments),
        Command::List(_) => list::execute(format),
        Command::Show(arguments) => show::execute(arguments, format),
    }
}
