//! The relayed queues of one device: their private memory, their transitions on a running device,
//! and the poll that drives them.
//!
//! ```text
//!   change:   Running --suspend--> drain, prepare --switch_vring--> resume --> Running
//!                                        |                             |
//!                                     failed: resumed as it was     failed: Suspended
//!   start:    Owned (after a reset) --> prepare_start: drain, settle --> the caller negotiates
//!                    --> start: set_vring, enable --> DRIVER_OK --> replay --> Running
//! ```
//! After each transition every queue gets one spurious kick and one spurious interrupt: either may
//! have gone to an eventfd that is no longer read.
//!
//! **Chains that the device took and did not use.** A device that suspends keeps them when only its
//! used ring changes. When the whole ring changes, the device begins at the guest's used index. The
//! avail entries from there on name the chains in flight
//! ([`arrange`](crate::ring::split::GuestRing::arrange)). A used shadow counts them.
//!
//! Under [`Strategy::Direct`] they are not counted, so a suspended device must hold none (its base
//! is the used index). Otherwise the change is refused, and [`Strategy::UsedShadow`] must come
//! first. A reset device cannot be queried, so the entries are taken as they are. That is right for
//! a device that completes in order; [`SvqSet::can_restart`] looks for signs of the contrary before
//! the reset. A transmitted frame may go out twice then, and none is lost.
//!
//! **Packed rings** are direct or shadowed. A packed ring is not taken over while its suspended
//! device holds chains. Used descriptors overwrite others, so with completion out of order the held
//! chains' descriptors may be lost. Try again until the device holds none. After a reset the flags
//! in the ring show the position
//! ([`packed::GuestRing::ring_position`](crate::ring::packed::GuestRing::ring_position)), if each
//! chain is one descriptor. A shadow has copies of the descriptors, and writes them again where the
//! next device begins.
//!
//! Private memory of one queue, mapped once, in the guest's address space:
//! ```text
//!   split    | descriptors, avail ring | used ring, full shadow | used ring, used shadow |
//!            +--- device reads only ---+--- device writes ------+--- device writes ------+
//!   packed   | driver event            | descriptors, device event |
//!            +--- device reads only ---+--- device writes ---------+
//! ```
//! In the guest's address space a direct queue can have the device write there. The relay trusts
//! none of it. Changed descriptors of a packed ring make the device use other memory of that guest
//! than is reported. That harms only the guest itself.
//!
//! Other parts of the device are not handled here: a control queue belongs to the caller.

mod queues;
mod svq_queue;

use std::error::Error as StdError;

use vmm_sys_util::eventfd::EventFd;

pub use self::svq_queue::RelayedQueue;
use self::svq_queue::{Features, Mode, SvqQueue, signal};
use super::{Dirty, Pace, Pause, Position, Signals, Strategy};
use crate::device::{Device, DeviceInfo, State, VringBase};
use crate::iotlb::Iotlb;
use crate::ring::RingFeatures;
use crate::window::PrivateWindow;
use crate::{Error, ErrorKind};

/// The new mode of each queue when its device starts: see [`SvqSet::prepare_start`].
#[derive(Debug)]
pub struct Prepared(Vec<(usize, Mode, VringBase)>);

/// The result of a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Used chains shown to the guest.
    pub used: u32,
    /// Chains forwarded to the device.
    pub forwarded: u32,
    /// When to poll again.
    pub pause: Pause,
}

/// The relayed queues of one device. See the module.
#[derive(Debug)]
pub struct SvqSet {
    svqs: Vec<SvqQueue>,
    features: Features,
    pace: Pace,
}

impl SvqSet {
    /// Creates private rings for `queues`, which are all direct, and maps them in address space 0.
    /// `features` are the negotiated ones.
    ///
    /// # Errors
    /// A ring of another format, or a private ring cannot be created or mapped; nothing stays
    /// mapped.
    pub fn new(
        info: &DeviceInfo,
        features: u64,
        queues: Vec<RelayedQueue>,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<Self, Error> {
        let ring = RingFeatures::of(features);
        let mut set = Self {
            svqs: Vec::with_capacity(queues.len()),
            features: Features {
                event_idx: ring.event_idx,
                in_order: ring.in_order,
                format: ring.format(),
            },
            pace: Pace::default(),
        };
        for queue in queues {
            if let Err(error) = set.push(info, queue, iotlb, window) {
                // The first error is more useful than an error of the clean-up.
                let _ = set.dismantle(iotlb, window);
                return Err(error);
            }
        }
        Ok(set)
    }

    /// The strategy of a queue; `None` if it is not in the set.
    #[must_use]
    pub fn strategy(&self, queue: u16) -> Option<Strategy> {
        let svq = self.svqs.iter().find(|svq| svq.queue.index == queue)?;
        Some(svq.mode.strategy())
    }

    /// The eventfds whose signal justifies an early poll. The waiter also reads them.
    pub fn hints(&self) -> impl Iterator<Item = &EventFd> {
        self.svqs.iter().flat_map(|svq| {
            let (hint, kick) = match svq.mode {
                Mode::Direct => (None, None),
                Mode::UsedShadow(_) => (Some(&svq.hint), None),
                Mode::FullShadow(_) => (Some(&svq.hint), Some(&*svq.queue.kick)),
            };
            hint.into_iter().chain(kick)
        })
    }

    /// One bounded pass over all relayed queues.
    ///
    /// # Errors
    /// A queue broke. It is skipped from now on, and the others continue with the next call.
    pub fn poll(&mut self, dirty: &dyn Dirty) -> Result<Progress, Error> {
        let (mut used, mut forwarded) = (0u32, 0u32);
        let (mut more, mut relayed) = (false, false);
        let mut signals = Signals::All;
        for svq in &mut self.svqs {
            let Some(relay) = svq.mode.relay().filter(|_| !svq.broken) else {
                continue;
            };
            relayed = true;
            let pass = match relay.pass(dirty) {
                Ok(pass) => pass,
                Err(source) => {
                    svq.broken = true;
                    let message = format!("queue {} is broken", svq.queue.index);
                    return Err(svq.blamed(message, source));
                }
            };
            used += u32::from(pass.used);
            forwarded += u32::from(pass.forwarded);
            more |= pass.more;
            signals = signals.min(pass.signals);
            // An eventfd that cannot be written is no longer in use.
            if pass.kick && svq.kick_device().is_err()
                || pass.interrupt && signal(&svq.queue.call).is_err()
            {
                tracing::warn!(queue = svq.queue.index, "cannot signal an eventfd");
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

    /// Shows the guest all remaining used chains of a stopped device, and returns the position of
    /// each queue, by queue index. For migration.
    ///
    /// # Errors
    /// As [`Svq::settle`](super::Svq::settle); a direct queue's chains in flight are those that
    /// its ring names.
    pub fn positions(&mut self, dirty: &dyn Dirty) -> Result<Vec<(u16, Position)>, Error> {
        self.svqs
            .iter_mut()
            .map(|svq| {
                let position = match svq.mode.relay() {
                    Some(relay) => relay.finish(dirty).and_then(|_| relay.settle()),
                    None => svq.queue.ring.position(),
                };
                match position {
                    Ok(position) => Ok((svq.queue.index, position)),
                    Err(source) => Err(svq.failed(source)),
                }
            })
            .collect()
    }

    /// Changes the strategies of `targets` on the running device, in place. The guest notices only
    /// a pause of some hundred microseconds and a spurious interrupt. Works for devices that
    /// suspend and resume.
    ///
    /// # Errors
    /// A queue cannot change, or the device refuses. [`Device::state`] shows the result: a running
    /// device works as before. A suspended one may have some of the new rings: reset it and
    /// [`SvqSet::start`] it.
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
                // Old rings, old modes: the device continues as before.
                let _ = device.resume();
                for svq in &self.svqs {
                    let _ = svq.spurious_notify();
                }
                return Err(error);
            }
        };
        for (svq, mode, base) in prepared {
            self.switch(device, svq, mode, base)?;
        }
        device.resume().map_err(refused)?;
        self.spurious_notify()
    }

    /// Whether [`SvqSet::prepare_start`] will know the positions of all rings and the chains in
    /// flight. To be called **before the device is reset**. After the reset an unknown queue is
    /// lost to the guest, or the device would write to chains that are not its own. Only direct
    /// rings may fail this. The device and the guest's driver may continue; a refusal takes some
    /// milliseconds.
    ///
    /// # Errors
    /// A packed ring does not show its position. For a split ring whose device completes out of
    /// order, the kind is [`ErrorKind::InFlightUnknown`].
    pub fn can_restart(&self) -> Result<(), Error> {
        for svq in &self.svqs {
            if let Mode::Direct = svq.mode {
                let order = svq.queue.ring.check_order(self.features.in_order);
                order.map_err(|source| svq.failed(source))?;
            }
        }
        Ok(())
    }

    /// First half of a start: the new mode of each queue, with `targets` changed and all others as
    /// before. The device does not run yet, or was reset; it gets the chains in flight again.
    /// `known` has the positions of packed rings that no device of this set has used; a split ring
    /// shows its own.
    ///
    /// # Errors
    /// A queue cannot get that strategy, or does not show its position; the set is as before.
    pub fn prepare_start(
        &mut self,
        targets: &[(u16, Strategy)],
        known: &[(u16, VringBase)],
        dirty: &dyn Dirty,
    ) -> Result<Prepared, Error> {
        let wanted = self.check(targets)?;
        let features = self.features;
        let mut prepared = Vec::with_capacity(self.svqs.len());
        for (position, svq) in self.svqs.iter_mut().enumerate() {
            let target = wanted.iter().find(|(svq, _)| *svq == position);
            let strategy = target.map_or(svq.mode.strategy(), |&(_, strategy)| strategy);
            let known = known.iter().find(|(queue, _)| *queue == svq.queue.index);
            let used = match known {
                Some(&(_, ring_position)) if svq.is_packed() => ring_position.at_used(),
                _ => svq.settle(dirty)?,
            };
            // A fresh private ring begins at its start, which every device accepts.
            let base = if strategy == Strategy::FullShadow {
                svq.initial_base()
            } else {
                used
            };
            let mode = svq.make(strategy, features, used, base);
            let mode = mode.map_err(|source| svq.failed(source))?;
            prepared.push((position, mode, base));
        }
        Ok(Prepared(prepared))
    }

    /// Second half of a start, from the rings to the first interrupt. Works for every device. The
    /// caller has negotiated the guest's features and has set up all queues outside the set.
    /// `replay` restores on the running device the guest's settings by the control queue.
    ///
    /// # Errors
    /// The device refuses, or `replay` fails; the device is reset, or lost if that fails. A device
    /// continues if only an eventfd could not be signalled.
    pub fn start(
        &mut self,
        device: &mut Device,
        prepared: Prepared,
        replay: impl FnOnce() -> Result<(), Box<dyn StdError + Send + Sync>>,
    ) -> Result<(), Error> {
        if let Err(error) = self.begin(device, prepared, replay) {
            // Without the driver's settings the device would silently differ from the driver's
            // view: filters are gone, queue pairs do not work.
            if device.state() != State::Owned {
                let _ = device.reset();
            }
            return Err(error);
        }
        self.spurious_notify()
    }

    fn begin(
        &mut self,
        device: &mut Device,
        prepared: Prepared,
        replay: impl FnOnce() -> Result<(), Box<dyn StdError + Send + Sync>>,
    ) -> Result<(), Error> {
        for (svq, mode, base) in prepared.0 {
            self.set_up(device, svq, mode, base)?;
        }
        device.start().map_err(refused)?;
        replay().map_err(Error::context("cannot replay the control state"))
    }

    /// Positions in `svqs` of the queues to change, without those that are unchanged.
    fn check(&self, targets: &[(u16, Strategy)]) -> Result<Vec<(usize, Strategy)>, Error> {
        let mut wanted = Vec::with_capacity(targets.len());
        for &(queue, strategy) in targets {
            let position = self.svqs.iter().position(|svq| svq.queue.index == queue);
            let position = position.ok_or_else(|| no_such_queue(queue))?;
            if strategy == Strategy::FullShadow && self.features.in_order {
                // Private rings do not keep the order that IN_ORDER guarantees.
                return Err(Error::other(format!(
                    "cannot shadow queue {queue}: IN_ORDER was negotiated"
                )));
            }
            let svq = self.svqs.get(position);
            if strategy == Strategy::UsedShadow && svq.is_some_and(SvqQueue::is_packed) {
                return Err(Error::other(format!(
                    "cannot shadow the used ring of queue {queue}: a packed ring has none; \
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
            let Some(svq) = self.svqs.get_mut(position) else {
                continue;
            };
            let now = svq.mode.strategy();
            if now == strategy {
                continue;
            }
            let stopped = device.vring_base(svq.queue.index);
            let base = match (now, strategy) {
                (Strategy::Direct, Strategy::FullShadow) => svq.take_over(stopped)?,
                (Strategy::FullShadow, _) | (_, Strategy::FullShadow) => svq.settle(dirty)?,
                _ => {
                    // Only the used ring changes: the device continues at its position, with the
                    // chains it has taken.
                    if let Some(relay) = svq.mode.relay() {
                        let finished = relay.finish(dirty);
                        finished.map_err(|source| svq.failed(source))?;
                    }
                    stopped.map_err(refused)?
                }
            };
            let mode = svq.make(strategy, features, base, base);
            let mode = mode.map_err(|source| svq.failed(source))?;
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
        let Some(svq) = self.svqs.get_mut(position) else {
            return Ok(());
        };
        let allowed = svq.allowed();
        device
            .switch_vring(svq.queue.index, &svq.config(&mut mode, base), &allowed)
            .map_err(refused)?;
        svq.mode = mode;
        Ok(())
    }

    fn set_up(
        &mut self,
        device: &mut Device,
        position: usize,
        mut mode: Mode,
        base: VringBase,
    ) -> Result<(), Error> {
        let Some(svq) = self.svqs.get_mut(position) else {
            return Ok(());
        };
        let (queue, allowed) = (svq.queue.index, svq.allowed());
        let initial = svq.initial_base();
        device
            .set_vring(queue, &svq.config(&mut mode, base), &allowed)
            .and_then(|()| device.enable_vring(queue))
            .map_err(|source| {
                // Some devices can begin only at the start of a ring.
                if source.kind() != ErrorKind::Refused || base == initial {
                    return refused(source);
                }
                Error::other(format!(
                    "the device refuses to begin queue {queue} at {base}: shadow it"
                ))
                .because(source)
            })?;
        svq.mode = mode;
        svq.broken = false;
        Ok(())
    }

    fn spurious_notify(&mut self) -> Result<(), Error> {
        self.pace = Pace::default();
        self.svqs.iter().try_for_each(SvqQueue::spurious_notify)
    }
}

/// For `map_err`: the device refused.
fn refused(source: Error) -> Error {
    Error::other("the device refused to change its rings").because(source)
}

/// A queue that is not in the set.
fn no_such_queue(queue: u16) -> Error {
    Error::other(format!("queue {queue} is not relayed"))
}
