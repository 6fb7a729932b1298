//! Network namespaces, by the names that `ip netns` gives them or by a process in them.
//!
//! Owns the open file that stands for one. A thread enters it, never the caller's: a namespace belongs to a thread for good,
//! and what else runs on it would be elsewhere without knowing.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{Error, ErrorKind};
use crate::name::is_name;

/// Where `ip netns` keeps them.
const NAMED: &str = "/run/netns";

/// A network namespace, which lives at least as long as this value.
#[derive(Debug)]
pub struct Namespace {
    file: File,
    name: String,
}

impl Namespace {
    /// The namespace that this text names: an absolute path, a name of `ip netns`, or a process ID.
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

    /// The namespace that `ip netns` calls so.
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
                "there is no network namespace {name}; `ip netns list` lists them, \
                 `ip netns add {name}` makes it"
            );
            error.renamed(ErrorKind::NotFound, message)
        })
    }

    /// The namespace that this process is in.
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
        // A FIFO of that name must not hold the caller.
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(|source| cannot_open(path, source))?;
        if !is_network_namespace(&file) {
            let message = format!(
                "{} is no network namespace (what is left of one that was not mounted looks so: \
                 `ip netns del` removes it)",
                path.display()
            );
            return Err(Error::new(ErrorKind::Unusable, message));
        }
        Ok(Self {
            file,
            name: name.to_owned(),
        })
    }

    /// What it was found by.
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
                let message = "cannot look at a network namespace";
                Error::new(ErrorKind::Failed, message).because(source)
            })?;
            Ok((file.dev(), file.ino()))
        };
        Ok(number(self)? == number(other)?)
    }

    /// A second handle of it.
    pub(super) fn duplicate(&self) -> Result<Self, Error> {
        let file = self.file.try_clone();
        Ok(Self {
            file: file.map_err(|source| cannot_open(Path::new(&self.name), source))?,
            name: self.name.clone(),
        })
    }

    /// Takes the calling thread into it, for good.
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

/// Whether a file could not be opened because there is none.
fn is_absent(error: &Error) -> bool {
    error
        .io()
        .is_some_and(|source| source.kind() == io::ErrorKind::NotFound)
}

/// Asks what kind of namespace a file is (NS_GET_NSTYPE of include/uapi/linux/nsfs.h); other files do not know that
/// request.
fn is_network_namespace(file: &File) -> bool {
    // SAFETY: rustix has no such call. The descriptor is open for the whole call; the request has no argument, so the
    // kernel reads and writes no memory of this process. A device of another kind that knows the number is excluded
    // by the file system's type, which is asked first.
    let kind = || unsafe { libc::ioctl(file.as_raw_fd(), libc::NS_GET_NSTYPE) };
    let is_namespace =
        rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type == libc::NSFS_MAGIC);
    is_namespace && kind() == libc::CLONE_NEWNET
}
