//! `/dev/vduse/control`: creates and deletes devices.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmm_sys_util::ioctl::ioctl_with_ptr;
use zerocopy::IntoBytes as _;

use super::device::{Device, no_access};
use crate::Error;
use crate::device::handle::Handle;
use crate::uapi::vduse::{self as uapi, VDUSE_API_VERSION, VDUSE_NAME_MAX, vduse_dev_config};

/// The kernel's limit for a configuration space.
const CONFIG_MAX: usize = 4096;

/// Directory of the control file and the devices.
const DIRECTORY: &str = "/dev/vduse";

/// A device to create.
#[derive(Debug, Clone)]
pub struct Description {
    /// Virtio device type.
    pub device_id: u32,
    /// Offered features. VDUSE requires VERSION_1 and ACCESS_PLATFORM.
    pub features: u64,
    /// Largest size of each queue, in entries.
    pub queues: Vec<u16>,
    /// The configuration space.
    pub config: Vec<u8>,
}

/// The control file.
#[derive(Debug, Clone)]
pub struct Control(Handle);

impl Control {
    /// Opens the control file, and agrees on the API version.
    ///
    /// # Errors
    /// The module `vduse` is not loaded, the caller is not root, or the kernel has another version.
    pub fn open() -> Result<Self, Error> {
        let path = Path::new(DIRECTORY).join("control");
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(no_access(&path))?;
        let handle = Handle {
            file: Some(Arc::new(file)),
        };
        let version = handle.write(uapi::set_api_version(), &VDUSE_API_VERSION);
        version.map_err(Error::context(
            "the kernel's VDUSE does not have API version 0",
        ))?;
        Ok(Self(handle))
    }

    /// The API version that the kernel reports at this control file. Changes nothing.
    ///
    /// # Errors
    /// The file cannot be opened, or is not that of VDUSE.
    pub fn api_version(path: &Path) -> io::Result<u64> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let handle = Handle {
            file: Some(Arc::new(file)),
        };
        handle.read(uapi::get_api_version(), 0)
    }

    /// Creates the device `name` and opens it. The vDPA device does not exist yet.
    ///
    /// # Errors
    /// The name is taken or too long, or the kernel rejects the device.
    pub fn create(
        &self,
        name: &str,
        description: &Description,
    ) -> Result<(Created, Device), Error> {
        let bytes = description.to_kernel(name)?;
        // SAFETY: there is no safe interface to ioctls. The kernel reads a `vduse_dev_config` and
        // the `config_size` bytes after it, which `bytes` has.
        let created = check(unsafe {
            ioctl_with_ptr(
                self.0.file().map_err(cannot_create(name))?,
                uapi::create_dev().number(),
                bytes.as_ptr(),
            )
        });
        created.map_err(cannot_create(name))?;
        let created = self.adopt(name);
        let device = Device::open(name)?;
        for (index, &size) in (0..).zip(&description.queues) {
            device.set_up_queue(index, size)?;
        }
        Ok((created, device))
    }

    /// Takes over the device `name`, which a process that has ended left.
    #[must_use]
    pub fn adopt(&self, name: &str) -> Created {
        Created {
            control: self.clone(),
            name: name.to_owned(),
        }
    }

    /// Deletes a device. `false`: a process has it open, or its vDPA device exists.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn destroy(&self, name: &str) -> Result<bool, Error> {
        match self.0.write(uapi::destroy_dev(), &padded(name)?) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
            result => {
                let context = format!("cannot delete the VDUSE device {name}");
                result.map_err(Error::context(context))?;
                Ok(true)
            }
        }
    }

    /// Whether there is a device of this name, with or without a process that serves it.
    #[must_use]
    pub fn exists(name: &str) -> bool {
        path(name).exists()
    }
}

/// Deletes the device when dropped. Delete the vDPA device and drop the [`Device`] before.
#[derive(Debug)]
pub struct Created {
    control: Control,
    name: String,
}

impl Drop for Created {
    fn drop(&mut self) {
        match self.control.destroy(&self.name) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(name = self.name, "a VDUSE device in use is left"),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, name = self.name, "a VDUSE device is left");
            }
        }
    }
}

impl Description {
    fn to_kernel(&self, name: &str) -> Result<Vec<u8>, Error> {
        let size = |len: usize, limit: usize| {
            let number = u32::try_from(len).ok().filter(|_| len <= limit);
            number
                .ok_or_else(|| Error::other(format!("a VDUSE device of {len} parts is too large")))
        };
        let header = vduse_dev_config {
            name: padded(name)?,
            vendor_id: 0,
            device_id: self.device_id,
            features: self.features,
            vq_num: size(self.queues.len(), 0xffff)?,
            vq_align: 4096,
            reserved: [0; 13],
            config_size: size(self.config.len(), CONFIG_MAX)?,
        };
        Ok([header.as_bytes(), &self.config].concat())
    }
}

fn cannot_create(name: &str) -> impl FnOnce(io::Error) -> Error {
    move |error| {
        let remedy = match error.raw_os_error() {
            Some(libc::EEXIST) => ": the name is taken, choose another one",
            Some(libc::EPERM) => ": run this as root (CAP_NET_ADMIN)",
            _ => "",
        };
        let message = format!("cannot create the VDUSE device {name}{remedy}");
        Error::other(message).because(error)
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A NUL-terminated name for the kernel.
fn padded(name: &str) -> Result<[u8; VDUSE_NAME_MAX], Error> {
    let mut bytes = [0; VDUSE_NAME_MAX];
    let is_good = !name.is_empty() && name != "control" && !name.contains(['/', '\0']);
    let place = bytes.get_mut(..name.len());
    match place.filter(|_| is_good && !name.starts_with('.') && name.len() < VDUSE_NAME_MAX) {
        Some(place) => place.copy_from_slice(name.as_bytes()),
        None => {
            return Err(Error::other(format!(
                "{name:?} is not a name for a VDUSE device"
            )));
        }
    }
    Ok(bytes)
}

/// The file of a device.
pub(super) fn path(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(name)
}

/// Opens a device's file.
pub(super) fn open(name: &str) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;

    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_has_the_layout_of_the_header() {
        let description = Description {
            device_id: 1,
            features: 1 << 33,
            queues: vec![256; 2],
            config: vec![7; 12],
        };
        let bytes = description.to_kernel("nic0").unwrap();
        assert_eq!(bytes.len(), 336 + 12);
        assert_eq!(&bytes[..5], b"nic0\0");
        assert_eq!(bytes[332..337], [12, 0, 0, 0, 7]);
        let large = Description {
            config: vec![0; CONFIG_MAX + 1],
            ..description
        };
        large.to_kernel("nic0").unwrap_err();
    }

    #[test]
    fn only_names_of_one_file_are_accepted() {
        for name in ["", "control", ".", "..", "a/b", "a\0", &"x".repeat(256)] {
            padded(name).unwrap_err();
        }
        padded(&"x".repeat(255)).unwrap();
    }
}
