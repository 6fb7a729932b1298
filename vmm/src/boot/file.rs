//! Opening kernel and initramfs files, and reading them into guest memory.
//!
//! Owns the checks that every file must pass whatever is in it. Nothing is
//! read into memory of our own except headers: the content goes straight from
//! the file into guest RAM.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, ReadVolatile};

use super::BootError;

/// What is wrong with a file before anything of its content is looked at.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The path can't be opened.
    #[error("it cannot be opened")]
    Open(#[source] io::Error),
    /// The path is a directory.
    #[error("it is a directory, not a file")]
    Directory,
    /// The path is a pipe, a socket or a device.
    #[error("it is not a regular file; it must be readable again when the guest reboots")]
    NotRegular,
    /// The file has no content.
    #[error("it is empty")]
    Empty,
    /// Reading failed.
    #[error("it cannot be read")]
    Read(#[source] io::Error),
    /// The file ended before the size that it had when it was opened, or
    /// before what its headers promise.
    #[error("it is truncated: {needed} bytes are needed, the file has {len}")]
    Truncated {
        /// Bytes that must be there.
        needed: u64,
        /// Bytes that are there.
        len: u64,
    },
}

/// Opens a regular, non-empty file; returns it with its length in bytes.
pub(super) fn open(path: &Path) -> Result<(File, u64), FileError> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        // Opening a pipe or a terminal must neither wait nor take it over:
        // they are refused below.
        .custom_flags(flags)
        .open(path)
        .map_err(FileError::Open)?;
    let metadata = file.metadata().map_err(FileError::Open)?;
    if metadata.is_dir() {
        return Err(FileError::Directory);
    }
    if !metadata.is_file() {
        return Err(FileError::NotRegular);
    }
    match metadata.len() {
        0 => Err(FileError::Empty),
        len => Ok((file, len)),
    }
}

/// Checks that `size` bytes at `offset` lie inside a file of `len` bytes.
pub(super) fn check_inside(offset: u64, size: u64, len: u64) -> Result<(), FileError> {
    // An end beyond 2^64 is as far outside as can be said.
    let needed = offset.saturating_add(size);
    if needed > len || needed == u64::MAX {
        return Err(FileError::Truncated { needed, len });
    }
    Ok(())
}

/// Why a copy into guest memory stopped.
#[derive(Debug)]
pub(super) enum CopyError {
    /// The reader failed or ended early.
    File(FileError),
    /// Guest memory refused: the range was not checked before.
    Memory(GuestMemoryError),
}

impl CopyError {
    /// Sorts the error into its place, given how to wrap one about the file.
    pub(super) fn into_boot_error(self, wrap: impl FnOnce(FileError) -> BootError) -> BootError {
        match self {
            Self::File(error) => wrap(error),
            Self::Memory(error) => BootError::Memory(error),
        }
    }
}

/// Reads exactly `len` bytes from `reader` to guest-physical `address`. The
/// range must lie in one region of memory, as all of [`crate::layout::Layout::loadable`]
/// does: a short read would otherwise go on at the start of the next region.
///
/// A loop of our own, because `read_exact_volatile_from` of `vm-memory` gives
/// up at the first short read, and reads are short beyond 2 GiB and on
/// network file systems.
pub(super) fn copy_to_guest<R: ReadVolatile>(
    reader: &mut R,
    memory: &GuestMemory,
    address: u64,
    len: u64,
) -> Result<(), CopyError> {
    let mut done: u64 = 0;
    while done < len {
        let count = usize::try_from(len - done).unwrap_or(usize::MAX);
        match memory.read_volatile_from(GuestAddress(address + done), reader, count) {
            Ok(0) => {
                return Err(CopyError::File(FileError::Truncated {
                    needed: len,
                    len: done,
                }));
            }
            // Lossless: usize is 64 bits wide on x86-64.
            Ok(read) => done += read as u64,
            Err(GuestMemoryError::IOError(error)) if error.kind() == io::ErrorKind::Interrupted => {
            }
            Err(GuestMemoryError::IOError(error)) => {
                return Err(CopyError::File(FileError::Read(error)));
            }
            Err(error) => return Err(CopyError::Memory(error)),
        }
    }
    Ok(())
}

/// Writes zeroes to `len` bytes at guest-physical `address`.
pub(super) fn zero_guest(
    memory: &GuestMemory,
    address: u64,
    len: u64,
) -> Result<(), GuestMemoryError> {
    static ZEROES: [u8; 64 << 10] = [0; 64 << 10];
    let mut done: u64 = 0;
    while done < len {
        let count = usize::try_from(len - done).map_or(ZEROES.len(), |left| left.min(ZEROES.len()));
        memory.write_slice(&ZEROES[..count], GuestAddress(address + done))?;
        // Lossless: usize is 64 bits wide on x86-64.
        done += count as u64;
    }
    Ok(())
}
