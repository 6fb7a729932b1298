//! The state of a machine as named sections.
//!
//! Owns the framing, its limits and the versions. It must not know the meaning of a section.
//!
//! Numbers of the framing are little-endian; a section and its payload are encoded by postcard:
//!
//! ```text
//!   state   = magic "\x89BELLHOP"      8 bytes
//!             format version           u32
//!             length of the body       u64
//!             body                     sections, one after the other
//!             checksum                 u32, CRC-32 (IEEE 802.3) of all of the above
//!
//!   section = name                     string, once per state
//!             version of the payload   u32, from 1
//!             payload                  bytes
//! ```
//!
//! The checksum finds damage, not malice: any writer of a state can write a valid one.
//!
//! ```text
//!   Sections ── put ──> write ──> bytes ──> read ──> Sections ── take, take_optional ──> values
//!                                                        └────── finish ──> error if one is left
//! ```
//!
//! # Compatibility
//!
//! * A program reads one version of the format: its own. Format 1 framed each section for a stream.
//!   Before release 1.0 a second reader is not worth its code, so such a state is rejected: restore
//!   it with the program that wrote it.
//! * [`FORMAT_VERSION`] grows by two. Before a live upgrade or a migration, programs with format 1
//!   accept a program whose format is one above theirs. They reject one that is two above.
//! * The version of a section counts from 1 within a version of the format. A program reads the
//!   current version of a section and, by [`Saved::upgrade`], the one before.
//! * A newer version, and a section with an unknown name, is rejected.
//! * `golden/format-N.state` is a state in version N. A test reads it and writes the same bytes. It
//!   changes only together with N: the new file then replaces the old one.

mod error;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{Read, Write};

use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};

pub use self::error::{ReadError, WriteError};

/// The first bytes of every state. Not ASCII, so that no text begins like it.
pub const MAGIC: [u8; 8] = *b"\x89BELLHOP";
/// The version of the format that is written and read.
pub const FORMAT_VERSION: u32 = 3;
/// The largest number of sections in a state.
const SECTIONS_MAX: usize = 64;
/// The largest number of bytes in the name of a section.
const NAME_MAX: usize = 32;

/// A part of a machine's state, separate from its live type.
///
/// The payload is the type's fields in order, encoded by postcard: any change of it requires a new
/// [`Saved::VERSION`]. Decoding uses memory in proportion to the payload, unless a list has
/// elements of zero bytes.
pub trait Saved: Serialize + DeserializeOwned {
    /// The section's name, at most 32 bytes.
    const NAME: &'static str;
    /// The version of this layout, from 1.
    const VERSION: u32;
    /// The largest payload (bytes), of this version and of the one before.
    const MAX_LEN: u64;
    /// For a list: the largest number of items, since a short encoding can use much memory.
    const ITEMS_MAX: Option<u32> = None;

    /// Decodes a payload of the version before [`Saved::VERSION`]; `None` if it is not supported.
    fn upgrade(previous: &[u8]) -> Option<Result<Self, postcard::Error>> {
        let _ = previous;
        None
    }
}

/// Decodes a value that fills the whole payload.
///
/// # Errors
/// The bytes are no such value, or bytes follow it.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, postcard::Error> {
    match postcard::take_from_bytes(payload)? {
        (value, []) => Ok(value),
        _ => Err(postcard::Error::DeserializeBadEncoding),
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Section {
    version: u32,
    payload: Vec<u8>,
}

/// Bytes that are copied at once, as the guest may be stopped.
struct Payload<'a>(&'a [u8]);

impl Serialize for Payload<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

/// The sections of a state, by their names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sections(BTreeMap<String, Section>);

impl Sections {
    /// Adds a value.
    ///
    /// # Errors
    /// [`WriteError::Encode`]; [`WriteError::TooLong`] if a reader would reject it.
    pub fn put<T: Saved>(&mut self, value: &T) -> Result<(), WriteError> {
        let name = T::NAME;
        let payload = postcard::to_stdvec(value).map_err(WriteError::Encode)?;
        // Lossless: usize is 64 bits wide on x86-64.
        let (len, max) = (payload.len() as u64, T::MAX_LEN);
        if len > max {
            return Err(WriteError::TooLong { name, len, max });
        }
        self.insert(name, T::VERSION, payload);
        Ok(())
    }

    pub(super) fn insert(&mut self, name: &str, version: u32, payload: Vec<u8>) {
        let section = Section { version, payload };
        self.0.insert(name.to_owned(), section);
    }

    /// Writes all sections.
    ///
    /// # Errors
    /// [`WriteError::Encode`], [`WriteError::Io`].
    pub fn write(&self, to: &mut (impl Write + ?Sized)) -> Result<(), WriteError> {
        let mut body = Vec::new();
        for (name, Section { version, payload }) in &self.0 {
            let section = (name, version, Payload(payload));
            body = postcard::to_extend(&section, body).map_err(WriteError::Encode)?;
        }
        to.write_all(&frame(&body))
            .and_then(|()| to.flush())
            .map_err(WriteError::Io)
    }

    /// Reads a state of at most `max` bytes, at the end of the source. All of it is checked before
    /// any of it is used.
    ///
    /// # Errors
    /// [`ReadError`], except the variants about a single section.
    pub fn read(source: &mut impl Read, max: u64) -> Result<Self, ReadError> {
        // Grows with the received bytes, not with their stated length.
        let mut bytes = Vec::new();
        source
            .take(max.saturating_add(1))
            .read_to_end(&mut bytes)
            .map_err(ReadError::Io)?;
        if bytes.len() as u64 > max {
            return Err(ReadError::StateTooLong { max });
        }
        let mut body = unframe(&bytes)?;
        let mut sections = Self::default();
        while !body.is_empty() {
            let ((name, version, payload), rest): ((&str, u32, &[u8]), _) =
                postcard::take_from_bytes(body).map_err(|_| ReadError::Malformed)?;
            if name.len() > NAME_MAX
                || sections.0.len() == SECTIONS_MAX
                || sections.0.contains_key(name)
            {
                return Err(ReadError::Malformed);
            }
            sections.insert(name, version, payload.to_vec());
            body = rest;
        }
        Ok(sections)
    }

    /// Removes and decodes a mandatory section.
    ///
    /// # Errors
    /// [`ReadError::Missing`]; those of [`Sections::take_optional`].
    pub fn take<T: Saved>(&mut self) -> Result<T, ReadError> {
        self.take_optional()?
            .ok_or(ReadError::Missing { name: T::NAME })
    }

    /// Removes and decodes an optional section.
    ///
    /// # Errors
    /// [`ReadError::TooLong`], [`ReadError::TooManyItems`], [`ReadError::Version`],
    /// [`ReadError::Payload`].
    pub fn take_optional<T: Saved>(&mut self) -> Result<Option<T>, ReadError> {
        let name = T::NAME;
        let Some(Section { version, payload }) = self.0.remove(name) else {
            return Ok(None);
        };
        let (len, max) = (payload.len() as u64, T::MAX_LEN);
        if len > max {
            return Err(ReadError::TooLong { name, len, max });
        }
        if let Some(max) = T::ITEMS_MAX {
            // A list begins with the number of its items.
            let (items, _): (u32, _) = postcard::take_from_bytes(&payload)
                .map_err(|source| ReadError::Payload { name, source })?;
            if items > max {
                return Err(ReadError::TooManyItems { name, items, max });
            }
        }
        let value = if version == T::VERSION {
            Some(decode(&payload))
        } else if version > 0 && version.checked_add(1) == Some(T::VERSION) {
            T::upgrade(&payload)
        } else {
            None
        };
        value
            .ok_or(ReadError::Version {
                name,
                found: version,
                current: T::VERSION,
            })?
            .map(Some)
            .map_err(|source| ReadError::Payload { name, source })
    }

    /// Ends the restore: a remaining section belongs to something that this machine lacks.
    ///
    /// # Errors
    /// [`ReadError::Unknown`] with the first such section.
    pub fn finish(self) -> Result<(), ReadError> {
        self.0
            .into_keys()
            .next()
            .map_or(Ok(()), |name| Err(ReadError::Unknown { name }))
    }
}

/// The version of the state that begins here; `None` if none does.
pub fn version_of(source: &mut impl Read) -> Option<u32> {
    let mut head = [0; MAGIC.len() + size_of::<u32>()];
    source.read_exact(&mut head).ok()?;
    let (version, _) = head.strip_prefix(&MAGIC)?.split_first_chunk()?;
    Some(u32::from_le_bytes(*version))
}

/// Frames `body` as a state.
pub(super) fn frame(body: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(FORMAT_VERSION.to_le_bytes());
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(body);
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

/// Returns the body of an undamaged state.
fn unframe(bytes: &[u8]) -> Result<&[u8], ReadError> {
    let Some(rest) = bytes.strip_prefix(&MAGIC) else {
        // Shorter than the magic, it may still be something else.
        return Err(if MAGIC.starts_with(bytes) {
            ReadError::Truncated
        } else {
            ReadError::NotASnapshot
        });
    };
    let (version, rest) = rest.split_first_chunk().ok_or(ReadError::Truncated)?;
    let found = u32::from_le_bytes(*version);
    if found != FORMAT_VERSION {
        let known = FORMAT_VERSION;
        return Err(ReadError::Format { found, known });
    }
    let (len, rest) = rest.split_first_chunk().ok_or(ReadError::Truncated)?;
    let (body, rest) = usize::try_from(u64::from_le_bytes(*len))
        .ok()
        .and_then(|len| rest.split_at_checked(len))
        .ok_or(ReadError::Truncated)?;
    let (checksum, rest) = rest.split_first_chunk().ok_or(ReadError::Truncated)?;
    if !rest.is_empty() {
        return Err(ReadError::AfterEnd);
    }
    let framed = bytes.strip_suffix(checksum).unwrap_or_default();
    if crc32fast::hash(framed) == u32::from_le_bytes(*checksum) {
        Ok(body)
    } else {
        Err(ReadError::Checksum)
    }
}
