//! A snapshot as a directory, which appears only when it is complete.
//!
//! Owns the names and kinds of the files and how they appear and vanish. It must not know their
//! content.
//!
//! ```text
//!   NewSnapshot::create(NAME)     .NAME.partial/  0700, locked
//!                                     state       0600, empty
//!                                     memory      0600, empty
//!            |
//!            | the caller fills both
//!            v
//!          commit                 files synced, directory synced,
//!            |                    .NAME.partial renamed to NAME, parent synced
//!            |
//!   dropped earlier, or commit failed: all of it is removed
//!   killed earlier: the lock is gone, and the next snapshot of that name removes it
//! ```
//!
//! All accesses start from the directory's descriptor. So another process that moves or replaces
//! the directory meanwhile can't redirect a write.

mod open;
#[cfg(test)]
mod tests;

pub use open::{OpenError, STATE_FILE_MAX, Snapshot};

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

/// The file with the sections.
pub const STATE_FILE: &str = "state";
/// The file with guest RAM.
pub const MEMORY_FILE: &str = "memory";

const FILES: [&str; 2] = [STATE_FILE, MEMORY_FILE];

/// Why a snapshot's directory could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The path has no last component that could name a directory.
    #[error("{} is not a name for a new directory", path.display())]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// A file or a non-empty directory of that name exists.
    #[error(
        "{} exists and is not an empty directory; remove it or choose another name",
        path.display()
    )]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// Another process writes a snapshot of that name.
    #[error(
        "another snapshot is being written to {}; wait for it or choose another name",
        path.display()
    )]
    Busy {
        /// The path.
        path: PathBuf,
    },
    /// The temporary path exists, but is not a half-written snapshot of this user.
    #[error(
        "{} is in the way: it is not a directory of this user with a half-written snapshot; remove \
         it",
        path.display()
    )]
    NotOurs {
        /// The temporary path.
        path: PathBuf,
    },
    /// A step failed.
    #[error("cannot {step} {}", path.display())]
    Io {
        /// The step.
        step: &'static str,
        /// Its path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// A snapshot that is being written. Dropping it removes it, unless it was committed.
#[derive(Debug)]
pub struct NewSnapshot {
    /// The caller's path, for messages.
    path: PathBuf,
    parent: OwnedFd,
    /// The last component of the path.
    name: OsString,
    temporary: OsString,
    /// The temporary directory. An exclusive lock on it shows that a process is using it.
    directory: OwnedFd,
    state: File,
    memory: File,
    /// Whether `directory` has its final name `name`.
    committed: bool,
}

impl NewSnapshot {
    /// Creates the temporary directory and both files in it. `path` must not exist or be an empty
    /// directory. Its parent must exist and be on the file system that is to hold the snapshot.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn create(path: &Path) -> Result<Self, CreateError> {
        let name = path.file_name().ok_or_else(|| CreateError::NoName {
            path: path.to_owned(),
        })?;
        let temporary = temporary(name);
        let above = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let io = |step, path: &Path| {
            let path = path.to_owned();
            move |source: Errno| CreateError::Io {
                step,
                path,
                source: source.into(),
            }
        };
        let parent = rustix::fs::openat(CWD, above, OPEN_DIRECTORY, Mode::empty())
            .map_err(io("open the directory", above))?;
        refuse_existing(&parent, path, name)?;
        let directory = lock_temporary(&parent, path, &above.join(&temporary), &temporary)?;
        // From here on its content is ours to remove.
        let shown = above.join(&temporary);
        let [state, memory] = FILES.map(|file| {
            make_file(&directory, file).map_err(io("make the file", &shown.join(file)))
        });
        let (state, memory) = match (state, memory) {
            (Ok(state), Ok(memory)) => (state, memory),
            (Err(error), _) | (_, Err(error)) => {
                remove(&parent, &temporary, &directory);
                return Err(error);
            }
        };
        Ok(Self {
            path: path.to_owned(),
            parent,
            name: name.to_owned(),
            temporary,
            directory,
            state,
            memory,
            committed: false,
        })
    }

    /// The empty file for the sections ([`super::format`]).
    #[must_use]
    pub fn state(&self) -> &File {
        &self.state
    }

    /// The empty file for guest RAM ([`super::memory_image`]).
    #[must_use]
    pub fn memory(&self) -> &File {
        &self.memory
    }

    /// Waits until everything is on the disk, then gives the directory its name.
    ///
    /// # Errors
    /// [`CreateError::Exists`] if the name came into use meanwhile; [`CreateError::Io`]. Nothing is
    /// left behind.
    pub fn commit(mut self) -> Result<(), CreateError> {
        let io = |step| {
            let path = self.path.clone();
            move |source| CreateError::Io { step, path, source }
        };
        for file in [&self.state, &self.memory] {
            file.sync_all().map_err(io("sync the snapshot"))?;
        }
        sync_directory(&self.directory).map_err(io("sync the snapshot"))?;
        // Replaces at most an empty directory, in one step.
        rustix::fs::renameat(&self.parent, &self.temporary, &self.parent, &self.name).map_err(
            |error| match error {
                Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR => CreateError::Exists {
                    path: self.path.clone(),
                },
                error => io("name the snapshot")(error.into()),
            },
        )?;
        let synced = sync_directory(&self.parent).map_err(io("sync the snapshot"));
        self.committed = synced.is_ok();
        if synced.is_err() {
            // It is complete now, but a crash could lose it: rather remove it at once.
            let _ = rustix::fs::renameat(&self.parent, &self.name, &self.parent, &self.temporary);
        }
        synced
    }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        if !self.committed {
            remove(&self.parent, &self.temporary, &self.directory);
        }
        // A child that is between its fork and its exec has the descriptor, too, and would keep
        // the lock.
        let _ = rustix::fs::flock(&self.directory, FlockOperation::Unlock);
    }
}

/// The name of the temporary directory.
fn temporary(name: &OsStr) -> OsString {
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(".partial");
    temporary
}

/// Whether a process writes the snapshot `path` now.
#[must_use]
pub fn is_being_written(path: &Path) -> bool {
    let Some(name) = path.file_name() else {
        return false;
    };
    let flags = OPEN_DIRECTORY | OFlags::NOFOLLOW;
    let opened = rustix::fs::open(path.with_file_name(temporary(name)), flags, Mode::empty());
    opened.is_ok_and(|directory| {
        let locked = rustix::fs::flock(directory, FlockOperation::NonBlockingLockShared);
        locked == Err(Errno::WOULDBLOCK)
    })
}

const OPEN_DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// Reports early the error that the rename would return after all the work.
fn refuse_existing(parent: &OwnedFd, path: &Path, name: &OsStr) -> Result<(), CreateError> {
    let exists = || CreateError::Exists {
        path: path.to_owned(),
    };
    let io = |source: Errno| CreateError::Io {
        step: "inspect",
        path: path.to_owned(),
        source: source.into(),
    };
    let directory = match rustix::fs::openat(
        parent,
        name,
        OPEN_DIRECTORY | OFlags::NOFOLLOW,
        Mode::empty(),
    ) {
        Ok(directory) => directory,
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(exists()),
        Err(error) => return Err(io(error)),
    };
    if is_empty(&directory).map_err(io)? {
        Ok(())
    } else {
        Err(exists())
    }
}

/// Opens the temporary directory, empty, and locks it.
fn lock_temporary(
    parent: &OwnedFd,
    path: &Path,
    shown: &Path,
    temporary: &OsString,
) -> Result<OwnedFd, CreateError> {
    let io = |step| {
        move |source: Errno| CreateError::Io {
            step,
            path: shown.to_owned(),
            source: source.into(),
        }
    };
    let busy = || CreateError::Busy {
        path: path.to_owned(),
    };
    let not_ours = || CreateError::NotOurs {
        path: shown.to_owned(),
    };
    // Another process may finish between any two of these steps, but not three times in a row.
    for _ in 0..3 {
        match rustix::fs::mkdirat(parent, temporary, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(io("make the directory")(error)),
        }
        let flags = OPEN_DIRECTORY | OFlags::NOFOLLOW;
        let directory = match rustix::fs::openat(parent, temporary, flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(Errno::NOENT) => continue,
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(not_ours()),
            Err(error) => return Err(io("open the directory")(error)),
        };
        let stat = rustix::fs::fstat(&directory).map_err(io("inspect"))?;
        // Another user's directory, as in /tmp, could be read and changed by that user.
        if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
            return Err(not_ours());
        }
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(busy()),
            Err(error) => return Err(io("lock")(error)),
        }
        // It may have got its final name, or have been removed, before this process had the lock.
        match rustix::fs::statat(parent, temporary, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(now) if same_file(&now, &stat) => {}
            Ok(_) | Err(Errno::NOENT) => continue,
            Err(error) => return Err(io("inspect")(error)),
        }
        for file in FILES {
            match rustix::fs::unlinkat(&directory, file, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(io("clear")(error)),
            }
        }
        return if is_empty(&directory).map_err(io("inspect"))? {
            Ok(directory)
        } else {
            Err(not_ours())
        };
    }
    Err(busy())
}

fn same_file(one: &Stat, other: &Stat) -> bool {
    one.st_dev == other.st_dev && one.st_ino == other.st_ino
}

fn make_file(directory: &OwnedFd, name: &str) -> Result<File, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::RUSR | Mode::WUSR).map(File::from)
}

/// Whether a directory has no entries but itself and its parent.
fn is_empty(directory: &OwnedFd) -> Result<bool, Errno> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes a half-written snapshot. A failure is ignored; the next snapshot of that name tries
/// again.
fn remove(parent: &OwnedFd, temporary: &OsString, directory: &OwnedFd) {
    for file in FILES {
        let _ = rustix::fs::unlinkat(directory, file, AtFlags::empty());
    }
    let _ = rustix::fs::unlinkat(parent, temporary, AtFlags::REMOVEDIR);
}

/// Some file systems don't support syncing a directory, and don't need it.
fn sync_directory(directory: &OwnedFd) -> io::Result<()> {
    match rustix::fs::fsync(directory) {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether `stat` is that of a regular file.
fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}
