//! Starts a device with relayed queues, before it has written anything.
//!
//! It must not know the reason.

use vdpa::control_queue::Command;
use vdpa::device::VringBase;
use vdpa::relay::Strategy;

use super::super::device::VdpaBackend;
use super::super::poller::Poller;
use super::Plan;
use crate::Error;

impl VdpaBackend {
    /// Returns how the queues of a device that is about to start must reach it; `None`: directly.
    /// `anywhere`: the device must begin in the middle of rings.
    ///
    /// # Errors
    /// The device supports neither.
    pub(in crate::virtio::vdpa) fn plan_start(
        &self,
        anywhere: bool,
    ) -> Result<Option<Plan>, Error> {
        if anywhere && !self.rings.keeps_positions {
            return self.plan().map(Some);
        }
        if !self.needs_relays() {
            return Ok(None);
        }
        match self.plan() {
            Ok(plan) => Ok(Some(plan)),
            Err(error) => {
                // The guest's network is worth more than the log; see `untracked_writes`.
                tracing::warn!(
                    device = %self.rings.id,
                    error = &error as &dyn std::error::Error,
                    "cannot record the device's writes: all memory counts as written"
                );
                Ok(None)
            }
        }
    }

    /// Starts the negotiated device, whose control queue is set up, with relayed queues. `known`
    /// are the positions of packed rings.
    pub(in crate::virtio::vdpa) fn start_relayed(
        &mut self,
        plan: &Plan,
        known: &[(u16, VringBase)],
        replay: &[Command],
    ) -> Result<(), Error> {
        let targets = self.targets(plan);
        let mut poller = self.new_poller()?;
        let started = self.start_with(&mut poller, &targets, known, replay);
        self.log.poller = Some(poller);
        started?;
        self.log.go()
    }

    fn start_with(
        &mut self,
        poller: &mut Poller,
        targets: &[(u16, Strategy)],
        known: &[(u16, VringBase)],
        replay: &[Command],
    ) -> Result<(), Error> {
        let set = poller.park()?;
        let rings = set.prepare_start(targets, known, &self.rings.memory);
        let rings = rings.map_err(Error::relay)?;
        self.start_set(set, rings, replay)?;
        self.spurious_notify_control();
        Ok(())
    }
}
