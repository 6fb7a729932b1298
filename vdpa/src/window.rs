//! The private window: I/O virtual addresses for the VMM's own rings and buffers.
//!
//! ```text
//!   0             RAM end (at most)      window                        2^47
//!   |--- guest RAM, IOVA = GPA ---|.......[ - ####  ##          ]........|
//!                                           ^ page 0 stays unused
//! ```
//! The window is 1 GiB at the top of what both the device and any IOMMU
//! reach. It owns the addresses in it and hands them out; what is mapped there
//! is the IOTLB's business.

use std::collections::BTreeMap;

use crate::iova::{IovaRange, PAGE_SIZE};

/// Length of the window in bytes.
pub const WINDOW_SIZE: u64 = 1 << 30;
/// No window ends above this address: 48-bit IOMMUs translate signed
/// addresses, so 47 bits are what all of them can do.
pub const HIGHEST_END: u64 = 1 << 47;

/// Why there is no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// Guest RAM reaches into where the window must lie.
    #[error(
        "guest RAM up to {ram_end:#x} leaves no room for 1 GiB of private addresses below \
         {end:#x}: give the guest less memory"
    )]
    MeetsRam {
        /// End of the largest guest RAM, exclusive.
        ram_end: u64,
        /// Where the window would end, exclusive.
        end: u64,
    },
    /// The device's range is too small or too high.
    #[error("the device's IOVA range {range} holds no 1 GiB of private addresses")]
    RangeTooSmall {
        /// What the device reaches.
        range: IovaRange,
    },
    /// Not a positive number of whole pages.
    #[error("{size:#x} bytes are not a positive number of 4 KiB pages")]
    Size {
        /// Bytes asked for.
        size: u64,
    },
    /// The window is full.
    #[error("no {size:#x} bytes are left in the private window")]
    Full {
        /// Bytes asked for.
        size: u64,
    },
}

/// The window and what is taken of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrivateWindow {
    range: IovaRange,
    /// First address → size of what was handed out.
    taken: BTreeMap<u64, u64>,
}

impl PrivateWindow {
    /// Places the window for a device that reaches `range`, above guest RAM
    /// that ends before `ram_end` (exclusive) even after every hot-plug.
    ///
    /// # Errors
    /// [`WindowError::MeetsRam`] or [`WindowError::RangeTooSmall`].
    pub fn new(range: IovaRange, ram_end: u64) -> Result<Self, WindowError> {
        let end = range.last().saturating_add(1).min(HIGHEST_END);
        let end = end - end % PAGE_SIZE;
        let first = end
            .checked_sub(WINDOW_SIZE)
            .filter(|&first| first >= range.first())
            .ok_or(WindowError::RangeTooSmall { range })?;
        if first < ram_end {
            return Err(WindowError::MeetsRam { ram_end, end });
        }
        let range =
            IovaRange::from_size(first, WINDOW_SIZE).ok_or(WindowError::RangeTooSmall { range })?;
        Ok(Self {
            range,
            taken: BTreeMap::new(),
        })
    }

    /// All of the window.
    #[must_use]
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// Takes `size` bytes, a multiple of [`PAGE_SIZE`]; gives their first address.
    ///
    /// # Errors
    /// [`WindowError::Size`] or [`WindowError::Full`].
    pub fn allocate(&mut self, size: u64) -> Result<u64, WindowError> {
        if size == 0 || !size.is_multiple_of(PAGE_SIZE) {
            return Err(WindowError::Size { size });
        }
        // Page 0 stays unused, so that an index or length gone wrong by a
        // little meets nothing at the window's edge.
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
            return Err(WindowError::Full { size });
        }
        self.taken.insert(candidate, size);
        Ok(candidate)
    }

    /// Gives back what [`PrivateWindow::allocate`] gave; `false` if it never did.
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
        assert!(matches!(
            PrivateWindow::new(narrow, first + 1),
            Err(WindowError::MeetsRam { .. })
        ));
        for (first, last) in [
            (0, WINDOW_SIZE - 2),
            (HIGHEST_END, u64::MAX),
            (5, WINDOW_SIZE),
        ] {
            let range = IovaRange::new(first, last).unwrap();
            assert_eq!(
                PrivateWindow::new(range, 0),
                Err(WindowError::RangeTooSmall { range })
            );
        }
    }

    #[test]
    fn the_first_page_is_never_given() {
        let mut window = PrivateWindow::new(everything(), 0).unwrap();
        let first = window.range().first();
        assert!(window.allocate(WINDOW_SIZE).is_err());
        assert_eq!(
            window.allocate(WINDOW_SIZE - PAGE_SIZE),
            Ok(first + PAGE_SIZE)
        );
        assert_eq!(
            window.allocate(PAGE_SIZE),
            Err(WindowError::Full { size: PAGE_SIZE })
        );
        assert!(!window.release(first));
        assert!(window.release(first + PAGE_SIZE));
        for size in [0, 1, PAGE_SIZE + 1] {
            assert_eq!(window.allocate(size), Err(WindowError::Size { size }));
        }
        assert!(window.allocate(u64::MAX - 0xfff).is_err());
    }

    proptest! {
        #[test]
        fn never_gives_an_address_twice(steps in prop::collection::vec((1u64..40_000, any::<bool>()), 1..60)) {
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
