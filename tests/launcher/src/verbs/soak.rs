//! `cargo lab soak [NAME] [--minutes N]`: every test in full.
//!
//! It runs the same code as `cargo lab test`, without the gate and with each claim proved in full
//! ([`crate::endurance::soak`]). Then it fuzzes (`soak/fuzz.rs`). With `--moves`, guests also
//! migrate to and fro (`soak/migration.rs`).

pub mod fuzz;
pub mod migration;
mod report;

use super::test::{self, Effort, PlaceArguments};
use crate::error::Result;
use crate::setup;
use fuzz::FuzzArguments;
use migration::MigrationArguments;
use std::time::{Duration, Instant};

/// Arguments of `cargo lab soak`.
#[derive(Debug, clap::Args)]
pub struct SoakArguments {
    /// An area, a file of tests or a part of tests' names; all tests without it; `fuzz` only fuzzes
    filter: Option<String>,
    /// Repeat for so many minutes; once without it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: Option<u64>,
    /// How often the tests that look for leaks repeat what they do
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        default_value_t = 10
    )]
    cycles: u32,
    #[command(flatten)]
    fuzz: FuzzArguments,
    #[command(flatten)]
    migration: MigrationArguments,
    #[command(flatten)]
    place: PlaceArguments,
}

/// Runs the tests; the exit code is 1 when one failed.
///
/// # Errors
/// Those of [`test::test`], [`fuzz::check`], [`fuzz::run`] and [`migration::run`].
pub fn soak(arguments: &SoakArguments) -> Result<u8> {
    let repository = setup::repository()?;
    let only_fuzz = arguments.filter.as_deref() == Some("fuzz");
    let fuzzes = only_fuzz || arguments.filter.is_none();
    if fuzzes {
        fuzz::check(&arguments.fuzz)?;
    }
    if only_fuzz {
        return fuzz::run(&arguments.fuzz, &repository);
    }
    let begun = Instant::now();
    let effort = Effort {
        cycles: arguments.cycles,
        soak: true,
    };
    let mut code = 0;
    loop {
        code |= test::run(arguments.filter.as_deref(), effort, &arguments.place)?;
        let enough = Duration::from_secs(60 * arguments.minutes.unwrap_or(0));
        if begun.elapsed() >= enough {
            break;
        }
    }
    if fuzzes {
        code |= fuzz::run(&arguments.fuzz, &repository)?;
    }
    code |= migration::run(&arguments.migration)?;
    Ok(code)
}
