//! The relayed queues of one device: their private memory, their transitions
//! on a running device, and the poll that drives them.
//!
//! ```text
//!   change:   Running --suspend--> drain, prepare --switch_vring--> resume --> Running
//!                                        |                             |
//!                                     failed: resumed as it was     failed: Suspended
//!   start:    Owned (after a reset) --> prepare_start: drain, settle --> the caller negotiates
//!                    --> start: set_vring, enable --> DRIVER_OK --> replay --> Running
//! ```
//! Each transition is followed by one spurious kick and one spurious interrupt
//! per queue: either may have been on its way to an eventfd that nobody reads now.
//!
//! **What the device had taken and not used.** A device that suspends keeps it
//! when only its used ring changes. When the ring changes as a whole the device is told to
//! begin at the guest's used index, and the avail entries from there on name what is in flight
//! ([`arrange`](crate::ring::split::GuestRing::arrange)). A mediation counts it. Coming from [`Strategy::Direct`]
//! nobody counted: a suspended device must hold nothing (its base is the used index), else
//! the change is refused and the way leads over [`Strategy::Mediated`]. After a reset nothing can be
//! asked, so the entries are taken as they are, which is right for a device that completes in
//! order ([`RelaySet::can_restart`] looks for signs that it does not, before the reset); a transmitted
//! frame may go out twice then, and none is lost.
//!
//! **Packed rings** are direct or shadowed. A suspended device that holds chains of one is not
//! taken over: used descriptors take the places of others, so if it completes out of order those of
//! the chains that it holds may be gone. Try again, as soon as traffic lets it hold nothing. After
//! a reset the flags in the ring tell where it stands
//! ([`packed::GuestRing::standing`](crate::ring::packed::GuestRing::standing)), if each chain is
//! one descriptor. A shadow has copies of the descriptors, and writes them again where the next
//! device begins.
//!
//! Private memory of one queue, mapped once, in the guest's address space:
//! ```text
//!   split    | descriptors, avail ring | used ring of the shadow | used ring of the mediation |
//!            +--- device reads only ---+--- device writes -------+--- device writes ----------+
//!   packed   | driver event            | descriptors, device event |
//!            +--- device reads only ---+--- device writes ---------+
//! ```
//! In the guest's address space a queue that is direct can have the device write there. The relay
//! trusts none of it; descriptors of a packed ring that were changed so make the device use other
//! memory of that guest than is reported, which the guest does to nobody but itself.
//!
//! It must not know what else the device has: a control queue is the caller's.

mod lane;
mod queues;

use std::error::Error as StdError;

use vmm_sys_util::eventfd::EventFd;

pub use self::lane::RelayedQueue;
use self::lane::{Features, Lane, Mode, signal};
use super::{Dirty, Pace, Pause, Position, Signals, Strategy};
use crate::device::{Device, DeviceInfo, State, VringBase};
use crate::iotlb::Iotlb;
use crate::ring::RingFeatures;
use crate::window::PrivateWindow;
use crate::{Error, ErrorKind};

/// What each queue becomes when its device starts: see [`RelaySet::prepare_start`].
#[derive(Debug)]
pub struct Prepared(Vec<(usize, Mode, VringBase)>);

/// What a poll did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Used chains shown to the guest.
    pub used: u32,
    /// Chains handed to the device.
    pub forwarded: u32,
    /// When to poll again.
    pub pause: Pause,
}

/// The relayed queues of one device. See the module.
#[derive(Debug)]
pub struct RelaySet {
    lanes: Vec<Lane>,
    features: Features,
    pace: Pace,
}

impl RelaySet {
    /// Makes private rings for `queues`, all of which are direct, and maps them
    /// in address space 0. `features` are the negotiated ones.
    ///
    /// # Errors
    /// A ring of another format, or no private ring can be made or mapped; nothing stays mapped.
    pub fn new(
        info: &DeviceInfo,
        features: u64,
        queues: Vec<RelayedQueue>,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<Self, Error> {
        let ring = RingFeatures::of(features);
        let mut set = Self {
            lanes: Vec::with_capacity(queues.len()),
            features: Features {
                event_idx: ring.event_idx,
                in_order: ring.in_order,
                format: ring.format(),
            },
            pace: Pace::default(),
        };
        for queue in queues {
            if let Err(error) = set.push(info, queue, iotlb, window) {
                // The first error says more than what may come of cleaning up.
                let _ = set.dismantle(iotlb, window);
                return Err(error);
            }
        }
        Ok(set)
    }

    /// How a queue reaches the device; `None` if it is not in the set.
    #[must_use]
    pub fn strategy(&self, queue: u16) -> Option<Strategy> {
        let lane = self.lanes.iter().find(|lane| lane.queue.index == queue)?;
        Some(lane.mode.strategy())
    }

    /// The eventfds whose signal is worth a poll before its time. Whoever waits on
    /// them reads them.
    pub fn hints(&self) -> impl Iterator<Item = &EventFd> {
        self.lanes.iter().flat_map(|lane| {
            let (hint, kick) = match lane.mode {
                Mode::Direct => (None, None),
                Mode::Mediated(_) => (Some(&lane.hint), None),
                Mode::Shadowed(_) => (Some(&lane.hint), Some(&*lane.queue.kick)),
            };
            hint.into_iter().chain(kick)
        })
    }

    /// One bounded pass over all relayed queues.
    ///
    /// # Errors
    /// A queue broke. It is left alone from now on and the others go on with the next call.
    pub fn poll(&mut self, dirty: &dyn Dirty) -> Result<Progress, Error> {
        let (mut used, mut forwarded) = (0u32, 0u32);
        let (mut more, mut relayed) = (false, false);
        let mut signals = Signals::All;
        for lane in &mut self.lanes {
            let Some(relay) = lane.mode.relay().filter(|_| !lane.broken) else {
                continue;
            };
            relayed = true;
            let pass = match relay.pass(dirty) {
                Ok(pass) => pass,
                Err(source) => {
                    lane.broken = true;
                    let message = format!("queue {} is broken", lane.queue.index);
                    return Err(lane.blamed(message, source));
                }
            };
            used += u32::from(pass.used);
            forwarded += u32::from(pass.forwarded);
            more |= pass.more;
            signals = signals.min(pass.signals);
            // An eventfd that can't be written belongs to nobody any more.
            if pass.kick && lane.kick_device().is_err()
                || pass.interrupt && signal(&lane.queue.call).is_err()
            {
                tracing::warn!(queue = lane.queue.index, "an eventfd cannot be signalled");
            }
        }
        let worked = more || used > 0 || forwarded > 0;
        let pause = if relayed {
            self.pace.next(worked, signals)
        } else {
            Pause::Forever
        };
        Ok(Progress {
            used,
            forwarded,
            pause,
        })
    }

    /// With the device stopped: shows the guest what is left and says where each
    /// queue stands, by queue index. For migration.
    ///
    /// # Errors
    /// As [`Relay::settle`](super::Relay::settle); a direct queue's in-flight chains are taken as its ring names them.
    pub fn positions(&mut self, dirty: &dyn Dirty) -> Result<Vec<(u16, Position)>, Error> {
        self.lanes
            .iter_mut()
            .map(|lane| {
                let position = match lane.mode.relay() {
                    Some(relay) => relay.finish(dirty).and_then(|_| relay.settle()),
                    None => lane.queue.ring.position(),
                };
                match position {
                    Ok(position) => Ok((lane.queue.index, position)),
                    Err(source) => Err(lane.failed(source)),
                }
            })
            .collect()
    }

    /// Changes how `targets` reach the running device, in place. The guest notices nothing but a
    /// pause of some hundred microseconds and a spurious interrupt. Works for devices
    /// that suspend and resume.
    ///
    /// # Errors
    /// A queue cannot change, or the device refuses. [`Device::state`] tells the rest: a running
    /// device works as before; a suspended one perhaps has some of the new rings: reset it and
    /// [`RelaySet::start`] it.
    pub fn change(
        &mut self,
        device: &mut Device,
        targets: &[(u16, Strategy)],
        dirty: &dyn Dirty,
    ) -> Result<(), Error> {
        let wanted = self.check(targets)?;
        device.suspend().map_err(refused)?;
        let prepared = match self.prepare(device, &wanted, dirty) {
            Ok(prepared) => prepared,
            Err(error) => {
                // Old rings, old modes: it goes on as it was.
                let _ = device.resume();
                for lane in &self.lanes {
                    let _ = lane.nudge();
                }
                return Err(error);
            }
        };
        for (lane, mode, base) in prepared {
            self.switch(device, lane, mode, base)?;
        }
        device.resume().map_err(refused)?;
        self.nudge()
    }

    /// Whether [`RelaySet::prepare_start`] will know where all rings stand and what is in flight, to be asked **before the
    /// device is reset**: after it a queue of which that is not known is lost to the guest, or the device
    /// would write to chains that are not its own. Only direct rings may not tell. The device and the guest's driver may
    /// go on; it takes some milliseconds to refuse.
    ///
    /// # Errors
    /// A packed ring does not tell where it stands. The kind is [`ErrorKind::InFlightUnknown`] of a
    /// split one whose device completes out of order.
    pub fn can_restart(&self) -> Result<(), Error> {
        for lane in &self.lanes {
            if let Mode::Direct = lane.mode {
                let order = lane.queue.ring.check_order(self.features.in_order);
                order.map_err(|source| lane.failed(source))?;
            }
        }
        Ok(())
    }

    /// First half of a start: what each queue becomes, `targets` changed and all others as they
    /// were. The device does not work yet, or was reset; what is in flight is given to it again.
    /// `known` says where packed rings stand that no device of this set has used; a split ring
    /// says it itself.
    ///
    /// # Errors
    /// A queue cannot become that, or does not tell where it stands; the set is as before.
    pub fn prepare_start(
        &mut self,
        targets: &[(u16, Strategy)],
        known: &[(u16, VringBase)],
        dirty: &dyn Dirty,
    ) -> Result<Prepared, Error> {
        let wanted = self.check(targets)?;
        let features = self.features;
        let mut prepared = Vec::with_capacity(self.lanes.len());
        for (position, lane) in self.lanes.iter_mut().enumerate() {
            let target = wanted.iter().find(|(lane, _)| *lane == position);
            let strategy = target.map_or(lane.mode.strategy(), |&(_, strategy)| strategy);
            let known = known.iter().find(|(queue, _)| *queue == lane.queue.index);
            let used = match known {
                Some(&(_, stands)) if lane.is_packed() => stands.at_used(),
                _ => lane.settle(dirty)?,
            };
            // A fresh private ring begins at its start, which every device takes.
            let base = if strategy == Strategy::Shadowed {
                lane.initial_base()
            } else {
                used
            };
            let mode = lane.make(strategy, features, used, base);
            let mode = mode.map_err(|source| lane.failed(source))?;
            prepared.push((position, mode, base));
        }
        Ok(Prepared(prepared))
    }

    /// Second half of a start, from the rings to the first interrupt. Works for every device. The
    /// caller has negotiated the features that the guest has and has set up all queues that are not
    /// in the set. `replay` gives the running device what the guest had set by its control queue.
    ///
    /// # Errors
    /// The device refuses, or `replay` fails; the device is reset, or lost where that fails. A
    /// device continues if only an eventfd could not be signalled.
    pub fn start(
        &mut self,
        device: &mut Device,
        prepared: Prepared,
        replay: impl FnOnce() -> Result<(), Box<dyn StdError + Send + Sync>>,
    ) -> Result<(), Error> {
        if let Err(error) = self.begin(device, prepared, replay) {
            // Without what its driver had set it would work in another way than the driver
            // believes, unnoticed: filters that are gone, queue pairs that are silent.
            if device.state() != State::Owned {
                let _ = device.reset();
            }
            return Err(error);
        }
        self.nudge()
    }

    fn begin(
        &mut self,
        device: &mut Device,
        prepared: Prepared,
        replay: impl FnOnce() -> Result<(), Box<dyn StdError + Send + Sync>>,
    ) -> Result<(), Error> {
        for (lane, mode, base) in prepared.0 {
            self.set_up(device, lane, mode, base)?;
        }
        device.start().map_err(refused)?;
        replay().map_err(Error::context("the control state cannot be replayed"))
    }

    /// Positions in `lanes` of what is to change, without what is so already.
    fn check(&self, targets: &[(u16, Strategy)]) -> Result<Vec<(usize, Strategy)>, Error> {
        let mut wanted = Vec::with_capacity(targets.len());
        for &(queue, strategy) in targets {
            let position = self.lanes.iter().position(|lane| lane.queue.index == queue);
            let position = position.ok_or_else(|| no_such_queue(queue))?;
            if strategy == Strategy::Shadowed && self.features.in_order {
                // Private rings don't keep the order that IN_ORDER promises.
                return Err(Error::other(format!(
                    "queue {queue} cannot be shadowed: IN_ORDER was negotiated"
                )));
            }
            let lane = self.lanes.get(position);
            if strategy == Strategy::Mediated && lane.is_some_and(Lane::is_packed) {
                return Err(Error::other(format!(
                    "queue {queue} cannot be mediated: a packed ring has no used ring of its own; \
                     shadow it"
                )));
            }
            wanted.push((position, strategy));
        }
        Ok(wanted)
    }

    fn prepare(
        &mut self,
        device: &Device,
        wanted: &[(usize, Strategy)],
        dirty: &dyn Dirty,
    ) -> Result<Vec<(usize, Mode, VringBase)>, Error> {
        let mut prepared = Vec::with_capacity(wanted.len());
        for &(position, strategy) in wanted {
            let features = self.features;
            let Some(lane) = self.lanes.get_mut(position) else {
                continue;
            };
            let now = lane.mode.strategy();
            if now == strategy {
                continue;
            }
            let stopped = device.vring_base(lane.queue.index);
            let base = match (now, strategy) {
                (Strategy::Direct, Strategy::Shadowed) => lane.take_over(stopped)?,
                (Strategy::Shadowed, _) | (_, Strategy::Shadowed) => lane.settle(dirty)?,
                _ => {
                    // Only the used ring changes: the device goes on where it
                    // stands, with what it has taken.
                    if let Some(relay) = lane.mode.relay() {
                        let finished = relay.finish(dirty);
                        finished.map_err(|source| lane.failed(source))?;
                    }
                    stopped.map_err(refused)?
                }
            };
            let mode = lane.make(strategy, features, base, base);
            let mode = mode.map_err(|source| lane.failed(source))?;
            prepared.push((position, mode, base));
        }
        Ok(prepared)
    }

    fn switch(
        &mut self,
        device: &mut Device,
        position: usize,
        mut mode: Mode,
        base: VringBase,
    ) -> Result<(), Error> {
        let Some(lane) = self.lanes.get_mut(position) else {
            return Ok(());
        };
        let allowed = lane.allowed();
        device
            .switch_vring(lane.queue.index, &lane.config(&mut mode, base), &allowed)
            .map_err(refused)?;
        lane.mode = mode;
        Ok(())
    }

    fn set_up(
        &mut self,
        device: &mut Device,
        position: usize,
        mut mode: Mode,
        base: VringBase,
    ) -> Result<(), Error> {
        let Some(lane) = self.lanes.get_mut(position) else {
            return Ok(());
        };
        let (queue, allowed) = (lane.queue.index, lane.allowed());
        let initial = lane.initial_base();
        device
            .set_vring(queue, &lane.config(&mut mode, base), &allowed)
            .and_then(|()| device.enable_vring(queue))
            .map_err(|source| {
                // Some devices begin nowhere but at the start of a ring.
                if source.kind() != ErrorKind::Refused || base == initial {
                    return refused(source);
                }
                Error::other(format!(
                    "queue {queue} stands at {base} and the device refuses to begin there: shadow \
                     it"
                ))
                .because(source)
            })?;
        lane.mode = mode;
        lane.broken = false;
        Ok(())
    }

    fn nudge(&mut self) -> Result<(), Error> {
        self.pace = Pace::default();
        self.lanes.iter().try_for_each(Lane::nudge)
    }
}

/// For `map_err`: the device refused.
fn refused(source: Error) -> Error {
    Error::other("the device refused to change its rings").because(source)
}

/// A queue that is not in the set.
fn no_such_queue(queue: u16) -> Error {
    Error::other(format!("queue {queue} is not among the relayed queues"))
}
