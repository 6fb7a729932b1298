//! The vdpa bus in sysfs: from a device's name to its driver and its character device,
//! back, and from one driver to another.
//!
//! ```text
//!   vhost_vdpa   /dev/vhost-vdpa-N, for a VMM or a driver in userspace
//!       ^ | bind: nobody has it open ──> unbind ──> bind ──> driver read back
//!       | v                                           └─fails──> the old driver again
//!   virtio_vdpa  a virtio device of this machine, with a network interface or a disk
//! ```
//!
//! The number in `/dev/vhost-vdpa-N` has nothing to do with the device's name and changes when
//! the device is bound anew, so nothing here is cached. Owns `/sys/bus/vdpa`. Must not know
//! netlink.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind as IoErrorKind, Write as _};
use std::path::{Path, PathBuf};

use super::error::{Error, ErrorKind};
use super::in_use;
use super::name::is_name;

mod netdev;

pub use netdev::Netdev;

const CHARACTER_DEVICE_PREFIX: &str = "vhost-vdpa-";

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
    drivers: PathBuf,
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
            drivers: sysfs.join("bus/vdpa/drivers"),
        }
    }

    /// All devices, by name. One that vanishes meanwhile is left out.
    ///
    /// # Errors
    /// `NoVdpa` without the kernel module, else `Failed`.
    pub fn devices(&self) -> Result<Vec<BusDevice>, Error> {
        let mut devices = Vec::new();
        for name in self.names()? {
            match self.device(&name) {
                Ok(device) => devices.push(device),
                Err(error) if error.is_missing() => {}
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
            Err(error) if error.kind() == IoErrorKind::NotFound => return Err(no_bus()),
            entries => entries.map_err(Error::read(&self.devices))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::read(&self.devices))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// The device called `name`.
    ///
    /// # Errors
    /// `BadName`, `NotFound`, `NoVdpa` or `Failed`.
    pub fn device(&self, name: &str) -> Result<BusDevice, Error> {
        if !is_name(name) {
            let message = format!("{name:?} does not name a vDPA device");
            return Err(Error::new(ErrorKind::BadName, message));
        }
        let directory = self.devices.join(name);
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == IoErrorKind::NotFound => {
                return Err(if self.devices.is_dir() {
                    let message =
                        format!("there is no vDPA device {name}; `bellhop dev show` lists them");
                    Error::new(ErrorKind::NotFound, message)
                } else {
                    no_bus()
                });
            }
            entries => entries.map_err(Error::read(&directory))?,
        };
        let mut character_device = None;
        for entry in entries {
            let entry = entry.map_err(Error::read(&directory))?;
            character_device = character_device.or(number_of(&entry.file_name()));
        }
        let link = directory.join("driver");
        let driver = match fs::read_link(&link) {
            Ok(target) => target
                .file_name()
                .map(|name| name.to_string_lossy().into_owned()),
            Err(error) if error.kind() == IoErrorKind::NotFound => None,
            Err(source) => return Err(Error::read(&link)(source)),
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

    /// The bus driver is not loaded.
    pub(super) fn no_driver(driver: &str) -> Error {
        let message = format!(
            "there is no vdpa bus driver {driver}; load it with `modprobe {driver}` (vhost_vdpa for \
             guests, virtio_vdpa for this machine)"
        );
        Error::new(ErrorKind::Unusable, message)
    }

    /// Whether the bus driver is loaded.
    pub(super) fn has_driver(&self, driver: &str) -> bool {
        is_name(driver) && self.drivers.join(driver).is_dir()
    }

    /// Gives the device called `name` to the bus driver `driver` and returns it as it is
    /// then. Nothing happens if it has that driver.
    ///
    /// A driver override (`driver_override` in sysfs) is left as it is; one that names
    /// another driver makes this fail.
    ///
    /// # Errors
    /// `InUse` with the holders, `Unusable`, `NotPermitted`; `NotUndone` when the old driver was
    /// tried again; or as [`Bus::device`].
    pub fn bind(&self, name: &str, driver: &str) -> Result<BusDevice, Error> {
        let device = self.device(name)?;
        if !self.has_driver(driver) {
            return Err(Self::no_driver(driver));
        }
        if device.driver.as_deref() == Some(driver) {
            return Ok(device);
        }
        self.let_go(&device)?;
        if let Err(source) = self.tell(driver, "bind", name) {
            if let Some(old) = &device.driver
                && let Err(error) = self.tell(old, "bind", name)
            {
                tracing::warn!(name, driver = old, %error, "the old driver does not come back");
            }
            let now = self.device(name).ok().and_then(|device| device.driver);
            let now = now.as_deref().unwrap_or("no driver");
            let message = |_: &_| {
                format!(
                    "the driver {driver} does not take {name}, which now has {now}; `dmesg` may \
                     tell why"
                )
            };
            return Err(write_error(name, source, ErrorKind::NotUndone, message));
        }
        self.device(name)
    }

    /// Takes the device called `name` from its bus driver and returns it as it is then.
    ///
    /// # Errors
    /// `InUse` with the holders, `NotPermitted`, `Refused`; or as [`Bus::device`].
    pub fn unbind(&self, name: &str) -> Result<BusDevice, Error> {
        self.let_go(&self.device(name)?)?;
        self.device(name)
    }

    /// Takes a device from its driver, unless somebody has it open.
    fn let_go(&self, device: &BusDevice) -> Result<(), Error> {
        in_use::check(device)?;
        let Some(driver) = &device.driver else {
            return Ok(());
        };
        let name = &device.name;
        self.tell(driver, "unbind", name).map_err(|source| {
            let message = |_: &_| format!("the driver {driver} does not let go of {name}");
            write_error(name, source, ErrorKind::Refused, message)
        })
    }

    /// Writes a device's name to a driver's file. No file is made where there is none.
    fn tell(&self, driver: &str, file: &str, name: &str) -> io::Result<()> {
        let path = self.drivers.join(driver).join(file);
        OpenOptions::new()
            .write(true)
            .open(path)?
            .write_all(name.as_bytes())
    }
}

fn no_bus() -> Error {
    let message = "this kernel has no vdpa bus; load it with `modprobe vdpa`";
    Error::new(ErrorKind::NoVdpa, message)
}

fn write_error(
    name: &str,
    source: io::Error,
    kind: ErrorKind,
    message: impl FnOnce(&io::Error) -> String,
) -> Error {
    Error::write(&format!("the driver of {name}"), source, kind, message)
}

fn number_of(entry: &OsStr) -> Option<u32> {
    let digits = entry.to_str()?.strip_prefix(CHARACTER_DEVICE_PREFIX)?;
    let number: u32 = digits.parse().ok()?;
    // Only the kernel's own spelling: neither a sign nor leading zeros.
    (number.to_string() == digits).then_some(number)
}

#[cfg(test)]
mod tests;
