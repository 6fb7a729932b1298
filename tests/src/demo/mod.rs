//! `cargo lab demo` inside the lab host: the main job, end to end.
//!
//! On the rig *sim*, it creates a vDPA device on the kernel's simulator and boots a Linux guest
//! with it as its NIC. It sends 1,000 checked frames and reports the cost. On *sriov*, two guests
//! exchange frames (`demo/sriov.rs`). With `--vfio` one of them also has a function by VFIO
//! (`demo/vfio.rs`). On *vduse*, two guests have NICs without hardware (`demo/vduse.rs`). Guests
//! run Debian's stock kernel from the lab host's root.

mod sriov;
mod vduse;
mod vfio;

use crate::bench::print_json;
use crate::error::{Error, Result};
use crate::guest::{BellhopArguments, Guest};
use crate::rig::Rig;
use crate::sim::SimDevice;
use crate::vmm_process;
use clap::Parser;
use launcher::verbs::demo::DemoArguments;
use serde::Serialize;
use serde_json::Value;
use std::process::ExitCode;

/// The attributes of the device, which the guest must find.
const MAC: &str = "02:4c:61:62:53:2a";
const MTU: u16 = 1400;
/// Frames, their size in bytes, and how many may be in flight at once.
const FRAMES: u64 = 1000;
const FRAME_BYTES: u32 = 512;
const WINDOW: u32 = 32;

#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    demo: DemoArguments,
}

/// The demo's measurements; the keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    /// The guest's own view.
    mac: String,
    mtu: u64,
    /// Counted by the guest's test program, without its own outgoing copies.
    frames_tx: u64,
    frames_rx: u64,
    /// Counted by the device (`vdpa dev vstats`).
    vstats_tx: u64,
    vstats_rx: u64,
    /// The guest's uptime when its init was ready.
    guest_up_ms: u64,
    /// From the start of the VMM's process to the start of the guest's clock.
    vmm_start_ms: u64,
    /// Resident memory of the VMM's process, without guest RAM (smaps).
    rss_outside_ram_kib: u64,
    /// Threads of the VMM's process, without kernel workers.
    vmm_threads: u64,
    /// Frames that the guest sent and did not get back, and the device's counts of errors and
    /// overruns.
    dropped: u64,
}

/// Runs the scenario that the command line names.
pub fn main() -> ExitCode {
    let Arguments { demo } = Arguments::parse();
    let shown = match demo.rig {
        Rig::Sim => scenario(demo.json),
        Rig::Sriov if demo.vfio => vfio::scenario(demo.json),
        Rig::Sriov => sriov::scenario(demo.json),
        Rig::Vduse => vduse::scenario(demo.json),
        Rig::Labnic => Err(Error::Usage(
            "the demo has no part for the rig labnic".into(),
        )),
    };
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab: {}", crate::error::report(&error));
            ExitCode::FAILURE
        }
    }
}

/// Prints one progress line on standard error: standard output is for the result.
fn say(what: &str, text: &str) {
    for (number, line) in text.lines().enumerate() {
        let what = if number == 0 { what } else { "" };
        eprintln!("{what:>12}  {line}");
    }
}

fn scenario(json: bool) -> Result<()> {
    let device = SimDevice::net("demo", MAC, MTU)?;
    say(
        "vDPA device",
        &format!(
            "vdpa dev add name {} mgmtdev vdpasim_net mac {MAC} mtu {MTU}\n{}",
            device.name(),
            device.path().display()
        ),
    );

    let arguments = BellhopArguments::stock()?
        .memory("256M")
        .processors(1)
        .cmdline("loglevel=6")
        .vdpa(device.path())
        .show("guest |");
    say("start", &command_line(&arguments));
    let mut guest = Guest::start(&arguments)?;
    let up = number(guest.ready(), "uptime_ms")?;
    say(
        "",
        &format!("init is ready {up} ms after the guest's clock began"),
    );

    let link = guest.command("link")?;
    say("guest's view", link["text"].as_str().unwrap_or_default());
    let nic = &link["nics"][0];
    let (mac, mtu) = (text(nic, "mac")?, number(nic, "mtu")?);
    expect("the MAC address in the guest", &mac, &MAC.to_owned())?;
    expect("the MTU in the guest", &mtu, &u64::from(MTU))?;

    say(
        "frames",
        &format!("{FRAMES} frames of {FRAME_BYTES} random bytes, looped back by the device …"),
    );
    let frames = guest.command(&format!("frames {FRAMES} {FRAME_BYTES} {WINDOW}"))?;
    let (frames_tx, frames_rx) = (number(&frames, "tx")?, number(&frames, "rx")?);
    let took = number(&frames, "elapsed_us")? / 1000;
    let corrupt = number(&frames, "corrupt")?;
    say(
        "",
        &format!("sent {frames_tx}, received {frames_rx}, corrupt {corrupt}, in {took} ms"),
    );
    let (receive, transmit) = (device.vstats(0)?, device.vstats(1)?);
    let vstats_rx = number(&receive, "rx packets")?;
    let vstats_tx = number(&transmit, "tx packets")?;
    say(
        "the device",
        &format!("counted {vstats_tx} transmitted, {vstats_rx} received (vdpa dev vstats)"),
    );
    expect("corrupt frames", &corrupt, &0)?;
    expect("frames received", &frames_rx, &FRAMES)?;
    expect("frames the device transmitted", &vstats_tx, &frames_tx)?;
    expect("frames the device received", &vstats_rx, &frames_rx)?;

    let cost = vmm_process::cost(guest.pid())?;
    let ready_after = u64::try_from(guest.ready_after().as_millis()).unwrap_or(u64::MAX);
    let status = guest.power_off()?;
    say("power off", &status.to_string());
    expect("the VMM's exit", &status.code(), &Some(0))?;

    let report = Report {
        mac,
        mtu,
        frames_tx,
        frames_rx,
        vstats_tx,
        vstats_rx,
        guest_up_ms: up,
        vmm_start_ms: ready_after.saturating_sub(up),
        rss_outside_ram_kib: cost.rss_outside_ram_kib,
        vmm_threads: cost.threads,
        dropped: frames_tx.saturating_sub(frames_rx) + failures(&receive) + failures(&transmit),
    };
    table(&rows(&report));
    print_json(json, &report)
}

fn command_line(arguments: &BellhopArguments) -> String {
    let command = arguments.command();
    let mut line = "bellhop".to_owned();
    for argument in command.get_args().map(|one| one.to_string_lossy()) {
        let quoted = argument.contains(' ');
        line.push(' ');
        line.push_str(&if quoted {
            format!("{argument:?}")
        } else {
            argument.into_owned()
        });
    }
    line
}

fn table(rows: &[(&str, String)]) {
    eprintln!();
    for (what, value) in rows {
        eprintln!("  {what:<40} {value:>14}");
    }
    eprintln!();
}

fn rows(report: &Report) -> [(&'static str, String); 7] {
    [
        (
            "frames sent / received by the guest",
            format!("{} / {}", report.frames_tx, report.frames_rx),
        ),
        (
            "counted by the device",
            format!("{} / {}", report.vstats_tx, report.vstats_rx),
        ),
        ("dropped", report.dropped.to_string()),
        (
            "VMM start to guest's first instruction",
            format!("{} ms", report.vmm_start_ms),
        ),
        (
            "guest's first instruction to init",
            format!("{} ms", report.guest_up_ms),
        ),
        (
            "VMM memory outside guest RAM",
            format!("{} KiB", report.rss_outside_ram_kib),
        ),
        ("VMM threads (1 vCPU)", report.vmm_threads.to_string()),
    ]
}

/// The device's counts of events that should not have happened.
fn failures(vstats: &Value) -> u64 {
    vstats.as_object().map_or(0, |fields| {
        fields
            .iter()
            .filter(|(name, _)| {
                ["errors", "overruns", "drops"]
                    .iter()
                    .any(|kind| name.ends_with(kind))
            })
            .filter_map(|(_, value)| value.as_u64())
            .sum()
    })
}

fn number(value: &Value, name: &str) -> Result<u64> {
    value[name]
        .as_u64()
        .ok_or_else(|| Error::invalid(value.to_string(), format!("it has no number {name:?}")))
}

fn text(value: &Value, name: &str) -> Result<String> {
    value[name]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| Error::invalid(value.to_string(), format!("it has no {name}")))
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, wanted: &T) -> Result<()> {
    if got == wanted {
        Ok(())
    } else {
        Err(Error::invalid(
            what,
            format!("it is {got:?} and should be {wanted:?}"),
        ))
    }
}
