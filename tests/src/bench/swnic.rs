//! `cargo lab bench swnic`: measures guests whose NIC is a tap, by three ways to it.
//!
//! ```text
//!   Bellhop ── vhost-vdpa ── VDUSE ── bellhop swnic ──> tap
//!   QEMU ──── its own virtio-net ─────────────────────> tap
//!   QEMU ──── vhost-net, a thread of the kernel ──────> tap
//! ```
//! All guests have the same kernel, and send as fast as they can to an address that no device has.
//! The host drops the frames behind the tap. Which guest begins changes with each round. The ratio
//! of a round compares two of its parts, and the median of all rounds counts. All guests may have
//! transparent huge pages. For QEMU's private memory that is Debian's default. For Bellhop's shared
//! memory it is a setting of the host.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use launcher::verbs::bench::SwnicArguments;
use serde::Serialize;

use super::flood::{LIMIT, flood};
use super::{peer, print_json};
use crate::error::Result;
use crate::figures::{median, ratios, rounded};
use crate::files;
use crate::guest::{BellhopArguments, Guest};
use crate::process::output;
use crate::swnic::Swnic;
use crate::vmm_process::processor_time;

/// Bytes of a frame, with its Ethernet header.
const SIZES: [u32; 2] = [64, 1514];

/// The host's setting for transparent huge pages in shared memory.
const SHARED_HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// The names of the contenders.
const NAMES: [&str; 3] = ["swnic", "QEMU", "QEMU with vhost-net"];

/// The result for one size of frames.
#[derive(Debug, Serialize)]
struct OfSize {
    bytes: u32,
    swnic_fps: f64,
    qemu_fps: f64,
    vhost_fps: f64,
    /// Frames per second, divided by QEMU's.
    ratio_qemu: f64,
    ratio_vhost: f64,
    /// Processor time of all processes per frame, divided by QEMU's.
    time_ratio_qemu: f64,
    time_ratio_vhost: f64,
}

/// The keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    sizes: Vec<OfSize>,
}

/// A guest, and the processes that serve it.
struct Contender {
    guest: Guest,
    processes: Vec<u32>,
}

/// What a guest did in one part of a round.
#[derive(Debug, Clone, Copy)]
struct Part {
    frames_per_second: f64,
    /// In microseconds.
    time_per_frame: f64,
}

/// Measures in the lab host.
///
/// # Errors
/// Those of the helpers; [`Error::Invalid`](crate::error::Error::Invalid) when frames were not
/// sent.
pub(super) fn measure(arguments: &SwnicArguments) -> Result<()> {
    let qemu = peer::qemu()?;
    for module in ["tun", "vhost_net"] {
        output(Command::new("modprobe").arg(module))?;
    }
    files::write(Path::new(SHARED_HUGE_PAGES), "advise")?;
    let small = BellhopArguments::small()?.memory("256M");
    let swnic = Swnic::start("sw0", &["--tap", "tap0"])?;
    let [_, worker] = swnic.processes()?;
    let worker = u32::try_from(worker.as_raw_pid()).unwrap_or_default();
    let ours = Guest::start(&small.vdpa(swnic.path()))?;
    let small = BellhopArguments::small()?;
    let by_qemu = |tap: &str, vhost: bool| -> Result<Contender> {
        let command = || peer::on_tap(&qemu, &small, tap, vhost);
        let guest = Guest::start_command(command, LIMIT)?;
        let processes = vec![guest.pid()];
        Ok(Contender { guest, processes })
    };
    let mut contenders = [
        Contender {
            processes: vec![ours.pid(), worker],
            guest: ours,
        },
        by_qemu("tap1", false)?,
        by_qemu("tap2", true)?,
    ];
    for tap in ["tap0", "tap1", "tap2"] {
        output(Command::new("ip").args(["link", "set", tap, "up"]))?;
    }
    let mut sizes = Vec::new();
    for bytes in SIZES {
        let mut parts: [Vec<Part>; 3] = Default::default();
        for round in 0..arguments.rounds {
            for turn in 0..3 {
                let first = usize::try_from(round).unwrap_or_default();
                let index = first.wrapping_add(turn) % 3;
                let part = part(&mut contenders[index], bytes)?;
                eprintln!(
                    "  {bytes} bytes, round {} of {}, {}: {:.0} frames/s, {:.1} µs of processors \
                     per frame",
                    round + 1,
                    arguments.rounds,
                    NAMES[index],
                    part.frames_per_second,
                    part.time_per_frame
                );
                parts[index].push(part);
            }
        }
        sizes.push(of_size(bytes, &parts));
    }
    for contender in contenders {
        contender.guest.power_off()?;
    }
    drop(swnic);
    show(&sizes, arguments.rounds);
    print_json(arguments.common.json, &Report { sizes })
}

/// Lets a guest send for some seconds.
fn part(contender: &mut Contender, bytes: u32) -> Result<Part> {
    let time = |processes: &[u32]| -> Result<Duration> {
        processes.iter().map(|&pid| processor_time(pid)).sum()
    };
    let before = time(&contender.processes)?;
    let sent = flood(&mut contender.guest, bytes)?;
    let spent = time(&contender.processes)?.saturating_sub(before);
    Ok(Part {
        frames_per_second: sent.frames_per_second,
        time_per_frame: spent.as_secs_f64() * 1e6 / f64::from(sent.frames),
    })
}

fn of_size(bytes: u32, parts: &[Vec<Part>; 3]) -> OfSize {
    let all = |of: fn(&Part) -> f64| {
        let values = |parts: &Vec<Part>| parts.iter().map(of).collect::<Vec<f64>>();
        parts.each_ref().map(values)
    };
    let [swnic, qemu, vhost] = &all(|part| part.frames_per_second);
    let [time, time_qemu, time_vhost] = &all(|part| part.time_per_frame);
    let [swnic_fps, qemu_fps, vhost_fps] =
        [swnic, qemu, vhost].map(|rates| rounded(median(rates), 0));
    let ratio = |ours, theirs| rounded(median(&ratios(ours, theirs)), 3);
    OfSize {
        bytes,
        swnic_fps,
        qemu_fps,
        vhost_fps,
        ratio_qemu: ratio(swnic, qemu),
        ratio_vhost: ratio(swnic, vhost),
        time_ratio_qemu: ratio(time, time_qemu),
        time_ratio_vhost: ratio(time, time_vhost),
    }
}

fn show(sizes: &[OfSize], rounds: u32) {
    eprintln!();
    eprintln!("  Medians of {rounds} interleaved rounds; a guest sends to a tap");
    for of_size in sizes {
        eprintln!("  frames of {} bytes", of_size.bytes);
        for (what, value) in [
            ("Bellhop with swnic, frames/s", of_size.swnic_fps),
            ("QEMU, frames/s", of_size.qemu_fps),
            ("QEMU with vhost-net, frames/s", of_size.vhost_fps),
            ("swnic / QEMU", of_size.ratio_qemu),
            ("swnic / vhost-net", of_size.ratio_vhost),
            ("processor time: swnic / QEMU", of_size.time_ratio_qemu),
            (
                "processor time: swnic / vhost-net",
                of_size.time_ratio_vhost,
            ),
        ] {
            eprintln!("    {what:<34} {value:>10}");
        }
    }
    eprintln!();
}
