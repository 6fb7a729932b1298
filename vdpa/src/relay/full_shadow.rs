//! Full shadow of one queue: the device works on a private ring whose descriptors point to the
//! guest's buffers. Both rings are split, or both packed.
//!
//! ```text
//!   guest's ring                 id map (private memory)             private ring
//!   avail --> DeviceQueue::pop -> in_flight[head] = chain --> DriverQueue::add  --> device
//!   used  <-- push_used <-- mark what it may write <-- pop_used <------------------- device
//! ```
//! The payload is not copied: the device reaches the guest's buffers by the guest's addresses.
//! Indirect tables of the guest are resolved into the private ring. So the device never reads a
//! descriptor that the guest can change, and every buffer lies in guest RAM, never in the private
//! window.

use std::sync::Arc;

use super::{Dirty, PASS_LIMIT, Pass, Position, Signals, Strategy, Svq};
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
    /// Increases with each forwarded chain.
    number: u64,
    /// The device writes to it.
    receives: bool,
}

/// The signals that the two sides are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listening {
    /// None: there is work, and the relay polls for more.
    No,
    /// All events.
    Yes,
    /// All events except used chains: see [`FullShadow::used_can_wait`].
    ExceptUsed,
}

/// One shadowed queue.
#[derive(Debug)]
pub struct FullShadow {
    guest: DeviceQueue,
    private: DriverQueue,
    /// By head in the private ring.
    in_flight: Vec<Option<InFlight>>,
    /// A chain taken from the guest while the private ring was full.
    waiting: Option<Chain>,
    forwarded: u64,
    listening: Listening,
    /// Number of the device's chains to which it writes.
    receiving: u16,
    /// Number of the device's chains that last for a while: see [`FullShadow::kick`].
    plenty: u16,
    /// Chains that were forwarded since the last check whether the device wants a kick.
    unannounced: u16,
}

impl FullShadow {
    /// Shadows `ring`, whose used position is that of `ring_position`: the device gets again the
    /// chains that were taken and not used. The private ring, of the same format and with
    /// `entries`, lies at `offset` of `private`, and the device begins at `base` in it.
    ///
    /// # Errors
    /// The private ring is smaller than the guest's, does not fit its memory, or a position is
    /// impossible in such a ring.
    pub fn new(
        ring: GuestRing,
        ring_position: VringBase,
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
            guest: DeviceQueue::new(ring, ring_position.at_used(), features)?,
            private: DriverQueue::with_base(private, entries, offset, features, base)?,
            in_flight: std::iter::repeat_with(|| None)
                .take(usize::from(entries))
                .collect(),
            waiting: None,
            forwarded: 0,
            listening: Listening::No,
            receiving: 0,
            plenty,
            unannounced: 0,
        })
    }

    /// Forwards all available chains before the device gets the ring: a receive queue that is empty
    /// when the device begins loses frames.
    ///
    /// # Errors
    /// As [`Svq::pass`].
    pub fn fill(&mut self) -> Result<(), Error> {
        while self.forward()? > 0 {}
        Ok(())
    }

    /// Chains that the device has.
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        self.private.outstanding()
    }

    /// Chains that were taken from the guest and not yet returned.
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

    /// Forwards the guest's available chains to the device, as many as fit.
    fn forward(&mut self) -> Result<u16, Error> {
        let mut forwarded = 0;
        while forwarded < PASS_LIMIT {
            let Some(chain) = self.take()? else {
                break;
            };
            // A full ring is no failure: it must not produce an error.
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
            // `add` returned an entry of the ring, and there is one place for each. So the count is
            // at most the ring's size.
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

    /// Returns used chains to the guest.
    fn give_back(&mut self, dirty: &dyn Dirty) -> Result<u16, Error> {
        let mut used = 0;
        while used < PASS_LIMIT {
            let Some(element) = self.private.pop_used()? else {
                break;
            };
            let place = self.in_flight.get_mut(usize::from(element.head));
            // `pop_used` returns each outstanding head once.
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

    /// Chains that the device has, without those for which no kick was considered: it may take a
    /// chain only when it is kicked. If it found some by itself, it has more.
    fn announced(&self) -> u16 {
        self.outstanding().saturating_sub(self.unannounced)
    }

    /// Whether the device must be kicked. It `had` this many announced chains before the last were
    /// forwarded. A device with plenty is kicked when it has fewer, for all chains added meanwhile;
    /// it may find them in the ring earlier. So a receive queue does not cost a kick for each
    /// buffer that the guest returns. A driver that refills in batches does the same.
    fn kick(&mut self, had: u16) -> Result<bool, Error> {
        if self.unannounced == 0 || had >= self.plenty {
            return Ok(false);
        }
        self.unannounced = 0;
        self.private.needs_kick()
    }

    /// Whether the device may leave used chains unsignalled, because no side waits for them. It
    /// writes to none of them, the guest wants no interrupt for any, and there is room for as many
    /// again.
    ///
    /// They are returned with the next signal, which comes soon under traffic, or after a pause
    /// ([`Signals::Urgent`]). So a sent frame does not cost one wake-up when it is sent and another
    /// when it is done. The relay notices a guest that changes its suppression after the pause.
    fn used_can_wait(&self) -> Result<bool, Error> {
        let few = self.private.outstanding() < self.plenty / 2;
        let none_waits = self.waiting.is_none();
        Ok(self.receiving == 0 && few && none_waits && !self.guest.wants_interrupt()?)
    }

    /// The events that would end a wait now.
    fn signals(&self) -> Signals {
        match self.listening {
            Listening::No => Signals::Hints,
            Listening::ExceptUsed if self.private.outstanding() > 0 => Signals::Urgent,
            Listening::ExceptUsed | Listening::Yes => Signals::All,
        }
    }

    /// Enables the signals of both sides without work, and disables them with work. `true`: there
    /// is work after all.
    ///
    /// While the device has plenty of chains, the guest's kicks stay off: the device signals long
    /// before its chains run out.
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

/// A guest's chain, including its indirect table, has more pieces than the private ring has
/// entries.
fn too_long(pieces: usize, private: u16) -> Error {
    let message =
        format!("a chain of {pieces} pieces does not fit a private ring of {private} entries");
    Error::new(ErrorKind::BrokenByGuest { queue: None }, message)
}

impl Svq for FullShadow {
    fn strategy(&self) -> Strategy {
        Strategy::FullShadow
    }

    fn addresses(&self) -> VringAddresses {
        self.private.addresses()
    }

    fn size(&self) -> u16 {
        self.private.size()
    }

    fn pass(&mut self, dirty: &dyn Dirty) -> Result<Pass, Error> {
        // Forward buffers to the device before the guest sees used ones. The guest then sends
        // frames whose replies may arrive before the next pass, and a receive queue that is short
        // of buffers loses them.
        let had = self.announced();
        let forwarded = self.forward()?;
        self.unannounced = self.unannounced.saturating_add(forwarded);
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
                ring_position: queue.base(),
            },
        };
        // The next relay or device finds the guest's kicks enabled.
        self.guest.set_notifications(true)?;
        self.listening = Listening::No;
        Ok(position)
    }
}
