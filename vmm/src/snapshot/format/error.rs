//! Why a state could not be written or was rejected.

use std::io;

use crate::byte_count::ByteCount;

/// Why a state could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The destination returned an error.
    #[error("cannot write the saved state")]
    Io(#[source] io::Error),
    /// A value could not be encoded.
    #[error("cannot encode a section of the saved state")]
    Encode(#[source] postcard::Error),
    /// A payload is longer than a reader accepts.
    #[error("section {name} has {}; at most {} are read back", ByteCount(*len), ByteCount(*max))]
    TooLong {
        /// The section.
        name: &'static str,
        /// Bytes of the payload.
        len: u64,
        /// The largest number of bytes.
        max: u64,
    },
}

/// Why a state was rejected.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It has another magic.
    #[error("this is not a saved state of Bellhop")]
    NotASnapshot,
    /// Another version of the format.
    #[error(
        "the saved state has format {found}, but this program reads {known}; restore it with the \
         version of Bellhop that wrote it"
    )]
    Format {
        /// The version found.
        found: u32,
        /// The version of this program.
        known: u32,
    },
    /// It ends early.
    #[error("the saved state ends early: its write or copy is incomplete")]
    Truncated,
    /// The source failed.
    #[error("cannot read the saved state")]
    Io(#[source] io::Error),
    /// The checksum is wrong.
    #[error("the saved state is damaged: its checksum is wrong")]
    Checksum,
    /// The state is too long.
    #[error("the saved state is longer than the {} it may have", ByteCount(*max))]
    StateTooLong {
        /// The largest number of bytes.
        max: u64,
    },
    /// Bytes follow the end.
    #[error("the saved state has data after its end")]
    AfterEnd,
    /// The body is no list of sections, or has a section twice, a long name or too many sections.
    #[error("the sections of the saved state are malformed")]
    Malformed,
    /// A mandatory section is missing.
    #[error("the saved state has no section {name}")]
    Missing {
        /// The section.
        name: &'static str,
    },
    /// A section that no reader used.
    #[error(
        "section {name:?} of the saved state is unknown to this program; restore it with the \
         version of Bellhop that wrote it, or a newer one"
    )]
    Unknown {
        /// The section.
        name: String,
    },
    /// A payload is too long.
    #[error(
        "section {name} of the saved state has {}, more than the {} it may have",
        ByteCount(*len), ByteCount(*max)
    )]
    TooLong {
        /// The section.
        name: &'static str,
        /// Bytes of the payload.
        len: u64,
        /// The largest number of bytes.
        max: u64,
    },
    /// A list has too many items.
    #[error("section {name} of the saved state has {items} items; at most {max} can be read")]
    TooManyItems {
        /// The section.
        name: &'static str,
        /// Its number of items.
        items: u32,
        /// The largest number of items.
        max: u32,
    },
    /// A section of an unsupported version.
    #[error(
        "section {name} of the saved state has version {found}, but this program has {current}; \
         restore it with the version of Bellhop that wrote it"
    )]
    Version {
        /// The section.
        name: &'static str,
        /// The version found.
        found: u32,
        /// The version of this program.
        current: u32,
    },
    /// A payload does not match its version.
    #[error("section {name} of the saved state is malformed")]
    Payload {
        /// The section.
        name: &'static str,
        /// The decoder's error.
        #[source]
        source: postcard::Error,
    },
}
