//! The results of the ring watch for a queue: a part of the description of devices and of the VM.

use bellhop_api::machine::{AlarmKind, WatchInfo, WatchPhase};

use crate::machine::{Alarm, WatchState, WatchStatus};

impl From<Alarm> for AlarmKind {
    fn from(alarm: Alarm) -> Self {
        match alarm {
            Alarm::Stuck => Self::Stuck,
            Alarm::DriverStalled => Self::DriverStalled,
            Alarm::Inconsistent => Self::Inconsistent,
        }
    }
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

impl From<&WatchStatus> for WatchInfo {
    fn from(watch: &WatchStatus) -> Self {
        Self {
            state: watch.state.into(),
            in_flight: watch.in_flight,
            posted_per_s: watch.posted_per_s,
            completed_per_s: watch.completed_per_s,
            stuck_for_s: watch.stuck_for.as_secs(),
            rescues: watch.rescues,
            posted: watch.posted,
            completed: watch.completed,
        }
    }
}
