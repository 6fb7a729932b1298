//! The checksums of a memory image.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::layout::RAM_MAX;
use crate::snapshot::format::Saved;

/// Bytes of guest RAM that have a checksum together. The last block may be shorter.
pub const BLOCK_SIZE: u64 = 1 << 20;

/// The size of guest RAM and a CRC-32 (IEEE 802.3) of each block of [`BLOCK_SIZE`] bytes.
///
/// The checksum of a block of zeros is 0, whatever its CRC, so that a hole need not be read; a block
/// with other bytes whose CRC is 0 has 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryDigest {
    /// Bytes of guest RAM.
    pub(in crate::snapshot) size: u64,
    /// One per block, by ascending offset in the memfd.
    pub(in crate::snapshot) checksums: Vec<u32>,
}

impl Saved for MemoryDigest {
    const NAME: &'static str = "memory-digest";
    const VERSION: u32 = 1;
    // At most 5 bytes for each block of the largest guest.
    const MAX_LEN: u64 = 5 * (RAM_MAX / BLOCK_SIZE) + 32;
}

impl MemoryDigest {
    /// Bytes of guest RAM.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether there is a checksum for each block: a digest that was read may say anything.
    pub(super) fn is_consistent(&self) -> bool {
        self.checksums.len() as u64 == self.size.div_ceil(BLOCK_SIZE)
    }
}

/// The blocks of `size` bytes.
pub(super) fn blocks(size: u64) -> impl Iterator<Item = Range<u64>> {
    (0..size.div_ceil(BLOCK_SIZE)).map(move |index| {
        let start = index * BLOCK_SIZE;
        start..start.saturating_add(BLOCK_SIZE).min(size)
    })
}

/// The checksum of a block's bytes.
pub(super) fn checksum(block: &[u8], zero: bool) -> u32 {
    match zero {
        true => 0,
        false => crc32fast::hash(block).max(1),
    }
}
