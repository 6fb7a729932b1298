//! The address of a PCI function: domain, bus, device and function number.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};

/// The address of a PCI function, checked, in the kernel's spelling: `0000:01:00.1`. Parsing
/// accepts it with and without the prefix `pci/`, also through serde.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Address {
    /// Wider than the four digits of most machines if a controller adds its own domains.
    domain: u32,
    bus: u8,
    /// 0 to 31.
    device: u8,
    /// 0 to 7.
    function: u8,
}

vdpa::text_form!(Address, Error);

impl Address {
    /// The function's number in its device, 0 to 7, which physical functions have in port names.
    #[must_use]
    pub fn function(&self) -> u8 {
        self.function
    }
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let read = || {
            let address = text.strip_prefix("pci/").unwrap_or(text);
            let (domain, rest) = address.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            Some(Self {
                domain: hexadecimal(domain, 4, 8)?,
                bus: u8::try_from(hexadecimal(bus, 2, 2)?).ok()?,
                device: below(hexadecimal(device, 2, 2)?, 32)?,
                function: below(hexadecimal(function, 1, 1)?, 8)?,
            })
        };
        read().ok_or_else(|| {
            let message = format!(
                "{text:?} is not the address of a PCI function: write it as \
                 DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, such as 0000:01:00.1"
            );
            Error::new(ErrorKind::BadName, message)
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// A number with this many digits. `from_str_radix` alone would accept a sign.
fn hexadecimal(digits: &str, shortest: usize, longest: usize) -> Option<u32> {
    let right = (shortest..=longest).contains(&digits.len())
        && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    right.then(|| u32::from_str_radix(digits, 16).ok())?
}

fn below(number: u32, limit: u8) -> Option<u8> {
    u8::try_from(number).ok().filter(|&number| number < limit)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn addresses_are_written_as_the_kernel_writes_them() {
        for (text, written) in [
            ("0000:01:00.1", "0000:01:00.1"),
            ("pci/0000:3B:1f.7", "0000:3b:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), written);
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in [
            "",
            "pci/",
            "01:00.1",
            "0000:01:00",
            "0000:01:20.0",
            "0000:01:00.8",
            "0000:01:00.01",
            "0000:1:00.0",
            "+000:01:00.0",
            "0000:01:00.0/..",
            "100000000:01:00.0",
            "0000:01:00.0\n",
            "pci/pci/0000:01:00.0",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }
}
