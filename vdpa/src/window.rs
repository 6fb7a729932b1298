//! The private window: I/O virtual addresses for the VMM's own rings and buffers.
//!
//! ```text
//!   0             RAM end (at most)      window                        2^47
//!   |--- guest RAM, IOVA = GPA ---|.......[ - ####  ##          ]........|
//!                                           ^ page 0 stays unused
//! ```
//! The window is 1 GiB at the top of the range that both the device and any IOMMU can address. It
//! allocates the addresses; the IOTLB maps memory there.

use std::collections::BTreeMap;

use crate::Error;
use crate::iova::{IovaRange, PAGE_SIZE};

/// Length of the window in bytes.
pub const WINDOW_SIZE: u64 = 1 << 30;
/// No window ends above this address: 48-bit IOMMUs translate signed addresses, so all of them
/// support 47 bits.
pub const HIGHEST_END: u64 = 1 << 47;

/// The window and its allocated ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrivateWindow {
    range: IovaRange,
    /// First address → size of each allocated range.
    taken: BTreeMap<u64, u64>,
}

impl PrivateWindow {
    /// Places the window for a device with the IOVA range `range`, above guest RAM. RAM ends before
    /// `ram_end` (exclusive), even after every hot-plug.
    ///
    /// # Errors
    /// Guest RAM reaches into the window, or the device's range is too small or too high.
    pub fn new(range: IovaRange, ram_end: u64) -> Result<Self, Error> {
        let too_small = || {
            Error::other(format!(
                "the device's IOVA range {range} has no room for 1 GiB of private addresses"
            ))
        };
        let end = range.last().saturating_add(1).min(HIGHEST_END);
        let end = end - end % PAGE_SIZE;
        let first = end
            .checked_sub(WINDOW_SIZE)
            .filter(|&first| first >= range.first())
            .ok_or_else(too_small)?;
        if first < ram_end {
            return Err(Error::other(format!(
                "guest RAM up to {ram_end:#x} leaves no room for 1 GiB of private addresses below \
                 {end:#x}: give the guest less memory"
            )));
        }
        let range = IovaRange::from_size(first, WINDOW_SIZE).ok_or_else(too_small)?;
        Ok(Self {
            range,
            taken: BTreeMap::new(),
        })
    }

    /// The range of the whole window.
    #[must_use]
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// Allocates `size` bytes, a multiple of [`PAGE_SIZE`]; returns their first address.
    ///
    /// # Errors
    /// `size` is not a positive number of whole pages, or the window is full.
    pub fn allocate(&mut self, size: u64) -> Result<u64, Error> {
        if size == 0 || !size.is_multiple_of(PAGE_SIZE) {
            return Err(Error::other(format!(
                "{size:#x} bytes are not a positive number of 4 KiB pages"
            )));
        }
        // Page 0 stays unused, so that a slightly wrong index or length hits nothing at the
        // window's edge.
        let mut candidate = self.range.first() + PAGE_SIZE;
        for (&first, &length) in &self.taken {
            if first - candidate >= size {
                break;
            }
            candidate = first + length;
        }
        let fits = IovaRange::from_size(candidate, size)
            .is_some_and(|wanted| self.range.contains(&wanted));
        if !fits {
            return Err(Error::other(format!(
                "no {size:#x} bytes are left in the private window"
            )));
        }
        self.taken.insert(candidate, size);
        Ok(candidate)
    }

    /// Frees the range that [`PrivateWindow::allocate`] returned; `false` if it is not allocated.
    pub fn release(&mut self, first: u64) -> bool {
        self.taken.remove(&first).is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn everything() -> IovaRange {
        IovaRange::new(0, u64::MAX).unwrap()
    }

    #[test]
    fn lies_above_ram_and_inside_the_range() {
        let window = PrivateWindow::new(everything(), 1 << 40).unwrap();
        assert_eq!(window.range().last(), HIGHEST_END - 1);
        let narrow = IovaRange::new(0, (1 << 39) - 1).unwrap();
        let window = PrivateWindow::new(narrow, 1 << 32).unwrap();
        assert_eq!(window.range().first(), (1 << 39) - WINDOW_SIZE);
        // A range that ends inside a page.
        let odd = IovaRange::new(0, 1 << 39).unwrap();
        assert_eq!(PrivateWindow::new(odd, 0).unwrap().range(), window.range());
        let first = window.range().first();
        PrivateWindow::new(narrow, first).unwrap();
        let error = PrivateWindow::new(narrow, first + 1).unwrap_err();
        assert!(error.to_string().contains("give the guest less memory"));
        for (first, last) in [
            (0, WINDOW_SIZE - 2),
            (HIGHEST_END, u64::MAX),
            (5, WINDOW_SIZE),
        ] {
            let range = IovaRange::new(first, last).unwrap();
            let error = PrivateWindow::new(range, 0).unwrap_err();
            assert!(
                error.to_string().contains("has no room for 1 GiB"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_first_page_is_never_given() {
        let mut window = PrivateWindow::new(everything(), 0).unwrap();
        let first = window.range().first();
        assert!(window.allocate(WINDOW_SIZE).is_err());
        let all = window.allocate(WINDOW_SIZE - PAGE_SIZE).unwrap();
        assert_eq!(all, first + PAGE_SIZE);
        let error = window.allocate(PAGE_SIZE).unwrap_err();
        assert!(error.to_string().contains("are left"), "{error}");
        assert!(!window.release(first));
        assert!(window.release(first + PAGE_SIZE));
        for size in [0, 1, PAGE_SIZE + 1] {
            let error = window.allocate(size).unwrap_err();
            assert!(error.to_string().contains("4 KiB pages"), "{error}");
        }
        assert!(window.allocate(u64::MAX - 0xfff).is_err());
    }

    proptest! {
        #[test]
        fn never_gives_an_address_twice(
            steps in prop::collection::vec((1u64..40_000, any::<bool>()), 1..60),
        ) {
            let mut window = PrivateWindow::new(everything(), 0).unwrap();
            let mut held: Vec<IovaRange> = Vec::new();
            for (pages, release) in steps {
                if release && !held.is_empty() {
                    let index = usize::try_from(pages).unwrap() % held.len();
                    prop_assert!(window.release(held.swap_remove(index).first()));
                } else if let Ok(first) = window.allocate(pages * PAGE_SIZE) {
                    let range = IovaRange::from_size(first, pages * PAGE_SIZE).unwrap();
                    prop_assert!(window.range().contains(&range));
                    prop_assert!(held.iter().all(|other| !other.overlaps(&range)));
                    held.push(range);
                }
            }
        }
    }
}
