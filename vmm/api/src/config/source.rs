//! Where a device of the host comes from: its path, or an open descriptor.
//!
//! JSON, TOML and a command line can only contain the number of a descriptor. This module owns the
//! conversion from that number to the descriptor. It must not know how descriptors are passed, nor
//! the kinds of devices.
//!
//! ```text
//!   {"path": P} ──> Path(P) ───────────────────────────────┐
//!                                                          ├──> the VM opens or takes it
//!   {"fd": N} ──> Number(N) ── DeviceSource::take ──> Descriptor ┘               │
//!                    │ not taken: the VM rejects it                              │ released()
//!                                                          Path(as opened) <─────┘
//! ```

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The source of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSource {
    /// Its path: a vhost-vdpa character device such as `/dev/vhost-vdpa-0`, or the directory of a
    /// PCI function in sysfs.
    Path(PathBuf),
    /// The number of a descriptor that has not been taken yet. In a request it is the index among
    /// the passed descriptors. On a command line or in a configuration file it is an inherited
    /// descriptor. A VM rejects it.
    Number(u32),
    /// An open device.
    Descriptor(DeviceDescriptor),
}

/// A verified device that another process opened. Clones share the open file. Two are equal only
/// if they are clones.
#[derive(Clone)]
pub struct DeviceDescriptor {
    fd: Arc<OwnedFd>,
    path: PathBuf,
}

impl fmt::Debug for DeviceDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceDescriptor").field(&self.path).finish()
    }
}

impl PartialEq for DeviceDescriptor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.fd, &other.fd)
    }
}

impl Eq for DeviceDescriptor {}

impl DeviceDescriptor {
    /// The path of the device, as the kernel reports it. Since then the path may have got another
    /// device, or none.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Duplicates the descriptor of the open file.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }
}

/// Why a number in a configuration yields no descriptor.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    /// The device has no name, which a descriptor requires.
    #[error("the NIC with fd={0} needs an id")]
    NoName(u32),
    /// There is no such descriptor, or it has another use.
    #[error("fd={number} of {user} {reason}")]
    Missing {
        /// The device, or the migration.
        user: String,
        /// The requested number.
        number: u32,
        /// Why the descriptor is not available.
        reason: String,
    },
    /// The descriptor is no usable device of this kind.
    #[error("fd={number} of {user} cannot be used")]
    Unusable {
        /// The device.
        user: String,
        /// The requested number.
        number: u32,
        /// The result of the verification.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
}

impl DeviceSource {
    /// The source that fields give; neither or both are none.
    pub(super) fn of(path: Option<PathBuf>, fd: Option<u32>) -> Option<Self> {
        match (path, fd) {
            (Some(path), None) => Some(Self::Path(path)),
            (None, Some(number)) => Some(Self::Number(number)),
            _ => None,
        }
    }

    /// The path as far as known.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) | Self::Descriptor(DeviceDescriptor { path, .. }) => Some(path),
            Self::Number(_) => None,
        }
    }

    /// The number of a descriptor that has not been taken.
    #[must_use]
    pub fn number(&self) -> Option<u32> {
        match self {
            Self::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The last part of the path, or `fdN`.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Number(number) => format!("fd{number}"),
            Self::Path(path) | Self::Descriptor(DeviceDescriptor { path, .. }) => {
                let name = path.file_name().unwrap_or(path.as_os_str());
                name.to_string_lossy().into_owned()
            }
        }
    }

    /// The path or the number, for messages.
    #[must_use]
    pub fn shown(&self) -> Cow<'_, str> {
        match self {
            Self::Number(number) => format!("fd={number}").into(),
            Self::Path(path) | Self::Descriptor(DeviceDescriptor { path, .. }) => {
                path.to_string_lossy()
            }
        }
    }

    /// Replaces a descriptor's number by the result of `take`. The error of `take` is the reason if
    /// there is no such descriptor. `check` verifies it, and returns the device's path. A
    /// descriptor that is not usable is closed.
    pub(super) fn take<E: StdError + Send + Sync + 'static>(
        &mut self,
        user: &str,
        take: impl FnOnce(u32) -> Result<OwnedFd, String>,
        check: impl FnOnce(BorrowedFd<'_>) -> Result<PathBuf, E>,
    ) -> Result<(), DescriptorError> {
        let Self::Number(number) = *self else {
            return Ok(());
        };
        let user = || user.to_owned();
        let fd = take(number).map_err(|reason| DescriptorError::Missing {
            user: user(),
            number,
            reason,
        })?;
        let path = check(fd.as_fd()).map_err(|source| DescriptorError::Unusable {
            user: user(),
            number,
            source: source.into(),
        })?;
        *self = Self::Descriptor(DeviceDescriptor {
            fd: Arc::new(fd),
            path,
        });
        Ok(())
    }

    /// The source without a descriptor, whose device's path stays. A device may be busy while any
    /// process holds it.
    #[must_use]
    pub fn released(&self) -> Self {
        match self {
            Self::Descriptor(descriptor) => Self::Path(descriptor.path.clone()),
            other => other.clone(),
        }
    }
}
