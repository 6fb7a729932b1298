//! The messages that two hosts exchange when a machine moves.
//!
//! Owns the messages, their bytes and their limits. It must not know who sends which message when
//! (that is [`super::source`] and [`super::destination`]), nor how a connection is made.
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
//! `sequence` counts the frames of this direction of this connection from 0 (and wraps). It reveals
//! a frame that is replayed, lost or moved to another connection. The CRC (of IEEE 802.3) covers
//! the first 12 bytes and the payload. It finds damage, not malice: between hosts, use TLS.
//!
//! | kind | name | payload | on |
//! |---|---|---|---|
//! | 1 | HELLO | described below: [`Hello`] | 0 |
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
//! | 17 | EARLY | 1 byte to 1 MiB of a device's state, while the guest runs | 0 |
//!
//! HELLO holds the magic `BELLMIGR`, version u32, the secret of 32 bytes, page size u32,
//! connections u16 and the number of ranges u16. Then come the ranges, each (guest address, length,
//! file offset) u64, and then JSON. A source without a secret sends zeros.
//!
//! TRY replaces HELLO, and gets the same answers; after any answer the connection ends. A
//! destination that does not know TRY yet rejects it as no message of the protocol, and keeps
//! waiting.
//!
//! A source sends EARLY only if it has announced the states of functions: section `vfio`, version 2
//! or later.

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
/// The protocol version of this host. Others are rejected: both hosts must know all messages.
pub const VERSION: u32 = 2;
/// Limit of the connections of one migration.
pub use bellhop_api::machine::CONNECTIONS_MAX;
pub use bellhop_api::machine::MigrationSecret;
/// The number of a connection that has not sent JOIN.
pub const CONNECTION_UNKNOWN: u16 = u16::MAX;
/// Limit of the RAM ranges in a HELLO.
pub const RANGES_MAX: usize = 64;
/// Limit of the compatibility document in bytes, as JSON.
pub const COMPAT_MAX: usize = 64 << 10;
/// Pages that a PAGES frame can hold; also the size of the stripes that spread pages over
/// connections.
pub const RUN_PAGES_MAX: u64 = 256;
/// Ranges that a ZEROS frame can hold.
pub const ZEROS_MAX: usize = 1024;
/// Limit of the state bytes in one frame.
pub const STATE_CHUNK_MAX: usize = 1 << 20;
/// Limit of the text of a FAILED in bytes.
pub const FAILED_MAX: usize = 1 << 10;
/// Limit of the reasons in a REFUSE.
pub const REFUSALS_MAX: usize = 64;
/// Limit of each text of a reason in bytes.
pub const REFUSAL_TEXT_MAX: usize = 512;

/// Identifies one migration of a destination: 128 random bits.
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

/// The source's first message: a description of the machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Hello {
    /// Proves that the source is the one that this destination waits for.
    pub secret: MigrationSecret,
    /// Number of connections that the source requests, 1 to [`CONNECTIONS_MAX`].
    pub connections: u16,
    /// Guest RAM, at most [`RANGES_MAX`] pieces.
    pub ram: Vec<RamRange>,
    /// The properties that must match at the destination: a JSON object of at most [`COMPAT_MAX`]
    /// bytes. It describes the CPU, and the devices with their features, queues and config space.
    /// The machines know its members.
    pub compat: Value,
}

/// One reason why a machine cannot move to the destination. Each text has at most
/// [`REFUSAL_TEXT_MAX`] bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusal {
    /// The property that differs, such as `features of nic0`.
    pub what: String,
    /// Its value at the source.
    pub source: String,
    /// Its value at the destination.
    pub destination: String,
    /// The remedy for the user; empty if there is none.
    pub remedy: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} here, {} there",
            self.what, self.source, self.destination
        )?;
        match self.remedy.as_str() {
            "" => Ok(()),
            remedy => write!(f, " ({remedy})"),
        }
    }
}
