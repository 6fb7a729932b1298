//! Recording which pages the device writes: when its queues are relayed, and how.
//!
//! ```text
//!               begin                             save, restore onto a device that
//!   direct ------------------> relayed            begins at the start of rings only
//!     ^   SUSPEND, RESUME: in place  |                      |
//!     |   else: reset, restart       |                      v
//!     +------------------------------+ end               relayed, until its driver resets it
//!         where the device can take a ring at any position, else it stays relayed
//! ```
//! | device | receive queues | transmit queues |
//! |---|---|---|
//! | suspends, resumes, tells positions; split rings | mediated | direct |
//! | the same, packed rings | shadowed | direct |
//! | any other network device | shadowed, after a reset | shadowed |
//!
//! All queues of a device that is no network device count as receive queues. What cannot be
//! relayed is refused, with the reason. A direct queue's used elements are written unseen: where they
//! are says [`VdpaBackend::unseen`], always, instead of marking at each harvest: whoever copies knows
//! best when it looks.
//!
//! While a log is on it outlives the driver: one that resets the device and starts it again finds its queues
//! relayed before the device writes anything. This file owns the decisions and their order. It must not
//! know who copies memory.

mod guest;
mod start;
mod stop;
mod unseen;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use vdpa::control_queue::Command;
use vdpa::device::{Device, Owned, Running};
use vdpa::relay::{
    ChangeFailed, Halted, RelayError, RelaySet, RelaySetError, RelayedQueue, Strategy,
    TransitionError, choose,
};
use vdpa::ring::{GuestRing, RingFeatures};
use vdpa::uapi::BackendFeatures;

use super::bring_up::BringUp;
use super::link::Link;
use super::poller::Poller;
use super::{DataQueue, VdpaBackend, VdpaError, signal, vring_addresses};

/// How often a change is tried while the device holds chains of which nobody knows which they are, and
/// how long it gets to use them in between. Under traffic the first try is enough nearly always.
const TRIES: u32 = 25;
const BETWEEN_TRIES: Duration = Duration::from_millis(2);

/// How queues begin to be relayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// While the device is suspended.
    InPlace,
    /// By a reset that the driver does not see.
    Restart,
}

/// What is to be done so that everything the device writes is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    way: Way,
    /// What queues with buffers for the device to write become.
    receive: Strategy,
    /// What the others become.
    transmit: Strategy,
}

impl VdpaBackend {
    /// From when this returns until [`VdpaBackend::end_dirty_log`] each page that the device writes is
    /// marked in guest memory's bitmap before the guest can know of it, but for [`VdpaBackend::unseen`].
    ///
    /// # Errors
    /// This device can't be relayed, or not now. It goes on as before, or, if it does not even do
    /// that, needs a reset by its driver.
    pub(super) fn begin_dirty_log(&mut self) -> Result<(), VdpaError> {
        // Before the queues are changed: relays that have nothing to do yet are kept for what the guest does next.
        let before = std::mem::replace(&mut self.dirty_log, true);
        if !self.link.is_running() {
            return Ok(());
        }
        let relayed = self.relay();
        if relayed.is_err() {
            self.dirty_log = before;
            // Relays that were made for this go. If the device does not run any more its driver hears of it, and
            // the first error says more.
            let _ = self.with_poller(|_, _| Ok(()));
        }
        relayed
    }

    /// The end of the record. The device works directly again if it can begin in the
    /// middle of a ring; else its queues stay shadowed until its driver resets it.
    ///
    /// # Errors
    /// As [`VdpaBackend::begin_dirty_log`]. Nothing is recorded any more.
    pub(super) fn end_dirty_log(&mut self) -> Result<(), VdpaError> {
        self.dirty_log = false;
        if self.poller.is_none() || !self.link.is_running() {
            return Ok(());
        }
        let way = self.plan()?.way;
        if way == Way::Restart && !self.keeps_positions {
            tracing::info!(
                device = %self.id,
                "the device begins at the start of rings only: its queues stay shadowed until its \
                 driver resets it"
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

    /// How all that the device writes can be known.
    fn plan(&self) -> Result<Plan, VdpaError> {
        let negotiation = self.negotiation.ok_or(VdpaError::NotNegotiated)?;
        let in_place = BackendFeatures::SUSPEND | BackendFeatures::RESUME;
        let acknowledged = if self.keeps_positions {
            self.backend_features
        } else {
            // In place the device is told where to go on.
            self.backend_features - in_place
        };
        let (strategy, reason) = choose(&self.info, acknowledged, negotiation.features);
        match (strategy, acknowledged.contains(in_place)) {
            (Strategy::Direct, _) => Err(VdpaError::NotRelayable { reason }),
            (_, true) => Ok(Plan {
                way: Way::InPlace,
                receive: strategy,
                transmit: Strategy::Direct,
            }),
            (_, false) => Ok(Plan::RESTART),
        }
    }

    /// What a queue becomes.
    fn strategy_of(&self, queue: u16, plan: &Plan) -> Strategy {
        if self.transmits(queue) {
            plan.transmit
        } else {
            plan.receive
        }
    }

    fn targets(&self, plan: &Plan) -> Vec<(u16, Strategy)> {
        let queues = self.data_queues.iter();
        queues
            .map(|queue| (queue.index, self.strategy_of(queue.index, plan)))
            .collect()
    }

    /// Relays what must be relayed of a running device.
    fn relay(&mut self) -> Result<(), VdpaError> {
        let plan = self.plan()?;
        let met = self.poller.as_ref().is_some_and(|poller| {
            let mut targets = self.targets(&plan).into_iter();
            targets.all(|(queue, wanted)| match poller.strategy(queue) {
                None | Some(Strategy::Direct) => wanted == Strategy::Direct,
                Some(_) => true,
            })
        });
        if met {
            return Ok(());
        }
        if self.poller.is_none() {
            self.poller = Some(self.new_poller()?);
        }
        self.with_poller(|backend, poller| {
            for _ in 1..TRIES {
                match backend.switch(poller, &plan) {
                    Err(error) if error.device_holds_chains() => {}
                    other => return other,
                }
                thread::sleep(BETWEEN_TRIES);
            }
            backend.switch(poller, &plan)
        })
    }

    /// All data queues as relays see them, direct, and a thread that may poll them.
    fn new_poller(&mut self) -> Result<Poller, VdpaError> {
        let negotiation = self.negotiation.ok_or(VdpaError::NotNegotiated)?;
        let queues = self.data_queues.iter();
        let queues = queues
            .map(|queue| self.relayed_queue(queue, negotiation.features))
            .collect::<Result<_, _>>()?;
        let Self { iotlb, window, .. } = self;
        let set = RelaySet::new(&self.info, negotiation.features, queues, iotlb, window)?;
        Poller::new(set, &self.memory, &self.relay_failed).map_err(|(set, error)| {
            self.end_relays(set);
            error
        })
    }

    fn relayed_queue(&self, queue: &DataQueue, features: u64) -> Result<RelayedQueue, VdpaError> {
        let DataQueue {
            index,
            addresses,
            kick,
            call,
        } = queue;
        let ring = GuestRing::new(
            Arc::clone(&self.memory),
            addresses.size,
            vring_addresses(addresses),
            RingFeatures::of(features),
        );
        let queue = *index;
        Ok(RelayedQueue {
            index: queue,
            ring: ring.map_err(|source| RelaySetError::Guest { queue, source })?,
            kick: Arc::clone(kick),
            call: Arc::clone(call.as_ref().unwrap_or(&self.unrouted)),
        })
    }

    /// Does something with the relays while nobody polls them. Afterwards they are polled, or gone if there is no
    /// record and none is needed; a device that does not run is stopped for good, and its driver hears of it.
    fn with_poller(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Poller) -> Result<(), VdpaError>,
    ) -> Result<(), VdpaError> {
        let Some(mut poller) = self.poller.take() else {
            return Ok(());
        };
        let result = work(self, &mut poller);
        let kept = self.resume_polling(poller);
        result.and(kept)
    }

    fn resume_polling(&mut self, mut poller: Poller) -> Result<(), VdpaError> {
        let going = match poller.park() {
            Ok(set) if self.link.is_running() => {
                let direct = set
                    .strategies()
                    .all(|(_, strategy)| strategy == Strategy::Direct);
                // While there is a record a queue that the guest enables next may need them.
                if direct && !self.dirty_log {
                    if let Some(set) = poller.end() {
                        self.end_relays(set);
                    }
                    return Ok(());
                }
                poller.go()
            }
            Ok(_) => Err(VdpaError::RelaysLost),
            Err(error) => Err(error),
        };
        self.poller = Some(poller);
        if going.is_err() {
            tracing::error!(device = %self.id, "the device does not work any more: its driver must reset it");
            self.stop();
            signal(&self.relay_failed);
        }
        going
    }

    /// Gives the relays' memory back; the device does not know it any more.
    pub(super) fn end_relays(&mut self, set: RelaySet) {
        let Self {
            memory,
            iotlb,
            window,
            ..
        } = self;
        if let Err(error) = set.finish(&**memory, iotlb, window) {
            tracing::error!(device = %self.id, error = &error as &dyn std::error::Error, "memory of relays stays mapped for the device");
        }
    }

    /// Changes how queues reach the running device.
    ///
    /// # Errors
    /// The device runs as before if it runs.
    fn switch(&mut self, poller: &mut Poller, plan: &Plan) -> Result<(), VdpaError> {
        let targets = self.targets(plan);
        let set = poller.park()?;
        let before: Vec<(u16, Strategy)> = set.strategies().collect();
        let changed = match plan.way {
            Way::InPlace => {
                let device = self.link.take_running()?;
                set.change(device, &targets, &*self.memory)
            }
            Way::Restart => {
                set.can_restart()?;
                let device = self.reset_for_restart()?;
                self.bring_up(set, device, &targets)
            }
        };
        let ChangeFailed { device, error } = match changed {
            Ok(device) => {
                self.runs_again(device);
                return Ok(());
            }
            Err(failed) => failed,
        };
        let reset = match device {
            Halted::Running(device) => {
                self.runs_again(device);
                return Err(error.into());
            }
            // It was not to be reset, so nobody has asked yet whether it can be.
            Halted::Suspended(device) => match set.can_restart() {
                Ok(()) => device.reset().ok(),
                Err(error) => {
                    let device = Halted::Suspended(device);
                    self.halted(ChangeFailed { device, error });
                    None
                }
            },
            Halted::Reset(device) => Some(device),
            Halted::Gone => None,
        };
        // Half changed: once more, as it was, or in the only way in which it can begin there.
        if let Some(device) = reset {
            let again = if self.keeps_positions {
                before
            } else {
                targets
            };
            match self.bring_up(set, device, &again) {
                Ok(device) => self.runs_again(device),
                Err(again) => self.halted(again),
            }
        }
        Err(error.into())
    }

    fn runs_again(&mut self, device: Device<Running>) {
        self.link = Link::Running(device);
        if let Some(control) = &self.control {
            control.nudge_device();
        }
    }

    fn halted(&mut self, failed: ChangeFailed) {
        tracing::error!(device = %self.id, error = &failed as &dyn std::error::Error, "the device cannot be brought up again");
        self.link = failed.device.into();
    }

    /// Resets the device under a driver that is not to notice.
    pub(super) fn reset_for_restart(&mut self) -> Result<Device<Owned>, VdpaError> {
        self.finish_commands()?;
        if !self.needs_reset {
            // One that can suspend completes first what it has sent; if it refuses it is reset all the same.
            let _ = self.link.suspend();
        }
        self.link.reset()?;
        Ok(self.link.take_owned()?)
    }

    fn bring_up(
        &mut self,
        set: &mut RelaySet,
        device: Device<Owned>,
        targets: &[(u16, Strategy)],
    ) -> Result<Device<Running>, ChangeFailed> {
        let memory = Arc::clone(&self.memory);
        let replay = self.commands_again();
        match self.restarter(replay) {
            Some(mut restarter) => set.restart(device, targets, &*memory, &mut restarter),
            None => Err(ChangeFailed {
                device: Halted::Reset(device),
                error: TransitionError::Negotiate {
                    source: Box::new(VdpaError::NotNegotiated),
                },
            }),
        }
    }

    fn restarter(&mut self, replay: Vec<Command>) -> Option<BringUp<'_>> {
        let negotiation = self.negotiation?;
        Some(BringUp {
            iotlb: &mut self.iotlb,
            control: self.control.as_mut(),
            negotiation,
            device_features: self.offer.for_device(negotiation.features),
            config_changed: &self.config_changed,
            replay,
        })
    }

    /// The commands that give a device that was reset what it had.
    fn commands_again(&self) -> Vec<Command> {
        let Some(negotiation) = self.negotiation else {
            return Vec::new();
        };
        // Whether the device still has the address is not known, and telling it again does no harm.
        let mac = self.settable_mac(&negotiation).map(Command::MacAddrSet);
        let control = self.control.as_ref();
        let set = control.filter(|_| negotiation.control_queue.is_some());
        mac.into_iter()
            .chain(
                set.into_iter()
                    .flat_map(|control| control.save().state.replay()),
            )
            .collect()
    }
}

impl Plan {
    /// What every network device can do.
    const RESTART: Self = Self {
        way: Way::Restart,
        receive: Strategy::Shadowed,
        transmit: Strategy::Shadowed,
    };
}

impl VdpaError {
    /// The device took chains of which nobody knows which they are, and will have used them soon.
    fn device_holds_chains(&self) -> bool {
        let Self::Relay(TransitionError::Queue { source, .. }) = self else {
            return false;
        };
        matches!(
            source,
            RelayError::InFlightUnknown { .. }
                | RelayError::PackedInFlight { .. }
                | RelayError::OutOfOrder
        )
    }
}
