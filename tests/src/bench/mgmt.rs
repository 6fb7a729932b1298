//! `cargo lab bench mgmt`: measures how fast vDPA devices are created, shown and deleted.
//!
//! The same work runs three times on the kernel's simulator, each device by its name:
//!
//! * `vdpa_mgmt` through one connection, as the node daemon uses it;
//! * a loop over iproute2's `vdpa`, one process for each step;
//! * a small C program with one socket (`mgmt_floor.c`): the time that the kernel itself takes.
//!
//! Deletion with `vdpa_mgmt` includes its search for processes that have the device open.

use super::print_json;
use crate::error::{Error, Result};
use crate::process::output;
use crate::sim::{self, PREFIX};
use launcher::verbs::bench::MgmtArguments;
use serde::Serialize;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use vdpa_mgmt::{Connection, NewDevice};

const MGMTDEV: &str = "vdpasim_net";

const FLOOR_SOURCE: &str = include_str!("mgmt_floor.c");

/// The keys of `--json`. Seconds for all steps of all devices; `ratio` is iproute2's over
/// Bellhop's.
#[derive(Debug, Serialize)]
struct Report {
    devices: u32,
    bellhop_s: f64,
    iproute2_s: f64,
    ratio: f64,
}

pub(super) fn measure(arguments: &MgmtArguments) -> Result<()> {
    sim::require_lab()?;
    let names = Names {
        count: arguments.devices,
    };
    let floor_program = compile_floor()?;
    let bellhop = timed("vdpa_mgmt", || with_library(&names))?;
    let iproute2 = timed("iproute2", || with_iproute2(&names))?;
    timed("C, one socket", || {
        let prefix = format!("{PREFIX}bench-");
        let count = arguments.devices.to_string();
        output(Command::new(&floor_program).args([&prefix, &count])).map(drop)
    })?;
    let report = Report {
        devices: arguments.devices,
        bellhop_s: seconds(bellhop),
        iproute2_s: seconds(iproute2),
        ratio: rounded(iproute2.as_secs_f64() / bellhop.as_secs_f64()),
    };
    eprintln!("  iproute2 takes {} times as long", report.ratio);
    print_json(arguments.common.json, &report)
}

fn timed(what: &str, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let begin = Instant::now();
    work()?;
    let took = begin.elapsed();
    eprintln!("  {what:<16} {:>8.3} s", took.as_secs_f64());
    Ok(took)
}

fn seconds(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64())
}

/// The value to three digits.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// The devices' names. Devices that still exist are deleted at the end.
struct Names {
    count: u32,
}

impl Names {
    fn iter(&self) -> impl Iterator<Item = String> {
        (0..self.count).map(|number| format!("{PREFIX}bench-{number}"))
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        let Ok(connection) = Connection::open() else {
            return;
        };
        let left = connection.devices().unwrap_or_default();
        let ours = format!("{PREFIX}bench-");
        for device in left.iter().filter(|one| one.name.starts_with(&ours)) {
            if let Err(error) = connection.delete(&device.name) {
                eprintln!("lab: {}", crate::error::report(&error));
            }
        }
    }
}

fn with_library(names: &Names) -> Result<()> {
    let failed =
        |error: vdpa_mgmt::Error| Error::invalid("vdpa_mgmt", crate::error::report(&error));
    let connection = Connection::open().map_err(failed)?;
    for name in names.iter() {
        let mgmtdev = MGMTDEV.parse().map_err(failed)?;
        let device = NewDevice::new(&name, mgmtdev).map_err(failed)?;
        connection.add(&device).map_err(failed)?;
    }
    for name in names.iter() {
        connection.device(&name).map_err(failed)?;
    }
    for name in names.iter() {
        connection.delete(&name).map_err(failed)?;
    }
    Ok(())
}

fn with_iproute2(names: &Names) -> Result<()> {
    for name in names.iter() {
        sim::vdpa(&["dev", "add", "name", &name, "mgmtdev", MGMTDEV])?;
    }
    for name in names.iter() {
        sim::vdpa(&["dev", "show", &name])?;
    }
    for name in names.iter() {
        sim::vdpa(&["dev", "del", &name])?;
    }
    Ok(())
}

/// Builds the C program in the lab host and returns its path.
fn compile_floor() -> Result<PathBuf> {
    let directory = std::env::temp_dir();
    let source = directory.join("lab-mgmt-floor.c");
    let program = directory.join("lab-mgmt-floor");
    crate::files::write(&source, FLOOR_SOURCE)?;
    output(
        Command::new("gcc")
            .args(["-O2", "-Wall", "-Werror", "-o"])
            .args([&program, &source]),
    )?;
    Ok(program)
}
