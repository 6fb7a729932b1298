//! Devices that the host takes back: deleted, unbound from their driver, or gone with their
//! function.
//!
//! The kernel waits until the VMM has closed such a device, and notifies no process before. So the
//! vmm thread looks once a second.
//!
//! ```text
//!   removed ── has a backup, which was not tried ──> failover (`failover.rs`): the removed device
//!      │                                             still works, and hands over its state
//!      │                                                  │
//!      │ no backup                                        │ fails: at the next look
//!      v                                                  v
//!   closed: link down, DEVICE_NEEDS_RESET ──> the guest is asked to eject it ──> unplugged
//! ```
//! A machine that is saved or sent cannot change its devices. Its removed devices are closed all
//! the same, because the host waits. The guest is asked to eject them afterwards.
//!
//! For a function by VFIO the kernel does ask, by an eventfd. The guest ejects it, or it is removed
//! after 10 s (`device_manager/attached.rs`). Another eventfd reports its errors.
//!
//! Owns these steps. It must not know how a device is recognized as removed.

use std::thread;

use devices::pci::Slot;

use super::error::RequestError;
use super::parts::Machine;
use super::quiesced::Quiesced;

impl Machine {
    /// Looks for devices that the host removes, and closes them.
    pub(super) fn check_removals(&mut self) {
        self.check_functions();
        for number in self.device_manager.removed() {
            if self.device_manager.is_failing_over(number) {
                continue;
            }
            if self.device_manager.has_untried_backup(number) {
                self.begin_failover(number, "the host removes the device");
            } else {
                self.close_removed(number);
            }
        }
        if self.ensure_not_quiesced().is_err() || self.ensure_not_migrating().is_err() {
            return;
        }
        for (id, slot) in self.device_manager.closed() {
            if !self.hotplug.is_asked(slot) {
                self.hotplug.request_removal(slot);
                tracing::info!(%id, %slot, "asking the guest to eject a removed device");
            }
        }
    }

    /// Fails while the machine has a device that the host removes: another program could not open
    /// it.
    pub(super) fn ensure_none_removed(&mut self) -> Result<(), RequestError> {
        self.check_removals();
        match self.device_manager.leaving() {
            Some(id) => Err(RequestError::Removed(id.to_owned())),
            None => Ok(()),
        }
    }

    /// Gives back functions that the host wants, and publishes errors of functions. The host waits,
    /// so a function also leaves a machine that is being sent. The destination then refuses the
    /// machine, or has the function's whole state. A machine that arrives keeps its functions until
    /// it runs.
    pub(super) fn check_functions(&mut self) {
        let errors = self.device_manager.check_errors();
        let (asked, overdue) = self.device_manager.wanted_back();
        if errors || !asked.is_empty() {
            self.publish();
        }
        for (id, slot) in asked {
            tracing::warn!(%id, %slot, "the host wants the VFIO device back: the guest ejects it");
            self.hotplug.request_removal(slot);
        }
        let waits = self.quiesced.as_ref().is_some_and(Quiesced::has_states);
        if overdue.is_empty() || waits {
            return;
        }
        tracing::error!(slots = ?overdue, "the guest does not eject VFIO devices: removing them");
        let is_overdue = |slot: Slot| overdue.contains(&slot);
        if self.device_manager.detach(&self.events, is_overdue) > 0 {
            self.publish();
        }
        for slot in overdue {
            self.hotplug.forget(slot);
        }
    }

    fn close_removed(&mut self, number: u16) {
        let Some((id, closed)) = self.device_manager.close_removed(number) else {
            return;
        };
        tracing::error!(
            %id,
            "the host has removed the device: its driver sees no link and needs a reset"
        );
        self.publish();
        // Unpinning memory takes long. Without a thread, it is dropped here.
        let thread = thread::Builder::new().name("close-device".to_owned());
        if let Err(error) = thread.spawn(move || drop(closed)) {
            tracing::warn!(%id, %error, "no thread to close a removed device");
        }
    }
}
