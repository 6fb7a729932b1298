//! A guest's ring in whichever format was negotiated, as far as a relay must
//! tell them apart: where it stands.

use super::Position;
use crate::Error;
use crate::device::VringBase;
use crate::ring::GuestRing;

impl GuestRing {
    /// Where the ring of a stopped device stands, by its memory alone; what is in flight is
    /// taken as the ring names it, which is right for a device that completes in order.
    ///
    /// # Errors
    /// The ring can't be read, or does not tell.
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
                let stands = ring.standing().map_err(not_known)?;
                Ok(Position::Packed {
                    stands,
                    in_flight: ring.ids(stands).map_err(not_known)?,
                })
            }
        }
    }

    /// Whether [`GuestRing::position`] will be right, as far as the ring tells, to be asked while
    /// the device can still go on. `in_order`: IN_ORDER was negotiated.
    ///
    /// # Errors
    /// The device completes out of order, the ring does not tell, or the guest broke it.
    pub(super) fn check_order(&self, in_order: bool) -> Result<(), Error> {
        match self {
            // The entries from the used index on are what is in flight.
            Self::Split(_) if in_order => Ok(()),
            Self::Split(ring) => ring.check_order(),
            Self::Packed(ring) => ring.standing().map(drop).map_err(not_known),
        }
    }

    /// Where a device that takes the ring over is to begin, by the ring's memory alone.
    ///
    /// # Errors
    /// As [`GuestRing::position`].
    pub(super) fn used(&self) -> Result<VringBase, Error> {
        match self {
            Self::Split(ring) => Ok(VringBase::Split {
                index: ring.used_index()?,
            }),
            Self::Packed(ring) => ring.standing().map(VringBase::at_used).map_err(not_known),
        }
    }
}

/// For `map_err`: only its memory could tell where the guest's packed ring stands, and it doesn't.
fn not_known(source: Error) -> Error {
    let message =
        "where the guest's packed ring stands is not known: its driver must reset the device";
    Error::other(message).because(source)
}
