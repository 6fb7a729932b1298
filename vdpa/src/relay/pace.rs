//! How often to poll: at once while there is work, then ever more seldom.
//!
//! ```text
//!   spin (some polls without a pause) -> 50 µs -> 100 µs -> ... -> 1 ms
//!     ^------------------ work ------------------------------------'
//! ```
//! How long to spin is learned, as KVM does when a processor halts: twice as long each time that
//! work came meanwhile, half as long each time that it did not; never for longer than
//! a sleep and a wake-up cost. Under a flood
//! the next work is a few polls away; under single frames spinning would cost more than
//! all else, and take a processor from the guest.
//!
//! The longest pause bounds how late the guest hears of a frame when the device
//! gives no hint, which it need not where the guest has switched interrupts off. Where all
//! hints are the relays' own to ask for, as on shadowed queues, the pause is long at once:
//! looking around without a reason is what costs most under single frames. In between is
//! what nobody waits for and nobody signals, such as transmitted frames that are to be given back:
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
/// Where whatever comes is told: no need for it, but for a device that loses a signal.
const TOLD: Duration = Duration::from_millis(20);

/// When to poll again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Without a pause.
    None,
    /// After this time at most; a hint or a kick may come first.
    AtMost(Duration),
    /// Nothing is relayed: only after the next change.
    Forever,
}

/// What of all that may come is signalled. In order: a poller of several queues can rely on
/// the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Signals {
    /// Some of it, perhaps: whoever signals may have been told not to.
    #[default]
    Hints,
    /// All that somebody waits for.
    Urgent,
    /// All: nothing need be looked for.
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
    /// Spins as long as it may: a change was made just now, and traffic waits.
    fn default() -> Self {
        Self {
            idle: 0,
            spins: MOST_SPINS,
        }
    }
}

impl Pace {
    /// After a poll that found work or not: when to poll again. `signals`: what a wait
    /// until then would be ended by.
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
            // One pause less to come: the polls that are left out.
            let fewer = (self.spins / 2).max(FEWEST_SPINS);
            self.idle = fewer;
            self.spins = fewer;
        }
        // Shifted by more than 5 both are above their longest.
        let times = 1 << doublings.min(5);
        Pause::AtMost(match signals {
            Signals::All => TOLD,
            Signals::Urgent => (LONGEST * times).min(TOLD),
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
    fn does_not_look_for_what_is_told() {
        let mut pace = Pace::default();
        for _ in 1..MOST_SPINS {
            assert_eq!(pace.next(false, Signals::All), Pause::None);
        }
        assert_eq!(pace.next(false, Signals::All), Pause::AtMost(TOLD));
        assert_eq!(pace.next(false, Signals::All), Pause::AtMost(TOLD));
        // A mediated queue came in between.
        let Pause::AtMost(pause) = pace.next(false, Signals::Hints) else {
            panic!("no pause");
        };
        assert!(pause <= LONGEST);
    }

    #[test]
    fn looks_ever_more_seldom_for_what_nobody_waits_for() {
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
        // Work at once says nothing about spinning.
        let before = pace.spins;
        pace.next(true, Signals::Hints);
        assert_eq!(pace.spins, before);
    }
}
