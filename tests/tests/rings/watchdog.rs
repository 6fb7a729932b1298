//! Measures time without progress, counted in its own ticks.
//!
//! The lab's processors are emulated and shared, and a thread may not run for seconds. So a late
//! tick counts as two and no more. Only time in which the watchdog itself ran, and others could
//! have run, adds up to a stall.

use std::time::{Duration, Instant};

/// The length of a tick.
pub(crate) const TICK: Duration = Duration::from_millis(10);
/// Without progress for this long a test fails.
pub(crate) const STALL: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(crate) struct Watchdog {
    ticked: Instant,
    counted: Duration,
    longest: Duration,
}

impl Watchdog {
    pub(crate) fn new() -> Self {
        Self {
            ticked: Instant::now(),
            counted: Duration::ZERO,
            longest: Duration::ZERO,
        }
    }

    /// Records progress.
    pub(crate) fn progress(&mut self) {
        self.longest = self.longest.max(self.counted);
        self.counted = Duration::ZERO;
        self.ticked = Instant::now();
    }

    /// Call this at least every [`TICK`] without progress; it returns the counted time.
    pub(crate) fn tick(&mut self) -> Duration {
        let now = Instant::now();
        self.counted += (now - self.ticked).min(2 * TICK);
        self.ticked = now;
        self.counted
    }

    /// True if that is too long.
    pub(crate) fn is_stalled(&self) -> bool {
        self.counted >= STALL
    }

    /// The longest counted time without progress that ended with progress.
    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }
}
