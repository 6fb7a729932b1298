//! The guest's side of a shadow, in either format: the one place where a
//! shadow looks at which it is.

use super::super::ring::begin_at_used;
use super::super::{Position, RelayError, RelayedRing};
use crate::device::VringBase;
use crate::ring::{Piece, RingFeatures, packed, split};

/// A chain taken from the guest.
#[derive(Debug)]
pub(super) struct Chain {
    /// What the guest calls it: the first descriptor, or the buffer id.
    pub(super) name: u16,
    /// Its pieces, all inside guest memory.
    pub(super) pieces: Vec<Piece>,
}

/// The device's side of the guest's ring.
#[derive(Debug)]
pub(super) enum GuestQueue {
    Split(split::DeviceQueue),
    Packed(packed::DeviceQueue),
}

impl GuestQueue {
    /// Takes the ring over at its used position.
    pub(super) fn new(
        ring: RelayedRing,
        event_idx: bool,
        base: VringBase,
    ) -> Result<Self, RelayError> {
        match (ring, base) {
            (RelayedRing::Split(ring), VringBase::Split { index }) => Ok(Self::Split(
                split::DeviceQueue::new(ring, event_idx, index, index),
            )),
            (RelayedRing::Packed(ring), VringBase::Packed { .. }) => {
                let features = RingFeatures {
                    packed: true,
                    event_idx,
                    in_order: false,
                };
                let queue = packed::DeviceQueue::of(ring, begin_at_used(base), features)?;
                Ok(Self::Packed(queue))
            }
            (ring, base) => Err(RelayError::Format {
                format: ring.format(),
                base,
            }),
        }
    }

    pub(super) fn pop(&mut self) -> Result<Option<Chain>, RelayError> {
        Ok(match self {
            Self::Split(queue) => queue.pop()?.map(|chain| Chain {
                name: chain.head,
                pieces: chain.pieces,
            }),
            Self::Packed(queue) => queue.pop()?.map(|chain| Chain {
                name: chain.id,
                pieces: chain.pieces,
            }),
        })
    }

    /// Gives a chain back. A packed ring shows it to the guest at once, a split one
    /// with [`GuestQueue::publish`].
    pub(super) fn push_used(&mut self, name: u16, written: u32) -> Result<(), RelayError> {
        match self {
            Self::Split(queue) => queue.push_used(name, written)?,
            Self::Packed(queue) => queue.push_used(name, written)?,
        }
        Ok(())
    }

    /// Shows the guest what was pushed. `true`: it wants an interrupt.
    pub(super) fn publish(&mut self) -> Result<bool, RelayError> {
        Ok(match self {
            Self::Split(queue) => queue.publish()?,
            Self::Packed(queue) => queue.needs_signal()?,
        })
    }

    /// Whether the guest, as it wishes just now, wants an interrupt for any of the chains that it
    /// has not got back.
    pub(super) fn wants_interrupt(&self) -> Result<bool, RelayError> {
        Ok(match self {
            Self::Split(queue) => queue.wants_interrupt()?,
            Self::Packed(queue) => queue.wants_signal()?,
        })
    }

    /// Asks the guest for kicks, or not. `true`: chains are waiting already.
    pub(super) fn set_notifications(&mut self, enabled: bool) -> Result<bool, RelayError> {
        Ok(match self {
            Self::Split(queue) => queue.set_notifications(enabled)?,
            Self::Packed(queue) => queue.set_notifications(enabled)?,
        })
    }

    /// Writes what was popped and not given back where a device finds it that begins at
    /// the used position. `in_flight`: the chains in the order in which they were popped.
    pub(super) fn arrange(&self, in_flight: Vec<u16>) -> Result<Position, RelayError> {
        match self {
            Self::Split(queue) => {
                let used = queue.next_used();
                queue.ring().arrange(used, &in_flight)?;
                Ok(Position::Split {
                    used,
                    available: queue.next_avail(),
                    in_flight,
                })
            }
            Self::Packed(queue) => {
                let in_flight = queue.arrange()?;
                let stands = queue.base();
                Ok(Position::Packed { stands, in_flight })
            }
        }
    }
}
