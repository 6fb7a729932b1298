//! A unicast MAC address.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A unicast MAC address, written `52:54:00:12:34:56`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

/// Why a text is not a NIC's MAC address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MacAddressError {
    /// Not six pairs of hexadecimal digits.
    #[error("{0:?} is not a MAC address such as 52:54:00:12:34:56")]
    Malformed(String),
    /// The group bit is set, or all is zero.
    #[error("{0:?} is not a unicast address: the first byte must be even, and not all bytes zero")]
    NotUnicast(String),
}

impl MacAddress {
    /// The six bytes in transmission order.
    #[must_use]
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for MacAddress {
    type Err = MacAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || MacAddressError::Malformed(text.to_owned());
        let mut bytes = [0u8; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(malformed)?;
            // `from_str_radix` alone would accept "+1".
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(malformed());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| malformed())?;
        }
        if parts.next().is_some() {
            return Err(malformed());
        }
        if bytes[0] & 1 == 1 || bytes == [0; 6] {
            return Err(MacAddressError::NotUnicast(text.to_owned()));
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

vdpa::text_form!(MacAddress, MacAddressError);
