//! How often to poll: at once while there is work, then ever more seldom.
//!
//! ```text
//!   spin (SPINS polls without a pause) -> 50 µs -> 100 µs -> ... -> 1 ms
//!     ^------------------ work --------------------------------------'
//! ```
//! The longest pause bounds how late the guest hears of a frame when the device
//! gives no hint, which it need not where the guest has switched interrupts off.

use std::time::Duration;

const SPINS: u32 = 64;
const FIRST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(1);

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

/// The pace of one poller.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    idle: u32,
}

impl Pace {
    /// After a poll that found work or not: when to poll again.
    pub fn next(&mut self, worked: bool) -> Pause {
        if worked {
            self.idle = 0;
            return Pause::None;
        }
        self.idle = self.idle.saturating_add(1);
        match self.idle.checked_sub(SPINS) {
            None => Pause::None,
            // 50 µs shifted by more than 5 is above the longest.
            Some(doublings) => Pause::AtMost((FIRST * (1 << doublings.min(5))).min(LONGEST)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_then_slows_down_and_stays_bounded() {
        let mut pace = Pace::default();
        assert_eq!(pace.next(true), Pause::None);
        for _ in 1..SPINS {
            assert_eq!(pace.next(false), Pause::None);
        }
        let mut last = Duration::ZERO;
        for _ in 0..100 {
            let Pause::AtMost(pause) = pace.next(false) else {
                panic!("no pause");
            };
            assert!(pause >= last && pause <= LONGEST);
            last = pause;
        }
        assert_eq!(last, LONGEST);
        assert_eq!(pace.next(true), Pause::None);
        assert_eq!(pace.next(false), Pause::None);
    }
}
