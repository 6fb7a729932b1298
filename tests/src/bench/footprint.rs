//! `cargo lab bench footprint`: measures the memory and start-up time of a VMM, beside QEMU's.
//!
//! * Memory outside guest RAM, of a guest with one vDPA NIC. Bellhop: after 10 requests to the API.
//!   QEMU: the same guest, without a monitor.
//! * Processor time from the start of the process. Bellhop: to the open socket and to the first
//!   answer. QEMU: to the monitor's greeting.
//!
//! Memory is the sum of `Rss` in `/proc/PID/smaps` without the mapping of guest RAM. Pages of the
//! program's file count, although all VMMs of a host share them; the report therefore shows the
//! process's private memory beside it. Processor time is that of all threads (`schedstat`), user
//! and kernel, from the exec of the program. For QEMU the greeting counts, because QEMU's socket is
//! open long before QEMU serves a client.

use super::peer::{self, Nic};
use super::print_json;
use crate::api::Client;
use crate::error::{Error, Result};
use crate::figures::{median, milliseconds, ratio, rounded};
use crate::guest::{BellhopArguments, Guest};
use crate::process::die_with_parent;
use crate::schedstat;
use crate::sim::{self, SimDevice};
use crate::temp_path::TempPath;
use crate::vmm_process::{self, Resident};
use launcher::verbs::bench::FootprintArguments;
use serde::Serialize;
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The NIC's MAC address. No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:57:01";

/// Requests to the API before memory is read, one of each kind in turn.
const REQUESTS: [&str; 10] = [
    "/v1/vm",
    "/v1/vm/config",
    "/v1/vm/nics",
    "/v1/vm/disks",
    "/v1/metrics",
    "/v1/vm",
    "/v1/vm/config",
    "/v1/vm/nics",
    "/v1/vm/disks",
    "/v1/metrics",
];

/// How long a boot may be silent, and how long a socket may take to open.
const SILENCE: Duration = Duration::from_secs(60);
const OPEN_LIMIT: Duration = Duration::from_secs(30);

pub(super) fn measure(arguments: &FootprintArguments) -> Result<()> {
    sim::require_lab()?;
    let qemu = peer::qemu()?;
    let mut measured = Measured::default();
    for round in 0..arguments.rounds {
        eprintln!("  round {} of {} …", round + 1, arguments.rounds);
        let (open, answered) = bellhop_start()?;
        measured.open.push(milliseconds(open));
        measured.answered.push(milliseconds(answered));
        measured.greeted.push(milliseconds(qemu_start(&qemu)?));
        if round % 3 == 0 {
            measured.bellhop.push(bellhop_guest()?);
            measured.qemu.push(qemu_guest(&qemu)?);
        }
    }
    let report = measured.report(arguments.rounds);
    report.show();
    print_json(arguments.common.json, &report)
}

/// Figures of each round: milliseconds, and memory.
#[derive(Debug, Default)]
struct Measured {
    open: Vec<f64>,
    answered: Vec<f64>,
    greeted: Vec<f64>,
    bellhop: Vec<Resident>,
    qemu: Vec<Resident>,
}

/// The keys of `--json`: medians.
#[derive(Debug, Serialize)]
struct Report {
    rounds: u32,
    rss_outside_ram_mb: f64,
    own_outside_ram_mb: f64,
    rss_outside_ram_mb_qemu: f64,
    own_outside_ram_mb_qemu: f64,
    rss_ratio: f64,
    cpu_ms_to_open_socket: f64,
    cpu_ms_to_first_answer: f64,
    cpu_ms_to_greeting_qemu: f64,
    cpu_ratio: f64,
}

impl Measured {
    fn report(&self, rounds: u32) -> Report {
        let all = |of: &[Resident]| megabytes(of, |one| one.all_kib);
        let own = |of: &[Resident]| megabytes(of, |one| one.own_kib);
        let (answered, greeted) = (median(&self.answered), median(&self.greeted));
        Report {
            rounds,
            rss_outside_ram_mb: rounded(all(&self.bellhop), 2),
            own_outside_ram_mb: rounded(own(&self.bellhop), 2),
            rss_outside_ram_mb_qemu: rounded(all(&self.qemu), 2),
            own_outside_ram_mb_qemu: rounded(own(&self.qemu), 2),
            rss_ratio: rounded(ratio(all(&self.bellhop), all(&self.qemu)), 3),
            cpu_ms_to_open_socket: rounded(median(&self.open), 2),
            cpu_ms_to_first_answer: rounded(answered, 2),
            cpu_ms_to_greeting_qemu: rounded(greeted, 2),
            cpu_ratio: rounded(ratio(answered, greeted), 3),
        }
    }
}

/// The median in megabytes (10^6 bytes).
fn megabytes(of: &[Resident], part: fn(&Resident) -> u64) -> f64 {
    let values: Vec<f64> = of
        .iter()
        // A process with more than 4 TiB is not one of ours.
        .map(|one| f64::from(u32::try_from(part(one)).unwrap_or(u32::MAX)) * 1024.0 / 1e6)
        .collect();
    median(&values)
}

impl Report {
    fn show(&self) {
        eprintln!();
        eprintln!("  {:<52} {:>9} {:>9}", "", "Bellhop", "QEMU");
        for (what, ours, theirs) in [
            (
                "memory outside guest RAM, MB",
                self.rss_outside_ram_mb,
                Some(self.rss_outside_ram_mb_qemu),
            ),
            (
                "  of it the process's own",
                self.own_outside_ram_mb,
                Some(self.own_outside_ram_mb_qemu),
            ),
            (
                "processor time to the open API socket, ms",
                self.cpu_ms_to_open_socket,
                None,
            ),
            (
                "  to its first answer (QEMU: the monitor's greeting)",
                self.cpu_ms_to_first_answer,
                Some(self.cpu_ms_to_greeting_qemu),
            ),
        ] {
            let theirs = theirs.map_or_else(|| "-".to_owned(), |theirs| format!("{theirs:.2}"));
            eprintln!("  {what:<52} {ours:>9.2} {theirs:>9}");
        }
        eprintln!();
    }
}

/// The resident memory of Bellhop with a guest, after 10 requests.
fn bellhop_guest() -> Result<Resident> {
    let device = SimDevice::net("footprint", MAC, 1500)?;
    let socket = TempPath::new("footprint-bellhop");
    let arguments = BellhopArguments::small()?
        .vdpa(device.path())
        .argument("--api-socket", socket.text());
    let guest = Guest::start(&arguments)?;
    let client = Client::new(socket.path());
    for path in REQUESTS {
        client.get(path)?;
    }
    let resident = vmm_process::resident(guest.pid())?;
    guest.power_off()?;
    Ok(resident)
}

/// The resident memory of QEMU with the same guest.
fn qemu_guest(program: &Path) -> Result<Resident> {
    let device = SimDevice::net("footprint", MAC, 1500)?;
    let arguments = BellhopArguments::small()?;
    let nic = Nic {
        device: device.path(),
        mac: MAC,
        shadowed: false,
        iommu: false,
    };
    let guest = Guest::start_command(|| peer::command(program, &arguments, nic), SILENCE)?;
    let resident = vmm_process::resident(guest.pid())?;
    guest.power_off()?;
    Ok(resident)
}

/// Processor time of Bellhop until its socket accepts connections, and until it has answered.
fn bellhop_start() -> Result<(Duration, Duration)> {
    let socket = TempPath::new("footprint-start");
    let program = std::env::var_os("BELLHOP")
        .ok_or_else(|| Error::missing("BELLHOP is not set", "run it with `cargo lab bench`"))?;
    let mut command = Command::new(program);
    command.arg("run").arg("--api-socket").arg(socket.path());
    let process = Process::start(command)?;
    drop(process.connect(socket.path())?);
    let open = process.ran()?;
    Client::new(socket.path()).get("/v1/vm")?;
    Ok((open, process.ran()?))
}

/// Processor time of QEMU until its monitor greets.
fn qemu_start(program: &Path) -> Result<Duration> {
    let socket = TempPath::new("footprint-monitor");
    let process = Process::start(peer::waiting(program, socket.path()))?;
    let mut monitor = process.connect(socket.path())?;
    monitor
        .set_read_timeout(Some(OPEN_LIMIT))
        .map_err(Error::file("set a limit for", socket.path()))?;
    monitor
        .read_exact(&mut [0])
        .map_err(Error::file("read from", socket.path()))?;
    process.ran()
}

/// A VMM without a guest. Dropping it kills the process.
struct Process(Child);

impl Process {
    fn start(mut command: Command) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        let child = die_with_parent(&mut command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|source| Error::Start { program, source })?;
        Ok(Self(child))
    }

    /// Waits until the process listens.
    fn connect(&self, socket: &Path) -> Result<UnixStream> {
        let deadline = Instant::now() + OPEN_LIMIT;
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => return Ok(stream),
                Err(error) if Instant::now() > deadline => {
                    return Err(Error::file("connect to", socket)(error));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Processor time of all its threads.
    fn ran(&self) -> Result<Duration> {
        let accounts = schedstat::accounts(self.0.id())?;
        Ok(accounts.values().map(|one| one.ran).sum())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has already ended is no error.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_medians_in_megabytes() {
        let resident = |all_kib| Resident {
            all_kib,
            own_kib: all_kib / 2,
        };
        let measured = Measured {
            open: vec![3.0, 1.0, 2.0],
            answered: vec![4.0],
            greeted: vec![40.0],
            bellhop: vec![resident(5000)],
            qemu: vec![resident(50_000)],
        };
        let report = measured.report(3);
        assert_eq!(report.cpu_ms_to_open_socket.to_string(), "2");
        assert_eq!(report.rss_outside_ram_mb.to_string(), "5.12");
        assert_eq!(report.own_outside_ram_mb.to_string(), "2.56");
        assert_eq!(report.rss_ratio.to_string(), "0.1");
        assert_eq!(report.cpu_ratio.to_string(), "0.1");
    }
}
