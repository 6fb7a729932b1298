//! The saved form of a virtio-pci device, apart from the live types, and what
//! can be wrong with one.
//!
//! A state comes from a file or from the network and is as little to be trusted
//! as a guest: see [`VirtioPciDevice::restore`](super::VirtioPciDevice::restore).

use serde::{Deserialize, Serialize};

pub use super::common::{QueueState, RegistersState};
use crate::pci::{ConfigSpaceError, ConfigSpaceState, MsixError, MsixState};
use crate::virtio::backend::{BackendError, SavedState};

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
    /// What the backend gave; there exactly if the device runs.
    pub backend: Option<SavedState>,
}

/// What is wrong with saved registers.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RegistersError {
    /// No driver and device can have brought the status about.
    #[error("device status {0:#04x} cannot be reached")]
    Status(u8),
    /// Another number of queues.
    #[error("{saved} queues instead of {expected}: give the device as many as it had")]
    Queues {
        /// Queues in the state.
        saved: usize,
        /// Queues of the device.
        expected: usize,
    },
    /// Features that this device does not offer, or VERSION_1 missing.
    #[error(
        "the driver's features lack VERSION_1 or have bits that this device does not offer ({0:#x})"
    )]
    Features(u64),
    /// A queue's registers break the rules for the driver.
    #[error("registers of queue {0} are impossible")]
    Queue(u16),
    /// Another register breaks the rules for the driver.
    #[error("a register holds what no driver can write in that status")]
    Unreachable,
}

/// Why a device could not be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The backend cannot be saved.
    #[error("cannot save the device behind virtio-pci")]
    Backend(#[source] BackendError),
    /// It was saved before and waits for a restore or a reset.
    #[error("the device is saved already")]
    AlreadySaved,
}

/// Why a device could not be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The device runs or is being set up by a driver.
    #[error("the device is in use: only one that is reset or saved can be restored")]
    InUse,
    /// Written by another version.
    #[error("virtio-pci state of version {0}: this build reads version {VIRTIO_PCI_STATE_VERSION}")]
    Version(u32),
    /// Configuration space does not fit.
    #[error("cannot restore PCI configuration space")]
    ConfigSpace(#[source] ConfigSpaceError),
    /// The MSI-X table does not fit.
    #[error("cannot restore MSI-X")]
    Msix(#[source] MsixError),
    /// The registers are not what a guest can have written.
    #[error("cannot restore the virtio registers")]
    Registers(#[source] RegistersError),
    /// ISR bits that do not exist.
    #[error("ISR status {0:#04x} has unknown bits")]
    Isr(u8),
    /// A device that runs needs a backend's state, any other must have none.
    #[error("the state of the backend is missing or not due in device status {0:#04x}")]
    BackendState(u8),
    /// The driver relies on something by now that it was told of another device and that this one has not.
    #[error("the device has not what the guest relies on")]
    Succession(#[source] BackendError),
    /// The backend refuses its state or the features.
    #[error("cannot restore the device behind virtio-pci")]
    Backend(#[source] BackendError),
}
