//! A limit for the lines of each call site, so that no guest and no client floods the log.
//!
//! Owns one record per call site that has logged: call sites are static, so memory is bounded. It
//! must not know the format and the destination of lines.
//!
//! Connections that are refused without a request share a smaller limit.
//!
//! No limit applies to audit lines, nor to debug and trace lines, which an operator turns on to see
//! each event. The log file rotates all the same.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bellhop_common::log_rate::{LineSource, Rate};
use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use vmm::http::server::REFUSED;

use super::AUDIT;

/// The target of lines that count suppressed lines.
pub(super) const SUPPRESSED: &str = "suppressed";

/// For the process of one VM or software NIC, whose guest may cause lines. Some call sites log one
/// line per NIC and feature at the VM's start, so the burst is large.
pub(crate) const VM_RATE: Rate = Rate {
    burst: 100,
    interval: Duration::from_secs(1),
};
/// For the daemon. Its VMs and clients share call sites: a flood that one of them causes must not
/// suppress lines about the others.
pub(crate) const DAEMON_RATE: Rate = Rate {
    burst: 1000,
    interval: Duration::from_millis(10),
};

/// See the module.
#[derive(Debug)]
pub(super) struct Limit {
    rate: Rate,
    sites: Mutex<HashMap<Identifier, LineSource>>,
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
        let site = sites.entry(site).or_insert_with(|| LineSource::new(now));
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
            // The log rotates: lines about unknown clients must not displace the others.
            REFUSED => VM_RATE,
            _ => self.rate,
        };
        // Suppressed before it is formatted.
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
