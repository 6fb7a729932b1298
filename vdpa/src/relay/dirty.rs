//! The interface by which relays report devices' writes.

use std::fmt;

use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::memory::GuestMemory;

/// Records guest memory that a device wrote without [`GuestMemory`]. Writes of this process need no
/// record.
pub trait Dirty: fmt::Debug {
    /// Records that `len` bytes at the guest-physical `address` may have changed. Parts outside
    /// guest RAM are ignored.
    fn mark(&self, address: u64, len: u32);
}

/// Marks the pages in the bitmap of the region, as writes through it do.
impl Dirty for GuestMemory {
    fn mark(&self, address: u64, len: u32) {
        let Some(last) = u64::from(len)
            .checked_sub(1)
            .map(|span| address.saturating_add(span))
        else {
            return;
        };
        for region in self.iter() {
            let base = region.start_addr().0;
            let first = address.max(base);
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
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;

    #[test]
    fn marks_the_pages_that_are_ram() {
        let memory = GuestMemory::from_ranges(&[
            (GuestAddress(0), 0x4000),
            (GuestAddress(0x4000), 0x4000),
            (GuestAddress(0x10_0000), 0x4000),
        ])
        .unwrap();
        memory.mark(0x3fff, 2);
        memory.mark(0x7000, 0xf_9001);
        memory.mark(0x10_3fff, u32::MAX);
        memory.mark(u64::MAX, u32::MAX);
        memory.mark(0x1000, 0);
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
}
