//! Full shadow of one queue: the device works on a ring of ours whose
//! descriptors name the guest's buffers. Both rings are split, or both packed.
//!
//! ```text
//!   guest's ring                 id map (private memory)             private ring
//!   avail --> DeviceQueue::pop -> in_flight[head] = chain --> DriverQueue::add  --> device
//!   used  <-- push_used <-- mark what it may write <-- pop_used <------------------- device
//! ```
//! Payload is not touched: IOVA = guest-physical address. Indirect tables of
//! the guest are resolved into the private ring, so the device never reads a descriptor that
//! the guest can change, and every buffer lies in guest RAM, never in the private window.

use std::sync::Arc;

use super::{Dirty, PASS_LIMIT, Pass, Position, Relay, Signals, Strategy};
use crate::device::{VringAddresses, VringBase};
use crate::memory::SharedBuffer;
use crate::ring::{
    Chain, DeviceQueue, Direction, DriverQueue, GuestRing, RingFeatures, RingFormat,
};
use crate::{Error, ErrorKind};

/// A chain that the device has.
#[derive(Debug)]
struct InFlight {
    chain: Chain,
    /// Counts up with each chain forwarded.
    number: u64,
    /// The device writes into it.
    receives: bool,
}

/// What the two sides are asked to signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listening {
    /// Nothing: there is work, and more of it is looked for.
    No,
    /// Whatever comes.
    Yes,
    /// Whatever comes but used chains: see [`ShadowQueue::used_can_wait`].
    ExceptUsed,
}

/// One shadowed queue.
#[derive(Debug)]
pub struct ShadowQueue {
    guest: DeviceQueue,
    private: DriverQueue,
    /// By head in the private ring.
    in_flight: Vec<Option<InFlight>>,
    /// Taken from the guest, and the private ring was full.
    waiting: Option<Chain>,
    forwarded: u64,
    listening: Listening,
    /// Of the chains that the device has, those into which it writes.
    receiving: u16,
    /// Chains of the device's that are enough for a while: see [`ShadowQueue::kick`].
    plenty: u16,
    /// Chains were forwarded since the device was asked last whether it wants a kick.
    kick_due: bool,
}

impl ShadowQueue {
    /// A shadow of `ring`, whose used position is that of `stands`: what a
    /// device had taken and not used is given to the device again. The private
    /// ring, of the same format and with `entries`, lies at `offset` of `private`, and the device
    /// begins at `base` in it.
    ///
    /// # Errors
    /// The private ring is smaller than the guest's, does not fit its memory, or
    /// a position is not one of such a ring.
    pub fn new(
        ring: GuestRing,
        stands: VringBase,
        private: Arc<SharedBuffer>,
        entries: u16,
        offset: u64,
        event_idx: bool,
        base: VringBase,
    ) -> Result<Self, Error> {
        if entries < ring.size() {
            return Err(Error::other(format!(
                "a private ring of {entries} entries cannot stand in for one of {}",
                ring.size()
            )));
        }
        let plenty = ring.size() - ring.size() / 8;
        let features = RingFeatures {
            packed: ring.format() == RingFormat::Packed,
            event_idx,
            ..RingFeatures::default()
        };
        Ok(Self {
            guest: DeviceQueue::new(ring, stands.at_used(), features)?,
            private: DriverQueue::with_base(private, entries, offset, features, base)?,
            in_flight: std::iter::repeat_with(|| None)
                .take(usize::from(entries))
                .collect(),
            waiting: None,
            forwarded: 0,
            listening: Listening::No,
            receiving: 0,
            plenty,
            kick_due: false,
        })
    }

    /// Gives the device all that the guest has, before it is shown the ring:
    /// a receive queue that is empty when the device begins loses frames.
    ///
    /// # Errors
    /// As [`Relay::pass`].
    pub fn fill(&mut self) -> Result<(), Error> {
        while self.forward()? > 0 {}
        Ok(())
    }

    /// Chains that the device has.
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        self.private.outstanding()
    }

    /// Chains that the guest gave and has not got back.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        usize::from(self.outstanding()) + usize::from(self.waiting.is_some())
    }

    fn take(&mut self) -> Result<Option<Chain>, Error> {
        if let Some(chain) = self.waiting.take() {
            return Ok(Some(chain));
        }
        self.guest.pop()
    }

    /// Gives the device what the guest has, as far as it fits.
    fn forward(&mut self) -> Result<u16, Error> {
        let mut forwarded = 0;
        while forwarded < PASS_LIMIT {
            let Some(chain) = self.take()? else {
                break;
            };
            // A full ring is no failure: it must not cost an error.
            let pieces = chain.pieces.len();
            if pieces > usize::from(self.private.free()) {
                let private = self.private.size();
                if pieces > usize::from(private) {
                    return Err(too_long(pieces, private));
                }
                self.waiting = Some(chain);
                break;
            }
            let head = self.private.add(&chain.pieces)?;
            self.forwarded += 1;
            forwarded += 1;
            let mut pieces = chain.pieces.iter();
            let receives = pieces.any(|piece| piece.direction == Direction::DeviceWrites);
            // `add` gave an entry of the ring, and there is one place for each, so the
            // count is no more than the ring's size.
            if let Some(place) = self.in_flight.get_mut(usize::from(head)) {
                self.receiving += u16::from(receives);
                *place = Some(InFlight {
                    chain,
                    number: self.forwarded,
                    receives,
                });
            }
        }
        Ok(forwarded)
    }

    /// Gives the guest back what the device is done with.
    fn give_back(&mut self, dirty: &dyn Dirty) -> Result<u16, Error> {
        let mut used = 0;
        while used < PASS_LIMIT {
            let Some(element) = self.private.pop_used()? else {
                break;
            };
            let place = self.in_flight.get_mut(usize::from(element.head));
            // `pop_used` gives each outstanding head once.
            let Some(InFlight {
                chain, receives, ..
            }) = place.and_then(Option::take)
            else {
                continue;
            };
            self.receiving -= u16::from(receives);
            for piece in &chain.pieces {
                if piece.direction == Direction::DeviceWrites {
                    dirty.mark(piece.iova, piece.len);
                }
            }
            self.guest.push_used(chain.id, element.written)?;
            used += 1;
        }
        Ok(used)
    }

    /// Whether the device is to be kicked, which `had` so many chains before the last were
    /// forwarded. One that has plenty is kicked when it has less, for all that came meanwhile: it
    /// finds them in the ring before that if it looks there. So a receive queue does not cost
    /// a kick for each buffer that the guest gives back; a driver that refills in batches does the same.
    fn kick(&mut self, had: u16) -> Result<bool, Error> {
        if !self.kick_due || had >= self.plenty {
            return Ok(false);
        }
        self.kick_due = false;
        self.private.needs_kick()
    }

    /// Whether the device need not signal used chains, for nobody waits for them: it writes into
    /// none of them, the guest wants no interrupt for any, and has room for as many again. They are
    /// given back with the next signal, which under traffic comes soon, or after a pause
    /// ([`Signals::Urgent`]): frames that are sent do not cost a wake-up when they are sent
    /// and one more when they are done. A guest that changes its mind is seen after the pause.
    fn used_can_wait(&self) -> Result<bool, Error> {
        let few = self.private.outstanding() < self.plenty / 2;
        let none_waits = self.waiting.is_none();
        Ok(self.receiving == 0 && few && none_waits && !self.guest.wants_interrupt()?)
    }

    /// What would end a wait now.
    fn signals(&self) -> Signals {
        match self.listening {
            Listening::No => Signals::Hints,
            Listening::ExceptUsed if self.private.outstanding() > 0 => Signals::Urgent,
            Listening::ExceptUsed | Listening::Yes => Signals::All,
        }
    }

    /// With nothing to do both sides are asked to signal; with work they are
    /// asked not to. `true`: there is work after all.
    ///
    /// While the device has plenty the guest is not asked: long before its chains run out the
    /// device signals.
    fn listen(&mut self, idle: bool) -> Result<bool, Error> {
        let listening = if !idle {
            Listening::No
        } else if self.used_can_wait()? {
            Listening::ExceptUsed
        } else {
            Listening::Yes
        };
        if listening == self.listening {
            return Ok(false);
        }
        self.listening = listening;
        let hungry = self.private.outstanding() < self.plenty;
        let from_guest = self.guest.set_notifications(idle && hungry)?;
        let from_device = self.private.set_interrupts(listening == Listening::Yes)?;
        Ok(idle && (from_device || (from_guest && self.waiting.is_none())))
    }
}

/// A chain of the guest's, its indirect table counted, has more pieces than the private ring has
/// entries.
fn too_long(pieces: usize, private: u16) -> Error {
    let message =
        format!("a chain of {pieces} pieces does not fit a private ring of {private} entries");
    Error::new(ErrorKind::BrokenByGuest { queue: None }, message)
}

impl Relay for ShadowQueue {
    fn strategy(&self) -> Strategy {
        Strategy::Shadowed
    }

    fn addresses(&self) -> VringAddresses {
        self.private.addresses()
    }

    fn size(&self) -> u16 {
        self.private.size()
    }

    fn pass(&mut self, dirty: &dyn Dirty) -> Result<Pass, Error> {
        // Buffers go to the device before the guest hears of used ones: the
        // frames that it sends upon those may come back before the next pass,
        // and a receive queue that is short of buffers loses them.
        let had = self.private.outstanding();
        let forwarded = self.forward()?;
        self.kick_due |= forwarded > 0;
        let kick = self.kick(had)?;
        let used = self.give_back(dirty)?;
        let interrupt = used > 0 && self.guest.publish()?;
        let idle = used == 0 && forwarded == 0;
        let woken = self.listen(idle)?;
        Ok(Pass {
            forwarded,
            used,
            interrupt,
            kick,
            more: !idle || woken,
            signals: self.signals(),
        })
    }

    fn finish(&mut self, dirty: &dyn Dirty) -> Result<Pass, Error> {
        let mut sum = Pass::default();
        loop {
            let used = self.give_back(dirty)?;
            sum.interrupt |= used > 0 && self.guest.publish()?;
            sum.used = sum.used.saturating_add(used);
            if used == 0 {
                return Ok(sum);
            }
        }
    }

    fn settle(&mut self) -> Result<Position, Error> {
        let mut flying: Vec<&InFlight> = self.in_flight.iter().flatten().collect();
        flying.sort_by_key(|flying| flying.number);
        let in_flight = flying
            .iter()
            .map(|flying| flying.chain.id)
            .chain(self.waiting.as_ref().map(|chain| chain.id))
            .collect::<Vec<u16>>();
        let position = match &self.guest {
            DeviceQueue::Split(queue) => {
                let (available, used) = queue.positions();
                queue.ring().arrange(used, &in_flight)?;
                Position::Split {
                    used,
                    available,
                    in_flight,
                }
            }
            DeviceQueue::Packed(queue) => Position::Packed {
                in_flight: queue.arrange()?,
                stands: queue.base(),
            },
        };
        // Whoever takes over finds the guest with kicks on.
        self.guest.set_notifications(true)?;
        self.listening = Listening::No;
        Ok(position)
    }
}
