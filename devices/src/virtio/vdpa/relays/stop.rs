//! Stops a relayed device and determines its ring positions.
//!
//! ```text
//!   with SUSPEND      SUSPEND -> drained -> positions
//!                        ^          |  the device holds unknown chains
//!                        |          v
//!                     a little <- RESUME, all used rings shadowed: now they are counted
//!
//!   without, or the   can the rings be read? -> reset -> drained -> positions, from the shadows
//!   device has failed
//! ```
//! If this fails half-way, the device is brought up again with its queues relayed as they were.
//!
//! It must not know the purpose of the positions.

use std::thread;

use vdpa::device::VringBase;
use vdpa::relay::Strategy;
use vdpa::uapi::BackendFeatures;

use super::super::device::VdpaBackend;
use super::super::poller::{Poller, relays_lost};
use super::{BETWEEN_TRIES, Plan, TRIES, Way};
use crate::{Error, ErrorKind};

impl VdpaBackend {
    /// Stops the device for good. Returns where another device begins in each ring, so that it
    /// takes each buffer in flight once. The device's writes are marked, and shown to the guest.
    ///
    /// # Errors
    /// The buffers in flight are unknown. The device continues as before, or needs a reset by its
    /// driver, which is notified.
    pub(in crate::virtio::vdpa) fn stop_relayed(&mut self) -> Result<Vec<(u16, VringBase)>, Error> {
        if self.log.poller.is_none() {
            self.log.poller = Some(self.new_poller()?);
        }
        let Some(mut poller) = self.log.poller.take() else {
            return Err(relays_lost());
        };
        let before = poller.strategies();
        let suspends = self.rings.offers(BackendFeatures::SUSPEND);
        let bases = if suspends && !self.needs_reset {
            self.suspended_bases(&mut poller)
        } else {
            self.reset_bases(&mut poller)
        };
        match bases {
            Ok(_) => {
                // Its memory is freed when the device is reset.
                self.log.poller = Some(poller);
            }
            Err(_) => self.relay_as_before(poller, &before),
        }
        bases
    }

    /// Cleans up after a stop that failed half-way. Errors here are logged and reported to the
    /// driver; the cause of the failed stop says more.
    fn relay_as_before(&mut self, mut poller: Poller, before: &[(u16, Strategy)]) {
        if !self.rings.is_running() {
            self.start_again(&mut poller, before);
        }
        // Without a record, the relays that were created for counting are not needed.
        if self.resume_polling(poller).is_ok()
            && !self.log.on
            && let Err(error) = self.end_relaying()
        {
            tracing::warn!(
                device = %self.rings.id,
                error = &error as &dyn std::error::Error,
                "queues stay relayed"
            );
        }
    }

    /// Brings up a device that is suspended and cannot resume, or was reset. Its state is in the
    /// rings, which were checked before it was stopped.
    fn start_again(&mut self, poller: &mut Poller, before: &[(u16, Strategy)]) {
        let planned = self.plan().map(|plan| self.targets(&plan));
        let targets = match planned {
            // Only a shadowed device can begin in the middle of a ring.
            Ok(targets) if !self.rings.keeps_positions => targets,
            _ => before.to_vec(),
        };
        let Ok(set) = poller.park() else {
            return;
        };
        match self.rings.device.reset() {
            Ok(()) => self.bring_up_again(set, &targets),
            Err(error) => {
                tracing::error!(
                    device = %self.rings.id,
                    error = &error as &dyn std::error::Error,
                    "cannot reset the device"
                );
            }
        }
    }

    fn suspended_bases(&mut self, poller: &mut Poller) -> Result<Vec<(u16, VringBase)>, Error> {
        let resumes = self.rings.offers(BackendFeatures::RESUME);
        let used_shadow = Plan {
            way: Way::InPlace,
            receive: Strategy::UsedShadow,
            transmit: Strategy::UsedShadow,
        };
        let can_shadow_used = self
            .plan()
            .is_ok_and(|plan| plan.receive == used_shadow.receive);
        for turn in 1.. {
            let set = poller.park()?;
            if !resumes {
                // The device is reset if it cannot be stopped for good.
                set.can_restart().map_err(Error::relay)?;
            }
            self.rings.device.suspend()?;
            let error = match set.bases(&self.rings.device, &self.rings.memory) {
                Ok(bases) => return Ok(bases),
                Err(error) => Error::relay(error),
            };
            if !resumes {
                return Err(error);
            }
            self.resume();
            if turn == TRIES
                || error.kind() != ErrorKind::InFlightUnknown
                || !self.rings.is_running()
            {
                return Err(error);
            }
            if turn == 1 && can_shadow_used {
                // A used-shadow queue counts the buffers that the device takes and uses.
                self.switch(poller, &used_shadow)?;
            }
            poller.go()?;
            thread::sleep(BETWEEN_TRIES);
        }
        Err(relays_lost())
    }

    fn reset_bases(&mut self, poller: &mut Poller) -> Result<Vec<(u16, VringBase)>, Error> {
        self.plan()?;
        let set = poller.park()?;
        set.can_restart().map_err(Error::relay)?;
        self.reset_for_restart()?;
        set.bases(&self.rings.device, &self.rings.memory)
            .map_err(Error::relay)
    }
}
