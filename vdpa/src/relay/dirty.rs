//! The interface by which relays report devices' writes.

use std::fmt;

use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::iova::DeviceAddress;
use crate::memory::{DeviceMemory, GuestMemory};

/// Records guest memory that a device wrote without [`GuestMemory`]. Writes of this process need no
/// record.
pub trait Dirty: fmt::Debug {
    /// Records that `len` bytes at `address` may have changed. Parts outside guest RAM are ignored.
    fn mark(&self, address: DeviceAddress, len: u32);
}

/// Marks the pages of `len` bytes at the guest-physical address `gpa`, as writes through `ram` do.
/// Parts outside RAM are ignored.
pub fn mark_ram(ram: &GuestMemory, gpa: u64, len: u64) {
    let Some(last) = len.checked_sub(1).map(|span| gpa.saturating_add(span)) else {
        return;
    };
    for region in ram.iter() {
        let base = region.start_addr().0;
        let first = gpa.max(base);
        let last = last.min(region.last_addr().0);
        if first > last {
            continue;
        }
        // Both fit: they lie inside one mapping of this process.
        let offset = usize::try_from(first - base).unwrap_or(usize::MAX);
        let len = usize::try_from(last - first + 1).unwrap_or(usize::MAX);
        region.bitmap().mark_dirty(offset, len);
    }
}

/// Marks by guest-physical address. Parts that the device cannot write are ignored.
impl Dirty for DeviceMemory {
    fn mark(&self, address: DeviceAddress, len: u32) {
        self.for_each_written(address, u64::from(len), |gpa, len| {
            mark_ram(self.ram(), gpa, len);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vm_memory::GuestAddress;

    use super::*;
    use crate::iotlb::Access;
    use crate::iova::IovaRange;
    use crate::memory::{AddressSpace, Mode, Piece};

    #[test]
    fn marks_the_pages_that_are_ram() {
        let memory = GuestMemory::from_ranges(&[
            (GuestAddress(0), 0x4000),
            (GuestAddress(0x4000), 0x4000),
            (GuestAddress(0x10_0000), 0x4000),
        ])
        .unwrap();
        mark_ram(&memory, 0x3fff, 2);
        mark_ram(&memory, 0x7000, 0xf_9001);
        mark_ram(&memory, 0x10_3fff, u64::MAX);
        mark_ram(&memory, u64::MAX, u64::MAX);
        mark_ram(&memory, 0x1000, 0);
        let dirty: Vec<Vec<bool>> = memory
            .iter()
            .map(|region| {
                (0..4)
                    .map(|page| region.bitmap().dirty_at(page * 0x1000))
                    .collect()
            })
            .collect();
        assert_eq!(
            dirty,
            [
                [false, false, false, true],
                [true, false, false, true],
                [true, false, false, true]
            ]
        );
    }

    #[test]
    fn behind_an_iommu_the_pages_of_writable_mappings_are_marked() {
        let ram = Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 0x8000)]).unwrap());
        let space = Arc::new(AddressSpace::new(IovaRange::ALL));
        let memory = DeviceMemory::behind(Arc::clone(&ram), Arc::clone(&space));
        let mark = |address, len| memory.mark(DeviceAddress(address), len);
        let dirty = || -> Vec<u64> {
            let region = ram.iter().next().unwrap();
            let pages = (0..8).filter(|page| region.bitmap().dirty_at(page * 0x1000));
            let pages = pages.map(|page| page as u64).collect();
            vm_memory::MmapRegion::bitmap(region).get_and_reset();
            pages
        };
        mark(0, 0x8000);
        assert!(dirty().is_empty());
        space.change(|space| {
            space.set_mode(Mode::Mapped);
            for (iova, gpa, access) in [
                (0x1_0000, 0x5000, Access::ReadWrite),
                (0x1_1000, 0x2000, Access::WriteOnly),
                (0x1_2000, 0x3000, Access::ReadOnly),
                (u64::MAX - 0xfff, 0x7000, Access::ReadWrite),
            ] {
                let range = IovaRange::from_size(iova, 0x1000).unwrap();
                space.map(range, Piece { gpa, access }).unwrap();
            }
        });
        mark(0x1_0fff, 0x1002);
        assert_eq!(dirty(), [2, 5]);
        mark(u64::MAX, u32::MAX);
        assert_eq!(dirty(), [7]);
        mark(0x1_0000, 0);
        assert!(dirty().is_empty());
        space.change(|space| space.set_mode(Mode::Identity));
        mark(0x1fff, 2);
        assert_eq!(dirty(), [1, 2]);
    }
}
