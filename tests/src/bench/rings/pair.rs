//! Two lab NICs on the module's switch: measures what relaying costs in frames per second, and how
//! long a change of strategy takes.
//!
//! The rings of one NIC, "the guest", are relayed; its peer is direct. Both send all they can
//! to the other, so each figure is the sum of both directions. Shadowing covers both of the guest's
//! queues; used-ring shadowing covers its receive queue, as in a migration. The NIC completes at
//! once and is kicked by eventfd. A doorbell would have to be polled, on one of the two processors
//! that the traffic needs.

use std::fs::File;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use vdpa::memory::GuestMemory;
use vdpa::relay::Strategy;
use vm_memory::{FileOffset, GuestAddress};

use super::failed;
use super::station::Station;
use super::traffic::{Demand, Traffic};
use crate::error::{Error, Result};
use crate::figures::{median, microseconds_each, milliseconds, per_second, ratios};
use crate::labnic::Labnic;
use crate::sim::SimDevice;

/// The compared strategies, in the order of a round.
pub(super) const STRATEGIES: [Strategy; 3] =
    [Strategy::Direct, Strategy::UsedShadow, Strategy::FullShadow];

/// The measured time of a strategy, and the settling time before it.
const ROUND: Duration = Duration::from_millis(400);
const SETTLE: Duration = Duration::from_millis(50);

/// Traffic between two changes.
const BETWEEN: Duration = Duration::from_millis(15);
/// Traffic that rests for longer than this has stalled.
const LONGEST: Duration = Duration::from_secs(15);

/// All six changes between strategies. The path begins and ends direct.
const WAY: [Strategy; 6] = [
    Strategy::UsedShadow,
    Strategy::FullShadow,
    Strategy::Direct,
    Strategy::FullShadow,
    Strategy::UsedShadow,
    Strategy::Direct,
];

/// Fields are dropped in this order: the traffic before its rings, these before the devices.
#[derive(Debug)]
struct Pair {
    traffic: Traffic,
    guest: Station,
    _second: Station,
    _devices: [SimDevice; 2],
}

fn load() -> Result<Labnic> {
    Labnic::load(&[("doorbell", "0"), ("completion", "immediate")])
}

impl Pair {
    /// Starts the two devices `number`, the guest's with `ram` mapped.
    fn start(module: &Labnic, number: usize, ram: Option<&GuestMemory>) -> Result<Self> {
        let add = |role: &str, of: usize| {
            let mac = format!("02:00:5e:00:53:{:02x}", 0x40 + 2 * number + of);
            module.add(&format!("rings-{role}{number}"), &["mac", &mac])
        };
        let devices = [add("guest", 0)?, add("peer", 1)?];
        let (guest, guest_pair) = Station::start(devices[0].path(), ram)?;
        let (second, second_pair) = Station::start(devices[1].path(), None)?;
        let ends = vec![(guest_pair, guest.mac()), (second_pair, second.mac())];
        Ok(Self {
            traffic: Traffic::start(ends)?,
            guest,
            _second: second,
            _devices: devices,
        })
    }
}

/// The figures of one strategy; medians of all rounds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    pub(super) frames_per_second: f64,
    /// The relaying thread's processor time.
    pub(super) cpu_us_per_frame: f64,
    /// Frames per second, relative to the direct ones of the same round.
    pub(super) of_direct: f64,
}

/// Frames per second of each of [`STRATEGIES`], in interleaved rounds.
///
/// # Errors
/// A module or device is missing, a frame is lost, or a change fails.
pub(super) fn rates(rounds: u32) -> Result<[Rate; 3]> {
    // Dropped after its devices.
    let module = load()?;
    let mut both = Pair::start(&module, 0, None)?;
    both.traffic.set(Demand::Everything);
    let mut frames: [Vec<f64>; 3] = Default::default();
    let mut cpu: [Vec<f64>; 3] = Default::default();
    for round in 1..=rounds {
        for (at, how) in STRATEGIES.into_iter().enumerate() {
            both.guest.change(how)?;
            std::thread::sleep(SETTLE);
            let (time, arrived) = (Instant::now(), both.traffic.arrived());
            let before = both.guest.processor_time()?;
            std::thread::sleep(ROUND);
            let arrived = both.traffic.arrived().wrapping_sub(arrived);
            let elapsed = time.elapsed();
            let spent = both.guest.processor_time()?.saturating_sub(before);
            both.traffic.check()?;
            frames[at].push(per_second(arrived, elapsed));
            cpu[at].push(microseconds_each(spent, arrived));
        }
        let last = |at: usize| frames[at].last().copied().unwrap_or_default();
        eprintln!(
            "  lab NIC, round {round} of {rounds}: direct {:.0}, used-shadow {:.0}, shadow {:.0} \
             frames/s",
            last(0),
            last(1),
            last(2)
        );
    }
    Ok([0, 1, 2].map(|at| Rate {
        frames_per_second: median(&frames[at]),
        cpu_us_per_frame: median(&cpu[at]),
        of_direct: median(&ratios(&frames[at], &frames[0])),
    }))
}

/// How long changes took under traffic, in milliseconds, for each size of mapped guest memory in
/// `mib`. Each of the six changes is made `laps` times, in turn.
///
/// # Errors
/// As [`rates`].
pub(super) fn changes<const N: usize>(mib: [u64; N], laps: u32) -> Result<[Vec<f64>; N]> {
    let module = load()?;
    let mut pairs = Vec::new();
    for (number, mib) in mib.into_iter().enumerate() {
        let ram = memory(mib << 20)?;
        pairs.push((Pair::start(&module, number, Some(&ram))?, ram));
    }
    let mut all = [const { Vec::new() }; N];
    for _ in 0..laps {
        for ((both, _), times) in pairs.iter_mut().zip(&mut all) {
            both.traffic.set(Demand::Everything);
            for how in WAY {
                await_traffic(&mut both.traffic)?;
                times.push(milliseconds(both.guest.change(how)?));
            }
            both.traffic.check()?;
            both.traffic.set(Demand::Nothing);
        }
    }
    for (mib, times) in mib.iter().zip(&all) {
        eprintln!(
            "  lab NIC, {} changes with {mib} MiB mapped: median {:.2} ms",
            times.len(),
            median(times)
        );
    }
    Ok(all)
}

/// Lets traffic pass for a while: a change without traffic would prove nothing.
fn await_traffic(traffic: &mut Traffic) -> Result<()> {
    let (since, arrived) = (Instant::now(), traffic.arrived());
    while since.elapsed() < BETWEEN || traffic.arrived() == arrived {
        std::thread::sleep(Duration::from_millis(5));
        traffic.check()?;
        if since.elapsed() > LONGEST {
            return Err(Error::invalid(
                "the traffic",
                format!("no frame arrived for {LONGEST:?}"),
            ));
        }
    }
    Ok(())
}

/// Memory like a guest's RAM.
fn memory(size: u64) -> Result<GuestMemory> {
    let file = memfd_create(c"bench-ram", MemfdFlags::CLOEXEC);
    let file = File::from(file.map_err(Error::system("create guest memory"))?);
    file.set_len(size)
        .map_err(Error::system("size guest memory"))?;
    let size = usize::try_from(size)
        .map_err(|_| Error::invalid("guest memory", "it is larger than this process"))?;
    let region = (GuestAddress(0), size, Some(FileOffset::new(file, 0)));
    GuestMemory::from_ranges_with_files([region]).map_err(failed("map guest memory"))
}
