//! A NIC whose device has failed (DEVICE_NEEDS_RESET) moves to the one that stands by, once.
//!
//! ```text
//!   vmm thread                                    thread "failover"
//!   the device fails, its driver does not know
//!     ── UnderWay, on the board ────────────────> open the other one, map all guest RAM
//!                                                            │
//!     swap, as for `Handle::swap_nic` <── Request::FailOver ─┘
//!       Done, or Failed: the driver is told        close what is not used
//! ```
//! What others do meanwhile counts: a NIC that is moved or unplugged is not on its way any more, and what is opened for it
//! is closed. One whose driver resets it moves all the same: it was told by its device that it is of no use.
//!
//! Owns these steps and the words for what came of them. It must not know how a device says that it has failed, nor how another
//! one goes on where it stopped.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use devices::virtio::backend::Backend;
use vdpa::causes::in_one_line;

use super::handle::SwapAnswer;
use super::inventory::Device;
use super::{Machine, RequestError};
use crate::Error;

/// What came of a NIC's failover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    /// The device that has failed, for people.
    pub from: String,
    /// The vhost-vdpa character device that was to take its place.
    pub to: PathBuf,
    /// How far it came.
    pub state: FailoverState,
}

/// How far a failover is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailoverState {
    /// The other device is being opened. The driver has not been told that its own has failed.
    UnderWay,
    /// The NIC is on the other device.
    Done {
        /// From the swap's beginning to its end, which is not when the device failed; `None` if no driver was using the NIC
        /// by then, or its driver had been told.
        gap: Option<Duration>,
    },
    /// The NIC is on the device that has failed, and its driver was told; with the reason and its causes.
    Failed(String),
}

impl Machine {
    /// The device with this number has failed: the one that stands by is to take its place.
    pub(super) fn begin_failover(&mut self, number: u16) {
        if self.inventory.is_failing_over(number) {
            // Its driver has reset the failed device meanwhile, which failed again: what is being opened serves for that, too.
            return;
        }
        let Some((serial, config)) = self.inventory.begin_failover(number) else {
            if let Some(device) = self.inventory.device(number) {
                device.give_up();
            }
            return;
        };
        self.publish();
        let id = config.name();
        tracing::warn!(%id, to = %config.shown_path(), "the device of a NIC has failed: failover");
        let allowed = self.unless_held().and_then(|()| self.unless_migrating());
        let started = allowed.and_then(|()| {
            let (id, handle) = (id.clone(), self.requests.handle());
            let thread = thread::Builder::new().name("failover".to_owned());
            thread
                .spawn(move || handle.fail_over(&id, serial, &config))
                .map_err(Error::failed("starting a thread"))
                .map_err(RequestError::from)
        });
        if let Err(error) = started {
            // There is no device that would have to be closed.
            let _ = self.fail_over(&id, serial, Err(error));
        }
    }

    /// Puts `device` in the place of the one of this NIC that has failed. Gives back what is not used any more, and to be
    /// closed elsewhere.
    pub(super) fn fail_over(
        &mut self,
        id: &str,
        serial: u64,
        device: Result<Device, RequestError>,
    ) -> Option<Box<dyn Backend>> {
        self.take_ejected();
        let Some(failover) = self.inventory.fails_over(id, serial).cloned() else {
            tracing::info!(%id, "a NIC needs no failover any more");
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
                tracing::warn!(%id, from = %failover.from, to = %failover.to.display(), "failover: a NIC is on the device that stood by");
                FailoverState::Done { gap }
            }
            Err(error) => {
                tracing::error!(%id, error = &error as &dyn std::error::Error, "failover: a NIC stays on the device that has failed");
                FailoverState::Failed(in_one_line(&error))
            }
        };
        self.inventory
            .end_failover(id, Failover { state, ..failover });
        self.publish();
        unused
    }
}
