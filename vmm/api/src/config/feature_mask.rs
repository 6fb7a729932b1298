//! A mask of virtio feature bits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, de};

/// A mask of virtio feature bits: a number, or a text in hexadecimal such as `0x300000020`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct FeatureMask(pub u64);

/// A text that is not a mask.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a mask of up to 64 bits in hexadecimal, such as 0x300000020")]
pub struct FeatureMaskError(String);

impl FromStr for FeatureMask {
    type Err = FeatureMaskError;

    fn from_str(text: &str) -> Result<Self, FeatureMaskError> {
        let digits = text.strip_prefix("0x").unwrap_or(text);
        // `from_str_radix` alone would accept "+1".
        let is_hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mask = is_hexadecimal.then(|| u64::from_str_radix(digits, 16).ok());
        let mask = mask.flatten().map(Self);
        mask.ok_or_else(|| FeatureMaskError(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for FeatureMask {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = FeatureMask;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mask of 64 bits: a number, or a text in hexadecimal")
            }

            fn visit_u64<E: de::Error>(self, mask: u64) -> Result<FeatureMask, E> {
                Ok(FeatureMask(mask))
            }

            fn visit_i64<E: de::Error>(self, mask: i64) -> Result<FeatureMask, E> {
                let wrong = |_| E::invalid_value(de::Unexpected::Signed(mask), &self);
                u64::try_from(mask).map(FeatureMask).map_err(wrong)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<FeatureMask, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}
