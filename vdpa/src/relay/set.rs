//! The relayed queues of one device: their private memory, their transitions
//! on a running device, and the poll that drives them.
//!
//! ```text
//!   change:   Running --suspend--> drain, prepare --switch_vring--> resume --> Running
//!                                        |                             |
//!                                     failed: resumed as it was     failed: Suspended
//!   restart:  Owned (after reset) --> drain, settle --> Restart::negotiate --> set_vring, enable
//!                    --> start --> Restart::replay --> Running
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
//! **Packed rings** are direct or shadowed. A suspended device that holds chains of one
//! ([`PackedInFlight`](super::RelayError::PackedInFlight)) is not taken over: used descriptors take the places of others,
//! so if it completes out of order those of the chains that it holds may be gone.
//! Try again, as soon as traffic lets it hold nothing. After a reset the flags in the ring tell where it stands
//! ([`packed::GuestRing::standing`](crate::ring::packed::GuestRing::standing)), if each chain is one descriptor. A shadow has copies of the
//! descriptors, and writes them again where the next device begins.
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

mod error;
mod lane;
mod queues;

use std::error::Error;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

pub use self::error::{
    ChangeFailed, Halted, QueueFailed, RelaySetError, RestartFailed, TransitionError,
};
use self::lane::{Features, Lane, Mode, signal};
use super::ring::begin_at_used;
use super::{Dirty, Pace, Pause, Position, Signals, Strategy};
use crate::device::{
    Device, DeviceError, DeviceInfo, Negotiated, Owned, Running, Suspended, VringBase,
};
use crate::iotlb::Iotlb;
use crate::ring::{GuestRing, RingFeatures};
use crate::window::PrivateWindow;

/// A queue of the guest's that can be relayed.
#[derive(Debug, Clone)]
pub struct RelayedQueue {
    /// Index of the queue on the device.
    pub index: u16,
    /// The guest's ring; all of a device have the same format.
    pub ring: GuestRing,
    /// Signalled by the guest. While shadowed the device does not hear it: who waits
    /// on [`RelaySet::hints`] does. A guest with a doorbell must be given this instead.
    pub kick: Arc<EventFd>,
    /// Interrupts the guest.
    pub call: Arc<EventFd>,
}

/// What a caller does to bring a device up again after a reset.
pub trait Restart {
    /// Maps memory again ([`Iotlb::remap_after_reset`]), puts groups into their
    /// address spaces, negotiates the features that the guest has, and sets up
    /// and enables all queues that are not in the set.
    ///
    /// # Errors
    /// The device can't be brought up; see [`RestartFailed`].
    fn negotiate(&mut self, device: Device<Owned>) -> Result<Device<Negotiated>, RestartFailed>;

    /// After DRIVER_OK: replays what the guest had set by its control queue.
    ///
    /// # Errors
    /// Whatever the caller makes of it; the device is reset then.
    fn replay(&mut self, device: &mut Device<Running>) -> Result<(), Box<dyn Error + Send + Sync>>;
}

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
    /// [`RelaySetError`]; nothing stays mapped.
    pub fn new(
        info: &DeviceInfo,
        features: u64,
        queues: Vec<RelayedQueue>,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<Self, RelaySetError> {
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
    pub fn poll(&mut self, dirty: &dyn Dirty) -> Result<Progress, QueueFailed> {
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
                    let queue = lane.queue.index;
                    return Err(QueueFailed { queue, source });
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
    pub fn positions(
        &mut self,
        dirty: &dyn Dirty,
    ) -> Result<Vec<(u16, Position)>, TransitionError> {
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

    /// Changes how `targets` reach the device, in place. The guest notices nothing but a
    /// pause of some hundred microseconds and a spurious interrupt. Works for devices
    /// that suspend and resume.
    ///
    /// # Errors
    /// [`ChangeFailed`] with the device as it is then.
    pub fn change(
        &mut self,
        device: Device<Running>,
        targets: &[(u16, Strategy)],
        dirty: &dyn Dirty,
    ) -> Result<Device<Running>, ChangeFailed> {
        let wanted = match self.check(targets) {
            Ok(wanted) => wanted,
            Err(error) => {
                let device = Halted::Running(device);
                return Err(ChangeFailed { device, error });
            }
        };
        let device = device.suspend().map_err(|failed| ChangeFailed {
            device: failed.device.map_or(Halted::Gone, Halted::Running),
            error: TransitionError::Device {
                source: failed.error,
            },
        })?;
        let prepared = match self.prepare(&device, &wanted, dirty) {
            Ok(prepared) => prepared,
            Err(error) => {
                // Old rings, old modes: it goes on as it was.
                let device = match device.resume() {
                    Ok(device) => Halted::Running(device),
                    Err(failed) => failed.device.map_or(Halted::Gone, Halted::Suspended),
                };
                for lane in &self.lanes {
                    let _ = lane.nudge();
                }
                return Err(ChangeFailed { device, error });
            }
        };
        let mut device = device;
        for (lane, mode, base) in prepared {
            if let Err(error) = self.switch(&mut device, lane, mode, base) {
                let device = Halted::Suspended(device);
                return Err(ChangeFailed { device, error });
            }
        }
        let device = device.resume().map_err(|failed| ChangeFailed {
            device: failed.device.map_or(Halted::Gone, Halted::Suspended),
            error: TransitionError::Device {
                source: failed.error,
            },
        })?;
        self.nudge(device)
    }

    /// Whether [`RelaySet::restart`] will know where all rings stand and what is in flight, to be asked **before the
    /// device is reset**: after it a queue of which that is not known is lost to the guest, or the device
    /// would write to chains that are not its own. Only direct rings may not tell. The device and the guest's driver may
    /// go on; it takes some milliseconds to refuse.
    ///
    /// # Errors
    /// [`TransitionError::Queue`] with [`RelayError::Standing`](super::RelayError::Standing) of a packed ring,
    /// with [`RelayError::OutOfOrder`](super::RelayError::OutOfOrder) of a split one.
    pub fn can_restart(&self) -> Result<(), TransitionError> {
        for lane in &self.lanes {
            if let Mode::Direct = lane.mode {
                let order = lane.queue.ring.check_order(self.features.in_order);
                order.map_err(|source| lane.failed(source))?;
            }
        }
        Ok(())
    }

    /// Brings a device that was reset up again, with `targets` changed and all
    /// other queues as they were. Works for every device; what is in flight is given to it again.
    ///
    /// # Errors
    /// [`ChangeFailed`] with the device as it is then.
    pub fn restart(
        &mut self,
        device: Device<Owned>,
        targets: &[(u16, Strategy)],
        dirty: &dyn Dirty,
        driver: &mut dyn Restart,
    ) -> Result<Device<Running>, ChangeFailed> {
        let prepared = self
            .check(targets)
            .and_then(|wanted| self.prepare_restart(&wanted, &[], dirty));
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                let device = Halted::Reset(device);
                return Err(ChangeFailed { device, error });
            }
        };
        let device = driver.negotiate(device).map_err(|failed| ChangeFailed {
            device: failed.device.map_or(Halted::Gone, Halted::Reset),
            error: TransitionError::Negotiate {
                source: failed.source,
            },
        })?;
        self.bring_up(device, prepared, driver)
    }

    /// Starts a device for the first time, with `targets` relayed before it writes anything. What
    /// is not in the set has been set up by the caller, so [`Restart::negotiate`] is not called.
    /// `known` says where packed rings stand; a split ring says it itself.
    ///
    /// # Errors
    /// [`ChangeFailed`] with the device as it is then.
    pub fn start(
        &mut self,
        device: Device<Negotiated>,
        targets: &[(u16, Strategy)],
        known: &[(u16, VringBase)],
        dirty: &dyn Dirty,
        driver: &mut dyn Restart,
    ) -> Result<Device<Running>, ChangeFailed> {
        let prepared = self
            .check(targets)
            .and_then(|wanted| self.prepare_restart(&wanted, known, dirty));
        match prepared {
            Ok(prepared) => self.bring_up(device, prepared, driver),
            Err(error) => {
                let device = error::back_to_reset(device);
                Err(ChangeFailed { device, error })
            }
        }
    }

    /// From the rings to the first interrupt.
    fn bring_up(
        &mut self,
        mut device: Device<Negotiated>,
        prepared: Vec<(usize, Mode, VringBase)>,
        driver: &mut dyn Restart,
    ) -> Result<Device<Running>, ChangeFailed> {
        for (lane, mode, base) in prepared {
            if let Err(error) = self.set_up(&mut device, lane, mode, base) {
                let device = error::back_to_reset(device);
                return Err(ChangeFailed { device, error });
            }
        }
        let mut device = device.start().map_err(|failed| ChangeFailed {
            device: failed.device.map_or(Halted::Gone, Halted::Reset),
            error: TransitionError::Device {
                source: failed.error,
            },
        })?;
        if let Err(source) = driver.replay(&mut device) {
            // Without what its driver had set it would work in another way than the driver believes, and nobody
            // would notice: filters that are gone, queue pairs that are silent.
            let device = match device.reset() {
                Ok(device) => Halted::Reset(device),
                Err(failed) => failed.device.map_or(Halted::Gone, Halted::Reset),
            };
            let error = TransitionError::Replay { source };
            return Err(ChangeFailed { device, error });
        }
        self.nudge(device)
    }

    /// Positions in `lanes` of what is to change, without what is so already.
    fn check(
        &self,
        targets: &[(u16, Strategy)],
    ) -> Result<Vec<(usize, Strategy)>, TransitionError> {
        let mut wanted = Vec::with_capacity(targets.len());
        for &(queue, strategy) in targets {
            let position = self.lanes.iter().position(|lane| lane.queue.index == queue);
            let position = position.ok_or(TransitionError::NoSuchQueue { queue })?;
            if strategy == Strategy::Shadowed && self.features.in_order {
                return Err(TransitionError::InOrder { queue });
            }
            let lane = self.lanes.get(position);
            if strategy == Strategy::Mediated && lane.is_some_and(Lane::is_packed) {
                return Err(TransitionError::PackedMediated { queue });
            }
            wanted.push((position, strategy));
        }
        Ok(wanted)
    }

    fn prepare(
        &mut self,
        device: &Device<Suspended>,
        wanted: &[(usize, Strategy)],
        dirty: &dyn Dirty,
    ) -> Result<Vec<(usize, Mode, VringBase)>, TransitionError> {
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
                    stopped.map_err(|source| TransitionError::Device { source })?
                }
            };
            let mode = lane.make(strategy, features, base, base);
            let mode = mode.map_err(|source| lane.failed(source))?;
            prepared.push((position, mode, base));
        }
        Ok(prepared)
    }

    fn prepare_restart(
        &mut self,
        wanted: &[(usize, Strategy)],
        known: &[(u16, VringBase)],
        dirty: &dyn Dirty,
    ) -> Result<Vec<(usize, Mode, VringBase)>, TransitionError> {
        let features = self.features;
        let mut prepared = Vec::with_capacity(self.lanes.len());
        for (position, lane) in self.lanes.iter_mut().enumerate() {
            let target = wanted.iter().find(|(lane, _)| *lane == position);
            let strategy = target.map_or(lane.mode.strategy(), |&(_, strategy)| strategy);
            let known = known.iter().find(|(queue, _)| *queue == lane.queue.index);
            let used = match known {
                Some(&(_, stands)) if lane.is_packed() => begin_at_used(stands),
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
        Ok(prepared)
    }

    fn switch(
        &mut self,
        device: &mut Device<Suspended>,
        position: usize,
        mut mode: Mode,
        base: VringBase,
    ) -> Result<(), TransitionError> {
        let Some(lane) = self.lanes.get_mut(position) else {
            return Ok(());
        };
        let allowed = lane.allowed();
        device
            .switch_vring(lane.queue.index, &lane.config(&mut mode, base), &allowed)
            .map_err(|source| TransitionError::Device { source })?;
        lane.mode = mode;
        Ok(())
    }

    fn set_up(
        &mut self,
        device: &mut Device<Negotiated>,
        position: usize,
        mut mode: Mode,
        base: VringBase,
    ) -> Result<(), TransitionError> {
        let Some(lane) = self.lanes.get_mut(position) else {
            return Ok(());
        };
        let (queue, allowed) = (lane.queue.index, lane.allowed());
        let initial = lane.initial_base();
        device
            .set_vring(queue, &lane.config(&mut mode, base), &allowed)
            .and_then(|()| device.enable_vring(queue))
            .map_err(|source| match source {
                DeviceError::QueueRefused { .. } if base != initial => TransitionError::Base {
                    queue,
                    base,
                    source,
                },
                source => TransitionError::Device { source },
            })?;
        lane.mode = mode;
        lane.broken = false;
        Ok(())
    }

    fn nudge(&mut self, device: Device<Running>) -> Result<Device<Running>, ChangeFailed> {
        self.pace = Pace::default();
        for lane in &self.lanes {
            if let Err(error) = lane.nudge() {
                let device = Halted::Running(device);
                return Err(ChangeFailed { device, error });
            }
        }
        Ok(device)
    }
}
