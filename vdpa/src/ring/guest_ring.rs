//! A guest's ring, in either format.

use std::ops::Deref;

use super::guest::Areas;
use super::{RingFeatures, packed, split};
use crate::Error;
use crate::device::{VringAddresses, VringBase};
use crate::memory::DeviceMemory;

/// A guest's ring, in either format.
#[derive(Debug, Clone)]
pub enum GuestRing {
    /// A split ring.
    Split(split::GuestRing),
    /// A packed ring.
    Packed(packed::GuestRing),
}

impl GuestRing {
    /// The guest's ring of `size` entries at `addresses`. `features` are the negotiated ones.
    ///
    /// # Errors
    /// An area is not aligned, not in guest memory or overlaps another, or the size is impossible
    /// for the format.
    pub fn new(
        memory: impl Into<DeviceMemory>,
        size: u16,
        addresses: VringAddresses,
        features: RingFeatures,
    ) -> Result<Self, Error> {
        let RingFeatures {
            packed, indirect, ..
        } = features;
        Ok(if packed {
            Self::Packed(packed::GuestRing::new(memory, size, addresses, indirect)?)
        } else {
            Self::Split(split::GuestRing::new(memory, size, addresses, indirect)?)
        })
    }

    /// Has a packed ring show its position again if the device before was killed while it used
    /// several entries together. Only for the receive queue of a driver with mergeable buffers,
    /// which are one descriptor each. No device may work on the ring.
    ///
    /// # Errors
    /// Guest memory cannot be used.
    pub fn restore_unfinished(&self) -> Result<(), Error> {
        match self {
            Self::Split(_) => Ok(()),
            Self::Packed(ring) => ring.restore_unfinished(),
        }
    }

    /// The position for a device that takes over the ring, from the ring's memory alone.
    ///
    /// # Errors
    /// Guest memory cannot be read, or a packed ring does not show its position:
    /// [`packed::GuestRing::ring_position`].
    pub fn used_position(&self) -> Result<VringBase, Error> {
        match self {
            Self::Split(ring) => Ok(VringBase::Split {
                index: ring.used_index()?,
            }),
            Self::Packed(ring) => ring
                .ring_position()
                .map(VringBase::at_used)
                .map_err(not_known),
        }
    }
}

/// For `map_err`: only its memory could show the position of the guest's packed ring, and it does
/// not.
pub(crate) fn not_known(source: Error) -> Error {
    let message =
        "the position of the guest's packed ring is unknown: its driver must reset the device";
    Error::other(message).because(source)
}

impl Deref for GuestRing {
    type Target = Areas;

    fn deref(&self) -> &Areas {
        match self {
            Self::Split(ring) => ring,
            Self::Packed(ring) => ring,
        }
    }
}

impl From<split::GuestRing> for GuestRing {
    fn from(ring: split::GuestRing) -> Self {
        Self::Split(ring)
    }
}

impl From<packed::GuestRing> for GuestRing {
    fn from(ring: packed::GuestRing) -> Self {
        Self::Packed(ring)
    }
}
