//! A log that does not grow beyond a size: of a console, or of a process.
//!
//! Owns the file and its rotation. It must not know where the bytes come from.
//!
//! ```text
//!         the next write would pass the limit
//!   FILE ─────────────────────────────────────> FILE renamed to FILE.1 (replaces an older one),
//!                                               a new FILE
//! ```
//! The page cache determines how long a write takes: a file system that hangs blocks the caller, so
//! use a local one for a log.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// The default size of a log in bytes.
pub const SIZE_MAX: u64 = 16 << 20;
/// Readable by the user of this process only. A guest may print secrets.
const MODE: Mode = Mode::from_raw_mode(0o600);

/// See the module.
#[derive(Debug)]
pub struct RotatingFile {
    path: PathBuf,
    limit: u64,
    /// `None` after a rotation that failed.
    pub(crate) file: Option<File>,
    size: u64,
}

/// Error of a write, with its progress.
#[derive(Debug, thiserror::Error)]
#[error("cannot write a log")]
pub struct AppendError {
    /// Bytes that were written.
    pub written: usize,
    /// The cause.
    #[source]
    pub source: io::Error,
}

fn open(path: &Path) -> io::Result<File> {
    // Follows no link, and waits for no FIFO.
    let flags = OFlags::WRONLY
        | OFlags::APPEND
        | OFlags::CREATE
        | OFlags::CLOEXEC
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::NOCTTY;
    Ok(File::from(rustix::fs::open(path, flags, MODE)?))
}

/// The kind of the error for a path that is no regular file of this user's.
pub(crate) const NO_FILE: io::ErrorKind = io::ErrorKind::Unsupported;

fn no_file() -> io::Error {
    io::Error::new(NO_FILE, "it is not a regular file of this user")
}

impl RotatingFile {
    /// Opens or creates `path`, readable by this user alone; its content stays. It grows to `limit`
    /// bytes.
    ///
    /// # Errors
    /// The file cannot be opened, or is no regular file of this user.
    pub fn open(path: &Path, limit: u64) -> io::Result<Self> {
        let file = match open(path) {
            // A symbolic link; a socket, or a FIFO without a reader.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => {
                return Err(no_file());
            }
            opened => opened?,
        };
        let metadata = file.metadata()?;
        let ours = metadata.uid() == rustix::process::geteuid().as_raw();
        if !metadata.is_file() || !ours {
            return Err(no_file());
        }
        // An existing file may be readable for others.
        rustix::fs::fchmod(&file, MODE)?;
        Ok(Self {
            path: path.to_owned(),
            limit,
            size: metadata.len(),
            file: Some(file),
        })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file; `None` after a failed rotation.
    #[must_use]
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Writes all of `bytes`. Returns whether the write went to another file than the one before.
    ///
    /// # Errors
    /// The file system is full, or a rotation failed.
    pub fn append(&mut self, bytes: &[u8]) -> Result<bool, AppendError> {
        let failed = |written| move |source| AppendError { written, source };
        let grown = self.size.saturating_add(bytes.len() as u64);
        let rotates = self.file.is_none() || (self.size > 0 && grown > self.limit);
        if rotates {
            self.rotate().map_err(failed(0))?;
        }
        let mut written = 0;
        while let Some(rest) = bytes.get(written..)
            && !rest.is_empty()
        {
            let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound);
            match file
                .map_err(io::Error::from)
                .and_then(|file| file.write(rest))
            {
                Ok(0) => return Err(failed(written)(io::ErrorKind::WriteZero.into())),
                Ok(count) => {
                    written += count;
                    self.size = self.size.saturating_add(count as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(written)(error)),
            }
        }
        Ok(rotates)
    }

    /// Starts over at each attempt: after a failure the file keeps its size.
    fn rotate(&mut self) -> io::Result<()> {
        let mut old = OsString::from(&self.path);
        old.push(".1");
        match std::fs::rename(&self.path, old) {
            // The file was deleted: there is nothing to keep.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed?,
        }
        self.file = None;
        let file = open(&self.path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("another kind of file took its place"));
        }
        self.size = metadata.len();
        self.file = Some(file);
        Ok(())
    }
}
