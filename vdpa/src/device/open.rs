//! Opens a device, with a separate error for each cause of failure.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

use super::handle::Handle;
use super::holder::{holders, sentence};
use super::{Device, DeviceInfo, State};
use crate::Error;
use crate::uapi::{self, BackendFeatures};

/// The kernel's internal "not supported" (`linux/errno.h`). It is not meant for users and has no
/// name in libc.
const ENOTSUPP: i32 = 524;

impl Device {
    /// Opens a vhost-vdpa device by its path. Only one process at a time can open it; opening
    /// resets the device.
    ///
    /// # Errors
    /// There is no such device, or it cannot be opened or used.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        // Check before opening: opening a FIFO would wait for a writer, and other special files do
        // worse.
        let metadata = std::fs::metadata(path).map_err(|source| explain(path, None, source))?;
        if !metadata.file_type().is_char_device() {
            return Err(no_character_device(path));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            // The standard library adds O_CLOEXEC. O_NOCTTY: the path may still be a terminal.
            .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
            .open(path)
            .map_err(|source| explain(path, Some(metadata.rdev()), source))?;
        Self::from_file(file, path.to_owned())
    }

    /// Takes a vhost-vdpa device that another process opened, such as a node daemon that passed its
    /// descriptor. The device is reset.
    ///
    /// # Errors
    /// As [`check_fd`], or the device cannot be used.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, Error> {
        let path = check_fd(fd.as_fd())?;
        let mut device = Self::from_file(File::from(fd), path.clone())?;
        // The previous holder may have left it in any state.
        match device.reset() {
            Ok(()) => Ok(device),
            Err(source) => Err(unusable(&path, source)),
        }
    }

    fn from_file(file: File, path: PathBuf) -> Result<Self, Error> {
        // Check the opened file as well: another file may have taken the path in between.
        let (handle, device_id) = identify(file, &path)?;
        match DeviceInfo::of_opened(&handle, device_id) {
            Ok(info) => Ok(Self {
                handle,
                state: State::Opened,
                info,
                acked: BackendFeatures::empty(),
                features: 0,
            }),
            Err(source) => Err(unusable(&path, source)),
        }
    }
}

/// Checks that `fd` is a vhost-vdpa device, open for reading and writing, without changing
/// anything. Returns the path under which it was opened, if known.
///
/// # Errors
/// It is no such device, or not open for both.
pub fn check_fd(fd: BorrowedFd<'_>) -> Result<PathBuf, Error> {
    let number = fd.as_raw_fd();
    // For a device the link is its path; other files have `socket:[1]` or a file's name.
    let path = std::fs::read_link(format!("/proc/self/fd/{number}"))
        .unwrap_or_else(|_| PathBuf::from(format!("file descriptor {number}")));
    let other = |source| cannot_open(&path, source);
    // An error because no descriptor is free for the duplicate is not this descriptor's fault.
    let file = File::from(fd.try_clone_to_owned().map_err(other)?);
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|error| other(error.into()))?;
    let (_, _) = identify(file, &path)?;
    if flags & OFlags::RWMODE != OFlags::RDWR {
        return Err(Error::other(format!(
            "{} is not open for reading and writing: open it with O_RDWR",
            path.display()
        )));
    }
    Ok(path)
}

/// Checks that a file is a vhost-vdpa device, and reads its virtio device type.
fn identify(file: File, path: &Path) -> Result<(Handle, u32), Error> {
    let is_device = file
        .metadata()
        .is_ok_and(|metadata| metadata.file_type().is_char_device());
    if !is_device {
        return Err(no_character_device(path));
    }
    let handle = Handle {
        file: Some(Arc::new(file)),
    };
    match handle.read(uapi::get_device_id(), 0) {
        Ok(device_id) => Ok((handle, device_id)),
        Err(source) => Err(Error::other(format!(
            "{} is not a vhost-vdpa device (they are named /dev/vhost-vdpa-N)",
            path.display()
        ))
        .because(source)),
    }
}

fn no_character_device(path: &Path) -> Error {
    Error::other(format!(
        "{} is not a character device, so not a vhost-vdpa device",
        path.display()
    ))
}

/// The device opened, but its first answers are implausible.
fn unusable(path: &Path, source: Error) -> Error {
    Error::other(format!("cannot use {}", path.display())).because(source)
}

fn cannot_open(path: &Path, source: io::Error) -> Error {
    Error::other(format!("cannot open {}", path.display())).because(source)
}

fn explain(path: &Path, device_number: Option<u64>, source: io::Error) -> Error {
    let name = path.display();
    let message = match source.raw_os_error() {
        // ENXIO, ENODEV: the node exists, the device behind it does not.
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENXIO | libc::ENODEV) => format!(
            "{name} does not exist: create the device (`bellhop dev add`) and load the vhost_vdpa \
             module"
        ),
        Some(libc::EACCES | libc::EPERM) => format!(
            "no permission to open {name}: run as its owner or change its mode (a udev rule makes \
             that permanent)"
        ),
        // The processes that have it open, if they are visible.
        Some(libc::EBUSY) => {
            let holders = device_number.map(holders).unwrap_or_default();
            format!("{name} is in use by {}", sentence(&holders))
        }
        // vhost_vdpa_alloc_domain and iommu_attach_device (drivers/vhost/vdpa.c,
        // drivers/iommu/iommu.c); no other step of open returns these. There is no IOMMU, or one
        // that does not snoop caches, and the parent cannot translate by itself.
        Some(ENOTSUPP | libc::EOPNOTSUPP) => format!(
            "cannot isolate {name}: its hardware is behind no IOMMU that the kernel uses; enable \
             the IOMMU in the firmware and boot with intel_iommu=on or amd_iommu=on"
        ),
        Some(libc::EINVAL) => format!(
            "cannot isolate {name}: its hardware shares an IOMMU group with other devices (see \
             /sys/kernel/iommu_groups); use a slot or a function with access control (ACS), such \
             as a virtual function"
        ),
        _ => return cannot_open(path, source),
    };
    Error::other(message).because(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_path_has_its_own_error() {
        let open = |path: &str| Device::open(path).unwrap_err().to_string();
        assert!(open("/dev/vhost-vdpa-none").contains("does not exist"));
        assert!(open("/dev/null/x").contains("does not exist"));
        assert!(open("/proc/self/status").contains("not a character device"));
        assert!(open("/tmp").contains("not a character device"));
        let error = open("/dev/null");
        assert!(
            error.starts_with("/dev/null is not a vhost-vdpa device"),
            "{error}"
        );
    }

    #[test]
    fn a_descriptor_is_checked_too() {
        let take = |file: File| Device::from_fd(file.into()).unwrap_err().to_string();
        let error = take(File::open("/proc/self/status").unwrap());
        assert!(error.contains("not a character device"), "{error}");
        let error = take(File::open("/dev/zero").unwrap());
        assert!(
            error.starts_with("/dev/zero is not a vhost-vdpa device"),
            "{error}"
        );
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let error = check_fd(socket.as_fd()).unwrap_err().to_string();
        assert!(error.contains("not a character device"), "{error}");
    }

    #[test]
    fn errors_of_open_are_distinct() {
        for (errno, says) in [
            (libc::EACCES, "no permission"),
            (libc::EBUSY, "in use by"),
            (libc::EMFILE, "cannot open /x"),
            (libc::ENXIO, "does not exist"),
            (ENOTSUPP, "behind no IOMMU"),
            (libc::EINVAL, "shares an IOMMU group"),
        ] {
            let source = io::Error::from_raw_os_error(errno);
            let error = explain(Path::new("/x"), Some(u64::MAX), source).to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
