//! What two hosts say to each other when a machine moves.
//!
//! Owns the messages, their bytes and their limits. Must not know who sends what when (that is
//! [`super::source`] and [`super::destination`]), nor how a connection is made.
//!
//! A connection carries frames in both directions, all numbers little-endian:
//!
//! ```text
//!   0        2          4        8          12       16
//!   +--------+----------+--------+----------+--------+----------------
//!   | kind   | connec-  | length | sequence | CRC-32 | payload:
//!   |        | tion     |        |          |        | `length` bytes
//!   +--------+----------+--------+----------+--------+----------------
//! ```
//!
//! `sequence` counts the frames of this direction of this connection from 0 (and wraps): a frame that is
//! replayed, lost or moved to another connection is seen. The CRC (of IEEE 802.3) is that of the first 12 bytes and
//! the payload. It finds damage, not malice: between hosts, use TLS.
//!
//! | kind | name | payload | on |
//! |---|---|---|---|
//! | 1 | HELLO | magic `BELLMIGR`, version u32, page size u32, connections u16, number of ranges u16, each (guest address, length, file offset) u64, then JSON: [`Hello`] | 0 |
//! | 2 | ACCEPT | session 16 bytes, connections u16 | 0 |
//! | 3 | REFUSE | number u16, each four texts (length u16, UTF-8): [`Refusal`] | 0 |
//! | 4 | JOIN | session 16 bytes, connection u16; in a frame of connection 65535 | the others |
//! | 5 | PAGES | file offset u64, then 1 to 256 pages | all |
//! | 6 | ZEROS | 1 to 1024 times (file offset u64, pages u32) | all |
//! | 7 | ROUND_END | round u32, last (0 or 1) u8 | all |
//! | 8 | STATE | 1 byte to 1 MiB of the machine's state | 0 |
//! | 9 | STATE_END | length of all of it, u64 | 0 |
//! | 10 | READY | nothing | 0 |
//! | 11 | GO | session 16 bytes | 0 |
//! | 12 | DONE | nothing | 0 |
//! | 13 | CANCEL | nothing | 0 |
//! | 14 | FAILED | text, at most 1 KiB of UTF-8 | 0 |
//! | 15 | ALIVE | nothing | all |
//! | 16 | TRY | as HELLO | 0 |
//!
//! TRY stands in place of HELLO, and is answered like it; whatever the answer, the connection ends then. A destination that
//! does not know it yet takes it for no message of the protocol, and waits on as it did.

mod bytes;
mod frame;
mod message;

#[cfg(test)]
mod tests;

pub use frame::{FRAME_HEADER_LEN, FrameError, Header};
pub(super) use frame::{Kind, seal};
pub use message::{Message, decode_message, encode_message};

use std::fmt;

use serde_json::Value;

/// First bytes of a HELLO.
pub const MAGIC: [u8; 8] = *b"BELLMIGR";
/// The version of the protocol that is spoken here. Another one is refused: both hosts must know all that is said.
pub const VERSION: u32 = 1;
/// Most connections of one migration.
pub use bellhop_api::machine::CONNECTIONS_MAX;
/// The number of a connection that has not said JOIN.
pub const CONNECTION_UNKNOWN: u16 = u16::MAX;
/// Most ranges of RAM in a HELLO.
pub const RANGES_MAX: usize = 64;
/// Most bytes of the compatibility document, as JSON.
pub const COMPAT_MAX: usize = 64 << 10;
/// Pages that a PAGES frame can hold; the stripe by which pages are spread over connections.
pub const RUN_PAGES_MAX: u64 = 256;
/// Ranges that a ZEROS frame can hold.
pub const ZEROS_MAX: usize = 1024;
/// Most bytes of state in one frame.
pub const STATE_CHUNK_MAX: usize = 1 << 20;
/// Most bytes in the text of a FAILED.
pub const FAILED_MAX: usize = 1 << 10;
/// Most reasons in a REFUSE.
pub const REFUSALS_MAX: usize = 64;
/// Most bytes in each text of a reason.
pub const REFUSAL_TEXT_MAX: usize = 512;

/// What names one migration among all that a destination could be in: 128 random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session(pub [u8; 16]);

/// A contiguous piece of guest RAM, as both hosts must lay it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRange {
    /// First guest-physical address.
    pub guest_address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of its first byte in the file behind guest RAM.
    pub file_offset: u64,
}

/// What the source says first: which machine it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Hello {
    /// Connections that the source would like, 1 to [`CONNECTIONS_MAX`].
    pub connections: u16,
    /// Guest RAM, at most [`RANGES_MAX`] pieces.
    pub ram: Vec<RamRange>,
    /// What must be alike at the destination: a JSON object of at most [`COMPAT_MAX`] bytes with the CPU and
    /// the devices, their features, queues and config space. The machines know its members.
    pub compat: Value,
}

/// One reason why a machine cannot move to the destination. Each text is at most [`REFUSAL_TEXT_MAX`] bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusal {
    /// What differs, such as `features of nic0`.
    pub what: String,
    /// How it is at the source.
    pub source: String,
    /// How it is at the destination.
    pub destination: String,
    /// What the user can do about it; empty if there is nothing.
    pub remedy: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is {} here and {} there",
            self.what, self.source, self.destination
        )?;
        match self.remedy.as_str() {
            "" => Ok(()),
            remedy => write!(f, " ({remedy})"),
        }
    }
}
