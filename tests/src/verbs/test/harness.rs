//! Files of tests in the lab host: each is run in a host with its rig, and what
//! failed of it is run again, at most twice, where the host is emulated.
//!
//! ```text
//!   run ──▶ all passed ──────────────────────────────▶ next file, same host
//!    │
//!    ├────▶ a few tests failed ──┐  (emulated hosts only)
//!    └────▶ the host was lost, ──┴▶ a fresh host, those tests or the file again ──▶ counts
//!           or nothing ended
//! ```
//! QEMU's emulation of nested virtualization loses guests, and sometimes the host,
//! now and then (tests/README.md has the figures). Each new attempt is printed
//! as it begins, and all of them are named at the end. On real KVM there is none.

use super::transcript::Transcript;
use crate::accelerator::Accelerator;
use crate::agent::client::{self, Printed, Streams};
use crate::agent::protocol::Execute;
use crate::endurance::{CYCLES, DEFAULT_CYCLES};
use crate::error::{Error, Result};
use crate::host::LabHost;
use crate::libtest::{FailedTests, Tally};
use crate::progress;
use crate::rig::Rig;
use crate::setup::Lab;
use crate::verbs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long one harness may take in the lab host for each of the times that its tests repeat what they do; three
/// times what the longest one takes in an emulated host beside another one.
const LIMIT_EACH: Duration = Duration::from_secs(200);

/// More failed tests of one file than that are no accident.
const AGAIN_MAX: usize = 4;

/// How often one test is tried, the first time included.
const ATTEMPTS: u32 = 3;

/// One call of a file of tests.
#[derive(Debug, Clone)]
pub(super) struct Harness<'a> {
    pub(super) lab: &'a Lab,
    pub(super) name: &'a str,
    pub(super) program: PathBuf,
    /// The arguments that select tests; none for all.
    pub(super) select: Vec<String>,
    /// For tests that repeat what they do: see `lab::endurance`.
    pub(super) cycles: u32,
    /// What tests start besides Bellhop: `CARGO_BIN_EXE_…`.
    pub(super) programs: &'a [String],
}

impl Harness<'_> {
    /// The command for the lab host.
    ///
    /// # Errors
    /// Those of [`verbs::command`].
    pub(super) fn execute(&self) -> Result<Execute> {
        let mut command = vec![
            self.program.to_string_lossy().into_owned(),
            "--test-threads=1".into(),
        ];
        command.extend_from_slice(&self.select);
        let mut execute = verbs::command(self.lab, command)?;
        execute
            .environment
            .insert(CYCLES.into(), self.cycles.to_string());
        execute.held.extend_from_slice(self.programs);
        Ok(execute)
    }

    /// How long it may take.
    fn limit(&self) -> Duration {
        LIMIT_EACH * self.cycles.max(DEFAULT_CYCLES)
    }

    /// The same file of tests, but this one test of it.
    fn only(&self, test: &str) -> Self {
        Self {
            select: vec![test.into(), "--exact".into()],
            ..self.clone()
        }
    }
}

/// One lane: the lab host that it has at the moment, and what came of all its files of tests
/// so far.
#[derive(Debug)]
pub(super) struct LabRun<'a> {
    lab: &'a Lab,
    /// How many lanes there are. One alone prints what it hears at once.
    lanes: u8,
    host: Option<(Rig, LabHost)>,
    tally: Tally,
    /// What was run again: `file::test`.
    again: Vec<String>,
    /// How long each file took, the boot of its host not counted.
    took: Vec<(String, Duration)>,
}

/// What came of one lane.
#[derive(Debug, Default)]
pub(super) struct Ended {
    pub(super) tally: Tally,
    /// What was run again: `file::test`.
    pub(super) again: Vec<String>,
    /// How long each file of tests took that its host survived.
    pub(super) took: Vec<(String, Duration)>,
}

/// How one run of a harness went.
struct Attempt {
    tally: Tally,
    failed: Vec<String>,
    /// It did not come to its end: the host fell over, or something in it waits for ever.
    cut_short: bool,
    emulated: bool,
    took: Duration,
}

impl<'a> LabRun<'a> {
    pub(super) fn new(lab: &'a Lab, lanes: u8) -> Self {
        Self {
            lab,
            lanes,
            host: None,
            tally: Tally::default(),
            again: Vec::new(),
            took: Vec::new(),
        }
    }

    /// Runs a file of tests, and what failed of it again.
    ///
    /// # Errors
    /// Those of [`LabHost::boot_beside`] and of the connection with the host.
    pub(super) fn run(&mut self, harness: &Harness<'_>, rig: Rig) -> Result<()> {
        progress::around(|| {
            println!(
                "lab: {}, in the lab host with the rig {}",
                harness.name,
                rig.name()
            );
        });
        let first = self.attempt(harness, rig)?;
        if !first.cut_short {
            self.took.push((harness.name.to_owned(), first.took));
        }
        if !first.emulated {
            self.tally += first.tally;
            return Ok(());
        }
        if first.cut_short {
            progress::around(|| {
                println!("lab: {} did not come to its end; once more", harness.name)
            });
            self.again.push(harness.name.to_owned());
            let second = self.attempt(harness, rig)?;
            self.tally += second.tally;
            return Ok(());
        }
        let mut tally = first.tally;
        if first.failed.len() <= AGAIN_MAX {
            for test in &first.failed {
                tally.failed = tally.failed.saturating_sub(1);
                tally += self.again(harness, test, rig)?;
            }
        }
        self.tally += tally;
        Ok(())
    }

    /// Runs one test until it passes, or has been tried often enough.
    fn again(&mut self, harness: &Harness<'_>, test: &str, rig: Rig) -> Result<Tally> {
        let mut tally = Tally::default();
        for attempt in 2..=ATTEMPTS {
            progress::around(|| {
                println!(
                    "lab: {}::{test} failed; attempt {attempt} of {ATTEMPTS}",
                    harness.name
                );
            });
            self.again.push(format!("{}::{test}", harness.name));
            // Whatever made it fail is not left behind in there.
            self.power_off()?;
            tally = self.attempt(&harness.only(test), rig)?.tally;
            if tally.failed == 0 {
                break;
            }
        }
        Ok(tally)
    }

    fn attempt(&mut self, harness: &Harness<'_>, rig: Rig) -> Result<Attempt> {
        let mut host = self.host_with(rig)?;
        let emulated = host.accelerator() == Accelerator::Tcg;
        let mut tally = Tally::default();
        let mut failed = FailedTests::default();
        let mut transcript = Transcript::new(self.lanes > 1);
        let mut line = |printed, line: &str| {
            tally.read(line);
            failed.read(line);
            transcript.line(printed, line);
        };
        let begun = Instant::now();
        let outcome = client::run(
            &mut host,
            harness.execute()?,
            Some(harness.limit()),
            Streams::Lines(&mut line),
        );
        let took = begun.elapsed();
        let mut cut_short = false;
        match outcome {
            Ok(outcome) => {
                tally.end(outcome.exit_code() == 0);
                // One that one harness broke is not the next one's problem.
                if outcome == client::Outcome::TimedOut {
                    cut_short = true;
                } else {
                    self.host = Some((rig, host));
                }
            }
            Err(error @ Error::HostLost { .. }) => {
                let report = crate::error::report(&error);
                transcript.line(Printed::Error, &format!("lab: {report}"));
                tally.end(false);
                cut_short = true;
            }
            Err(error) => return Err(error),
        }
        transcript.show(&format!(
            "lab: {}, with the rig {}, took {:.1} s",
            harness.name,
            rig.name(),
            took.as_secs_f64()
        ));
        Ok(Attempt {
            tally,
            failed: failed.into_names(),
            cut_short,
            emulated,
            took,
        })
    }

    /// The running host if it has the rig, else a new one.
    fn host_with(&mut self, rig: Rig) -> Result<LabHost> {
        if let Some((_, host)) = self.host.take_if(|(has, _)| *has == rig) {
            return Ok(host);
        }
        self.power_off()?;
        let host = LabHost::boot_beside(self.lab, rig, self.lanes)?;
        self.tally.retries += u64::from(host.retries());
        Ok(host)
    }

    fn power_off(&mut self) -> Result<()> {
        match self.host.take() {
            // It has done its work: that it hangs now says nothing of any test.
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

    /// Switches the host off and gives what came of it all.
    ///
    /// # Errors
    /// Those of [`LabHost::power_off`].
    pub(super) fn end(mut self) -> Result<Ended> {
        self.power_off()?;
        Ok(Ended {
            tally: self.tally,
            again: self.again,
            took: self.took,
        })
    }
}
