//! Sets of pages against sets of numbers. Tests of the tracker need KVM:
//! `vmm/tests/boot_kvm_dirty_log.rs`.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn numbers(pages: &DirtyPages) -> Vec<u64> {
    pages
        .runs(0..u64::MAX)
        .flat_map(|run| run.first..run.first + run.count)
        .collect()
}

#[test]
fn all_and_none_know_their_number() {
    for (bytes, pages) in [(0, 0), (1, 1), (4096, 1), (64 * 4096, 64), (65 * 4096, 65)] {
        let all = DirtyPages::all(bytes);
        assert_eq!((all.count(), all.capacity()), (pages, pages));
        assert_eq!(all.is_empty(), pages == 0);
        assert!(DirtyPages::none(bytes).is_empty());
        assert_eq!(all.runs(0..u64::MAX).count(), usize::from(pages > 0));
    }
}

#[test]
fn pages_past_the_end_are_left_out() {
    let mut pages = DirtyPages::none(70 * 4096);
    pages.merge(60, &[u64::MAX, u64::MAX]);
    pages.mark(69 * 4096..u64::MAX);
    pages.merge(u64::MAX - 5, &[u64::MAX]);
    assert_eq!(numbers(&pages), (60..70).collect::<Vec<_>>());
    assert!(!pages.contains(70) && !pages.contains(u64::MAX));
}

proptest! {
    #[test]
    fn a_set_of_pages_is_a_set_of_numbers(
        size in 1_u64..400,
        marks in prop::collection::vec((0_u64..2_000_000, 0_u64..200_000), 0..6),
        merges in prop::collection::vec(
            (0_u64..400, prop::collection::vec(any::<u64>(), 0..4)),
            0..3,
        ),
        within in (0_u64..400, 0_u64..400),
    ) {
        let mut pages = DirtyPages::none(size * PAGE_SIZE);
        let mut model = BTreeSet::new();
        for (start, len) in marks {
            pages.mark(start..start + len);
            if len > 0 {
                model.extend(start / PAGE_SIZE..=(start + len - 1) / PAGE_SIZE);
            }
        }
        for (first, bitmap) in merges {
            pages.merge(first, &bitmap);
            for (index, word) in (0_u64..).zip(bitmap) {
                let bits = (0..64).filter(|bit| word >> bit & 1 == 1);
                model.extend(bits.map(|bit| first + index * 64 + bit));
            }
        }
        model.retain(|&page| page < size);
        prop_assert_eq!(numbers(&pages), model.iter().copied().collect::<Vec<_>>());
        prop_assert_eq!(pages.count(), model.len() as u64);
        let part: Vec<u64> = pages
            .runs(within.0..within.1)
            .flat_map(|run| run.first..run.first + run.count)
            .collect();
        let inside = |page: &u64| (within.0..within.1).contains(page);
        let wanted: Vec<u64> = model.iter().copied().filter(inside).collect();
        prop_assert_eq!(part, wanted);
    }
}
