//! The machine itself: its parts, and the operations that every step uses.
//!
//! Owns the parts, the order in which they are dropped, and the update of the status with each
//! change. It must not know the requests to a machine, nor the order of any step.

use std::sync::Arc;

use devices::legacy::clock::Clock;
use devices::legacy::event::AcpiEvent;
use devices::legacy::power::PowerSignal;
use devices::legacy::serial::Serial;
use devices::pci::{ConfigPorts, PciBus, PciHotplug};

use super::device_manager::DeviceManager;
use super::generation::Generation;
use super::migration::{OutgoingState, Throttle};
use super::passthrough::Passthrough;
use super::queue::Requests;
use super::quiesced::{HandOver, Quiesced};
use super::ring_watch;
use super::signals::{StatisticsHandle, StopHandle};
use super::status_publisher::{Resources, RunState, UpgradeStatus};
use crate::config::VmConfig;
use crate::console::{ConsoleOutput, InputPump};
use crate::event_loop::{EventLoop, Timer};
use crate::kvm::Vm;
use crate::kvm::device_mappings::KvmDeviceMappings;
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
    pub(super) console_output: ConsoleOutput,
    /// For [`Token::Check`](crate::event_loop::Token::Check).
    pub(super) check_timer: Timer,
    /// Whether the rings are sampled: vCPUs run.
    pub(super) watches_rings: bool,
    pub(super) device_manager: DeviceManager,
    pub(super) hotplug: Arc<PciHotplug>,
    pub(super) pci: Arc<PciBus>,
    /// The handlers of vCPU exits; the PCI bus holds only a weak reference to them.
    pub(super) _buses: Buses,
    pub(super) serial: Arc<Serial>,
    pub(super) power: Arc<PowerSignal>,
    pub(super) button: Arc<AcpiEvent>,
    pub(super) generation: Generation,
    pub(super) clock: Arc<Clock>,
    pub(super) config_ports: Arc<ConfigPorts>,
    pub(super) _serial_line: InterruptLine,
    pub(super) mappings: Arc<KvmDeviceMappings>,
    pub(super) msi: KvmMsiVectors,
    pub(super) slots: Arc<MemorySlots>,
    /// For the handles, which keep it only while they open a function.
    pub(super) _passthrough: Arc<Passthrough>,
    pub(super) vm: Vm,
    pub(super) ram: Arc<GuestRam>,
    pub(super) layout: Layout,
    pub(super) config: VmConfig,
    pub(super) stop: StopHandle,
    pub(super) statistics: StatisticsHandle,
    /// Whether the vCPUs ran before, so that their state is no longer that of power-on.
    pub(super) used: bool,
    /// Whether it is powered on and not served yet.
    pub(super) powered: bool,
    /// Set while it is saved for a snapshot or another program.
    pub(super) quiesced: Option<Quiesced>,
    pub(super) upgrade: UpgradeStatus,
    pub(super) outgoing: OutgoingState,
    /// Throttles the vCPUs while the machine is being sent.
    pub(super) throttle: Option<Throttle>,
    /// For the other program.
    pub(super) hand_over: Option<HandOver>,
    /// Last, because its drop reports that all devices are closed.
    pub(super) requests: Requests<Self>,
}

vdpa::opaque_debug! {
    Machine, this =>
    config: this.config,
    layout: this.layout,
    resources: this.resources(),
}

impl Machine {
    /// Returns the configuration with which it was built, without descriptors.
    #[must_use]
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// Returns a handle to request this machine's statistics while it runs.
    #[must_use]
    pub fn statistics_handle(&self) -> StatisticsHandle {
        self.statistics.clone()
    }

    /// Returns the KVM resources that the machine holds now; for leak tests and metrics.
    #[must_use]
    pub fn resources(&self) -> Resources {
        Resources {
            memory_slots: self.slots.count(),
            doorbells: self.mappings.count(),
            mapped_doorbells: self.mappings.mapped_count(),
            msi: self.msi.counts(),
        }
    }

    /// Publishes the power-on and runs the vCPUs, unless the machine is `paused`.
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
            tracing::info!("paused: the vCPUs are parked, devices keep running");
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

    /// Asks the guest to announce all its NICs whose drivers support it.
    pub(super) fn announce_all(&self) {
        for device in self.device_manager.devices() {
            if let Some(device) = self.device_manager.named(&device.id) {
                let _ = device.announce();
            }
        }
    }

    /// Detaches the devices that the guest has ejected.
    pub(super) fn take_ejected(&mut self) {
        let ejected = self.hotplug.take_ejected();
        if self
            .device_manager
            .detach(&self.events, |slot| ejected.contains(&slot))
            > 0
        {
            self.publish();
        }
    }

    /// Completes pending unplugs; the vCPUs are parked. The guest is gone and cannot answer.
    pub(super) fn finish_unplugs(&mut self) {
        self.hotplug.reset();
        // Each device with a pending unplug goes, ejected or not.
        let _ = self.hotplug.take_ejected();
        if self.device_manager.detach(&self.events, |_| true) > 0 {
            self.publish();
        }
    }

    pub(super) fn publish(&self) {
        self.requests.publish_devices(
            self.device_manager.pluggable(),
            self.device_manager.pluggable(),
            self.device_manager.pluggable(),
        );
        self.requests.publish_alarms(self.device_manager.alarms());
    }

    /// Resumes or stops the ring watch, together with the vCPUs.
    pub(super) fn watch_rings(&mut self, on: bool) {
        if on {
            self.device_manager.resume_watch();
            // The first sample is due a whole period after the resume.
            if let Err(error) = ring_watch::arm(&self.check_timer) {
                tracing::warn!(%error, "cannot set the timer of the ring watch");
            }
        }
        self.watches_rings = on;
    }

    /// Samples the rings and publishes changes of alarms.
    pub(super) fn sample_rings(&mut self) {
        if self.device_manager.sample_rings() {
            self.requests.publish_alarms(self.device_manager.alarms());
        }
    }
}
