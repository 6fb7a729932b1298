//! Rust's test harness: lists a program's tests and reads their results.
//!
//! Results come from the line of each test (`test one ... ok`), not from the summary. A test that
//! starts a harness itself prints a second summary. A test without a line has failed.

use crate::error::Result;
use crate::notice::{self, Kind};
use crate::process::output;
use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The tests of a program in the order in which they run, without those marked `#[ignore]`: other
/// tests start them.
///
/// # Errors
/// Those of [`output`].
pub fn list(program: &Path) -> Result<Vec<String>> {
    let names = |more: &[&str]| -> Result<Vec<String>> {
        let mut command = Command::new(program);
        command.args(["--list", "--format=terse"]).args(more);
        Ok(listed(&String::from_utf8_lossy(&output(&mut command)?)))
    };
    let ignored = names(&["--ignored"])?;
    let mut all = names(&[])?;
    all.retain(|name| !ignored.contains(name));
    Ok(all)
}

fn listed(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(str::to_owned)
        .collect()
}

/// Counts of results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed, and harnesses that did not finish.
    pub failed: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

impl Tally {
    /// Reads a line of a harness's output and adds the counts of a summary.
    pub fn read(&mut self, line: &str) {
        let Some((_, counts)) = line
            .strip_prefix("test result: ")
            .and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for count in counts.split(';') {
            let mut words = count.split_whitespace();
            let number = words.next().and_then(|number| number.parse::<u64>().ok());
            match (number, words.next()) {
                (Some(number), Some("passed")) => self.passed += number,
                (Some(number), Some("failed")) => self.failed += number,
                _ => {}
            }
        }
    }

    /// Records the end of a harness: without success and without a failed test, it counts as one
    /// failure.
    pub fn end(&mut self, success: bool) {
        if !success && self.failed == 0 {
            self.failed = 1;
        }
    }
}

/// What one run of a harness in the lab host printed.
#[derive(Debug)]
pub struct Report {
    /// The tests that were to run, in their order.
    tests: Vec<String>,
    results: BTreeMap<String, bool>,
    took: Vec<(String, Duration)>,
    /// When the previous test ended.
    last: Instant,
    panics: Panics,
    faults: BTreeMap<String, String>,
    notices: Vec<(Kind, String)>,
}

impl Report {
    /// The report of a run that begins now.
    pub fn new(tests: &[String]) -> Self {
        Self {
            tests: tests.to_vec(),
            results: BTreeMap::new(),
            took: Vec::new(),
            last: Instant::now(),
            panics: Panics::default(),
            faults: BTreeMap::new(),
            notices: Vec::new(),
        }
    }

    /// Reads a line of output.
    pub fn read(&mut self, line: &str) {
        self.panics.read(line);
        if let Some((kind, text)) = notice::read(line) {
            match (&self.panics.section, kind) {
                // The error of a failed test, which the harness repeats at its end.
                (Some(test), Kind::EmulatorFault) => {
                    self.faults
                        .entry(test.clone())
                        .or_insert_with(|| text.to_owned());
                }
                (Some(_), _) => {}
                (None, kind) => self.notices.push((kind, text.to_owned())),
            }
        }
        let Some((name, result)) = result(line) else {
            return;
        };
        // A test that runs a harness itself may print lines of other tests.
        if self.tests.iter().any(|test| test == name) && !self.results.contains_key(name) {
            let now = Instant::now();
            self.results.insert(name.to_owned(), result);
            self.took
                .push((name.to_owned(), now.duration_since(self.last)));
            self.last = now;
        }
    }

    /// Tests that did not pass, with evidence of a known fault of the emulation if there is any. A
    /// test without a result has failed.
    pub fn failed(&self) -> Vec<(String, Option<String>)> {
        self.tests
            .iter()
            .filter(|test| self.results.get(*test) != Some(&true))
            .map(|test| (test.clone(), self.faults.get(test).cloned()))
            .collect()
    }

    /// As [`Panics::with_panic`].
    pub fn with_panic(&self, test: &str) -> String {
        self.panics.with_panic(test)
    }

    /// The first test without a result: the one that ran when the harness ended.
    pub fn interrupted(&self) -> Option<usize> {
        self.tests
            .iter()
            .position(|test| !self.results.contains_key(test))
    }

    /// A test's place in the order.
    pub fn position(&self, test: &str) -> Option<usize> {
        self.tests.iter().position(|one| one == test)
    }

    /// How many passed and failed.
    pub fn tally(&self) -> Tally {
        let failed = u64::try_from(self.failed().len()).unwrap_or(u64::MAX);
        let all = u64::try_from(self.tests.len()).unwrap_or(u64::MAX);
        Tally {
            passed: all.saturating_sub(failed),
            failed,
        }
    }

    /// How long each test took, from the result before it to its own.
    pub fn took(&self) -> &[(String, Duration)] {
        &self.took
    }

    /// Notices that tests printed while they ran.
    pub fn notices(&self) -> &[(Kind, String)] {
        &self.notices
    }
}

/// The panics of failed tests, from the output that a harness repeats at its end.
///
/// A log of CI is cut at its beginning, so the end of a run must show them once more.
#[derive(Debug, Default)]
pub struct Panics {
    /// The failed test whose output is being read.
    section: Option<String>,
    /// The first panic of each: its place, then its message.
    all: BTreeMap<String, Vec<String>>,
    reading: bool,
}

impl Panics {
    /// More lines of a message are left out.
    const LINES: usize = 4;
    /// More characters of a line are left out.
    const WIDTH: usize = 400;

    /// Reads a line of output.
    pub fn read(&mut self, line: &str) {
        let title = line.strip_prefix("---- ");
        if let Some(title) = title.and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.section = Some(title.to_owned());
            self.reading = false;
        } else if line == "failures:" {
            self.section = None;
        }
        let Some(test) = &self.section else {
            return;
        };
        let place = line
            .strip_prefix("thread '")
            .and(line.split_once(" panicked at "));
        if let Some((_, place)) = place {
            self.reading = !self.all.contains_key(test);
            if self.reading {
                self.all.insert(test.clone(), vec![place.to_owned()]);
            }
        } else if line == "stack backtrace:" || line.starts_with("note: run with ") {
            self.reading = false;
        } else if let Some(lines) = self.all.get_mut(test)
            && self.reading
            && lines.len() <= Self::LINES
        {
            lines.push(line.chars().take(Self::WIDTH).collect());
        }
    }

    /// A failed test, followed by the place and message of its panic if it printed one.
    pub fn with_panic(&self, test: &str) -> String {
        let panic = self.all.get(test).map(|lines| lines.join("\n  "));
        panic.map_or_else(|| test.to_owned(), |panic| format!("{test}: {panic}"))
    }
}

/// The failed test of a line, as a harness prints it with and without `--quiet`.
pub fn failed(line: &str) -> Option<&str> {
    let quiet = line.strip_suffix(" --- FAILED");
    let other = || result(line).filter(|(_, passed)| !passed);
    quiet.or_else(|| other().map(|(name, _)| name))
}

/// The test of a result's line, and whether it passed.
fn result(line: &str) -> Option<(&str, bool)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    match rest.rsplit(' ').next() {
        Some("ok") => Some((name, true)),
        Some("FAILED") => Some((name, false)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(tests: &[&str], lines: &[&str]) -> Report {
        let tests: Vec<String> = tests.iter().map(|test| (*test).to_owned()).collect();
        let mut report = Report::new(&tests);
        lines.iter().for_each(|line| report.read(line));
        report
    }

    #[test]
    fn a_failed_test_is_named_in_both_formats() {
        assert_eq!(failed("a::b --- FAILED"), Some("a::b"));
        assert_eq!(failed("test a::b ... FAILED"), Some("a::b"));
        for line in [
            "test a ... ok",
            "test result: FAILED. 1 passed",
            "...... 3/9",
        ] {
            assert_eq!(failed(line), None, "{line}");
        }
    }

    #[test]
    fn lists_have_a_line_for_each_test() {
        let text = "one: test\ntwo::inner: test\nfast: benchmark\n\n";
        assert_eq!(listed(text), ["one", "two::inner"]);
    }

    #[test]
    fn failed_tests_have_evidence_in_their_section_or_none() {
        let report = report(
            &["one", "two::inner", "three", "four"],
            &[
                "test one ... ok",
                "lab: thinned: 1 of 2",
                "test two::inner ... FAILED",
                "test three ... FAILED",
                "failures:",
                "---- two::inner stdout ----",
                "the guest fell silent: lab: emulator fault: exits 2000",
                "---- three stdout ----",
                "assertion failed",
                "failures:",
            ],
        );
        assert_eq!(
            report.failed(),
            [
                ("two::inner".to_owned(), Some("exits 2000".to_owned())),
                ("three".to_owned(), None),
                // It printed no line.
                ("four".to_owned(), None),
            ]
        );
        let tally = report.tally();
        assert_eq!((tally.passed, tally.failed), (1, 3));
        assert_eq!(report.interrupted(), Some(3));
        assert_eq!(report.notices(), [(Kind::Thinned, "1 of 2".to_owned())]);
        assert_eq!(report.took().len(), 3);
    }

    #[test]
    fn the_first_panic_of_a_test_is_kept_without_its_stack() {
        let long = "x".repeat(500);
        let report = report(
            &["one", "two"],
            &[
                "thread 'one' (7) panicked at elsewhere.rs:1:1:",
                "---- one stdout ----",
                "lab: thinned: 1 of 2",
                "thread 'one' (7) panicked at tests/a.rs:9:5:",
                "assertion failed: lost",
                &long,
                "3",
                "4",
                "5",
                "stack backtrace:",
                "   0: main",
                "thread 'one' (7) panicked at drop.rs:2:1:",
                "another",
                "---- two stdout ----",
                "Error: no panic",
                "failures:",
                "    one",
            ],
        );
        let cut = &long[..400];
        let one = format!("one: tests/a.rs:9:5:\n  assertion failed: lost\n  {cut}\n  3\n  4");
        assert_eq!(report.with_panic("one"), one);
        assert_eq!(report.with_panic("two"), "two");
    }

    #[test]
    fn lines_of_an_inner_harness_do_not_count() {
        let report = report(
            &["outer", "last"],
            &[
                "test inner ... ok",
                "test result: ok. 1 passed; 0 failed",
                "test outer ... ok",
                "test outer ... FAILED",
                "test last ... ok",
            ],
        );
        assert!(report.failed().is_empty());
        assert_eq!(report.tally().passed, 2);
    }

    #[test]
    fn summaries_of_unit_tests_add_up() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test result: FAILED. 2 passed; 1 failed; 4 ignored; 0 measured; 5 filtered out; \
             finished in 0.00s",
            "test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
            "test result: ok. x passed; ; 3",
        ] {
            tally.read(line);
        }
        tally.end(false);
        assert_eq!((tally.passed, tally.failed), (9, 1));
    }

    #[test]
    fn a_harness_without_an_end_is_a_failure() {
        let mut tally = Tally::default();
        tally.read("test result: nonsense");
        tally.end(false);
        assert_eq!((tally.passed, tally.failed), (0, 1));
    }
}
