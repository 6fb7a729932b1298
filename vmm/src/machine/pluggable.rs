//! Devices that come and go while the machine runs: NICs and disks.
//!
//! Owns the words for them: what was asked for, where a device is in its life, and what came of a
//! NIC's move to another device. It must not know how one is opened, nor how the guest is notified.
//!
//! ```text
//!            plug                    unplug                       guest ejects it,
//!   (none) ----------> Plugged -----------------> UnplugRequested ---------------> (none)
//!                         ^                         |   ^    |    or resets the machine
//!                         |                         +---+    |
//!                  a reset of the machine           unplug   +-- a guest without a driver
//!                  changes nothing                  (again)      for hot-plug stays here
//! ```

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use devices::pci::Slot;

use crate::config::{DiskConfig, VdpaConfig};

/// Which devices come and go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// vDPA network devices.
    Nic,
    /// Disks on raw images.
    Disk,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nic => "network device",
            Self::Disk => "disk",
        })
    }
}

/// What was asked for, of any kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DeviceConfig {
    Nic(VdpaConfig),
    Disk(DiskConfig),
}

impl DeviceConfig {
    pub(super) fn kind(&self) -> DeviceKind {
        match self {
            Self::Nic(_) => DeviceKind::Nic,
            Self::Disk(_) => DeviceKind::Disk,
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
            DeviceConfig::Disk(_) => Err(DeviceKind::Nic),
        }
    }
}

impl TryFrom<DeviceConfig> for DiskConfig {
    type Error = DeviceKind;

    fn try_from(config: DeviceConfig) -> Result<Self, DeviceKind> {
        match config {
            DeviceConfig::Disk(config) => Ok(config),
            DeviceConfig::Nic(_) => Err(DeviceKind::Disk),
        }
    }
}

/// Where a device is in its life; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlugState {
    /// The guest has it, or finds it when it looks.
    Plugged,
    /// The guest was asked to eject it and has not done so yet.
    UnplugRequested,
}

/// A device that comes and goes, configured by a `C`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pluggable<C> {
    /// Its name.
    pub id: String,
    /// What was asked for. Its `id` is always there.
    pub config: C,
    /// Where the guest sees it.
    pub address: Slot,
    /// Where it is in its life.
    pub state: PlugState,
    /// Different for each device that the machine ever had: tells one from an earlier one of
    /// the same name.
    pub serial: u64,
    /// The NUMA node of the host that it hangs on, where the host says so.
    pub numa_node: Option<u16>,
    /// What is to be said about it and the node that guest memory is bound to.
    pub numa_warning: Option<String>,
    /// Of a NIC whose device has failed: what came of its failover, until it is moved by somebody.
    pub failover: Option<Box<Failover>>,
}

/// What came of a NIC's failover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    /// The device that has failed, for people.
    pub from: String,
    /// The vhost-vdpa character device that was to take its place.
    pub to: PathBuf,
    /// How far it came.
    pub state: FailoverState,
}

/// How far a failover is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailoverState {
    /// The other device is being opened. The driver has not been told that its own has failed.
    UnderWay,
    /// The NIC is on the other device.
    Done {
        /// From the swap's beginning to its end, which is not when the device failed; `None` if no driver was using the NIC
        /// by then, or its driver had been told.
        gap: Option<Duration>,
    },
    /// The NIC is on the device that has failed, and its driver was told; with the reason and its causes.
    Failed(String),
}

/// A NIC of a machine: its vhost-vdpa character device, and how the guest is to see it.
pub type NicStatus = Pluggable<VdpaConfig>;

/// A NIC with another device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicSwapped {
    /// The NIC as it is now.
    pub status: NicStatus,
    /// How long neither device worked, as the machine saw it; `None` if no driver was using the NIC, or
    /// it has the same device as before.
    pub gap: Option<Duration>,
}

/// A disk of a machine.
pub type DiskStatus = Pluggable<DiskConfig>;

impl Pluggable<DeviceConfig> {
    /// As a device of the kind `C`.
    ///
    /// # Errors
    /// It is one of another kind.
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
