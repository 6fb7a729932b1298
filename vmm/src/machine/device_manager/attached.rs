//! A device that the guest sees: an emulated virtio device, or a function of the host.
//!
//! Owns the difference. A function of the host cannot be saved, and the machine knows neither its
//! rings nor what it writes.

use std::sync::Arc;

use devices::pci::PciFunction;
use devices::vfio::VfioPciDevice;
use devices::virtio::pci::VirtioPciDevice;

use super::super::error::RequestError;
use super::{DeviceManager, Entry};

/// See the module.
pub(super) enum Attached {
    Virtio(Arc<VirtioPciDevice>),
    Vfio(Arc<VfioPciDevice>),
}

impl Attached {
    pub(super) fn virtio(&self) -> Option<&VirtioPciDevice> {
        match self {
            Self::Virtio(device) => Some(device),
            Self::Vfio(_) => None,
        }
    }

    pub(super) fn function(&self) -> Arc<dyn PciFunction> {
        match self {
            Self::Virtio(device) => device.clone(),
            Self::Vfio(device) => device.clone(),
        }
    }

    pub(super) fn is_shared(&self) -> bool {
        match self {
            Self::Virtio(device) => Arc::strong_count(device) > 1,
            Self::Vfio(device) => Arc::strong_count(device) > 1,
        }
    }
}

impl Entry {
    pub(super) fn virtio(&self) -> Option<&VirtioPciDevice> {
        self.device.virtio()
    }
}

impl DeviceManager {
    /// Fails if the machine has a function of the host.
    pub(in super::super) fn ensure_none_passed_through(&self) -> Result<(), RequestError> {
        let mut entries = self.entries.values();
        match entries.find(|entry| entry.virtio().is_none()) {
            Some(entry) => Err(RequestError::PassedThrough(entry.id.clone())),
            None => Ok(()),
        }
    }
}
