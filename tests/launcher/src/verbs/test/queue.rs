//! What is still to be run, and which lane gets what.
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
//! So hosts are booted seldom, and what runs last is short.
//!
//! Owns the order. Knows nothing of lab hosts.

use super::harness::Harness;
use crate::rig::Rig;
use std::time::Duration;

/// Less work of another lane's than that is not worth a host of one's own: it takes about
/// so long to boot beside the other.
const WORTH_A_BOOT: Duration = Duration::from_secs(30);

/// One file of tests that waits.
#[derive(Debug)]
pub(super) struct Task<'a> {
    pub(super) harness: Harness<'a>,
    pub(super) rig: Rig,
    /// How long it will take.
    pub(super) expected: Duration,
}

/// What waits, the longest first.
#[derive(Debug)]
pub(super) struct Queue<T> {
    waiting: Vec<T>,
    /// The rig that each lane has at the moment.
    lanes: Vec<Option<Rig>>,
}

/// What the order depends on.
pub(super) trait Waiting {
    /// The rig that it needs.
    fn rig(&self) -> Rig;

    /// How long it will take.
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
    /// Of all tasks, for so many lanes. Equally long ones keep their order.
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

    /// What a lane is to run next; none when it has nothing more to do.
    pub(super) fn next(&mut self, lane: usize) -> Option<T> {
        let own = self.lanes.get(lane).copied().flatten();
        let rig = own
            .filter(|rig| self.waiting.iter().any(|task| task.rig() == *rig))
            .or_else(|| self.busiest(lane));
        // A lane that ends has no rig any more.
        if let Some(has) = self.lanes.get_mut(lane) {
            *has = rig;
        }
        let index = self
            .waiting
            .iter()
            .position(|task| Some(task.rig()) == rig)?;
        Some(self.waiting.remove(index))
    }

    /// Nothing more is handed out.
    pub(super) fn stop(&mut self) {
        self.waiting.clear();
    }

    /// The rig with most work for each lane, if this one joins those that have it already.
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
        // The rest is not worth a boot beside the lane that has the rig already.
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
        // Nobody has that rig: it must be booted, however little it is for.
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
        // There is no such lane; it gets work, as nothing else would run it.
        assert_eq!(Queue::new([(Sim, 1)], 1).next(7), Some((Sim, 1)));
    }
}
