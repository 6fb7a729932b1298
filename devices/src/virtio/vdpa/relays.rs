//! Relays queues to record the pages that the device writes: when, and how.
//!
//! ```text
//!               begin                             save, restore onto a device that
//!   direct ------------------> relayed            can only begin at the start of rings
//!     ^   SUSPEND, RESUME: in place  |                      |
//!     |   else: reset, restart       |                      v
//!     +------------------------------+ end               relayed, until its driver resets it
//!         if the device can take a ring at any position, else it stays relayed
//! ```
//! | device | receive queues | transmit queues |
//! |---|---|---|
//! | suspends, resumes, reports positions; split rings | used shadow | direct |
//! | the same, packed rings | full shadow | direct |
//! | any other network device | shadowed, after a reset | shadowed |
//!
//! A device behind the guest's IOMMU that suspends and has few writable mappings is not relayed.
//! All queues of a device that is not a network device count as receive queues. A device that
//! cannot be relayed is refused, with the reason. The used elements of a direct queue are written
//! without a mark. [`WriteLog::untracked_writes`](super::write_log::WriteLog::untracked_writes)
//! reports their location at any time instead of marking them at each harvest, because the copier
//! knows best when it looks.
//!
//! An active log outlives the driver. A driver that resets and restarts the device finds its queues
//! relayed before the device writes anything. This file owns the decisions and their order. It must
//! not know who copies memory.

mod start;
mod stop;

use std::error::Error as StdError;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use vdpa::control_queue::Command;
use vdpa::device::State;
use vdpa::relay::{Prepared, Strategy, SvqSet, choose};
use vdpa::uapi::BackendFeatures;
use vmm_sys_util::eventfd::EventFd;

use super::device::VdpaBackend;
use super::eventfd::signal;
use super::poller::{Poller, relays_lost};
use super::write_log::maps_little;
use crate::{Error, ErrorKind};

/// How often a change is tried while the device holds unknown chains, and how long it gets to use
/// them in between. Under traffic the first try nearly always succeeds.
const TRIES: u32 = 25;
const BETWEEN_TRIES: Duration = Duration::from_millis(2);

/// How queues begin to be relayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// While the device is suspended.
    InPlace,
    /// By a reset that the driver does not notice.
    Restart,
}

/// How each queue must reach the device so that all its writes are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    way: Way,
    /// For queues with buffers that the device writes.
    receive: Strategy,
    /// For the other queues.
    transmit: Strategy,
}

impl VdpaBackend {
    /// Marks each page that the device writes in guest memory's bitmap before the guest can see the
    /// write, except for
    /// [`WriteLog::untracked_writes`](super::write_log::WriteLog::untracked_writes). Holds from the
    /// return of this call until [`VdpaBackend::end_relaying`].
    ///
    /// # Errors
    /// This device cannot be relayed, or not now. It continues as before or, if it cannot, needs a
    /// reset by its driver.
    pub(super) fn relay_all(&mut self) -> Result<(), Error> {
        // Before the queues change: idle relays are kept for the guest's next steps.
        let before = std::mem::replace(&mut self.log.on, true);
        if !self.rings.is_running() || !self.needs_relays() {
            return Ok(());
        }
        let relayed = self.relay();
        if relayed.is_err() {
            self.log.on = before;
            // Drops the relays created for this. If the device does not run any more its driver is
            // notified; the first error says more.
            let _ = self.with_poller(|_, _| Ok(()));
        }
        relayed
    }

    /// Ends the record. The device works directly again if it can begin in the middle of a ring;
    /// else its queues stay shadowed until its driver resets it.
    ///
    /// # Errors
    /// As [`VdpaBackend::relay_all`]. Nothing is recorded any more.
    pub(super) fn end_relaying(&mut self) -> Result<(), Error> {
        self.log.on = false;
        if self.log.poller.is_none() || !self.rings.is_running() {
            return Ok(());
        }
        let way = self.plan()?.way;
        if way == Way::Restart && !self.rings.keeps_positions {
            tracing::info!(
                device = %self.rings.id,
                "the device cannot begin inside a ring: its queues stay shadowed until its driver \
                 resets it"
            );
            return Ok(());
        }
        let direct = Plan {
            way,
            receive: Strategy::Direct,
            transmit: Strategy::Direct,
        };
        self.with_poller(|backend, poller| backend.switch(poller, &direct))
    }

    /// Whether the device's queues must be relayed now: during a record, unless its mappings are
    /// few. Only relays know the position of a device that cannot suspend and uses buffers out of
    /// order.
    fn needs_relays(&self) -> bool {
        let stops = self.rings.offers(BackendFeatures::SUSPEND_AND_RESUME);
        let is_direct = stops && maps_little(&self.rings.memory);
        self.log.on && !is_direct
    }

    /// Determines how all writes of the device can be known.
    pub(super) fn plan(&self) -> Result<Plan, Error> {
        let negotiation = self.negotiated()?;
        let in_place = BackendFeatures::SUSPEND_AND_RESUME;
        let acknowledged = if self.rings.keeps_positions {
            self.rings.device.backend_features()
        } else {
            // In place, the device must accept a position.
            self.rings.device.backend_features() - in_place
        };
        let (strategy, reason) =
            choose(self.rings.device.info(), acknowledged, negotiation.features);
        match (strategy, acknowledged.contains(in_place)) {
            (Strategy::Direct, _) => Err(Error::other(format!(
                "cannot relay the device's queues: {reason}"
            ))),
            (_, true) => Ok(Plan {
                way: Way::InPlace,
                receive: strategy,
                transmit: Strategy::Direct,
            }),
            (_, false) => Ok(Plan::RESTART),
        }
    }

    /// Returns the strategy for a queue under `plan`.
    pub(super) fn strategy_of(&self, queue: u16, plan: &Plan) -> Strategy {
        if self.rings.transmits(queue) {
            plan.transmit
        } else {
            plan.receive
        }
    }

    fn targets(&self, plan: &Plan) -> Vec<(u16, Strategy)> {
        let queues = self.rings.queues.iter();
        queues
            .map(|queue| (queue.index, self.strategy_of(queue.index, plan)))
            .collect()
    }

    /// Relays the queues of a running device that need it.
    fn relay(&mut self) -> Result<(), Error> {
        let plan = self.plan()?;
        let met = self.log.poller.as_ref().is_some_and(|poller| {
            let mut targets = self.targets(&plan).into_iter();
            targets.all(|(queue, wanted)| match poller.strategy(queue) {
                None | Some(Strategy::Direct) => wanted == Strategy::Direct,
                Some(_) => true,
            })
        });
        if met {
            return Ok(());
        }
        if self.log.poller.is_none() {
            self.log.poller = Some(self.new_poller()?);
        }
        self.with_poller(|backend, poller| {
            for _ in 1..TRIES {
                match backend.switch(poller, &plan) {
                    Err(error) if error.kind() == ErrorKind::InFlightUnknown => {}
                    other => return other,
                }
                thread::sleep(BETWEEN_TRIES);
            }
            backend.switch(poller, &plan)
        })
    }

    /// Returns all data queues as direct relays, with a thread that can poll them.
    fn new_poller(&mut self) -> Result<Poller, Error> {
        let negotiation = self.negotiated()?;
        let set = self.rings.relay_set(negotiation.features)?;
        Poller::new(set, &self.rings.memory, &self.log.failed).map_err(|(set, error)| {
            self.rings.end_relays(set);
            error
        })
    }

    /// Runs `work` with the relays while nothing polls them. Afterwards they are polled, or dropped
    /// if there is no record and none is needed. A device that does not run is stopped for good,
    /// and its driver is notified.
    fn with_poller(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Poller) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(mut poller) = self.log.poller.take() else {
            return Ok(());
        };
        let result = work(self, &mut poller);
        let kept = self.resume_polling(poller);
        result.and(kept)
    }

    /// Sets or removes the guest's interrupt for a queue. Returns `false` if the queue is not
    /// relayed.
    ///
    /// # Errors
    /// The device refuses it.
    pub(super) fn set_relayed_call(
        &mut self,
        queue: u16,
        call: Option<&Arc<EventFd>>,
    ) -> Result<bool, Error> {
        if self.log.poller.is_none() {
            return Ok(false);
        }
        let call = Arc::clone(call.unwrap_or(&self.rings.unrouted));
        let mut relayed = false;
        self.with_poller(|_, poller| {
            let strategy = poller.park()?.set_call(queue, call);
            relayed = !matches!(strategy, None | Some(Strategy::Direct));
            Ok(())
        })?;
        Ok(relayed)
    }

    fn resume_polling(&mut self, mut poller: Poller) -> Result<(), Error> {
        let going = match poller.park() {
            Ok(set) if self.rings.is_running() => {
                let direct = set
                    .strategies()
                    .all(|(_, strategy)| strategy == Strategy::Direct);
                // During a record, a queue that the guest enables next may need the relays.
                if direct && !self.log.on {
                    if let Some(set) = poller.end() {
                        self.rings.end_relays(set);
                    }
                    return Ok(());
                }
                poller.go()
            }
            Ok(_) => Err(relays_lost()),
            Err(error) => Err(error),
        };
        self.log.poller = Some(poller);
        if going.is_err() {
            tracing::error!(
                device = %self.rings.id,
                "the device has stopped working: its driver must reset it"
            );
            self.stop();
            signal(&self.log.failed);
        }
        going
    }

    /// Changes how queues reach the running device.
    ///
    /// # Errors
    /// The device runs as before, if it runs.
    fn switch(&mut self, poller: &mut Poller, plan: &Plan) -> Result<(), Error> {
        let targets = self.targets(plan);
        let set = poller.park()?;
        let before: Vec<(u16, Strategy)> = set.strategies().collect();
        let changed = match plan.way {
            Way::InPlace => set
                .change(&mut self.rings.device, &targets, &self.rings.memory)
                .map_err(Error::relay),
            Way::Restart => {
                set.can_restart().map_err(Error::relay)?;
                self.reset_for_restart()?;
                self.bring_up(set, &targets)
            }
        };
        let Err(error) = changed else {
            self.spurious_notify_control();
            return Ok(());
        };
        if self.rings.device.state() == State::Suspended {
            // A reset was not planned, so check first that the device can restart.
            match set.can_restart() {
                Ok(()) => {
                    let _ = self.rings.device.reset();
                }
                Err(error) => self.halted(&error),
            }
        }
        match self.rings.device.state() {
            State::Running => self.spurious_notify_control(),
            // Half changed: restart as before, or in the only way in which the device can begin
            // there.
            State::Owned => {
                let again = if self.rings.keeps_positions {
                    before
                } else {
                    targets
                };
                self.bring_up_again(set, &again);
            }
            _ => {}
        }
        Err(error)
    }

    /// Kicks the control queue: a suspended device may have missed the kick of a command.
    pub(super) fn spurious_notify_control(&self) {
        if let Some(control) = &self.control {
            control.spurious_notify();
        }
    }

    fn halted(&self, error: &(dyn StdError + 'static)) {
        tracing::error!(
            device = %self.rings.id,
            error,
            "cannot restart the device"
        );
    }

    /// Resets the device in a way that the driver must not notice.
    pub(super) fn reset_for_restart(&mut self) -> Result<(), Error> {
        self.finish_commands()?;
        if !self.needs_reset {
            // A device that can suspend first completes the frames that it has sent; if it refuses,
            // it is reset all the same.
            let _ = self.rings.device.suspend();
        }
        Ok(self.rings.device.reset()?)
    }

    /// As [`VdpaBackend::bring_up`]; a failure is logged.
    fn bring_up_again(&mut self, set: &mut SvqSet, targets: &[(u16, Strategy)]) {
        match self.bring_up(set, targets) {
            Ok(()) => self.spurious_notify_control(),
            Err(error) => self.halted(&error),
        }
    }

    /// Brings up a device that was reset, in a way that the driver does not notice:
    ///
    /// ```text
    ///   memory mapped -> FEATURES_OK -> control queue -> rings, DRIVER_OK -> commands replayed
    /// ```
    fn bring_up(&mut self, set: &mut SvqSet, targets: &[(u16, Strategy)]) -> Result<(), Error> {
        let rings = set.prepare_start(targets, &[], &self.rings.memory);
        let rings = rings.map_err(Error::relay)?;
        if let Err(source) = self.negotiate_again() {
            if self.rings.device.state() == State::Negotiated {
                let _ = self.rings.device.reset();
            }
            let message = "cannot restart the device after its reset";
            return Err(Error::other(message).because(source));
        }
        self.start_set(set, rings, &self.commands_again())
    }

    /// Restores the state that a reset removed, except for the data queues.
    fn negotiate_again(&mut self) -> Result<(), Error> {
        let negotiation = self.negotiated()?;
        let remapped = self.rings.iotlb.remap_after_reset();
        remapped.map_err(Error::as_it_is)?;
        self.negotiate_device(negotiation.features)?;
        self.start_control(&negotiation)
    }

    /// Starts the negotiated device with relayed queues.
    fn start_set(
        &mut self,
        set: &mut SvqSet,
        rings: Prepared,
        replay: &[Command],
    ) -> Result<(), Error> {
        let control = self.control.as_mut();
        let started = set.start(&mut self.rings.device, rings, || match control {
            Some(control) => Ok(control.replay(replay)?),
            None => Ok(()),
        });
        started.map_err(Error::relay)
    }

    /// Returns the commands that restore the control state of a device that was reset.
    fn commands_again(&self) -> Vec<Command> {
        let Some(negotiation) = self.negotiation else {
            return Vec::new();
        };
        // Whether the device still has the address is unknown, and setting it again is harmless.
        let mac = self.net.settable_mac(&negotiation).map(Command::MacAddrSet);
        let control = self.control.as_ref();
        let set = control.filter(|_| negotiation.control_queue.is_some());
        mac.into_iter()
            .chain(self.net.filter_commands(&negotiation))
            .chain(
                set.into_iter()
                    .flat_map(|control| control.save().state.replay()),
            )
            .collect()
    }
}

impl Plan {
    /// The plan that every network device supports.
    const RESTART: Self = Self {
        way: Way::Restart,
        receive: Strategy::FullShadow,
        transmit: Strategy::FullShadow,
    };
}
