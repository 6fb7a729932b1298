//! Threads of a test that end with the test.
//!
//! A scope waits for its threads, so one that goes on until it is told hangs a test of which an
//! assertion has failed. Owns only the word that tells it in any case.

use std::sync::atomic::{AtomicBool, Ordering};

/// Says to other threads, when dropped, that they shall end.
#[derive(Debug)]
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
