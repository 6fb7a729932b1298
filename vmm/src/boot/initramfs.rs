//! Places the initramfs at the highest possible address, so that the kernel can decompress itself
//! below it.
//!
//! Owns the choice of the address. It must not know the content of an initramfs.

use crate::Error;
use crate::byte_count::ByteCount;
use crate::layout::{AddressRange, Layout, PAGE_SIZE};

/// Chooses the address of `len` bytes (more than 0): page-aligned in the RAM below the hole, no
/// byte above the address `max`, clear of `kernel`.
pub(super) fn place(
    len: u64,
    max: u64,
    kernel: AddressRange,
    layout: &Layout,
) -> Result<AddressRange, Error> {
    let loadable = layout.loadable();
    let limit = loadable.end().min(max.saturating_add(1));
    let gaps = [
        (kernel.end(), limit),
        (loadable.start, kernel.start.min(limit)),
    ];
    for (start, end) in gaps {
        let highest = end
            .checked_sub(len)
            .map(|address| address & !(PAGE_SIZE - 1));
        if let Some(address) = highest.filter(|address| *address >= start) {
            return Ok(AddressRange {
                start: address,
                len,
            });
        }
    }
    let available = gaps
        .into_iter()
        .map(|(start, end)| end.saturating_sub(start.next_multiple_of(PAGE_SIZE)))
        .max()
        .unwrap_or(0);
    Err(Error::unusable(format!(
        "it does not fit: it has {}, and of the guest's {} of memory {} are free for it; give the \
         guest more memory",
        ByteCount(len),
        ByteCount(layout.ram_size()),
        ByteCount(available)
    )))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const KERNEL: AddressRange = AddressRange {
        start: 16 * MIB,
        len: 20 * MIB,
    };

    #[test]
    fn goes_to_the_top() {
        let layout = Layout::new(64 * MIB, 40).unwrap();
        let placed = place(5000, u64::MAX, KERNEL, &layout).unwrap();
        assert_eq!(placed.start, 64 * MIB - 2 * PAGE_SIZE);
        let placed = place(PAGE_SIZE, 40 * MIB - 1, KERNEL, &layout).unwrap();
        assert_eq!(placed.start, 40 * MIB - PAGE_SIZE);
        // There is room only below the kernel.
        let placed = place(PAGE_SIZE, 20 * MIB, KERNEL, &layout).unwrap();
        assert_eq!(placed.start, 16 * MIB - PAGE_SIZE);
    }

    #[test]
    fn the_error_names_both_sizes() {
        let layout = Layout::new(64 * MIB, 40).unwrap();
        let error = place(100 * MIB, u64::MAX, KERNEL, &layout).unwrap_err();
        assert_eq!(
            error.to_string(),
            "it does not fit: it has 100 MiB, and of the guest's 64 MiB of memory 28 MiB are free \
             for it; give the guest more memory"
        );
    }

    proptest! {
        #[test]
        fn stays_inside_and_clear(
            len in 1u64..200 * MIB,
            max in prop_oneof![Just(u64::MAX), 0u64..300 * MIB],
            start in MIB..64 * MIB,
            kernel_len in 1u64..64 * MIB,
        ) {
            let layout = Layout::new(128 * MIB, 40).unwrap();
            let kernel = AddressRange { start, len: kernel_len };
            if let Ok(placed) = place(len, max, kernel, &layout) {
                prop_assert!(placed.start.is_multiple_of(PAGE_SIZE));
                prop_assert!(placed.start >= layout.loadable().start);
                prop_assert!(placed.end() <= layout.loadable().end());
                prop_assert!(placed.end() - 1 <= max);
                prop_assert!(!placed.overlaps(&kernel));
            }
        }
    }
}
