//! Judges the indices of one split ring, sample by sample.
//!
//! Owns the judgement: it takes indices and returns a state and at most one event. It must not know
//! where the indices come from, nor how an alarm is handled.
//!
//! Each sample is either *good* or holds a *complaint*, depending on the role of the queue:
//!
//! | queue | complaint | when |
//! |---|---|---|
//! | request (transmitq, block, control) | `Stuck` | buffers are in flight, the used index stays |
//! | receive | `DriverStalled` | it had buffers, all are used, and the avail index stays |
//! | every | `Inconsistent` | more is in flight than the ring has entries |
//!
//! ```text
//!              complaint             it stays for the threshold (event: began)
//!   good ------------------> waiting ---------------------------------> alarm
//!     ^                         |                                         |
//!     +-------------------------+                                         |
//!     |        progress, another complaint, the ring ends                 |
//!     +-------------------------------------------------------------------+
//!                                                           (event: ended)
//! ```
//! The clock starts at the first sample that shows the complaint. So events between two samples
//! never count, and an alarm comes at most two samples late.
//!
//! **Limits.** Buffers in a receive queue wait for frames. A device that stopped taking them looks
//! the same as an idle one, so a receive queue is never `Stuck`. A driver that ignores used buffers
//! while others are left looks idle too. A driver whose interface was taken down in the guest is
//! `DriverStalled` when enough has arrived. If only some requests of a queue are never answered,
//! the used index moves, and the alarm comes only when the others are done. Indices have 16 bits: a
//! difference of 65,536 or more between two samples is counted modulo 65,536.

use std::time::{Duration, Instant};

use bellhop_api::machine::{AlarmKind, WatchInfo, WatchPhase};
use devices::virtio::backend::QueueRole;

/// The event of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A complaint has lasted for the threshold.
    Began(AlarmKind),
    /// An announced complaint is over.
    Ended {
        alarm: AlarmKind,
        /// How long it lasted, the threshold included.
        lasted: Duration,
    },
}

/// A complaint and when it was seen first.
#[derive(Debug, Clone, Copy)]
struct Complaint {
    what: AlarmKind,
    since: Instant,
    announced: bool,
}

/// Indices at a moment.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    avail: u16,
    used: u16,
}

/// The watch of one queue; see the module.
#[derive(Debug)]
pub(super) struct QueueWatch {
    threshold: Duration,
    role: QueueRole,
    size: u16,
    last: Option<Sample>,
    /// The queue had a buffer before.
    had_buffers: bool,
    complaint: Option<Complaint>,
    status: WatchInfo,
}

impl QueueWatch {
    /// Creates the watch of a queue that does not run.
    pub(super) fn new(threshold: Duration) -> Self {
        Self {
            threshold,
            role: QueueRole::Other,
            size: 0,
            last: None,
            had_buffers: false,
            complaint: None,
            status: WatchInfo::default(),
        }
    }

    pub(super) fn status(&self) -> WatchInfo {
        self.status
    }

    /// Returns the alarm that is announced and not over.
    pub(super) fn alarm(&self) -> Option<AlarmKind> {
        let announced = self.complaint.filter(|complaint| complaint.announced);
        announced.map(|complaint| complaint.what)
    }

    /// Counts a kick and interrupt because of an alarm.
    pub(super) fn count_stall_kick(&mut self) {
        self.status.stall_kicks = self.status.stall_kicks.saturating_add(1);
    }

    /// The queue does not run or cannot be read; `state` has the reason.
    pub(super) fn stop(&mut self, now: Instant, state: WatchPhase) -> Option<Event> {
        self.last = None;
        self.had_buffers = false;
        self.show(state, None, (0, 0));
        self.judge(now, None)
    }

    /// A driver has started the queue; samples follow.
    pub(super) fn start(&mut self, role: QueueRole, size: u16) {
        self.role = role;
        self.size = size;
    }

    /// Sampling resumes after a pause in which the guest could do nothing: that time does not
    /// count.
    pub(super) fn resume(&mut self, now: Instant) {
        if let Some(complaint) = &mut self.complaint
            && !complaint.announced
        {
            complaint.since = now;
        }
    }

    /// Takes the queue's indices. Used must be read before avail, so that both are right if the
    /// difference is at most the ring's size.
    pub(super) fn sample(&mut self, now: Instant, avail: u16, used: u16) -> Option<Event> {
        let in_flight = avail.wrapping_sub(used);
        if in_flight > self.size {
            // An index that the driver made up allows no conclusion.
            self.last = None;
            self.show(WatchPhase::Inconsistent, None, (0, 0));
            return self.judge(now, Some(AlarmKind::Inconsistent));
        }
        let sample = Sample {
            at: now,
            avail,
            used,
        };
        let last = self.last.replace(sample).unwrap_or(sample);
        let moved = (avail.wrapping_sub(last.avail), used.wrapping_sub(last.used));
        self.had_buffers |= in_flight > 0 || moved.1 > 0;
        let what = match self.role {
            QueueRole::Request if in_flight > 0 && moved.1 == 0 => Some(AlarmKind::Stuck),
            QueueRole::Receive if in_flight == 0 && moved.0 == 0 && self.had_buffers => {
                Some(AlarmKind::DriverStalled)
            }
            _ => None,
        };
        let state = match what {
            Some(_) => WatchPhase::Waiting,
            None if moved == (0, 0) => WatchPhase::Idle,
            None => WatchPhase::Moving,
        };
        self.show(state, Some(in_flight), (0, 0));
        self.count(moved, now.saturating_duration_since(last.at));
        self.judge(now, what)
    }

    fn show(&mut self, state: WatchPhase, in_flight: Option<u16>, rates: (u32, u32)) {
        self.status.state = state;
        self.status.in_flight = in_flight;
        (self.status.posted_per_s, self.status.completed_per_s) = rates;
    }

    fn count(&mut self, (posted, completed): (u16, u16), time: Duration) {
        let status = &mut self.status;
        status.posted = status.posted.saturating_add(posted.into());
        status.completed = status.completed.saturating_add(completed.into());
        status.posted_per_s = per_second(posted, time);
        status.completed_per_s = per_second(completed, time);
    }

    /// Implements the module's diagram.
    fn judge(&mut self, now: Instant, what: Option<AlarmKind>) -> Option<Event> {
        let mut event = None;
        if let Some(before) = self.complaint
            && what != Some(before.what)
        {
            self.complaint = None;
            event = before.announced.then(|| Event::Ended {
                alarm: before.what,
                lasted: now.saturating_duration_since(before.since),
            });
        }
        self.status.stuck_for_s = 0;
        let Some(what) = what else {
            return event;
        };
        let complaint = self.complaint.get_or_insert(Complaint {
            what,
            since: now,
            announced: false,
        });
        let lasted = now.saturating_duration_since(complaint.since);
        self.status.stuck_for_s = lasted.as_secs();
        if complaint.announced || lasted >= self.threshold {
            self.status.state = phase(what);
        }
        if !complaint.announced && lasted >= self.threshold {
            complaint.announced = true;
            // The threshold is not zero, so no alarm ended with this sample.
            event = Some(Event::Began(what));
        }
        event
    }
}

/// The state of a queue with this fault. `Inconsistent` shows from the first sample on, before it
/// is announced.
fn phase(alarm: AlarmKind) -> WatchPhase {
    match alarm {
        AlarmKind::Stuck => WatchPhase::Stuck,
        AlarmKind::DriverStalled => WatchPhase::DriverStalled,
        AlarmKind::Inconsistent => WatchPhase::Inconsistent,
        AlarmKind::Refused | AlarmKind::DeviceError | AlarmKind::Unknown => WatchPhase::Unknown,
    }
}

/// Rounded to the nearest integer; zero for a zero duration.
fn per_second(count: u16, time: Duration) -> u32 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let per_second = (u64::from(count) * 1000 + millis / 2).checked_div(millis);
    u32::try_from(per_second.unwrap_or(0)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
