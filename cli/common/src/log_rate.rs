//! How many log lines, or other reports, one source may cause.
//!
//! Owns the state of one source. It must not know the sources, nor the lines.
//!
//! ```text
//!   line ──> the burst is used up? ── no ──> logged, with the number of suppressed ones
//!                   ^         └─ yes ──> suppressed
//!                   └─ one further line per interval
//! ```

use std::time::{Duration, Instant};

/// How many lines a source may cause.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Lines at once.
    pub burst: u32,
    /// The time after which one further line is logged.
    pub interval: Duration,
}

/// A source that has caused a line.
#[derive(Debug)]
pub struct LineSource {
    /// When the whole burst is available again.
    rested_at: Instant,
    /// Since the last line that was logged.
    suppressed: u64,
}

impl LineSource {
    /// One that has caused no line yet.
    pub fn new(now: Instant) -> Self {
        Self {
            rested_at: now,
            suppressed: 0,
        }
    }

    /// Decides on a line. Returns the number of lines suppressed before it, or `None` if this one
    /// is suppressed, too.
    pub fn admit(&mut self, rate: Rate, now: Instant) -> Option<u64> {
        let rested_at = self.rested_at.max(now) + rate.interval;
        if rested_at.duration_since(now) > rate.interval * rate.burst {
            self.suppressed = self.suppressed.saturating_add(1);
            return None;
        }
        self.rested_at = rested_at;
        Some(std::mem::take(&mut self.suppressed))
    }

    /// Whether the whole burst is available again.
    pub fn has_rested(&self, now: Instant) -> bool {
        self.rested_at <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_burst_one_line_per_interval_is_logged() {
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let rate = Rate {
            burst: 3,
            interval: Duration::from_secs(1),
        };
        let mut source = LineSource::new(begin);
        let mut admit = |milliseconds| source.admit(rate, at(milliseconds));
        for _ in 0..3 {
            assert_eq!(admit(0), Some(0));
        }
        for _ in 0..7 {
            assert_eq!(admit(999), None);
        }
        assert_eq!(admit(1000), Some(7));
        assert_eq!(admit(1001), None);
        assert_eq!(admit(2500), Some(1));
        assert_eq!(admit(2500), None);
        // Rested: the whole burst again, and no more.
        for suppressed in [1, 0, 0] {
            assert_eq!(admit(60_000), Some(suppressed));
        }
        assert_eq!(admit(60_000), None);
        assert!(!source.has_rested(at(62_999)));
        assert!(source.has_rested(at(63_000)));
    }
}
