//! Reading what Rust's test harness prints: its summaries and the lab's own
//! lines between them.
//!
//! A harness ends with `test result: ok. 3 passed; 0 failed; …`. One that is
//! killed or panics outside of a test prints none: that counts as a failure.

use std::ops::AddAssign;

/// Printed by [`crate::guest`] each time a guest's boot is tried again.
pub const GUEST_RETRY: &str = "lab: guest boot retry";

/// What was counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed, and harnesses that did not come to their end.
    pub failed: u64,
    /// Tests that were compiled but not run; never on purpose.
    pub ignored: u64,
    /// Boots that were tried again.
    pub retries: u64,
    /// Harnesses that printed a summary.
    pub summaries: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.retries += other.retries;
        self.summaries += other.summaries;
    }
}

impl Tally {
    /// Takes one line of output into account.
    pub fn read(&mut self, line: &str) {
        if line.contains(GUEST_RETRY) {
            self.retries += 1;
        }
        let Some(rest) = line.strip_prefix("test result: ") else {
            return;
        };
        self.summaries += 1;
        let Some((_, counts)) = rest.split_once(". ") else {
            return;
        };
        for count in counts.split(';') {
            let mut words = count.split_whitespace();
            let (Some(number), Some(kind)) = (words.next(), words.next()) else {
                continue;
            };
            let Ok(number) = number.parse::<u64>() else {
                continue;
            };
            match kind {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }

    /// A harness has ended: without success but with no failed test to show
    /// for it, it counts as one.
    pub fn end(&mut self, success: bool) {
        if !success && self.failed == 0 {
            self.failed = 1;
        }
    }

    /// The last line of a test run.
    pub fn last_line(&self) -> String {
        format!("{} passed, {} failed", self.passed, self.failed)
    }
}

/// The failed tests of one harness, from the sections that it prints at its end:
/// `---- name_of_the_test stdout ----`.
#[derive(Debug, Default)]
pub struct FailedTests(Vec<String>);

impl FailedTests {
    /// Takes one line of output into account.
    pub fn read(&mut self, line: &str) {
        let title = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" stdout ----"));
        self.0.extend(title.map(str::to_owned));
    }

    /// Their names, in the order of the report.
    pub fn into_names(self) -> Vec<String> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_have_sections() {
        let mut failed = FailedTests::default();
        for line in [
            "test one ... ok",
            "test two::inner ... FAILED",
            "---- two::inner stdout ----",
            "thread 'two::inner' panicked",
            "---- three stdout ----",
            "assertion failed",
        ] {
            failed.read(line);
        }
        assert_eq!(failed.into_names(), ["two::inner", "three"]);
    }

    #[test]
    fn summaries_add_up() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a ... ok",
            "test result: FAILED. 2 passed; 1 failed; 4 ignored; 0 measured; 5 filtered out; finished in 0.00s",
            "lab: guest boot retry: silent",
            "test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            tally.read(line);
        }
        tally.end(false);
        assert_eq!(
            tally,
            Tally {
                passed: 9,
                failed: 1,
                ignored: 4,
                retries: 1,
                summaries: 2
            }
        );
        assert_eq!(tally.last_line(), "9 passed, 1 failed");
    }

    #[test]
    fn a_harness_without_an_end_is_a_failure() {
        let mut tally = Tally::default();
        tally.read("test result: nonsense");
        tally.read("test result: ok. x passed; ; 3");
        tally.end(false);
        assert_eq!((tally.passed, tally.failed), (0, 1));
    }
}
