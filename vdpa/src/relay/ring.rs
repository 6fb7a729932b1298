//! A guest's ring in whichever format was negotiated, as far as a relay must
//! tell them apart: where it lies and where it stands.

use std::sync::Arc;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

use super::{Position, RelayError, RelaySetError};
use crate::device::{VringAddresses, VringBase};
use crate::memory::GuestMemory;
use crate::ring::guest::GuestRing;
use crate::ring::{RingFeatures, RingFormat, packed};

/// A ring of the guest's.
#[derive(Debug, Clone)]
pub enum RelayedRing {
    /// A split ring.
    Split(GuestRing),
    /// A packed ring.
    Packed(packed::GuestRing),
}

impl From<GuestRing> for RelayedRing {
    fn from(ring: GuestRing) -> Self {
        Self::Split(ring)
    }
}

impl From<packed::GuestRing> for RelayedRing {
    fn from(ring: packed::GuestRing) -> Self {
        Self::Packed(ring)
    }
}

impl RelayedRing {
    /// The ring of `queue` with `size` entries at `addresses` of `memory`, in the format that is
    /// among `features`, the negotiated ones.
    ///
    /// # Errors
    /// [`RelaySetError::Guest`] or [`RelaySetError::GuestPacked`]: no ring can lie there.
    pub fn new(
        queue: u16,
        memory: Arc<GuestMemory>,
        size: u16,
        addresses: VringAddresses,
        features: u64,
    ) -> Result<Self, RelaySetError> {
        match RingFeatures::of(features).format() {
            RingFormat::Split => {
                let indirect = features & (1 << VIRTIO_RING_F_INDIRECT_DESC) != 0;
                GuestRing::new(memory, size, addresses, indirect)
                    .map(Self::Split)
                    .map_err(|source| RelaySetError::Guest { queue, source })
            }
            RingFormat::Packed => packed::GuestRing::new(memory, size, addresses)
                .map(Self::Packed)
                .map_err(|source| RelaySetError::GuestPacked { queue, source }),
        }
    }

    /// Its format.
    #[must_use]
    pub fn format(&self) -> RingFormat {
        match self {
            Self::Split(_) => RingFormat::Split,
            Self::Packed(_) => RingFormat::Packed,
        }
    }

    /// Entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.size(),
            Self::Packed(ring) => ring.size(),
        }
    }

    /// Where its areas are.
    #[must_use]
    pub fn addresses(&self) -> VringAddresses {
        match self {
            Self::Split(ring) => ring.addresses(),
            Self::Packed(ring) => ring.addresses(),
        }
    }

    /// The memory it lies in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        match self {
            Self::Split(ring) => ring.memory(),
            Self::Packed(ring) => ring.memory(),
        }
    }

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

    /// Whether [`RelayedRing::position`] will be right, as far as the ring tells, to be asked while
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
    /// As [`RelayedRing::position`].
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
