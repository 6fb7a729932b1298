//! The vmm thread's side of what is asked of a running machine: each request is
//! carried out here.
//!
//! It must not know who asks: see `handle.rs`.

use std::path::PathBuf;

use devices::legacy::power::PowerRequest;
use devices::virtio::pci::VirtioPciDevice;
use vdpa::causes::in_one_line;

use super::Machine;
use super::board::RunState;
use super::handle::{Action, NicSwapped, Request, RequestError, SwapAnswer};
use super::inventory::{Device, Exchanged};
use super::pluggable::{DeviceConfig, DeviceKind, NicStatus, Pluggable};
use super::ring_watch;
use super::saving::HeldFor;

/// APIC id of the first vCPU.
const BOOT_PROCESSOR: u8 = 0;

impl Machine {
    /// Carries out what waits. Nobody may be waiting for an answer any more; that is
    /// no reason not to do it.
    pub(super) fn serve_requests(&mut self) {
        for request in self.requests.take() {
            if self.hand_over.is_some() {
                // What is saved is on its way to another program: who asked hears that nothing came of it.
                drop(request);
                continue;
            }
            match request {
                Request::Plug { device, answer } => {
                    let _ = answer.send(self.plug(device));
                }
                Request::Unplug { id, kind, answer } => {
                    let _ = answer.send(self.unplug(&id, kind));
                }
                Request::Swap { device, answer } => {
                    let _ = answer.send(self.swap(device));
                }
                Request::FailOver {
                    id,
                    serial,
                    device,
                    answer,
                } => {
                    let _ = answer.send(self.fail_over(&id, serial, device));
                }
                Request::StandBy {
                    id,
                    failover,
                    answer,
                } => {
                    let _ = answer.send(self.stand_by(&id, failover));
                }
                Request::Resources { answer } => {
                    let _ = answer.send(self.resources());
                }
                Request::Devices { answer } => {
                    let _ = answer.send(self.inventory.devices());
                }
                Request::Statistics { answer } => {
                    let counted = self.vcpus.statistics();
                    let _ = answer.send(counted.map_err(RequestError::from));
                }
                Request::Save { answer } => {
                    let allowed = self.unless_migrating();
                    let _ = answer.send(allowed.and_then(|()| self.save(HeldFor::Snapshot)));
                }
                Request::Migration(step) => step(self),
                Request::ConsoleLoss { answer } => {
                    let _ = answer.send(self.screen.loss());
                }
                Request::Act { action, answer } => {
                    let _ = answer.send(self.act(action));
                }
            }
        }
    }

    fn act(&mut self, action: Action) -> Result<(), RequestError> {
        match action {
            Action::Announce(id) => self.announce(id)?,
            Action::DirtyLog(on) => {
                self.unless_held()?;
                self.unless_migrating()?;
                self.inventory.log_writes(on)?;
            }
            Action::PowerButton => {
                self.unless_on_the_way()?;
                self.button.raise();
            }
            Action::Reset => {
                self.unless_held()?;
                self.power.request(PowerRequest::Reset);
            }
            Action::GoOn if self.is_held_for_snapshot() => self.go_on()?,
            // Whatever else it stands still for is for others to end.
            Action::GoOn => {}
            Action::HandOver(program) => {
                self.upgrade.error = None;
                let prepared = self.prepare_hand_over(&program);
                self.upgrade.error = prepared.as_ref().err().map(|error| in_one_line(error));
                self.requests.publish_upgrade(&self.upgrade);
                prepared?;
            }
            Action::Nmi => {
                self.unless_on_the_way()?;
                self.vm.send_nmi(BOOT_PROCESSOR)?;
            }
            Action::Pause => {
                self.unless_on_the_way()?;
                self.pause_when_it_goes_on();
                self.pause();
            }
            Action::Resume => {
                self.unless_held()?;
                self.resume();
            }
        }
        Ok(())
    }

    /// Has a device stand by for a NIC, or none.
    fn stand_by(
        &mut self,
        id: &str,
        failover: Option<PathBuf>,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        // A destination, or another program, goes by what it was told before.
        self.unless_held()?;
        self.unless_migrating()?;
        let changed = self.inventory.stand_by(id, failover);
        self.publish();
        changed
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

    fn plug(&mut self, device: Device) -> Result<Pluggable<DeviceConfig>, RequestError> {
        self.unless_migrating()?;
        // What the guest has ejected already gives its name and slot free.
        self.take_ejected();
        let id = device.id.clone();
        if self.inventory.named(&id).is_some() {
            return Err(RequestError::IdInUse(id));
        }
        let slot = self.inventory.attach(device, None, &self.events)?;
        self.hotplug.announce(slot);
        self.publish();
        tracing::info!(%id, %slot, "device plugged in");
        self.inventory
            .pluggable_named(&id)
            .ok_or(RequestError::NoSuchDevice(id))
    }

    fn unplug(
        &mut self,
        id: &str,
        kind: DeviceKind,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        self.unless_migrating()?;
        self.take_ejected();
        let device = self.inventory.request_unplug(id, kind)?;
        self.hotplug.request_removal(device.address);
        self.publish();
        tracing::info!(%id, slot = %device.address, "the guest is asked to eject a device");
        Ok(device)
    }

    /// Has the guest announce all its NICs, as far as their drivers can.
    pub(super) fn announce_all(&self) {
        for device in self.inventory.devices() {
            if let Some(device) = self.inventory.named(&device.id) {
                let _ = device.announce();
            }
        }
    }

    pub(super) fn swap(&mut self, device: Device) -> SwapAnswer {
        if let Err(error) = self.unless_held().and_then(|()| self.unless_migrating()) {
            return SwapAnswer {
                outcome: Err(error),
                unused: device.backend,
            };
        }
        self.take_ejected();
        let id = device.id.clone();
        let Exchanged { gap, unused } = self.inventory.swap(device, &self.events);
        let outcome = gap.and_then(|gap| {
            self.publish();
            let nic = self.inventory.pluggable_named(&id);
            let status: NicStatus = nic.ok_or(RequestError::NoSuchDevice(id.clone()))?.of()?;
            let path = status.config.shown_path();
            match gap {
                Some(gap) => tracing::info!(%id, %path, ?gap, "a NIC has another vDPA device, its driver goes on"),
                None => tracing::info!(%id, %path, "a NIC without a driver has another vDPA device"),
            }
            Ok(NicSwapped { status, gap })
        });
        if let Err(error) = &outcome {
            tracing::warn!(%id, error = error as &dyn std::error::Error, "a NIC keeps its vDPA device");
        }
        SwapAnswer { outcome, unused }
    }

    fn announce(&self, id: String) -> Result<(), RequestError> {
        match self.inventory.named(&id).map(VirtioPciDevice::announce) {
            Some(true) => Ok(()),
            Some(false) => Err(RequestError::NoAnnouncement(id)),
            None => Err(RequestError::NoSuchDevice(id)),
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
