//! Another vDPA device behind a NIC while the guest runs: what is asked, and what comes back.
//!
//! ```text
//!   caller's thread                        vmm thread
//!   open, map all guest RAM ── Request ──> old stops, new goes on where it stopped
//!   close what is not used <── answer ───┘ (or the old one goes on)
//! ```
//! It must not know how a device takes another one's place.

use std::path::{Path, PathBuf};

use devices::virtio::pci::other_device_type;

use super::super::devices::{Device, VIRTIO_ID_NET, open_vdpa};
use super::super::error::RequestError;
use super::super::pluggable::{DeviceKind, NicStatus, NicSwapped};
use super::super::queue::{Request, SwapAnswer};
use super::Handle;
use crate::config::VdpaConfig;

impl Handle {
    /// Moves the NIC `id` to another vDPA device while the guest's driver goes on: the same PCI
    /// function, MAC address, control state and rings. The device of `config` is opened and maps all guest RAM
    /// here, on the caller's thread; the old one is closed here. The guest is asked to announce itself.
    ///
    /// Of `config` the device, the number of queues and the doorbells count; the rest stays
    /// as it is, also which device stands by, unless it is this one. With the device that the NIC has nothing changes.
    ///
    /// While both are open all guest RAM is pinned for both, and counts twice against the limit of locked memory.
    /// A device that cannot be suspended (vp_vdpa) is reset, so a frame that it was sending may go out twice.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such NIC, the device cannot be opened, or does not fit
    /// (the error tells why). The NIC keeps its old device, and that works, except after
    /// [`ErrorKind::Lost`](devices::ErrorKind::Lost).
    pub fn swap_nic(&self, id: &str, config: &VdpaConfig) -> Result<NicSwapped, RequestError> {
        let status = match self.nic(id) {
            Some(status) => status,
            None if self.disk(id).is_some() => {
                return Err(RequestError::OtherKind {
                    id: id.to_owned(),
                    wanted: DeviceKind::Nic,
                });
            }
            None => return Err(RequestError::NoSuchDevice(id.to_owned())),
        };
        let config = VdpaConfig {
            id: Some(id.to_owned()),
            mac: status.config.mac,
            rescue: status.config.rescue,
            failover: status.config.failover.clone(),
            ..config.clone()
        };
        if config.released() == status.config {
            return Ok(NicSwapped { status, gap: None });
        }
        let device = self.open_successor(id, &without_itself(config))?;
        let SwapAnswer { outcome, unused } = self.ask(|answer| Request::Swap { device, answer })?;
        // Here, because giving pinned memory back takes long.
        drop(unused);
        outcome
    }

    /// Opens the device to which the NIC `id` is to move, and maps all guest RAM for it.
    fn open_successor(&self, id: &str, config: &VdpaConfig) -> Result<Device, RequestError> {
        let memory = self.0.memory.upgrade().ok_or(RequestError::Ended)?;
        let device = open_vdpa(config, &memory, self.0.ram_end)?;
        if device.config.is_none() {
            // Said here because the machine knows it for a NIC only by that.
            return Err(RequestError::Swap {
                id: id.to_owned(),
                source: other_device_type(VIRTIO_ID_NET, device.backend.device_type()),
            });
        }
        Ok(device)
    }

    /// Moves the NIC with this name and serial number, whose device has failed, to the device of `config`, which is opened
    /// here; what is not used any more is closed here. What came of it the NIC says. Not for the vmm thread.
    pub(in crate::machine) fn fail_over(&self, id: &str, serial: u64, config: &VdpaConfig) {
        let device = self.open_successor(id, config);
        let unused = self.ask_surely(|answer| Request::FailOver {
            id: id.to_owned(),
            serial,
            device,
            answer,
        });
        // Here, because giving pinned memory back takes long. A machine that has ended wants no device.
        drop(unused);
    }

    /// Has the vDPA device at `failover` stand by for the NIC `id`, or none: see [`VdpaConfig::failover`]. It is not
    /// opened before it is needed.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such NIC; the machine is being moved, or held for another program.
    pub fn set_failover(
        &self,
        id: &str,
        failover: Option<PathBuf>,
    ) -> Result<NicStatus, RequestError> {
        let nic = self.ask(|answer| Request::StandBy {
            id: id.to_owned(),
            failover,
            answer,
        })??;
        Ok(nic.of()?)
    }
}

/// A device does not stand by for itself.
pub(super) fn without_itself(mut config: VdpaConfig) -> VdpaConfig {
    if config.failover.as_deref() == Some(Path::new(&*config.shown_path())) {
        config.failover = None;
    }
    config
}
