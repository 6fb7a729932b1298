//! The state of a machine as a stream of sections.
//!
//! Owns the framing, its limits and the encoding of a section's payload; must not know what any
//! section means, nor whether the stream is a file or a connection: it reads and writes strictly
//! forward and not a byte beyond the end section.
//!
//! All numbers are little-endian:
//!
//! ```text
//!   stream   = magic "\x89BELLHOP"      8 bytes
//!              format version           u32, 1
//!              section ...
//!              end section
//!
//!   section  = name                     32 bytes, padded with NULs
//!              instance                 u32, such as the number of a vCPU
//!              version of the payload   u32, from 1
//!              length of the payload    u64
//!              payload                  encoded by postcard
//!              checksum                 u32, CRC-32 (IEEE 802.3) of all of the above
//!
//!   end      = a section "end", instance 0, version 1; its payload is the number of
//!              sections before it, u32
//! ```
//!
//! A name is 1 to 32 of `a-z`, `0-9`, `-` and `.`. A section is there once per name and instance.
//! The checksum finds damage, not malice: whoever can write the stream can write a valid one.
//!
//! ```text
//!              Writer::new           put, section              finish
//!   destination ---------> Writer --------------+------------------------> destination
//!                            ^                  |
//!                            +------------------+      an error consumes it: nothing can be
//!                                                      written behind half a section
//!
//!            Reader::new          next               next = None
//!   source --------------> Reader ------> Section   ------------> into_inner: source behind "end"
//!                            |  ^------------+
//!                            +--> an error, then None for ever
//! ```
//!
//! # Compatibility
//!
//! * A program reads all versions of the format, and the current and the previous version of each
//!   section. A change of a payload adds one to [`Saved::VERSION`] and implements [`Saved::upgrade`] from the
//!   one before; what is older is refused with the way to mend it, two restores in a row.
//! * What is newer is refused: a program never guesses at what it does not know.
//! * An unknown section is refused by name, because what it says may be needed for a right guest.
//!   The exception is a name that begins with [`OPTIONAL_PREFIX`]: such a section is checked and
//!   left out. So an older program takes what a newer one adds, if the newer one says that it may.
//! * Files in `golden/`, one per version of the format, are never changed again and read by a test.

mod error;
mod name;
mod reader;
mod saved;
mod sections;
mod table;
#[cfg(test)]
mod tests;
mod writer;

pub use error::{Place, ReadError, SectionId, WriteError};
pub use name::{BadSectionName, OPTIONAL_PREFIX, SectionName};
pub use reader::Reader;
pub use saved::{Payload, PayloadError, Saved, Section};
pub use sections::Sections;
pub use table::{SectionKind, Table};
pub use writer::Writer;

use name::NAME_LEN;

/// The first bytes of every stream. Not ASCII, so that no text begins like it.
pub const MAGIC: [u8; 8] = *b"\x89BELLHOP";
/// The version of the format that is written, and the newest that is read.
pub const FORMAT_VERSION: u32 = 1;
/// The oldest version of the format that is read.
pub const OLDEST_FORMAT_VERSION: u32 = 1;
/// The largest number of sections in a stream, the end section left out.
pub const SECTIONS_MAX: u32 = 16_384;
/// The largest payload (bytes) of an optional section that this program does not know.
pub const UNKNOWN_OPTIONAL_MAX: u64 = 1 << 20;

/// Bytes of a section's header.
const HEADER_LEN: usize = NAME_LEN + 4 + 4 + 8;
/// Bytes of a section's checksum.
const CHECKSUM_LEN: usize = 4;
/// The version of the end section.
const END_VERSION: u32 = 1;

/// A section's header without its name's meaning.
#[derive(Debug, Clone, Copy)]
struct Header {
    name: SectionName,
    instance: u32,
    version: u32,
    /// Bytes of the payload.
    len: u64,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let numbers = self
            .instance
            .to_le_bytes()
            .into_iter()
            .chain(self.version.to_le_bytes())
            .chain(self.len.to_le_bytes());
        for (byte, value) in bytes
            .iter_mut()
            .zip(self.name.to_bytes().into_iter().chain(numbers))
        {
            *byte = value;
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Result<Self, BadSectionName> {
        let (name, rest) = bytes.split_first_chunk().ok_or(BadSectionName)?;
        let (instance, rest) = rest.split_first_chunk().ok_or(BadSectionName)?;
        let (version, rest) = rest.split_first_chunk().ok_or(BadSectionName)?;
        let len = rest.first_chunk().ok_or(BadSectionName)?;
        Ok(Self {
            name: SectionName::from_bytes(name)?,
            instance: u32::from_le_bytes(*instance),
            version: u32::from_le_bytes(*version),
            len: u64::from_le_bytes(*len),
        })
    }
}
