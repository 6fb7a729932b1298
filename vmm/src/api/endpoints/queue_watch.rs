//! What the watch of rings says of a queue: a part of what is said of devices and of the machine.

use serde::Serialize;
use utoipa::ToSchema;

use crate::machine::{Alarm, QueueAlarm, WatchState, WatchStatus};

/// What is wrong with a queue.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) enum AlarmKind {
    /// Buffers wait for the device, and it uses none.
    Stuck,
    /// The device has used all receive buffers, and the driver posts no others.
    DriverStalled,
    /// The avail index is further ahead of the used index than the ring has entries.
    Inconsistent,
}

impl From<Alarm> for AlarmKind {
    fn from(alarm: Alarm) -> Self {
        match alarm {
            Alarm::Stuck => Self::Stuck,
            Alarm::DriverStalled => Self::DriverStalled,
            Alarm::Inconsistent => Self::Inconsistent,
        }
    }
}

/// A queue that something is wrong with.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AlarmInfo {
    /// The device.
    device: String,
    /// The queue's index.
    queue: u16,
    /// What is wrong.
    alarm: AlarmKind,
}

impl From<&QueueAlarm> for AlarmInfo {
    fn from(alarm: &QueueAlarm) -> Self {
        Self {
            device: alarm.device.clone(),
            queue: alarm.queue,
            alarm: alarm.alarm.into(),
        }
    }
}

/// What was seen of a queue last.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) enum WatchPhase {
    /// It does not run, or was not looked at yet.
    NotRunning,
    /// It runs, but a packed ring has no indices in memory to look at.
    NotWatchedPacked,
    /// It runs, but its ring is not in guest memory.
    Unreadable,
    /// Nothing happened, and nothing had to.
    Idle,
    /// Buffers were posted or used.
    Moving,
    /// Nothing happens that should, for less than `ring_watch`'s time.
    Waiting,
    /// Buffers wait for the device, and it uses none.
    Stuck,
    /// The device has used all receive buffers, and the driver posts no others.
    DriverStalled,
    /// The avail index is further ahead of the used index than the ring has entries.
    Inconsistent,
}

impl From<WatchState> for WatchPhase {
    fn from(state: WatchState) -> Self {
        match state {
            WatchState::NotRunning => Self::NotRunning,
            WatchState::Packed => Self::NotWatchedPacked,
            WatchState::Unreadable => Self::Unreadable,
            WatchState::Idle => Self::Idle,
            WatchState::Moving => Self::Moving,
            WatchState::Waiting => Self::Waiting,
            WatchState::Alarm(Alarm::Stuck) => Self::Stuck,
            WatchState::Alarm(Alarm::DriverStalled) => Self::DriverStalled,
            WatchState::Alarm(Alarm::Inconsistent) => Self::Inconsistent,
        }
    }
}

/// The ring of a queue as its indices in guest memory show it, looked at once a second.
///
/// Indices have 16 bits: a queue that moves by 65,536 buffers or more within a second is counted
/// without the multiples of that.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct WatchInfo {
    /// What was seen last.
    state: WatchPhase,
    /// Buffers that the device has and has not used; none where it cannot be told.
    in_flight: Option<u16>,
    /// Buffers per second that the driver posted.
    posted_per_s: u32,
    /// Buffers per second that the device used.
    completed_per_s: u32,
    /// For how many seconds the queue has hung.
    stuck_for_s: u64,
    /// How often it was kicked and its driver interrupted because of that (`rescue`).
    rescues: u64,
}

impl From<&WatchStatus> for WatchInfo {
    fn from(watch: &WatchStatus) -> Self {
        Self {
            state: watch.state.into(),
            in_flight: watch.in_flight,
            posted_per_s: watch.posted_per_s,
            completed_per_s: watch.completed_per_s,
            stuck_for_s: watch.stuck_for.as_secs(),
            rescues: watch.rescues,
        }
    }
}
