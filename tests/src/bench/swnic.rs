//! `cargo lab bench swnic`: measures guests whose NIC is a tap, by three ways to it.
//!
//! ```text
//!   Bellhop ── vhost-vdpa ── VDUSE ── bellhop swnic ──> tap
//!   QEMU ──── its own virtio-net ─────────────────────> tap
//!   QEMU ──── vhost-net, a thread of the kernel ──────> tap
//! ```
//! All guests have the same kernel, and send as fast as they can. Frames go to an address that no
//! device has, so the host drops them behind the tap. A TCP stream goes to the host or comes from
//! it, in packets that the tap does not segment. Which guest begins changes with each round. The
//! ratio of a round compares two of its parts, and the median of all rounds counts. All guests have
//! shared memory, and may have transparent huge pages in it, which is a setting of the host.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use launcher::verbs::bench::SwnicArguments;
use serde::Serialize;

use super::flood::{LIMIT, flood};
use super::{peer, print_json};
use crate::error::{Error, Result};
use crate::figures::{median, ratios, rounded};
use crate::files;
use crate::guest::{BellhopArguments, Guest};
use crate::process::output;
use crate::swnic::Swnic;
use crate::vmm_process::processor_time;

/// What a guest sends or receives.
#[derive(Debug, Clone, Copy)]
enum Load {
    /// Frames of so many bytes, with their Ethernet header.
    Frames(u32),
    /// A TCP stream to the host, with segmentation offload.
    Sent,
    /// A TCP stream from the host, with segmentation offload.
    Received,
}

const LOADS: [Load; 4] = [
    Load::Frames(64),
    Load::Frames(1514),
    Load::Sent,
    Load::Received,
];

impl Load {
    fn shown(self) -> String {
        match self {
            Self::Frames(bytes) => format!("frames of {bytes} bytes"),
            Self::Sent => "TCP stream to the host".to_owned(),
            Self::Received => "TCP stream from the host".to_owned(),
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Frames(_) => "frames/s",
            Self::Sent | Self::Received => "MiB/s",
        }
    }
}

/// The port to which guests send streams (`tcp-flood` of the guest), and that from which they
/// receive one (`tcp-drain`).
const PORT: u16 = 5000;
const SOURCE_PORT: u16 = 5001;

/// Bytes of one write to a stream.
const PIECE: usize = 1 << 18;

/// Seconds of a stream.
const STREAM: u64 = 4;

/// The host's setting for transparent huge pages in shared memory.
const SHARED_HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// The names of the contenders, whose taps are tap0, tap1, tap2.
const NAMES: [&str; 3] = ["swnic", "QEMU", "QEMU with vhost-net"];

/// The result for one load. Rates are in `unit`.
#[derive(Debug, Serialize)]
struct Compared {
    load: String,
    unit: &'static str,
    swnic: f64,
    qemu: f64,
    vhost: f64,
    /// The rate, divided by QEMU's.
    ratio_qemu: f64,
    ratio_vhost: f64,
    /// Processor time of all processes per frame or MiB, divided by QEMU's.
    time_ratio_qemu: f64,
    time_ratio_vhost: f64,
}

/// The keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    loads: Vec<Compared>,
}

/// A guest, and the processes that serve it.
struct Contender {
    guest: Guest,
    /// The address of the host at its tap.
    host: Ipv4Addr,
    processes: Vec<u32>,
}

/// What a guest did in one part of a round.
#[derive(Debug, Clone, Copy)]
struct Part {
    /// Frames or MiB per second.
    rate: f64,
    /// In microseconds per frame or MiB.
    time: f64,
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
    let by_qemu = |index: u8, vhost: bool| -> Result<Contender> {
        let tap = format!("tap{index}");
        let command = || peer::on_tap(&qemu, &small, &tap, vhost);
        let guest = Guest::start_command(command, LIMIT)?;
        let processes = vec![guest.pid()];
        Contender::connect(guest, processes, index)
    };
    let own = vec![ours.pid(), worker];
    let mut contenders = [
        Contender::connect(ours, own, 0)?,
        by_qemu(1, false)?,
        by_qemu(2, true)?,
    ];
    serve_streams(PORT, |stream| {
        io::copy(&mut { stream }, &mut io::sink()).map(drop)
    })?;
    serve_streams(SOURCE_PORT, |mut stream| {
        let piece = vec![0; PIECE];
        loop {
            stream.write_all(&piece)?;
        }
    })?;
    let mut loads = Vec::new();
    for load in LOADS {
        let mut parts: [Vec<Part>; 3] = Default::default();
        for round in 0..arguments.rounds {
            for turn in 0..3 {
                let first = usize::try_from(round).unwrap_or_default();
                let index = first.wrapping_add(turn) % 3;
                let part = contenders[index].part(load)?;
                eprintln!(
                    "  {}, round {} of {}, {}: {:.0} {}, {:.1} µs of processors for each",
                    load.shown(),
                    round + 1,
                    arguments.rounds,
                    NAMES[index],
                    part.rate,
                    load.unit(),
                    part.time
                );
                parts[index].push(part);
            }
        }
        loads.push(compared(load, &parts));
    }
    for contender in contenders {
        contender.guest.power_off()?;
    }
    drop(swnic);
    show(&loads, arguments.rounds);
    print_json(arguments.common.json, &Report { loads })
}

impl Contender {
    /// Gives addresses to the tap with this number and the guest behind it.
    fn connect(mut guest: Guest, processes: Vec<u32>, index: u8) -> Result<Self> {
        let host = Ipv4Addr::new(10, 77, index, 1);
        let tap = format!("tap{index}");
        let ip = |words: &str| output(Command::new("ip").args(words.split(' ')));
        ip(&format!("addr add {host}/24 dev {tap}"))?;
        ip(&format!("link set {tap} up"))?;
        guest.command(&format!("ip addr add 10.77.{index}.2/24 dev eth0"))?;
        Ok(Self {
            guest,
            host,
            processes,
        })
    }

    fn time(&self) -> Result<Duration> {
        self.processes.iter().map(|&pid| processor_time(pid)).sum()
    }

    /// Lets the guest send for some seconds.
    fn part(&mut self, load: Load) -> Result<Part> {
        let before = self.time()?;
        let (count, rate) = match load {
            Load::Frames(bytes) => {
                let sent = flood(&mut self.guest, bytes)?;
                (f64::from(sent.frames), sent.frames_per_second)
            }
            Load::Sent => self.stream("tcp-flood")?,
            Load::Received => self.stream("tcp-drain")?,
        };
        let spent = self.time()?.saturating_sub(before);
        let time = spent.as_secs_f64() * 1e6 / count;
        Ok(Part { rate, time })
    }

    /// MiB that the guest has sent or received by TCP, and their rate per second.
    fn stream(&mut self, verb: &str) -> Result<(f64, f64)> {
        let line = format!("{verb} {} {STREAM}", self.host);
        let answer = self.guest.command_within(&line, LIMIT)?;
        let number = |key: &str| {
            let number = answer[key]
                .as_u64()
                .and_then(|n| u32::try_from(n >> 10).ok());
            number.filter(|&number| number > 0).map(f64::from)
        };
        // KiB, and units of 1024 µs.
        match (number("bytes"), number("elapsed_us")) {
            (Some(bytes), Some(elapsed)) => {
                let seconds = elapsed * 1024.0 / 1e6;
                Ok((bytes / 1024.0, bytes / 1024.0 / seconds))
            }
            _ => Err(Error::invalid(
                "the guest",
                format!("there was no stream: {answer}"),
            )),
        }
    }
}

/// Serves streams in the background, one after the other, until the guest ends them.
fn serve_streams(port: u16, serve: fn(TcpStream) -> io::Result<()>) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
    let listener = listener.map_err(Error::system("listen for streams"))?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A stream that ends early has no rate, which the guest's answer shows.
            let _ = serve(stream);
        }
    });
    Ok(())
}

fn compared(load: Load, parts: &[Vec<Part>; 3]) -> Compared {
    let all = |of: fn(&Part) -> f64| {
        let values = |parts: &Vec<Part>| parts.iter().map(of).collect::<Vec<f64>>();
        parts.each_ref().map(values)
    };
    let [swnic, qemu, vhost] = &all(|part| part.rate);
    let [time, time_qemu, time_vhost] = &all(|part| part.time);
    let rate = |rates: &Vec<f64>| rounded(median(rates), 0);
    let ratio = |ours, theirs| rounded(median(&ratios(ours, theirs)), 3);
    Compared {
        load: load.shown(),
        unit: load.unit(),
        swnic: rate(swnic),
        qemu: rate(qemu),
        vhost: rate(vhost),
        ratio_qemu: ratio(swnic, qemu),
        ratio_vhost: ratio(swnic, vhost),
        time_ratio_qemu: ratio(time, time_qemu),
        time_ratio_vhost: ratio(time, time_vhost),
    }
}

fn show(loads: &[Compared], rounds: u32) {
    eprintln!();
    eprintln!("  Medians of {rounds} interleaved rounds; a guest behind a tap");
    for load in loads {
        eprintln!("  {}, {}", load.load, load.unit);
        for (what, value) in [
            ("Bellhop with swnic", load.swnic),
            ("QEMU", load.qemu),
            ("QEMU with vhost-net", load.vhost),
            ("swnic / QEMU", load.ratio_qemu),
            ("swnic / vhost-net", load.ratio_vhost),
            ("processor time: swnic / QEMU", load.time_ratio_qemu),
            ("processor time: swnic / vhost-net", load.time_ratio_vhost),
        ] {
            eprintln!("    {what:<34} {value:>10}");
        }
    }
    eprintln!();
}
