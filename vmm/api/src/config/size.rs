//! An amount of memory with its unit.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An amount of memory with its unit: `512M`, `4G`.
///
/// A number alone is rejected: some tools interpret it as bytes and others as mebibytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MemorySize(u64);

/// Why a text is not an amount of memory.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MemorySizeError {
    /// Not a number with a unit.
    #[error("{0:?} is not an amount of memory: give a number and a unit, such as 512M or 4G")]
    Malformed(String),
    /// More bytes than an address can express.
    #[error("{0} is more than any machine can address")]
    TooLarge(String),
}

const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl MemorySize {
    /// The amount in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl Default for MemorySize {
    fn default() -> Self {
        Self(512 << 20)
    }
}

impl FromStr for MemorySize {
    type Err = MemorySizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || MemorySizeError::Malformed(text.to_owned());
        let bare = text
            .strip_suffix("iB")
            .or_else(|| text.strip_suffix('B'))
            .unwrap_or(text);
        let mut digits = bare.chars();
        let unit = digits.next_back().ok_or_else(malformed)?;
        let digits = digits.as_str();
        let (_, shift) = UNITS
            .into_iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(&unit))
            .ok_or_else(malformed)?;
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(malformed());
        }
        // A shift would drop the high bits: 2^44 MiB must not become 0.
        digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(1 << shift))
            .map(Self)
            .ok_or_else(|| MemorySizeError::TooLarge(text.to_owned()))
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, shift) in UNITS {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{name}", self.0 >> shift);
            }
        }
        // Every other size is at least one unit.
        f.write_str("0K")
    }
}

vdpa::text_form!(MemorySize, MemorySizeError);
