//! Restores guest RAM from the file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use vm_memory::{Bytes, GuestAddress};

use super::digest::{BLOCK_SIZE, MemoryDigest, blocks, checksum};
use super::pages::{data_runs, next_data, read_block};
use crate::byte_count::ByteCount;
use crate::memory::GuestRam;

/// Type of a memfd with huge pages in `statfs` (`include/uapi/linux/magic.h`).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Why guest RAM was not restored. It then holds a part of the file and is unusable.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The state has checksums for another size of memory.
    #[error(
        "the saved state is of a guest with {} of memory, but this one has {}; give it as much",
        ByteCount(*saved),
        ByteCount(*ram)
    )]
    OtherSize {
        /// Bytes of the saved guest.
        saved: u64,
        /// Bytes of this guest.
        ram: u64,
    },
    /// The number of checksums differs from the number of blocks.
    #[error("the saved state is malformed: it has {found} checksums of memory, not {expected}")]
    Checksums {
        /// Number of checksums.
        found: usize,
        /// Number of blocks.
        expected: u64,
    },
    /// The file is a directory, device, pipe or the like.
    #[error("the file with the guest's memory is not a regular file")]
    NotRegular,
    /// The file's length has changed since it was written.
    #[error(
        "the file with the guest's memory has {found} bytes instead of {expected}; its copy is \
         incomplete, or it belongs to another guest"
    )]
    Length {
        /// Bytes of the file.
        found: u64,
        /// Bytes of guest RAM.
        expected: u64,
    },
    /// A checksum is wrong.
    #[error(
        "the saved memory is damaged or from another snapshot: the checksum of {} from {offset:#x} \
         on is wrong",
        ByteCount(*len)
    )]
    Checksum {
        /// Offset in the file.
        offset: u64,
        /// Length in bytes of the block.
        len: u64,
    },
    /// A step failed.
    #[error("cannot {step} at {offset:#x}")]
    Io {
        /// The step.
        step: &'static str,
        /// Offset in the memfd and the file.
        offset: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Fills guest RAM from `file` and checks every block against the digest.
///
/// Untouched RAM stays untouched where the file has zeros, so it needs no memory. RAM that was
/// written before, or that a device has pinned, is restored correctly as well, but it takes longer.
/// The pages are not marked as dirty: a later migration copies all of RAM first.
///
/// # Errors
/// [`RestoreError`].
pub fn restore(ram: &GuestRam, file: &File, digest: &MemoryDigest) -> Result<(), RestoreError> {
    let failed = |step, offset| {
        move |source| RestoreError::Io {
            step,
            offset,
            source,
        }
    };
    let target = Target::new(ram).map_err(failed("inspect the guest's memory", 0))?;
    let total = target.size;
    if digest.size != total {
        return Err(RestoreError::OtherSize {
            saved: digest.size,
            ram: total,
        });
    }
    if !digest.is_consistent() {
        return Err(RestoreError::Checksums {
            found: digest.checksums.len(),
            expected: total.div_ceil(BLOCK_SIZE),
        });
    }
    let metadata = file
        .metadata()
        .map_err(failed("inspect the file with the guest's memory", 0))?;
    if !metadata.is_file() {
        return Err(RestoreError::NotRegular);
    }
    if metadata.len() != total {
        return Err(RestoreError::Length {
            found: metadata.len(),
            expected: total,
        });
    }

    let mut buffer = vec![0; usize::try_from(BLOCK_SIZE.min(total)).unwrap_or_default()];
    // Where the next data begins, so that a large hole takes one query.
    let mut data = 0;
    for (block, expected) in blocks(total).zip(&digest.checksums) {
        if data <= block.start {
            data = next_data(file, block.start, total)
                .map_err(failed("find the data of the file", block.start))?;
        }
        let len = usize::try_from(block.end - block.start).unwrap_or_default();
        let bytes = buffer.get_mut(..len).unwrap_or_default();
        let hole = data >= block.end;
        let runs = if hole {
            Vec::new()
        } else {
            read_block(file, block.start, data, bytes)
                .map_err(failed("read the file with the guest's memory", block.start))?;
            data = block.end;
            data_runs(bytes)
        };
        if checksum(bytes, runs.is_empty()) != *expected {
            return Err(RestoreError::Checksum {
                offset: block.start,
                len: block.end - block.start,
            });
        }
        if hole && !target.untouched {
            bytes.fill(0);
        }
        target
            .put(block.start, bytes, &runs)
            .map_err(failed("write the guest's memory", block.start))?;
    }
    Ok(())
}

/// Guest RAM, written through the memfd: that avoids a page fault, and the clearing of the page,
/// for each 4 KiB.
struct Target<'a> {
    ram: &'a GuestRam,
    size: u64,
    /// None of its pages has been allocated, so all of it is zeros.
    untouched: bool,
    /// Huge pages: the file does not support `write` (`hugetlbfs_file_operations`), the mapping
    /// does.
    huge: bool,
}

impl<'a> Target<'a> {
    fn new(ram: &'a GuestRam) -> io::Result<Self> {
        let metadata = ram.file().metadata()?;
        Ok(Self {
            ram,
            size: metadata.len(),
            untouched: metadata.blocks() == 0,
            huge: rustix::fs::fstatfs(ram.file())?.f_type == HUGETLBFS_MAGIC,
        })
    }

    /// Sets the memory from `start` on to `bytes`, which are zeros except for `runs`.
    fn put(&self, start: u64, bytes: &[u8], runs: &[Range<usize>]) -> io::Result<()> {
        if !self.untouched {
            let mut present = vec![0; bytes.len()];
            self.ram.file().read_exact_at(&mut present, start)?;
            if present == bytes {
                return Ok(());
            }
            return self.write(start, bytes);
        }
        for run in runs {
            // Lossless: usize is 64 bits wide on x86-64.
            let offset = start + run.start as u64;
            self.write(offset, bytes.get(run.clone()).unwrap_or_default())?;
        }
        Ok(())
    }

    fn write(&self, mut offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        if !self.huge {
            return self.ram.file().write_all_at(bytes, offset);
        }
        for slot in self.ram.slots() {
            let Some(skip) = offset.checked_sub(slot.file_offset) else {
                break;
            };
            let Some(room) = slot.guest.len.checked_sub(skip) else {
                continue;
            };
            let len = usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len());
            let (here, rest) = bytes.split_at(len);
            self.ram
                .memory()
                .write_slice(here, GuestAddress(slot.guest.start + skip))
                .map_err(io::Error::other)?;
            bytes = rest;
            offset += here.len() as u64;
        }
        match bytes {
            [] => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
