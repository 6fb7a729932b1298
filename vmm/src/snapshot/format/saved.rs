//! Values as payloads of sections.
//!
//! Owns which versions of a payload are read; must not know how sections are framed.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{ReadError, SectionId, WriteError};
use super::name::SectionName;
use super::table::NameOf;

/// A part of a machine's state, apart from the live type that it is taken from.
///
/// The layout of the payload is the type's fields in order, encoded by postcard: any change of it is a
/// new [`Saved::VERSION`]. Decoding takes memory in proportion to the payload, as long as no
/// list has elements that take no bytes.
pub trait Saved: Serialize + DeserializeOwned {
    /// The section's name: 1 to 32 of `a-z`, `0-9`, `-` and `.`, not `end`.
    const NAME: &'static str;
    /// The version of this layout, from 1.
    const VERSION: u32;
    /// The largest payload (bytes), of this version and of the one before.
    const MAX_LEN: u64;

    /// The value in a payload of the version before [`Saved::VERSION`].
    ///
    /// # Errors
    /// [`PayloadError::NoPrevious`] unless implemented; what [`Payload::decode`] says.
    fn upgrade(previous: Payload<'_>) -> Result<Self, PayloadError> {
        let _ = previous;
        Err(PayloadError::NoPrevious)
    }
}

/// What is wrong with a payload.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// There is no way from the previous version.
    #[error("the version before is not read")]
    NoPrevious,
    /// The bytes are no such value.
    #[error("its bytes are not what its version says")]
    Malformed(#[source] postcard::Error),
    /// Bytes are left over.
    #[error("it has {0} bytes too many")]
    TrailingBytes(usize),
    /// The fields contradict each other.
    #[error("{0}")]
    Invalid(&'static str),
}

/// The bytes of a payload.
#[derive(Debug, Clone, Copy)]
pub struct Payload<'a>(pub(super) &'a [u8]);

impl Payload<'_> {
    /// The value that is all of the payload.
    ///
    /// # Errors
    /// [`PayloadError::Malformed`], [`PayloadError::TrailingBytes`].
    pub fn decode<T: DeserializeOwned>(self) -> Result<T, PayloadError> {
        let (value, rest) = postcard::take_from_bytes(self.0).map_err(PayloadError::Malformed)?;
        match rest.len() {
            0 => Ok(value),
            extra => Err(PayloadError::TrailingBytes(extra)),
        }
    }
}

/// One section: a part of the machine, named and versioned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// What it is the state of.
    pub name: SectionName,
    /// Which of those with this name.
    pub instance: u32,
    /// The version of the payload's layout.
    pub version: u32,
    /// The encoded value.
    pub payload: Vec<u8>,
}

impl Section {
    /// The section's name and instance.
    #[must_use]
    pub fn id(&self) -> SectionId {
        SectionId {
            name: self.name,
            instance: self.instance,
        }
    }

    /// Encodes a value.
    ///
    /// # Errors
    /// [`WriteError::Encode`]; [`WriteError::TooLong`] if it could not be read back.
    pub fn encode<T: Saved>(instance: u32, value: &T) -> Result<Self, WriteError> {
        let name = NameOf::<T>::NAME;
        let section = SectionId { name, instance };
        let payload =
            postcard::to_stdvec(value).map_err(|source| WriteError::Encode { section, source })?;
        // Lossless: usize is 64 bits wide on x86-64.
        let len = payload.len() as u64;
        if len > T::MAX_LEN {
            return Err(WriteError::TooLong {
                section,
                len,
                max: T::MAX_LEN,
            });
        }
        Ok(Self {
            name,
            instance,
            version: T::VERSION,
            payload,
        })
    }

    /// Decodes a value of the current version, or of the one before.
    ///
    /// # Errors
    /// [`ReadError::WrongName`], [`ReadError::NewerVersion`], [`ReadError::OlderVersion`],
    /// [`ReadError::Payload`].
    pub fn decode<T: Saved>(&self) -> Result<T, ReadError> {
        let section = self.id();
        if self.name != NameOf::<T>::NAME {
            return Err(ReadError::WrongName {
                section,
                expected: T::NAME,
            });
        }
        let older = |oldest| ReadError::OlderVersion {
            section,
            found: self.version,
            oldest,
        };
        let payload = Payload(&self.payload);
        let previous = T::VERSION.saturating_sub(1);
        let value = match self.version {
            found if found > T::VERSION => {
                return Err(ReadError::NewerVersion {
                    section,
                    found,
                    newest: T::VERSION,
                });
            }
            found if found == T::VERSION => payload.decode(),
            // Versions begin at 1.
            found if found == 0 || found < previous => return Err(older(previous.max(1))),
            _ => match T::upgrade(payload) {
                Err(PayloadError::NoPrevious) => return Err(older(T::VERSION)),
                value => value,
            },
        };
        value.map_err(|source| ReadError::Payload { section, source })
    }
}
