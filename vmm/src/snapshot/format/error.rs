//! Why a state could not be written or was refused.

use std::io;

use super::FORMAT_VERSION;
use crate::byte_count::ByteCount;

/// Why a state could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The destination did not take it.
    #[error("cannot write the saved state")]
    Io(#[source] io::Error),
    /// A value could not be encoded.
    #[error("a section of the saved state cannot be encoded")]
    Encode(#[source] postcard::Error),
    /// A payload is longer than its reader would take.
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

/// Why a state was refused.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It begins like something else.
    #[error("this is no saved state of Bellhop")]
    NotASnapshot,
    /// Another version of the format.
    #[error(
        "the saved state has format {found}, this program reads {FORMAT_VERSION}; restore it with \
         the version of Bellhop that wrote it"
    )]
    Format {
        /// The version found.
        found: u32,
    },
    /// It ends early.
    #[error("the saved state ends early; it was not written or copied to its end")]
    Truncated,
    /// The source failed.
    #[error("cannot read the saved state")]
    Io(#[source] io::Error),
    /// The checksum is wrong.
    #[error("the saved state is damaged: its checksum is wrong")]
    Checksum,
    /// All of it is longer than it may be.
    #[error("the saved state is longer than the {} it may have", ByteCount(*max))]
    StateTooLong {
        /// The largest number of bytes.
        max: u64,
    },
    /// Something follows the end.
    #[error("the saved state goes on after its end")]
    AfterEnd,
    /// The body is no list of sections, or has one twice, one with a long name or too many.
    #[error("the sections of the saved state are malformed")]
    Malformed,
    /// A section that is needed is not there.
    #[error("the saved state has no section {name}")]
    Missing {
        /// The section.
        name: &'static str,
    },
    /// A section that nothing took.
    #[error(
        "section {name:?} of the saved state is unknown to this program; restore it with the \
         version of Bellhop that wrote it, or a newer one"
    )]
    Unknown {
        /// The section.
        name: String,
    },
    /// A payload is longer than it may be.
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
    /// A list has more items than it may have.
    #[error("section {name} of the saved state has {items} items; at most {max} can be read")]
    TooManyItems {
        /// The section.
        name: &'static str,
        /// Its items.
        items: u32,
        /// The largest number of items.
        max: u32,
    },
    /// A section of a version that is not read.
    #[error(
        "section {name} of the saved state has version {found}, this program has {current}; \
         restore it with the version of Bellhop that wrote it"
    )]
    Version {
        /// The section.
        name: &'static str,
        /// The version found.
        found: u32,
        /// The version that is written.
        current: u32,
    },
    /// A payload is not what its version says.
    #[error("section {name} of the saved state is malformed")]
    Payload {
        /// The section.
        name: &'static str,
        /// The decoder's error.
        #[source]
        source: postcard::Error,
    },
}
