//! Devices that come and go while the machine runs: NICs, disks and functions of the host.
//!
//! Owns their types: the requested configuration, the state of a device, and the result of a NIC's
//! move to another device. It must not know how one is opened, nor how the guest is notified.
//!
//! ```text
//!            plug                    unplug                       guest ejects it,
//!   (none) ----------> Plugged -----------------> UnplugRequested ---------------> (none)
//!                         ^                         |   ^    |    or resets the machine
//!                         |                         +---+    |
//!                  a reset of the machine           unplug   +-- a guest without a driver
//!                  changes nothing                  (again)      for hot-plug stays here
//! ```
//! A function that the host wants back becomes UnplugRequested without a request, and leaves after
//! 10 s even if the guest does not eject it. A vDPA device that the host removes becomes
//! DeviceRemoved instead of UnplugRequested, without a request.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

pub use bellhop_api::machine::PlugPhase;
use devices::pci::Slot;

use crate::config::{DiskConfig, VdpaConfig, VfioConfig};

/// The kinds of hot-pluggable devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// vDPA network devices.
    Nic,
    /// Disks on raw images.
    Disk,
    /// PCI functions of the host.
    Vfio,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nic => "network device",
            Self::Disk => "disk",
            Self::Vfio => "VFIO device",
        })
    }
}

/// The requested configuration of a device of any kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DeviceConfig {
    Nic(VdpaConfig),
    Disk(DiskConfig),
    Vfio(VfioConfig),
}

impl DeviceConfig {
    pub(super) fn kind(&self) -> DeviceKind {
        match self {
            Self::Nic(_) => DeviceKind::Nic,
            Self::Disk(_) => DeviceKind::Disk,
            Self::Vfio(_) => DeviceKind::Vfio,
        }
    }
}

/// The device with this name is not of the kind `wanted`.
#[derive(Debug)]
pub(super) struct OtherKind {
    pub(super) id: String,
    pub(super) wanted: DeviceKind,
}

impl TryFrom<DeviceConfig> for VdpaConfig {
    type Error = DeviceKind;

    fn try_from(config: DeviceConfig) -> Result<Self, DeviceKind> {
        match config {
            DeviceConfig::Nic(config) => Ok(config),
            _ => Err(DeviceKind::Nic),
        }
    }
}

impl TryFrom<DeviceConfig> for DiskConfig {
    type Error = DeviceKind;

    fn try_from(config: DeviceConfig) -> Result<Self, DeviceKind> {
        match config {
            DeviceConfig::Disk(config) => Ok(config),
            _ => Err(DeviceKind::Disk),
        }
    }
}

impl TryFrom<DeviceConfig> for VfioConfig {
    type Error = DeviceKind;

    fn try_from(config: DeviceConfig) -> Result<Self, DeviceKind> {
        match config {
            DeviceConfig::Vfio(config) => Ok(config),
            _ => Err(DeviceKind::Vfio),
        }
    }
}

/// A hot-pluggable device, configured by a `C`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pluggable<C> {
    /// Its name.
    pub id: String,
    /// The requested configuration. Its `id` is always set.
    pub config: C,
    /// Its PCI slot.
    pub address: Slot,
    /// Its state; see the module.
    pub state: PlugPhase,
    /// Unique among all devices that the machine ever had: tells a device from an earlier one of
    /// the same name.
    pub serial: u64,
    /// The NUMA node of the host to which it is attached, if the host reports one.
    pub numa_node: Option<u16>,
    /// A warning about that node and the node to which guest memory is bound.
    pub numa_warning: Option<String>,
    /// The result of the failover of a NIC whose device has failed; cleared when the NIC is moved.
    pub failover: Option<Box<Failover>>,
}

/// The result of a NIC's failover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    /// The device that failed, as text for people.
    pub from: String,
    /// The vhost-vdpa character device that was to replace it.
    pub to: PathBuf,
    /// The progress.
    pub state: FailoverState,
}

/// The progress of a failover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailoverState {
    /// The backup device is being opened. The driver does not know yet that its device has failed.
    UnderWay,
    /// The NIC is on the backup device.
    Done {
        /// The time from the swap's beginning to its end, which does not begin with the failure.
        /// `None` if no driver was using the NIC by then, or the driver had been notified.
        gap: Option<Duration>,
    },
    /// The NIC is on the failed device, and its driver was notified. Holds the reason and its
    /// causes.
    Failed(String),
}

/// A NIC of a machine: its vhost-vdpa character device, and how it is presented to the guest.
pub type NicStatus = Pluggable<VdpaConfig>;

/// A NIC that has moved to another device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicSwapped {
    /// The NIC as it is now.
    pub status: NicStatus,
    /// How long neither device worked, as the machine measured it. `None` if no driver was using
    /// the NIC, or the device is the same as before.
    pub gap: Option<Duration>,
}

/// A disk of a machine.
pub type DiskStatus = Pluggable<DiskConfig>;

/// A function of the host in a machine.
pub type VfioStatus = Pluggable<VfioConfig>;

impl Pluggable<DeviceConfig> {
    /// Converts to a device of the kind `C`.
    ///
    /// # Errors
    /// The device is of another kind.
    pub(super) fn of<C>(self) -> Result<Pluggable<C>, OtherKind>
    where
        C: TryFrom<DeviceConfig, Error = DeviceKind>,
    {
        let Self {
            id,
            config,
            address,
            state,
            serial,
            numa_node,
            numa_warning,
            failover,
        } = self;
        match C::try_from(config) {
            Ok(config) => Ok(Pluggable {
                id,
                config,
                address,
                state,
                serial,
                numa_node,
                numa_warning,
                failover,
            }),
            Err(wanted) => Err(OtherKind { id, wanted }),
        }
    }
}
