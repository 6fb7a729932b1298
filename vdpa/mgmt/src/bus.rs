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
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use super::in_use::{self, InUse};
use super::name::is_name;

mod netdev;

pub use netdev::Netdev;

const CHARACTER_DEVICE_PREFIX: &str = "vhost-vdpa-";

/// Why the bus could not be read.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// The kernel has no vdpa bus.
    #[error("this kernel has no vdpa bus; load it with `modprobe vdpa`")]
    NoBus,
    /// The name cannot be that of a device (it is empty, or a path).
    #[error("{0:?} does not name a vDPA device")]
    BadName(String),
    /// There is no device of that name.
    #[error("there is no vDPA device {0}; `bellhop dev show` lists them")]
    NoDevice(String),
    /// There is no such driver.
    #[error(
        "there is no vdpa bus driver {0}; load it with `modprobe {0}` \
         (vhost_vdpa for guests, virtio_vdpa for this machine)"
    )]
    NoDriver(String),
    /// Somebody has the device open: unbinding would wait for that.
    #[error(transparent)]
    InUse(#[from] InUse),
    /// The caller may not do that.
    #[error("no permission to change the driver of {name}: run this as root")]
    NotPermitted {
        /// The device.
        name: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The old driver did not let go.
    #[error("the driver {driver} does not let go of {name}")]
    Unbind {
        /// The device.
        name: String,
        /// Its driver.
        driver: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The new driver did not take the device, which has its old one again if it can.
    #[error(
        "the driver {driver} does not take {name}, which now has {}; `dmesg` may tell why",
        now.as_deref().unwrap_or("no driver")
    )]
    Bind {
        /// The device.
        name: String,
        /// The new driver.
        driver: String,
        /// The device's driver now.
        now: Option<String>,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// sysfs could not be read.
    #[error("cannot read {}", path.display())]
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
    /// [`BusError::NoBus`] without the kernel module, else [`BusError::Read`].
    pub fn devices(&self) -> Result<Vec<BusDevice>, BusError> {
        let mut devices = Vec::new();
        for name in self.names()? {
            match self.device(&name) {
                Ok(device) => devices.push(device),
                Err(BusError::NoDevice(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(devices)
    }

    /// The names of all devices, sorted.
    ///
    /// # Errors
    /// As [`Bus::devices`].
    pub fn names(&self) -> Result<Vec<String>, BusError> {
        let entries = match fs::read_dir(&self.devices) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(BusError::NoBus),
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
    /// [`BusError::BadName`], [`BusError::NoDevice`], [`BusError::NoBus`] or
    /// [`BusError::Read`].
    pub fn device(&self, name: &str) -> Result<BusDevice, BusError> {
        if !is_name(name) {
            return Err(BusError::BadName(name.to_owned()));
        }
        let directory = self.devices.join(name);
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(match self.devices.is_dir() {
                    true => BusError::NoDevice(name.to_owned()),
                    false => BusError::NoBus,
                });
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
    pub fn behind(&self, number: u32) -> Result<Option<BusDevice>, BusError> {
        let mut devices = self.devices()?.into_iter();
        Ok(devices.find(|device| device.character_device == Some(number)))
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
    /// [`BusError::InUse`] with the holders, [`BusError::NoDriver`],
    /// [`BusError::NotPermitted`]; [`BusError::Bind`] when the old driver was tried again; or
    /// as [`Bus::device`].
    pub fn bind(&self, name: &str, driver: &str) -> Result<BusDevice, BusError> {
        let device = self.device(name)?;
        if !self.has_driver(driver) {
            return Err(BusError::NoDriver(driver.to_owned()));
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
            return Err(permission(name, source, |source| BusError::Bind {
                name: name.to_owned(),
                driver: driver.to_owned(),
                now,
                source,
            }));
        }
        self.device(name)
    }

    /// Takes the device called `name` from its bus driver and returns it as it is then.
    ///
    /// # Errors
    /// [`BusError::InUse`] with the holders, [`BusError::NotPermitted`], [`BusError::Unbind`]; or
    /// as [`Bus::device`].
    pub fn unbind(&self, name: &str) -> Result<BusDevice, BusError> {
        self.let_go(&self.device(name)?)?;
        self.device(name)
    }

    /// Takes a device from its driver, unless somebody has it open.
    fn let_go(&self, device: &BusDevice) -> Result<(), BusError> {
        in_use::check(device)?;
        let Some(driver) = &device.driver else {
            return Ok(());
        };
        let name = &device.name;
        self.tell(driver, "unbind", name).map_err(|source| {
            permission(name, source, |source| BusError::Unbind {
                name: name.clone(),
                driver: driver.clone(),
                source,
            })
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

fn permission(
    name: &str,
    source: io::Error,
    other: impl FnOnce(io::Error) -> BusError,
) -> BusError {
    match source.kind() {
        ErrorKind::PermissionDenied => BusError::NotPermitted {
            name: name.to_owned(),
            source,
        },
        _ => other(source),
    }
}

fn number_of(entry: &OsStr) -> Option<u32> {
    let digits = entry.to_str()?.strip_prefix(CHARACTER_DEVICE_PREFIX)?;
    let number: u32 = digits.parse().ok()?;
    // Only the kernel's own spelling: neither a sign nor leading zeros.
    (number.to_string() == digits).then_some(number)
}

fn read_error(path: &Path, source: io::Error) -> BusError {
    BusError::Read {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests;
