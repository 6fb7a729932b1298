//! `cargo lab soak --moves N [--scenario SCENARIO]…`: guests migrate to and fro at random moments.
//!
//! A scenario consists of runs. Each run is one guest, in one call of a test of
//! `tests/tests/migration_*`, in a lab host. Completed migrations count, and the report lists every
//! run that did not finish. If the emulation lost a guest or the host (`Ended::Lost`), the next run
//! starts in a fresh host. If a check failed (`Ended::Failed`), the scenario fails.
//!
//! ```text
//!   run ──▶ Whole ──▶ next run, same host ──▶ … until there are enough moves
//!    ├────▶ Lost ───▶ next run, fresh host
//!    └────▶ Failed ─▶ next run, fresh host; the scenario has failed
//! ```
//! A scenario also fails if no guest was ever stopped with buffers of one kind in flight.

use super::report::SoakResult;
use crate::accelerator::Accelerator;
use crate::agent::client::{self, Outcome, Streams};
use crate::error::{Error, Result, report};
use crate::host::LabHost;
use crate::rig::Rig;
use crate::setup::{Lab, Needs, binaries};
use crate::soak_run::{Move, RUN, Run};
use crate::verbs;
use std::path::Path;
use std::time::Duration;

/// The time limit of a run for each of its moves, including boots.
const LIMIT_EACH: Duration = Duration::from_secs(120);

/// Text in a test's output that shows a crashed or hung guest.
const LOST: [&str; 3] = ["triple-faulted", "did not answer", "fell silent"];

/// The limit of lost runs, for each run that the scenario needs at all. With a peer that is also a
/// guest, the emulation loses a run in about one of ten moves.
const LOST_FOR_EACH: u32 = 3;

/// How many lines of a failed run are shown.
const SHOWN: usize = 150;

/// Arguments of the scenarios.
#[derive(Debug, clap::Args)]
pub struct MigrationArguments {
    /// Migrations of each scenario after the tests: 200 before a release
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    moves: Option<u32>,
    /// Which scenarios; all of them without it
    #[arg(long = "scenario", alias = "journey", value_enum, requires = "moves")]
    scenarios: Vec<Scenario>,
    /// Migrations of one run: one guest, before the next one boots
    #[arg(
        long,
        alias = "leg",
        value_name = "N",
        default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..=1000)
    )]
    run: u32,
    /// What came of the scenarios as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

/// A scenario: between which devices, by which test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Scenario {
    /// The kernel's simulator, which can be suspended
    Sim,
    /// vp_vdpa on virtual functions, which can neither suspend nor begin in the middle of a ring
    Sriov,
    /// The lab NIC: event index, doorbells, two queue pairs, buffers in flight over a suspend
    Labnic,
    /// The lab NIC, that gives buffers back out of order
    LabnicReordered,
    /// The lab NIC, that cannot suspend
    LabnicRelayed,
}

impl Scenario {
    const ALL: [Self; 5] = [
        Self::Sim,
        Self::Sriov,
        Self::Labnic,
        Self::LabnicReordered,
        Self::LabnicRelayed,
    ];

    /// The test file and the test in it.
    const fn test(self) -> (&'static str, &'static str) {
        match self {
            Self::Sim => (
                "migration_move",
                "a_guest_on_vdpa_sim_moves_to_and_fro_at_any_moment",
            ),
            Self::Sriov => (
                "migration_sriov_move",
                "a_guest_on_vp_vdpa_moves_to_and_fro_at_any_moment",
            ),
            Self::Labnic => (
                "migration_labnic_move",
                "doorbells_event_indices_and_queue_pairs_go_along",
            ),
            Self::LabnicReordered => ("migration_labnic_move", "buffers_come_back_in_any_order"),
            Self::LabnicRelayed => (
                "migration_labnic_move",
                "a_device_that_cannot_be_suspended_is_relayed",
            ),
        }
    }
}

/// How a run ended.
#[derive(Debug)]
pub(super) enum Ended {
    Whole,
    /// Why the lab host or the guest was lost.
    Lost(String),
    /// What failed.
    Failed(String),
}

/// Runs the requested scenarios, if any; the exit code is 1 when one failed.
///
/// # Errors
/// Those of [`Lab::prepare`] and of booting the lab host; [`Error::HostLost`] when a lab host that
/// is not emulated is lost.
pub fn run(arguments: &MigrationArguments) -> Result<u8> {
    let Some(moves) = arguments.moves else {
        return Ok(0);
    };
    let scenarios = match &arguments.scenarios[..] {
        [] => &Scenario::ALL[..],
        some => some,
    };
    let tests: Vec<String> = scenarios
        .iter()
        .flat_map(|scenario| ["--test".to_owned(), scenario.test().0.to_owned()])
        .collect();
    let lab = Lab::prepare(&Needs {
        tests: &tests,
        ..Needs::HOST_AND_GUEST
    })?;
    let mut all = Vec::new();
    for scenario in scenarios {
        let program = binaries::find(&lab.built, scenario.test().0)?;
        let made = Soak {
            lab: &lab,
            scenario: *scenario,
            program: &program,
            host: None,
        }
        .run(moves, arguments.run)?;
        made.show();
        all.push(made);
    }
    if arguments.json {
        let line = serde_json::to_string(&all)
            .map_err(|error| Error::invalid("the report", error.to_string()))?;
        println!("{line}");
    }
    Ok(u8::from(!all.iter().all(SoakResult::is_right)))
}

/// The state of one scenario.
struct Soak<'a> {
    lab: &'a Lab,
    scenario: Scenario,
    program: &'a Path,
    /// The lab host of the previous run, if another run can use it.
    host: Option<LabHost>,
}

impl Soak<'_> {
    fn run(mut self, moves: u32, run_moves: u32) -> Result<SoakResult> {
        let (file, test) = self.scenario.test();
        let mut made = SoakResult::new(file, test, moves);
        let runs = moves.div_ceil(run_moves);
        // On real KVM nothing is lost without a reason.
        while made.moves() < moves {
            let run = Run {
                first: usize::try_from(made.moves()).unwrap_or_default(),
                moves: run_moves.min(moves - made.moves()),
            };
            let ended = self.run_once(run, &mut made)?;
            println!(
                "lab: {test}: {} of {} moves, {ended:?}",
                made.moves(),
                moves
            );
            made.run_ended(ended);
            if made.ended_early() > runs * LOST_FOR_EACH {
                println!("lab: {test}: too many runs did not come to their end");
                break;
            }
        }
        if let Some(host) = self.host.take() {
            // All work is done: a host that hangs while it switches off proves nothing.
            if let Err(error) = host.power_off() {
                eprintln!("lab: {}", report(&error));
            }
        }
        Ok(made)
    }

    fn run_once(&mut self, run: Run, made: &mut SoakResult) -> Result<Ended> {
        let mut host = match self.host.take() {
            Some(host) => host,
            None => LabHost::boot_beside(self.lab, Rig::of_test(self.scenario.test().0), 2)?,
        };
        let emulated = host.accelerator() == Accelerator::Tcg;
        let command = vec![
            self.program.to_string_lossy().into_owned(),
            "--exact".into(),
            self.scenario.test().1.into(),
            "--nocapture".into(),
        ];
        let mut execute = verbs::command(self.lab, command)?;
        execute.environment.insert(RUN.into(), run.to_string());
        let mut said = Vec::new();
        let mut line = |_, line: &str| match Move::read(line) {
            Some(one) => {
                println!("{}", one.line());
                made.take(one);
            }
            None => said.push(line.to_owned()),
        };
        let limit = LIMIT_EACH * run.moves.max(2);
        let outcome = client::run(&mut host, execute, Some(limit), Streams::Lines(&mut line));
        let ended = match outcome {
            Ok(Outcome::Ended(ending)) if ending.exit_code() == 0 => {
                self.host = Some(host);
                return Ok(Ended::Whole);
            }
            Ok(Outcome::Ended(_)) => {
                let why = said
                    .iter()
                    .find(|line| LOST.iter().any(|lost| line.contains(lost)));
                match why {
                    Some(why) if emulated => Ended::Lost(why.clone()),
                    _ => Ended::Failed("the test failed".into()),
                }
            }
            Ok(Outcome::TimedOut) => Ended::Lost("it took too long".into()),
            Err(error @ Error::HostLost { .. }) if emulated => Ended::Lost(report(&error)),
            Err(error) => return Err(error),
        };
        for line in &said[said.len().saturating_sub(SHOWN)..] {
            println!("    {line}");
        }
        Ok(ended)
    }
}
