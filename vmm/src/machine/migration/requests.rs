//! The steps of a migration that the vmm thread carries out on the running machine.
//!
//! It must not know their order, which [`crate::migration`] owns.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use bellhop_api::machine::InFlight;

use super::compat::{self, Document, DocumentDevice};
use super::outgoing_state::OutgoingState;
use super::throttle::{Throttle, Turn};
use crate::event_loop::Token;
use crate::kvm::memory_slots::MemorySlots;
use crate::machine::error::{NotMovable, RequestError};
use crate::machine::parts::Machine;
use crate::machine::program::state_versions;
use crate::machine::quiesced::QuiescedFor;
use crate::machine::saved::SavedMachine;
use crate::machine::status_publisher::RunState;
use crate::memory::GuestRam;

/// The parts that an outgoing machine provides to the sending thread.
pub(super) struct Offer {
    pub(super) document: Document,
    pub(super) ram: Arc<GuestRam>,
    pub(super) slots: Arc<MemorySlots>,
}

/// A machine that is quiesced for sending.
pub(super) struct Stopped {
    pub(super) saved: SavedMachine,
    /// Guest-physical address and length of the areas that devices may have written without
    /// logging.
    pub(super) untracked_writes: Vec<(u64, u64)>,
    pub(super) in_flight: InFlight,
}

impl Machine {
    /// Parks the vCPUs, stops the devices and returns the state.
    pub(super) fn stop_to_leave(&mut self) -> Result<Stopped, RequestError> {
        self.ensure_not_quiesced()?;
        // Parked, so that no vCPU starts a device between this look and its stop; `save` parks them
        // again.
        let running = self.requests.run_state() == RunState::Running;
        if running {
            self.vcpus.pause();
        }
        // Read before the devices stop: stopping first completes commands of their control queues.
        let in_flight = self.device_manager.in_flight();
        let mut untracked_writes = self.device_manager.untracked_writes();
        let saved = self.save(QuiescedFor::Migration);
        if running && saved.is_err() && self.ensure_not_crashed().is_ok() {
            self.vcpus.resume();
        }
        let saved = saved?;
        // The functions are stopped, so this is all that they have written.
        match self.device_manager.written_by_functions() {
            Ok(written) => untracked_writes.extend(written),
            Err(error) => {
                self.unquiesce()?;
                return Err(error);
            }
        }
        Ok(Stopped {
            saved,
            untracked_writes,
            in_flight,
        })
    }

    /// Returns what devices write without a mark, and what functions have written since the last
    /// call: guest-physical addresses and lengths.
    pub(super) fn device_writes(&mut self) -> Result<Vec<(u64, u64)>, RequestError> {
        let mut writes = self.device_manager.untracked_writes();
        writes.extend(self.device_manager.written_by_functions()?);
        Ok(writes)
    }

    /// Resumes a quiesced machine as it was, since GO was not sent.
    pub(super) fn resume_after_stop(&mut self) -> Result<(), RequestError> {
        if !self.outgoing.may_resume(self.is_quiesced_for_migration()) {
            return Err(RequestError::Resolved);
        }
        Ok(self.unquiesce()?)
    }

    /// Resumes a quiesced machine as it was, since its guest is here.
    pub(super) fn stay(&mut self) -> Result<(), RequestError> {
        if !self.outgoing.may_stay(self.is_quiesced_for_migration()) {
            return Err(RequestError::Resolved);
        }
        self.unquiesce()?;
        self.end_migration();
        // The machine may have come from another host, where its network still expects it.
        self.announce_all();
        Ok(())
    }

    /// From now on the guest may run elsewhere, even if the connection fails.
    pub(super) fn commit(&mut self) -> Result<(), RequestError> {
        self.outgoing.commit(self.is_quiesced_for_migration())
    }

    /// Ends the run of a quiesced machine whose guest runs elsewhere.
    pub(super) fn depart(&mut self) -> Result<(), RequestError> {
        self.outgoing.depart(self.is_quiesced_for_migration())
    }

    /// Undoes all preparations for sending; the machine may change again.
    pub(super) fn end_migration(&mut self) {
        self.set_throttle(0);
        if let Err(error) = self.device_manager.log_writes(false) {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "cannot stop recording the writes of a device"
            );
        }
        self.outgoing.end();
    }

    /// Returns the parts of the machine. With `send`, the machine must not change from now on.
    pub(super) fn offer(&mut self, send: bool) -> Result<Offer, RequestError> {
        self.ensure_not_quiesced()?;
        self.ensure_not_migrating()?;
        self.take_ejected();
        let mut config = self.config_now();
        if !send {
            // They leave the guest before it moves.
            config.vfio.retain(|function| function.standby.is_none());
        }
        compat::check_movable(&config)?;
        let moves = |id: &str| config.vfio.iter().any(|function| function.name() == id);
        self.device_manager
            .ensure_functions_movable(|id| !moves(id))?;
        let mut functions = self.device_manager.function_views();
        functions.retain(|function| moves(&function.id));
        if let Some(id) = self.device_manager.unplugging() {
            return Err(NotMovable::Unplugging(id.to_owned()).into());
        }
        let guest_view = self.device_manager.guest_view().into_iter();
        let devices = guest_view.map(|(id, slot, guest_view)| DocumentDevice {
            id,
            slot: slot.number(),
            guest_view,
        });
        let running = self.requests.run_state() == RunState::Running;
        // A vCPU reports its CPUID only while it is parked.
        self.vcpus.pause();
        self.ensure_not_crashed()?;
        let cpuid = self.vcpus.cpuid();
        if running {
            self.vcpus.resume();
        }
        let mut document = Document {
            state_versions: state_versions(),
            config,
            cpuid: cpuid?,
            devices: devices.collect(),
            last_iova: self.device_manager.last_iova(),
            functions,
        };
        document.announce_functions();
        if send {
            self.outgoing.begin()?;
        }
        Ok(Offer {
            document,
            ram: self.ram.clone(),
            slots: self.slots.clone(),
        })
    }

    /// Fails if the machine is being sent: it must stay as it was described.
    pub(in crate::machine) fn ensure_not_migrating(&self) -> Result<(), RequestError> {
        if self.is_quiesced_for_migration() {
            return Err(RequestError::Quiesced);
        }
        if self.outgoing != OutgoingState::No {
            return Err(RequestError::Migrating);
        }
        Ok(())
    }

    /// Fails if the state is on the way to another host, which would miss a change made here.
    pub(in crate::machine) fn ensure_not_in_transit(&self) -> Result<(), RequestError> {
        if self.outgoing == OutgoingState::Sending && self.is_quiesced_for_migration() {
            return Err(RequestError::Quiesced);
        }
        Ok(())
    }

    /// Throttles the vCPUs.
    pub(super) fn set_throttle(&mut self, percent: u8) {
        if percent == 0 {
            if let Some(throttle) = self.throttle.take() {
                if let Err(error) = self.events.remove(throttle.as_raw_fd()) {
                    tracing::warn!(%error, "the throttle's timer was not polled");
                }
                self.run_turn(Turn::Run);
            }
            return;
        }
        if let Some(throttle) = &mut self.throttle {
            throttle.set(percent);
            return;
        }
        let made = Throttle::new(percent).and_then(|throttle| {
            self.events.add(throttle.as_raw_fd(), Token::Throttle)?;
            Ok(throttle)
        });
        match made {
            Ok(throttle) => self.throttle = Some(throttle),
            // The migration then takes longer, or gives up.
            Err(error) => tracing::warn!(%error, "cannot throttle vCPUs"),
        }
    }

    /// Handles an event of the throttle's timer.
    pub(in crate::machine) fn throttle_turn(&mut self) {
        if let Some(throttle) = &mut self.throttle {
            let turn = throttle.next();
            self.run_turn(turn);
        }
    }

    fn run_turn(&self, turn: Turn) {
        // A paused or saved machine is parked for another reason.
        if self.requests.run_state() == RunState::Running {
            match turn {
                Turn::Hold => self.vcpus.pause(),
                // The machine is about to end.
                Turn::Run if self.ensure_not_crashed().is_err() => {}
                Turn::Run => self.vcpus.resume(),
            }
        }
    }
}
