//! The device's side of a guest's ring, in either format.
//!
//! ```text
//!   guest's ring --pop--> Chain (copied once, checked) --push_used, publish--> guest's ring
//! ```
//! All data from the driver is untrusted: see [`guest`](super::guest). This module only selects the
//! format; the use of buffers and the signalling belong to the caller. An error changes nothing
//! here: the caller must stop serving the queue.

use super::guest_ring::GuestRing;
use super::{Chain, Piece, RingFeatures, packed, split};
use crate::Error;
use crate::device::VringBase;

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
    /// Takes over a guest's ring at `base`, with nothing in flight. To take again the chains of
    /// another device, `base` is its used position. `features` are the negotiated ones.
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

    /// The position for another device that takes again exactly the chains that were popped and not
    /// returned.
    #[must_use]
    pub fn base(&self) -> VringBase {
        match self {
            Self::Split(queue) => VringBase::Split {
                index: queue.positions().1,
            },
            Self::Packed(queue) => queue.base(),
        }
    }

    /// The positions of the next available chain and of the next used one. Split: free-running
    /// indices; packed: offsets with their wrap counters in bit 15 (virtio 1.3, 2.8.10).
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

    /// As [`DeviceQueue::pop`], with the pieces in a vector of the caller, for one allocation per
    /// queue. Returns the chain's [`Chain::id`].
    ///
    /// # Errors
    /// As [`DeviceQueue::pop`]; the pieces are undefined then.
    pub fn pop_into(&mut self, pieces: &mut Vec<Piece>) -> Result<Option<u16>, Error> {
        each!(self, queue => queue.pop_into(pieces))
    }

    /// Returns a chain; `written` is the number of bytes written to it. The caller has completed
    /// every write to its buffers before. A packed ring shows it to the guest at once, a split one
    /// with [`DeviceQueue::publish`].
    ///
    /// # Errors
    /// The chain of a packed ring is not in flight, or with IN_ORDER not the oldest one; or guest
    /// memory cannot be accessed.
    pub fn push_used(&mut self, id: u16, written: u32) -> Result<(), Error> {
        each!(self, queue => queue.push_used(id, written))
    }

    /// Returns several chains, in the order in which they were popped. The guest sees all or none,
    /// as the buffers of one frame need. As [`DeviceQueue::push_used`] otherwise.
    ///
    /// # Errors
    /// As [`DeviceQueue::push_used`].
    pub fn push_used_together(&mut self, chains: &[(u16, u32)]) -> Result<(), Error> {
        match self {
            Self::Split(queue) => chains
                .iter()
                .try_for_each(|&(id, written)| queue.push_used(id, written)),
            Self::Packed(queue) => queue.push_used_together(chains),
        }
    }

    /// Shows the returned chains to the guest, and leaves the decision about an interrupt to
    /// [`DeviceQueue::publish`]. So a successor of this process finds them returned.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn show(&mut self) -> Result<(), Error> {
        match self {
            Self::Split(queue) => queue.show(),
            // Shown by `push_used`.
            Self::Packed(_) => Ok(()),
        }
    }

    /// Shows the returned chains to the guest. `true`: it wants an interrupt for those since the
    /// last call.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn publish(&mut self) -> Result<bool, Error> {
        each!(self, queue => queue.publish())
    }

    /// Whether the guest currently wants an interrupt for any of the chains that were popped and
    /// not returned. It may change its suppression at any time.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn wants_interrupt(&self) -> Result<bool, Error> {
        each!(self, queue => queue.wants_interrupt())
    }

    /// Enables or disables kicks from the guest; it may kick anyway. `true`: chains are waiting
    /// already, perhaps without a kick.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn set_notifications(&mut self, enabled: bool) -> Result<bool, Error> {
        each!(self, queue => queue.set_notifications(enabled))
    }
}
