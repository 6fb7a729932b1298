//! The position of a guest's ring, in either format.

use super::Position;
use crate::Error;
use crate::ring::{GuestRing, not_known};

impl GuestRing {
    /// The position of a stopped device's ring, from its memory alone. The chains in flight are
    /// those that the ring names, which is right for a device that completes in order.
    ///
    /// # Errors
    /// The ring cannot be read, or does not show its position.
    pub fn position(&self) -> Result<Position, Error> {
        match self {
            Self::Split(ring) => {
                let (used, available) = (ring.used_index()?, ring.avail_index()?);
                let count = available.wrapping_sub(used).min(ring.size());
                let in_flight = (0..count)
                    .map(|position| ring.avail_entry(used.wrapping_add(position)))
                    .collect::<Result<_, _>>()?;
                let available = used.wrapping_add(count);
                Ok(Position::Split {
                    used,
                    available,
                    in_flight,
                })
            }
            Self::Packed(ring) => {
                let ring_position = ring.ring_position().map_err(not_known)?;
                Ok(Position::Packed {
                    ring_position,
                    in_flight: ring.ids(ring_position).map_err(not_known)?,
                })
            }
        }
    }

    /// Checks whether [`GuestRing::position`] will be right, as far as the ring shows, while the
    /// device can still continue. `in_order`: IN_ORDER was negotiated.
    ///
    /// # Errors
    /// The device completes out of order, the ring does not show its position, or the guest broke
    /// it.
    pub(super) fn check_order(&self, in_order: bool) -> Result<(), Error> {
        match self {
            // The entries from the used index on are the chains in flight.
            Self::Split(_) if in_order => Ok(()),
            Self::Split(ring) => ring.check_order(),
            Self::Packed(ring) => ring.ring_position().map(drop).map_err(not_known),
        }
    }
}
