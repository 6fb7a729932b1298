//! Threads of a test that end with the test.
//!
//! A scope waits for its threads, so a thread that runs until it is stopped hangs a test with a
//! failed assertion. The guard here stops it in any case.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the flag when dropped, so that other threads end.
#[derive(Debug)]
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
