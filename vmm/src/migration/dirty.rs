//! The pages of guest RAM that are still to be sent.
//!
//! [`DirtyPages`] owns a set of pages, numbered by their place in the file behind guest RAM, so
//! that it spans all slots without a gap. [`DirtyTracker`] fills it from every source of writes:
//!
//! ```text
//!   vCPUs ──────────────> KVM's log of each slot ────┐
//!   block, rng, relay, ─> bitmap of vm-memory ───────┼──> DirtyPages
//!   control queue, ...    (marked after the write)   │
//!   transmit used rings > ranges that always count ──┘
//! ```
//!
//! Each source is read *and* cleared before a page is read, and marks after it has written. So a
//! write too late for this round shows in the next. The last read counts only after all writers
//! have stopped. Nothing here knows how pages are sent.

mod tracker;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub use tracker::DirtyTracker;

/// Bytes in a page, here and on the wire.
pub const PAGE_SIZE: u64 = 4096;

/// Pages in a word of the bitmap.
const WORD: u64 = 64;

/// Consecutive pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// Number of the first page: its offset in the file divided by [`PAGE_SIZE`].
    pub first: u64,
    /// Number of pages, never 0.
    pub count: u64,
}

impl PageRun {
    /// Offset of the first byte in the file.
    #[must_use]
    pub fn offset(self) -> u64 {
        self.first.saturating_mul(PAGE_SIZE)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(self) -> u64 {
        self.count.saturating_mul(PAGE_SIZE)
    }

    /// Whether the run has no pages; runs from [`DirtyPages::runs`] always have some.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.count == 0
    }
}

/// A set of pages of guest RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirtyPages {
    words: Vec<u64>,
    pages: u64,
}

impl DirtyPages {
    /// An empty set for a RAM of `bytes` (a partial page counts as one).
    #[must_use]
    pub fn none(bytes: u64) -> Self {
        let pages = bytes.div_ceil(PAGE_SIZE);
        // Saturates only on a machine that could not have that RAM either.
        let words = usize::try_from(pages.div_ceil(WORD)).unwrap_or(usize::MAX);
        Self {
            words: vec![0; words],
            pages,
        }
    }

    /// A set with all pages, as before the first round.
    #[must_use]
    pub fn all(bytes: u64) -> Self {
        let mut all = Self::none(bytes);
        all.mark(0..bytes);
        all
    }

    /// Number of pages of the RAM.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.pages
    }

    /// Number of pages in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.words
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Whether the page with this number is in the set.
    #[must_use]
    pub fn contains(&self, page: u64) -> bool {
        usize::try_from(page / WORD)
            .ok()
            .and_then(|index| self.words.get(index))
            .is_some_and(|word| word & (1 << (page % WORD)) != 0)
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds each page that has a byte in `bytes`, offsets in the file; ignores bytes past the end
    /// of RAM.
    pub fn mark(&mut self, bytes: Range<u64>) {
        let first = bytes.start / PAGE_SIZE;
        let end = bytes.end.div_ceil(PAGE_SIZE).min(self.pages);
        if bytes.is_empty() {
            return;
        }
        let mut page = first;
        while page < end {
            let bit = page % WORD;
            let count = (WORD - bit).min(end - page);
            self.or_word(page / WORD, mask(count) << bit);
            page += count;
        }
    }

    /// Adds a bitmap whose lowest bit is the page with number `first`, one bit per page; ignores
    /// bits past the end of RAM.
    pub fn merge(&mut self, first: u64, bitmap: &[u64]) {
        let shift = first % WORD;
        for (index, &word) in (first / WORD..).zip(bitmap) {
            if word == 0 {
                continue;
            }
            self.or_word(index, word << shift);
            if shift != 0 {
                self.or_word(index + 1, word >> (WORD - shift));
            }
        }
    }

    /// Adds the pages of `other`.
    pub fn union(&mut self, other: &Self) {
        self.merge(0, &other.words);
    }

    fn or_word(&mut self, index: u64, bits: u64) {
        // The last word may have fewer than 64 pages.
        let valid = mask(self.pages.saturating_sub(index.saturating_mul(WORD)));
        if let Some(word) = usize::try_from(index)
            .ok()
            .and_then(|index| self.words.get_mut(index))
        {
            *word |= bits & valid;
        }
    }

    /// The pages in the set with numbers in `within`, ascending, as runs of maximal length.
    #[must_use]
    pub fn runs(&self, within: Range<u64>) -> Runs<'_> {
        Runs {
            pages: self,
            next: within.start,
            end: within.end.min(self.pages),
        }
    }

    /// Number of the first page at or after `page` and before `end` that is in the set, or outside
    /// it unless `wanted`.
    fn find(&self, page: u64, end: u64, wanted: bool) -> Option<u64> {
        let mut page = page;
        while page < end {
            let word = usize::try_from(page / WORD)
                .ok()
                .and_then(|index| self.words.get(index))?;
            let word = if wanted { *word } else { !*word } >> (page % WORD);
            if word != 0 {
                return Some(page + u64::from(word.trailing_zeros())).filter(|&page| page < end);
            }
            page = (page / WORD + 1) * WORD;
        }
        None
    }
}

/// The lowest `count` bits.
fn mask(count: u64) -> u64 {
    match count {
        0 => 0,
        1..WORD => (1 << count) - 1,
        _ => u64::MAX,
    }
}

/// Iterator that [`DirtyPages::runs`] returns.
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    pages: &'a DirtyPages,
    next: u64,
    end: u64,
}

impl Iterator for Runs<'_> {
    type Item = PageRun;

    fn next(&mut self) -> Option<PageRun> {
        let first = self.pages.find(self.next, self.end, true)?;
        let after = self.pages.find(first, self.end, false).unwrap_or(self.end);
        self.next = after;
        Some(PageRun {
            first,
            count: after - first,
        })
    }
}
