//! Rings in guest memory: the common part of both formats.
//!
//! This module checks the areas once, and every chain. It keeps no positions and draws no
//! conclusions: the device's side ([`super::DeviceQueue`]) and the relay do. The guest may write
//! all of it at any moment. So a second read may differ from the first, and every walk is bounded.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::{Direction, Piece, RingFormat, Violation};
use crate::Error;
use crate::device::{RING_SIZE_MAX, VringAddresses, VringBase, check_areas, size_not_possible};
use crate::iova::IovaRange;
use crate::memory::GuestMemory;

/// Flags of a descriptor in both formats (virtio 1.3, 2.7.5 and 2.8.13).
pub(crate) const DESCRIPTOR_F_NEXT: u16 = 1;
pub(crate) const DESCRIPTOR_F_WRITE: u16 = 1 << 1;
pub(crate) const DESCRIPTOR_F_INDIRECT: u16 = 1 << 2;
/// Bytes of a descriptor, in a ring and in an indirect table.
pub(super) const DESCRIPTOR_SIZE: u64 = 16;

/// Maximum descriptors of a chain, even if the ring is smaller. Virtio limits a chain to the ring's
/// size, but drivers with indirect tables exceed it.
const CHAIN_MIN_LIMIT: u16 = 256;

/// The areas of a ring in guest memory; IOVA = guest-physical address.
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
    /// The areas of the guest's ring of `size` entries at `addresses`.
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        size: u16,
        addresses: VringAddresses,
        format: RingFormat,
        indirect: bool,
    ) -> Result<Self, Error> {
        let packed = format == RingFormat::Packed;
        let checked = if format.takes(size) {
            check_areas(size, addresses, packed, &ram(&memory))
        } else {
            Err(size_not_possible(size, RING_SIZE_MAX))
        };
        checked.map_err(Error::context("the guest gave the ring an invalid address"))?;
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

    /// The addresses of the areas.
    #[must_use]
    pub fn addresses(&self) -> VringAddresses {
        self.addresses
    }

    /// The memory of the areas.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The ring's format.
    #[must_use]
    pub fn format(&self) -> RingFormat {
        self.format
    }

    /// The error for a position where this ring cannot continue. The position belongs to the other
    /// format, is outside the ring, or has chains in flight. Those cannot be found again, because
    /// used descriptors may have overwritten theirs.
    pub(crate) fn cannot_begin(&self, base: VringBase) -> Error {
        let (format, size) = (self.format, self.size);
        Error::other(format!(
            "a {format} ring of {size} entries cannot resume at {base}"
        ))
    }

    /// The descriptor at a guest-physical address, as it was at one moment: address, length, and
    /// its last two fields. Little-endian in memory.
    pub(super) fn descriptor(&self, at: u64) -> Result<(u64, u32, u16, u16), Error> {
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

    pub(super) fn load(&self, address: u64, ordering: Ordering) -> Result<u16, Error> {
        self.memory
            .load(GuestAddress(address), ordering)
            .map(u16::from_le)
            .map_err(access(address))
    }

    pub(super) fn store(&self, address: u64, value: u16, ordering: Ordering) -> Result<(), Error> {
        self.memory
            .store(value.to_le(), GuestAddress(address), ordering)
            .map_err(access(address))
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(access(address))
    }

    fn check_inside(&self, address: u64, len: u32) -> Result<(), Violation> {
        let outside = Violation::Outside { address, len };
        let count = usize::try_from(len).map_err(|_| outside)?;
        let fits = IovaRange::from_size(address, u64::from(len)).is_some()
            && self.memory.check_range(GuestAddress(address), count);
        if fits { Ok(()) } else { Err(outside) }
    }
}

/// For `map_err`: guest memory refused an access at a checked `address`.
pub fn access(address: u64) -> impl FnOnce(vm_memory::GuestMemoryError) -> Error {
    move |source| {
        Error::other(format!(
            "cannot access the ring in guest memory at {address:#x}"
        ))
        .because(source)
    }
}

/// Collects the pieces of a chain. Each descriptor is read once, so the checked values are the
/// returned ones.
#[derive(Debug)]
pub(super) struct ChainReader<'a> {
    areas: &'a Areas,
    pieces: &'a mut Vec<Piece>,
    /// Number of further descriptors that it may have.
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

    /// Adds a buffer; skips an empty one.
    pub(super) fn take(&mut self, address: u64, len: u32, flags: u16) -> Result<(), Violation> {
        let left = self.left.checked_sub(1);
        self.left = left.ok_or(Violation::ChainTooLong)?;
        let total = self.total.checked_add(len);
        self.total = total.ok_or(Violation::Length)?;
        let direction = if flags & DESCRIPTOR_F_WRITE != 0 {
            self.writable += len;
            Direction::DeviceWrites
        } else if self.writable > 0 {
            return Err(Violation::Order);
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

    /// Checks the descriptor of an indirect table, the last of the chain in the ring; returns the
    /// table's entries.
    pub(super) fn table(&self, address: u64, len: u32, flags: u16) -> Result<u32, Violation> {
        let malformed = !self.areas.indirect
            || flags & DESCRIPTOR_F_NEXT != 0
            || len == 0
            || !u64::from(len).is_multiple_of(DESCRIPTOR_SIZE);
        if malformed {
            return Err(Violation::Indirect);
        }
        self.areas.check_inside(address, len)?;
        Ok(len / 16)
    }

    /// Ends the chain; returns the number of bytes that the device may write.
    pub(super) fn finish(self) -> Result<u32, Violation> {
        if self.total == 0 {
            return Err(Violation::Length);
        }
        Ok(self.writable)
    }
}

/// Guest RAM as ranges; adjacent ones are joined.
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
