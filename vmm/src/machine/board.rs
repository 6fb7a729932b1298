//! The board on which a machine publishes what it is and does.
//!
//! Owns what is published, its generation, and who is told of a change. It must not know what can be asked of a
//! machine, nor who asks.

use std::fmt;
use std::time::Duration;

use bellhop_api::machine::AlarmInfo;
use devices::pci::Slot;
use devices::virtio::pci::DeviceDescription;
use parking_lot::Mutex;

use super::end::End;
use super::pluggable::{DiskStatus, NicStatus};
use super::ring_watch::WatchStatus;
use crate::kvm::msi::MsiCounts;

/// A device of a machine, whether it can go or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Its name.
    pub id: String,
    /// Where the guest sees it.
    pub address: Slot,
    /// What the guest made of it.
    pub description: DeviceDescription,
    /// What the watch of its rings saw last, by queue; empty where nobody watches.
    pub watch: Vec<WatchStatus>,
}

/// What a machine holds of KVM; the same before and after any number of
/// reboots, once the guest has let go of its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Memory slots.
    pub memory_slots: usize,
    /// ioeventfds.
    pub doorbells: usize,
    /// Doorbells of devices that the guest sees; they are among the memory slots.
    pub mapped_doorbells: usize,
    /// Interrupt vectors, routes and irqfds.
    pub msi: MsiCounts,
}

/// What a machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RunState {
    /// Built, or its run has ended; the vCPUs are parked.
    #[default]
    Off,
    /// The vCPUs run.
    Running,
    /// The vCPUs are parked until somebody resumes them. Devices go on: what a
    /// vDPA device or a disk has to do for the guest is done, and interrupts wait.
    Paused,
    /// The machine is gone, with all its devices closed: nothing changes any more.
    Ended,
}

/// What there is to say about programs that went on with a machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UpgradeStatus {
    /// How often another program has.
    pub count: u64,
    /// Why the last that was to did not. Forgotten when another one is asked for.
    pub error: Option<String>,
    /// How long the guest stood still for the last that did: from when its state was saved until its vCPUs ran again. None
    /// of a machine that was paused.
    pub downtime: Option<Duration>,
}

/// A machine at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachineStatus {
    /// Grows with each change.
    pub generation: u64,
    /// What it does.
    pub run: RunState,
    /// How often it was powered on: 1 after the first boot, one more after each reset.
    pub boots: u64,
    /// All its NICs.
    pub nics: Vec<NicStatus>,
    /// What is wrong with queues of its devices.
    pub alarms: Vec<AlarmInfo>,
    /// All its disks.
    pub disks: Vec<DiskStatus>,
    /// Why its run is over; `None` until it is, and again when it runs again.
    pub end: Option<End>,
    /// Which programs went on with it.
    pub upgrade: UpgradeStatus,
}

impl MachineStatus {
    /// Whether a NIC or a disk has this name.
    pub(super) fn has(&self, id: &str) -> bool {
        self.nics.iter().any(|nic| nic.id == id) || self.disks.iter().any(|disk| disk.id == id)
    }
}

/// Called with each new status; see [`Handle::on_change`](super::Handle::on_change).
pub(super) type Listener = Box<dyn Fn(&MachineStatus) + Send + Sync>;

/// What the machine publishes.
#[derive(Default)]
pub(super) struct Board {
    pub(super) status: Mutex<MachineStatus>,
    pub(super) listeners: Mutex<Vec<Listener>>,
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Board")
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl Board {
    pub(super) fn update(&self, change: impl FnOnce(&mut MachineStatus)) {
        let mut current = self.status.lock();
        let before = current.clone();
        change(&mut current);
        if *current != before {
            current.generation = before.generation.wrapping_add(1);
            // With the status locked, so that they see all changes in their order.
            for listener in self.listeners.lock().iter() {
                listener(&current);
            }
        }
    }
}
