//! The machine itself: its parts, and what every step does with them.
//!
//! Owns the parts, the order in which they are dropped, and what goes to the board with each
//! change of theirs. It must not know what is asked of a machine, nor the order of any step.

use std::fmt;
use std::sync::Arc;

use devices::legacy::clock::Clock;
use devices::legacy::event::AcpiEvent;
use devices::legacy::power::PowerSignal;
use devices::legacy::serial::Serial;
use devices::pci::{ConfigPorts, PciBus, PciHotplug};
use devices::virtio::backend::SharedMemory;

use super::board::{Resources, RunState, UpgradeStatus};
use super::generation::Generation;
use super::held::{HandOver, Held};
use super::inventory::Inventory;
use super::migration::{Leaving, Throttle};
use super::queue::Requests;
use super::ring_watch;
use super::signals::{StatisticsHandle, StopHandle};
use crate::config::VmConfig;
use crate::console::{InputPump, Screen};
use crate::event_loop::{EventLoop, Timer};
use crate::kvm::Vm;
use crate::kvm::doorbells::KvmDoorbells;
use crate::kvm::line::InterruptLine;
use crate::kvm::memory_slots::MemorySlots;
use crate::kvm::msi::KvmMsiVectors;
use crate::layout::Layout;
use crate::memory::GuestRam;
use crate::vcpu::{Buses, Vcpus};

/// A virtual machine; see the [module](super).
pub struct Machine {
    // The order of the fields is the order in which they are dropped.
    pub(super) vcpus: Vcpus,
    pub(super) events: EventLoop,
    pub(super) input: InputPump,
    pub(super) screen: Screen,
    /// `None`: the watch is off.
    pub(super) watch_timer: Option<Timer>,
    pub(super) inventory: Inventory,
    pub(super) hotplug: Arc<PciHotplug>,
    pub(super) pci: Arc<PciBus>,
    /// What the vCPUs' exits go to; the PCI bus knows it only weakly.
    pub(super) _buses: Buses,
    pub(super) serial: Arc<Serial>,
    pub(super) power: Arc<PowerSignal>,
    pub(super) button: Arc<AcpiEvent>,
    pub(super) generation: Generation,
    pub(super) clock: Arc<Clock>,
    pub(super) config_ports: Arc<ConfigPorts>,
    pub(super) _serial_line: InterruptLine,
    pub(super) doorbells: Arc<KvmDoorbells>,
    pub(super) msi: KvmMsiVectors,
    pub(super) slots: Arc<MemorySlots>,
    pub(super) vm: Vm,
    /// For devices that are plugged in later, and to sample their rings.
    pub(super) memory: SharedMemory,
    pub(super) ram: Arc<GuestRam>,
    pub(super) layout: Layout,
    pub(super) config: VmConfig,
    pub(super) _stop: StopHandle,
    pub(super) statistics: StatisticsHandle,
    /// Whether the vCPUs ran before: their state is no longer that of power-on.
    pub(super) used: bool,
    /// Whether it is powered on and nobody serves it yet.
    pub(super) powered: bool,
    /// While it is saved for a snapshot or another program.
    pub(super) held: Option<Held>,
    pub(super) upgrade: UpgradeStatus,
    pub(super) leaving: Leaving,
    /// Holds vCPUs back while it is sent.
    pub(super) throttle: Option<Throttle>,
    /// For the other program.
    pub(super) hand_over: Option<HandOver>,
    /// The last: when it goes, whoever waits is told that all devices are closed.
    pub(super) requests: Requests<Self>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("config", &self.config)
            .field("layout", &self.layout)
            .field("resources", &self.resources())
            .finish_non_exhaustive()
    }
}

impl Machine {
    /// As it was built, without descriptors.
    #[must_use]
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// For asking this machine for its statistics while it runs.
    #[must_use]
    pub fn statistics_handle(&self) -> StatisticsHandle {
        self.statistics.clone()
    }

    /// What the machine holds of KVM now; for leak tests and metrics.
    #[must_use]
    pub fn resources(&self) -> Resources {
        Resources {
            memory_slots: self.slots.count(),
            doorbells: self.doorbells.count(),
            mapped_doorbells: self.doorbells.mapped_count(),
            msi: self.msi.counts(),
        }
    }

    /// Publishes that it was powered on, and lets the vCPUs run unless it is to be `paused`.
    pub(super) fn start(&mut self, paused: bool) {
        self.requests.publish_boot(paused);
        if !paused {
            self.watch_rings(true);
            self.vcpus.resume();
        }
    }

    pub(super) fn pause(&mut self) {
        if self.requests.run_state() == RunState::Running {
            self.vcpus.pause();
            self.watch_rings(false);
            self.requests.publish_run(RunState::Paused);
            tracing::info!("paused: the vCPUs are parked, devices go on");
        }
    }

    pub(super) fn resume(&mut self) {
        if self.requests.run_state() == RunState::Paused {
            self.requests.publish_run(RunState::Running);
            self.watch_rings(true);
            self.vcpus.resume();
            tracing::info!("resumed");
        }
    }

    /// Has the guest announce all its NICs, as far as their drivers can.
    pub(super) fn announce_all(&self) {
        for device in self.inventory.devices() {
            if let Some(device) = self.inventory.named(&device.id) {
                let _ = device.announce();
            }
        }
    }

    /// Lets go what the guest has ejected.
    pub(super) fn take_ejected(&mut self) {
        let ejected = self.hotplug.take_ejected();
        if self
            .inventory
            .detach(&self.events, |slot| ejected.contains(&slot))
            > 0
        {
            self.publish();
        }
    }

    /// With the vCPUs parked: what a guest that is gone was asked for needs no answer.
    pub(super) fn finish_unplugs(&mut self) {
        self.hotplug.reset();
        // Whether ejected or not, each that was asked for goes.
        let _ = self.hotplug.take_ejected();
        if self.inventory.detach(&self.events, |_| true) > 0 {
            self.publish();
        }
    }

    pub(super) fn publish(&self) {
        self.requests
            .publish_devices(self.inventory.pluggable(), self.inventory.pluggable());
        self.requests.publish_alarms(self.inventory.alarms());
    }

    /// Lets the watch of rings go on, or stops it: with the vCPUs.
    pub(super) fn watch_rings(&mut self, on: bool) {
        if let Some(timer) = &self.watch_timer {
            if on {
                self.inventory.resume_watch();
            }
            ring_watch::run(timer, on);
        }
    }

    /// Looks at the rings and publishes what changed about alarms.
    pub(super) fn sample_rings(&mut self) {
        if self.inventory.sample_rings(&self.memory) {
            self.requests.publish_alarms(self.inventory.alarms());
        }
    }
}
