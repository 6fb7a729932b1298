//! Linux's names for the ports of a NIC's switch (net/devlink/port.c,
//! `__devlink_port_phys_port_name_get`).

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};

/// The peer of a port of a NIC's switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PhysPortName {
    /// The NIC's own port, `p0`; a part of a split port, `p0s1`.
    Physical {
        /// Its number.
        port: u32,
        /// Its part, if it was split.
        split: Option<u32>,
    },
    /// A physical function, `pf0`; that of another host's processor on this NIC, `c1pf0`.
    PhysicalFunction {
        /// The other host's number on this NIC.
        controller: Option<u32>,
        /// The function's number.
        pf: u16,
    },
    /// A virtual function, `pf0vf1`.
    VirtualFunction {
        /// The other host's number on this NIC.
        controller: Option<u32>,
        /// The number of its physical function.
        pf: u16,
        /// Its number, from 0.
        vf: u16,
    },
    /// A subfunction, `pf0sf88`.
    Subfunction {
        /// The other host's number on this NIC.
        controller: Option<u32>,
        /// The number of its physical function.
        pf: u16,
        /// Its number, set at creation.
        sf: u32,
    },
}

impl FromStr for PhysPortName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::read(text)
            .ok_or_else(|| Error::new(ErrorKind::BadName, "it is not the name of a NIC's port"))
    }
}

impl PhysPortName {
    fn read(text: &str) -> Option<Self> {
        let (controller, rest) = match text.strip_prefix('c') {
            Some(rest) => {
                let (number, rest) = leading_number(rest)?;
                (Some(number), rest)
            }
            None => (None, text),
        };
        let Some(rest) = rest.strip_prefix("pf") else {
            let (port, rest) = leading_number(rest.strip_prefix('p')?)?;
            let split = match rest.strip_prefix('s') {
                Some(part) => Some(whole_number(part)?),
                None if rest.is_empty() => None,
                None => return None,
            };
            return controller
                .is_none()
                .then_some(Self::Physical { port, split });
        };
        let (pf, rest) = leading_number(rest)?;
        let pf = u16::try_from(pf).ok()?;
        if rest.is_empty() {
            return Some(Self::PhysicalFunction { controller, pf });
        }
        if let Some(number) = rest.strip_prefix("vf") {
            let vf = u16::try_from(whole_number(number)?).ok()?;
            return Some(Self::VirtualFunction { controller, pf, vf });
        }
        let sf = whole_number(rest.strip_prefix("sf")?)?;
        Some(Self::Subfunction { controller, pf, sf })
    }
}

/// The leading number of the text, in the kernel's spelling, and the rest.
fn leading_number(text: &str) -> Option<(u32, &str)> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(digits);
    let number: u32 = digits.parse().ok()?;
    (number.to_string() == digits).then_some((number, rest))
}

fn whole_number(text: &str) -> Option<u32> {
    let (number, rest) = leading_number(text)?;
    rest.is_empty().then_some(number)
}

impl fmt::Display for PhysPortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let controller = match *self {
            Self::Physical { .. } => None,
            Self::PhysicalFunction { controller, .. }
            | Self::VirtualFunction { controller, .. }
            | Self::Subfunction { controller, .. } => controller,
        };
        if let Some(controller) = controller {
            write!(f, "c{controller}")?;
        }
        match self {
            Self::Physical { port, split: None } => write!(f, "p{port}"),
            Self::Physical {
                port,
                split: Some(split),
            } => write!(f, "p{port}s{split}"),
            Self::PhysicalFunction { pf, .. } => write!(f, "pf{pf}"),
            Self::VirtualFunction { pf, vf, .. } => write!(f, "pf{pf}vf{vf}"),
            Self::Subfunction { pf, sf, .. } => write!(f, "pf{pf}sf{sf}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_read_and_written() {
        for name in [
            "p0",
            "p12s3",
            "pf0",
            "c1pf0",
            "pf0vf1",
            "c2pf1vf65535",
            "pf0sf88",
            "c1pf0sf4294967295",
        ] {
            let read: PhysPortName = name.parse().unwrap();
            assert_eq!(read.to_string(), name);
        }
        let function = PhysPortName::VirtualFunction {
            controller: None,
            pf: 0,
            vf: 7,
        };
        assert_eq!("pf0vf7".parse::<PhysPortName>().unwrap(), function);
    }

    #[test]
    fn other_text_is_no_port() {
        for name in [
            "",
            "p",
            "pf",
            "p01",
            "pf00",
            "pf0vf",
            "pf0vf01",
            "pf0vf65536",
            "pf65536",
            "c1p0",
            "cpf0",
            "p0s",
            "p0x",
            "pf0sf4294967296",
            "pf0vf1x",
            "pf0xf1",
            "p+1",
            "eth0",
            "p-1",
            "pf0 vf1",
        ] {
            assert!(name.parse::<PhysPortName>().is_err(), "{name}");
        }
    }

    proptest! {
        #[test]
        fn parsed_names_are_printed_alike(
            text in "(c[0-9]{1,3})?pf?[0-9]{0,6}([svf]{1,2}[0-9]{0,11})?",
        ) {
            if let Ok(read) = text.parse::<PhysPortName>() {
                prop_assert_eq!(read.to_string(), text);
            }
        }
    }
}
