//! A device that the guest sees: an emulated virtio device, or a function of the host.
//!
//! Owns the difference. A function of the host cannot be saved, and the machine knows neither its
//! rings nor what it writes. The host may want it back:
//!
//! ```text
//!   attached ── the kernel asks ──> the guest is asked to eject it ──> detached
//!                                        │ not within 10 s                ^
//!                                        +────────────────────────────────+
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::pci::{PciFunction, Slot};
use devices::vfio::VfioPciDevice;
use devices::virtio::pci::VirtioPciDevice;

use super::super::error::RequestError;
use super::{DeviceManager, Entry};

/// How long the guest may take to eject a function that the host wants back.
const EJECT: Duration = Duration::from_secs(10);

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
    /// Looks for functions that the host wants back. Returns those that the guest must be asked to
    /// eject, and the slots of those that it has not ejected in time.
    pub(in super::super) fn wanted_back(&mut self) -> (Vec<(String, Slot)>, Vec<Slot>) {
        let (mut asked, mut overdue) = (Vec::new(), Vec::new());
        for entry in self.entries.values_mut() {
            let Attached::Vfio(device) = &entry.device else {
                continue;
            };
            let wanted = device.is_wanted_back();
            match entry.wanted_back {
                None if wanted => {
                    entry.wanted_back = Some(Instant::now());
                    asked.push((entry.id.clone(), entry.slot));
                }
                Some(since) if since.elapsed() > EJECT => overdue.push(entry.slot),
                _ => {}
            }
        }
        (asked, overdue)
    }

    /// Fails if the machine has a function of the host.
    pub(in super::super) fn ensure_none_passed_through(&self) -> Result<(), RequestError> {
        let mut entries = self.entries.values();
        match entries.find(|entry| entry.virtio().is_none()) {
            Some(entry) => Err(RequestError::PassedThrough(entry.id.clone())),
            None => Ok(()),
        }
    }
}
