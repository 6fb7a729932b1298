//! The checksums of a memory image.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::thread;

use serde::{Deserialize, Serialize};

use super::pages::{is_zero, next_data, read_block};
use crate::layout::RAM_MAX;
use crate::memory::GuestRam;
use crate::snapshot::format::Saved;

/// Bytes of guest RAM under one checksum. The last block may be shorter.
pub const BLOCK_SIZE: u64 = 1 << 20;

/// Limit of the threads that read guest RAM: more would wait for the memory itself.
const READERS_MAX: usize = 16;

/// The size of guest RAM and a CRC-32 (IEEE 802.3) of each block of [`BLOCK_SIZE`] bytes.
///
/// The checksum of a block of zeros is 0, regardless of its CRC, so that a hole need not be read. A
/// block with other bytes whose CRC is 0 has the checksum 1.
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

/// Guest RAM does not match a digest.
#[derive(Debug, thiserror::Error)]
pub enum DigestError {
    /// Guest RAM cannot be read.
    #[error("cannot read the guest's memory")]
    Read(#[source] io::Error),
    /// The digest is of a memory of another size.
    #[error("the digest covers {said} bytes of memory in {blocks} blocks, not {ram} bytes")]
    Size {
        /// Bytes according to the digest.
        said: u64,
        /// Number of its checksums.
        blocks: usize,
        /// Bytes of guest RAM.
        ram: u64,
    },
    /// Some blocks differ.
    #[error(
        "{differing} of {blocks} MiB of the guest's memory differ from the original, the first at \
         offset {first:#x}"
    )]
    Differs {
        /// Blocks of [`BLOCK_SIZE`] that differ.
        differing: usize,
        /// Number of all blocks.
        blocks: usize,
        /// Offset of the first one in the memfd.
        first: u64,
    },
}

impl MemoryDigest {
    /// Computes the digest of guest RAM, to which nothing may write meanwhile. The guest waits, so
    /// several threads read it. Untouched memory is not read.
    ///
    /// # Errors
    /// The memfd cannot be read.
    pub fn of(ram: &GuestRam) -> io::Result<Self> {
        let memory = ram.file();
        let size = memory.metadata()?.len();
        let blocks: Vec<Range<u64>> = blocks(size).collect();
        let readers = thread::available_parallelism().map_or(1, NonZero::get);
        let share = blocks.len().div_ceil(readers.min(READERS_MAX)).max(1);
        let parts = thread::scope(|scope| {
            let readers: Vec<_> = blocks
                .chunks(share)
                .map(|blocks| scope.spawn(|| read(memory, size, blocks)))
                .collect();
            readers
                .into_iter()
                .map(|reader| {
                    reader
                        .join()
                        .unwrap_or_else(|_| Err(io::Error::other("a reader panicked")))
                })
                .collect::<io::Result<Vec<_>>>()
        })?;
        Ok(Self {
            size,
            checksums: parts.concat(),
        })
    }

    /// Compares guest RAM with this digest, from another host for example. Nothing may write to it
    /// meanwhile.
    ///
    /// # Errors
    /// [`DigestError`].
    pub fn verify(&self, ram: &GuestRam) -> Result<(), DigestError> {
        self.compare(&Self::of(ram).map_err(DigestError::Read)?)
    }

    /// Compares with the digest of another memory.
    ///
    /// # Errors
    /// [`DigestError::Size`] or [`DigestError::Differs`].
    pub fn compare(&self, found: &Self) -> Result<(), DigestError> {
        if self.size != found.size || self.checksums.len() != found.checksums.len() {
            return Err(DigestError::Size {
                said: self.size,
                blocks: self.checksums.len(),
                ram: found.size,
            });
        }
        let mut differing = (0_u64..)
            .zip(self.checksums.iter().zip(&found.checksums))
            .filter(|(_, (wanted, found))| wanted != found)
            .map(|(index, _)| index * BLOCK_SIZE);
        match differing.next() {
            None => Ok(()),
            Some(first) => Err(DigestError::Differs {
                differing: differing.count() + 1,
                blocks: found.checksums.len(),
                first,
            }),
        }
    }

    /// Size of guest RAM in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether there is a checksum for each block: a digest from outside may have any content.
    pub(super) fn is_consistent(&self) -> bool {
        self.checksums.len() as u64 == self.size.div_ceil(BLOCK_SIZE)
    }
}

/// Reads the checksums of consecutive blocks of a memory of `size` bytes.
fn read(memory: &File, size: u64, blocks: &[Range<u64>]) -> io::Result<Vec<u32>> {
    let mut checksums = Vec::with_capacity(blocks.len());
    let mut buffer = vec![0; usize::try_from(BLOCK_SIZE.min(size)).unwrap_or_default()];
    // Where the next data begins, so that a large hole takes one query.
    let mut data = 0;
    for block in blocks {
        if data <= block.start {
            data = next_data(memory, block.start, size)?;
        }
        if data >= block.end {
            checksums.push(0);
            continue;
        }
        let len = usize::try_from(block.end - block.start).unwrap_or_default();
        let bytes = buffer.get_mut(..len).unwrap_or_default();
        read_block(memory, block.start, data, bytes)?;
        checksums.push(checksum(bytes, is_zero(bytes)));
        data = block.end;
    }
    Ok(checksums)
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
    if zero {
        0
    } else {
        crc32fast::hash(block).max(1)
    }
}
