//! Guest RAM as a device reaches it: directly, or behind the guest's IOMMU.
//!
//! Each access by [`DeviceMemory`] translates device addresses, checks the device's access and
//! marks pages by their guest-physical address. An access holds its translations until it has
//! ended. So none reaches a page after [`AddressSpace::change`] has unmapped it. Without an IOMMU
//! an access is the one of [`GuestMemory`].

use std::iter::FusedIterator;
use std::sync::Arc;

use vm_memory::bitmap::{AtomicBitmap, BS};
use vm_memory::guest_memory::{GuestMemoryBackendSliceIterator, GuestMemorySliceIterator};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, GuestMemoryResult,
    Permissions, VolatileSlice,
};

use super::{AddressSpace, GuestMemory, Mode, Reader};
use crate::iotlb::Access;
use crate::iova::{DeviceAddress, IovaRange};

/// Guest RAM by the addresses that a device's driver writes. The type `GuestAddress` of vm-memory's
/// traits then stands for a device address.
#[derive(Debug, Clone)]
pub struct DeviceMemory {
    ram: Arc<GuestMemory>,
    space: Option<Arc<AddressSpace>>,
}

impl From<Arc<GuestMemory>> for DeviceMemory {
    /// Without an IOMMU: device addresses are guest-physical addresses.
    fn from(ram: Arc<GuestMemory>) -> Self {
        Self { ram, space: None }
    }
}

impl DeviceMemory {
    /// The memory of a device behind an IOMMU. The device keeps `space` as long as it exists;
    /// attaching it to another domain changes the contents. The range of `space` must exclude the
    /// VMM's private window.
    #[must_use]
    pub fn behind(ram: Arc<GuestMemory>, space: Arc<AddressSpace>) -> Self {
        let space = Some(space);
        Self { ram, space }
    }

    /// Guest RAM by guest-physical addresses, which no driver wrote.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestMemory> {
        &self.ram
    }

    /// The translations; `None` without an IOMMU.
    #[must_use]
    pub fn space(&self) -> Option<&Arc<AddressSpace>> {
        self.space.as_ref()
    }

    /// The addresses where rings may lie; adjacent ranges are joined. Behind an IOMMU the device
    /// addresses that can be mapped; each access then shows whether a ring is mapped.
    #[must_use]
    pub fn reach(&self) -> Vec<IovaRange> {
        if let Some(space) = &self.space {
            return vec![space.range()];
        }
        let mut ranges: Vec<IovaRange> = Vec::new();
        for region in self.ram.iter() {
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

    /// Calls `f` with the guest-physical address and length of each part of `len` bytes at
    /// `address` that the device can write. Without an IOMMU it is called once.
    pub fn for_each_written(
        &self,
        DeviceAddress(address): DeviceAddress,
        len: u64,
        mut f: impl FnMut(u64, u64),
    ) {
        let Some(space) = &self.space else {
            return f(address, len);
        };
        let last = len.checked_sub(1).map(|span| address.saturating_add(span));
        let Some(range) = last.and_then(|last| IovaRange::new(address, last)) else {
            return;
        };
        for (part, piece) in space.read().parts(range) {
            if piece.access.allows(Access::WriteOnly) {
                f(piece.gpa, part.size().unwrap_or(u64::MAX));
            }
        }
    }

    /// The memory that the device can write: guest-physical addresses and lengths in bytes.
    #[must_use]
    pub fn writable(&self) -> Vec<(u64, u64)> {
        let mapped = self.space.as_ref().map(|space| space.read());
        match mapped.as_ref().map(Reader::mode) {
            None | Some(Mode::Identity) => {
                let regions = self.ram.iter();
                regions
                    .map(|region| (region.start_addr().0, region.len()))
                    .collect()
            }
            Some(Mode::Blocked | Mode::Mapped) => {
                let pieces = mapped.iter().flat_map(|space| space.mappings().iter());
                let writable = pieces.filter(|(_, piece)| piece.access.allows(Access::WriteOnly));
                writable
                    .filter_map(|(range, piece)| Some((piece.gpa, range.size()?)))
                    .collect()
            }
        }
    }

    /// Whether all of a range has this access behind the IOMMU.
    #[inline(never)]
    fn reaches(
        &self,
        space: &AddressSpace,
        (addr, count): (GuestAddress, usize),
        access: Permissions,
    ) -> bool {
        let Some(range) = range(addr, count) else {
            return count == 0;
        };
        let (space, access) = (space.read(), access_of(access));
        // The first address that is not yet known to be reached.
        let mut next = Some(range.first());
        for (part, piece) in space.parts(range) {
            let len = part.size().and_then(|size| usize::try_from(size).ok());
            let is_ram =
                |len| GuestMemoryBackend::check_range(&*self.ram, GuestAddress(piece.gpa), len);
            if next != Some(part.first())
                || !piece.access.allows(access)
                || !len.is_some_and(is_ram)
            {
                return false;
            }
            next = part.last().checked_add(1);
        }
        next.is_none_or(|next| next > range.last())
    }
}

impl vm_memory::GuestMemory for DeviceMemory {
    type PhysicalMemory = GuestMemory;
    type Bitmap = AtomicBitmap;

    #[inline]
    fn check_range(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        let Some(space) = &self.space else {
            return GuestMemoryBackend::check_range(&*self.ram, addr, count);
        };
        self.reaches(space, (addr, count), access)
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> GuestMemoryResult<impl GuestMemorySliceIterator<'a, BS<'a, AtomicBitmap>>> {
        let ram = &*self.ram;
        let Some(space) = &self.space else {
            return Ok(Slices {
                piece: GuestMemoryBackend::get_slices(ram, addr, count),
                behind: None,
            });
        };
        if count > 0 && range(addr, count).is_none() {
            return Err(GuestMemoryError::GuestAddressOverflow);
        }
        Ok(Slices {
            piece: GuestMemoryBackend::get_slices(ram, addr, 0),
            behind: Some(Behind {
                ram,
                space: space.read(),
                access: access_of(access),
                iova: addr.0,
                left: count,
            }),
        })
    }

    #[inline]
    fn physical_memory(&self) -> Option<&GuestMemory> {
        self.space.is_none().then_some(&*self.ram)
    }
}

/// `count` bytes at a device address; `None` if there are none, or they wrap.
fn range(addr: GuestAddress, count: usize) -> Option<IovaRange> {
    IovaRange::from_size(addr.0, u64::try_from(count).ok()?)
}

fn access_of(permissions: Permissions) -> Access {
    match permissions {
        Permissions::No | Permissions::Read => Access::ReadOnly,
        Permissions::Write => Access::WriteOnly,
        Permissions::ReadWrite => Access::ReadWrite,
    }
}

/// The slices of an access.
struct Slices<'a> {
    /// The rest of the current piece; without an IOMMU, of the access.
    piece: GuestMemoryBackendSliceIterator<'a, GuestMemory>,
    behind: Option<Behind<'a>>,
}

/// The rest of an access behind an IOMMU.
struct Behind<'a> {
    ram: &'a GuestMemory,
    /// Holds the translations.
    space: Reader<'a>,
    access: Access,
    iova: u64,
    left: usize,
}

impl<'a> Behind<'a> {
    /// The next piece; `None` at the end.
    fn piece(
        &mut self,
    ) -> Option<GuestMemoryResult<GuestMemoryBackendSliceIterator<'a, GuestMemory>>> {
        let left = u64::try_from(self.left).ok().filter(|&left| left > 0)?;
        let found = self.space.translate(self.iova, left, self.access);
        let Some((gpa, len)) = found else {
            self.left = 0;
            let address = GuestAddress(self.iova);
            return Some(Err(GuestMemoryError::InvalidGuestAddress(address)));
        };
        // At most `left`, so it fits.
        let count = usize::try_from(len).unwrap_or(self.left);
        self.left -= count;
        // Only the end of an access can be the end of the space.
        self.iova = self.iova.wrapping_add(len);
        let slices = GuestMemoryBackend::get_slices(self.ram, GuestAddress(gpa), count);
        Some(Ok(slices))
    }
}

impl<'a> Iterator for Slices<'a> {
    type Item = GuestMemoryResult<VolatileSlice<'a, BS<'a, AtomicBitmap>>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let slice = self.piece.next();
            match (slice, &mut self.behind) {
                (Some(Err(error)), behind) => {
                    *behind = None;
                    return Some(Err(error));
                }
                (None, Some(behind)) => match behind.piece()? {
                    Ok(piece) => self.piece = piece,
                    Err(error) => return Some(Err(error)),
                },
                (slice, _) => return slice,
            }
        }
    }
}

impl FusedIterator for Slices<'_> {}

impl<'a> GuestMemorySliceIterator<'a, BS<'a, AtomicBitmap>> for Slices<'a> {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use proptest::prelude::*;
    use vm_memory::bitmap::Bitmap as _;
    use vm_memory::{Bytes, GuestMemory as _};

    use super::*;
    use crate::iova::PAGE_SIZE;
    use crate::memory::Piece;

    const RAM_PAGES: u64 = 8;

    /// Two adjacent regions.
    fn ram() -> Arc<GuestMemory> {
        let half = RAM_PAGES * PAGE_SIZE / 2;
        let regions = [(0, half), (half, half)];
        let regions = regions.map(|(base, size)| (GuestAddress(base), size.try_into().unwrap()));
        Arc::new(GuestMemory::from_ranges(&regions).unwrap())
    }

    /// RAM behind an IOMMU with these mappings of pages: device, guest, access.
    fn behind(mappings: &[(u64, u64, Access)]) -> DeviceMemory {
        let space = AddressSpace::new(IovaRange::ALL);
        space.change(|space| {
            space.set_mode(Mode::Mapped);
            for &(iova, gpa, access) in mappings {
                let range = IovaRange::from_size(iova * PAGE_SIZE, PAGE_SIZE).unwrap();
                let gpa = gpa * PAGE_SIZE;
                space.map(range, Piece { gpa, access }).unwrap();
            }
        });
        DeviceMemory::behind(ram(), Arc::new(space))
    }

    fn dirty(memory: &DeviceMemory) -> Vec<bool> {
        let pages = (0..RAM_PAGES).map(|page| {
            let address = GuestAddress(page * PAGE_SIZE);
            let (region, at) = memory.ram().to_region_addr(address).unwrap();
            region.bitmap().dirty_at(at.0.try_into().unwrap())
        });
        pages.collect()
    }

    #[test]
    fn without_an_iommu_it_is_the_ram() {
        let memory = DeviceMemory::from(ram());
        memory.write_obj(0x1234u32, GuestAddress(0x3ffe)).unwrap();
        let found: u32 = memory.ram().read_obj(GuestAddress(0x3ffe)).unwrap();
        assert_eq!(found, 0x1234);
        assert!(std::ptr::eq(
            memory.physical_memory().unwrap(),
            &**memory.ram()
        ));
        assert!(memory.check_range(GuestAddress(0), 0x8000, Permissions::ReadWrite));
        assert!(!memory.check_range(GuestAddress(0), 0x8001, Permissions::Read));
        assert_eq!(memory.reach(), [IovaRange::new(0, 0x7fff).unwrap()]);
    }

    #[test]
    fn the_writable_memory_is_what_the_mode_allows() {
        let half = RAM_PAGES * PAGE_SIZE / 2;
        let all = [(0, half), (half, half)];
        assert_eq!(DeviceMemory::from(ram()).writable(), all);
        let mappings = [
            (0x100, 2, Access::ReadOnly),
            (0x101, 5, Access::WriteOnly),
            (0x200, 3, Access::ReadWrite),
        ];
        let memory = behind(&mappings);
        let pages = [5, 3].map(|page| (page * PAGE_SIZE, PAGE_SIZE));
        assert_eq!(memory.writable(), pages);
        let set = |mode| memory.space().unwrap().change(|space| space.set_mode(mode));
        set(Mode::Identity);
        assert_eq!(memory.writable(), all);
        set(Mode::Blocked);
        assert_eq!(memory.writable(), []);
    }

    #[test]
    fn an_access_goes_through_each_mapping_that_it_spans() {
        let (rw, ro) = (Access::ReadWrite, Access::ReadOnly);
        let memory = behind(&[(16, 6, rw), (17, 1, rw), (18, 2, ro)]);
        assert!(memory.physical_memory().is_none());
        memory
            .write_slice(&[1, 2, 3, 4], GuestAddress(0x1_0ffe))
            .unwrap();
        let mut bytes = [0; 2];
        memory
            .ram()
            .read_slice(&mut bytes, GuestAddress(0x6ffe))
            .unwrap();
        assert_eq!(bytes, [1, 2]);
        memory
            .ram()
            .read_slice(&mut bytes, GuestAddress(0x1000))
            .unwrap();
        assert_eq!(bytes, [3, 4]);
        let (no, yes) = (false, true);
        assert_eq!(dirty(&memory), [no, yes, no, no, no, no, yes, no]);
        // The last page is read-only.
        let last = GuestAddress(0x1_2000);
        memory.read_obj::<u64>(last).unwrap();
        memory.write_obj(1u64, last).unwrap_err();
        memory.store(1u16, last, Ordering::Release).unwrap_err();
        memory.write_obj(1u64, GuestAddress(0x1_1ffc)).unwrap_err();
        assert!(memory.check_range(GuestAddress(0x1_0000), 0x3000, Permissions::Read));
        assert!(!memory.check_range(GuestAddress(0x1_0000), 0x3000, Permissions::Write));
        assert_eq!(dirty(&memory), [no, yes, no, no, no, no, yes, no]);
    }

    #[test]
    fn hostile_ranges_are_refused() {
        let last_page = u64::MAX / PAGE_SIZE;
        let memory = behind(&[(0, 0, Access::ReadWrite), (last_page, 1, Access::ReadWrite)]);
        let identity = behind(&[]);
        let space = identity.space().unwrap();
        space.change(|space| space.set_mode(Mode::Identity));
        for memory in [&memory, &identity, &DeviceMemory::from(ram())] {
            for (address, count) in [
                (0, 1 << 63),
                (0, usize::MAX),
                (1 << 63, 1 << 63),
                (u64::MAX, 2),
                (u64::MAX, usize::MAX),
                (u64::MAX - 0xfff, 0x1001),
            ] {
                let address = GuestAddress(address);
                assert!(!memory.check_range(address, count, Permissions::Read));
                let mut slices = memory.get_slices(address, count, Permissions::Read);
                let refused = slices
                    .as_mut()
                    .map_or(true, |slices| slices.any(|s| s.is_err()));
                assert!(refused, "{address:?} {count:#x}");
            }
        }
        assert!(memory.check_range(GuestAddress(u64::MAX), 0, Permissions::Read));
        memory.write_obj(7u8, GuestAddress(u64::MAX)).unwrap();
        let found: u8 = memory.ram().read_obj(GuestAddress(0x1fff)).unwrap();
        assert_eq!(found, 7);
        // A mapping of what is not RAM.
        let beyond = behind(&[
            (0, RAM_PAGES - 1, Access::ReadWrite),
            (1, RAM_PAGES, Access::ReadWrite),
        ]);
        assert!(beyond.check_range(GuestAddress(0), 0x1000, Permissions::Write));
        assert!(!beyond.check_range(GuestAddress(0), 0x1001, Permissions::Write));
        beyond.write_obj(1u64, GuestAddress(0xffc)).unwrap_err();
    }

    #[test]
    fn an_access_holds_its_translations() {
        let memory = behind(&[(0, 0, Access::ReadWrite)]);
        let space = memory.space().unwrap();
        let slices = memory
            .get_slices(GuestAddress(0), 8, Permissions::Write)
            .unwrap();
        std::thread::scope(|scope| {
            let change = scope.spawn(|| space.change(|space| space.set_mode(Mode::Blocked)));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!change.is_finished());
            drop(slices);
            change.join().unwrap();
        });
        memory.write_obj(1u8, GuestAddress(0)).unwrap_err();
    }

    #[test]
    fn nothing_is_written_once_an_unmap_has_returned() {
        let page = IovaRange::from_size(0, PAGE_SIZE).unwrap();
        let (gpa, access) = (0, Access::ReadWrite);
        let memory = behind(&[(0, 0, access)]);
        let space = memory.space().unwrap();
        let stop = AtomicBool::new(false);
        let read = || -> [u64; 2] { memory.ram().read_obj(GuestAddress(0)).unwrap() };
        std::thread::scope(|scope| {
            for writer in [0, 8] {
                let (memory, stop) = (&memory, &stop);
                scope.spawn(move || {
                    for number in 1u64.. {
                        let address = GuestAddress(writer);
                        let _ = memory.write_obj(number, address);
                        let _ = memory.store(number, address, Ordering::Relaxed);
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                });
            }
            while read().contains(&0) {
                std::thread::yield_now();
            }
            let unmaps = (0..50).map(|_| {
                space.change(|space| space.unmap(page).unwrap());
                let before = read();
                std::thread::yield_now();
                let after = read();
                space.change(|space| space.map(page, Piece { gpa, access }).unwrap());
                before == after
            });
            // All rounds, and the writers end, before a failure is reported.
            let unchanged = unmaps.filter(|&unchanged| unchanged).count();
            stop.store(true, Ordering::Relaxed);
            assert_eq!(unchanged, 50);
        });
    }

    proptest! {
        /// Against one lookup per byte.
        #[test]
        fn behaves_as_one_translation_per_byte(
            targets in prop::collection::vec(prop::option::of((0..RAM_PAGES + 1, 0..3u8)), 6),
            at in 0..6 * PAGE_SIZE,
            count in 0..3 * PAGE_SIZE,
        ) {
            let access = [Access::ReadOnly, Access::WriteOnly, Access::ReadWrite];
            let mappings: Vec<(u64, u64, Access)> = (0..)
                .zip(&targets)
                .filter_map(|(page, target)| {
                    target.map(|(gpa, kind)| (page, gpa, access[usize::from(kind)]))
                })
                .collect();
            let memory = behind(&mappings);
            let gpa = |address: u64, wanted: Access| {
                let page = address / PAGE_SIZE;
                let found = mappings.iter().find(|mapping| mapping.0 == page)?;
                let is_reached = found.2.allows(wanted) && found.1 < RAM_PAGES;
                is_reached.then_some(found.1 * PAGE_SIZE + address % PAGE_SIZE)
            };
            for (wanted, permissions) in [
                (Access::ReadOnly, Permissions::Read),
                (Access::WriteOnly, Permissions::Write),
            ] {
                let expected: Option<Vec<u64>> =
                    (at..at + count).map(|address| gpa(address, wanted)).collect();
                let count = usize::try_from(count).unwrap();
                let address = GuestAddress(at);
                let fits = memory.check_range(address, count, permissions);
                prop_assert_eq!(fits, expected.is_some());
                let slices = memory.get_slices(address, count, permissions).unwrap();
                let slices: GuestMemoryResult<Vec<_>> = slices.collect();
                prop_assert_eq!(slices.is_ok(), fits);
                let host = |gpa: &u64| memory.ram().get_host_address(GuestAddress(*gpa)).unwrap();
                let bytes = slices.unwrap_or_default().into_iter().flat_map(|slice| {
                    let first = slice.ptr_guard().as_ptr();
                    (0..slice.len()).map(move |byte| first.wrapping_add(byte))
                });
                let found: Vec<usize> = bytes.map(|byte| byte.addr()).collect();
                let expected = expected.unwrap_or_default();
                let expected: Vec<usize> = expected.iter().map(|at| host(at).addr()).collect();
                prop_assert!(found == expected);
            }
        }
    }
}
