//! Saves guest RAM to the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::io::Errno;

use super::digest::{BLOCK_SIZE, MemoryDigest, blocks, checksum};
use super::pages::{data_runs, next_data, read_block};
use crate::byte_count::ByteCount;
use crate::memory::GuestRam;

/// Why guest RAM was not saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The file is not empty: its bytes would show through the holes.
    #[error("the file for the guest's memory is not an empty regular file")]
    NotEmpty,
    /// The file system is full, or the user's quota is used up.
    #[error(
        "there is no room for the guest's memory: it takes up to {}, but {} are free; make room, \
         or save it on another file system",
        ByteCount(*needed),
        ByteCount(*free)
    )]
    NoRoom {
        /// The largest number of bytes that the file needs on the disk.
        needed: u64,
        /// Bytes that the file system has for it. More than `needed` means a quota.
        free: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
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

/// Writes guest RAM to `file`, which must be regular and empty, and waits until it is on the disk.
///
/// Reads through the memfd, so that untouched pages are not allocated.
///
/// # Errors
/// [`SaveError`]. The file is then empty, so that it needs no space even before it is removed.
pub fn save(ram: &GuestRam, file: &File) -> Result<MemoryDigest, SaveError> {
    let at_start = |step| {
        move |source| SaveError::Io {
            step,
            offset: 0,
            source,
        }
    };
    let metadata = file
        .metadata()
        .map_err(at_start("inspect the file for the guest's memory"))?;
    if !metadata.is_file() || metadata.len() != 0 {
        return Err(SaveError::NotEmpty);
    }
    let saved = copy(ram.file(), file);
    if saved.is_err() {
        // The original error matters more than one from here.
        let _ = file.set_len(0);
    }
    saved
}

fn copy(memory: &File, file: &File) -> Result<MemoryDigest, SaveError> {
    let failed = |step, offset| {
        move |source| SaveError::Io {
            step,
            offset,
            source,
        }
    };
    let full = |offset| {
        move |source: io::Error| match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOSPC | Errno::DQUOT) => no_room(memory, file, source),
            _ => failed("write the guest's memory", offset)(source),
        }
    };
    let total = memory
        .metadata()
        .map_err(failed("inspect the guest's memory", 0))?
        .len();
    file.set_len(total).map_err(full(total))?;

    let mut checksums = Vec::new();
    let mut buffer = vec![0; usize::try_from(BLOCK_SIZE.min(total)).unwrap_or_default()];
    // Where the next data begins, so that a large hole takes one query.
    let mut data = 0;
    for block in blocks(total) {
        if data <= block.start {
            data = next_data(memory, block.start, total)
                .map_err(failed("find the guest's memory", block.start))?;
        }
        if data >= block.end {
            checksums.push(0);
        } else {
            let len = usize::try_from(block.end - block.start).unwrap_or_default();
            let bytes = buffer.get_mut(..len).unwrap_or_default();
            read_block(memory, block.start, data, bytes)
                .map_err(failed("read the guest's memory", block.start))?;
            let runs = data_runs(bytes);
            checksums.push(checksum(bytes, runs.is_empty()));
            for run in runs {
                // Lossless: usize is 64 bits wide on x86-64.
                let offset = block.start + run.start as u64;
                let run = bytes.get(run).unwrap_or_default();
                file.write_all_at(run, offset).map_err(full(offset))?;
            }
            data = block.end;
        }
    }
    // Delayed allocation may report a full disk only now.
    file.sync_all().map_err(full(total))?;
    Ok(MemoryDigest {
        size: total,
        checksums,
    })
}

/// Reports how much space is needed. Unknown values stay 0: the error itself matters.
fn no_room(memory: &File, file: &File, source: io::Error) -> SaveError {
    // Blocks of stat(2) have 512 bytes, regardless of the file system's block size.
    let allocated = |file: &File| {
        file.metadata()
            .map(|metadata| metadata.blocks().saturating_mul(512))
            .unwrap_or_default()
    };
    let free = rustix::fs::fstatvfs(file)
        .map(|system| system.f_bavail.saturating_mul(system.f_frsize))
        .unwrap_or_default();
    SaveError::NoRoom {
        needed: allocated(memory),
        // The space of the partial file becomes free.
        free: free.saturating_add(allocated(file)),
        source,
    }
}
