//! `cargo lab bench WHAT [--json]`: measurements in the lab host, one file each.
//! A measurement compares two ways in one run, on one host: under emulation
//! its figures say nothing else.

mod doorbell;
mod mgmt;

use crate::agent::client::{self, Streams};
use crate::error::{Error, Result};
use crate::here;
use crate::host::LabHost;
use crate::setup::Lab;
use crate::verbs;
use clap::Subcommand;

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
    /// Time to make, show and delete vDPA devices, beside iproute2's vdpa
    Mgmt(mgmt::MgmtArguments),
}

/// Runs the measurement and returns its exit code.
///
/// # Errors
/// Those of [`Lab::prepare`], [`LabHost::boot`] and the measurement's own.
pub fn bench(arguments: &BenchArguments) -> Result<u8> {
    if std::env::var_os("BELLHOP_LAB").is_some() {
        return match &arguments.bench {
            Bench::Doorbell(doorbell) => doorbell::measure(doorbell),
            Bench::Mgmt(mgmt) => mgmt::measure(mgmt),
        }
        .map(|()| 0);
    }
    let (words, rig, wanted_here) = match &arguments.bench {
        Bench::Doorbell(doorbell) => (doorbell.command(), doorbell.rig, &doorbell.here),
        Bench::Mgmt(mgmt) => (mgmt.command(), mgmt.rig(), &mgmt.here),
    };
    let lab = Lab::prepare()?;
    let program = std::env::current_exe().map_err(Error::system("find this program"))?;
    let mut command = vec![program.to_string_lossy().into_owned(), "bench".into()];
    command.extend(words);
    let execute = verbs::command(&lab, command)?;
    if wanted_here.is_wanted() {
        return here::run(&execute, None);
    }
    let mut host = LabHost::boot(&lab, rig)?;
    let outcome = client::run(&mut host, execute, None, Streams::Own)?;
    host.power_off()?;
    Ok(outcome.exit_code())
}
