//! The waiting files of tests, and which lane gets the next one.
//!
//! ```text
//!   a lane is free ─▶ something waits for its rig? ── yes ─▶ the longest of it
//!                       │ no
//!                       ▼
//!                     the rig with most work for one lane more ─▶ a new host, the longest of it
//!                       │ none is worth a boot
//!                       ▼
//!                     the lane ends
//! ```
//! So hosts boot seldom, and the last tasks are short.
//!
//! This module owns the order and does not know lab hosts.

use super::harness::Harness;
use crate::rig::Rig;
use std::time::Duration;

/// If another lane has less work left than this, a second host does not pay: its boot beside the
/// other takes about as long.
const WORTH_A_BOOT: Duration = Duration::from_secs(30);

/// A waiting file of tests.
#[derive(Debug)]
pub(super) struct Task<'a> {
    pub(super) harness: Harness<'a>,
    pub(super) rig: Rig,
    /// The expected time.
    pub(super) expected: Duration,
}

/// Waiting tasks, the longest first.
#[derive(Debug)]
pub(super) struct Queue<T> {
    waiting: Vec<T>,
    /// The current rig of each lane.
    lanes: Vec<Option<Rig>>,
}

/// What the order depends on.
pub(super) trait Waiting {
    /// The rig that the task needs.
    fn rig(&self) -> Rig;

    /// The expected time.
    fn expected(&self) -> Duration;
}

impl Waiting for Task<'_> {
    fn rig(&self) -> Rig {
        self.rig
    }

    fn expected(&self) -> Duration {
        self.expected
    }
}

impl<T: Waiting> Queue<T> {
    /// A queue of all tasks for this many lanes. Tasks of equal length keep their order.
    pub(super) fn new(tasks: impl IntoIterator<Item = T>, lanes: u8) -> Self {
        let mut waiting: Vec<T> = tasks.into_iter().collect();
        waiting.sort_by_key(|task| std::cmp::Reverse(task.expected()));
        Self {
            waiting,
            lanes: vec![None; usize::from(lanes)],
        }
    }

    /// How many lanes there are.
    pub(super) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// The next task of a lane; `None` when the lane has nothing more to do.
    pub(super) fn next(&mut self, lane: usize) -> Option<T> {
        let own = self.lanes.get(lane).copied().flatten();
        let rig = own
            .filter(|rig| self.waiting.iter().any(|task| task.rig() == *rig))
            .or_else(|| self.busiest(lane));
        // A lane that ends no longer has a rig.
        if let Some(has) = self.lanes.get_mut(lane) {
            *has = rig;
        }
        let index = self
            .waiting
            .iter()
            .position(|task| Some(task.rig()) == rig)?;
        Some(self.waiting.remove(index))
    }

    /// Drops all waiting tasks.
    pub(super) fn stop(&mut self) {
        self.waiting.clear();
    }

    /// The rig with the most work for each lane, counting this lane with those that already have
    /// it.
    fn busiest(&self, lane: usize) -> Option<Rig> {
        let mut best = None;
        for task in &self.waiting {
            let rig = task.rig();
            let work: Duration = self
                .waiting
                .iter()
                .filter(|task| task.rig() == rig)
                .map(T::expected)
                .fold(Duration::ZERO, Duration::saturating_add);
            let others = self
                .lanes
                .iter()
                .enumerate()
                .filter(|(number, has)| *number != lane && **has == Some(rig))
                .count();
            if others > 0 && work < WORTH_A_BOOT {
                continue;
            }
            let each = work / u32::try_from(others + 1).unwrap_or(u32::MAX);
            if best.is_none_or(|(most, _)| each > most) {
                best = Some((each, rig));
            }
        }
        best.map(|(_, rig)| rig)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Waiting for (Rig, u64) {
        fn rig(&self) -> Rig {
            self.0
        }

        fn expected(&self) -> Duration {
            Duration::from_secs(self.1)
        }
    }

    use Rig::{Labnic, Sim, Sriov};

    #[test]
    fn a_lane_keeps_its_rig_and_begins_with_the_longest() {
        let tasks = [(Sim, 10), (Labnic, 50), (Sim, 100), (Labnic, 90), (Sim, 70)];
        let mut queue = Queue::new(tasks, 2);
        assert_eq!(queue.lanes(), 2);
        assert_eq!(queue.next(0), Some((Sim, 100)));
        assert_eq!(queue.next(1), Some((Labnic, 90)));
        assert_eq!(queue.next(1), Some((Labnic, 50)));
        assert_eq!(queue.next(0), Some((Sim, 70)));
        // The remaining work is not worth a boot beside the lane that already has the rig.
        assert_eq!(queue.next(1), None);
        assert_eq!(queue.next(0), Some((Sim, 10)));
        assert_eq!(queue.next(0), None);
    }

    #[test]
    fn a_lane_helps_where_much_is_left() {
        let mut queue = Queue::new([(Sim, 100), (Sim, 90), (Sim, 80), (Sriov, 20)], 2);
        assert_eq!(queue.next(0), Some((Sim, 100)));
        assert_eq!(queue.next(1), Some((Sim, 90)));
        assert_eq!(queue.next(1), Some((Sim, 80)));
        // No lane has that rig, so it must boot even for little work.
        assert_eq!(queue.next(1), Some((Sriov, 20)));
        assert_eq!(queue.next(0), None);
        assert_eq!(queue.next(1), None);
    }

    #[test]
    fn unmeasured_files_keep_their_order_and_a_stop_ends_all() {
        let tasks = [(Sim, 60), (Sriov, 60), (Sim, 60), (Labnic, 60)];
        let mut queue = Queue::new(tasks, 1);
        assert_eq!(queue.next(0), Some((Sim, 60)));
        assert_eq!(queue.next(0), Some((Sim, 60)));
        assert_eq!(queue.next(0), Some((Sriov, 60)));
        queue.stop();
        assert_eq!(queue.next(0), None);
        // There is no such lane. It gets work, because nothing else would run it.
        assert_eq!(Queue::new([(Sim, 1)], 1).next(7), Some((Sim, 1)));
    }
}
