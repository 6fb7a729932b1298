//! Where a relayed device stopped.
//!
//! ```text
//!   with SUSPEND      SUSPEND -> drained -> positions
//!                        ^          |  the device holds chains, nobody knows which
//!                        |          v
//!                     a little <- RESUME, all queues mediated: now they are counted
//!
//!   without           reset -> drained -> positions, as the shadows know them
//! ```
//! It must not know what the positions are for.

use std::thread;

use vdpa::device::VringBase;
use vdpa::relay::Strategy;
use vdpa::uapi::BackendFeatures;

use super::super::link::Link;
use super::super::poller::Poller;
use super::super::{VdpaBackend, VdpaError};
use super::{BETWEEN_TRIES, Plan, TRIES, Way};

impl VdpaBackend {
    /// Stops the device for good and says where another one is to begin in each ring, so that it takes what was
    /// in flight once. What the device wrote is marked, and shown to the guest.
    ///
    /// # Errors
    /// It is not known what is in flight; the device goes on.
    pub(in crate::virtio::vdpa) fn stop_relayed(
        &mut self,
    ) -> Result<Vec<(u16, VringBase)>, VdpaError> {
        if self.poller.is_none() {
            self.poller = Some(self.new_poller()?);
        }
        let Some(mut poller) = self.poller.take() else {
            return Err(VdpaError::RelaysLost);
        };
        let bases = if self.backend_features.contains(BackendFeatures::SUSPEND) {
            self.suspended_bases(&mut poller)
        } else {
            self.reset_bases(&mut poller)
        };
        if bases.is_ok() {
            // Its memory is given back when the device is reset.
            self.poller = Some(poller);
        } else {
            self.resume_polling(poller)?;
        }
        bases
    }

    fn suspended_bases(&mut self, poller: &mut Poller) -> Result<Vec<(u16, VringBase)>, VdpaError> {
        let resumes = self.backend_features.contains(BackendFeatures::RESUME);
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
            self.link.suspend()?;
            let error = match set.bases(Some(self.link.suspended()?), &*self.memory) {
                Ok(bases) => return Ok(bases),
                Err(error) => VdpaError::from(error),
            };
            if !resumes {
                return Err(error);
            }
            self.go_on();
            if turn == TRIES || !error.device_holds_chains() || !self.link.is_running() {
                return Err(error);
            }
            if turn == 1 && can_mediate {
                // Who mediates counts what the device takes and uses.
                self.switch(poller, &mediated)?;
            }
            poller.go()?;
            thread::sleep(BETWEEN_TRIES);
        }
        Err(VdpaError::RelaysLost)
    }

    fn reset_bases(&mut self, poller: &mut Poller) -> Result<Vec<(u16, VringBase)>, VdpaError> {
        let plan = self.plan()?;
        let set = poller.park()?;
        set.can_restart()?;
        let device = self.reset_for_restart()?;
        let error = match set.bases(None, &*self.memory) {
            Ok(bases) => {
                self.link = Link::Owned(device);
                return Ok(bases);
            }
            Err(error) => VdpaError::from(error),
        };
        let targets = self.targets(&plan);
        match self.bring_up(set, device, &targets) {
            Ok(device) => self.runs_again(device),
            Err(failed) => self.halted(failed),
        }
        Err(error)
    }
}
