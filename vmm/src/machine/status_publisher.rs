//! Publishes the status of a machine.
//!
//! Owns the status, its generation and its listeners. It must not know the requests to a machine,
//! nor their senders.

use std::time::Duration;

use bellhop_api::machine::{AlarmInfo, WatchInfo};
use devices::pci::Slot;
use devices::virtio::pci::DeviceDescription;
use parking_lot::Mutex;

use super::end::End;
use super::pluggable::{DiskStatus, NicStatus, VfioStatus};
use crate::kvm::msi::MsiCounts;

/// A device of a machine, removable or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Its name.
    pub id: String,
    /// Its PCI slot.
    pub address: Slot,
    /// The state to which the guest has set it.
    pub description: DeviceDescription,
    /// The last sample of the ring watch, by queue; empty without a watch.
    pub watch: Vec<WatchInfo>,
}

/// The KVM resources of a machine. They are the same before and after any number of reboots, once
/// the guest has released its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Memory slots.
    pub memory_slots: usize,
    /// ioeventfds.
    pub doorbells: usize,
    /// Doorbells of devices that are mapped into the guest; they are among the memory slots.
    pub mapped_doorbells: usize,
    /// Interrupt vectors, routes and irqfds.
    pub msi: MsiCounts,
}

/// The run state of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RunState {
    /// Built, or its run has ended; the vCPUs are parked.
    #[default]
    Off,
    /// The vCPUs run.
    Running,
    /// The vCPUs are parked until they are resumed. Devices keep working: vDPA devices and disks
    /// complete the guest's requests, and interrupts wait.
    Paused,
    /// The machine is gone and all its devices are closed; nothing changes any more.
    Ended,
}

/// The upgrades of a machine to other programs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UpgradeStatus {
    /// How many upgrades succeeded.
    pub count: u64,
    /// Why the last upgrade failed. Cleared when another one is requested.
    pub error: Option<String>,
    /// How long the last successful upgrade stopped the guest: from the save of its state until its
    /// vCPUs ran again. None for a machine that was paused.
    pub downtime: Option<Duration>,
}

/// The status of a machine at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachineStatus {
    /// Grows with each change.
    pub generation: u64,
    /// The run state.
    pub run: RunState,
    /// How often it was powered on: 1 after the first boot, plus 1 for each reset.
    pub boots: u64,
    /// All its NICs.
    pub nics: Vec<NicStatus>,
    /// The alarms of its devices' queues.
    pub alarms: Vec<AlarmInfo>,
    /// All its disks.
    pub disks: Vec<DiskStatus>,
    /// All functions of the host that it has.
    pub vfio: Vec<VfioStatus>,
    /// Why its run ended; `None` until then, and while it runs again.
    pub end: Option<End>,
    /// Its upgrades.
    pub upgrade: UpgradeStatus,
}

impl MachineStatus {
    /// Whether a pluggable device has this name.
    pub(super) fn has(&self, id: &str) -> bool {
        let nics = self.nics.iter().map(|nic| &nic.id);
        let disks = self.disks.iter().map(|disk| &disk.id);
        let mut all = nics
            .chain(disks)
            .chain(self.vfio.iter().map(|vfio| &vfio.id));
        all.any(|other| other == id)
    }
}

/// Called with each new status; see [`Handle::on_change`](super::Handle::on_change).
pub(super) type Listener = Box<dyn Fn(&MachineStatus) + Send + Sync>;

/// The published status and its listeners.
#[derive(Default)]
pub(super) struct StatusPublisher {
    pub(super) status: Mutex<MachineStatus>,
    pub(super) listeners: Mutex<Vec<Listener>>,
}

vdpa::opaque_debug!(StatusPublisher, this => status: this.status);

impl StatusPublisher {
    pub(super) fn update(&self, change: impl FnOnce(&mut MachineStatus)) {
        let mut current = self.status.lock();
        let before = current.clone();
        change(&mut current);
        if *current != before {
            current.generation = before.generation.wrapping_add(1);
            // Called with the status locked, so that listeners see all changes in order.
            for listener in self.listeners.lock().iter() {
                listener(&current);
            }
        }
    }
}
