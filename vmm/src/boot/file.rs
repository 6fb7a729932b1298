//! Opening kernel and initramfs files, and reading them into guest memory.
//!
//! Owns the checks that every file must pass regardless of its content. Only headers are read into
//! the VMM's own memory: the content goes straight from the file into guest RAM.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, ReadVolatile};

use super::error::{truncated, unreadable};
use crate::Error;

/// Opens a regular, non-empty file; returns it with its length in bytes.
pub(super) fn open(path: &Path) -> Result<(File, u64), Error> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        // Opening a pipe or a terminal must neither wait nor take it over: the checks below reject
        // them.
        .custom_flags(flags)
        .open(path)
        .map_err(not_opened)?;
    let metadata = file.metadata().map_err(not_opened)?;
    if metadata.is_dir() {
        return Err(Error::unusable("it is a directory, not a file"));
    }
    if !metadata.is_file() {
        return Err(Error::unusable(
            "it is not a regular file; each reboot of the guest reads it again",
        ));
    }
    match metadata.len() {
        0 => Err(Error::unusable("it is empty")),
        len => Ok((file, len)),
    }
}

fn not_opened(source: io::Error) -> Error {
    Error::unusable("cannot open it").because(source)
}

/// Guest memory rejected a write inside its own layout.
pub(super) fn not_written(source: GuestMemoryError) -> Error {
    Error::unusable("cannot write to guest memory").because(source)
}

/// Checks that `size` bytes at `offset` are inside a file of `len` bytes.
pub(super) fn check_inside(offset: u64, size: u64, len: u64) -> Result<(), Error> {
    // An end beyond 2^64 saturates, and is outside in any case.
    let needed = offset.saturating_add(size);
    if needed > len || needed == u64::MAX {
        return Err(truncated(needed, len));
    }
    Ok(())
}

/// Why a copy into guest memory stopped.
#[derive(Debug)]
pub(super) enum CopyError {
    /// The reader failed or ended early.
    File(Error),
    /// Guest memory rejected the write: the range was not checked before.
    Memory(GuestMemoryError),
}

impl CopyError {
    /// Converts to an [`Error`]; `wrap` wraps one about the file.
    pub(super) fn into_error(self, wrap: impl FnOnce(Error) -> Error) -> Error {
        match self {
            Self::File(error) => wrap(error),
            Self::Memory(error) => not_written(error),
        }
    }
}

/// Reads exactly `len` bytes from `reader` to guest-physical `address`. The range must be inside
/// one region of memory, like all of [`crate::layout::Layout::loadable`]. Otherwise a short read
/// would continue at the start of the next region.
///
/// `read_exact_volatile_from` of `vm-memory` fails at the first short read, so this needs its own
/// loop. Reads are short beyond 2 GiB and on network file systems.
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
                return Err(CopyError::File(truncated(len, done)));
            }
            // Lossless: usize is 64 bits wide on x86-64.
            Ok(read) => done += read as u64,
            Err(GuestMemoryError::IOError(error)) if error.kind() == io::ErrorKind::Interrupted => {
            }
            Err(GuestMemoryError::IOError(error)) => {
                return Err(CopyError::File(unreadable(error)));
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
