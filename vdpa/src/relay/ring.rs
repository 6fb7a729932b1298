//! A guest's ring in whichever format was negotiated, as far as a relay must
//! tell them apart: where it stands.

use super::{Position, RelayError};
use crate::device::VringBase;
use crate::ring::GuestRing;

impl GuestRing {
    /// Where the ring of a stopped device stands, by its memory alone; what is in flight is
    /// taken as the ring names it, which is right for a device that completes in order.
    ///
    /// # Errors
    /// The ring can't be read, or [`RelayError::Standing`].
    pub fn position(&self) -> Result<Position, RelayError> {
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
                let stands = ring.standing()?;
                Ok(Position::Packed {
                    stands,
                    in_flight: ring.ids(stands)?,
                })
            }
        }
    }

    /// Whether [`GuestRing::position`] will be right, as far as the ring tells, to be asked while
    /// the device can still go on. `in_order`: IN_ORDER was negotiated.
    ///
    /// # Errors
    /// [`RelayError::OutOfOrder`], [`RelayError::Standing`], or the guest broke the ring.
    pub(super) fn check_order(&self, in_order: bool) -> Result<(), RelayError> {
        match self {
            // The entries from the used index on are what is in flight.
            Self::Split(_) if in_order => Ok(()),
            Self::Split(ring) => Ok(ring.check_order()?),
            Self::Packed(ring) => {
                ring.standing()?;
                Ok(())
            }
        }
    }

    /// Where a device that takes the ring over is to begin, by the ring's memory alone.
    ///
    /// # Errors
    /// As [`GuestRing::position`].
    pub(super) fn used(&self) -> Result<VringBase, RelayError> {
        match self {
            Self::Split(ring) => Ok(VringBase::Split {
                index: ring.used_index()?,
            }),
            Self::Packed(ring) => Ok(begin_at_used(ring.standing()?)),
        }
    }
}

/// Where a device begins that is to take again what was taken and not used.
pub(super) fn begin_at_used(stands: VringBase) -> VringBase {
    match stands {
        VringBase::Packed {
            used, used_wrap, ..
        } => VringBase::Packed {
            available: used,
            available_wrap: used_wrap,
            used,
            used_wrap,
        },
        split @ VringBase::Split { .. } => split,
    }
}
