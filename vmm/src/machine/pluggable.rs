//! Devices that come and go while the machine runs: NICs and disks.
//!
//! Owns the words for them: what was asked for, and where a device is in its life. It must not
//! know how one is opened, nor how the guest hears of it.
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

use devices::pci::Slot;

use super::RequestError;
use super::failover::Failover;
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

/// The configuration is one of another kind of device.
#[derive(Debug)]
pub(super) struct OtherKind(DeviceKind);

impl TryFrom<DeviceConfig> for VdpaConfig {
    type Error = OtherKind;

    fn try_from(config: DeviceConfig) -> Result<Self, OtherKind> {
        match config {
            DeviceConfig::Nic(config) => Ok(config),
            DeviceConfig::Disk(_) => Err(OtherKind(DeviceKind::Nic)),
        }
    }
}

impl TryFrom<DeviceConfig> for DiskConfig {
    type Error = OtherKind;

    fn try_from(config: DeviceConfig) -> Result<Self, OtherKind> {
        match config {
            DeviceConfig::Disk(config) => Ok(config),
            DeviceConfig::Nic(_) => Err(OtherKind(DeviceKind::Disk)),
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

/// A NIC of a machine: its vhost-vdpa character device, and how the guest is to see it.
pub type NicStatus = Pluggable<VdpaConfig>;

/// A disk of a machine.
pub type DiskStatus = Pluggable<DiskConfig>;

impl Pluggable<DeviceConfig> {
    /// As a device of the kind `C`.
    ///
    /// # Errors
    /// It is one of another kind.
    pub(super) fn of<C>(self) -> Result<Pluggable<C>, RequestError>
    where
        C: TryFrom<DeviceConfig, Error = OtherKind>,
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
            Err(OtherKind(wanted)) => Err(RequestError::OtherKind { id, wanted }),
        }
    }
}
