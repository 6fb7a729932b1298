//! Rings in guest memory: the common part of both formats.
//!
//! This module checks the areas once, and every chain. It keeps no positions and draws no
//! conclusions: the device's side ([`super::DeviceQueue`]) and the relay do. The guest may write
//! all of it at any moment, and unmap it behind an IOMMU. So a second read may differ from the
//! first or fail, and every walk is bounded.

use std::sync::atomic::Ordering;

use vm_memory::{AtomicAccess, Bytes, GuestAddress, GuestMemory as _, Permissions};

use super::{Direction, Piece, RingFormat, Violation};
use crate::Error;
use crate::device::{RING_SIZE_MAX, VringAddresses, VringBase, check_areas, size_not_possible};
use crate::iova::{DeviceAddress, IovaRange};
use crate::memory::DeviceMemory;

/// Flags of a descriptor in both formats (virtio 1.3, 2.7.5 and 2.8.13).
pub(crate) const DESCRIPTOR_F_NEXT: u16 = 1;
pub(crate) const DESCRIPTOR_F_WRITE: u16 = 1 << 1;
pub(crate) const DESCRIPTOR_F_INDIRECT: u16 = 1 << 2;
/// Bytes of a descriptor, in a ring and in an indirect table.
pub(super) const DESCRIPTOR_SIZE: u64 = 16;

/// Maximum descriptors of a chain, even if the ring is smaller. Virtio limits a chain to the ring's
/// size, but drivers with indirect tables exceed it.
const CHAIN_MIN_LIMIT: u16 = 256;

/// An access to guest memory; without an IOMMU to RAM itself, which is shorter.
macro_rules! direct {
    ($areas:expr, $memory:ident => $access:expr) => {
        match $areas.memory.physical_memory() {
            Some($memory) => $access,
            None => translated(|| {
                let $memory = &$areas.memory;
                $access
            }),
        }
    };
}

/// Keeps the translation of an access apart from the short way.
#[cold]
#[inline(never)]
fn translated<R>(access: impl FnOnce() -> R) -> R {
    access()
}

/// The areas of a ring in guest memory, by device addresses.
#[derive(Debug, Clone)]
pub struct Areas {
    pub(super) memory: DeviceMemory,
    pub(super) size: u16,
    pub(super) addresses: VringAddresses,
    format: RingFormat,
    /// Whether INDIRECT_DESC was negotiated.
    pub(super) indirect: bool,
}

impl Areas {
    /// The areas of the guest's ring of `size` entries at `addresses`.
    pub(super) fn new(
        memory: DeviceMemory,
        size: u16,
        addresses: VringAddresses,
        format: RingFormat,
        indirect: bool,
    ) -> Result<Self, Error> {
        let packed = format == RingFormat::Packed;
        let checked = if format.takes(size) {
            check_areas(size, addresses, packed, &memory.reach())
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
    pub fn memory(&self) -> &DeviceMemory {
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

    /// The descriptor at a device address, as it was at one moment: address, length, and
    /// its last two fields. Little-endian in memory.
    pub(super) fn descriptor(
        &self,
        at: DeviceAddress,
    ) -> Result<(DeviceAddress, u32, u16, u16), Error> {
        let read: Result<[u64; 2], _> =
            direct!(self, memory => memory.read_obj(GuestAddress(at.0)));
        let [address, rest] = read.map_err(access(at))?;
        let [l0, l1, l2, l3, x0, x1, y0, y1] = rest.to_ne_bytes();
        Ok((
            DeviceAddress(u64::from_le(address)),
            u32::from_le_bytes([l0, l1, l2, l3]),
            u16::from_le_bytes([x0, x1]),
            u16::from_le_bytes([y0, y1]),
        ))
    }

    pub(super) fn load(&self, address: DeviceAddress, ordering: Ordering) -> Result<u16, Error> {
        direct!(self, memory => memory.load(GuestAddress(address.0), ordering))
            .map(u16::from_le)
            .map_err(access(address))
    }

    pub(super) fn store(
        &self,
        address: DeviceAddress,
        value: u16,
        ordering: Ordering,
    ) -> Result<(), Error> {
        self.store_as_is(address, value.to_le(), ordering)
    }

    /// Stores a value that has the bytes of guest memory already.
    pub(super) fn store_as_is<T: AtomicAccess>(
        &self,
        address: DeviceAddress,
        value: T,
        ordering: Ordering,
    ) -> Result<(), Error> {
        direct!(self, memory => memory.store(value, GuestAddress(address.0), ordering))
            .map_err(access(address))
    }

    pub(super) fn write(&self, address: DeviceAddress, bytes: &[u8]) -> Result<(), Error> {
        direct!(self, memory => memory.write_slice(bytes, GuestAddress(address.0)))
            .map_err(access(address))
    }

    /// Checks a buffer. Behind an IOMMU it only has to lie where the guest may map memory. If it is
    /// not mapped, the access fails: a fault of the request, not of the ring.
    fn check_buffer(
        &self,
        address: DeviceAddress,
        len: u32,
        direction: Direction,
    ) -> Result<(), Violation> {
        let Some(space) = self.memory.space() else {
            return self.check_inside(address, len, direction);
        };
        let range = IovaRange::from_size(address.0, u64::from(len));
        let fits = range.is_some_and(|range| space.range().contains(&range));
        if fits {
            Ok(())
        } else {
            Err(Violation::Outside { address, len })
        }
    }

    fn check_inside(
        &self,
        address: DeviceAddress,
        len: u32,
        direction: Direction,
    ) -> Result<(), Violation> {
        let outside = Violation::Outside { address, len };
        let count = usize::try_from(len).map_err(|_| outside)?;
        let fits = IovaRange::from_size(address.0, u64::from(len)).is_some()
            && self
                .memory
                .check_range(GuestAddress(address.0), count, direction.into());
        if fits { Ok(()) } else { Err(outside) }
    }
}

impl From<Direction> for Permissions {
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::DeviceReads => Self::Read,
            Direction::DeviceWrites => Self::Write,
        }
    }
}

/// For `map_err`: guest memory refused an access at a checked `address`.
pub fn access(address: DeviceAddress) -> impl FnOnce(vm_memory::GuestMemoryError) -> Error {
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
    pub(super) fn take(
        &mut self,
        address: DeviceAddress,
        len: u32,
        flags: u16,
    ) -> Result<(), Violation> {
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
            self.areas.check_buffer(address, len, direction)?;
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
    pub(super) fn table(
        &self,
        address: DeviceAddress,
        len: u32,
        flags: u16,
    ) -> Result<u32, Violation> {
        let malformed = !self.areas.indirect
            || flags & DESCRIPTOR_F_NEXT != 0
            || len == 0
            || !u64::from(len).is_multiple_of(DESCRIPTOR_SIZE);
        if malformed {
            return Err(Violation::Indirect);
        }
        self.areas
            .check_inside(address, len, Direction::DeviceReads)?;
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

#[cfg(test)]
mod tests {
    use super::super::{DeviceQueue, DriverQueue, GuestRing, RingFeatures};
    use super::*;
    use crate::ErrorKind;
    use crate::iotlb::Access;
    use crate::iova::PAGE_SIZE;
    use crate::memory::{AddressSpace, Mode, Piece as Target, SharedBuffer};
    use std::sync::Arc;

    /// Guest-physical address of the driver's memory, and the device address of its first page.
    const GUEST: u64 = 0x10_0000;
    const DEVICE: u64 = 0x7fff_f000;
    const SIZE: u16 = 16;

    fn page(number: u64) -> IovaRange {
        IovaRange::from_size(DEVICE + number * PAGE_SIZE, PAGE_SIZE).unwrap()
    }

    fn piece(offset: u64, len: u32, direction: Direction) -> Piece {
        Piece {
            iova: DeviceAddress(DEVICE + offset),
            len,
            direction,
        }
    }

    #[test]
    fn a_ring_behind_an_iommu_is_served_by_device_addresses() {
        for packed in [false, true] {
            let features = RingFeatures {
                packed,
                ..RingFeatures::default()
            };
            let buffer = Arc::new(SharedBuffer::new(5 * PAGE_SIZE, GUEST).unwrap());
            let ram = Arc::new(buffer.as_guest_memory().unwrap());
            let mut driver = DriverQueue::new(Arc::clone(&buffer), SIZE, 0, features).unwrap();
            // A ring of two pages. Those of the buffers are not adjacent in guest RAM, and the
            // first is read-only.
            let reach = IovaRange::new(0, page(7).last()).unwrap();
            let space = Arc::new(AddressSpace::new(reach));
            space.change(|space| {
                space.set_mode(Mode::Mapped);
                for (number, target, access) in [
                    (0, 0, Access::ReadWrite),
                    (1, 1, Access::ReadWrite),
                    (2, 4, Access::ReadOnly),
                    (3, 2, Access::ReadWrite),
                ] {
                    let gpa = GUEST + target * PAGE_SIZE;
                    space.map(page(number), Target { gpa, access }).unwrap();
                }
            });
            let memory = DeviceMemory::behind(ram, Arc::clone(&space));
            let VringAddresses {
                descriptor,
                driver: avail,
                device,
            } = driver.addresses();
            let addresses = VringAddresses {
                descriptor: DeviceAddress(descriptor.0 - GUEST + DEVICE),
                driver: DeviceAddress(avail.0 - GUEST + DEVICE),
                device: DeviceAddress(device.0 - GUEST + DEVICE),
            };
            let ring = GuestRing::new(memory.clone(), SIZE, addresses, features).unwrap();
            let mut queue = DeviceQueue::new(ring, VringBase::initial(packed), features).unwrap();

            let both = piece(3 * PAGE_SIZE - 4, 8, Direction::DeviceReads);
            let answer = piece(3 * PAGE_SIZE + 8, 4, Direction::DeviceWrites);
            driver.add(&[both, answer]).unwrap();
            let chain = queue.pop().unwrap().unwrap();
            assert_eq!(chain.pieces, [both, answer]);
            buffer.write(5 * PAGE_SIZE - 4, b"high").unwrap();
            buffer.write(2 * PAGE_SIZE, b"low:").unwrap();
            let mut read = [0; 8];
            memory
                .read_slice(&mut read, GuestAddress(both.iova.0))
                .unwrap();
            assert_eq!(&read, b"highlow:");
            memory
                .write_slice(b"done", GuestAddress(answer.iova.0))
                .unwrap();
            queue.push_used(chain.id, 4).unwrap();
            queue.publish().unwrap();
            assert_eq!(driver.pop_used().unwrap().unwrap().written, 4);
            let mut written = [0; 4];
            buffer.read(2 * PAGE_SIZE + 8, &mut written).unwrap();
            assert_eq!(&written, b"done");

            // The device may not write the first page of buffers, nor reach the page behind the
            // last: the access fails. A chain whose buffer the guest cannot map breaks the ring.
            for (bad, is_broken) in [
                (piece(3 * PAGE_SIZE - 4, 8, Direction::DeviceWrites), false),
                (piece(4 * PAGE_SIZE - 4, 8, Direction::DeviceReads), false),
                (piece(8 * PAGE_SIZE - 4, 8, Direction::DeviceReads), true),
            ] {
                let mut driver = DriverQueue::new(Arc::clone(&buffer), SIZE, 0, features).unwrap();
                driver.add(&[bad]).unwrap();
                let ring = GuestRing::new(memory.clone(), SIZE, addresses, features).unwrap();
                let base = VringBase::initial(packed);
                let mut queue = DeviceQueue::new(ring, base, features).unwrap();
                if !is_broken {
                    assert_eq!(queue.pop().unwrap().unwrap().pieces, [bad]);
                    let count = usize::try_from(bad.len).unwrap();
                    let access = bad.direction.into();
                    assert!(!memory.check_range(GuestAddress(bad.iova.0), count, access));
                    continue;
                }
                let error = queue.pop().unwrap_err();
                assert!(
                    matches!(error.kind(), ErrorKind::BrokenByGuest { .. }),
                    "{error}"
                );
            }

            space.change(|space| (space.unmap(page(0)).unwrap(), space.unmap(page(1)).unwrap()));
            queue.pop().unwrap_err();
            queue.push_used(0, 0).unwrap_err();
        }
    }
}
