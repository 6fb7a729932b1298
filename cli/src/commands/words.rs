//! Arguments as iproute2 writes them: a word, then its value, in any order.

use std::str::FromStr;

use vdpa_mgmt::{Error, MgmtDeviceName};
use vmm::config::{MacAddress, MacAddressError};

/// Why the words make no sense.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WordError {
    #[error("unknown word {word:?}; known are {known}")]
    Unknown { word: String, known: String },
    #[error("the word {0} has no value behind it")]
    NoValue(String),
    #[error("the word {0} comes twice")]
    Twice(String),
    #[error("the word {0} is missing")]
    Missing(&'static str),
    #[error("{word} {value:?} is not a number of the right size")]
    Number { word: &'static str, value: String },
    #[error("{word} {value:?} is not a mask of up to 64 bits in hexadecimal, such as 0x300000020")]
    Mask { word: &'static str, value: String },
    #[error("{word} {value:?} is not a rate, such as 100mbit or 1.5gbit")]
    Rate { word: &'static str, value: String },
    #[error("{word} {value:?} is not known: it is {known}")]
    Choice {
        word: &'static str,
        value: String,
        known: &'static str,
    },
    #[error(transparent)]
    Mac(#[from] MacAddressError),
    #[error(transparent)]
    Name(#[from] Error),
}

/// Words with their values.
#[derive(Debug)]
pub(crate) struct Words<'a> {
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Words<'a> {
    /// Splits arguments; each word is one of `known`, and comes once.
    pub(crate) fn parse(arguments: &'a [String], known: &[&str]) -> Result<Self, WordError> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        let mut arguments = arguments.iter();
        while let Some(word) = arguments.next() {
            if !known.contains(&word.as_str()) {
                return Err(WordError::Unknown {
                    word: word.clone(),
                    known: known.join(", "),
                });
            }
            if pairs.iter().any(|pair| pair.0 == word) {
                return Err(WordError::Twice(word.clone()));
            }
            let value = arguments
                .next()
                .ok_or_else(|| WordError::NoValue(word.clone()))?;
            pairs.push((word, value));
        }
        Ok(Self { pairs })
    }

    /// A word's value, if it was given.
    pub(crate) fn take<T>(
        &self,
        word: &'static str,
        read: impl Fn(&'static str, &str) -> Result<T, WordError>,
    ) -> Result<Option<T>, WordError> {
        let found = self.pairs.iter().find(|pair| pair.0 == word);
        found.map(|&(_, value)| read(word, value)).transpose()
    }

    /// The value of a word that must be there.
    pub(crate) fn needed<T>(
        &self,
        word: &'static str,
        read: impl Fn(&'static str, &str) -> Result<T, WordError>,
    ) -> Result<T, WordError> {
        self.take(word, read)?.ok_or(WordError::Missing(word))
    }
}

/// Any text.
pub(crate) fn text(_: &'static str, value: &str) -> Result<String, WordError> {
    Ok(value.to_owned())
}

/// A decimal number.
pub(crate) fn number<T: FromStr>(word: &'static str, value: &str) -> Result<T, WordError> {
    // `parse` alone would take "+1".
    Some(value)
        .filter(|value| value.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|value| value.parse().ok())
        .ok_or_else(|| WordError::Number {
            word,
            value: value.to_owned(),
        })
}

/// A hexadecimal mask, with or without 0x.
pub(crate) fn mask(word: &'static str, value: &str) -> Result<u64, WordError> {
    let digits = value.strip_prefix("0x").unwrap_or(value);
    Some(digits)
        .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .ok_or_else(|| WordError::Mask {
            word,
            value: value.to_owned(),
        })
}

/// A unicast MAC address.
pub(crate) fn mac(_: &'static str, value: &str) -> Result<[u8; 6], WordError> {
    Ok(value.parse::<MacAddress>()?.bytes())
}

/// `enable` or `disable`.
pub(crate) fn switch(word: &'static str, value: &str) -> Result<bool, WordError> {
    match value {
        "enable" => Ok(true),
        "disable" => Ok(false),
        _ => Err(WordError::Choice {
            word,
            value: value.to_owned(),
            known: "enable or disable",
        }),
    }
}

/// The name of a management device.
pub(crate) fn mgmtdev(_: &'static str, value: &str) -> Result<MgmtDeviceName, WordError> {
    Ok(value.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn pairs_come_in_any_order() {
        let arguments = words("mtu 9000 name a device_features 0x2f");
        let read = Words::parse(&arguments, &["name", "mtu", "device_features"]).unwrap();
        assert_eq!(read.needed("name", text).unwrap(), "a");
        assert_eq!(read.take("mtu", number::<u16>).unwrap(), Some(9000));
        assert_eq!(read.take("device_features", mask).unwrap(), Some(0x2f));
        assert_eq!(read.take("mac", mac).unwrap(), None);
        let missing = read.needed("mac", mac).unwrap_err().to_string();
        assert!(missing.contains("mac is missing"));
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        let error = |text: &str| {
            Words::parse(&words(text), &["name", "mtu"])
                .unwrap_err()
                .to_string()
        };
        assert!(error("nam x").contains("known are name, mtu"));
        assert!(error("name").contains("no value"));
        assert!(error("name a name b").contains("twice"));
        for bad in ["", "+1", "-1", "65536", "0x10", "1e3", " 1"] {
            assert!(number::<u16>("mtu", bad).is_err(), "{bad:?}");
        }
        for bad in ["", "0x", "0xg", "+1", "10000000000000000"] {
            assert!(mask("device_features", bad).is_err(), "{bad:?}");
        }
        assert_eq!(mask("device_features", "ff").unwrap(), 255);
        for bad in ["x", "01:00:00:00:00:00", "02:00:00:00:00"] {
            assert!(mac("mac", bad).is_err(), "{bad:?}");
        }
    }
}
