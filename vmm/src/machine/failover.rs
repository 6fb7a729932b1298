//! Moves a NIC whose device has failed (DEVICE_NEEDS_RESET), or that the host removes, to its
//! backup device, once.
//!
//! ```text
//!   vmm thread                                    thread "failover"
//!   the device fails, its driver does not know
//!     ── UnderWay, published ────────────────────> open the backup, map all guest RAM
//!                                                            │
//!     swap, as for `Handle::swap_nic` <── Request::FailOver ─┘
//!       Done, or Failed: the driver is notified   close the unused device
//! ```
//! Concurrent requests take precedence: if the NIC is moved or unplugged, the failover ends and the
//! device opened for it is closed. A NIC whose driver resets the failed device moves all the same:
//! that device has reported that it does not work.
//!
//! Owns these steps, and the swap, which [`Handle::swap_nic`](super::Handle::swap_nic) shares. It
//! must not know how a device reports its failure, nor how another device resumes its state.

use std::thread;

use devices::virtio::backend::Backend;
use vdpa::causes::in_one_line;

use super::device_manager::Exchanged;
use super::devices::Device;
use super::error::RequestError;
use super::parts::Machine;
use super::pluggable::{Failover, FailoverState, NicStatus, NicSwapped};
use super::queue::SwapAnswer;
use crate::Error;
use crate::sandbox::seccomp;

impl Machine {
    /// Starts to move the device with this number to its backup, for this reason.
    pub(super) fn begin_failover(&mut self, number: u16, reason: &str) {
        if self.device_manager.is_failing_over(number) {
            // The driver has reset the failed device, which failed again: the backup being opened
            // serves that failure too.
            return;
        }
        let Some((serial, config)) = self.device_manager.begin_failover(number) else {
            if let Some(device) = self.device_manager.device(number) {
                device.give_up();
            }
            return;
        };
        self.publish();
        let id = config.name();
        tracing::warn!(%id, to = %config.shown_path(), reason, "failover: a NIC moves");
        let allowed = self
            .ensure_not_quiesced()
            .and_then(|()| self.ensure_not_migrating());
        let started = allowed.and_then(|()| {
            let (id, handle) = (id.clone(), self.requests.handle());
            let thread = thread::Builder::new().name("failover".to_owned());
            thread
                .spawn(move || {
                    seccomp::enter(seccomp::Thread::Failover);
                    handle.fail_over(&id, serial, &config);
                })
                .map_err(Error::failed("starting a thread"))
                .map_err(RequestError::from)
        });
        if let Err(error) = started {
            // There is no device to close.
            let _ = self.fail_over(&id, serial, Err(error));
        }
    }

    /// Puts this device behind the NIC of the same name, whose driver keeps running.
    pub(super) fn swap(&mut self, device: Device) -> SwapAnswer {
        if let Err(error) = self
            .ensure_not_quiesced()
            .and_then(|()| self.ensure_not_migrating())
        {
            return SwapAnswer {
                outcome: Err(error),
                unused: device.backend,
            };
        }
        self.take_ejected();
        let id = device.id.clone();
        let Exchanged { gap, unused } = self.device_manager.swap(device, &self.events);
        let outcome = gap.and_then(|gap| {
            self.publish();
            let nic = self.device_manager.pluggable_named(&id);
            let status: NicStatus = nic.ok_or(RequestError::NoSuchDevice(id.clone()))?.of()?;
            let path = status.config.shown_path();
            match gap {
                Some(gap) => tracing::info!(
                    %id,
                    %path,
                    ?gap,
                    "a NIC moved to another vDPA device under its running driver"
                ),
                None => tracing::info!(
                    %id,
                    %path,
                    "a NIC without a driver moved to another vDPA device"
                ),
            }
            Ok(NicSwapped { status, gap })
        });
        if let Err(error) = &outcome {
            tracing::warn!(
                %id,
                error = error as &dyn std::error::Error,
                "a NIC keeps its vDPA device"
            );
        }
        SwapAnswer { outcome, unused }
    }

    /// Replaces the failed device of this NIC by `device`. Returns the unused device, which the
    /// caller closes on another thread.
    pub(super) fn fail_over(
        &mut self,
        id: &str,
        serial: u64,
        device: Result<Device, RequestError>,
    ) -> Option<Box<dyn Backend>> {
        self.take_ejected();
        let Some(failover) = self.device_manager.fails_over(id, serial).cloned() else {
            tracing::info!(%id, "a NIC no longer needs failover");
            return device.ok().map(|device| device.backend);
        };
        let (outcome, unused) = match device {
            Ok(device) => {
                let SwapAnswer { outcome, unused } = self.swap(device);
                (outcome.map(|nic| nic.gap), Some(unused))
            }
            Err(error) => (Err(error), None),
        };
        let state = match outcome {
            Ok(gap) => {
                tracing::warn!(
                    %id,
                    from = %failover.from,
                    to = %failover.to.display(),
                    "failover: a NIC moved to its backup device"
                );
                FailoverState::Done { gap }
            }
            Err(error) => {
                tracing::error!(
                    %id,
                    error = &error as &dyn std::error::Error,
                    "failover: a NIC stays on its failed device"
                );
                FailoverState::Failed(in_one_line(&error))
            }
        };
        self.device_manager
            .end_failover(id, Failover { state, ..failover });
        self.publish();
        unused
    }
}
