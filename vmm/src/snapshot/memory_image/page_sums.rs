//! The checksums of guest RAM that arrives page by page.
//!
//! Owns one CRC-32 per page. [`PageSums::digest`] combines them into the same [`MemoryDigest`] as a
//! read of the whole memory. So its time does not depend on how fast the host reads memory.

use std::sync::atomic::{AtomicU32, Ordering};

use super::digest::{BLOCK_SIZE, MemoryDigest, blocks};

/// Bytes of a page.
const PAGE: usize = 4096;
static ZEROS: [u8; PAGE] = [0; PAGE];

/// A CRC-32 of each page, which the writer of the page updates.
#[derive(Debug)]
pub struct PageSums {
    size: u64,
    /// CRC-32 of a page of zeros.
    zero: u32,
    /// One per page, by ascending offset.
    pages: Vec<AtomicU32>,
    shift: Shift,
}

impl PageSums {
    /// Starts with `size` bytes of zeros, whole pages.
    #[must_use]
    pub fn zeros(size: u64) -> Self {
        let zero = crc32fast::hash(&ZEROS);
        // Lossless: usize is 64 bits wide on x86-64.
        let pages = size.div_ceil(PAGE as u64);
        Self {
            size,
            zero,
            pages: (0..pages).map(|_| AtomicU32::new(zero)).collect(),
            shift: Shift::new(),
        }
    }

    /// Sets the checksum of the page at `offset` to that of `content`. Each page has one writer at
    /// a time.
    pub fn update(&self, offset: u64, content: &[u8; PAGE]) {
        let index = usize::try_from(offset).unwrap_or(usize::MAX) / PAGE;
        if let Some(sum) = self.pages.get(index) {
            // The caller of `digest` has joined the writers, which orders these stores before it.
            sum.store(crc32fast::hash(content), Ordering::Relaxed);
        }
    }

    /// The digest of all pages at present.
    #[must_use]
    pub fn digest(&self) -> MemoryDigest {
        let per_block = usize::try_from(BLOCK_SIZE).unwrap_or(usize::MAX) / PAGE;
        let checksums: Vec<u32> = self
            .pages
            .chunks(per_block)
            .map(|pages| self.block(pages))
            .collect();
        debug_assert_eq!(checksums.len(), blocks(self.size).count());
        MemoryDigest {
            size: self.size,
            checksums,
        }
    }

    /// Like [`super::digest::checksum`] of the bytes of these pages.
    fn block(&self, pages: &[AtomicU32]) -> u32 {
        let sums = || pages.iter().map(|sum| sum.load(Ordering::Relaxed));
        if sums().all(|sum| sum == self.zero) {
            return 0;
        }
        sums()
            .reduce(|before, page| self.shift.apply(before) ^ page)
            .unwrap_or(0)
            .max(1)
    }
}

/// The effect of appending a page on a CRC-32, without the page's own CRC-32: a linear map over
/// GF(2), with one column per bit.
#[derive(Debug)]
struct Shift([u32; 32]);

impl Shift {
    fn new() -> Self {
        let zero = crc32fast::hash(&ZEROS);
        Self(std::array::from_fn(|bit| {
            let mut behind = crc32fast::Hasher::new_with_initial(1 << bit);
            behind.update(&ZEROS);
            behind.finalize() ^ zero
        }))
    }

    fn apply(&self, sum: u32) -> u32 {
        let columns = self.0.iter().enumerate();
        columns.fold(0, |result, (bit, column)| {
            // All ones where the bit is set.
            result ^ (column & 0_u32.wrapping_sub(sum >> bit & 1))
        })
    }
}
