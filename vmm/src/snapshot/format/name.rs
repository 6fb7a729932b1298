//! Names of sections.

use std::fmt;

/// Bytes of a name in a stream.
pub(super) const NAME_LEN: usize = 32;

/// How the name of a section begins that a program may leave out if it does not know it.
pub const OPTIONAL_PREFIX: &str = "optional-";

/// A name is no name of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a section's name is 1 to 32 of a-z, 0-9, \"-\" and \".\"")]
pub struct BadSectionName;

/// The name of a section: 1 to 32 of `a-z`, `0-9`, `-` and `.`, so that it can be shown as it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SectionName {
    /// Padded with NULs.
    bytes: [u8; NAME_LEN],
}

impl SectionName {
    /// The section that ends a stream.
    pub(super) const END: Self = match Self::new("end") {
        Ok(name) => name,
        Err(_) => panic!("checked when it is compiled"),
    };

    /// Checks a name.
    ///
    /// # Errors
    /// [`BadSectionName`].
    pub const fn new(name: &str) -> Result<Self, BadSectionName> {
        let name = name.as_bytes();
        if name.len() > NAME_LEN {
            return Err(BadSectionName);
        }
        let mut bytes = [0; NAME_LEN];
        let mut at = 0;
        while at < name.len() {
            // A NUL would end the name early.
            if name[at] == 0 {
                return Err(BadSectionName);
            }
            bytes[at] = name[at];
            at += 1;
        }
        Self::from_bytes(&bytes)
    }

    /// Checks a name as it is in a stream.
    pub(super) const fn from_bytes(bytes: &[u8; NAME_LEN]) -> Result<Self, BadSectionName> {
        let mut at = 0;
        let mut ended = false;
        while at < NAME_LEN {
            match bytes[at] {
                0 if at > 0 => ended = true,
                b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' if !ended => {}
                _ => return Err(BadSectionName),
            }
            at += 1;
        }
        Ok(Self { bytes: *bytes })
    }

    /// The name as it is in a stream.
    pub(super) const fn to_bytes(self) -> [u8; NAME_LEN] {
        self.bytes
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let len = self.bytes.iter().take_while(|byte| **byte != 0).count();
        // Always ASCII; a wrong name in a message is better than a panic.
        self.bytes
            .get(..len)
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .unwrap_or_default()
    }

    /// Whether a program that does not know the section may leave it out.
    #[must_use]
    pub fn is_optional(&self) -> bool {
        self.as_str().starts_with(OPTIONAL_PREFIX)
    }
}

impl fmt::Display for SectionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for SectionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_refused() {
        let longest = "x".repeat(NAME_LEN);
        for good in ["a", "vcpu", "virtio-net.0", "optional-clock", &longest] {
            let name = SectionName::new(good).unwrap();
            assert_eq!(name.as_str(), good);
            assert_eq!(SectionName::from_bytes(&name.to_bytes()), Ok(name));
            assert_eq!(name.is_optional(), good.starts_with("optional-"));
        }
        let too_long = "x".repeat(NAME_LEN + 1);
        for bad in [
            "", "\0", "a\0", "a\0b", "A", "a b", "../x", "a\n", "\x1b[2J", "ä", &too_long,
        ] {
            assert_eq!(SectionName::new(bad), Err(BadSectionName), "{bad:?}");
        }
        // Something behind the padding, which no program could see.
        let mut bytes = SectionName::END.to_bytes();
        bytes[NAME_LEN - 1] = b'x';
        assert!(SectionName::from_bytes(&bytes).is_err());
    }
}
