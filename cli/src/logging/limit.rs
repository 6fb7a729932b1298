//! A limit for the lines of each call site, so that no guest and no client floods the log.
//!
//! Owns one record per call site that has logged: call sites are static, so memory is bounded. It
//! must not know the format and the destination of lines.
//!
//! ```text
//!   line ──> the burst is used up? ── no ──> logged; a line before it counts the suppressed ones
//!                   ^         └─ yes ──> suppressed, before it is formatted
//!                   └─ one further line per interval
//! ```
//! Connections that are refused before their client has proven anything share a smaller limit.
//!
//! No limit applies to audit lines, nor to debug and trace lines, which an operator turns on to see
//! each event. The log file rotates all the same.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use vmm::http::server::REFUSED;

use super::AUDIT;

/// The target of lines that count suppressed lines.
pub(super) const SUPPRESSED: &str = "suppressed";

/// How many lines a call site may log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rate {
    /// Lines at once.
    burst: u32,
    /// The time after which one further line is logged.
    interval: Duration,
}

impl Rate {
    /// For the process of one VM, whose guest may cause lines. Some call sites log one line per NIC
    /// and feature at the VM's start, so the burst is large.
    pub(crate) const VM: Self = Self {
        burst: 100,
        interval: Duration::from_secs(1),
    };
    /// For the daemon. Its VMs and clients share call sites: a flood that one of them causes must
    /// not suppress lines about the others.
    pub(crate) const DAEMON: Self = Self {
        burst: 1000,
        interval: Duration::from_millis(10),
    };
}

/// A call site that has logged.
#[derive(Debug)]
struct Site {
    /// When the whole burst is available again.
    rested_at: Instant,
    /// Since the last line that was logged.
    suppressed: u64,
}

impl Site {
    /// Decides on a line. Returns the number of lines suppressed before it, or `None` if this one
    /// is suppressed, too.
    fn admit(&mut self, rate: Rate, now: Instant) -> Option<u64> {
        let rested_at = self.rested_at.max(now) + rate.interval;
        if rested_at.duration_since(now) > rate.interval * rate.burst {
            self.suppressed = self.suppressed.saturating_add(1);
            return None;
        }
        self.rested_at = rested_at;
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Limit {
    rate: Rate,
    sites: Mutex<HashMap<Identifier, Site>>,
}

impl Limit {
    pub(super) fn new(rate: Rate) -> Self {
        Self {
            rate,
            sites: Mutex::default(),
        }
    }

    fn admit(&self, site: Identifier, rate: Rate) -> Option<u64> {
        let now = Instant::now();
        let mut sites = self.sites.lock();
        let site = sites.entry(site).or_insert(Site {
            rested_at: now,
            suppressed: 0,
        });
        site.admit(rate, now)
    }
}

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let line = event.metadata();
        if *line.level() > Level::INFO || matches!(line.target(), AUDIT | SUPPRESSED) {
            return true;
        }
        let rate = match line.target() {
            // A stranger must not drive the other lines out of a log that rotates.
            REFUSED => Rate::VM,
            _ => self.rate,
        };
        let Some(suppressed) = self.admit(line.callsite(), rate) else {
            return false;
        };
        if suppressed > 0 {
            let (file, number) = (line.file().unwrap_or("?"), line.line().unwrap_or(0));
            // A nested event reaches the process's only subscriber. A scoped one would drop it.
            tracing::warn!(
                target: SUPPRESSED,
                source = format_args!("{file}:{number}"),
                "{suppressed} lines suppressed: too many from one source"
            );
        }
        true
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
        let mut site = Site {
            rested_at: begin,
            suppressed: 0,
        };
        let mut admit = |milliseconds| site.admit(rate, at(milliseconds));
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
    }
}
