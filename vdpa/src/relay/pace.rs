//! The polling pace: at once while there is work, then at growing intervals.
//!
//! ```text
//!   spin (some polls without a pause) -> 50 µs -> 100 µs -> ... -> 1 ms
//!     ^------------------ work ------------------------------------'
//! ```
//! The time to spin is learned, as KVM does when a processor halts. It doubles each time that work
//! arrived meanwhile, and halves each time that none did. It never exceeds the cost of a sleep and
//! a wake-up. Under a flood the next work is a few polls away. Under single frames spinning would
//! cost more than all other work, and take a processor from the guest.
//!
//! The longest pause limits how late the guest notices a frame when the device gives no hint. The
//! device need not give one if the guest has disabled interrupts. On shadowed queues the relays
//! themselves control all hints, so the pause is long at once: polling without a reason costs most
//! under single frames. Between the two are events that no side waits for or signals, such as
//! transmitted frames to be returned:
//! ```text
//!   signals  All      spin -> 20 ms
//!            Urgent   spin -> 1 ms -> 2 ms -> ... -> 20 ms    at most twice as late as it came
//!            Hints    spin -> 50 µs -> 100 µs -> ... -> 1 ms
//! ```

use std::time::Duration;

const FEWEST_SPINS: u32 = 2;
const MOST_SPINS: u32 = 8;
const FIRST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);
/// The pause if every event is signalled. It is needed only for a device that loses a signal.
const NOTIFIED: Duration = Duration::from_millis(20);

/// The time of the next poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// At once.
    None,
    /// After this time at most; a hint or a kick may come first.
    AtMost(Duration),
    /// After the next change only: nothing is relayed.
    Forever,
}

/// The future events that are signalled. The order matters: a poller of several queues can rely on
/// the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Signals {
    /// Perhaps some: the sender may have its signals disabled.
    #[default]
    Hints,
    /// All events that one side waits for.
    Urgent,
    /// All events: no poll is needed.
    All,
}

/// The pace of one poller.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Polls without work since the last one with it.
    idle: u32,
    /// Polls without a pause, before the first one with it.
    spins: u32,
}

impl Default for Pace {
    /// Spins for the maximum time: a change has just happened, and traffic waits.
    fn default() -> Self {
        Self {
            idle: 0,
            spins: MOST_SPINS,
        }
    }
}

impl Pace {
    /// The time of the next poll, after a poll that found work or not. `signals` are the events
    /// that would end a wait before it.
    pub fn next(&mut self, worked: bool, signals: Signals) -> Pause {
        if worked {
            if (1..self.spins).contains(&self.idle) {
                self.spins = (self.spins * 2).min(MOST_SPINS);
            }
            self.idle = 0;
            return Pause::None;
        }
        self.idle = self.idle.saturating_add(1);
        let Some(doublings) = self.idle.checked_sub(self.spins) else {
            return Pause::None;
        };
        if doublings == 0 {
            // The polls left out bring the next pause closer.
            let fewer = (self.spins / 2).max(FEWEST_SPINS);
            self.idle = fewer;
            self.spins = fewer;
        }
        // Shifted by more than 5 both exceed their maximum.
        let times = 1 << doublings.min(5);
        Pause::AtMost(match signals {
            Signals::All => NOTIFIED,
            Signals::Urgent => (LONGEST * times).min(NOTIFIED),
            Signals::Hints => (FIRST * times).min(LONGEST),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls without work until the first pause.
    fn spins(pace: &mut Pace) -> u32 {
        (1..)
            .take_while(|_| pace.next(false, Signals::Hints) == Pause::None)
            .last()
            .unwrap_or(0)
            + 1
    }

    #[test]
    fn spins_then_slows_down_and_stays_bounded() {
        let mut pace = Pace::default();
        assert_eq!(pace.next(true, Signals::Hints), Pause::None);
        for _ in 1..MOST_SPINS {
            assert_eq!(pace.next(false, Signals::Hints), Pause::None);
        }
        let mut last = Duration::ZERO;
        for number in 0..100 {
            let Pause::AtMost(pause) = pace.next(false, Signals::Hints) else {
                panic!("no pause");
            };
            assert!(pause > last || pause == LONGEST, "{number}");
            last = pause;
        }
        assert_eq!(last, LONGEST);
        assert_eq!(pace.next(true, Signals::Hints), Pause::None);
        assert_eq!(pace.next(false, Signals::Hints), Pause::None);
    }

    #[test]
    fn does_not_poll_for_notified_buffers() {
        let mut pace = Pace::default();
        for _ in 1..MOST_SPINS {
            assert_eq!(pace.next(false, Signals::All), Pause::None);
        }
        assert_eq!(pace.next(false, Signals::All), Pause::AtMost(NOTIFIED));
        assert_eq!(pace.next(false, Signals::All), Pause::AtMost(NOTIFIED));
        // A used-shadow queue was added in between.
        let Pause::AtMost(pause) = pace.next(false, Signals::Hints) else {
            panic!("no pause");
        };
        assert!(pause <= LONGEST);
    }

    #[test]
    fn polls_ever_less_often_for_unawaited_buffers() {
        let mut pace = Pace::default();
        for _ in 1..MOST_SPINS {
            assert_eq!(pace.next(false, Signals::Urgent), Pause::None);
        }
        for milliseconds in [1, 2, 4, 8, 16, 20, 20] {
            let expected = Pause::AtMost(Duration::from_millis(milliseconds));
            assert_eq!(pace.next(false, Signals::Urgent), expected);
        }
        let least = [Signals::All, Signals::Hints, Signals::Urgent]
            .into_iter()
            .min();
        assert_eq!(least, Some(Signals::Hints));
    }

    #[test]
    fn spins_less_in_vain_and_more_for_work() {
        let mut pace = Pace::default();
        for expected in [8, 4, 2, 2] {
            assert_eq!(spins(&mut pace), expected);
            pace.next(true, Signals::Hints);
        }
        for expected in [4, 8, 8] {
            pace.next(false, Signals::Hints);
            pace.next(true, Signals::Hints);
            let mut probe = pace;
            assert_eq!(spins(&mut probe), expected);
        }
        // Immediate work is no reason to change the spinning.
        let before = pace.spins;
        pace.next(true, Signals::Hints);
        assert_eq!(pace.spins, before);
    }
}
