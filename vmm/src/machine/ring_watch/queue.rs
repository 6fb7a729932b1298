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

use devices::virtio::backend::QueueRole;

/// The fault of a queue, once it has lasted for the threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// Buffers wait for the device, which uses none.
    Stuck,
    /// The device has used all receive buffers, and the driver posts no others.
    DriverStalled,
    /// The driver's index is further ahead of the device's than the ring has entries.
    Inconsistent,
}

/// The last observation of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WatchState {
    /// The queue does not run, or has not been sampled yet.
    #[default]
    NotRunning,
    /// It runs, but its indices cannot be read: a packed ring has none in memory.
    Packed,
    /// It runs, but its ring is not in guest memory.
    Unreadable,
    /// Nothing happened, and nothing was pending.
    Idle,
    /// Buffers were posted or used.
    Moving,
    /// A complaint that is younger than the threshold.
    Waiting,
    /// A fault. `Inconsistent` shows from the first sample on, before it is announced.
    Alarm(Alarm),
}

/// The status of a queue at its last sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WatchStatus {
    /// The observation.
    pub state: WatchState,
    /// Buffers that the device has not used yet; `None` if unknown.
    pub in_flight: Option<u16>,
    /// Buffers per second that the driver posted, between the last two samples.
    pub posted_per_s: u32,
    /// Buffers per second that the device used, between the last two samples.
    pub completed_per_s: u32,
    /// Buffers that the driver posted since the device was attached, as sampled.
    pub posted: u64,
    /// Buffers that the device used, as sampled.
    pub completed: u64,
    /// How long the complaint has lasted; zero without one.
    pub stuck_for: Duration,
    /// How often the queue was kicked and its driver interrupted because of an alarm.
    pub rescues: u64,
}

/// The event of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A complaint has lasted for the threshold.
    Began(Alarm),
    /// An announced complaint is over.
    Ended {
        alarm: Alarm,
        /// How long it lasted, the threshold included.
        lasted: Duration,
    },
}

/// A complaint and when it was seen first.
#[derive(Debug, Clone, Copy)]
struct Complaint {
    what: Alarm,
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
    status: WatchStatus,
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
            status: WatchStatus::default(),
        }
    }

    pub(super) fn status(&self) -> WatchStatus {
        self.status
    }

    /// Returns the alarm that is announced and not over.
    pub(super) fn alarm(&self) -> Option<Alarm> {
        let announced = self.complaint.filter(|complaint| complaint.announced);
        announced.map(|complaint| complaint.what)
    }

    /// Counts a kick and interrupt because of an alarm.
    pub(super) fn count_rescue(&mut self) {
        self.status.rescues = self.status.rescues.saturating_add(1);
    }

    /// The queue does not run or cannot be read; `state` has the reason.
    pub(super) fn stop(&mut self, now: Instant, state: WatchState) -> Option<Event> {
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
            self.show(WatchState::Alarm(Alarm::Inconsistent), None, (0, 0));
            return self.judge(now, Some(Alarm::Inconsistent));
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
            QueueRole::Request if in_flight > 0 && moved.1 == 0 => Some(Alarm::Stuck),
            QueueRole::Receive if in_flight == 0 && moved.0 == 0 && self.had_buffers => {
                Some(Alarm::DriverStalled)
            }
            _ => None,
        };
        let state = match what {
            Some(_) => WatchState::Waiting,
            None if moved == (0, 0) => WatchState::Idle,
            None => WatchState::Moving,
        };
        self.show(state, Some(in_flight), (0, 0));
        self.count(moved, now.saturating_duration_since(last.at));
        self.judge(now, what)
    }

    fn show(&mut self, state: WatchState, in_flight: Option<u16>, rates: (u32, u32)) {
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
    fn judge(&mut self, now: Instant, what: Option<Alarm>) -> Option<Event> {
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
        self.status.stuck_for = Duration::ZERO;
        let Some(what) = what else {
            return event;
        };
        let complaint = self.complaint.get_or_insert(Complaint {
            what,
            since: now,
            announced: false,
        });
        let lasted = now.saturating_duration_since(complaint.since);
        self.status.stuck_for = lasted;
        if complaint.announced || lasted >= self.threshold {
            self.status.state = WatchState::Alarm(what);
        }
        if !complaint.announced && lasted >= self.threshold {
            complaint.announced = true;
            // The threshold is not zero, so no alarm ended with this sample.
            event = Some(Event::Began(what));
        }
        event
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
