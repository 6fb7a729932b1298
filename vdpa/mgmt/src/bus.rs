//! The vdpa bus in sysfs: maps a device's name to its driver and character device and back, and
//! rebinds drivers.
//!
//! ```text
//!   vhost_vdpa   /dev/vhost-vdpa-N, for a VMM or a driver in userspace
//!       ^ | bind: not open ──> unbind ──> bind ──> driver read back
//!       | v                               └─fails──> the old driver again
//!   virtio_vdpa  a virtio device of this machine, with a network interface or a disk
//! ```
//!
//! The number in `/dev/vhost-vdpa-N` is independent of the device's name and changes when the
//! device is rebound, so nothing is cached. This module owns `/sys/bus/vdpa` and does not use
//! netlink.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::error::{Error, ErrorKind, existing};
use super::name::is_name;
use super::sysfs::{entries, link_name, write};
use vdpa::device::holder::{Holder, holders, sentence};

mod netdev;

pub use netdev::Netdev;

const CHARACTER_DEVICE_PREFIX: &str = "vhost-vdpa-";

/// A device of the bus, at the time of the query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusDevice {
    /// Its name, set at creation.
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

    /// Fails if the character device is open. Deleting or unbinding the device then makes the
    /// kernel wait until it is closed, in a sleep that no signal ends.
    ///
    /// The file opens once, so a trial open also detects processes that are not visible from here.
    /// A caller without the right to open it relies on the visible ones. The trial resets the
    /// device, which is about to lose its driver anyway.
    pub(super) fn check_unused(&self) -> Result<(), Error> {
        let Some(path) = self.path() else {
            return Ok(());
        };
        let trial = OpenOptions::new().read(true).write(true).open(&path);
        let Err(error) = trial else {
            return Ok(());
        };
        let holders = fs::metadata(&path)
            .map(|file| holders(file.rdev()))
            .unwrap_or_default();
        if holders.is_empty() && error.raw_os_error() != Some(libc::EBUSY) {
            return Ok(());
        }
        Err(in_use(&self.name, &holders, &path))
    }
}

/// Processes have an object open through this file.
pub(super) fn in_use(name: impl fmt::Display, holders: &[Holder], path: &Path) -> Error {
    let message = format!(
        "{name} is in use by {} through {}: end that use first",
        sentence(holders),
        path.display()
    );
    Error::new(ErrorKind::InUse, message)
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
    /// The bus in the sysfs mounted at `sysfs`.
    #[must_use]
    pub fn at(sysfs: &Path) -> Self {
        Self {
            devices: sysfs.join("bus/vdpa/devices"),
            drivers: sysfs.join("bus/vdpa/drivers"),
        }
    }

    /// All devices, by name. A device that vanishes meanwhile is left out.
    ///
    /// # Errors
    /// `NoVdpa` without the kernel module, else `Failed`.
    pub fn devices(&self) -> Result<Vec<BusDevice>, Error> {
        let mut devices = Vec::new();
        for name in self.names()? {
            devices.extend(existing(self.device(&name))?);
        }
        Ok(devices)
    }

    /// The names of all devices, sorted.
    ///
    /// # Errors
    /// As [`Bus::devices`].
    pub fn names(&self) -> Result<Vec<String>, Error> {
        let mut names = entries(&self.devices)?.ok_or_else(no_bus)?;
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
        let Some(entries) = entries(&directory)? else {
            if !self.devices.is_dir() {
                return Err(no_bus());
            }
            let message = format!("there is no vDPA device {name}; `bellhop dev show` lists them");
            return Err(Error::new(ErrorKind::NotFound, message));
        };
        Ok(BusDevice {
            name: name.to_owned(),
            driver: link_name(&directory.join("driver"))?,
            character_device: entries.iter().find_map(|entry| number_of(entry)),
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
            "there is no vdpa bus driver {driver} (vhost_vdpa for guests, virtio_vdpa for this \
             host); `bellhop doctor` checks whether `modprobe {driver}` loads it"
        );
        Error::new(ErrorKind::Unusable, message)
    }

    /// Whether the bus driver is loaded.
    pub(super) fn has_driver(&self, driver: &str) -> bool {
        is_name(driver) && self.drivers.join(driver).is_dir()
    }

    /// Checks whether [`Bus::bind`] can bind the device, and returns it. Nothing is changed.
    ///
    /// # Errors
    /// `InUse` with the holders, `Unusable`; or as [`Bus::device`].
    pub fn check_bind(&self, name: &str, driver: &str) -> Result<BusDevice, Error> {
        let device = self.device(name)?;
        if !self.has_driver(driver) {
            return Err(Self::no_driver(driver));
        }
        if device.driver.as_deref() != Some(driver) {
            device.check_unused()?;
        }
        Ok(device)
    }

    /// Binds the device called `name` to the bus driver `driver` and returns its new state. Nothing
    /// happens if it has that driver.
    ///
    /// A driver override (`driver_override` in sysfs) is left unchanged; an override for another
    /// driver makes this fail.
    ///
    /// # Errors
    /// `InUse` with the holders, `Unusable`, `NotPermitted`; `NotUndone` after an attempt to
    /// restore the old driver; or as [`Bus::device`].
    pub fn bind(&self, name: &str, driver: &str) -> Result<BusDevice, Error> {
        let device = self.check_bind(name, driver)?;
        if device.driver.as_deref() == Some(driver) {
            return Ok(device);
        }
        self.release(&device)?;
        if let Err(source) = self.tell(driver, "bind", name) {
            if let Some(old) = &device.driver
                && let Err(error) = self.tell(old, "bind", name)
            {
                tracing::warn!(name, driver = old, %error, "cannot rebind the old driver");
            }
            let now = self.device(name).ok().and_then(|device| device.driver);
            let now = now.as_deref().unwrap_or("no driver");
            let message = |_: &_| {
                format!(
                    "the driver {driver} rejects {name}, which now has {now}; `dmesg` may show why"
                )
            };
            return Err(write_error(name, source, ErrorKind::NotUndone, message));
        }
        self.device(name)
    }

    /// Unbinds the device called `name` from its bus driver and returns its new state.
    ///
    /// # Errors
    /// `InUse` with the holders, `NotPermitted`, `Refused`; or as [`Bus::device`].
    pub fn unbind(&self, name: &str) -> Result<BusDevice, Error> {
        let device = self.device(name)?;
        device.check_unused()?;
        self.release(&device)?;
        self.device(name)
    }

    /// Unbinds a device that no process has open.
    fn release(&self, device: &BusDevice) -> Result<(), Error> {
        let Some(driver) = &device.driver else {
            return Ok(());
        };
        let name = &device.name;
        self.tell(driver, "unbind", name).map_err(|source| {
            let message = |_: &_| format!("the driver {driver} does not release {name}");
            write_error(name, source, ErrorKind::Refused, message)
        })
    }

    /// Writes a device's name to a driver's file. Never creates a missing file.
    fn tell(&self, driver: &str, file: &str, name: &str) -> io::Result<()> {
        write(&self.drivers.join(driver).join(file), name)
    }
}

fn no_bus() -> Error {
    let message = "this kernel has no vdpa bus; `bellhop doctor` checks whether `modprobe vdpa` \
                   loads it or another kernel is needed";
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

fn number_of(entry: &str) -> Option<u32> {
    let digits = entry.strip_prefix(CHARACTER_DEVICE_PREFIX)?;
    let number: u32 = digits.parse().ok()?;
    // Only the kernel's own spelling: neither a sign nor leading zeros.
    (number.to_string() == digits).then_some(number)
}

#[cfg(test)]
mod tests;
