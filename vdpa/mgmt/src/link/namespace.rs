//! Network namespaces, by their `ip netns` names or by a process in them.
//!
//! A value owns the open file of a namespace. Only a dedicated thread enters it, never the
//! caller's. A thread stays in its namespace for good, so other work on it would silently run in
//! the wrong namespace.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{Error, ErrorKind};
use crate::name::is_name;

/// The directory of `ip netns`.
const NAMED: &str = "/run/netns";

/// A network namespace, which lives at least as long as this value.
#[derive(Debug)]
pub struct Namespace {
    file: File,
    name: String,
}

impl Namespace {
    /// The namespace for an absolute path, a name of `ip netns`, or a process ID.
    ///
    /// # Errors
    /// [`Error`].
    pub fn find(text: &str) -> Result<Self, Error> {
        if text.starts_with('/') {
            return Self::at(Path::new(text));
        }
        match Self::named(text) {
            Err(error) if error.is_missing() => match text.parse() {
                Ok(process) => Self::of_process(process),
                Err(_) => Err(error),
            },
            found => found,
        }
    }

    /// The namespace with this `ip netns` name.
    ///
    /// # Errors
    /// `BadName`, `NotFound`, `Unusable` or `Failed`.
    pub fn named(name: &str) -> Result<Self, Error> {
        if !is_name(name) {
            let message = format!(
                "{name:?} does not name a network namespace: give a name of `ip netns list`, a \
                 process ID or a path"
            );
            return Err(Error::new(ErrorKind::BadName, message));
        }
        let path = Path::new(NAMED).join(name);
        Self::open(&path, name).map_err(|error| {
            if !is_absent(&error) {
                return error;
            }
            let message = format!(
                "there is no network namespace {name}; `ip netns list` lists them, `ip netns add \
                 {name}` creates it"
            );
            error.renamed(ErrorKind::NotFound, message)
        })
    }

    /// The namespace of this process.
    ///
    /// # Errors
    /// `NotFound` or `Failed`.
    pub fn of_process(process: u32) -> Result<Self, Error> {
        let path = PathBuf::from(format!("/proc/{process}/ns/net"));
        let name = format!("of process {process}");
        Self::open(&path, &name).map_err(|error| {
            if !is_absent(&error) {
                return error;
            }
            let message = format!("there is no process {process}, so it has no network namespace");
            Error::new(ErrorKind::NotFound, message)
        })
    }

    /// The namespace behind a file, such as `/run/netns/NAME` or `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// `Unusable` or `Failed`.
    pub fn at(path: &Path) -> Result<Self, Error> {
        Self::open(path, &path.display().to_string())
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// `Failed` without /proc.
    pub fn current() -> Result<Self, Error> {
        Self::open(Path::new("/proc/thread-self/ns/net"), "of this process")
    }

    fn open(path: &Path, name: &str) -> Result<Self, Error> {
        // A FIFO of that name must not block the caller.
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(|source| cannot_open(path, source))?;
        if !is_network_namespace(&file) {
            let message = format!(
                "{} is not a network namespace; if it is the leftover of one that is not mounted, \
                 `ip netns del` removes it",
                path.display()
            );
            return Err(Error::new(ErrorKind::Unusable, message));
        }
        Ok(Self {
            file,
            name: name.to_owned(),
        })
    }

    /// The text by which it was found.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether both are the same namespace.
    ///
    /// # Errors
    /// `Failed` if their files' numbers cannot be read.
    pub fn is_same(&self, other: &Self) -> Result<bool, Error> {
        let number = |one: &Self| {
            let file = one.file.metadata().map_err(|source| {
                let message = "cannot inspect a network namespace";
                Error::new(ErrorKind::Failed, message).because(source)
            })?;
            Ok((file.dev(), file.ino()))
        };
        Ok(number(self)? == number(other)?)
    }

    /// A second handle to it.
    pub(super) fn duplicate(&self) -> Result<Self, Error> {
        let file = self.file.try_clone();
        Ok(Self {
            file: file.map_err(|source| cannot_open(Path::new(&self.name), source))?,
            name: self.name.clone(),
        })
    }

    /// Moves the calling thread into it, for good.
    pub(super) fn enter(&self) -> Result<(), Error> {
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(self.file.as_fd(), kind).map_err(|errno| {
            let message = format!(
                "cannot enter the network namespace {}: this needs CAP_SYS_ADMIN; run it as root",
                self.name
            );
            Error::new(ErrorKind::Failed, message).because(io::Error::from(errno))
        })
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

fn cannot_open(path: &Path, source: io::Error) -> Error {
    let message = format!("cannot open {}", path.display());
    Error::new(ErrorKind::Failed, message).because(source)
}

/// Whether a file could not be opened because it does not exist.
fn is_absent(error: &Error) -> bool {
    error
        .io()
        .is_some_and(|source| source.kind() == io::ErrorKind::NotFound)
}

/// Whether a file is a network namespace (NS_GET_NSTYPE of include/uapi/linux/nsfs.h); other files
/// do not support that request.
fn is_network_namespace(file: &File) -> bool {
    // SAFETY: rustix has no such call. The descriptor is open for the whole call; the request has
    // no argument, so the kernel accesses no memory of this process. The file system's type,
    // checked first, excludes another kind of device that supports the number.
    let kind = || unsafe { libc::ioctl(file.as_raw_fd(), libc::NS_GET_NSTYPE) };
    let is_namespace =
        rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type == libc::NSFS_MAGIC);
    is_namespace && kind() == libc::CLONE_NEWNET
}
