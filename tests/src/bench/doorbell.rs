//! `cargo lab bench doorbell`: measures the cost of a kick in VM exits.
//!
//! It boots the same guest twice on the same device. With `doorbell=on`, a kick is a store in the
//! device's page; with `doorbell=off`, it is an ioeventfd. The sender is paced, so that each frame
//! is one kick (under a flood, event suppression hides kicks in both cases). Over the same frames,
//! the benchmark counts:
//!
//! * exits to the addresses of the notify BAR, by KVM's tracepoints;
//! * all exits of the guest, by KVM's statistics. A command that sends no frame measures the
//!   command's own cost (the console is a serial port), which is subtracted.
//!
//! A few frames go first: at the first store to a page the host looks the page up, once in the VM's
//! life.

use super::print_json;
use crate::error::{Error, Result};
use crate::guest::{BellhopArguments, Guest};
use crate::kvm_events::AddressExits;
use crate::kvm_statistics;
use crate::rig::Rig;
use crate::sim::SimDevice;
use crate::sriov::{SriovNic, VfDevice};
use launcher::verbs::bench::DoorbellArguments;
use serde::Serialize;
use serde_json::Value;
use std::path::Path;

/// Bytes of a frame, and the pause between two frames in microseconds.
const FRAME_BYTES: u32 = 128;
const PAUSE_US: u32 = 2000;

/// Frames sent before the measurement.
const WARM_UP: u32 = 20;

/// The MAC address of the device that is created where the rig has none.
const MAC: &str = "02:00:5e:00:53:2b";

/// The keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    frames: u32,
    kick_exits_per_frame: f64,
    kick_exits_per_frame_ioeventfd: f64,
    total_exits_per_frame: f64,
    total_exits_per_frame_ioeventfd: f64,
}

/// The counts of one mode.
#[derive(Debug, Clone, Copy)]
struct Counted {
    kick_exits: u64,
    total_exits: u64,
}

/// Measures in the lab host.
///
/// # Errors
/// Those of the helpers; [`Error::Invalid`] when a frame was not sent.
pub(super) fn measure(arguments: &DoorbellArguments) -> Result<()> {
    match arguments.rig {
        Rig::Sim | Rig::Vduse => Err(Error::missing(
            "devices in software have no doorbells",
            "say --rig sriov or --rig labnic",
        )),
        Rig::Sriov => {
            let nic = SriovNic::enable(1)?;
            let device = VfDevice::add(nic.vf(0)?)?;
            compare(arguments, device.path())
        }
        Rig::Labnic => {
            let device = SimDevice::add("bench", "labnic", &["mac", MAC])?;
            compare(arguments, device.path())
        }
    }
}

fn compare(arguments: &DoorbellArguments, device: &Path) -> Result<()> {
    let frames = arguments.frames;
    let mapped = run(device, "on", frames)?;
    let ioeventfd = run(device, "off", frames)?;
    let report = Report {
        frames,
        kick_exits_per_frame: per_frame(mapped.kick_exits, frames),
        kick_exits_per_frame_ioeventfd: per_frame(ioeventfd.kick_exits, frames),
        total_exits_per_frame: per_frame(mapped.total_exits, frames),
        total_exits_per_frame_ioeventfd: per_frame(ioeventfd.total_exits, frames),
    };
    eprintln!();
    eprintln!(
        "  {:<34} {:>12} {:>12}",
        "per frame", "doorbell", "ioeventfd"
    );
    for (what, one, other) in [
        (
            "exits for kicks",
            report.kick_exits_per_frame,
            report.kick_exits_per_frame_ioeventfd,
        ),
        (
            "exits for everything",
            report.total_exits_per_frame,
            report.total_exits_per_frame_ioeventfd,
        ),
    ] {
        eprintln!("  {what:<34} {one:>12.3} {other:>12.3}");
    }
    eprintln!();
    print_json(arguments.common.json, &report)
}

/// Exits per frame, to three digits.
fn per_frame(exits: u64, frames: u32) -> f64 {
    let thousandths = exits
        .saturating_mul(1000)
        .checked_div(u64::from(frames))
        .and_then(|value| u32::try_from(value).ok());
    thousandths.map_or(f64::INFINITY, |value| f64::from(value) / 1000.0)
}

/// Runs one guest in one mode.
fn run(device: &Path, doorbell: &str, frames: u32) -> Result<Counted> {
    eprintln!("  doorbell={doorbell}: {frames} frames …");
    let options = format!("path={},doorbell={doorbell}", device.display());
    let arguments = BellhopArguments::small()?
        .argument("--vdpa", &options)
        .argument("--log-level", "info");
    // Dropped after the guest.
    let kicks = AddressExits::prepare()?;
    let mut guest = Guest::start(&arguments)?;
    let notify = guest.command("notify")?;
    let (address, length) = (number(&notify, "address")?, number(&notify, "length")?);
    send(&mut guest, WARM_UP)?;
    let (_, command_alone) = exits_of(&mut guest, 0)?;

    kicks.watch(&(address..address.saturating_add(length)))?;
    let (sent, total) = exits_of(&mut guest, frames)?;
    let kick_exits = kicks.count()?;
    let counted = number(&sent["statistics"], "tx_packets")?;
    if counted != u64::from(frames) {
        return Err(Error::invalid(
            "the guest's NIC",
            format!("it sent {counted} of {frames} frames"),
        ));
    }
    guest.power_off()?;
    Ok(Counted {
        kick_exits,
        total_exits: total.saturating_sub(command_alone),
    })
}

/// Sends frames and returns the number of exits.
fn exits_of(guest: &mut Guest, frames: u32) -> Result<(Value, u64)> {
    let exits = |guest: &Guest| -> Result<u64> {
        kvm_statistics::read(guest)?
            .get("exits")
            .copied()
            .ok_or_else(|| Error::invalid("KVM's statistics", "they have no \"exits\""))
    };
    let before = exits(guest)?;
    let sent = send(guest, frames)?;
    Ok((sent, exits(guest)?.saturating_sub(before)))
}

fn send(guest: &mut Guest, frames: u32) -> Result<Value> {
    guest.command(&format!("pace {frames} {FRAME_BYTES} {PAUSE_US}"))
}

fn number(value: &Value, name: &str) -> Result<u64> {
    value[name]
        .as_u64()
        .ok_or_else(|| Error::invalid(value.to_string(), format!("it has no number {name:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        assert_eq!(per_frame(0, 1000).to_string(), "0");
        assert_eq!(per_frame(1003, 1000).to_string(), "1.003");
        assert_eq!(per_frame(1, 3).to_string(), "0.333");
    }
}
