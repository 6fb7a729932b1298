//! Why a stream could not be written or was refused.

use std::fmt;
use std::io;

use crate::byte_count::ByteCount;

use super::name::SectionName;

/// One section of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SectionId {
    /// Its name.
    pub name: SectionName,
    /// Which of those with this name.
    pub instance: u32,
}

impl fmt::Display for SectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "section {} {}", self.name, self.instance)
    }
}

/// A part of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The magic and the version.
    Start,
    /// The header of the section with this number, counted from 1.
    Header(u32),
    /// The payload or the checksum of a section.
    Section(SectionId),
    /// What is behind the end section.
    AfterEnd,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("the header"),
            Self::Header(number) => write!(f, "the header of section number {number}"),
            Self::Section(section) => section.fmt(f),
            Self::AfterEnd => f.write_str("what follows the end"),
        }
    }
}

/// Why a stream could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The destination did not take it.
    #[error("cannot write {place} of the saved state")]
    Io {
        /// What was being written.
        place: Place,
        /// What the destination says.
        #[source]
        source: io::Error,
    },
    /// A value could not be encoded.
    #[error("{section} cannot be encoded")]
    Encode {
        /// The section.
        section: SectionId,
        /// What the encoder says.
        #[source]
        source: postcard::Error,
    },
    /// A payload is longer than its reader would take.
    #[error("{section} has {}; at most {} are read back", ByteCount(*len), ByteCount(*max))]
    TooLong {
        /// The section.
        section: SectionId,
        /// Bytes of the payload.
        len: u64,
        /// The largest number of bytes.
        max: u64,
    },
    /// A section was written before.
    #[error("{section} is written twice")]
    Twice {
        /// The section.
        section: SectionId,
    },
    /// The name of the end section, which `finish` writes.
    #[error("the name \"end\" is taken by the end of the saved state")]
    ReservedName,
    /// More than a reader would take.
    #[error("a saved state has at most {} sections", super::SECTIONS_MAX)]
    TooManySections,
}

/// Why a stream was refused.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It begins like something else.
    #[error("this is no saved state of Bellhop")]
    NotASnapshot,
    /// A newer program wrote it.
    #[error(
        "the saved state has format {found}, this program reads up to {newest}; restore it with the \
         version of Bellhop that wrote it, or a newer one"
    )]
    NewerFormat {
        /// The version found.
        found: u32,
        /// The newest version that is read.
        newest: u32,
    },
    /// A program wrote it that is older than the one before.
    #[error(
        "the saved state has format {found}, the oldest that is read is {oldest}; restore it with an \
         older version of Bellhop and save it again"
    )]
    OlderFormat {
        /// The version found.
        found: u32,
        /// The oldest version that is read.
        oldest: u32,
    },
    /// It ends before its end section.
    #[error("the saved state ends within {place}; it was not written or copied to its end")]
    Truncated {
        /// Where it ends.
        place: Place,
    },
    /// The source failed.
    #[error("cannot read {place} of the saved state")]
    Io {
        /// What was being read.
        place: Place,
        /// What the source says.
        #[source]
        source: io::Error,
    },
    /// A checksum is wrong.
    #[error("{section} of the saved state is damaged: its checksum is wrong")]
    Checksum {
        /// The section.
        section: SectionId,
    },
    /// A section's name has bytes that no name has.
    #[error("the saved state is damaged: section number {number} has no valid name")]
    BadName {
        /// The number of the section, counted from 1.
        number: u32,
        /// What names are like.
        #[source]
        source: super::BadSectionName,
    },
    /// A section that this program does not know.
    #[error(
        "{section} of the saved state is unknown to this program; restore it with the version of \
         Bellhop that wrote it, or a newer one"
    )]
    Unknown {
        /// The section.
        section: SectionId,
    },
    /// A section's instance is larger than there can be.
    #[error("{section} of the saved state is one too many: {instances} can be read")]
    TooManyInstances {
        /// The section.
        section: SectionId,
        /// How many there may be, numbered from 0.
        instances: u32,
    },
    /// A payload is longer than it may be.
    #[error("{section} of the saved state has {}, more than the {} it may have", ByteCount(*len), ByteCount(*max))]
    TooLong {
        /// The section.
        section: SectionId,
        /// Bytes of the payload, as its header says.
        len: u64,
        /// The largest number of bytes.
        max: u64,
    },
    /// All of the stream is longer than it may be.
    #[error("the saved state is longer than the {} it may have", ByteCount(*max))]
    StreamTooLong {
        /// The largest number of bytes.
        max: u64,
    },
    /// More sections than any program writes.
    #[error("the saved state has more than {} sections", super::SECTIONS_MAX)]
    TooManySections,
    /// A section for the second time.
    #[error("{section} is twice in the saved state")]
    Twice {
        /// The section.
        section: SectionId,
    },
    /// The end section is none.
    #[error("the end of the saved state is malformed")]
    BadEnd,
    /// The end section counts other sections.
    #[error(
        "the saved state has {found} sections, its end says {expected}: some were lost or added"
    )]
    Count {
        /// How many were read.
        found: u32,
        /// How many the end section says.
        expected: u32,
    },
    /// Something follows the end section.
    #[error("the saved state goes on after its end")]
    AfterEnd,
    /// A section that is needed is not there.
    #[error("the saved state has no {section}")]
    Missing {
        /// The section.
        section: SectionId,
    },
    /// A section that nothing took.
    #[error(
        "{section} of the saved state has nowhere to go: the machine was configured differently"
    )]
    Leftover {
        /// The section.
        section: SectionId,
    },
    /// A section has another name than the value it is decoded as.
    #[error("{section} is decoded as one with the name {expected:?}")]
    WrongName {
        /// The section.
        section: SectionId,
        /// The name of such values.
        expected: &'static str,
    },
    /// A newer program wrote a section.
    #[error(
        "{section} of the saved state has version {found}, this program reads up to {newest}; restore \
         it with the version of Bellhop that wrote it, or a newer one"
    )]
    NewerVersion {
        /// The section.
        section: SectionId,
        /// The version found.
        found: u32,
        /// The newest version that is read.
        newest: u32,
    },
    /// A program wrote a section that is older than the one before.
    #[error(
        "{section} of the saved state has version {found}, the oldest that is read is {oldest}; restore \
         it with an older version of Bellhop and save it again"
    )]
    OlderVersion {
        /// The section.
        section: SectionId,
        /// The version found.
        found: u32,
        /// The oldest version that is read.
        oldest: u32,
    },
    /// A payload is not what its version says.
    #[error("{section} of the saved state is malformed")]
    Payload {
        /// The section.
        section: SectionId,
        /// What is wrong with it.
        #[source]
        source: super::PayloadError,
    },
}
