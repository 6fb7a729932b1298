//! Writes memory while other commands run: for tests that save, migrate and restore the guest.
//!
//! ```text
//!            write-on                  one page after the other, in random order:
//!   (none) ───────────▶ writing ◀──── is it as it was left? write the next generation ──┐
//!      ▲                   │  └─────────────────────────────────────────────────────────┘
//!      └──── write-off ────┘  every page is checked once more
//! ```
//!
//! This module owns the thread, its pages and the generation of each page. A lost page, or one with
//! an earlier state of itself or of another page, counts as wrong.

use crate::random::Sequence;
use lab::error::{Error, Result};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Words in a page of 4 KiB.
const WORDS: usize = 512;

/// Pages in a MiB.
const PAGES_PER_MIB: u64 = 256;

/// The most MiB.
const MAXIMUM: u64 = 1024;

/// The one writer of this guest.
static WRITER: Mutex<Option<Writer>> = Mutex::new(None);

struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Written>,
}

/// The totals.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Written {
    pages: usize,
    written: u64,
    wrong: u64,
}

/// The pages, and the last generation of each.
struct Pages {
    words: Vec<u64>,
    generations: Vec<u64>,
}

impl Pages {
    fn new(pages: usize) -> Self {
        let mut this = Self {
            words: vec![0; pages.saturating_mul(WORDS)],
            generations: vec![0; pages],
        };
        for page in 0..pages {
            this.write(page);
        }
        this
    }

    fn count(&self) -> usize {
        self.generations.len()
    }

    /// Writes the next generation of a page.
    fn write(&mut self, page: usize) {
        let Some(generation) = self.generations.get_mut(page) else {
            return;
        };
        *generation += 1;
        let expected = pattern(page, *generation);
        let words = self.words.chunks_exact_mut(WORDS).nth(page);
        for (word, value) in words.into_iter().flatten().zip(expected) {
            *word = value;
        }
    }

    /// True if a page is as it was last written.
    fn is_whole(&self, page: usize) -> bool {
        let (Some(words), Some(generation)) = (
            self.words.chunks_exact(WORDS).nth(page),
            self.generations.get(page),
        ) else {
            return false;
        };
        words
            .iter()
            .copied()
            .eq(pattern(page, *generation).take(WORDS))
    }
}

/// The content of a page in a generation. With near certainty, no two have a word in common at the
/// same place.
fn pattern(page: usize, generation: u64) -> impl Iterator<Item = u64> {
    let page = u64::try_from(page).unwrap_or(u64::MAX);
    let seed =
        page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ generation.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    (0..).map(move |word: u64| {
        let mixed = (seed ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ (mixed >> 33)
    })
}

fn writer() -> MutexGuard<'static, Option<Writer>> {
    WRITER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `write-on`: starts to write this many MiB, with a pause after each page.
pub(crate) fn start(mib: u64, pause: Duration) -> Result<Value> {
    if mib == 0 || mib > MAXIMUM {
        return Err(Error::invalid("MIB", format!("it is not in 1..={MAXIMUM}")));
    }
    let mut writer = writer();
    if writer.is_some() {
        return Err(Error::invalid("write-on", "a writer is on already"));
    }
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let mut pages = Pages::new(usize::try_from(mib * PAGES_PER_MIB).unwrap_or(0));
    let thread = std::thread::spawn(move || {
        let mut sequence = Sequence::new(mib);
        let mut written = Written {
            pages: pages.count(),
            ..Written::default()
        };
        while !stopped.load(Ordering::Relaxed) {
            let page = usize::try_from(sequence.next()).unwrap_or(0) % pages.count();
            written.wrong += u64::from(!pages.is_whole(page));
            pages.write(page);
            written.written += 1;
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
        }
        let wrong = (0..pages.count())
            .filter(|page| !pages.is_whole(*page))
            .count();
        written.wrong += u64::try_from(wrong).unwrap_or(u64::MAX);
        written
    });
    *writer = Some(Writer { stop, thread });
    Ok(json!({ "writer": "on" }))
}

/// `write-off`: ends it, checks every page once more, and returns the totals.
pub(crate) fn stop() -> Result<Value> {
    let Writer { stop, thread } = writer()
        .take()
        .ok_or_else(|| Error::invalid("write-off", "no writer is on"))?;
    stop.store(true, Ordering::Relaxed);
    let Written {
        pages,
        written,
        wrong,
    } = thread
        .join()
        .map_err(|_| Error::invalid("write-off", "the writer's thread has panicked"))?;
    Ok(json!({ "pages": pages, "written": written, "wrong": wrong }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_not_as_it_was_left_is_noticed() {
        let mut pages = Pages::new(3);
        assert!((0..3).all(|page| pages.is_whole(page)));
        let old: Vec<u64> = pages.words[WORDS..2 * WORDS].to_vec();
        pages.write(1);
        assert!(pages.is_whole(1) && !pages.is_whole(3));
        // An earlier generation of the same page, and another page.
        let new = pages.words[WORDS..2 * WORDS].to_vec();
        pages.words[WORDS..2 * WORDS].copy_from_slice(&old);
        assert!(!pages.is_whole(1));
        pages.words[..WORDS].copy_from_slice(&new);
        assert!(!pages.is_whole(0) && pages.is_whole(2));
        pages.words[3 * WORDS - 1] ^= 1;
        assert!(!pages.is_whole(2));
    }

    #[test]
    fn there_is_one_writer() {
        assert!(stop().is_err());
        assert!(start(0, Duration::ZERO).is_err());
        start(1, Duration::ZERO).unwrap();
        assert!(start(1, Duration::ZERO).is_err());
        let found = stop().unwrap();
        assert_eq!((&found["pages"], &found["wrong"]), (&json!(256), &json!(0)));
    }
}
