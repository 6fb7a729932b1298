//! Opening a device, with an error for each way in which it fails.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::OpenError;
use super::handle::Handle;
use super::holder::holders;
use super::info::Identity;
use super::{Device, Opened};
use crate::uapi;

/// The kernel's own "not supported" (`linux/errno.h`), which is not meant for
/// users and has no name there.
const ENOTSUPP: i32 = 524;

impl Device<Opened> {
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
        use std::os::fd::AsRawFd;
        let path = PathBuf::from(format!("file descriptor {}", fd.as_raw_fd()));
        let device = Self::from_file(File::from(fd), path.clone())?;
        // Whoever had it may have left it in any state.
        match device.reset_to_zero() {
            Ok(()) => Ok(device),
            Err(source) => Err(OpenError::Device { path, source }),
        }
    }

    fn from_file(file: File, path: PathBuf) -> Result<Self, OpenError> {
        // Again, on what was really opened: the path may have changed hands.
        let is_device = file
            .metadata()
            .is_ok_and(|metadata| metadata.file_type().is_char_device());
        if !is_device {
            return Err(OpenError::NotCharacterDevice { path });
        }
        let handle = Handle {
            file: Arc::new(file),
        };
        let device_id = match handle.read(uapi::get_device_id(), 0) {
            Ok(device_id) => device_id,
            Err(source) => return Err(OpenError::NotVhostVdpa { path, source }),
        };
        match Identity::query(&handle, device_id) {
            Ok(identity) => Ok(Self {
                handle,
                identity,
                state: Opened(()),
            }),
            Err(source) => Err(OpenError::Device { path, source }),
        }
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
