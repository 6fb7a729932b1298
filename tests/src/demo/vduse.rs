//! The demo without hardware: two guests on one bridge, each with a NIC that `bellhop run` creates.
//!
//! The lab host has only modules of Debian's kernel. 1,000 checked frames go from one guest to the
//! other and back. Then both guests switch off, and their NICs are gone. It runs in the lab host.

use super::sriov::{FRAMES, exchange, mac_in};
use super::{command_line, expect, number, say, table};
use crate::bench::print_json;
use crate::error::{Error, Result};
use crate::guest::{BellhopArguments, Guest};
use crate::process::output;
use serde::Serialize;
use std::process::Command;

const BRIDGE: &str = "br0";

/// The demo's measurements; the keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    /// The guests' own view.
    mac: [String; 2],
    /// Counted by the first guest: frames that it sent, and frames that returned to it.
    frames_tx: u64,
    frames_rx: u64,
    corrupt: u64,
    /// From the first frame to the last, there and back.
    exchange_ms: u64,
}

/// Runs the demo in the lab host.
///
/// # Errors
/// Those of the helpers, and [`Error::Invalid`] for an unexpected result.
pub(super) fn scenario(json: bool) -> Result<()> {
    for words in [
        format!("link add {BRIDGE} type bridge"),
        format!("link set {BRIDGE} up"),
    ] {
        say("", &format!("ip {words}"));
        output(Command::new("ip").args(words.split(' ')))?;
    }
    let mut first = start("guest 1 |")?;
    let mut second = start("guest 2 |")?;
    let mac = [mac_in(&mut first)?, mac_in(&mut second)?];

    let (frames, echoed) = exchange(&mut first, &mut second, &mac[1])?;
    let report = Report {
        mac,
        frames_tx: number(&frames, "tx")?,
        frames_rx: number(&frames, "rx")?,
        corrupt: number(&frames, "corrupt")? + number(&echoed, "corrupt")?,
        exchange_ms: number(&frames, "elapsed_us")? / 1000,
    };
    expect("corrupt frames", &report.corrupt, &0)?;
    expect("frames that came back", &report.frames_rx, &FRAMES)?;

    for guest in [first, second] {
        let status = guest.power_off()?;
        say("power off", &status.to_string());
        expect("the VMM's exit", &status.code(), &Some(0))?;
    }
    let left = std::fs::read_dir("/sys/bus/vdpa/devices").map_err(Error::system("list devices"))?;
    expect("vDPA devices that are left", &left.count(), &0)?;
    table(&[
        (
            "frames sent / received / corrupt",
            format!(
                "{} / {} / {}",
                report.frames_tx, report.frames_rx, report.corrupt
            ),
        ),
        ("there and back", format!("{} ms", report.exchange_ms)),
    ]);
    print_json(json, &report)
}

fn start(prefix: &'static str) -> Result<Guest> {
    let arguments = BellhopArguments::stock()?
        .memory("256M")
        .argument("--nic", &format!("bridge={BRIDGE}"))
        .show(prefix);
    say("start", &command_line(&arguments));
    Guest::start(&arguments)
}
