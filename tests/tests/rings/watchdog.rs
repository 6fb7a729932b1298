//! Time without progress, counted in ticks of one's own.
//!
//! The lab's processors are emulated and shared, and a thread may not run for seconds.
//! So a tick that comes late counts as two and no more: only time in which
//! the watchdog itself ran, and so others could have, makes a stall.

use std::time::{Duration, Instant};

/// How long a tick is to take.
pub(crate) const TICK: Duration = Duration::from_millis(10);
/// Without progress for so long a test fails.
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

    /// There was progress.
    pub(crate) fn progress(&mut self) {
        self.longest = self.longest.max(self.counted);
        self.counted = Duration::ZERO;
        self.ticked = Instant::now();
    }

    /// To be called every [`TICK`] without progress, or more often; gives the time counted.
    pub(crate) fn tick(&mut self) -> Duration {
        let now = Instant::now();
        self.counted += (now - self.ticked).min(2 * TICK);
        self.ticked = now;
        self.counted
    }

    /// Whether that is too long.
    pub(crate) fn is_stalled(&self) -> bool {
        self.counted >= STALL
    }

    /// Longest time without progress, as counted, after which there was some.
    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }
}
