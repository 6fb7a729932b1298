//! `cargo lab soak --moves N [--journey JOURNEY]…`: guests migrate to and fro at random moments.
//!
//! A journey consists of legs. Each leg is one guest, in one call of a test of
//! `tests/tests/migration_*`, in a lab host. Completed migrations count, and the report lists every
//! leg that did not finish. If the emulation lost a guest or the host (`Ended::Lost`), the next leg
//! starts in a fresh host. If a check failed (`Ended::Failed`), the journey fails.
//!
//! ```text
//!   leg ──▶ Whole ──▶ next leg, same host ──▶ … until there are enough moves
//!    ├────▶ Lost ───▶ next leg, fresh host
//!    └────▶ Failed ─▶ next leg, fresh host; the journey has failed
//! ```
//! A journey also fails if no guest was ever stopped with buffers of one kind in flight.

use super::report::Journeyed;
use crate::accelerator::Accelerator;
use crate::agent::client::{self, Outcome, Streams};
use crate::error::{Error, Result, report};
use crate::host::LabHost;
use crate::journey::{LEG, Leg, Move};
use crate::rig::Rig;
use crate::setup::{Lab, Needs, binaries};
use crate::verbs;
use std::path::Path;
use std::time::Duration;

/// The time limit of a leg for each of its moves, including boots.
const LIMIT_EACH: Duration = Duration::from_secs(120);

/// Text in a test's output that shows a crashed or hung guest.
const LOST: [&str; 3] = ["triple-faulted", "did not answer", "fell silent"];

/// The limit of lost legs, for each leg that the journey needs at all. With a peer that is also a
/// guest, the emulation loses a leg in about one of ten moves.
const LOST_FOR_EACH: u32 = 3;

/// How many lines of a failed leg are shown.
const SHOWN: usize = 150;

/// Arguments of the journeys.
#[derive(Debug, clap::Args)]
pub struct MigrationArguments {
    /// Migrations of each journey after the tests: 200 before a release
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    moves: Option<u32>,
    /// Which journeys; all of them without it
    #[arg(long = "journey", value_enum, requires = "moves")]
    journeys: Vec<Journey>,
    /// Migrations of one guest, before the next one boots
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..=1000)
    )]
    leg: u32,
    /// What came of the journeys as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

/// A journey: between which devices, by which test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Journey {
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

impl Journey {
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

/// How a leg ended.
#[derive(Debug)]
pub(super) enum Ended {
    Whole,
    /// Why the lab host or the guest was lost.
    Lost(String),
    /// What failed.
    Failed(String),
}

/// Runs the requested journeys, if any; the exit code is 1 when one failed.
///
/// # Errors
/// Those of [`Lab::prepare`] and of booting the lab host; [`Error::HostLost`] when a lab host that
/// is not emulated is lost.
pub fn run(arguments: &MigrationArguments) -> Result<u8> {
    let Some(moves) = arguments.moves else {
        return Ok(0);
    };
    let journeys = match &arguments.journeys[..] {
        [] => &Journey::ALL[..],
        some => some,
    };
    let tests: Vec<String> = journeys
        .iter()
        .flat_map(|journey| ["--test".to_owned(), journey.test().0.to_owned()])
        .collect();
    let lab = Lab::prepare(&Needs {
        tests: &tests,
        ..Needs::HOST_AND_GUEST
    })?;
    let mut all = Vec::new();
    for journey in journeys {
        let program = binaries::find(&lab.built, journey.test().0)?;
        let made = Traveller {
            lab: &lab,
            journey: *journey,
            program: &program,
            host: None,
        }
        .travel(moves, arguments.leg)?;
        made.show();
        all.push(made);
    }
    if arguments.json {
        let line = serde_json::to_string(&all)
            .map_err(|error| Error::invalid("the report", error.to_string()))?;
        println!("{line}");
    }
    Ok(u8::from(!all.iter().all(Journeyed::is_right)))
}

/// The state of one journey.
struct Traveller<'a> {
    lab: &'a Lab,
    journey: Journey,
    program: &'a Path,
    /// The lab host of the previous leg, if another leg can use it.
    host: Option<LabHost>,
}

impl Traveller<'_> {
    fn travel(mut self, moves: u32, leg_moves: u32) -> Result<Journeyed> {
        let (file, test) = self.journey.test();
        let mut made = Journeyed::new(file, test, moves);
        let legs = moves.div_ceil(leg_moves);
        // On real KVM nothing is lost without a reason.
        while made.moves() < moves {
            let leg = Leg {
                first: usize::try_from(made.moves()).unwrap_or_default(),
                moves: leg_moves.min(moves - made.moves()),
            };
            let ended = self.leg(leg, &mut made)?;
            println!(
                "lab: {test}: {} of {} moves, {ended:?}",
                made.moves(),
                moves
            );
            made.leg_ended(ended);
            if made.ended_early() > legs * LOST_FOR_EACH {
                println!("lab: {test}: too many legs did not come to their end");
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

    fn leg(&mut self, leg: Leg, made: &mut Journeyed) -> Result<Ended> {
        let mut host = match self.host.take() {
            Some(host) => host,
            None => LabHost::boot_beside(self.lab, Rig::of_test(self.journey.test().0), 2)?,
        };
        let emulated = host.accelerator() == Accelerator::Tcg;
        let command = vec![
            self.program.to_string_lossy().into_owned(),
            "--exact".into(),
            self.journey.test().1.into(),
            "--nocapture".into(),
        ];
        let mut execute = verbs::command(self.lab, command)?;
        execute.environment.insert(LEG.into(), leg.to_string());
        let mut said = Vec::new();
        let mut line = |_, line: &str| match Move::read(line) {
            Some(one) => {
                println!("{}", one.line());
                made.take(one);
            }
            None => said.push(line.to_owned()),
        };
        let limit = LIMIT_EACH * leg.moves.max(2);
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
