//! Moves a NIC to another vDPA device while the guest runs: the request and its answer.
//!
//! ```text
//!   caller's thread                        vmm thread
//!   open, map all guest RAM ── Request ──> old device stops, new one continues
//!   close the unused device <── answer ──┘ (or the old one continues)
//! ```
//! It must not know how one device continues the rings of another.

use std::path::{Path, PathBuf};

use devices::virtio::pci::other_device_type;

use super::super::devices::{Device, VIRTIO_ID_NET, open_vdpa};
use super::super::error::RequestError;
use super::super::pluggable::{DeviceKind, NicStatus, NicSwapped};
use super::super::queue::{Request, SwapAnswer};
use super::Handle;
use crate::config::VdpaConfig;

impl Handle {
    /// Moves the NIC `id` to another vDPA device while the guest's driver keeps running: PCI
    /// function, MAC address, control state and rings stay the same. The device of `config` is
    /// opened and maps all guest RAM here, on the caller's thread; the old device is closed here.
    /// The guest is asked to announce itself.
    ///
    /// Only the device, the number of queues and the doorbells of `config` apply; the other
    /// settings stay. That includes the backup device, unless it is this one. Has no effect if the
    /// NIC already has the device.
    ///
    /// While both devices are open, both pin all guest RAM, which counts twice against the limit of
    /// locked memory. A device that cannot be suspended (vp_vdpa) is reset, so a frame that it was
    /// sending may go out twice.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such NIC, the device cannot be opened, or it does not fit; the
    /// error gives the reason. The NIC keeps its old device, which works, except after
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
            mac_lock: status.config.mac_lock,
            standby: status.config.standby,
            iommu: status.config.iommu,
            stall_kick: status.config.stall_kick,
            backup: status.config.backup.clone(),
            ..config.clone()
        };
        if config.released() == status.config {
            return Ok(NicSwapped { status, gap: None });
        }
        let device = self.open_replacement(id, &without_itself(config))?;
        let SwapAnswer { outcome, unused } = self.ask(|answer| Request::Swap { device, answer })?;
        // Dropped here because unpinning memory takes long.
        drop(unused);
        outcome
    }

    /// Opens the device to which the NIC `id` is to move and maps all guest RAM for it.
    fn open_replacement(&self, id: &str, config: &VdpaConfig) -> Result<Device, RequestError> {
        let device = open_vdpa(config, &self.memory()?, self.0.ram_end)?;
        if device.config.is_none() {
            // Checked here because the machine identifies a NIC by its `config` alone.
            return Err(RequestError::Swap {
                id: id.to_owned(),
                source: other_device_type(VIRTIO_ID_NET, device.backend.device_type()),
            });
        }
        Ok(device)
    }

    /// Moves the NIC with this name and serial number, whose device has failed, to the device of
    /// `config`. Opens that device and closes the unused one here. The NIC's status shows the
    /// result. Must not be called on the vmm thread.
    pub(in crate::machine) fn fail_over(&self, id: &str, serial: u64, config: &VdpaConfig) {
        let device = self.open_replacement(id, config);
        let unused = self.ask_surely(|answer| Request::FailOver {
            id: id.to_owned(),
            serial,
            device,
            answer,
        });
        // Dropped here because unpinning memory takes long. A machine that has ended needs no
        // device.
        drop(unused);
    }

    /// Sets or clears the backup device at `backup` for the NIC `id`: see
    /// [`VdpaConfig::backup`]. The backup is opened only when it is needed.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such NIC; the machine is being moved, or is quiesced for
    /// another program.
    pub fn set_backup(&self, id: &str, backup: Option<PathBuf>) -> Result<NicStatus, RequestError> {
        let nic = self.ask(|answer| Request::SetBackup {
            id: id.to_owned(),
            backup,
            answer,
        })??;
        Ok(nic.of()?)
    }
}

/// Removes a backup that is the device itself.
pub(super) fn without_itself(mut config: VdpaConfig) -> VdpaConfig {
    if config.backup.as_deref() == Some(Path::new(&*config.shown_path())) {
        config.backup = None;
    }
    config
}
