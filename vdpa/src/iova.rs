//! Ranges of I/O virtual addresses.
//!
//! [`IovaRange`] checks the arithmetic on addresses and lengths, so that no other module adds them
//! unchecked.

use std::fmt;

/// The granule of every mapping, in bytes.
pub const PAGE_SIZE: u64 = 4096;

/// A non-empty range of I/O virtual addresses. Both ends are inclusive, so that it can include the
/// last address of the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IovaRange {
    first: u64,
    last: u64,
}

impl IovaRange {
    /// All addresses.
    pub const ALL: Self = Self {
        first: 0,
        last: u64::MAX,
    };

    /// The range `first..=last`; `None` if `last` is before `first`.
    #[must_use]
    pub const fn new(first: u64, last: u64) -> Option<Self> {
        if first <= last {
            Some(Self { first, last })
        } else {
            None
        }
    }

    /// `size` bytes at `first`; `None` if the range is empty or wraps.
    #[must_use]
    pub const fn from_size(first: u64, size: u64) -> Option<Self> {
        match size.checked_sub(1) {
            Some(span) => match first.checked_add(span) {
                Some(last) => Some(Self { first, last }),
                None => None,
            },
            None => None,
        }
    }

    /// First address.
    #[must_use]
    pub const fn first(&self) -> u64 {
        self.first
    }

    /// Last address.
    #[must_use]
    pub const fn last(&self) -> u64 {
        self.last
    }

    /// Length in bytes; `None` for the whole 64-bit space.
    #[must_use]
    pub const fn size(&self) -> Option<u64> {
        (self.last - self.first).checked_add(1)
    }

    /// Whether all of `other` lies in this range.
    #[must_use]
    pub const fn contains(&self, other: &Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }

    /// Whether the two ranges share an address.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

impl fmt::Display for IovaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_ends_of_the_space_and_nothing_empty() {
        assert_eq!(IovaRange::from_size(0, 0), None);
        assert_eq!(IovaRange::from_size(u64::MAX, 2), None);
        assert_eq!(IovaRange::new(1, 0), None);
        let last = IovaRange::from_size(u64::MAX, 1).unwrap();
        assert_eq!((last.first(), last.last()), (u64::MAX, u64::MAX));
        let all = IovaRange::new(0, u64::MAX).unwrap();
        assert_eq!(all.size(), None);
        assert!(all.contains(&last) && all.overlaps(&last) && !last.contains(&all));
    }
}
