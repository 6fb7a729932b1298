//! `bellhop port`: ports of NICs, and the subfunctions and virtual functions behind them.

mod find;
mod function;
mod rate;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::management::port::{listing, rate_listing};
use serde_json::json;
use vdpa_mgmt::devlink::{Devlink, Handle, NewSubfunction, PortHandle};

use self::find::{by_interface, find};
use super::parse::{self, Words};
use crate::confirm::Confirmation;

/// Show ports of NICs, and add, set up and delete subfunctions
///
/// Words, output and JSON keys are those of iproute2's `devlink port`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
DEV is a NIC's function with its devlink name: BUS/DEVICE, such as pci/0000:06:00.0. PORT is one of
its ports, DEV/INDEX, such as pci/0000:06:00.0/32768, or the name of the port's network interface.

From a NIC in switchdev mode to a subfunction in use, and back:
  bellhop port add pci/0000:06:00.0 flavour pcisf pfnum 0 sfnum 88
  bellhop port function set pci/0000:06:00.0/32768 hw_addr 52:54:00:12:34:56 state active
  bellhop port show                         with nested_devlink, the subfunction's own instance
  bellhop port function set pci/0000:06:00.0/32768 state inactive
  bellhop port del pci/0000:06:00.0/32768

The interface behind `netdev` is the port's representor: the function receives the frames that it
sends. Changes need CAP_NET_ADMIN.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show all ports, those of one NIC's function, or one
    #[command(visible_aliases = ["list", "ls", "get"], after_long_help = SHOW_HELP)]
    Show {
        /// The port or the NIC's function
        #[arg(value_name = "PORT | DEV")]
        port: Option<String>,
    },
    /// Add the port of a new subfunction, and show it
    ///
    /// The subfunction is inactive: give it an address first, then make it active.
    #[command(
        override_usage = "bellhop port add DEV flavour pcisf pfnum PFNUM [sfnum SFNUM] \
                          [controller CNUM]",
        after_long_help = ADD_HELP
    )]
    Add {
        /// The NIC's function that gets the subfunction, or with DEV/INDEX also the port's index
        #[arg(value_name = "DEV")]
        device: String,
        /// Pairs of a word and its value
        #[arg(value_name = "WORD VALUE", required = true, num_args = 1..)]
        words: Vec<String>,
    },
    /// Delete an added port and its subfunction
    ///
    /// The NIC deletes a vDPA device on the subfunction with it. Deactivate the function first: the
    /// NIC's driver may refuse otherwise.
    #[command(
        visible_aliases = ["delete", "rm"],
        after_long_help = "\
Examples:
  bellhop port function set pci/0000:06:00.0/32768 state inactive
  bellhop port del pci/0000:06:00.0/32768"
    )]
    Del {
        /// The port
        port: String,
        #[command(flatten)]
        confirmation: Confirmation,
    },
    /// Configure the function behind a port, and its rates
    #[command(
        subcommand,
        after_long_help = "\
Examples:
  bellhop port function set pci/0000:06:00.0/32768 hw_addr 52:54:00:12:34:56 state active
  bellhop port function rate set pci/0000:06:00.0/32768 tx_max 1gbit"
    )]
    Function(function::Command),
}

const SHOW_HELP: &str = "\
Fields:
  type           the protocol of the port: eth, ib
  netdev         its network interface in this network namespace: a function's representor
  flavour        physical (it has a cable), pcipf, pcivf, pcisf (it leads to a function), cpu, dsa,
                 virtual
  controller, pfnum, vfnum, sfnum   which function; external is true for another host's function
  port, lanes, splittable           of a physical port
  function       hw_addr, its address; state, as requested; opstate, whether a driver uses it;
                 roce, migratable, ipsec_crypto, ipsec_packet, max_io_eqs, its capabilities;
                 nested_devlink, its own instance

Examples:
  bellhop port show
  bellhop port show pci/0000:06:00.0/32768 -jp
  bellhop port show enp6s0f0np0";

const ADD_HELP: &str = "\
Words:
  flavour pcisf      a subfunction's port; no other flavour can be added
  pfnum PFNUM        the number of its PCI function: 0 for pci/0000:06:00.0
  sfnum SFNUM        its number, which must be unique; some drivers choose it themselves
  controller CNUM    the host that it is for, if the NIC serves several (default: 0)

The eswitch of the NIC must be in switchdev mode.

Examples:
  bellhop port add pci/0000:06:00.0 flavour pcisf pfnum 0 sfnum 88";

/// Runs the subcommand, and prints its result.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    match &arguments.command {
        Command::Show { port } => {
            let devlink = Devlink::open()?;
            let ports = match port.as_deref() {
                None => devlink.ports()?,
                Some(text) => match text.parse::<PortHandle>() {
                    Ok(port) => vec![devlink.port(&port)?],
                    Err(_) => match text.parse::<Handle>() {
                        Ok(handle) => devlink.ports_of(&handle)?,
                        Err(_) => vec![by_interface(&devlink, text)?],
                    },
                },
            };
            listing(&ports).print(format)
        }
        Command::Add { device, words } => {
            let (handle, subfunction) = new_subfunction(device, words)?;
            let port = Devlink::open()?.add_port(&handle, &subfunction)?;
            listing(&[port]).print(format)
        }
        Command::Del { port, confirmation } => {
            let devlink = Devlink::open()?;
            let port = find(&devlink, port)?;
            confirmation.ask(format!("Delete the port {port} and its subfunction?"))?;
            devlink.delete_port(&port)?;
            format.print_done(&json!({ "name": port.to_string(), "deleted": true }))
        }
        Command::Function(command) => match command.carry_out()? {
            Some(rates) => rate_listing(&rates).print(format),
            None => format.print_done(&json!({ "changed": true })),
        },
    }
}

fn new_subfunction(device: &str, words: &[String]) -> Result<(Handle, NewSubfunction), Error> {
    let words = Words::parse(words, &["flavour", "pfnum", "sfnum", "controller"])?;
    words.needed("flavour", |word, value| match value {
        "pcisf" => Ok(()),
        _ => {
            let known = "pcisf; ports of other flavours cannot be added";
            Err(parse::choice(word, value, known))
        }
    })?;
    let (handle, port_index) = match device.parse::<PortHandle>() {
        Ok(port) => (port.handle().clone(), Some(port.index())),
        Err(_) => (device.parse()?, None),
    };
    let subfunction = NewSubfunction {
        pfnum: words.needed("pfnum", parse::number)?,
        sfnum: words.take("sfnum", parse::number)?,
        controller: words.take("controller", parse::number)?,
        port_index,
    };
    Ok((handle, subfunction))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subfunction_is_read_from_words() {
        let read = |device: &str, text: &str| {
            let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
            new_subfunction(device, &words)
        };
        let (handle, new) = read("pci/0000:06:00.0", "flavour pcisf pfnum 0 sfnum 88").unwrap();
        assert_eq!(handle.to_string(), "pci/0000:06:00.0");
        assert_eq!((new.pfnum, new.sfnum), (0, Some(88)));
        assert_eq!((new.controller, new.port_index), (None, None));
        let (_, new) = read("pci/0000:06:00.0/7", "controller 1 pfnum 1 flavour pcisf").unwrap();
        assert_eq!((new.controller, new.port_index), (Some(1), Some(7)));
        assert_eq!(new.sfnum, None);
        for (device, text) in [
            ("pci/0000:06:00.0", "pfnum 0 sfnum 88"),
            ("pci/0000:06:00.0", "flavour pcisf sfnum 88"),
            ("pci/0000:06:00.0", "flavour pcivf pfnum 0"),
            ("pci/0000:06:00.0", "flavour pcisf pfnum 65536"),
            ("pci/0000:06:00.0", "flavour pcisf pfnum 0 sfnum -1"),
            ("eth0", "flavour pcisf pfnum 0"),
            ("pci/0000:06:00.0/x/y", "flavour pcisf pfnum 0"),
        ] {
            assert!(read(device, text).is_err(), "{device} {text}");
        }
    }
}
