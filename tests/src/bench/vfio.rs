//! `cargo lab bench vfio`: measures the same kind of virtual function by VFIO and by vDPA.
//!
//! ```text
//!   functions of one NIC:  one by VFIO in Bellhop, one by VFIO in QEMU, one by vDPA in Bellhop
//!   a round:               each guest sends for some seconds while the others rest
//! ```
//! All guests have the same kernel, and send as fast as they can to an address that no device has.
//! Each contender has each function in a third of the rounds: the functions are not equally fast.
//! Which of them begins changes with each round. The ratio of a round compares two of its parts,
//! and the median of all rounds counts.

use std::path::Path;
use std::process::Command;

use launcher::verbs::bench::VfioArguments;
use serde::Serialize;

use super::flood::{LIMIT, flood};
use super::{peer, print_json, processors};
use crate::error::Result;
use crate::figures::{median, ratios, rounded};
use crate::guest::{BellhopArguments, Guest};
use crate::kvm_statistics;
use crate::process::output;
use crate::sriov::{SriovNic, VfDevice, VirtualFunction};

/// Bytes of a frame, with its Ethernet header.
const SIZE: u32 = 64;

/// The names of the contenders.
const NAMES: [&str; 3] = ["VFIO", "VFIO, QEMU", "vDPA"];

/// The keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    vfio_fps: f64,
    vfio_qemu_fps: f64,
    vdpa_fps: f64,
    /// Bellhop's VFIO divided by QEMU's, and vDPA divided by VFIO.
    vfio_ratio_qemu: f64,
    vdpa_ratio: f64,
    /// All VM exits while a guest sends.
    exits_per_frame_vfio: f64,
    exits_per_frame_vdpa: f64,
}

/// What a guest did in one part of a round.
#[derive(Debug, Clone, Copy)]
struct Part {
    frames_per_second: f64,
    /// `None`: the VMM does not report them.
    exits_per_frame: Option<f64>,
}

/// Measures in the lab host.
///
/// # Errors
/// Those of the helpers; [`Error::Invalid`](crate::error::Error::Invalid) when frames were not
/// sent.
pub(super) fn measure(arguments: &VfioArguments) -> Result<()> {
    let qemu = peer::qemu()?;
    let nic = SriovNic::enable(3)?;
    output(Command::new("modprobe").arg("vfio-pci"))?;
    let _interrupts = processors::separate()?;
    let rounds = usize::try_from(arguments.rounds).unwrap_or(usize::MAX);
    let mut parts: [Vec<Part>; 3] = Default::default();
    for shift in 0..3 {
        let function = |contender| nic.vf((shift + contender) % 3);
        let (ours, theirs) = (function(0)?, function(1)?);
        for function in [&ours, &theirs] {
            function.bind("vfio-pci")?;
        }
        let device = VfDevice::add(function(2)?)?;
        let mut guests = guests(&qemu, &ours, &theirs, &device)?;
        for round in (shift..rounds).step_by(3) {
            for turn in 0..3 {
                let index = (round / 3 + turn) % 3;
                let part = part(&mut guests[index], index != 1)?;
                eprintln!(
                    "  round {} of {rounds}, {}: {:.0} frames/s",
                    round + 1,
                    NAMES[index],
                    part.frames_per_second
                );
                parts[index].push(part);
            }
        }
        for guest in guests {
            guest.power_off()?;
        }
        for function in [&ours, &theirs] {
            function.bind("virtio-pci")?;
        }
    }
    let report = report(&parts);
    show(&report, arguments.rounds);
    print_json(arguments.common.json, &report)
}

/// Boots a guest for each contender.
fn guests(
    qemu: &Path,
    ours: &VirtualFunction<'_>,
    theirs: &VirtualFunction<'_>,
    device: &VfDevice<'_>,
) -> Result<[Guest; 3]> {
    let small = BellhopArguments::small()?;
    let bellhop = |option: &str, value: &str| {
        let arguments = small.clone().argument(option, value);
        Guest::start(&arguments.argument("--log-level", "info"))
    };
    let passed = || peer::passed_through(qemu, &small, theirs.address());
    Ok([
        bellhop("--vfio", &format!("host={}", ours.address()))?,
        Guest::start_command(passed, LIMIT)?,
        bellhop("--vdpa", &format!("path={}", device.path().display()))?,
    ])
}

/// Lets a guest send for some seconds.
fn part(guest: &mut Guest, reports_exits: bool) -> Result<Part> {
    let exits = |guest: &Guest| -> Result<Option<u64>> {
        if !reports_exits {
            return Ok(None);
        }
        Ok(kvm_statistics::read(guest)?.get("exits").copied())
    };
    let before = exits(guest)?;
    let sent = flood(guest, SIZE)?;
    let after = exits(guest)?;
    let exits = after.zip(before);
    let exits = exits.map(|(after, before)| u32::try_from(after.saturating_sub(before)));
    Ok(Part {
        frames_per_second: sent.frames_per_second,
        exits_per_frame: exits
            .map(|exits| f64::from(exits.unwrap_or(u32::MAX)) / f64::from(sent.frames)),
    })
}

fn report(parts: &[Vec<Part>; 3]) -> Report {
    let rates = parts.each_ref().map(|parts| {
        let rates = parts.iter().map(|part| part.frames_per_second);
        rates.collect::<Vec<_>>()
    });
    let exits = |parts: &[Part]| {
        let exits: Vec<f64> = parts
            .iter()
            .filter_map(|part| part.exits_per_frame)
            .collect();
        rounded(median(&exits), 3)
    };
    let [vfio, qemu, vdpa] = &rates;
    let [vfio_fps, vfio_qemu_fps, vdpa_fps] =
        [vfio, qemu, vdpa].map(|rates| rounded(median(rates), 0));
    Report {
        vfio_fps,
        vfio_qemu_fps,
        vdpa_fps,
        vfio_ratio_qemu: rounded(median(&ratios(vfio, qemu)), 3),
        vdpa_ratio: rounded(median(&ratios(vdpa, vfio)), 3),
        exits_per_frame_vfio: exits(&parts[0]),
        exits_per_frame_vdpa: exits(&parts[2]),
    }
}

fn show(report: &Report, rounds: u32) {
    eprintln!();
    eprintln!("  Medians of {rounds} interleaved rounds; frames of {SIZE} bytes");
    for (what, value) in [
        ("by VFIO, frames/s", report.vfio_fps),
        ("by VFIO in QEMU, frames/s", report.vfio_qemu_fps),
        ("by vDPA, frames/s", report.vdpa_fps),
        ("VFIO: Bellhop / QEMU", report.vfio_ratio_qemu),
        ("vDPA / VFIO", report.vdpa_ratio),
        ("by VFIO, exits per frame", report.exits_per_frame_vfio),
        ("by vDPA, exits per frame", report.exits_per_frame_vdpa),
    ] {
        eprintln!("  {what:<28} {value:>10}");
    }
    eprintln!();
}
