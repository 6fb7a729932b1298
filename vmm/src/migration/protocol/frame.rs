//! Frames: the header before each message, and the defects of a frame.

use super::{COMPAT_MAX, FAILED_MAX, REFUSAL_TEXT_MAX, REFUSALS_MAX};
use super::{RANGES_MAX, RUN_PAGES_MAX, STATE_CHUNK_MAX, ZEROS_MAX};
use crate::migration::dirty::PAGE_SIZE;

/// Bytes in a frame's header.
pub const FRAME_HEADER_LEN: usize = 16;

/// The defect of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// An unknown kind of message.
    #[error("a message of the unknown kind {0}")]
    Kind(u16),
    /// Longer than a message of this kind can be.
    #[error("{name} of {len} bytes, more than {max}")]
    TooLong {
        /// The message.
        name: &'static str,
        /// Bytes announced.
        len: u32,
        /// Bytes allowed.
        max: usize,
    },
    /// The frame belongs to another connection.
    #[error("a frame of connection {found} came on connection {expected}")]
    Connection {
        /// In the frame.
        found: u16,
        /// The connection that carried it.
        expected: u16,
    },
    /// The frame is out of order.
    #[error("frame {found} came in place of frame {expected}")]
    Sequence {
        /// In the frame.
        found: u32,
        /// The next one.
        expected: u32,
    },
    /// The CRC does not match.
    #[error("{name} was damaged on its way (CRC-32)")]
    Damaged {
        /// The message.
        name: &'static str,
    },
    /// The payload is invalid.
    #[error("{name} {problem}")]
    Payload {
        /// The message.
        name: &'static str,
        /// The defect.
        problem: &'static str,
    },
    /// A HELLO with another magic.
    #[error("the other host does not use Bellhop's migration protocol")]
    Magic,
    /// A HELLO of another version.
    #[error(
        "the source uses version {found} of the migration protocol, but this host uses version \
         {ours}; run the same Bellhop on both"
    )]
    Version {
        /// The source's version.
        found: u32,
        /// This host's version.
        ours: u32,
    },
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $number:literal, $name:literal, $max:expr;)*) => {
        /// The kind of message in a frame.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(in crate::migration) enum Kind { $($kind,)* }

        impl Kind {
            fn of(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$kind),)*
                    _ => None,
                }
            }

            pub(in crate::migration) fn number(self) -> u16 {
                match self {
                    $(Self::$kind => $number,)*
                }
            }

            /// Its name in the protocol's table.
            pub(in crate::migration) fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }

            /// Limit of the payload in bytes.
            pub(in crate::migration) fn max(self) -> usize {
                match self {
                    $(Self::$kind => $max,)*
                }
            }
        }
    };
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a constant of 2^20, and there is no `try_from` in constants"
)]
const PAGES_MAX: usize = 8 + (RUN_PAGES_MAX * PAGE_SIZE) as usize;

kinds! {
    Hello = 1, "HELLO", 52 + RANGES_MAX * 24 + COMPAT_MAX;
    Accept = 2, "ACCEPT", 18;
    Refuse = 3, "REFUSE", 2 + REFUSALS_MAX * 4 * (2 + REFUSAL_TEXT_MAX);
    Join = 4, "JOIN", 18;
    Pages = 5, "PAGES", PAGES_MAX;
    Zeros = 6, "ZEROS", ZEROS_MAX * 12;
    RoundEnd = 7, "ROUND_END", 5;
    State = 8, "STATE", STATE_CHUNK_MAX;
    StateEnd = 9, "STATE_END", 8;
    Ready = 10, "READY", 0;
    Go = 11, "GO", 16;
    Done = 12, "DONE", 0;
    Cancel = 13, "CANCEL", 0;
    Failed = 14, "FAILED", FAILED_MAX;
    Alive = 15, "ALIVE", 0;
    Try = 16, "TRY", 52 + RANGES_MAX * 24 + COMPAT_MAX;
    Early = 17, "EARLY", STATE_CHUNK_MAX;
}

/// A frame's header, checked as far as it can be without the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    kind: Kind,
    bytes: [u8; 12],
    len: usize,
    crc: u32,
}

impl Header {
    /// Checks the header that should be frame number `sequence` of connection `connection`.
    ///
    /// # Errors
    /// [`FrameError::Kind`], [`FrameError::TooLong`], [`FrameError::Connection`] or
    /// [`FrameError::Sequence`].
    pub fn decode(
        header: [u8; FRAME_HEADER_LEN],
        connection: u16,
        sequence: u32,
    ) -> Result<Self, FrameError> {
        let [k0, k1, c0, c1, l0, l1, l2, l3, s0, s1, s2, s3, crc @ ..] = header;
        let number = u16::from_le_bytes([k0, k1]);
        let kind = Kind::of(number).ok_or(FrameError::Kind(number))?;
        let found = u16::from_le_bytes([c0, c1]);
        if found != connection {
            return Err(FrameError::Connection {
                found,
                expected: connection,
            });
        }
        let announced = u32::from_le_bytes([l0, l1, l2, l3]);
        let len = usize::try_from(announced)
            .ok()
            .filter(|&len| len <= kind.max())
            .ok_or(FrameError::TooLong {
                name: kind.name(),
                len: announced,
                max: kind.max(),
            })?;
        let found = u32::from_le_bytes([s0, s1, s2, s3]);
        if found != sequence {
            return Err(FrameError::Sequence {
                found,
                expected: sequence,
            });
        }
        Ok(Self {
            kind,
            bytes: [k0, k1, c0, c1, l0, l1, l2, l3, s0, s1, s2, s3],
            len,
            crc: u32::from_le_bytes(crc),
        })
    }

    /// The kind of message.
    pub(in crate::migration) fn kind(&self) -> Kind {
        self.kind
    }

    /// Bytes of payload after it; at most what a message of this kind can have.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.len
    }

    /// Checks the payload against the CRC.
    ///
    /// # Errors
    /// [`FrameError::Damaged`].
    pub fn check(&self, payload: &[u8]) -> Result<(), FrameError> {
        if crc(&self.bytes, &[payload]) == self.crc {
            Ok(())
        } else {
            Err(FrameError::Damaged {
                name: self.kind.name(),
            })
        }
    }
}

/// The header of a frame whose payload is `parts`, one after the other.
///
/// # Errors
/// [`FrameError::TooLong`]: the payload is longer than that of such a message can be.
pub(in crate::migration) fn seal(
    kind: Kind,
    connection: u16,
    sequence: u32,
    parts: &[&[u8]],
) -> Result<[u8; FRAME_HEADER_LEN], FrameError> {
    let total: usize = parts.iter().map(|part| part.len()).sum();
    let len = u32::try_from(total).unwrap_or(u32::MAX);
    if total > kind.max() {
        return Err(FrameError::TooLong {
            name: kind.name(),
            len,
            max: kind.max(),
        });
    }
    let [k0, k1] = kind.number().to_le_bytes();
    let [c0, c1] = connection.to_le_bytes();
    let [l0, l1, l2, l3] = len.to_le_bytes();
    let [s0, s1, s2, s3] = sequence.to_le_bytes();
    let start = [k0, k1, c0, c1, l0, l1, l2, l3, s0, s1, s2, s3];
    let [r0, r1, r2, r3] = crc(&start, parts).to_le_bytes();
    Ok([
        k0, k1, c0, c1, l0, l1, l2, l3, s0, s1, s2, s3, r0, r1, r2, r3,
    ])
}

fn crc(start: &[u8; 12], parts: &[&[u8]]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(start);
    for part in parts {
        crc.update(part);
    }
    crc.finalize()
}
