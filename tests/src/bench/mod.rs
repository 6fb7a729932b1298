//! `cargo lab bench` inside the lab host, one module for each measurement. A measurement compares
//! two ways in one run, on one host: under emulation its figures have no other meaning.

mod doorbell;
mod flood;
mod footprint;
mod iommu;
mod mgmt;
mod migration;
mod peer;
mod processors;
mod rings;
mod swnic;
mod vfio;

use crate::error::{Error, Result};
use clap::Parser;
use launcher::verbs::bench::{Bench, BenchArguments};
use serde::Serialize;
use std::process::ExitCode;

#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    bench: BenchArguments,
}

/// Runs the measurement that the command line names. It prints no figures at all if something is
/// missing or fails.
pub fn main() -> ExitCode {
    let measured = match Arguments::parse().bench.bench {
        Bench::Doorbell(arguments) => doorbell::measure(&arguments),
        Bench::Footprint(arguments) => footprint::measure(&arguments),
        Bench::Iommu(arguments) => iommu::measure(&arguments),
        Bench::Mgmt(arguments) => mgmt::measure(&arguments),
        Bench::Migration(arguments) => migration::measure(&arguments),
        Bench::Rings(arguments) => rings::measure(&arguments),
        Bench::Swnic(arguments) => swnic::measure(&arguments),
        Bench::Vfio(arguments) => vfio::measure(&arguments),
    };
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab: {}", crate::error::report(&error));
            ExitCode::FAILURE
        }
    }
}

/// Prints the report as the last line of standard output, if it is wanted.
pub(crate) fn print_json(wanted: bool, report: &impl Serialize) -> Result<()> {
    if wanted {
        let line = serde_json::to_string(report)
            .map_err(|error| Error::invalid("the report", error.to_string()))?;
        println!("{line}");
    }
    Ok(())
}
