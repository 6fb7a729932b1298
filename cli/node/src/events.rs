//! The node's one stream of events.
//!
//! Owns the order and the number (generation) of events, the history for readers that reconnect,
//! and the places of readers.
//!
//! ```text
//!   publish ──> history (the last 1024) ──> newest generation (watched)
//!                  ^                            │ wakes
//!                  └──── read(after) ─────── readers, each at its own position
//! ```
//! Readers have no queues, so a slow reader costs nothing. It misses the events that have left the
//! history, is notified of that, and continues with the oldest kept event.

use std::collections::VecDeque;
use std::sync::Arc;

use bellhop_api::node::{Event, Role};
use bellhop_common::text::since_1970;
use parking_lot::Mutex;
use tokio::sync::watch;
use vmm::http::budget::{Budget, BudgetPlace};
use vmm::machine::milliseconds;

/// The number of kept events.
const HISTORY: usize = 1024;
/// Readers at a time: some of the server's connections stay free for requests.
pub(super) const READERS_MAX: usize = 32;

/// The result of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Read {
    /// The events after the reader's position, in order; may be empty.
    Events(Vec<Arc<Event>>),
    /// Some events after the reader's position are no longer kept, or the position is of another
    /// daemon. The reader continues after this generation, with the oldest kept event.
    Lost(u64),
}

/// All events, in order.
#[derive(Debug)]
pub(super) struct Events {
    history: Mutex<VecDeque<Arc<Event>>>,
    /// The generation of the last event. Changed only under the history's lock.
    newest: watch::Sender<u64>,
    readers: Budget,
}

impl Default for Events {
    fn default() -> Self {
        Self::starting_at(since_1970().as_micros())
    }
}

impl Events {
    fn starting_at(generation: u128) -> Self {
        Self {
            history: Mutex::new(VecDeque::with_capacity(HISTORY)),
            newest: watch::Sender::new(u64::try_from(generation).unwrap_or_default()),
            readers: Budget::new(READERS_MAX),
        }
    }

    /// Adds an event, with its generation and its time, and wakes the readers.
    pub(super) fn publish(&self, event: Event) {
        let (subject, detail) = (&event.subject, &event.detail);
        tracing::info!(subject, change = %event.change, detail, "event");
        let mut history = self.history.lock();
        let generation = self.newest.borrow().saturating_add(1);
        if history.len() >= HISTORY {
            history.pop_front();
        }
        history.push_back(Arc::new(Event {
            generation,
            time_ms: milliseconds(since_1970()),
            ..event
        }));
        // The value is also kept without readers.
        self.newest.send_replace(generation);
    }

    /// A place for a reader with this role; none if all are taken.
    pub(super) fn place(&self, role: Role) -> Option<BudgetPlace> {
        self.readers.try_take(role)
    }

    /// The generation before the oldest kept event.
    pub(super) fn oldest(&self) -> u64 {
        let history = self.history.lock();
        before_oldest(&history, *self.newest.borrow())
    }

    /// The generation of the last event; it changes with each.
    pub(super) fn newest(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// At most `limit` events after the generation `after`.
    pub(super) fn read(&self, after: u64, limit: usize) -> Read {
        let history = self.history.lock();
        let newest = *self.newest.borrow();
        if after == newest {
            return Read::Events(Vec::new());
        }
        // The reader's position is before the first kept event, or between kept ones.
        let reachable = history
            .front()
            .is_some_and(|oldest| oldest.generation <= after.saturating_add(1));
        if after > newest || !reachable {
            return Read::Lost(before_oldest(&history, newest));
        }
        let begin = history.partition_point(|event| event.generation <= after);
        Read::Events(history.iter().skip(begin).take(limit).cloned().collect())
    }
}

fn before_oldest(history: &VecDeque<Arc<Event>>, newest: u64) -> u64 {
    let oldest = history.front().map(|event| event.generation);
    oldest.map_or(newest, |oldest| oldest.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use bellhop_api::node::EventChange;

    use super::*;

    fn changed() -> Event {
        Event::new("/v1/vms/a", EventChange::Changed)
    }

    fn generations(read: Read) -> Vec<u64> {
        match read {
            Read::Events(events) => events.iter().map(|event| event.generation).collect(),
            Read::Lost(newest) => panic!("lost until {newest}"),
        }
    }

    #[test]
    fn a_reader_continues_at_its_position() {
        let events = Events::starting_at(100);
        assert!(generations(events.read(100, 9)).is_empty());
        assert_eq!(events.oldest(), 100);
        for number in 0..3 {
            events.publish(changed().detail(format!("{number}")));
        }
        assert_eq!(generations(events.read(100, 9)), [101, 102, 103]);
        assert_eq!(generations(events.read(101, 1)), [102]);
        assert!(generations(events.read(103, 9)).is_empty());
        assert_eq!(*events.newest().borrow(), 103);
    }

    #[test]
    fn a_reader_that_was_away_for_too_long_is_notified() {
        let events = Events::starting_at(100);
        // Positions of another daemon, before and after this one.
        assert_eq!(events.read(7, 9), Read::Lost(100));
        assert_eq!(events.read(u64::MAX, 9), Read::Lost(100));
        let many = u64::try_from(HISTORY).unwrap() + 10;
        for _ in 0..many {
            events.publish(changed());
        }
        assert_eq!(events.read(100, 9), Read::Lost(110));
        assert_eq!(events.read(109, 9), Read::Lost(110));
        assert_eq!(generations(events.read(110, 2)), [111, 112]);
        assert_eq!(generations(events.read(110, HISTORY * 2)).len(), HISTORY);
        assert_eq!(events.oldest(), 110);
        assert_eq!(events.read(101 + many, 9), Read::Lost(110));
    }

    #[test]
    fn generations_grow_from_one_daemon_to_the_next() {
        let first = Events::default();
        first.publish(changed());
        let last = *first.newest().borrow();
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(*Events::default().newest().borrow() > last);
    }
}
