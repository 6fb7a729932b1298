//! The range of guest-physical addresses for BARs.
//!
//! Owns the first address of each BAR. It must not know where the guest moves a BAR afterwards.

use std::collections::BTreeMap;

use crate::Error;

/// A first-fit allocator of BAR addresses over one range.
#[derive(Debug)]
pub struct MmioWindow {
    base: u64,
    /// Inclusive, so that a window may reach the end of the address space.
    last: u64,
    /// Allocated ranges: first address to last address.
    given: BTreeMap<u64, u64>,
}

impl MmioWindow {
    /// Creates the window `base..base + len` (bytes).
    ///
    /// # Errors
    /// The window is empty or exceeds the address space.
    pub fn new(base: u64, len: u64) -> Result<Self, Error> {
        let last = len
            .checked_sub(1)
            .and_then(|span| base.checked_add(span))
            .ok_or_else(|| {
                Error::other(format!("PCI window {base:#x}+{len:#x} is empty or wraps"))
            })?;
        Ok(Self {
            base,
            last,
            given: BTreeMap::new(),
        })
    }

    /// Whether all of `address..address + size` lies in the window.
    #[must_use]
    pub fn contains(&self, address: u64, size: u64) -> bool {
        let end = size
            .checked_sub(1)
            .and_then(|span| address.checked_add(span));
        end.is_some_and(|end| address >= self.base && end <= self.last)
    }

    /// Allocates the lowest free address that is a multiple of `size`, a power of two.
    ///
    /// # Errors
    /// No address is left for this size, or it is not a power of two.
    pub fn allocate(&mut self, size: u64) -> Result<u64, Error> {
        let full = || {
            Error::other(format!(
                "no room for a BAR of {size:#x} bytes in the PCI window: unplug another device, or \
                 use one with smaller BARs"
            ))
        };
        if !size.is_power_of_two() {
            return Err(full());
        }
        let mut candidate = self.base.checked_next_multiple_of(size);
        for (first, last) in &self.given {
            let Some(address) = candidate else { break };
            if *first > address && first - address >= size {
                break;
            }
            if *last >= address {
                let after = last.checked_add(1);
                candidate = after.and_then(|after| after.checked_next_multiple_of(size));
            }
        }
        match candidate {
            Some(address) if self.contains(address, size) => {
                self.given.insert(address, address + (size - 1));
                Ok(address)
            }
            _ => Err(full()),
        }
    }

    /// Frees the range that [`MmioWindow::allocate`] returned at `address`.
    pub fn free(&mut self, address: u64) {
        self.given.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn windows_that_cannot_be() {
        for (base, len) in [(0, 0), (2, u64::MAX), (u64::MAX, 2)] {
            MmioWindow::new(base, len).unwrap_err();
        }
        let mut top = MmioWindow::new(u64::MAX - 0xfff, 0x1000).unwrap();
        assert_eq!(top.allocate(0x1000).unwrap(), u64::MAX - 0xfff);
        for size in [0x1000, 0, 3] {
            let refused = top.allocate(size).unwrap_err();
            assert!(refused.to_string().starts_with("no room for a BAR"));
        }
    }

    #[test]
    fn a_gap_is_used_again() {
        let mut window = MmioWindow::new(0x1_0000, 0x4_0000).unwrap();
        let first = window.allocate(0x1_0000).unwrap();
        let second = window.allocate(0x2_0000).unwrap();
        assert_eq!((first, second), (0x1_0000, 0x2_0000));
        window.free(first);
        assert_eq!(window.allocate(0x2000).unwrap(), 0x1_0000);
        assert_eq!(window.allocate(0x1_0000).unwrap(), 0x4_0000);
        assert_eq!(window.allocate(0x8000).unwrap(), 0x1_8000);
        window.allocate(0x8000).unwrap_err();
    }

    /// All windows of a few addresses at both ends of the space, with all sequences of allocations
    /// and releases, against a search of each address.
    #[test]
    fn all_small_windows_give_the_lowest_free_address() {
        let bases = (0..4).chain(u64::MAX - 7..=u64::MAX);
        for (base, len) in bases.flat_map(|base| (0..10).map(move |len| (base, len))) {
            let last = u128::from(base) + u128::from(len);
            let exists = len > 0 && last <= 1 << 64;
            assert_eq!(MmioWindow::new(base, len).is_ok(), exists);
            if !exists {
                continue;
            }
            let inside = |address: u128, size: u128| {
                address >= base.into() && address + size <= last && size > 0
            };
            let window = MmioWindow::new(base, len).unwrap();
            for address in (0..16).chain(u64::MAX - 15..=u64::MAX) {
                for size in (0..12).chain([u64::MAX]) {
                    let expected = inside(address.into(), size.into());
                    assert_eq!(window.contains(address, size), expected);
                }
            }
            // Each digit is a step: a size, 3 (no size), or the release of the oldest.
            for sequence in 0..5u32.pow(4) {
                let mut window = MmioWindow::new(base, len).unwrap();
                let mut held: Vec<(u128, u128)> = Vec::new();
                for step in 0..4 {
                    let size = match sequence / 5u32.pow(step) % 5 {
                        0 if held.is_empty() => continue,
                        0 => {
                            let (address, _) = held.remove(0);
                            window.free(u64::try_from(address).unwrap());
                            continue;
                        }
                        digit => [1, 2, 3, 4][usize::try_from(digit - 1).unwrap()],
                    };
                    let is_free = |address: &u128| {
                        address.is_multiple_of(size)
                            && inside(*address, size)
                            && held.iter().all(|(other, span)| {
                                address + size <= *other || other + span <= *address
                            })
                    };
                    let mut addresses = u128::from(base)..last;
                    let expected = addresses.find(is_free).filter(|_| size.is_power_of_two());
                    let given = window.allocate(u64::try_from(size).unwrap());
                    assert_eq!(given.ok().map(u128::from), expected);
                    held.extend(expected.map(|address| (address, size)));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn given_ranges_are_aligned_disjoint_and_inside(
            base in 0u64..1 << 20, len in 1u64..1 << 24,
            steps in prop::collection::vec((0u32..22, any::<bool>()), 0..60)) {
            let mut window = MmioWindow::new(base, len).unwrap();
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (order, free) in steps {
                if free && let Some((address, _)) = held.pop() {
                    window.free(address);
                } else if let Ok(address) = window.allocate(1 << order) {
                    let size = 1u64 << order;
                    prop_assert_eq!(address % size, 0);
                    prop_assert!(window.contains(address, size));
                    for (other, span) in &held {
                        prop_assert!(address + size <= *other || other + span <= address);
                    }
                    held.push((address, size));
                }
            }
        }
    }
}
