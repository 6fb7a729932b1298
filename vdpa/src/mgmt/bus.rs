//! The vdpa bus in sysfs: from a device's name to its driver and its
//! character device, and back.
//!
//! The number in `/dev/vhost-vdpa-N` has nothing to do with the device's name
//! and changes when the device is bound anew, so nothing here is cached.
//! Owns reading of `/sys/bus/vdpa`; changes nothing there. Must not know netlink.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

const CHARACTER_DEVICE_PREFIX: &str = "vhost-vdpa-";

/// Why the bus could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no vdpa bus.
    #[error("this kernel has no vdpa bus; load it with `modprobe vdpa`")]
    NoBus,
    /// The name cannot be that of a device (it is empty, or a path).
    #[error("{0:?} is not a name of a vDPA device")]
    BadName(String),
    /// There is no device of that name.
    #[error("there is no vDPA device {0}; `bellhop dev show` lists them")]
    NoDevice(String),
    /// sysfs could not be read.
    #[error("cannot read {path}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// A device of the bus, as it was when it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusDevice {
    /// The name that it was given when it was added.
    pub name: String,
    /// Its bus driver, such as `vhost_vdpa` or `virtio_vdpa`; none if unbound.
    pub driver: Option<String>,
    /// N of `/dev/vhost-vdpa-N`, while `vhost_vdpa` drives it.
    pub character_device: Option<u32>,
}

impl BusDevice {
    /// The character device's path, while there is one.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        let number = self.character_device?;
        Some(PathBuf::from(format!(
            "/dev/{CHARACTER_DEVICE_PREFIX}{number}"
        )))
    }
}

/// The vdpa bus.
#[derive(Debug, Clone)]
pub struct Bus {
    devices: PathBuf,
}

impl Default for Bus {
    fn default() -> Self {
        Self::at(Path::new("/sys"))
    }
}

impl Bus {
    /// The bus of the sysfs that is mounted at `sysfs`.
    #[must_use]
    pub fn at(sysfs: &Path) -> Self {
        Self {
            devices: sysfs.join("bus/vdpa/devices"),
        }
    }

    /// All devices, by name. One that vanishes meanwhile is left out.
    ///
    /// # Errors
    /// [`Error::NoBus`] without the kernel module, else [`Error::Read`].
    pub fn devices(&self) -> Result<Vec<BusDevice>, Error> {
        let mut devices = Vec::new();
        for name in self.names()? {
            match self.device(&name) {
                Ok(device) => devices.push(device),
                Err(Error::NoDevice(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(devices)
    }

    /// The names of all devices, sorted.
    ///
    /// # Errors
    /// As [`Bus::devices`].
    pub fn names(&self) -> Result<Vec<String>, Error> {
        let entries = match fs::read_dir(&self.devices) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(Error::NoBus),
            entries => entries.map_err(|source| read_error(&self.devices, source))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|source| read_error(&self.devices, source))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// The device called `name`.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::NoDevice`] or [`Error::Read`].
    pub fn device(&self, name: &str) -> Result<BusDevice, Error> {
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
            return Err(Error::BadName(name.to_owned()));
        }
        let directory = self.devices.join(name);
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Error::NoDevice(name.to_owned()));
            }
            entries => entries.map_err(|source| read_error(&directory, source))?,
        };
        let mut character_device = None;
        for entry in entries {
            let entry = entry.map_err(|source| read_error(&directory, source))?;
            character_device = character_device.or(number_of(&entry.file_name()));
        }
        let link = directory.join("driver");
        let driver = match fs::read_link(&link) {
            Ok(target) => target
                .file_name()
                .map(|name| name.to_string_lossy().into_owned()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(source) => return Err(read_error(&link, source)),
        };
        Ok(BusDevice {
            name: name.to_owned(),
            driver,
            character_device,
        })
    }

    /// The device behind `/dev/vhost-vdpa-N`, if there is one.
    ///
    /// # Errors
    /// As [`Bus::devices`].
    pub fn behind(&self, number: u32) -> Result<Option<BusDevice>, Error> {
        let mut devices = self.devices()?.into_iter();
        Ok(devices.find(|device| device.character_device == Some(number)))
    }
}

fn number_of(entry: &OsStr) -> Option<u32> {
    let digits = entry.to_str()?.strip_prefix(CHARACTER_DEVICE_PREFIX)?;
    let number: u32 = digits.parse().ok()?;
    // Only the kernel's own spelling: neither a sign nor leading zeros.
    (number.to_string() == digits).then_some(number)
}

fn read_error(path: &Path, source: io::Error) -> Error {
    Error::Read {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests;
