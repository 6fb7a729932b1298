//! `cargo lab bench WHAT [--json]`: measurements in the lab host, one file each.
//! A measurement compares two ways in one run, on one host: under emulation
//! its figures say nothing else. A new one is a file with a `Measurement`, a variant
//! and a line in `Bench::chosen`.

mod doorbell;
pub(super) mod figures;
mod footprint;
mod mgmt;
mod migration;
mod peer;
mod rings;
mod threads;

use crate::agent::client::{self, Streams};
use crate::error::{Error, Result};
use crate::here;
use crate::host::LabHost;
use crate::rig::Rig;
use crate::setup::{Lab, Profile};
use crate::verbs;
use clap::Subcommand;

/// Percent of its time that a lab host may wait for this machine's processors before its
/// figures are called rough.
const DISTURBED: u128 = 15;

/// Arguments of `cargo lab bench`.
#[derive(Debug, clap::Args)]
pub struct BenchArguments {
    /// What to measure.
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// VM exits per frame sent, with mapped doorbells and with ioeventfds
    Doorbell(doorbell::DoorbellArguments),
    /// Memory outside guest RAM and processor time until the API answers, beside QEMU's
    Footprint(footprint::FootprintArguments),
    /// Time to make, show and delete vDPA devices, beside iproute2's vdpa
    Mgmt(mgmt::MgmtArguments),
    /// How long traffic rests while a guest moves, or its device or VMM changes, beside QEMU's migration
    Migration(migration::MigrationArguments),
    /// Frames per second and processor time of relayed rings, beside QEMU's shadow virtqueues
    Rings(rings::RingsArguments),
}

impl Bench {
    fn chosen(&self) -> &dyn Measurement {
        match self {
            Self::Doorbell(measurement) => measurement,
            Self::Footprint(measurement) => measurement,
            Self::Mgmt(measurement) => measurement,
            Self::Migration(measurement) => measurement,
            Self::Rings(measurement) => measurement,
        }
    }
}

/// A measurement, as its arguments describe it. Both ends of the way into the lab
/// host see the same arguments: outside they boot the host, inside they measure.
trait Measurement {
    /// The words that make these arguments again, the measurement's name first.
    fn command(&self) -> Vec<String>;

    /// The lab host's equipment.
    fn rig(&self) -> Rig;

    /// Whether this machine is meant instead of a lab host.
    fn here(&self) -> &here::HereArguments;

    /// Whether code that runs in this program is measured: it is then built with
    /// optimizations, as Bellhop is.
    fn is_of_this_program(&self) -> bool {
        false
    }

    /// Measures, in the lab host.
    ///
    /// # Errors
    /// Something is missing or fails: there are no figures then, not even some.
    fn measure(&self) -> Result<()>;
}

/// Runs the measurement and returns its exit code: 1 if it failed.
///
/// # Errors
/// Those of [`Lab::prepare`] and [`LabHost::boot`].
pub fn bench(arguments: &BenchArguments) -> Result<u8> {
    let measurement = arguments.bench.chosen();
    if std::env::var_os("BELLHOP_LAB").is_some() {
        return Ok(match measurement.measure() {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("lab: {}", crate::error::report(&error));
                1
            }
        });
    }
    let lab = Lab::prepare(Profile::Release)?;
    let program = if measurement.is_of_this_program() {
        lab.optimized_lab()?
    } else {
        std::env::current_exe().map_err(Error::system("find this program"))?
    };
    let mut command = vec![program.to_string_lossy().into_owned(), "bench".into()];
    command.extend(measurement.command());
    let execute = verbs::command(&lab, command)?;
    if measurement.here().is_wanted() {
        return here::run(&execute, None);
    }
    let mut host = LabHost::boot(&lab, measurement.rig())?;
    let outcome = client::run(&mut host, execute, None, Streams::Own)?;
    let waited = threads::waited_percent(host.pid())?;
    if waited > DISTURBED {
        eprintln!(
            "lab: this machine had other work: the lab host waited for a processor in {waited} % of \
             the time in which it had something to do, and took that for its own; above \
             {DISTURBED} % figures are only rough, and times are too long"
        );
    }
    host.power_off()?;
    Ok(outcome.exit_code())
}
