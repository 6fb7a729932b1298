//! The requests of the family `vdpa`.
//!
//! ```text
//!   list ──> dump ──> compare with /sys/bus/vdpa/devices ──> get the missing ones by name
//!   delete ──> holders of /dev/vhost-vdpa-N? ──none──> VDPA_CMD_DEV_DEL
//!                                            └─some──> refused with the PID
//! ```
//!
//! The kernel's dump continues by position: if a device is deleted between two parts, it skips
//! another one. A device of a class without configuration ends a dump of configurations early. The
//! answer shows neither. So devices that sysfs has beyond the answer are requested by name.

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use netlink_packet_core::DefaultNla;

use super::bus::Bus;
use super::config::DeviceConfig;
use super::device::{MgmtDevice, VdpaDevice};
use super::error::{Error, ErrorKind, Texts};
use super::name::{self, MgmtDeviceName};
use super::netlink::error::Refusal;
use super::netlink::family::{self, Description, Family};
use super::netlink::message::{Mode, string, value};
use super::new_device::{NewDevice, unicast};
use super::uapi::*;
use super::vendor_stats::VendorStats;

/// Default time to wait for an answer. Parents such as mlx5 take seconds to create a device.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(30);

/// The command of a request for management devices, and that of its answers. Then the same for
/// devices and for their configurations.
const MGMT_DEVICE: (u8, u8) = (VDPA_CMD_MGMTDEV_GET, VDPA_CMD_MGMTDEV_NEW);
const DEVICE: (u8, u8) = (VDPA_CMD_DEV_GET, VDPA_CMD_DEV_NEW);
const CONFIG: (u8, u8) = (VDPA_CMD_DEV_CONFIG_GET, VDPA_CMD_DEV_CONFIG_GET);

static VDPA: Description = Description {
    name: VDPA_GENL_NAME,
    version: VDPA_GENL_VERSION,
    texts: Texts {
        listed: "devices",
        holder: "A task holds the kernel's vDPA lock, usually a `dev del` of a device that is \
                 still open: find it as root with `ls -l /proc/[0-9]*/fd | grep vhost-vdpa`",
    },
    // The bus is in every namespace's sysfs.
    absent: || match Bus::default().names() {
        Ok(_) => {
            let message = "vDPA management exists in the initial network namespace only: run this \
                           with `nsenter --net=/proc/1/ns/net`";
            Error::new(ErrorKind::OtherNamespace, message)
        }
        Err(_) => {
            let message = "this kernel has no vDPA management; `bellhop doctor` shows whether \
                           `modprobe vdpa` loads it, and which parent driver this host needs";
            Error::new(ErrorKind::NoVdpa, message)
        }
    },
};

/// A connection to the kernel's vDPA management. One thread sends all its requests, one after the
/// other.
#[derive(Debug)]
pub struct Connection {
    family: Family,
    bus: Bus,
}

impl Connection {
    /// Connects; waits for each answer up to [`DEFAULT_PATIENCE`].
    ///
    /// # Errors
    /// `NoVdpa` or `OtherNamespace` if the kernel has no vDPA to manage here, `Failed` without
    /// netlink.
    pub fn open() -> Result<Self, Error> {
        Self::with_patience(DEFAULT_PATIENCE)
    }

    /// Connects; waits for each answer up to `patience`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with_patience(patience: Duration) -> Result<Self, Error> {
        Ok(Self {
            family: Family::open(&VDPA, patience, &Operation::Connect)?,
            bus: Bus::default(),
        })
    }

    /// All management devices, in the kernel's order.
    ///
    /// # Errors
    /// [`Error`].
    pub fn mgmt_devices(&self) -> Result<Vec<MgmtDevice>, Error> {
        let operation = Operation::ListMgmtDevices;
        self.family
            .dump(&operation, MGMT_DEVICE, Vec::new(), MgmtDevice::of)
    }

    /// One management device.
    ///
    /// # Errors
    /// `NoMgmtDevice`, or another one.
    pub fn mgmt_device(&self, name: &MgmtDeviceName) -> Result<MgmtDevice, Error> {
        let operation = Operation::ShowMgmtDevice(name);
        self.family
            .get(&operation, MGMT_DEVICE, name.attributes(), MgmtDevice::of)
    }

    /// All vDPA devices that were added to a management device, in the kernel's order. Each
    /// device that exists during the whole call is in the list, once.
    ///
    /// # Errors
    /// [`Error`].
    pub fn devices(&self) -> Result<Vec<VdpaDevice>, Error> {
        let operation = Operation::ListDevices;
        let devices = self
            .family
            .dump(&operation, DEVICE, Vec::new(), VdpaDevice::of)?;
        self.completed(devices, |device| &device.name, |name| self.device(name))
    }

    /// One vDPA device.
    ///
    /// # Errors
    /// `NotFound`, `BadName`, or another one.
    pub fn device(&self, name: &str) -> Result<VdpaDevice, Error> {
        let operation = Operation::ShowDevice(name);
        let attributes = vec![device_name(name)?];
        self.family
            .get(&operation, DEVICE, attributes, VdpaDevice::of)
    }

    /// Creates a device.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `NameTaken`, `NoMgmtDevice`, `Unusable`, `NoRoom`,
    /// `NotPermitted`, or another one. After `NoAnswer` with `sent` the device may exist
    /// nevertheless.
    pub fn add(&self, device: &NewDevice) -> Result<(), Error> {
        let operation = Operation::Add {
            name: device.name(),
            mgmtdev: device.mgmtdev(),
        };
        let attributes = device.attributes()?;
        self.refuse_second_on_vp_vdpa(device.mgmtdev())?;
        self.family.change(&operation, VDPA_CMD_DEV_NEW, attributes)
    }

    /// Deletes a device that no process has open. A network interface on it (`virtio_vdpa`) is
    /// deleted with it.
    ///
    /// The check and the deletion are two steps. If a process opens the device in between, the
    /// kernel waits for it, holding the lock of all vDPA management.
    ///
    /// # Errors
    /// `InUse` with the holders, `NotFound`, `NotPermitted`, or another one.
    pub fn delete(&self, name: &str) -> Result<(), Error> {
        let operation = Operation::Delete(name);
        let attributes = vec![device_name(name)?];
        self.refuse_if_open(name)?;
        self.family.change(&operation, VDPA_CMD_DEV_DEL, attributes)
    }

    /// A device's configuration.
    ///
    /// # Errors
    /// `NotFound`; `Refused` for a class that the kernel does not describe; or another one.
    pub fn config(&self, name: &str) -> Result<DeviceConfig, Error> {
        let operation = Operation::ShowConfig(name);
        let attributes = vec![device_name(name)?];
        self.family
            .get(&operation, CONFIG, attributes, DeviceConfig::of)
    }

    /// The configurations of all devices of a class that the kernel describes. As complete as
    /// [`Self::devices`].
    ///
    /// # Errors
    /// [`Error`].
    pub fn configs(&self) -> Result<Vec<DeviceConfig>, Error> {
        let operation = Operation::ListConfigs;
        let configs = self
            .family
            .dump(&operation, CONFIG, Vec::new(), DeviceConfig::of)?;
        self.completed(configs, |config| &config.name, |name| self.config(name))
    }

    /// Counters of one queue of a network device in use by a driver.
    ///
    /// # Errors
    /// `NotNegotiated` before FEATURES_OK, `NotFound`, `NotPermitted`, or another one.
    pub fn vendor_stats(&self, name: &str, queue_index: u32) -> Result<VendorStats, Error> {
        let operation = Operation::ShowVendorStats { name, queue_index };
        let attributes = vec![
            device_name(name)?,
            value(VDPA_ATTR_DEV_QUEUE_INDEX, &queue_index.to_ne_bytes()),
        ];
        let commands = (VDPA_CMD_DEV_VSTATS_GET, VDPA_CMD_DEV_VSTATS_GET);
        self.family
            .get(&operation, commands, attributes, VendorStats::of)
    }

    /// Changes the address of an existing network device (kernel 6.12 and later).
    ///
    /// # Errors
    /// `Invalid` for an address that is not unicast, `NotFound`, `NotPermitted`, or `Refused` if
    /// the device cannot, or another one.
    pub fn set_mac(&self, name: &str, mac: [u8; 6]) -> Result<(), Error> {
        let operation = Operation::Set(name);
        let mac = value(VDPA_ATTR_DEV_NET_CFG_MACADDR, &unicast(mac)?);
        let attributes = vec![device_name(name)?, mac];
        let command = VDPA_CMD_DEV_ATTR_SET;
        let answer = self
            .family
            .call(&operation, command, Mode::Do, attributes)?;
        // Linux 6.12 reports success for a class without an address, with a warning that nothing
        // was done.
        match answer.warning {
            Some(explanation) => {
                let message = format!("cannot {operation}: the kernel reports \"{explanation}\"");
                Err(Error::new(ErrorKind::Refused, message))
            }
            None => Ok(()),
        }
    }

    /// vp_vdpa of Linux 6.12 accepts a second device on one function, but keeps track of the newer
    /// one only. Deleting both ends in a null pointer with the vDPA lock held.
    fn refuse_second_on_vp_vdpa(&self, mgmtdev: &MgmtDeviceName) -> Result<(), Error> {
        if mgmtdev.bus() != Some("pci") {
            return Ok(());
        }
        let link = format!("/sys/bus/pci/devices/{}/driver", mgmtdev.name());
        let is_vp_vdpa = std::fs::read_link(link)
            .is_ok_and(|driver| driver.file_name() == Some("vp-vdpa".as_ref()));
        if !is_vp_vdpa {
            return Ok(());
        }
        let mut devices = self.devices()?.into_iter();
        match devices.find(|device| device.mgmtdev == *mgmtdev) {
            Some(device) => Err(Error::new(
                ErrorKind::NoRoom,
                format!(
                    "{mgmtdev} already has the device {}, and the kernel's vp_vdpa confuses two \
                     devices: delete it first, or use another function",
                    device.name
                ),
            )),
            None => Ok(()),
        }
    }

    /// Adds the devices that sysfs has and a dump missed.
    fn completed<T>(
        &self,
        list: Vec<T>,
        name_of: fn(&T) -> &String,
        get: impl Fn(&str) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let mut seen = HashSet::new();
        let mut list: Vec<T> = list
            .into_iter()
            .filter(|one| seen.insert(name_of(one).clone()))
            .collect();
        let names = match self.bus.names() {
            Ok(names) => names,
            Err(error) => {
                tracing::debug!(%error, "cannot compare a dump with the vdpa bus");
                return Ok(list);
            }
        };
        for name in names {
            if seen.contains(&name) || !name::is_name(&name) {
                continue;
            }
            match get(&name) {
                Ok(one) => list.push(one),
                // Deleted again; or created without a management device, or without configuration.
                Err(error) if error.is_missing() || is_unknown(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(list)
    }

    fn refuse_if_open(&self, name: &str) -> Result<(), Error> {
        match self.bus.device(name) {
            Ok(device) => device.check_unused(),
            // The kernel's own error is better.
            Err(error) if error.is_missing() => Ok(()),
            Err(error) => {
                tracing::debug!(%error, name, "cannot find the users of the device");
                Ok(())
            }
        }
    }
}

/// The operation that failed, as part of a sentence: "cannot …".
#[derive(Debug)]
pub(super) enum Operation<'a> {
    Connect,
    ListMgmtDevices,
    ShowMgmtDevice(&'a MgmtDeviceName),
    ListDevices,
    ShowDevice(&'a str),
    ListConfigs,
    ShowConfig(&'a str),
    ShowVendorStats {
        name: &'a str,
        queue_index: u32,
    },
    Add {
        name: &'a str,
        mgmtdev: &'a MgmtDeviceName,
    },
    Delete(&'a str),
    Set(&'a str),
}

impl fmt::Display for Operation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("find the kernel's vDPA management"),
            Self::ListMgmtDevices => f.write_str("list management devices"),
            Self::ShowMgmtDevice(name) => write!(f, "show the management device {name}"),
            Self::ListDevices => f.write_str("list vDPA devices"),
            Self::ShowDevice(name) => write!(f, "show {name}"),
            Self::ListConfigs => f.write_str("list configurations of vDPA devices"),
            Self::ShowConfig(name) => write!(f, "show the configuration of {name}"),
            Self::ShowVendorStats { name, queue_index } => {
                write!(f, "show the counters of queue {queue_index} of {name}")
            }
            Self::Add { name, mgmtdev } => write!(f, "add {name} on {mgmtdev}"),
            Self::Delete(name) => write!(f, "delete {name}"),
            Self::Set(name) => write!(f, "change {name}"),
        }
    }
}

fn device_name(name: &str) -> Result<DefaultNla, Error> {
    Ok(string(VDPA_ATTR_DEV_NAME, name::device(name)?))
}

impl family::Operation for Operation<'_> {
    fn refused(&self, _: &Family, refusal: Refusal) -> Error {
        refused(self, refusal)
    }
}

/// A refusal with its remedy.
fn refused(operation: &Operation<'_>, source: Refusal) -> Error {
    use ErrorKind as Kind;
    use Operation as Of;
    let (kind, message) = match (source.errno(), operation) {
        (libc::EPERM | libc::EACCES, _) => (
            Kind::NotPermitted,
            format!(
                "cannot {operation}: this needs CAP_NET_ADMIN in the initial user namespace; run \
                 it as root"
            ),
        ),
        (libc::ENODEV, Of::ShowMgmtDevice(name) | Of::Add { mgmtdev: name, .. }) => (
            Kind::NoMgmtDevice,
            format!(
                "there is no management device {name}; `bellhop mgmtdev show` lists them (a NIC \
                 has one once its vDPA driver is loaded)"
            ),
        ),
        (
            libc::ENODEV,
            Of::ShowDevice(name)
            | Of::ShowConfig(name)
            | Of::ShowVendorStats { name, .. }
            | Of::Delete(name)
            | Of::Set(name),
        ) => (
            Kind::NotFound,
            format!("there is no vDPA device {name}; `bellhop dev show` lists them"),
        ),
        (libc::EEXIST, Of::Add { name, .. }) => (
            Kind::NameTaken,
            format!("the name {name} is taken; `bellhop dev show {name}` shows by what"),
        ),
        (libc::EAGAIN, Of::ShowVendorStats { .. }) => (
            Kind::NotNegotiated,
            format!(
                "cannot {operation}: no driver uses the device yet (feature negotiation is not \
                 complete)"
            ),
        ),
        (libc::EOPNOTSUPP, Of::Add { .. }) => match not_taken(&source) {
            Some(attributes) => (
                Kind::Unusable,
                format!("cannot {operation}: it does not accept {attributes}; leave that out"),
            ),
            None => (Kind::Refused, format!("cannot {operation}")),
        },
        _ => (Kind::Refused, format!("cannot {operation}")),
    };
    Error::new(kind, message).because(source)
}

/// Whether the kernel lacks the requested kind of information about a device.
fn is_unknown(error: &Error) -> bool {
    let errno = error.refusal().map(Refusal::errno);
    error.kind() == ErrorKind::Refused && matches!(errno, Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Whether a management device refused to set the address of a new device, and nothing else.
pub(super) fn takes_no_mac(error: &Error) -> bool {
    error.kind() == ErrorKind::Unusable
        && error.refusal().and_then(not_taken).as_deref() == Some("mac")
}

/// Names of the attributes in "Some provided attributes are not supported: 0x1000", a mask of
/// attribute numbers.
fn not_taken(refusal: &Refusal) -> Option<String> {
    let (_, digits) = refusal.explanation()?.rsplit_once("0x")?;
    let mask = u64::from_str_radix(digits.trim(), 16).ok()?;
    let names: Vec<&str> = [
        (VDPA_ATTR_DEV_NET_CFG_MACADDR, "mac"),
        (VDPA_ATTR_DEV_NET_CFG_MTU, "mtu"),
        (VDPA_ATTR_DEV_NET_CFG_MAX_VQP, "max_vqp"),
        (VDPA_ATTR_DEV_FEATURES, "device_features"),
    ]
    .into_iter()
    .filter(|(attribute, _)| mask & 1 << attribute != 0)
    .map(|(_, name)| name)
    .collect();
    (!names.is_empty()).then(|| names.join(", "))
}

#[cfg(test)]
mod tests;
