//! `bellhop port function`: the settings of the function behind a port.

use bellhop_common::error::Error;
use vdpa_mgmt::devlink::{Capabilities, Devlink, FunctionSettings, FunctionState, Rate};

use super::{find, rate};
use crate::commands::parse::{self, Words};

#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Configure the function behind a port
    ///
    /// The command sets the state last and separately: a driver uses the function only once it is
    /// active.
    #[command(
        override_usage = "bellhop port function set PORT [hw_addr ADDR] [roce enable|disable] \
                          [migratable enable|disable] [ipsec_crypto enable|disable] \
                          [ipsec_packet enable|disable] [max_io_eqs EQS] [state active|inactive]",
        after_long_help = SET_HELP
    )]
    Set {
        /// The port: DEV/INDEX, or the name of its network interface
        port: String,
        /// Pairs of a word and its value
        #[arg(value_name = "WORD VALUE", required = true, num_args = 1..)]
        words: Vec<String>,
    },
    /// Show and limit transmit rates of functions and groups
    #[command(
        subcommand,
        after_long_help = "\
Two functions share 10 Gbit/s, and one of them has 4 Gbit/s guaranteed:
  bellhop port function rate add pci/0000:06:00.0/web tx_max 10gbit
  bellhop port function rate set pci/0000:06:00.0/32768 parent web tx_share 4gbit
  bellhop port function rate set pci/0000:06:00.0/32769 parent web"
    )]
    Rate(rate::Command),
}

const SET_HELP: &str = "\
Words:
  hw_addr ADDR               the function's address, such as 52:54:00:12:34:56
  state active|inactive      whether a driver may use it
  roce enable|disable        RDMA over Ethernet, for which the NIC reserves memory
  migratable enable|disable  migration to another host (virtual functions)
  ipsec_crypto, ipsec_packet enable|disable   IPsec in the NIC (virtual functions)
  max_io_eqs EQS             the maximum number of its event queues

Each driver supports some of these, and most only while the function is inactive.

Examples:
  bellhop port function set pci/0000:06:00.0/32768 hw_addr 52:54:00:12:34:56 state active
  bellhop port function set pci/0000:06:00.0/32768 state inactive";

impl Command {
    /// Runs the subcommand. Returns the rates to print, if any.
    pub(super) fn carry_out(&self) -> Result<Option<Vec<Rate>>, Error> {
        match self {
            Self::Set { port, words } => {
                let settings = settings(words)?;
                let devlink = Devlink::open()?;
                devlink.set_function(&find(&devlink, port)?, &settings)?;
                Ok(None)
            }
            Self::Rate(command) => command.carry_out(),
        }
    }
}

fn settings(words: &[String]) -> Result<FunctionSettings, Error> {
    let known = [
        "hw_addr",
        "state",
        "roce",
        "migratable",
        "ipsec_crypto",
        "ipsec_packet",
        "max_io_eqs",
    ];
    let words = Words::parse(words, &known)?;
    let state = parse::one_of([
        ("active", FunctionState::Active),
        ("inactive", FunctionState::Inactive),
    ]);
    let switch = parse::one_of([("enable", true), ("disable", false)]);
    Ok(FunctionSettings {
        hw_addr: words.take("hw_addr", parse::mac)?,
        capabilities: Capabilities {
            roce: words.take("roce", &switch)?,
            migratable: words.take("migratable", &switch)?,
            ipsec_crypto: words.take("ipsec_crypto", &switch)?,
            ipsec_packet: words.take("ipsec_packet", &switch)?,
        },
        max_io_eqs: words.take("max_io_eqs", parse::number)?,
        state: words.take("state", state)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_from_words() {
        let read = |text: &str| {
            let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
            settings(&words)
        };
        let all = "state active hw_addr 52:54:00:12:34:56 roce disable max_io_eqs 8";
        let found = read(all).unwrap();
        assert_eq!(found.state, Some(FunctionState::Active));
        assert_eq!(found.hw_addr, Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
        assert_eq!(found.capabilities.roce, Some(false));
        assert_eq!(found.capabilities.migratable, None);
        assert_eq!(found.max_io_eqs, Some(8));
        for bad in [
            "state up",
            "roce on",
            "hw_addr 01:00:00:00:00:01",
            "mac 02:00:00:00:00:01",
            "max_io_eqs x",
            "state",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
