//! The device's side of a guest's ring in whichever format was negotiated.
//!
//! ```text
//!   guest's ring --pop--> Chain (copied once, checked) --push_used, publish--> guest's ring
//! ```
//! Everything the driver writes is hostile: see [`guest`](super::guest). Owns the choice of the
//! format and nothing else; must not know what the buffers are for, nor who is signalled. A fault
//! changes nothing here: that the queue is served no longer is up to the caller.

use super::guest::GuestRing;
use super::{Direction, Piece, RingFeatures, packed, split};
use crate::Error;
use crate::device::VringBase;

/// A chain, copied once out of guest memory: what the driver changes there
/// afterwards has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// What the guest calls it, to be given back by [`DeviceQueue::push_used`]: its first
    /// descriptor, or its buffer id in a packed ring.
    pub id: u16,
    /// The pieces, guest-physical addresses, those that the device reads first; none is empty.
    /// Each was inside guest memory when checked.
    pub pieces: Vec<Piece>,
}

impl Chain {
    /// The pieces that the device reads, and those that it writes.
    #[must_use]
    pub fn split(&self) -> (&[Piece], &[Piece]) {
        let reads = |piece: &Piece| piece.direction == Direction::DeviceReads;
        self.pieces.split_at(self.pieces.partition_point(reads))
    }
}

/// A virtqueue in guest memory, served by this process.
#[derive(Debug)]
pub enum DeviceQueue {
    /// A split ring.
    Split(split::DeviceQueue),
    /// A packed ring.
    Packed(packed::DeviceQueue),
}

macro_rules! each {
    ($self:expr, $queue:ident => $call:expr) => {
        match $self {
            DeviceQueue::Split($queue) => $call,
            DeviceQueue::Packed($queue) => $call,
        }
    };
}

impl DeviceQueue {
    /// Takes a guest's ring over at `base`, with nothing in flight. To take chains once more that
    /// another device had taken, `base` is its used position. `features` as negotiated.
    ///
    /// # Errors
    /// Such a ring cannot begin at `base`.
    pub fn new(ring: GuestRing, base: VringBase, features: RingFeatures) -> Result<Self, Error> {
        match (ring, base) {
            (GuestRing::Split(ring), VringBase::Split { index }) => Ok(Self::Split(
                split::DeviceQueue::new(ring, features.event_idx, index),
            )),
            (GuestRing::Packed(ring), _) => {
                packed::DeviceQueue::new(ring, base, features).map(Self::Packed)
            }
            (ring, _) => Err(ring.cannot_begin(base)),
        }
    }

    /// Where another device begins to take what was popped and not given back once more; nothing
    /// else if all was given back.
    #[must_use]
    pub fn base(&self) -> VringBase {
        match self {
            Self::Split(queue) => VringBase::Split {
                index: queue.positions().1,
            },
            Self::Packed(queue) => queue.base(),
        }
    }

    /// Where the next chain is looked for, and where the next one is given back. Split:
    /// free-running indices; packed: offsets with their wrap counters in bit 15 (virtio 1.3,
    /// 2.8.10).
    #[must_use]
    pub fn positions(&self) -> (u16, u16) {
        each!(self, queue => queue.positions())
    }

    /// Takes the next available chain, if there is one.
    ///
    /// # Errors
    /// The driver broke a rule ([`Error::violation`]); nothing was taken.
    pub fn pop(&mut self) -> Result<Option<Chain>, Error> {
        each!(self, queue => queue.pop())
    }

    /// Gives a chain back; `written` is how many bytes were written into it. The caller has made
    /// every write to its buffers before. A packed ring shows it to the guest at once, a split
    /// one with [`DeviceQueue::publish`].
    ///
    /// # Errors
    /// The chain of a packed ring is not in flight, or with IN_ORDER not the oldest one; or guest
    /// memory cannot be accessed.
    pub fn push_used(&mut self, id: u16, written: u32) -> Result<(), Error> {
        each!(self, queue => queue.push_used(id, written))
    }

    /// Shows the guest what was given back. `true`: it wants an interrupt for what was given back
    /// since the last call.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn publish(&mut self) -> Result<bool, Error> {
        each!(self, queue => queue.publish())
    }

    /// Whether the guest, as it wishes just now, is to be interrupted for any of the chains that
    /// were popped and not given back. It may change its wish at any time.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn wants_interrupt(&self) -> Result<bool, Error> {
        each!(self, queue => queue.wants_interrupt())
    }

    /// Asks the guest for kicks, or not; it may kick anyway. `true`: chains
    /// are waiting already, perhaps without a kick.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn set_notifications(&mut self, enabled: bool) -> Result<bool, Error> {
        each!(self, queue => queue.set_notifications(enabled))
    }
}
