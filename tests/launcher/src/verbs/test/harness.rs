//! Files of tests in the lab host, and the retries that known faults of the emulation allow.
//!
//! ```text
//!   run ──▶ all passed ────────────────────────────▶ next file, same host
//!    │
//!    ├────▶ failed, evidence for each failed test ─▶ again in a fresh host, up to the last
//!    │      (emulated hosts only, twice at most)     failed test, in the same order: counts
//!    └────▶ failed ────────────────────────────────▶ counts
//! ```
//! QEMU's emulation of nested virtualization sometimes loses guests or the host (tests/README.md).
//! Evidence is what KVM counted and traced of a guest (crate `lab`, in the test's error), or the
//! host's console (`emulator.rs`). A test's name is never evidence. On real KVM there is no retry.

use super::Effort;
use super::coverage::{Coverage, Source};
use super::transcript::Transcript;
use crate::accelerator::Accelerator;
use crate::agent::client::{self, Outcome, Printed, Streams};
use crate::agent::protocol::Execute;
use crate::emulator;
use crate::endurance::{CYCLES, DEFAULT_CYCLES, SOAK};
use crate::error::{Error, Result};
use crate::files;
use crate::host::LabHost;
use crate::libtest::{Report, Tally};
use crate::notice::Kind;
use crate::progress::{self, Progress};
use crate::rig::Rig;
use crate::setup::Lab;
use crate::verbs;
use std::cmp::Ordering;
use std::path::Path;
use std::time::{Duration, Instant};

/// The time limit of one harness in the lab host, for each repetition of its tests. It is three
/// times the longest measured time, in an emulated host beside another one.
const LIMIT_EACH: Duration = Duration::from_secs(200);

/// How often a file of tests runs again. In one CI run the emulation lost a guest in two runs of
/// the same file.
const RETRIES_EACH: u8 = 2;

/// One call of a file of tests.
#[derive(Debug, Clone)]
pub(super) struct Harness<'a> {
    pub(super) lab: &'a Lab,
    pub(super) name: &'a str,
    pub(super) program: &'a Path,
    /// The tests to run, in the harness's order.
    pub(super) tests: Vec<String>,
    pub(super) effort: Effort,
    /// Programs other than Bellhop that tests start: they must not change during the run.
    pub(super) programs: &'a [String],
    /// The collector of the profiles and the column in which they count.
    pub(super) coverage: Option<(&'a Coverage, Source)>,
}

impl Harness<'_> {
    /// The command for the lab host that runs these tests.
    ///
    /// # Errors
    /// Those of [`verbs::command`].
    pub(super) fn execute(&self, tests: &[String]) -> Result<Execute> {
        let mut command = vec![
            self.program.to_string_lossy().into_owned(),
            "--test-threads=1".into(),
            "--exact".into(),
        ];
        command.extend_from_slice(tests);
        let mut execute = verbs::command(self.lab, command)?;
        let Effort { cycles, soak } = self.effort;
        execute
            .environment
            .insert(CYCLES.into(), cycles.to_string());
        if soak {
            execute.environment.insert(SOAK.into(), "1".into());
        }
        if self.coverage.is_some() {
            Coverage::in_lab_host(&mut execute.environment);
        }
        execute.held.extend_from_slice(self.programs);
        Ok(execute)
    }

    /// The time limit.
    fn limit(&self) -> Duration {
        let times = if self.effort.soak { 3 } else { 1 };
        LIMIT_EACH * self.effort.cycles.max(DEFAULT_CYCLES) * times
    }
}

/// One lane: its current lab host and the results of its files of tests so far.
#[derive(Debug)]
pub(super) struct LabRun<'a> {
    lab: &'a Lab,
    /// The number of lanes. A single lane prints each line at once.
    lanes: u8,
    host: Option<(Rig, LabHost)>,
    ended: Ended,
}

/// The results of one lane, or of all.
#[derive(Debug, Default)]
pub(super) struct Ended {
    pub(super) tally: Tally,
    /// Each retry with its evidence, including those of boots.
    pub(super) retries: Vec<String>,
    /// Each failed test as `file::test`, with its panic or the reason why its file was cut short.
    pub(super) failures: Vec<String>,
    /// How long each test took, as `file::test`.
    pub(super) took: Vec<(String, Duration)>,
    pub(super) notices: Vec<(Kind, String)>,
    /// The total time of all lanes.
    pub(super) lane_time: Duration,
}

impl Ended {
    /// Adds the results of another lane.
    pub(super) fn add(&mut self, other: Self) {
        self.tally += other.tally;
        self.retries.extend(other.retries);
        self.failures.extend(other.failures);
        self.took.extend(other.took);
        self.notices.extend(other.notices);
        self.lane_time += other.lane_time;
    }
}

/// The result of one run of a harness.
struct Attempt {
    report: Report,
    /// Set if the harness did not finish.
    cut_short: Option<CutShort>,
    emulated: bool,
}

/// Why a harness did not finish.
#[derive(Debug)]
struct CutShort {
    why: String,
    /// Evidence of a known fault.
    evidence: Option<String>,
}

impl Attempt {
    /// The number of tests to run again, from the first one on, and the evidence for each failed
    /// test. `None` if a failure is no known fault of the emulation.
    fn excuse(&self) -> Option<(usize, Vec<String>)> {
        if !self.emulated {
            return None;
        }
        let failed = self.report.failed();
        let (first, last) = (&failed.first()?.0, &failed.last()?.0);
        if let Some(cut) = &self.cut_short {
            // The tests before the interrupted one must have passed. Those after it did not run.
            let alone = self.report.position(first) == self.report.interrupted();
            let evidence = cut.evidence.clone().filter(|_| alone)?;
            return Some((self.report.position(last)? + 1, vec![evidence]));
        }
        let count = self.report.position(last)? + 1;
        let evidence: Option<Vec<String>> = failed
            .iter()
            .map(|(test, evidence)| Some(format!("{test}: {}", evidence.as_ref()?)))
            .collect();
        Some((count, evidence?))
    }

    /// Each failed test of this file with its panic, and how many did not run.
    fn failures(&self, file: &str) -> Vec<String> {
        let interrupted = self.report.interrupted().unwrap_or(usize::MAX);
        let mut all = Vec::new();
        let mut not_run = 0_usize;
        for (test, evidence) in self.report.failed() {
            match self.report.position(&test).cmp(&Some(interrupted)) {
                Ordering::Less => {
                    let fault = evidence.map(|fault| format!("\n  {fault}"));
                    let failure = self.report.with_panic(&test);
                    all.push(format!("{file}::{failure}{}", fault.unwrap_or_default()));
                }
                Ordering::Equal => {
                    let cut = self.cut_short.as_ref();
                    let why = cut.map_or("the program of the tests ended", |cut| &cut.why);
                    all.push(format!("{file}::{test}: {why}"));
                }
                Ordering::Greater => not_run += 1,
            }
        }
        if not_run > 0 {
            all.push(format!("{file}: {not_run} tests did not run"));
        }
        all
    }
}

impl<'a> LabRun<'a> {
    pub(super) fn new(lab: &'a Lab, lanes: u8) -> Self {
        Self {
            lab,
            lanes,
            host: None,
            ended: Ended::default(),
        }
    }

    /// Runs a file of tests, and repeats the tests that a known fault of the emulation failed.
    ///
    /// # Errors
    /// Those of [`LabHost::boot_beside`] and of the connection with the host.
    pub(super) fn run(&mut self, harness: &Harness<'_>, rig: Rig) -> Result<()> {
        let begun = Instant::now();
        let noticed = self.ended.notices.len();
        let mut last = self.attempt(harness, &harness.tests, rig)?;
        let mut tally = last.report.tally();
        for _ in 0..RETRIES_EACH {
            let Some((count, evidence)) = last.excuse() else {
                break;
            };
            for evidence in &evidence {
                let retry = format!("{}: {evidence}", harness.name);
                progress::around(|| println!("lab: again in a fresh host: {retry}"));
                self.ended.retries.push(retry);
            }
            // A fresh host has nothing of the failure left.
            self.power_off()?;
            let mut notices = self.ended.notices.split_off(noticed);
            notices.retain(|(kind, _)| *kind != Kind::LeftBehind);
            self.ended.notices.append(&mut notices);
            let again = harness.tests.get(..count).unwrap_or(&harness.tests);
            last = self.attempt(harness, again, rig)?;
            let failed = last.report.tally().failed;
            tally.passed += tally.failed.saturating_sub(failed);
            tally.failed = failed;
        }
        self.ended.failures.extend(last.failures(harness.name));
        self.ended.tally += tally;
        self.ended.lane_time += begun.elapsed();
        Ok(())
    }

    fn attempt(&mut self, harness: &Harness<'_>, tests: &[String], rig: Rig) -> Result<Attempt> {
        let mut host = self.host_with(rig)?;
        let emulated = host.accelerator() == Accelerator::Tcg;
        let mut report = Report::new(tests);
        let mut transcript = Transcript::new(self.lanes > 1);
        let progress = Progress::start(format!("{} ({})", harness.name, rig.name()));
        let mut line = |printed, line: &str| {
            report.read(line);
            progress.line(line);
            transcript.line(printed, line);
        };
        let outcome = client::run(
            &mut host,
            harness.execute(tests)?,
            Some(harness.limit()),
            Streams::Lines(&mut line),
        );
        drop(progress);
        let mut cut_short = None;
        match outcome {
            // A connection that a harness broke must not affect the next harness.
            Ok(Outcome::TimedOut) => {
                let why = format!("it took more than {} s", harness.limit().as_secs());
                transcript.line(Printed::Error, &format!("lab: the file of tests: {why}"));
                // The agent printed it. The faults in panics belong to their tests instead.
                let fault = report
                    .notices()
                    .iter()
                    .find(|(kind, _)| *kind == Kind::EmulatorFault);
                cut_short = Some(CutShort {
                    why,
                    evidence: fault.map(|(_, fault)| fault.clone()),
                });
            }
            Ok(Outcome::Ended(_)) => {
                if let Some((coverage, source)) = harness.coverage {
                    let collect = coverage.collect(source, harness.name);
                    let collect = verbs::command(self.lab, collect)?;
                    let mut line = |printed, line: &str| transcript.line(printed, line);
                    client::run(&mut host, collect, None, Streams::Lines(&mut line))?;
                }
                self.host = Some((rig, host));
            }
            Err(error @ Error::HostLost { .. }) => {
                let lost = crate::error::report(&error);
                transcript.line(Printed::Error, &format!("lab: {lost}"));
                let console = files::read_text(host.keep_console()).unwrap_or_default();
                let shown = files::last_lines(&console, 40);
                for text in shown.lines() {
                    transcript.line(Printed::Error, text);
                }
                let evidence = emulator::loss(&console);
                cut_short = Some(CutShort {
                    evidence: evidence.map(|fault| format!("lab host: {fault} ({lost})")),
                    why: format!("{lost}; its end:\n{}", files::last_lines(&console, 5)),
                });
            }
            Err(error) => return Err(error),
        }
        transcript.show(&format!(
            "lab: {}, with the rig {}",
            harness.name,
            rig.name()
        ));
        for (test, took) in report.took() {
            let name = format!("{}::{test}", harness.name);
            self.ended.took.push((name, *took));
        }
        for (kind, text) in report.notices() {
            let text = format!("{}: {text}", harness.name);
            if *kind == Kind::Retried {
                self.ended.retries.push(text);
            } else {
                self.ended.notices.push((*kind, text));
            }
        }
        Ok(Attempt {
            report,
            cut_short,
            emulated,
        })
    }

    /// The running host if it has the rig, else a new one.
    fn host_with(&mut self, rig: Rig) -> Result<LabHost> {
        if let Some((_, host)) = self.host.take_if(|(has, _)| *has == rig) {
            return Ok(host);
        }
        self.power_off()?;
        let host = LabHost::boot_beside(self.lab, rig, self.lanes)?;
        if let Some(evidence) = host.retried() {
            let rig = rig.name();
            self.ended
                .retries
                .push(format!("boot of a lab host with the rig {rig}: {evidence}"));
        }
        Ok(host)
    }

    fn power_off(&mut self) -> Result<()> {
        match self.host.take() {
            // The host has done its work: a hang at this point proves nothing about any test.
            Some((_, host)) => match host.power_off() {
                Err(error @ Error::HostLost { .. }) => {
                    let report = crate::error::report(&error);
                    progress::around(|| eprintln!("lab: {report}"));
                    Ok(())
                }
                other => other,
            },
            None => Ok(()),
        }
    }

    /// Switches the host off and returns all results.
    ///
    /// # Errors
    /// Those of [`LabHost::power_off`].
    pub(super) fn end(mut self) -> Result<Ended> {
        self.power_off()?;
        Ok(self.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(lines: &[&str], cut_short: Option<Option<&str>>) -> Attempt {
        let tests = ["a", "b", "c"].map(str::to_owned);
        let mut report = Report::new(&tests);
        lines.iter().for_each(|line| report.read(line));
        Attempt {
            report,
            cut_short: cut_short.map(|evidence| CutShort {
                why: "silent".to_owned(),
                evidence: evidence.map(str::to_owned),
            }),
            emulated: true,
        }
    }

    const FAILED: [&str; 6] = [
        "test a ... ok",
        "test b ... FAILED",
        "test c ... ok",
        "failures:",
        "---- b stdout ----",
        "lab: emulator fault: exits",
    ];

    #[test]
    fn tests_up_to_the_last_failed_one_run_again_if_each_has_evidence() {
        let excused = attempt(&FAILED, None);
        assert_eq!(excused.excuse(), Some((2, vec!["b: exits".to_owned()])));
        let unexplained = attempt(&FAILED[..5], None);
        assert_eq!(unexplained.excuse(), None);
        let mut both = FAILED;
        both[0] = "test a ... FAILED";
        assert_eq!(attempt(&both, None).excuse(), None);
        let real = Attempt {
            emulated: false,
            ..attempt(&FAILED, None)
        };
        assert_eq!(real.excuse(), None);
    }

    #[test]
    fn a_lost_host_is_excused_by_its_console_alone() {
        let evidence = Some(Some("soft lockup"));
        let lost = attempt(&FAILED[..1], evidence);
        assert_eq!(lost.excuse(), Some((3, vec!["soft lockup".to_owned()])));
        assert_eq!(attempt(&FAILED[..1], Some(None)).excuse(), None);
        // An earlier test had failed.
        assert_eq!(attempt(&FAILED[..2], evidence).excuse(), None);
    }

    #[test]
    fn each_failure_is_named_with_the_reason_of_an_early_end() {
        assert_eq!(attempt(&FAILED, None).failures("f"), ["f::b\n  exits"]);
        let panic = ["thread 'b' (7) panicked at a.rs:1:1:", "lost"];
        let failed = [&FAILED[..5], &panic].concat();
        let failed = attempt(&failed, None).failures("f");
        assert_eq!(failed, ["f::b: a.rs:1:1:\n  lost"]);
        let cut = attempt(&FAILED[..1], Some(None)).failures("f");
        assert_eq!(cut, ["f::b: silent", "f: 1 tests did not run"]);
        let ended = attempt(&FAILED[..2], None).failures("f");
        assert_eq!(ended, ["f::b", "f::c: the program of the tests ended"]);
    }
}
