//! Network namespaces, by the names that `ip netns` gives them or by a process in them.
//!
//! Owns the open file that stands for one. A thread enters it, never the caller's: a namespace belongs to a thread for good,
//! and what else runs on it would be elsewhere without knowing.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::name::is_name;

/// Where `ip netns` keeps them.
const NAMED: &str = "/run/netns";

/// Why a network namespace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// No namespace can be called so.
    #[error(
        "{0:?} does not name a network namespace: give a name of `ip netns list`, a process ID or a path"
    )]
    BadName(String),
    /// There is none of that name.
    #[error(
        "there is no network namespace {name}; `ip netns list` lists them, `ip netns add {name}` makes it"
    )]
    NoNamespace {
        /// Its name.
        name: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// There is no such process.
    #[error("there is no process {0}, so it has no network namespace")]
    NoProcess(u32),
    /// The file is something else.
    #[error("{} is no network namespace (what is left of one that was not mounted looks so: `ip netns del` removes it)", .0.display())]
    NotOne(PathBuf),
    /// The file cannot be opened.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It cannot be entered.
    #[error("cannot enter the network namespace {name}: this needs CAP_SYS_ADMIN; run it as root")]
    Enter {
        /// Its name.
        name: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

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
    /// [`NamespaceError`].
    pub fn find(text: &str) -> Result<Self, NamespaceError> {
        if text.starts_with('/') {
            return Self::at(Path::new(text));
        }
        match Self::named(text) {
            Err(NamespaceError::NoNamespace { name, source }) => match text.parse() {
                Ok(process) => Self::of_process(process),
                Err(_) => Err(NamespaceError::NoNamespace { name, source }),
            },
            found => found,
        }
    }

    /// The namespace that `ip netns` calls so.
    ///
    /// # Errors
    /// [`NamespaceError::BadName`], [`NamespaceError::NoNamespace`], [`NamespaceError::NotOne`] or
    /// [`NamespaceError::Open`].
    pub fn named(name: &str) -> Result<Self, NamespaceError> {
        if !is_name(name) {
            return Err(NamespaceError::BadName(name.to_owned()));
        }
        let path = Path::new(NAMED).join(name);
        Self::open(&path, name).map_err(|error| match error {
            NamespaceError::Open { source, .. } if source.kind() == ErrorKind::NotFound => {
                NamespaceError::NoNamespace {
                    name: name.to_owned(),
                    source,
                }
            }
            error => error,
        })
    }

    /// The namespace that this process is in.
    ///
    /// # Errors
    /// [`NamespaceError::NoProcess`] or [`NamespaceError::Open`].
    pub fn of_process(process: u32) -> Result<Self, NamespaceError> {
        let path = PathBuf::from(format!("/proc/{process}/ns/net"));
        let name = format!("of process {process}");
        Self::open(&path, &name).map_err(|error| match error {
            NamespaceError::Open { source, .. } if source.kind() == ErrorKind::NotFound => {
                NamespaceError::NoProcess(process)
            }
            error => error,
        })
    }

    /// The namespace behind a file, such as `/run/netns/NAME` or `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// [`NamespaceError::NotOne`] or [`NamespaceError::Open`].
    pub fn at(path: &Path) -> Result<Self, NamespaceError> {
        Self::open(path, &path.display().to_string())
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// [`NamespaceError::Open`] without /proc.
    pub fn current() -> Result<Self, NamespaceError> {
        Self::open(Path::new("/proc/thread-self/ns/net"), "of this process")
    }

    fn open(path: &Path, name: &str) -> Result<Self, NamespaceError> {
        // A FIFO of that name must not hold the caller.
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(|source| NamespaceError::Open {
            path: path.to_owned(),
            source,
        })?;
        match is_network_namespace(&file) {
            true => Ok(Self {
                file,
                name: name.to_owned(),
            }),
            false => Err(NamespaceError::NotOne(path.to_owned())),
        }
    }

    /// What it was found by.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether both are the same namespace.
    ///
    /// # Errors
    /// What the kernel says to reading their files' numbers.
    pub fn is_same(&self, other: &Self) -> io::Result<bool> {
        let (one, other) = (self.file.metadata()?, other.file.metadata()?);
        Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
    }

    /// A second handle of it.
    pub(super) fn duplicate(&self) -> Result<Self, NamespaceError> {
        let file = self.file.try_clone();
        Ok(Self {
            file: file.map_err(|source| NamespaceError::Open {
                path: PathBuf::from(&self.name),
                source,
            })?,
            name: self.name.clone(),
        })
    }

    /// Takes the calling thread into it, for good.
    pub(super) fn enter(&self) -> Result<(), NamespaceError> {
        move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network)).map_err(
            |source| NamespaceError::Enter {
                name: self.name.clone(),
                source: source.into(),
            },
        )
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
