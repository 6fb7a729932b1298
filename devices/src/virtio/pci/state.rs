//! The saved form of a virtio-pci device, apart from the live types.
//!
//! A state comes from a file or from the network and is trusted as little as a guest: see
//! [`VirtioPciDevice::restore`](super::VirtioPciDevice::restore).

use serde::{Deserialize, Serialize};

pub use super::common::{QueueState, RegistersState};
use crate::pci::{ConfigSpaceState, MsixState};
use crate::virtio::backend::SavedState;

/// Version of [`VirtioPciState`]'s layout.
pub const VIRTIO_PCI_STATE_VERSION: u32 = 3;

/// A saved virtio-pci device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtioPciState {
    /// [`VIRTIO_PCI_STATE_VERSION`] of the writer.
    pub version: u32,
    /// PCI configuration space: identity, command, BAR address, Message Control.
    pub config_space: ConfigSpaceState,
    /// The MSI-X table.
    pub msix: MsixState,
    /// The common configuration.
    pub registers: RegistersState,
    /// ISR status.
    pub isr: u8,
    /// The backend's state; present exactly if the device runs.
    pub backend: Option<SavedState>,
}
