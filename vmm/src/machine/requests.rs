//! Carries out requests to a running machine, on the vmm thread.
//!
//! It must not know the sender: see `handle.rs`.

use std::path::PathBuf;

use devices::legacy::power::PowerRequest;
use devices::pci::Slot;
use devices::virtio::pci::VirtioPciDevice;
use vdpa::causes::in_one_line;

use super::devices::Device;
use super::error::RequestError;
use super::parts::Machine;
use super::passthrough::Function;
use super::pluggable::{DeviceConfig, DeviceKind, Pluggable};
use super::queue::{Action, Request};
use super::quiesced::QuiescedFor;

/// APIC id of the first vCPU.
const BOOT_PROCESSOR: u8 = 0;

impl Machine {
    /// Carries out the waiting requests, whether or not the caller still waits for the answer.
    pub(super) fn serve_requests(&mut self) {
        for request in self.requests.take() {
            if self.hand_over.is_some() {
                // The saved state is on its way to another program: the caller gets an error.
                drop(request);
                continue;
            }
            let _ = match request {
                Request::Plug { device, answer } => answer.send(self.plug(device)).is_ok(),
                Request::PlugFunction { function, answer } => {
                    answer.send(self.plug_function(*function)).is_ok()
                }
                Request::Functions { answer } => {
                    answer.send(self.device_manager.functions()).is_ok()
                }
                Request::Unplug { id, kind, answer } => answer.send(self.unplug(&id, kind)).is_ok(),
                Request::Swap { device, answer } => answer.send(self.swap(device)).is_ok(),
                Request::FailOver {
                    id,
                    serial,
                    device,
                    answer,
                } => answer.send(self.fail_over(&id, serial, device)).is_ok(),
                Request::SetBackup { id, backup, answer } => {
                    answer.send(self.set_backup(&id, backup)).is_ok()
                }
                Request::Resources { answer } => answer.send(self.resources()).is_ok(),
                Request::Devices { answer } => answer.send(self.device_manager.devices()).is_ok(),
                Request::Statistics { answer } => {
                    let counted = self.vcpus.statistics();
                    answer.send(counted.map_err(RequestError::from)).is_ok()
                }
                Request::Save { answer } => {
                    let allowed = self.ensure_savable();
                    let saved = allowed.and_then(|()| self.save(QuiescedFor::Snapshot));
                    answer.send(saved).is_ok()
                }
                Request::Migration(step) => {
                    step(self);
                    true
                }
                Request::Iommu { answer } => answer.send(self.device_manager.iommu_info()).is_ok(),
                Request::ConsoleLoss { answer } => answer.send(self.console_output.loss()).is_ok(),
                Request::Perform { action, answer } => answer.send(self.act(action)).is_ok(),
            };
        }
    }

    fn act(&mut self, action: Action) -> Result<(), RequestError> {
        match action {
            Action::Announce(id) => self.announce(id)?,
            Action::DirtyLog(on) => {
                self.ensure_not_quiesced()?;
                self.ensure_not_migrating()?;
                self.device_manager.log_writes(on)?;
            }
            Action::PowerButton => {
                self.ensure_not_in_transit()?;
                self.button.raise();
            }
            Action::Reset => {
                self.ensure_not_quiesced()?;
                self.power.request(PowerRequest::Reset);
            }
            Action::Unquiesce if self.quiesced_for() == Some(QuiescedFor::Snapshot) => {
                self.unquiesce()?
            }
            // Other holds have their own end.
            Action::Unquiesce => {}
            Action::HandOver(program) => {
                self.upgrade.error = None;
                let prepared = self.prepare_hand_over(&program);
                self.upgrade.error = prepared.as_ref().err().map(|error| in_one_line(error));
                self.requests.publish_upgrade(&self.upgrade);
                prepared?;
            }
            Action::EnsureFunctionsContinue => {
                self.device_manager.ensure_functions_continue()?;
            }
            Action::Nmi => {
                self.ensure_not_in_transit()?;
                self.vm.send_nmi(BOOT_PROCESSOR)?;
            }
            Action::Pause => {
                self.ensure_not_in_transit()?;
                self.pause_when_resumed();
                self.pause();
            }
            Action::Resume => {
                self.ensure_not_quiesced()?;
                self.resume();
            }
        }
        Ok(())
    }

    /// Sets or clears the backup device of a NIC.
    fn set_backup(
        &mut self,
        id: &str,
        backup: Option<PathBuf>,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        // A destination or another program relies on the earlier description.
        self.ensure_not_quiesced()?;
        self.ensure_not_migrating()?;
        let changed = self.device_manager.set_backup(id, backup);
        self.publish();
        changed
    }

    fn plug(&mut self, device: Device) -> Result<Pluggable<DeviceConfig>, RequestError> {
        let id = device.id.clone();
        self.ensure_pluggable(&id)?;
        let slot = self.device_manager.attach(device, None, &self.events)?;
        self.plugged(id, slot)
    }

    fn plug_function(
        &mut self,
        function: Function,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        // The saved state does not have it.
        self.ensure_not_quiesced()?;
        let id = function.config.name();
        self.ensure_pluggable(&id)?;
        let slot = self
            .device_manager
            .attach_vfio(function, None, &self.events)?;
        self.plugged(id, slot)
    }

    fn ensure_pluggable(&mut self, id: &str) -> Result<(), RequestError> {
        self.ensure_not_migrating()?;
        // A device that the guest has already ejected releases its name and slot.
        self.take_ejected();
        if self.device_manager.has(id) {
            return Err(RequestError::IdInUse(id.to_owned()));
        }
        Ok(())
    }

    fn plugged(&self, id: String, slot: Slot) -> Result<Pluggable<DeviceConfig>, RequestError> {
        self.hotplug.announce(slot);
        self.publish();
        tracing::info!(%id, %slot, "device plugged in");
        self.device_manager
            .pluggable_named(&id)
            .ok_or(RequestError::NoSuchDevice(id))
    }

    fn unplug(
        &mut self,
        id: &str,
        kind: DeviceKind,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        self.ensure_not_migrating()?;
        self.take_ejected();
        let device = self.device_manager.request_unplug(id, kind)?;
        self.hotplug.request_removal(device.address);
        self.publish();
        tracing::info!(%id, slot = %device.address, "asking the guest to eject a device");
        Ok(device)
    }

    fn announce(&self, id: String) -> Result<(), RequestError> {
        match self
            .device_manager
            .named(&id)
            .map(VirtioPciDevice::announce)
        {
            Some(true) => Ok(()),
            Some(false) => Err(RequestError::NoAnnouncement(id)),
            None => Err(RequestError::NoSuchDevice(id)),
        }
    }
}
