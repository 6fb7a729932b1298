//! When a queue pair's thread looks for work instead of sleeping, within a share of a processor.
//!
//! ```text
//!            no work; window, budget             no work until the end
//!   Working -----------------------> Polling -----------------------> Sleeping
//!      ^ ^----------- work -------------'                                |
//!      '--- work: window x 2 after a sleep of less than POLL_MAX, else / 2
//! ```
//! A poll that finds nothing before a long sleep makes the next ones shorter, until there are none.
//! The window is 0 at first, so a thread with long sleeps never polls.
//!
//! The budget is a token bucket: it fills by the share of the time that passes, up to one poll of
//! [`POLL_MAX`]. A poll that takes longer than its limit, because the host runs another thread
//! meanwhile, is a debt of the next ones.

use std::time::{Duration, Instant};

/// The longest poll.
pub(super) const POLL_MAX: Duration = Duration::from_micros(50);
/// The shortest poll. A shorter window is 0.
const POLL_MIN: Duration = Duration::from_micros(5);

/// All of a processor.
const WHOLE: i64 = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Working,
    Polling { began: Instant, until: Instant },
    Sleeping { since: Instant },
}

/// The polls of one thread.
#[derive(Debug)]
pub(super) struct Poll {
    /// Of a processor.
    percent: i64,
    /// Nanoseconds that polls may take now, times [`WHOLE`]; negative: a debt.
    budget: i64,
    filled: Instant,
    /// The length of the next poll.
    window: Duration,
    state: State,
}

impl Poll {
    /// At most `percent` of a processor, up to 100.
    pub(super) fn new(percent: u8, now: Instant) -> Self {
        Self {
            percent: i64::from(percent).min(WHOLE),
            budget: 0,
            filled: now,
            window: Duration::ZERO,
            state: State::Sleeping { since: now },
        }
    }

    /// After each turn: whether the thread looks for work again at once. `found`: the turn had
    /// some.
    pub(super) fn after_turn(&mut self, found: bool, now: Instant) -> bool {
        self.state = match (self.state, found) {
            (State::Working, true) => State::Working,
            (State::Working, false) => self.begin(now),
            (State::Polling { began, .. }, true) => {
                self.spend(began, now);
                State::Working
            }
            (State::Polling { until, .. }, false) if now < until => self.state,
            (State::Polling { began, .. }, false) => {
                self.spend(began, now);
                State::Sleeping { since: now }
            }
            (State::Sleeping { since }, true) => {
                let slept = now.saturating_duration_since(since);
                self.window = if slept < POLL_MAX {
                    (self.window * 2).clamp(POLL_MIN, POLL_MAX)
                } else {
                    usable(self.window / 2)
                };
                State::Working
            }
            (State::Sleeping { .. }, false) => self.state,
        };
        !matches!(self.state, State::Sleeping { .. })
    }

    /// There is no queue to poll any more.
    pub(super) fn end(&mut self, now: Instant) {
        if let State::Polling { began, .. } = self.state {
            self.spend(began, now);
        }
        self.state = State::Sleeping { since: now };
    }

    /// A poll, if the window and the budget allow one.
    fn begin(&mut self, now: Instant) -> State {
        let passed = nanoseconds(now.saturating_duration_since(self.filled));
        self.filled = now;
        let filled = passed.saturating_mul(self.percent);
        let full = nanoseconds(POLL_MAX) * WHOLE;
        self.budget = self.budget.saturating_add(filled).min(full);
        let left = u64::try_from(self.budget / WHOLE).unwrap_or(0);
        let length = usable(self.window.min(Duration::from_nanos(left)));
        if length.is_zero() {
            return State::Sleeping { since: now };
        }
        State::Polling {
            began: now,
            until: now + length,
        }
    }

    fn spend(&mut self, began: Instant, now: Instant) {
        let spent = nanoseconds(now.saturating_duration_since(began));
        self.budget = self.budget.saturating_sub(spent.saturating_mul(WHOLE));
    }
}

/// The length of a poll, or 0.
fn usable(length: Duration) -> Duration {
    if length < POLL_MIN {
        return Duration::ZERO;
    }
    length
}

fn nanoseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A poll: its begin, its limit and its end.
    type Polled = [Instant; 3];

    /// The polls of a thread whose turns take so many nanoseconds each, and find work or not.
    fn polls(percent: u8, turns: &[(u64, bool)]) -> Vec<Polled> {
        let mut now = Instant::now();
        let mut poll = Poll::new(percent, now);
        let mut polls = Vec::new();
        for &(nanoseconds, found) in turns {
            now += Duration::from_nanos(nanoseconds);
            let before = poll.state;
            let looks = poll.after_turn(found, now);
            assert_eq!(looks, !matches!(poll.state, State::Sleeping { .. }));
            if let State::Polling { began, until } = poll.state {
                assert!((POLL_MIN..=POLL_MAX).contains(&(until - began)));
            }
            if let State::Polling { began, until } = before
                && before != poll.state
            {
                polls.push([began, until, now]);
            }
        }
        polls
    }

    proptest! {
        #[test]
        fn polls_never_exceed_their_share_over_any_time(
            percent in 0..=100_u8,
            turns in prop::collection::vec(
                (prop_oneof![1..3_000_u64, 1..60_000_u64, 1..2_000_000_u64], any::<bool>()),
                1..400,
            ),
        ) {
            let polls = polls(percent, &turns);
            for (index, first) in polls.iter().enumerate() {
                let mut spent = Duration::ZERO;
                for [began, until, ended] in &polls[index..] {
                    spent += *ended - *began;
                    let share = (*began - first[0]) * percent.into() / 100;
                    // A turn may end later than the poll should.
                    let late = ended.saturating_duration_since(*until);
                    prop_assert!(spent <= share + POLL_MAX + late, "{spent:?}, {share:?}");
                }
            }
        }
    }

    #[test]
    fn a_thread_with_short_sleeps_uses_its_share() {
        // Work comes after each 40 us, for 40 ms.
        let turns: Vec<_> = (0..40_000).map(|turn| (1000, turn % 40 == 0)).collect();
        for percent in [0, 1, 20, 50] {
            let polls = polls(percent, &turns);
            let spent: Duration = polls.iter().map(|[began, _, ended]| *ended - *began).sum();
            let share = Duration::from_millis(40) * percent.into() / 100;
            assert!(spent <= share + POLL_MAX, "{spent:?} of {share:?}");
            assert!(spent >= share * 9 / 10, "{spent:?} of {share:?}");
        }
    }

    #[test]
    fn polls_follow_the_length_of_sleeps() {
        let mut now = Instant::now();
        let mut poll = Poll::new(100, now);
        let mut turn = |found, micros| {
            now += Duration::from_micros(micros);
            (poll.after_turn(found, now), poll.window.as_micros())
        };
        assert_eq!(turn(true, 10_000), (true, 0));
        assert_eq!(turn(false, 500), (false, 0));
        for window in [5, 10, 20, 40, 50, 50] {
            assert_eq!(turn(true, 30), (true, window));
            assert_eq!(turn(false, 500), (true, window));
            assert_eq!(turn(false, 4), (true, window));
            assert_eq!(turn(false, 46), (false, window));
        }
        for window in [25, 12, 6, 0, 0] {
            assert_eq!(turn(true, 1000), (true, window));
            assert_eq!(turn(false, 500), (window > 0, window));
            assert_eq!(turn(false, 50), (false, window));
        }
        // Work that a poll finds leaves its length.
        assert_eq!(turn(true, 1000), (true, 0));
        assert_eq!(turn(false, 500), (false, 0));
        assert_eq!(turn(true, 10), (true, 5));
        assert_eq!(turn(false, 500), (true, 5));
        assert_eq!(turn(true, 1), (true, 5));
        // The time without a queue is no poll.
        assert_eq!(turn(false, 500), (true, 5));
        poll.end(now);
        let later = now + Duration::from_secs(10);
        assert!(poll.after_turn(true, later));
        assert!(poll.budget > 0);
    }
}
