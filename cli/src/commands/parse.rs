//! Arguments in iproute2's form: a word, then its value, in any order.

use std::str::FromStr;

use bellhop_common::error::{Error, ErrorKind};
use vdpa_mgmt::MgmtDeviceName;
use vmm::config::{FeatureMask, MacAddress, MacAddressError};

/// A required word is missing.
pub(super) fn missing(word: &str) -> Error {
    Error::wrong(format!("the word {word} is missing"))
}

/// A word occurs twice.
pub(super) fn twice(word: &str) -> Error {
    Error::wrong(format!("the word {word} occurs twice"))
}

/// A value is not one of a word's choices.
pub(super) fn choice(word: &str, value: &str, known: &str) -> Error {
    Error::wrong(format!("{word} {value:?} is unknown: use {known}"))
}

/// Words with their values.
#[derive(Debug)]
pub(crate) struct Words<'a> {
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Words<'a> {
    /// Parses arguments; each word is one of `known`, and occurs once.
    pub(crate) fn parse(arguments: &'a [String], known: &[&str]) -> Result<Self, Error> {
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        let mut arguments = arguments.iter();
        while let Some(word) = arguments.next() {
            if !known.contains(&word.as_str()) {
                let known = known.join(", ");
                let message = format!("unknown word {word:?}: use {known}");
                return Err(Error::wrong(message));
            }
            if pairs.iter().any(|pair| pair.0 == word) {
                return Err(twice(word));
            }
            let value = arguments
                .next()
                .ok_or_else(|| Error::wrong(format!("the word {word} has no value")))?;
            pairs.push((word, value));
        }
        Ok(Self { pairs })
    }

    /// A word's value, if given.
    pub(crate) fn take<T>(
        &self,
        word: &'static str,
        read: impl Fn(&'static str, &str) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let found = self.pairs.iter().find(|pair| pair.0 == word);
        found.map(|&(_, value)| read(word, value)).transpose()
    }

    /// The value of a required word.
    pub(crate) fn needed<T>(
        &self,
        word: &'static str,
        read: impl Fn(&'static str, &str) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.take(word, read)?.ok_or_else(|| missing(word))
    }
}

/// Any text.
pub(crate) fn text(_: &'static str, value: &str) -> Result<String, Error> {
    Ok(value.to_owned())
}

/// A decimal number.
pub(crate) fn number<T: FromStr>(word: &'static str, value: &str) -> Result<T, Error> {
    // `parse` alone would take "+1".
    Some(value)
        .filter(|value| value.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|value| value.parse().ok())
        .ok_or_else(|| Error::wrong(format!("{word} {value:?} is not a valid number here")))
}

/// A hexadecimal mask, with or without 0x.
pub(crate) fn mask(word: &'static str, value: &str) -> Result<u64, Error> {
    let mask = value.parse::<FeatureMask>();
    mask.map(|mask| mask.0)
        .map_err(|error| Error::wrong(format!("{word} {error}")))
}

/// A unicast MAC address.
pub(crate) fn mac(_: &'static str, value: &str) -> Result<[u8; 6], Error> {
    let address: MacAddress = value
        .parse()
        .map_err(|error: MacAddressError| Error::transparent(ErrorKind::WrongCommandLine, error))?;
    Ok(address.bytes())
}

/// One of these words, each with its meaning.
pub(crate) fn one_of<T: Copy, const N: usize>(
    known: [(&'static str, T); N],
) -> impl Fn(&'static str, &str) -> Result<T, Error> {
    move |word, value| {
        let found = known.iter().find(|(name, _)| *name == value);
        found.map(|one| one.1).ok_or_else(|| {
            let names = known.map(|one| one.0).join(", ");
            let (first, last) = names.rsplit_once(", ").unwrap_or_default();
            choice(word, value, &format!("{first} or {last}"))
        })
    }
}

/// The name of a management device.
pub(crate) fn mgmtdev(_: &'static str, value: &str) -> Result<MgmtDeviceName, Error> {
    let name = value.parse().map_err(Error::from);
    name.map_err(Error::blame_arguments)
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
    fn invalid_words_are_reported() {
        let error = |text: &str| {
            Words::parse(&words(text), &["name", "mtu"])
                .unwrap_err()
                .to_string()
        };
        assert!(error("nam x").contains("use name, mtu"));
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
