//! Where a relayed device stopped.
//!
//! ```text
//!   with SUSPEND      SUSPEND -> drained -> positions
//!                        ^          |  the device holds chains, nobody knows which
//!                        |          v
//!                     a little <- RESUME, all queues mediated: now they are counted
//!
//!   without, or the   do the rings tell? -> reset -> drained -> positions, as the shadows know them
//!   device has failed
//! ```
//! If that fails half-way the device is brought up again with its queues relayed as they were.
//!
//! It must not know what the positions are for.

use std::thread;

use vdpa::device::VringBase;
use vdpa::relay::Strategy;
use vdpa::uapi::BackendFeatures;

use super::super::device::VdpaBackend;
use super::super::poller::{Poller, relays_lost};
use super::{BETWEEN_TRIES, Plan, TRIES, Way};
use crate::{Error, ErrorKind};

impl VdpaBackend {
    /// Stops the device for good and says where another one is to begin in each ring, so that it takes what was
    /// in flight once. What the device wrote is marked, and shown to the guest.
    ///
    /// # Errors
    /// It is not known what is in flight; the device goes on as before, or needs a reset by its driver, who hears of it.
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
                // Its memory is given back when the device is reset.
                self.log.poller = Some(poller);
            }
            Err(_) => self.relay_as_before(poller, &before),
        }
        bases
    }

    /// After a stop that failed half-way. What goes wrong here is in the log and shown to the driver; the reason for
    /// the stop's failure says more.
    fn relay_as_before(&mut self, mut poller: Poller, before: &[(u16, Strategy)]) {
        if !self.rings.is_running() {
            self.start_again(&mut poller, before);
        }
        // Without a record nobody needs what was relayed to count it.
        if self.resume_polling(poller).is_ok()
            && !self.log.on
            && let Err(error) = self.end_relaying()
        {
            tracing::warn!(device = %self.rings.id, error = &error as &dyn std::error::Error, "queues stay relayed");
        }
    }

    /// Brings a device up again that is suspended and cannot resume, or was reset. What it had is in the rings: that
    /// they tell was looked at before it was stopped.
    fn start_again(&mut self, poller: &mut Poller, before: &[(u16, Strategy)]) {
        let planned = self.plan().map(|plan| self.targets(&plan));
        let targets = match planned {
            // It begins in the middle of a ring only if it is shadowed.
            Ok(targets) if !self.rings.keeps_positions => targets,
            _ => before.to_vec(),
        };
        let Ok(set) = poller.park() else {
            return;
        };
        match self.rings.device.reset() {
            Ok(()) => self.bring_up_again(set, &targets),
            Err(error) => {
                tracing::error!(device = %self.rings.id, error = &error as &dyn std::error::Error, "the device cannot be reset");
            }
        }
    }

    fn suspended_bases(&mut self, poller: &mut Poller) -> Result<Vec<(u16, VringBase)>, Error> {
        let resumes = self.rings.offers(BackendFeatures::RESUME);
        let mediated = Plan {
            way: Way::InPlace,
            receive: Strategy::Mediated,
            transmit: Strategy::Mediated,
        };
        let can_mediate = self
            .plan()
            .is_ok_and(|plan| plan.receive == mediated.receive);
        for turn in 1.. {
            let set = poller.park()?;
            if !resumes {
                // It is reset if it cannot be stopped for good.
                set.can_restart().map_err(Error::relay)?;
            }
            self.rings.device.suspend()?;
            let error = match set.bases(&self.rings.device, &*self.rings.memory) {
                Ok(bases) => return Ok(bases),
                Err(error) => Error::relay(error),
            };
            if !resumes {
                return Err(error);
            }
            self.go_on();
            if turn == TRIES
                || error.kind() != ErrorKind::InFlightUnknown
                || !self.rings.is_running()
            {
                return Err(error);
            }
            if turn == 1 && can_mediate {
                // Who mediates counts what the device takes and uses.
                self.switch(poller, &mediated)?;
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
        set.bases(&self.rings.device, &*self.rings.memory)
            .map_err(Error::relay)
    }
}
