//! Opening a device, with an error for each way in which it fails.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

use super::error::OpenError;
use super::handle::Handle;
use super::holder::holders;
use super::{Device, DeviceInfo, State};
use crate::uapi::{self, BackendFeatures};

/// The kernel's own "not supported" (`linux/errno.h`), which is not meant for
/// users and has no name there.
const ENOTSUPP: i32 = 524;

impl Device {
    /// Opens a vhost-vdpa device by its path. Only one process at a time can;
    /// opening resets the device.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        let path = path.as_ref();
        // Looked at before it is opened: to open a FIFO would wait for a
        // writer, and other special files do worse.
        let metadata = std::fs::metadata(path).map_err(|source| explain(path, None, source))?;
        if !metadata.file_type().is_char_device() {
            let path = path.to_owned();
            return Err(OpenError::NotCharacterDevice { path });
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            // The standard library adds O_CLOEXEC. O_NOCTTY: it may be a terminal yet.
            .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
            .open(path)
            .map_err(|source| explain(path, Some(metadata.rdev()), source))?;
        Self::from_file(file, path.to_owned())
    }

    /// Takes a vhost-vdpa device that somebody else opened, such as a node
    /// daemon that passed its descriptor. The device is reset.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn from_fd(fd: OwnedFd) -> Result<Self, OpenError> {
        let path = check_fd(fd.as_fd())?;
        let mut device = Self::from_file(File::from(fd), path.clone())?;
        // Whoever had it may have left it in any state.
        match device.reset() {
            Ok(()) => Ok(device),
            Err(source) => Err(OpenError::Device { path, source }),
        }
    }

    fn from_file(file: File, path: PathBuf) -> Result<Self, OpenError> {
        // Again, on what was really opened: the path may have changed hands.
        let (handle, device_id) = identify(file, &path)?;
        match DeviceInfo::of_opened(&handle, device_id) {
            Ok(info) => Ok(Self {
                handle,
                state: State::Opened,
                info,
                acked: BackendFeatures::empty(),
                features: 0,
            }),
            Err(source) => Err(OpenError::Device { path, source }),
        }
    }
}

/// Makes sure that `fd` is a vhost-vdpa device, open for reading and writing, without changing
/// anything about it; the path under which it was opened, as far as that is known.
///
/// # Errors
/// [`OpenError::NotCharacterDevice`], [`OpenError::NotReadWrite`], [`OpenError::NotVhostVdpa`].
pub fn check_fd(fd: BorrowedFd<'_>) -> Result<PathBuf, OpenError> {
    let number = fd.as_raw_fd();
    // Only a device has a name there that is one: others have `socket:[1]`, or a file's.
    let path = std::fs::read_link(format!("/proc/self/fd/{number}"))
        .unwrap_or_else(|_| PathBuf::from(format!("file descriptor {number}")));
    let other = |source| OpenError::Other {
        path: path.clone(),
        source,
    };
    // One that has no room for a duplicate is no fault of this descriptor's.
    let file = File::from(fd.try_clone_to_owned().map_err(other)?);
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|error| other(error.into()))?;
    let (_, _) = identify(file, &path)?;
    if flags & OFlags::RWMODE != OFlags::RDWR {
        return Err(OpenError::NotReadWrite { path });
    }
    Ok(path)
}

/// Whether a file is a vhost-vdpa device, and of which virtio device type.
fn identify(file: File, path: &Path) -> Result<(Handle, u32), OpenError> {
    let is_device = file
        .metadata()
        .is_ok_and(|metadata| metadata.file_type().is_char_device());
    let path = path.to_owned();
    if !is_device {
        return Err(OpenError::NotCharacterDevice { path });
    }
    let handle = Handle {
        file: Arc::new(file),
    };
    match handle.read(uapi::get_device_id(), 0) {
        Ok(device_id) => Ok((handle, device_id)),
        Err(source) => Err(OpenError::NotVhostVdpa { path, source }),
    }
}

fn explain(path: &Path, device_number: Option<u64>, source: io::Error) -> OpenError {
    let path = path.to_owned();
    match source.raw_os_error() {
        // ENXIO, ENODEV: the node is there, the device behind it is not.
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENXIO | libc::ENODEV) => {
            OpenError::Missing { path, source }
        }
        Some(libc::EACCES | libc::EPERM) => OpenError::Permission { path, source },
        Some(libc::EBUSY) => OpenError::Busy {
            path,
            holders: device_number.map(holders).unwrap_or_default(),
            source,
        },
        // vhost_vdpa_alloc_domain and iommu_attach_device (drivers/vhost/vdpa.c,
        // drivers/iommu/iommu.c); no other step of open gives these.
        Some(ENOTSUPP | libc::EOPNOTSUPP) => OpenError::NoIommu { path, source },
        Some(libc::EINVAL) => OpenError::SharedIommuGroup { path, source },
        _ => OpenError::Other { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_path_has_its_own_error() {
        let open = |path: &str| Device::open(path).unwrap_err();
        assert!(matches!(
            open("/dev/vhost-vdpa-none"),
            OpenError::Missing { .. }
        ));
        assert!(matches!(open("/dev/null/x"), OpenError::Missing { .. }));
        assert!(matches!(
            open("/proc/self/status"),
            OpenError::NotCharacterDevice { .. }
        ));
        assert!(matches!(open("/tmp"), OpenError::NotCharacterDevice { .. }));
        let error = open("/dev/null");
        assert!(matches!(error, OpenError::NotVhostVdpa { .. }), "{error}");
        assert!(error.to_string().contains("/dev/null"));
    }

    #[test]
    fn a_descriptor_is_checked_too() {
        let file = File::open("/proc/self/status").unwrap();
        let error = Device::from_fd(file.into()).unwrap_err();
        assert!(matches!(error, OpenError::NotCharacterDevice { .. }));
        let file = File::open("/dev/zero").unwrap();
        let error = Device::from_fd(file.into()).unwrap_err();
        assert!(matches!(error, OpenError::NotVhostVdpa { .. }));
        assert!(error.to_string().contains("/dev/zero"), "{error}");
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let error = check_fd(socket.as_fd()).unwrap_err();
        assert!(matches!(error, OpenError::NotCharacterDevice { .. }));
    }

    #[test]
    fn errors_of_open_are_told_apart() {
        let explain = |errno| {
            explain(
                Path::new("/x"),
                Some(u64::MAX),
                io::Error::from_raw_os_error(errno),
            )
        };
        assert!(matches!(
            explain(libc::EACCES),
            OpenError::Permission { .. }
        ));
        let busy = explain(libc::EBUSY);
        assert!(matches!(&busy, OpenError::Busy { holders, .. } if holders.is_empty()));
        assert!(busy.to_string().contains("in use by"), "{busy}");
        assert!(matches!(explain(libc::EMFILE), OpenError::Other { .. }));
        assert!(matches!(explain(libc::ENXIO), OpenError::Missing { .. }));
        assert!(matches!(explain(ENOTSUPP), OpenError::NoIommu { .. }));
        let shared = explain(libc::EINVAL);
        assert!(
            matches!(shared, OpenError::SharedIommuGroup { .. }),
            "{shared}"
        );
    }
}
