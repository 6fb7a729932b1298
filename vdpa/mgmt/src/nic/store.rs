//! Records of NICs, one file each, so that another process can remove a NIC.
//!
//! ```text
//!   /run/bellhop/nics/   0700   lock           held by the process that creates or removes
//!                               NAME.json 0600 written as NAME.json.new, then renamed
//! ```
//!
//! A reboot clears `/run`, and the NICs with it. A record decides what root will undo. So the
//! directory must be the user's own, and no link is followed. This module owns the directory; it
//! does not interpret the steps.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::Deserialize;

use super::observer::Observer;
use super::record::{MadeNic, VERSION};
use crate::Error;
use crate::new_device::check_name;

/// The default directory of records.
const DIRECTORY: &str = "/run/bellhop/nics";

/// The end of a record's name.
const SUFFIX: &str = ".json";

/// Maximum size of a record, in bytes.
const RECORD_MAX: u64 = 64 * 1024;

/// Maximum time to wait for another process.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why records could not be read or stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No NIC can have this name.
    #[error(transparent)]
    Name(#[from] Error),
    /// There is no record of that name.
    #[error("there is no record of a NIC {0}; `bellhop nic list` lists them")]
    NoNic(String),
    /// Another process has been creating or removing a NIC for too long.
    #[error(
        "another process is making or removing a NIC and did not finish in {} s (it holds {})",
        PATIENCE.as_secs(),
        .0.display()
    )]
    Busy(PathBuf),
    /// The directory is not the user's own.
    #[error(
        "{} is not a directory that only this user can change: remove it, or run this as its owner",
        .0.display()
    )]
    NotOwn(PathBuf),
    /// The caller lacks the right.
    #[error("no permission for the records in {}: run this as root", path.display())]
    NotPermitted {
        /// The path of the access.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A file could not be used.
    #[error("cannot use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A record of another version.
    #[error(
        "{} has version {version}, and this program knows version {VERSION}: use the program that \
         wrote it",
        path.display()
    )]
    Version {
        /// The record.
        path: PathBuf,
        /// Its version.
        version: u64,
    },
    /// A record cannot be decoded.
    #[error("{} is not a record of a NIC", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: serde_json::Error,
    },
}

/// The directory of records.
#[derive(Debug, Clone)]
pub struct Store {
    directory: PathBuf,
}

impl Store {
    /// The records in `/run/bellhop/nics`, which is created if it does not exist.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_default() -> Result<Self, StoreError> {
        Self::open(Path::new(DIRECTORY))
    }

    /// The records in this directory, which is created with mode 0700 if it does not exist.
    ///
    /// # Errors
    /// [`StoreError::NotOwn`] for a directory of another user, [`StoreError::NotPermitted`],
    /// [`StoreError::File`].
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let error = |source| file_error(directory, source);
        if let Some(parent) = directory.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(parent)
                .map_err(error)?;
        }
        match DirBuilder::new().mode(0o700).create(directory) {
            // Independently of the umask.
            Ok(()) => fs::set_permissions(directory, Permissions::from_mode(0o700)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
        }
        .map_err(error)?;
        let found = fs::symlink_metadata(directory).map_err(error)?;
        let own = found.uid() == rustix::process::geteuid().as_raw();
        if !found.is_dir() || !own || found.mode() & 0o022 != 0 {
            // Root's directory, and the caller is not root.
            if found.is_dir() && !own && found.uid() == 0 {
                return Err(StoreError::NotPermitted {
                    path: directory.to_owned(),
                    source: ErrorKind::PermissionDenied.into(),
                });
            }
            return Err(StoreError::NotOwn(directory.to_owned()));
        }
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// All records, by name. An unfinished NIC appears with its steps so far.
    ///
    /// # Errors
    /// [`StoreError::Malformed`], [`StoreError::Version`] or [`StoreError::File`] of the first that
    /// cannot be read.
    pub fn nics(&self) -> Result<Vec<MadeNic>, StoreError> {
        self.each()?.into_iter().collect()
    }

    /// Each record, by name, or the reason why it cannot be read.
    ///
    /// # Errors
    /// [`StoreError::File`]: the directory cannot be read.
    pub fn each(&self) -> Result<Vec<Result<MadeNic, StoreError>>, StoreError> {
        let error = |source| file_error(&self.directory, source);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(error)? {
            let file = entry.map_err(error)?.file_name();
            let name = file.to_str().and_then(|file| file.strip_suffix(SUFFIX));
            names.extend(name.map(str::to_owned));
        }
        names.sort();
        let records = names.iter().map(|name| self.nic(name));
        // Some were removed meanwhile.
        let records = records.filter(|record| !matches!(record, Err(StoreError::NoNic(_))));
        Ok(records.collect())
    }

    /// The record of one NIC.
    ///
    /// # Errors
    /// [`StoreError::NoNic`], [`StoreError::Name`]; or as [`Self::nics`].
    pub fn nic(&self, name: &str) -> Result<MadeNic, StoreError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u64,
        }
        let path = self.path(name)?;
        let mut text = String::new();
        let read = || -> io::Result<()> {
            let file = open_own(OpenOptions::new().read(true), &path)?;
            if !file.metadata()?.is_file() {
                return Err(io::Error::other("it is not a regular file"));
            }
            file.take(RECORD_MAX).read_to_string(&mut text).map(drop)
        };
        match { read }() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(StoreError::NoNic(name.to_owned()));
            }
            read => read.map_err(|source| file_error(&path, source))?,
        }
        let malformed = |source| StoreError::Malformed {
            path: path.clone(),
            source,
        };
        // Another version may have other fields.
        let Versioned { version } = serde_json::from_str(&text).map_err(malformed)?;
        if version != u64::from(VERSION) {
            return Err(StoreError::Version { path, version });
        }
        let nic: MadeNic = serde_json::from_str(&text).map_err(malformed)?;
        if nic.name() == name {
            Ok(nic)
        } else {
            Err(malformed(serde::de::Error::custom(
                "it has the name of another NIC",
            )))
        }
    }

    /// Locks out other processes that create and remove NICs, until the result is dropped. Waits
    /// for another process that holds the lock.
    ///
    /// # Errors
    /// [`StoreError::Busy`], [`StoreError::File`], [`StoreError::NotPermitted`].
    pub fn lock(self) -> Result<LockedStore, StoreError> {
        let path = self.directory.join("lock");
        let error = |source| file_error(&path, source);
        let mut options = OpenOptions::new();
        options.write(true).create(true).mode(0o600);
        let file = open_own(&mut options, &path).map_err(error)?;
        let started = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) if started.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(StoreError::Busy(path)),
                Err(errno) => return Err(error(errno.into())),
            }
        }
        self.remove_leftovers();
        Ok(LockedStore {
            store: self,
            _lock: file,
        })
    }

    /// Removes files left by a process that was killed while it wrote. Only the holder of the lock
    /// writes. A file that cannot be removed affects only its own record, whose write reports it.
    fn remove_leftovers(&self) {
        let unfinished = format!("{SUFFIX}.new");
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            if entry.file_name().to_string_lossy().ends_with(&unfinished) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn path(&self, name: &str) -> Result<PathBuf, StoreError> {
        check_name(name)?;
        Ok(self.directory.join(format!("{name}{SUFFIX}")))
    }

    /// Writes a record, or removes it if there is nothing left to undo.
    fn keep(&self, nic: &MadeNic) -> Result<(), StoreError> {
        let path = self.path(nic.name())?;
        if nic.steps().is_empty() {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(file_error(&path, error)),
                _ => Ok(()),
            };
        }
        let new = self.directory.join(format!("{}{SUFFIX}.new", nic.name()));
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec(nic)?;
            // Left by a process that was killed in between.
            match fs::remove_file(&new) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).mode(0o600);
            open_own(&mut options, &new)?.write_all(&text)?;
            // In memory, so there is nothing to sync.
            fs::rename(&new, &path)
        };
        write().map_err(|source| file_error(&path, source))
    }
}

/// The directory of records, locked against changes by other processes.
#[derive(Debug)]
pub struct LockedStore {
    store: Store,
    _lock: File,
}

impl LockedStore {
    /// As [`Store::nics`].
    ///
    /// # Errors
    /// As [`Store::nics`].
    pub fn nics(&self) -> Result<Vec<MadeNic>, StoreError> {
        self.store.nics()
    }

    /// As [`Store::nic`].
    ///
    /// # Errors
    /// As [`Store::nic`].
    pub fn nic(&self, name: &str) -> Result<MadeNic, StoreError> {
        self.store.nic(name)
    }
}

impl Observer for LockedStore {
    fn keep(&mut self, nic: &MadeNic) -> io::Result<()> {
        self.store.keep(nic).map_err(io::Error::other)
    }
}

fn open_own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
}

fn file_error(path: &Path, source: io::Error) -> StoreError {
    let path = path.to_owned();
    match source.kind() {
        ErrorKind::PermissionDenied => StoreError::NotPermitted { path, source },
        _ => StoreError::File { path, source },
    }
}

#[cfg(test)]
mod tests;
