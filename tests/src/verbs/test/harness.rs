//! Files of tests in the lab host: each is run in a host with its rig, and what
//! failed of it is run again, at most twice, where the host is emulated.
//!
//! ```text
//!   run ──▶ all passed ──────────────────────────────▶ next file, same host
//!    │
//!    ├────▶ a few tests failed ──┐  (emulated hosts only)
//!    └────▶ the host was lost ───┴▶ a fresh host, those tests or the file again ──▶ counts
//! ```
//! QEMU's emulation of nested virtualization loses guests, and sometimes the host,
//! now and then (tests/README.md has the figures). Each new attempt is printed
//! as it begins, and all of them are named at the end. On real KVM there is none.

use crate::accelerator::Accelerator;
use crate::agent::client::{self, Streams};
use crate::agent::protocol::Execute;
use crate::endurance::CYCLES;
use crate::error::{Error, Result};
use crate::host::LabHost;
use crate::libtest::{FailedTests, Tally};
use crate::rig::Rig;
use crate::setup::Lab;
use crate::verbs;
use std::path::Path;
use std::time::Duration;

/// How long one harness may take in the lab host.
const HARNESS_LIMIT: Duration = Duration::from_secs(30 * 60);

/// More failed tests of one file than that are no accident.
const AGAIN_MAX: usize = 4;

/// How often one test is tried, the first time included.
const ATTEMPTS: u32 = 3;

/// One call of a file of tests.
#[derive(Debug, Clone)]
pub(super) struct Harness<'a> {
    pub(super) lab: &'a Lab,
    pub(super) name: &'a str,
    pub(super) program: &'a Path,
    /// The arguments that select tests; none for all.
    pub(super) select: Vec<String>,
    /// For tests that repeat what they do: see `lab::endurance`.
    pub(super) cycles: u32,
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
        Ok(execute)
    }

    /// The same file of tests, but this one test of it.
    fn only(&self, test: &str) -> Self {
        Self {
            select: vec![test.into(), "--exact".into()],
            ..self.clone()
        }
    }
}

/// The lab host that runs at the moment, and what came of all files of tests so far.
#[derive(Debug)]
pub(super) struct LabRun<'a> {
    lab: &'a Lab,
    host: Option<(Rig, LabHost)>,
    tally: Tally,
    /// What was run again: `file::test`.
    again: Vec<String>,
}

/// How one run of a harness went.
struct Attempt {
    tally: Tally,
    failed: Vec<String>,
    /// The host fell over, not (only) the tests.
    host_lost: bool,
    emulated: bool,
}

impl<'a> LabRun<'a> {
    pub(super) fn new(lab: &'a Lab) -> Self {
        Self {
            lab,
            host: None,
            tally: Tally::default(),
            again: Vec::new(),
        }
    }

    /// Adds what was counted elsewhere.
    pub(super) fn add(&mut self, tally: Tally) {
        self.tally += tally;
    }

    /// Runs a file of tests, and what failed of it again.
    ///
    /// # Errors
    /// Those of [`LabHost::boot`] and of the connection with the host.
    pub(super) fn run(&mut self, harness: &Harness<'_>, rig: Rig) -> Result<()> {
        let first = self.attempt(harness, rig)?;
        if !first.emulated {
            self.tally += first.tally;
            return Ok(());
        }
        if first.host_lost {
            println!("lab: {} lost its host; once more", harness.name);
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
            println!(
                "lab: {}::{test} failed; attempt {attempt} of {ATTEMPTS}",
                harness.name
            );
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
        let mut line = |line: &str| {
            println!("{line}");
            tally.read(line);
            failed.read(line);
        };
        let outcome = client::run(
            &mut host,
            harness.execute()?,
            Some(HARNESS_LIMIT),
            Streams::Lines(&mut line),
        );
        let mut host_lost = false;
        match outcome {
            Ok(outcome) => {
                tally.end(outcome.exit_code() == 0);
                // One that one harness broke is not the next one's problem.
                if outcome != client::Outcome::TimedOut {
                    self.host = Some((rig, host));
                }
            }
            Err(error @ Error::HostLost { .. }) => {
                eprintln!("lab: {}", crate::error::report(&error));
                tally.end(false);
                host_lost = true;
            }
            Err(error) => return Err(error),
        }
        Ok(Attempt {
            tally,
            failed: failed.into_names(),
            host_lost,
            emulated,
        })
    }

    /// The running host if it has the rig, else a new one.
    fn host_with(&mut self, rig: Rig) -> Result<LabHost> {
        if let Some((_, host)) = self.host.take_if(|(has, _)| *has == rig) {
            return Ok(host);
        }
        self.power_off()?;
        let host = LabHost::boot(self.lab, rig)?;
        self.tally.retries += u64::from(host.retries());
        Ok(host)
    }

    fn power_off(&mut self) -> Result<()> {
        match self.host.take() {
            Some((_, host)) => host.power_off(),
            None => Ok(()),
        }
    }

    /// Switches the host off, says what was run twice, and gives what was counted.
    ///
    /// # Errors
    /// Those of [`LabHost::power_off`].
    pub(super) fn end(mut self) -> Result<Tally> {
        self.power_off()?;
        if !self.again.is_empty() {
            eprintln!("lab: run again: {}", self.again.join(", "));
        }
        Ok(self.tally)
    }
}
