//! Repeated attempts to repair NICs: rarer after each failure, which is logged once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The pause after the first failure. It doubles up to the longest one.
const FIRST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(60);

/// The last failure of each NIC that cannot be repaired, by name. A record that cannot be read is
/// here by its error.
pub(in crate::machines) type Failures = BTreeMap<String, Failure>;

/// A failed attempt.
#[derive(Debug)]
pub(in crate::machines) struct Failure {
    text: String,
    at: Instant,
    pause: Duration,
}

impl Failure {
    /// A failure after the former one, if there was one.
    pub(super) fn after(former: Option<&Self>, text: String, at: Instant) -> Self {
        let pause = former.map_or(FIRST, |former| former.pause.saturating_mul(2).min(LONGEST));
        Self { text, at, pause }
    }

    /// Whether it has another reason than the former one.
    pub(super) fn is_new(&self, former: Option<&Self>) -> bool {
        former.is_none_or(|former| former.text != self.text)
    }

    /// Whether the next attempt must wait.
    pub(super) fn pauses(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_become_rarer_and_a_reason_is_new_once() {
        let at = Instant::now();
        let mut last = Failure::after(None, "down".to_owned(), at);
        assert!(last.is_new(None));
        for seconds in [5, 10, 20, 40, 60, 60] {
            let pause = Duration::from_secs(seconds);
            assert!(last.pauses(at) && last.pauses(at + pause - Duration::from_millis(1)));
            assert!(!last.pauses(at + pause), "{seconds}");
            let next = Failure::after(Some(&last), "down".to_owned(), at);
            assert!(!next.is_new(Some(&last)));
            last = next;
        }
        let other = Failure::after(Some(&last), "no bridge".to_owned(), at);
        assert!(other.is_new(Some(&last)));
    }
}
