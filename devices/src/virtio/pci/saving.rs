//! Saves a virtio-pci device, and restores a saved one.
//!
//! Owns the checks before a state is accepted. The state comes from a file or from another host, so
//! everything that a guest could see must be possible. It must not know where states are kept.

use std::time::Duration;

use super::common::{CommonConfig, offered};
use super::layout::MAX_DEVICE_CONFIG;
use super::state::{VIRTIO_PCI_STATE_VERSION, VirtioPciState};
use super::swap::identity;
use super::transport::{ISR_CONFIG_CHANGED, Phase, Transport, relied_on};
use crate::Error;
use crate::pci::{ConfigSpace, ConfigSpaceState, MSIX_CONTROL_OFFSET};
use crate::virtio::backend::SavedState;
use crate::virtio::status::{DRIVER_OK, DeviceStatus, FEATURES_OK, NEEDS_RESET};

const BEHIND: &str = "cannot restore the device behind virtio-pci";

/// How long a save waits for the end of a reset, while the vCPUs are parked.
const RESET_TIME: Duration = Duration::from_secs(10);

/// The error for a device whose reset does not end.
fn hung() -> Error {
    Error::other("the device's storage does not answer: try again when it does")
}

/// Whether a device may have worked on the rings since they were saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// No device has.
    First,
    /// A device may have: an earlier restore of this state failed.
    Again,
}

impl Transport {
    pub(super) fn save(&mut self) -> Result<VirtioPciState, Error> {
        // A failed device cannot wait for its backup.
        self.give_up();
        if !self.await_reset(RESET_TIME) {
            return Err(hung());
        }
        let backend = match self.phase {
            Phase::Active => self.save_backend()?,
            Phase::Saved => return Err(Error::other("the device is saved already")),
            Phase::Broken => {
                // Its driver has to reset it anyway; until then it must not run.
                self.backend.reset();
                self.await_stop()?;
                None
            }
            Phase::Inactive | Phase::Resetting | Phase::Agreed | Phase::Failing => None,
        };
        if backend.is_some() {
            self.enter(Phase::Saved);
        }
        Ok(VirtioPciState {
            version: VIRTIO_PCI_STATE_VERSION,
            config_space: self.config_space.save(),
            msix: self.msix.save(),
            registers: self.common.save(),
            isr: self.isr,
            backend,
        })
    }

    /// Returns the running backend's state; `None` if the backend is broken now.
    fn save_backend(&mut self) -> Result<Option<SavedState>, Error> {
        // A failed save may leave queues without a doorbell.
        self.doorbells.stop();
        match self.backend.save() {
            Ok(state) => Ok(Some(state)),
            Err(error) if error.is_broken_ring() => {
                self.ring_broke(&error);
                self.await_stop()?;
                Ok(None)
            }
            Err(error) => {
                self.show_doorbells();
                Err(Error::other("cannot save the device behind virtio-pci").because(error))
            }
        }
    }

    /// Waits until a broken backend no longer accesses guest memory.
    fn await_stop(&mut self) -> Result<(), Error> {
        let stopped = self.backend.await_reset(RESET_TIME);
        if stopped { Ok(()) } else { Err(hung()) }
    }

    pub(super) fn check(&mut self, state: &VirtioPciState) -> Result<(), Error> {
        self.checked(state).map(drop)
    }

    /// Returns the registers for a state, if everything that a guest could see is possible.
    fn checked(
        &mut self,
        state: &VirtioPciState,
    ) -> Result<(ConfigSpace, CommonConfig, Phase), Error> {
        let untouched = self.phase == Phase::Inactive
            && self.common.status().bits() & (FEATURES_OK | NEEDS_RESET) == 0;
        if !untouched && self.phase != Phase::Saved {
            return Err(Error::other(
                "the device is in use: reset or save it before a restore",
            ));
        }
        if state.version != VIRTIO_PCI_STATE_VERSION {
            return Err(Error::other(format!(
                "virtio-pci state of version {}: this build reads version \
                 {VIRTIO_PCI_STATE_VERSION}",
                state.version
            )));
        }
        if state.isr & !ISR_CONFIG_CHANGED != 0 {
            return Err(Error::other(format!(
                "ISR status {:#04x} has unknown bits",
                state.isr
            )));
        }
        let config_space = self
            .config_space_of(&state.config_space)
            .restored(&state.config_space)
            .map_err(Error::context("cannot restore PCI configuration space"))?;
        let msix = self.msix.check(&state.msix);
        msix.map_err(Error::context("cannot restore MSI-X"))?;
        // The size of a queue can depend on the features.
        let registers = &state.registers;
        let has_smaller = registers
            .queues
            .iter()
            .zip(self.common.max_sizes())
            .any(|(queue, max)| queue.addresses.size > max);
        if untouched && has_smaller {
            // The next driver accepts all.
            let features = match registers.status & FEATURES_OK {
                0 => self.common.offer(),
                _ => registers.driver_features,
            };
            self.take_sizes(features).map_err(Error::context(BEHIND))?;
        }
        let mut common = self.common.clone();
        let offer = self.backend.features_for(state.registers.driver_features);
        common.set_offer(common.offer() | offered(offer));
        let common = common
            .restored(&state.registers)
            .map_err(Error::context("cannot restore the virtio registers"))?;
        let phase = phase_of(common.status());
        if (phase == Phase::Active) != state.backend.is_some() {
            return Err(Error::other(format!(
                "the state of the backend is missing or unexpected in device status {:#04x}",
                common.status().bits()
            )));
        }
        if let Some(hardware) = self.backend.hardware() {
            hardware
                .check_adopted(relied_on(&common, phase))
                .map_err(Error::context(
                    "the device lacks properties that the guest relies on",
                ))?;
        }
        if let Some(backend) = &state.backend {
            self.backend
                .check_state(backend)
                .map_err(Error::context(BEHIND))?;
        }
        Ok((config_space, common, phase))
    }

    /// Returns the configuration space with the length of device configuration that the guest has
    /// seen. A device with an identity compares the fields itself.
    fn config_space_of(&mut self, state: &ConfigSpaceState) -> ConfigSpace {
        let mut config_space = self.config_space.clone();
        if let Some(offset) = self.capabilities.config_len
            && identity(&mut *self.backend).is_ok()
            && let Some(seen) = state.bytes.get(usize::from(offset)..)
            && let Some(seen) = seen.first_chunk()
            && (1..=MAX_DEVICE_CONFIG).contains(&u32::from_le_bytes(*seen))
        {
            config_space.set(offset, seen);
        }
        config_space
    }

    pub(super) fn restore(
        &mut self,
        state: &VirtioPciState,
        attempt: Attempt,
    ) -> Result<(), Error> {
        let (config_space, common, phase) = self.checked(state)?;
        self.start_backend(phase, &common, state, attempt)?;

        self.config_space = config_space;
        self.common = common;
        self.isr = state.isr;
        self.enter(phase);
        let control = u16::from(self.capabilities.msix) + MSIX_CONTROL_OFFSET;
        let control = self.config_space.read_u16(control);
        let restored = self.msix.restore(&state.msix, control);
        restored.map_err(Error::context("cannot restore MSI-X"))?;
        self.spurious_notify_all();
        Ok(())
    }

    fn start_backend(
        &mut self,
        phase: Phase,
        common: &CommonConfig,
        state: &VirtioPciState,
        attempt: Attempt,
    ) -> Result<(), Error> {
        let activation = self.activation(common);
        let started = match (phase, &state.backend) {
            (Phase::Active, Some(backend)) => match (attempt, self.backend.hardware()) {
                (Attempt::Again, Some(hardware)) => hardware.roll_back(backend, activation),
                _ => self.backend.restore(backend, activation),
            },
            (Phase::Agreed, _) => self.backend.negotiate(activation.features),
            _ => Ok(()),
        };
        if let Err(error) = started {
            self.backend.reset();
            if self.phase == Phase::Saved {
                // The guest believes that the device runs, but it does not.
                self.needs_reset();
            }
            return Err(Error::other(BEHIND).because(error));
        }
        Ok(())
    }
}

/// Returns the phase of the backend for a status register.
fn phase_of(status: DeviceStatus) -> Phase {
    if status.has(NEEDS_RESET) {
        Phase::Broken
    } else if status.has(DRIVER_OK) {
        Phase::Active
    } else if status.has(FEATURES_OK) {
        Phase::Agreed
    } else {
        Phase::Inactive
    }
}
