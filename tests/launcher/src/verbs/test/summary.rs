//! The end of a run: its phases, slowest tests and retries with their evidence, and the claims it
//! did not prove.
//!
//! The second to last line is `N passed, N failed`; the last line counts retries and thinned
//! claims.

use super::Effort;
use super::harness::Ended;
use crate::libtest::Tally;
use crate::notice::Kind;
use std::time::{Duration, Instant};

/// How many of the slowest tests are shown.
const SLOWEST: usize = 10;

/// More retries than this fail the run: the emulation is more reliable than that.
const RETRIES_MAX: usize = 4;

/// The results of a run so far.
#[derive(Debug)]
pub(super) struct Summary {
    pub(super) tally: Tally,
    /// Files of lab tests that the gate leaves out.
    pub(super) files_left_out: usize,
    /// Tests of the other files that it leaves out.
    pub(super) tests_left_out: usize,
    /// Unit and documentation tests that failed.
    pub(super) failures: Vec<String>,
    ended: Ended,
    phases: Vec<(&'static str, Duration)>,
    last: Instant,
}

impl Default for Summary {
    fn default() -> Self {
        Self {
            tally: Tally::default(),
            files_left_out: 0,
            tests_left_out: 0,
            failures: Vec::new(),
            ended: Ended::default(),
            phases: Vec::new(),
            last: Instant::now(),
        }
    }
}

impl Summary {
    /// Ends a phase.
    pub(super) fn phase(&mut self, name: &'static str) {
        let now = Instant::now();
        self.phases.push((name, now.duration_since(self.last)));
        self.last = now;
    }

    /// Adds the results of the lab tests.
    pub(super) fn take(&mut self, ended: Ended) {
        self.tally += ended.tally;
        self.ended = ended;
    }

    /// Prints everything and returns the exit code.
    pub(super) fn end(mut self, effort: Effort) -> u8 {
        let phases: Vec<String> = self
            .phases
            .iter()
            .map(|(name, took)| format!("{name} {} s", took.as_secs()))
            .collect();
        println!("\nlab: phases: {}", phases.join(", "));
        self.ended
            .took
            .sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        for (test, took) in self.ended.took.iter().take(SLOWEST) {
            println!("lab: slow: {:>6.1} s  {test}", took.as_secs_f64());
        }
        let mut thinned = 0_usize;
        for (kind, text) in &self.ended.notices {
            match kind {
                Kind::Thinned => {
                    thinned += 1;
                    println!("lab: thinned: {text}");
                }
                Kind::LeftBehind => {
                    println!("lab: left behind: {text}");
                    self.tally.failed += 1;
                }
                Kind::Figure => println!("lab: figure: {text}"),
                // Counted as a retry, with its evidence.
                Kind::Retried | Kind::EmulatorFault => {}
            }
        }
        for retry in &self.ended.retries {
            println!("lab: retry: {retry}");
        }
        let retries = self.ended.retries.len();
        let max = if effort.soak {
            4 * RETRIES_MAX
        } else {
            RETRIES_MAX
        };
        if retries > max {
            println!("lab: {retries} retries are more than {max}: the run has failed");
            self.tally.failed += 1;
        }
        // At the end: logs of CI are cut at their beginning.
        for failure in self.failures.iter().chain(&self.ended.failures) {
            println!("lab: failed: {failure}");
        }
        println!("{} passed, {} failed", self.tally.passed, self.tally.failed);
        println!(
            "lab: {retries} retries, {thinned} claims thinned, {} files and {} tests of other \
             files left to `cargo lab soak`",
            self.files_left_out, self.tests_left_out
        );
        u8::from(self.tally.failed > 0)
    }
}
