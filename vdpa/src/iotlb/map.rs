//! The interval map that mirrors one address space of the kernel.
//!
//! ```text
//!   range.first                                          range.last
//!   |----[ entry ]----------[ entry ][ entry ]----------------|
//! ```
//! Entries never overlap, consist of whole 4 KiB pages and lie inside the device's IOVA range. The
//! kernel returns the same EFAULT for nearly every violation, and no error for some. Here each has
//! its own error *before* anything is written. The map is pure: it accesses neither devices nor
//! this process's memory.

use std::collections::BTreeMap;

use crate::Error;
use crate::iova::{IovaRange, PAGE_SIZE};

/// Disjoint ranges of one address space, each with a value.
#[derive(Debug, Clone)]
pub struct IovaMap<V> {
    range: IovaRange,
    /// First address → last address and value.
    entries: BTreeMap<u64, (u64, V)>,
}

impl<V> IovaMap<V> {
    /// An empty map for a device whose IOVA range is `range`.
    #[must_use]
    pub fn new(range: IovaRange) -> Self {
        Self {
            range,
            entries: BTreeMap::new(),
        }
    }

    /// Checks whether `size` bytes at `iova` could be inserted.
    ///
    /// # Errors
    /// The first rule that it breaks: not empty, no wrap, whole pages, in range, nothing mapped
    /// there.
    pub fn check(&self, iova: u64, size: u64) -> Result<IovaRange, Error> {
        if size == 0 {
            // The kernel once looped forever on it.
            return Err(Error::other(format!("a mapping at {iova:#x} of 0 bytes")));
        }
        let wanted = IovaRange::from_size(iova, size).ok_or_else(|| {
            Error::other(format!(
                "a mapping at {iova:#x} of {size:#x} bytes wraps around"
            ))
        })?;
        if !iova.is_multiple_of(PAGE_SIZE) || !size.is_multiple_of(PAGE_SIZE) {
            return Err(Error::other(format!(
                "a mapping at {iova:#x} of {size:#x} bytes does not consist of whole 4 KiB pages"
            )));
        }
        if !self.range.contains(&wanted) {
            return Err(Error::other(format!(
                "the mapping {wanted} is outside the device's range {}",
                self.range
            )));
        }
        // Entries are disjoint. So only the last one that begins at or before the end of `wanted`
        // can overlap it.
        let before = self.entries.range(..=wanted.last()).next_back();
        match before.and_then(|(&first, &(last, _))| IovaRange::new(first, last)) {
            Some(existing) if existing.overlaps(&wanted) => Err(Error::other(format!(
                "the mapping {wanted} overlaps {existing}"
            ))),
            _ => Ok(wanted),
        }
    }

    /// Inserts `size` bytes at `iova`.
    ///
    /// # Errors
    /// As [`IovaMap::check`]; the map is then unchanged.
    pub fn insert(&mut self, iova: u64, size: u64, value: V) -> Result<IovaRange, Error> {
        let range = self.check(iova, size)?;
        self.entries.insert(range.first(), (range.last(), value));
        Ok(range)
    }

    /// Removes the entry that begins at `iova`.
    ///
    /// # Errors
    /// No mapping begins at this address: an entry is removed whole or not at all.
    pub fn remove(&mut self, iova: u64) -> Result<(IovaRange, V), Error> {
        let missing = || not_mapped(iova);
        let (last, value) = self.entries.remove(&iova).ok_or_else(missing)?;
        let range = IovaRange::new(iova, last).ok_or_else(missing)?;
        Ok((range, value))
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// The entry that begins at `iova`.
    #[must_use]
    pub fn get(&self, iova: u64) -> Option<(IovaRange, &V)> {
        let (last, value) = self.entries.get(&iova)?;
        Some((IovaRange::new(iova, *last)?, value))
    }

    /// The entry that covers the address `iova`.
    #[must_use]
    pub fn find(&self, iova: u64) -> Option<(IovaRange, &V)> {
        let (&first, (last, value)) = self.entries.range(..=iova).next_back()?;
        (iova <= *last).then_some((IovaRange::new(first, *last)?, value))
    }

    /// The entries that share an address with `range`, by ascending address.
    pub fn overlapping(
        &self,
        range: &IovaRange,
    ) -> impl DoubleEndedIterator<Item = (IovaRange, &V)> + use<'_, V> {
        let first = self.find(range.first());
        let first = first.map_or(range.first(), |(entry, _)| entry.first());
        self.entries
            .range(first..=range.last())
            .filter_map(|(&first, (last, value))| Some((IovaRange::new(first, *last)?, value)))
    }

    /// All entries, by ascending address.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (IovaRange, &V)> {
        self.entries
            .iter()
            .filter_map(|(&first, (last, value))| Some((IovaRange::new(first, *last)?, value)))
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the map has no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes in all entries; saturates at `u64::MAX`.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.iter().fold(0, |sum: u64, (range, _)| {
            sum.saturating_add(range.size().unwrap_or(u64::MAX))
        })
    }
}

/// No mapping begins at this address.
pub(super) fn not_mapped(iova: u64) -> Error {
    Error::other(format!("no mapping begins at {iova:#x}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RANGE: (u64, u64) = (0x2000, 0x1_ffff);

    fn map() -> IovaMap<u32> {
        IovaMap::new(IovaRange::new(RANGE.0, RANGE.1).unwrap())
    }

    #[test]
    fn each_violation_has_its_own_error() {
        let mut map = map();
        map.insert(0x4000, 0x2000, 7).unwrap();
        for (iova, size, says) in [
            (0x4000, 0, "of 0 bytes"),
            (u64::MAX, 2, "wraps around"),
            (0x1000, u64::MAX, "wraps around"),
            (u64::MAX - 0xfff, 0x2000, "wraps around"),
            (0x3001, 0x1000, "whole 4 KiB pages"),
            (0x3000, 1, "whole 4 KiB pages"),
            (0x3800, 0x800, "whole 4 KiB pages"),
            (0x1000, 0x2000, "outside the device's range"),
            (0x1_f000, 0x2000, "outside the device's range"),
            (u64::MAX - 0xfff, 0x1000, "outside the device's range"),
            (0x4000, 0x1000, "overlaps"),
            (0x5000, 0x1000, "overlaps"),
            (0x3000, 0x4000, "overlaps"),
            (0x3000, 0x2000, "overlaps"),
        ] {
            let error = map.insert(iova, size, 0).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let error = map.remove(0x5000).unwrap_err();
        assert_eq!(error.to_string(), "no mapping begins at 0x5000");
        assert_eq!(map.len(), 1);
        assert_eq!(map.bytes(), 0x2000);
    }

    #[test]
    fn the_last_page_of_the_space_can_be_mapped() {
        let mut map = IovaMap::new(IovaRange::new(0, u64::MAX).unwrap());
        map.insert(u64::MAX - 0xfff, 0x1000, ()).unwrap();
        assert!(map.find(u64::MAX).is_some());
        assert!(map.insert(u64::MAX - 0xfff, 0x1000, ()).is_err());
    }

    /// All triples of mappings in a few pages at both ends of the space, against sets of pages.
    #[test]
    fn all_triples_of_mappings_at_both_ends_of_the_space() {
        const PAGES: u64 = 5;
        const COUNTS: u64 = PAGES + 2;
        for base in [0, u64::MAX - (PAGES * PAGE_SIZE - 1)] {
            let range = IovaRange::from_size(base, PAGES * PAGE_SIZE).unwrap();
            for mut number in 0..(PAGES * COUNTS).pow(3) {
                let mut map = IovaMap::new(range);
                let mut taken = 0u64;
                for _ in 0..3 {
                    let (first, count) = (number % PAGES, number / PAGES % COUNTS);
                    number /= PAGES * COUNTS;
                    let wanted = ((1 << count) - 1) << first;
                    let fits = count > 0 && first + count <= PAGES && taken & wanted == 0;
                    let at = base + first * PAGE_SIZE;
                    let inserted = map.insert(at, count * PAGE_SIZE, ());
                    assert_eq!(inserted.is_ok(), fits, "{map:?}: {at:#x}, {count} pages");
                    taken |= if fits { wanted } else { 0 };
                }
                for page in 0..PAGES {
                    let found = map.find(base + page * PAGE_SIZE + 0xfff).is_some();
                    assert_eq!(found, taken >> page & 1 == 1);
                }
                assert_eq!(map.bytes(), u64::from(taken.count_ones()) * PAGE_SIZE);
            }
        }
    }

    /// An operation, for the map and a naive model with one value per page.
    #[derive(Debug, Clone)]
    enum Operation {
        Insert(u64, u64),
        Remove(u64),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        // Near page boundaries and around both ends of the range.
        let iova = (0u64..0x24, prop_oneof![9 => Just(0u64), 1 => Just(1)])
            .prop_map(|(page, odd)| page * PAGE_SIZE + odd);
        let size = (0u64..6, prop_oneof![9 => Just(0u64), 1 => Just(0x800)])
            .prop_map(|(pages, odd)| pages * PAGE_SIZE + odd);
        prop_oneof![
            3 => (iova.clone(), size).prop_map(|(iova, size)| Operation::Insert(iova, size)),
            2 => iova.prop_map(Operation::Remove),
        ]
    }

    proptest! {
        #[test]
        fn behaves_as_one_value_per_page(operations in prop::collection::vec(operation(), 0..80)) {
            let mut map = map();
            let mut pages: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
            for (number, operation) in (0u32..).zip(operations) {
                match operation {
                    Operation::Insert(iova, size) => {
                        let wanted: Vec<u64> = (iova..iova + size).step_by(0x1000).collect();
                        let fits = size > 0 && iova % PAGE_SIZE == 0 && size % PAGE_SIZE == 0
                            && iova >= RANGE.0 && iova + size - 1 <= RANGE.1
                            && wanted.iter().all(|page| !pages.contains_key(page));
                        prop_assert_eq!(map.insert(iova, size, number).is_ok(), fits);
                        if fits {
                            pages.extend(wanted.into_iter().map(|page| (page, (iova, number))));
                        }
                    }
                    Operation::Remove(iova) => {
                        let whole = pages.get(&iova).is_some_and(|&(first, _)| first == iova);
                        prop_assert_eq!(map.remove(iova).is_ok(), whole);
                        if whole {
                            pages.retain(|_, &mut (first, _)| first != iova);
                        }
                    }
                }
                for page in (0..0x24).map(|page| page * PAGE_SIZE) {
                    let found = map.find(page + 0x123);
                    let found = found.map(|(range, &value)| (range.first(), value));
                    prop_assert_eq!(found, pages.get(&page).copied());
                }
                prop_assert_eq!(map.bytes(), pages.len() as u64 * PAGE_SIZE);
            }
        }
    }
}
