//! I/O virtual addresses, and ranges of them.
//!
//! [`IovaRange`] checks the arithmetic on addresses and lengths, so that no other module adds them
//! unchecked.

use std::fmt;
use std::ops::Add;

use serde::{Deserialize, Serialize};

/// The granule of every mapping, in bytes.
pub const PAGE_SIZE: u64 = 4096;

/// An address by which a device reaches a ring or a buffer.
///
/// Behind an IOMMU of the guest it is no address of guest RAM. So it has a type of its own, and
/// only [`DeviceMemory`] reads memory by it.
///
/// [`DeviceMemory`]: crate::memory::DeviceMemory
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The address `bytes` further; `None` if it wraps.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }
}

/// For an address inside an area that was checked, so that the sum does not wrap.
impl Add<u64> for DeviceAddress {
    type Output = Self;

    fn add(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::LowerHex for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}

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

    /// The addresses at both ends of the space.
    fn ends() -> impl Iterator<Item = u64> + Clone {
        (0..7).chain(u64::MAX - 6..=u64::MAX)
    }

    /// All ranges between the addresses at both ends of the space, against sets of addresses.
    #[test]
    fn all_ranges_at_both_ends_of_the_space_agree_with_sets() {
        let pairs = ends().flat_map(|first| ends().map(move |last| (first, last)));
        let mut ranges = Vec::new();
        for (first, last) in pairs.clone() {
            let range = IovaRange::new(first, last);
            assert_eq!(range.is_some(), first <= last);
            ranges.extend(range);
        }
        for (first, size) in pairs {
            let end = u128::from(first) + u128::from(size);
            let expected = size > 0 && end <= 1 << 64;
            let range = IovaRange::from_size(first, size);
            assert_eq!(range.is_some(), expected, "{first:#x} {size:#x}");
            if let Some(range) = range {
                assert_eq!((range.first(), range.size()), (first, Some(size)));
            }
        }
        let holds = |range: &IovaRange, at: u64| range.first() <= at && at <= range.last();
        for one in &ranges {
            let size = u128::from(one.last()) - u128::from(one.first()) + 1;
            assert_eq!(one.size().map(u128::from), (size < 1 << 64).then_some(size));
            for other in &ranges {
                // Ranges begin and end at these addresses, so they show each relation.
                let mut here = ends().filter(|&at| holds(other, at));
                assert_eq!(one.contains(other), here.clone().all(|at| holds(one, at)));
                assert_eq!(one.overlaps(other), here.any(|at| holds(one, at)));
            }
        }
    }
}
