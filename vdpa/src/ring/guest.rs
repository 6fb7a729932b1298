//! Rings that lie in guest memory: what both formats have in common.
//!
//! Owns where the areas are, which is checked once, and the checks of every chain. It keeps no
//! positions and draws no conclusions: the device's side ([`super::DeviceQueue`]) and the relay do.
//! The guest writes all of it at any moment, so nothing read twice is the same thing, and every
//! walk is bounded.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::{Direction, Piece, RingFeatures, RingFormat, packed, split};
use crate::device::{RING_SIZE_MAX, VringAddresses, VringBase, VringError, check_areas};
use crate::iova::IovaRange;
use crate::memory::GuestMemory;

/// Flags of a descriptor in both formats (virtio 1.3, 2.7.5 and 2.8.13).
pub(crate) const DESCRIPTOR_F_NEXT: u16 = 1;
pub(crate) const DESCRIPTOR_F_WRITE: u16 = 1 << 1;
pub(crate) const DESCRIPTOR_F_INDIRECT: u16 = 1 << 2;
/// Bytes of a descriptor, in a ring and in an indirect table.
pub(super) const DESCRIPTOR_SIZE: u64 = 16;

/// Descriptors that a chain may have even if the ring is smaller: virtio limits
/// it to the ring's size, but drivers with indirect tables go further.
const CHAIN_MIN_LIMIT: u16 = 256;

/// What a guest's driver did that no driver may do (virtio 1.3, 2.7 and 2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GuestViolation {
    /// A head or a next field is not an entry of its table.
    #[error("descriptor {index} does not exist in a table of {size}")]
    NoDescriptor {
        /// The entry named.
        index: u16,
        /// Entries of the table.
        size: u32,
    },
    /// A chain has more descriptors than the ring has entries (256 in a smaller ring), or a loop.
    #[error("a descriptor chain is longer than the ring or loops")]
    ChainTooLong,
    /// A chain in a packed ring runs into descriptors that the device has already.
    #[error("a descriptor chain runs into descriptors that are in use")]
    Overrun,
    /// The buffer id of a chain in a packed ring is that of a chain which the device has.
    #[error("buffer id {id} is in use already")]
    DuplicateId {
        /// The id.
        id: u16,
    },
    /// A table in a table, an indirect descriptor with a successor, a table whose
    /// length is 0 or no multiple of 16, or without the feature.
    #[error("an indirect descriptor is malformed")]
    Indirect,
    /// A piece for the device to read follows one for it to write.
    #[error("a readable buffer follows a writable one")]
    Order,
    /// A chain with no byte in it, or with 4 GiB or more.
    #[error("a descriptor chain has a length of 0 or of more than 4 GiB")]
    Length,
    /// A piece lies outside guest memory.
    #[error("a buffer of {len} bytes at {address:#x} is not in guest memory")]
    Outside {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        len: u32,
    },
    /// The avail index is further ahead than the ring has entries.
    #[error("the avail index is {ahead} ahead in a ring of {size}")]
    AvailJump {
        /// Entries between what was used and the index.
        ahead: u16,
        /// Entries of the ring.
        size: u16,
    },
}

/// Why a ring in guest memory can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum GuestRingError {
    /// The ring's description breaks a rule.
    #[error("the ring cannot lie where the guest put it")]
    Place {
        /// The rule.
        #[source]
        source: VringError,
    },
    /// A position of a ring of the other format, outside the ring, or one with chains in flight:
    /// those cannot be found again, for used descriptors may have taken their places.
    #[error("a {format} ring of {size} entries cannot go on at {base}")]
    Base {
        /// The ring's format.
        format: RingFormat,
        /// Entries of the ring.
        size: u16,
        /// The position.
        base: VringBase,
    },
    /// Guest memory refused an access that had been checked.
    #[error("the ring in guest memory cannot be accessed at {address:#x}")]
    Access {
        /// Guest-physical address.
        address: u64,
        /// What guest memory said.
        #[source]
        source: vm_memory::GuestMemoryError,
    },
    /// The guest broke the rules.
    #[error("the guest broke the ring")]
    Guest {
        /// What it did.
        #[source]
        source: GuestViolation,
    },
    /// The caller gives a chain back that is not in flight, or, with IN_ORDER, not the oldest one.
    #[error("buffer id {id} cannot be used now")]
    NotInFlight {
        /// The id.
        id: u16,
    },
}

impl From<GuestViolation> for GuestRingError {
    fn from(source: GuestViolation) -> Self {
        Self::Guest { source }
    }
}

/// Where a ring lies in guest memory; IOVA = guest-physical address.
#[derive(Debug, Clone)]
pub struct Areas {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) size: u16,
    pub(super) addresses: VringAddresses,
    format: RingFormat,
    /// Whether INDIRECT_DESC was negotiated.
    pub(super) indirect: bool,
}

impl Areas {
    /// Those of the ring of `size` entries that the guest put at `addresses`.
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        size: u16,
        addresses: VringAddresses,
        format: RingFormat,
        indirect: bool,
    ) -> Result<Self, GuestRingError> {
        let place = |source| GuestRingError::Place { source };
        if !format.takes(size) {
            let maximum = RING_SIZE_MAX;
            return Err(place(VringError::Size { size, maximum }));
        }
        let packed = format == RingFormat::Packed;
        check_areas(size, addresses, packed, &ram(&memory)).map_err(place)?;
        Ok(Self {
            memory,
            size,
            addresses,
            format,
            indirect,
        })
    }

    /// Entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Where the areas are.
    #[must_use]
    pub fn addresses(&self) -> VringAddresses {
        self.addresses
    }

    /// The memory they lie in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The ring's format.
    #[must_use]
    pub fn format(&self) -> RingFormat {
        self.format
    }

    /// The error for a position where this ring cannot go on.
    pub(crate) fn cannot_begin(&self, base: VringBase) -> GuestRingError {
        let (format, size) = (self.format, self.size);
        GuestRingError::Base { format, size, base }
    }

    /// The descriptor at a guest-physical address, as it was at one moment: address, length, and
    /// its last two fields. Little-endian in memory.
    pub(super) fn descriptor(&self, at: u64) -> Result<(u64, u32, u16, u16), GuestRingError> {
        let [address, rest]: [u64; 2] =
            self.memory.read_obj(GuestAddress(at)).map_err(access(at))?;
        let [l0, l1, l2, l3, x0, x1, y0, y1] = rest.to_ne_bytes();
        Ok((
            u64::from_le(address),
            u32::from_le_bytes([l0, l1, l2, l3]),
            u16::from_le_bytes([x0, x1]),
            u16::from_le_bytes([y0, y1]),
        ))
    }

    pub(super) fn load(&self, address: u64, ordering: Ordering) -> Result<u16, GuestRingError> {
        self.memory
            .load(GuestAddress(address), ordering)
            .map(u16::from_le)
            .map_err(access(address))
    }

    pub(super) fn store(
        &self,
        address: u64,
        value: u16,
        ordering: Ordering,
    ) -> Result<(), GuestRingError> {
        self.memory
            .store(value.to_le(), GuestAddress(address), ordering)
            .map_err(access(address))
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestRingError> {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(access(address))
    }

    fn check_inside(&self, address: u64, len: u32) -> Result<(), GuestViolation> {
        let outside = GuestViolation::Outside { address, len };
        let count = usize::try_from(len).map_err(|_| outside)?;
        let fits = IovaRange::from_size(address, u64::from(len)).is_some()
            && self.memory.check_range(GuestAddress(address), count);
        if fits { Ok(()) } else { Err(outside) }
    }
}

/// Guest memory failed at `address`.
pub(super) fn access(address: u64) -> impl FnOnce(vm_memory::GuestMemoryError) -> GuestRingError {
    move |source| GuestRingError::Access { address, source }
}

/// The pieces of a chain while it is read. Each descriptor is read once, so what is checked is
/// what is given.
#[derive(Debug)]
pub(super) struct ChainReader<'a> {
    areas: &'a Areas,
    pieces: &'a mut Vec<Piece>,
    /// Descriptors that it may still have.
    left: u16,
    total: u32,
    writable: u32,
}

impl<'a> ChainReader<'a> {
    /// Reads a chain of the ring at `areas` into `pieces`, which is cleared first.
    pub(super) fn new(areas: &'a Areas, pieces: &'a mut Vec<Piece>) -> Self {
        pieces.clear();
        Self {
            areas,
            pieces,
            left: areas.size.max(CHAIN_MIN_LIMIT),
            total: 0,
            writable: 0,
        }
    }

    /// Adds a buffer; an empty one is left out.
    pub(super) fn take(
        &mut self,
        address: u64,
        len: u32,
        flags: u16,
    ) -> Result<(), GuestViolation> {
        let left = self.left.checked_sub(1);
        self.left = left.ok_or(GuestViolation::ChainTooLong)?;
        let total = self.total.checked_add(len);
        self.total = total.ok_or(GuestViolation::Length)?;
        let direction = if flags & DESCRIPTOR_F_WRITE != 0 {
            self.writable += len;
            Direction::DeviceWrites
        } else if self.writable > 0 {
            return Err(GuestViolation::Order);
        } else {
            Direction::DeviceReads
        };
        if len > 0 {
            self.areas.check_inside(address, len)?;
            self.pieces.push(Piece {
                iova: address,
                len,
                direction,
            });
        }
        Ok(())
    }

    /// Checks the descriptor of an indirect table, the last of the chain in the ring; gives the
    /// table's entries.
    pub(super) fn table(&self, address: u64, len: u32, flags: u16) -> Result<u32, GuestViolation> {
        let malformed = !self.areas.indirect
            || flags & DESCRIPTOR_F_NEXT != 0
            || len == 0
            || !u64::from(len).is_multiple_of(DESCRIPTOR_SIZE);
        if malformed {
            return Err(GuestViolation::Indirect);
        }
        self.areas.check_inside(address, len)?;
        Ok(len / 16)
    }

    /// The end of the chain; gives the bytes that the device may write.
    pub(super) fn finish(self) -> Result<u32, GuestViolation> {
        if self.total == 0 {
            return Err(GuestViolation::Length);
        }
        Ok(self.writable)
    }
}

/// A ring of a guest's, in whichever format was negotiated.
#[derive(Debug, Clone)]
pub enum GuestRing {
    /// A split ring.
    Split(split::GuestRing),
    /// A packed ring.
    Packed(packed::GuestRing),
}

impl GuestRing {
    /// The ring of `size` entries that the guest put at `addresses`. `features` as negotiated.
    ///
    /// # Errors
    /// [`GuestRingError::Place`]: an area is not aligned, not in guest memory or overlaps
    /// another, or no ring of that format can have that size.
    pub fn new(
        memory: Arc<GuestMemory>,
        size: u16,
        addresses: VringAddresses,
        features: RingFeatures,
    ) -> Result<Self, GuestRingError> {
        let RingFeatures {
            packed, indirect, ..
        } = features;
        Ok(if packed {
            Self::Packed(packed::GuestRing::new(memory, size, addresses, indirect)?)
        } else {
            Self::Split(split::GuestRing::new(memory, size, addresses, indirect)?)
        })
    }
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

/// Guest RAM as ranges, neighbours joined.
pub(crate) fn ram(memory: &GuestMemory) -> Vec<IovaRange> {
    let mut ranges: Vec<IovaRange> = Vec::new();
    for region in memory.iter() {
        let (first, last) = (region.start_addr().0, region.last_addr().0);
        let joined = ranges
            .last()
            .filter(|before| before.last().checked_add(1) == Some(first))
            .and_then(|before| IovaRange::new(before.first(), last));
        if let Some(joined) = joined {
            ranges.pop();
            ranges.push(joined);
        } else {
            ranges.extend(IovaRange::new(first, last));
        }
    }
    ranges
}
