//! The progress of a running migration, for other threads.
//!
//! Owns the counters. Those that change with every frame are atomic; a lock protects the rest, held
//! only for a copy. It must not know connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::channel::Cancel;
use super::convergence::Forecast;
use super::error::Phase;

/// Counters of one migration, shared by its threads and their readers.
#[derive(Debug)]
pub struct Progress {
    started: Instant,
    round: AtomicU32,
    bytes: AtomicU64,
    pages: AtomicU64,
    zero_pages: AtomicU64,
    slow: Mutex<Slow>,
}

/// Values that change a few times per round.
#[derive(Debug, Clone, Copy, Default)]
struct Slow {
    /// The snapshot without counters and elapsed times.
    shown: Snapshot,
    /// Pages to send when the round began, and those already sent by then.
    round_pages: u64,
    pages_before: u64,
    stopped: Option<Instant>,
    /// When the last part of the downtime ended.
    part_ended: Option<Instant>,
}

/// The parts of the downtime, as the source sees them. `None`: that part has not ended yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DowntimeParts {
    /// Parking the vCPUs and stopping the devices.
    pub stop: Option<Duration>,
    /// Sending the last pages.
    pub memory: Option<Duration>,
    /// Sending the state of vCPUs and devices.
    pub state: Option<Duration>,
    /// The restore at the destination.
    pub ready: Option<Duration>,
    /// From GO to DONE: the destination starts the devices and reports that the guest runs.
    pub go: Option<Duration>,
}

/// The progress of a migration at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The current phase.
    pub phase: Phase,
    /// The round, from 1; 0 before the first.
    pub round: u32,
    /// Time since the start.
    pub elapsed: Duration,
    /// Bytes of guest RAM.
    pub ram_bytes: u64,
    /// Bytes on the wire, all rounds; at the destination, bytes of pages.
    pub bytes_sent: u64,
    /// Pages sent with their content, all rounds.
    pub pages: u64,
    /// Pages that were sent as zero, without content.
    pub zero_pages: u64,
    /// Bytes of memory that this round has still to send.
    pub bytes_left: u64,
    /// Bytes per second on the wire.
    pub bytes_per_second: u64,
    /// Bytes of memory per second that the guest and its devices write, in whole pages.
    pub dirty_bytes_per_second: u64,
    /// Share of their time by which vCPUs are throttled, in per cent.
    pub throttle_percent: u8,
    /// The forecast, from the end of the first round on.
    pub forecast: Option<Forecast>,
    /// How long it took to have all writes logged, those of NICs included: the guest may notice
    /// this before it is stopped.
    pub log_start: Option<Duration>,
    /// How long the guest has been stopped, or was.
    pub downtime: Option<Duration>,
    /// The parts of that time.
    pub downtime_parts: DowntimeParts,
}

/// Observes and cancels a migration from other threads.
#[derive(Debug, Clone, Default)]
pub struct Monitor {
    /// The progress.
    pub progress: Arc<Progress>,
    /// Cancels the migration before GO.
    pub cancel: Cancel,
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress {
    /// Starts the clock.
    #[must_use]
    pub fn new() -> Self {
        Self {
            started: Instant::now(),
            round: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            zero_pages: AtomicU64::new(0),
            slow: Mutex::default(),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Slow)) {
        change(&mut self.slow.lock());
    }

    fn done_pages(&self) -> u64 {
        self.pages
            .load(Ordering::Relaxed)
            .saturating_add(self.zero_pages.load(Ordering::Relaxed))
    }

    /// All values at this moment.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let slow = *self.slow.lock();
        let done = self.done_pages().saturating_sub(slow.pages_before);
        Snapshot {
            round: self.round.load(Ordering::Relaxed),
            elapsed: self.started.elapsed(),
            bytes_sent: self.bytes.load(Ordering::Relaxed),
            pages: self.pages.load(Ordering::Relaxed),
            zero_pages: self.zero_pages.load(Ordering::Relaxed),
            bytes_left: slow
                .round_pages
                .saturating_sub(done)
                .saturating_mul(super::dirty::PAGE_SIZE),
            // The time runs while the guest is stopped.
            downtime: slow
                .shown
                .downtime
                .or_else(|| slow.stopped.map(|since| since.elapsed())),
            ..slow.shown
        }
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn phase(&self, phase: Phase) {
        self.change(|slow| slow.shown.phase = phase);
    }

    pub(super) fn ram(&self, bytes: u64) {
        self.change(|slow| slow.shown.ram_bytes = bytes);
    }

    /// Begins a round with this number of pages to send.
    pub(super) fn round_begins(&self, round: u32, pages: u64) {
        let before = self.done_pages();
        self.change(|slow| {
            slow.round_pages = pages;
            slow.pages_before = before;
        });
        self.round(round);
    }

    /// Sets the round of one connection; the furthest one counts.
    pub(super) fn round(&self, round: u32) {
        self.round.fetch_max(round, Ordering::Relaxed);
    }

    pub(super) fn sent(&self, bytes: u64, pages: u64, zero_pages: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.pages.fetch_add(pages, Ordering::Relaxed);
        self.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
    }

    pub(super) fn bytes_sent(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn rates(&self, bytes_per_second: u64, dirty: u64, forecast: Forecast) {
        self.change(|slow| {
            slow.shown.bytes_per_second = bytes_per_second;
            slow.shown.dirty_bytes_per_second = dirty;
            slow.shown.forecast = Some(forecast);
        });
    }

    pub(super) fn throttle(&self, percent: u8) {
        self.change(|slow| slow.shown.throttle_percent = percent);
    }

    /// All writes are logged; enabling that took `time`.
    pub(super) fn log_started(&self, time: Duration) {
        self.change(|slow| slow.shown.log_start = Some(time));
    }

    /// The guest is stopped from now on.
    pub(super) fn stopped(&self) {
        let now = Instant::now();
        self.change(|slow| {
            slow.stopped = Some(now);
            slow.part_ended = Some(now);
            slow.shown.downtime_parts = DowntimeParts::default();
            slow.shown.downtime = None;
        });
    }

    /// Ends this part of the downtime and begins the next.
    pub(super) fn part_done(&self, part: fn(&mut DowntimeParts) -> &mut Option<Duration>) {
        let now = Instant::now();
        self.change(|slow| {
            let took = slow.part_ended.replace(now);
            let took = took.map(|since| now.duration_since(since));
            *part(&mut slow.shown.downtime_parts) = took;
        });
    }

    /// The guest runs again, here or at the peer.
    pub(super) fn runs(&self) {
        self.change(|slow| slow.shown.downtime = slow.stopped.map(|since| since.elapsed()));
    }
}
