//! `bellhop port function rate`: transmit rates of functions and of groups of functions.

use bellhop_common::error::Error;
use vdpa_mgmt::devlink::{Devlink, NodeName, Rate, RateObject, RateParent, RateSettings};

use super::by_interface;
use crate::commands::parse::{self, Words};

/// The help text that both have in common, then an example.
macro_rules! help {
    ($example:literal) => {
        concat!(
            "\
Words:
  tx_share RATE     its guaranteed rate; 0 is none
  tx_max RATE       its maximum rate; 0 is no limit
  tx_priority N     higher priorities send first
  tx_weight N       its share among equal priorities
  parent NODE       put it into this group of the same NIC's function
  noparent          take it out of its group

RATE is a number with a unit: bit, kbit, mbit, gbit, tbit (bits per second, factors of 1000), bps,
kbps, mbps, gbps, tbps (bytes), or kibit, …, kibps, … (factors of 1024). Without a unit it is bits
per second.

Examples:
  ",
            $example
        )
    };
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Show the rates of all functions and groups, or of one
    #[command(
        visible_aliases = ["list", "ls", "get"],
        after_long_help = "\
Examples:
  bellhop port function rate show
  bellhop port function rate show pci/0000:06:00.0/32768 -jp"
    )]
    Show {
        /// A port (DEV/INDEX, or the name of its network interface) or a group (DEV/NODE)
        #[arg(value_name = "PORT | NODE")]
        object: Option<String>,
    },
    /// Add a group of functions
    #[command(
        override_usage = "bellhop port function rate add DEV/NODE [tx_share RATE] [tx_max RATE] \
                          [tx_priority N] [tx_weight N] [parent NODE | noparent]",
        after_long_help = help!("bellhop port function rate add pci/0000:06:00.0/web tx_max 10gbit")
    )]
    Add {
        /// The group: DEV/NODE, where NODE is a name that is not a number
        #[arg(value_name = "DEV/NODE")]
        node: String,
        /// Pairs of a word and its value
        #[arg(value_name = "WORD VALUE", num_args = 0..)]
        words: Vec<String>,
    },
    /// Change the rate of a function or a group
    #[command(
        override_usage = "bellhop port function rate set PORT|DEV/NODE [tx_share RATE] \
                          [tx_max RATE] [tx_priority N] [tx_weight N] [parent NODE | noparent]",
        after_long_help =
            help!("bellhop port function rate set pci/0000:06:00.0/32768 parent web tx_share 4gbit")
    )]
    Set {
        /// A port (DEV/INDEX, or the name of its network interface) or a group (DEV/NODE)
        #[arg(value_name = "PORT | NODE")]
        object: String,
        /// Pairs of a word and its value
        #[arg(value_name = "WORD VALUE", required = true, num_args = 1..)]
        words: Vec<String>,
    },
    /// Delete an empty group
    #[command(
        visible_aliases = ["delete", "rm"],
        after_long_help = "\
Examples:
  bellhop port function rate del pci/0000:06:00.0/web"
    )]
    Del {
        /// The group: DEV/NODE
        #[arg(value_name = "DEV/NODE")]
        node: String,
    },
}

impl Command {
    /// Runs the subcommand. Returns the rates to print, if any.
    pub(super) fn carry_out(&self) -> Result<Option<Vec<Rate>>, Error> {
        match self {
            Self::Show { object } => {
                let devlink = Devlink::open()?;
                return Ok(Some(match object {
                    Some(text) => vec![devlink.rate(&find(&devlink, text)?)?],
                    None => devlink.rates()?,
                }));
            }
            Self::Add { node, words } => {
                let (node, settings) = (node.parse::<NodeName>()?, settings(words)?);
                Devlink::open()?.add_rate(&node, &settings)?;
            }
            Self::Set { object, words } => {
                let settings = settings(words)?;
                let devlink = Devlink::open()?;
                devlink.set_rate(&find(&devlink, object)?, &settings)?;
            }
            Self::Del { node } => {
                let node: NodeName = node.parse()?;
                Devlink::open()?.delete_rate(&node)?;
            }
        }
        Ok(None)
    }
}

/// The rate object that an argument names.
fn find(devlink: &Devlink, text: &str) -> Result<RateObject, Error> {
    match text.parse() {
        Ok(object) => Ok(object),
        Err(_) if !text.contains('/') => Ok(RateObject::Leaf(by_interface(devlink, text)?.handle)),
        Err(error) => Err(error.into()),
    }
}

fn settings(words: &[String]) -> Result<RateSettings, Error> {
    // The only word without a value.
    let is_noparent = |word: &&String| *word == "noparent";
    let noparent = words.iter().filter(is_noparent).count();
    let pairs: Vec<String> = words
        .iter()
        .filter(|word| !is_noparent(word))
        .cloned()
        .collect();
    let known = ["tx_share", "tx_max", "tx_priority", "tx_weight", "parent"];
    let words = Words::parse(&pairs, &known)?;
    let parent = match (words.take("parent", parse::text)?, noparent) {
        (parent, 0) => parent.map(RateParent::Node),
        (None, 1) => Some(RateParent::None),
        _ => return Err(parse::twice("parent or noparent")),
    };
    Ok(RateSettings {
        tx_share: words.take("tx_share", bytes_per_second)?,
        tx_max: words.take("tx_max", bytes_per_second)?,
        tx_priority: words.take("tx_priority", parse::number)?,
        tx_weight: words.take("tx_weight", parse::number)?,
        parent,
    })
}

/// Units of rates, in bits per second, as in iproute2.
const UNITS: [(&str, u64); 19] = [
    ("", 1),
    ("bit", 1),
    ("kbit", 1000),
    ("mbit", 1_000_000),
    ("gbit", 1_000_000_000),
    ("tbit", 1_000_000_000_000),
    ("kibit", 1 << 10),
    ("mibit", 1 << 20),
    ("gibit", 1 << 30),
    ("tibit", 1 << 40),
    ("bps", 8),
    ("kbps", 8000),
    ("mbps", 8_000_000),
    ("gbps", 8_000_000_000),
    ("tbps", 8_000_000_000_000),
    ("kibps", 8 << 10),
    ("mibps", 8 << 20),
    ("gibps", 8 << 30),
    ("tibps", 8 << 40),
];

/// A rate in bytes per second from a number, which may have a fraction, and a unit.
fn bytes_per_second(word: &'static str, value: &str) -> Result<u64, Error> {
    let read = || {
        let end = value
            .bytes()
            .position(|byte| !byte.is_ascii_digit() && byte != b'.');
        let (number, unit) = value.split_at(end.unwrap_or(value.len()));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let unit = unit.to_ascii_lowercase();
        let scale = UNITS.iter().find(|one| one.0 == unit)?.1;
        // Enough digits for each bit of the largest unit.
        if fraction.len() > 12 || whole.len() + fraction.len() == 0 {
            return None;
        }
        let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
        let divisor = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        let bits = digits.checked_mul(u128::from(scale))? / divisor;
        u64::try_from(bits / 8).ok()
    };
    read().ok_or_else(|| {
        Error::wrong(format!(
            "{word} {value:?} is not a rate, such as 100mbit or 1.5gbit"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_with_their_units() {
        for (text, bytes) in [
            ("0", 0),
            ("8", 1),
            ("10mbit", 1_250_000),
            ("10Mbit", 1_250_000),
            ("1.5gbit", 187_500_000),
            (".5kbit", 62),
            ("1kibit", 128),
            ("1MBps", 1_000_000),
            ("1MiBps", 1 << 20),
            ("7bit", 0),
            ("18446744073709551615bps", u64::MAX),
        ] {
            assert_eq!(bytes_per_second("tx_max", text).unwrap(), bytes, "{text}");
        }
        for bad in [
            "",
            ".",
            "mbit",
            "-1",
            "+1",
            "1e3",
            "1.2.3",
            "1 mbit",
            "1mb",
            "x",
            "18446744073709551616bps",
            "99999999999999999999999999999999999999999",
            "0.0000000000001tbit",
        ] {
            assert!(bytes_per_second("tx_max", bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_parent_is_set_or_cleared() {
        let read = |text: &str| {
            let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            settings(&words).map(|settings| settings.parent)
        };
        assert_eq!(read("").unwrap(), None);
        assert_eq!(
            read("noparent tx_max 1mbit").unwrap(),
            Some(RateParent::None)
        );
        let node = Some(RateParent::Node("all".to_owned()));
        assert_eq!(read("tx_max 1mbit parent all").unwrap(), node);
        for bad in ["noparent parent all", "noparent noparent", "parent"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
