//! Why a machine could not be built or run.

use std::io;

use devices::bus::BusError;
use devices::pci::{PciError, WindowError};
use devices::virtio::block::BlockError;
use devices::virtio::block::disk::DiskError;
use devices::virtio::pci::VirtioPciError;
use devices::virtio::vdpa::VdpaError;

use super::snapshot::SnapshotError;
use crate::acpi::AcpiError;
use crate::boot::BootError;
use crate::config::CpuAffinityError;
use crate::host::PlacementError;
use crate::kvm::KvmError;
use crate::kvm::cpuid::baseline::BaselineError;
use crate::kvm::memory_slots::MemorySlotError;
use crate::layout::LayoutError;
use crate::memory::MemoryError;
use crate::migration::MigrationError;
use crate::vcpu::VcpuError;

/// Why a machine could not be built or run. Nothing is left behind: dropping
/// what was built undoes it.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The host's processor is none that the guest may be shown.
    #[error(transparent)]
    Baseline(#[from] BaselineError),
    /// The memory does not fit into the address space.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// vCPUs and lists of CPUs do not go together.
    #[error(transparent)]
    Affinity(#[from] CpuAffinityError),
    /// The host has no such place for vCPUs or memory.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// Guest RAM cannot be made.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Guest RAM cannot be shown to the guest.
    #[error("cannot give the guest its memory")]
    MemorySlot(#[from] MemorySlotError),
    /// The vCPUs cannot be made or steered.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// The kernel or the initramfs cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The ACPI tables cannot be written.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// Two devices want the same addresses: a mistake in the machine's layout.
    #[error("cannot place a device of the machine")]
    Bus(#[from] BusError),
    /// The range for PCI BARs is unusable: a mistake in the machine's layout.
    #[error("cannot lay out PCI memory")]
    PciWindow(#[from] WindowError),
    /// A disk's image cannot be opened.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A disk cannot be made of its image.
    #[error("disk {id}")]
    Block {
        /// The disk's name.
        id: String,
        /// Why.
        #[source]
        source: BlockError,
    },
    /// A device cannot be put behind virtio-pci.
    #[error("device {id} cannot be shown to the guest")]
    Virtio {
        /// The device's name.
        id: String,
        /// Why.
        #[source]
        source: VirtioPciError,
    },
    /// A device cannot be plugged in.
    #[error("device {id} cannot be plugged in")]
    Pci {
        /// The device's name.
        id: String,
        /// Why.
        #[source]
        source: PciError,
    },
    /// A vDPA device cannot be used.
    #[error("vDPA device {id} cannot be used")]
    Vdpa {
        /// The device's name.
        id: String,
        /// Why.
        #[source]
        source: VdpaError,
    },
    /// A device that is named by the number of a descriptor that nobody has taken.
    #[error(
        "vDPA device {id}: there is no descriptor fd={number}; it goes with a request, or is inherited"
    )]
    Descriptor {
        /// The device's name.
        id: String,
        /// The number.
        number: u32,
    },
    /// Two devices have one name.
    #[error("two devices are called {0}; give one of them another id")]
    DuplicateId(String),
    /// More devices than the event loop can tell apart.
    #[error("{0} devices are too many")]
    TooManyDevices(usize),
    /// A snapshot cannot be restored.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A machine that was waited for did not come.
    #[error("no machine has come")]
    NotArrived(#[source] Box<MigrationError>),
    /// Something of the host failed.
    #[error("{what} failed")]
    Host {
        /// What was being done.
        what: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

impl MachineError {
    /// For `map_err` after a system call.
    pub(super) fn host(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Host { what, source }
    }
}
