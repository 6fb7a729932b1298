//! Opens a snapshot of untrusted origin.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::{MEMORY_FILE, OPEN_DIRECTORY, STATE_FILE, is_regular};
use crate::byte_count::ByteCount;
use crate::layout::{RAM_MAX, RAM_MIN};

/// The largest file with sections (bytes).
pub const STATE_FILE_MAX: u64 = 256 << 20;

/// Why a directory was rejected as a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no such directory, or it is something else.
    #[error(
        "{} is not a directory with a snapshot (symbolic links are not followed)",
        path.display()
    )]
    NotADirectory {
        /// The path.
        path: PathBuf,
    },
    /// A file is missing.
    #[error("{} is not a snapshot: it has no file {file:?}", path.display())]
    Missing {
        /// The directory.
        path: PathBuf,
        /// The file.
        file: &'static str,
    },
    /// A file is a symbolic link, pipe, device or the like.
    #[error("the file {file:?} of the snapshot {} is not a regular file", path.display())]
    NotRegular {
        /// The directory.
        path: PathBuf,
        /// The file.
        file: &'static str,
    },
    /// A file is longer or shorter than a snapshot's.
    #[error(
        "the file {file:?} of the snapshot {} has {len} bytes; it has between {} and {}",
        path.display(), ByteCount(*min), ByteCount(*max)
    )]
    Length {
        /// The directory.
        path: PathBuf,
        /// The file.
        file: &'static str,
        /// Bytes of the file.
        len: u64,
        /// The smallest number of bytes.
        min: u64,
        /// The largest number of bytes.
        max: u64,
    },
    /// A step failed.
    #[error("cannot open {} of the snapshot {}", file, path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// The file, or another part.
        file: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// A snapshot's files, open for reading. Their content is not checked yet.
#[derive(Debug)]
pub struct Snapshot {
    state: File,
    memory: File,
}

impl Snapshot {
    /// Opens both files of the snapshot `path`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let flags = OPEN_DIRECTORY | OFlags::NOFOLLOW;
        let directory = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|error| {
            let path = path.to_owned();
            match error {
                Errno::NOTDIR | Errno::LOOP => OpenError::NotADirectory { path },
                error => OpenError::Io {
                    path,
                    file: "the directory",
                    source: error.into(),
                },
            }
        })?;
        Ok(Self {
            state: open_file(&directory, path, STATE_FILE, 1, STATE_FILE_MAX)?,
            memory: open_file(&directory, path, MEMORY_FILE, RAM_MIN, RAM_MAX)?,
        })
    }

    /// The file with the sections ([`crate::snapshot::format`]), at its beginning.
    #[must_use]
    pub fn state(&self) -> &File {
        &self.state
    }

    /// The file with guest RAM ([`crate::snapshot::memory_image`]).
    #[must_use]
    pub fn memory(&self) -> &File {
        &self.memory
    }
}

fn open_file(
    directory: &OwnedFd,
    path: &Path,
    file: &'static str,
    min: u64,
    max: u64,
) -> Result<File, OpenError> {
    let path = || path.to_owned();
    let io = |error| match error {
        Errno::NOENT => OpenError::Missing { path: path(), file },
        Errno::LOOP => OpenError::NotRegular { path: path(), file },
        error => OpenError::Io {
            path: path(),
            file,
            source: error.into(),
        },
    };
    let check = |stat: &Stat| {
        if !is_regular(stat) {
            return Err(OpenError::NotRegular { path: path(), file });
        }
        match u64::try_from(stat.st_size) {
            Ok(len) if (min..=max).contains(&len) => Ok(()),
            len => Err(OpenError::Length {
                path: path(),
                file,
                len: len.unwrap_or(u64::MAX),
                min,
                max,
            }),
        }
    };
    // Checked first, because opening a device can have side effects.
    let stat = rustix::fs::statat(directory, file, AtFlags::SYMLINK_NOFOLLOW).map_err(io)?;
    check(&stat)?;
    // Check the opened file again, in case it was replaced. A pipe without a writer does not block.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(directory, file, flags, Mode::empty()).map_err(io)?;
    check(&rustix::fs::fstat(&opened).map_err(io)?)?;
    Ok(File::from(opened))
}
