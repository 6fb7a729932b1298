//! Shadow rings on the kernel's simulator, which sends frames back to their own address. Ours and
//! QEMU's run in turn, on two devices of the same kind.
//!
//! ```text
//!   a round:  QEMU all it can -> QEMU one by one  ->  ours all it can -> ours one by one
//!             (ours rests, direct)                    (QEMU's guest rests)
//! ```
//! Both keep the same number of frames of the same size in flight, and check each; a frame counts
//! when it has returned. Processor time is compared twice. Flat out, many frames lie in a pass.
//! Paced, both have one rate and **one pattern**: frames come one by one, evenly, so that each
//! costs its wake-ups. QEMU's guest sets the rate by sleeping after each frame. A guest that sends
//! all it can would hand QEMU bunches, even at a rate that ours reaches one by one.

use std::fmt;
use std::time::{Duration, Instant};

use vdpa::relay::Strategy;

use super::qemu::{Exchanged, Qemu};
use super::station::Station;
use super::traffic::{Demand, Traffic};
use crate::error::{Error, Result};
use crate::figures::{median, microseconds_each, per_second, ratios};
use crate::sim::{self, Mapping, SimDevice};

const OURS: &str = "02:00:5e:00:53:43";
const QEMUS: &str = "02:00:5e:00:53:44";
const MTU: u16 = 1500;

/// Frames of QEMU's first exchange, which is not part of a round, and the minimum of later ones.
/// Later exchanges have as many frames as take the time of ours. The same holds for paced frames.
const WARM_UP: u32 = 1000;
const FEWEST: u32 = 500;

/// The time of each part of a round, and the settling time before it.
const PART: Duration = Duration::from_millis(700);
const SETTLE: Duration = Duration::from_millis(100);

/// Medians of all rounds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Compared {
    pub(super) frames_per_second: f64,
    pub(super) qemu_frames_per_second: f64,
    /// Paced: the rate, and the processor time of each frame.
    pub(super) paced_frames_per_second: f64,
    pub(super) cpu_us_per_frame: f64,
    pub(super) qemu_cpu_us_per_frame: f64,
    /// Flat out.
    pub(super) cpu_us_per_frame_flat_out: f64,
    pub(super) qemu_cpu_us_per_frame_flat_out: f64,
    /// Ours relative to QEMU's in the same round: frames per second, and processor time.
    pub(super) frames_of_qemu: f64,
    pub(super) cpu_of_qemu: f64,
    pub(super) cpu_of_qemu_flat_out: f64,
}

/// Fields are dropped in this order.
#[derive(Debug)]
struct Ours {
    traffic: Traffic,
    station: Station,
    _device: SimDevice,
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct Part {
    frames_per_second: f64,
    cpu_us_per_frame: f64,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (frames, cpu) = (self.frames_per_second, self.cpu_us_per_frame);
        write!(f, "{frames:.0} frames/s at {cpu:.1} µs")
    }
}

impl Ours {
    fn start() -> Result<Self> {
        let device = SimDevice::net("rings-ours", OURS, MTU)?;
        let (station, pair) = Station::start(device.path(), None)?;
        let traffic = Traffic::start(vec![(pair, station.mac())])?;
        Ok(Self {
            traffic,
            station,
            _device: device,
        })
    }

    fn measure(&mut self, demand: Demand) -> Result<Part> {
        self.traffic.set(demand);
        std::thread::sleep(SETTLE);
        let (time, arrived) = (Instant::now(), self.traffic.arrived());
        let before = self.station.processor_time()?;
        std::thread::sleep(PART);
        let arrived = self.traffic.arrived().wrapping_sub(arrived);
        let elapsed = time.elapsed();
        let spent = self.station.processor_time()?.saturating_sub(before);
        self.traffic.check()?;
        Ok(Part {
            frames_per_second: per_second(arrived, elapsed),
            cpu_us_per_frame: microseconds_each(spent, arrived),
        })
    }

    /// Stops sending and waits until all frames have returned.
    fn rest(&mut self) -> Result<()> {
        self.traffic.set(Demand::Nothing);
        std::thread::sleep(SETTLE);
        self.traffic.check()
    }
}

/// Compares both in interleaved rounds.
///
/// # Errors
/// QEMU or the simulator is missing; a frame is lost; a guest does not boot.
pub(super) fn compare(rounds: u32) -> Result<Compared> {
    sim::reload(Mapping::DEFAULT)?;
    let device = SimDevice::net("rings-qemu", QEMUS, MTU)?;
    eprintln!("  vdpasim_net: QEMU boots the lab's guest …");
    let mut qemu = Qemu::start(device.path(), QEMUS)?;
    let mut flat_out = vec![part(qemu.exchange(WARM_UP)?)];
    let mut paced = vec![part(qemu.pace(FEWEST)?)];
    let mut ours = Ours::start()?;
    let (mut our_flat_out, mut our_paced) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        let theirs = part(qemu.exchange(as_long(&flat_out)?)?);
        let theirs_paced = part(qemu.pace(as_long(&paced)?)?);
        ours.station.change(Strategy::FullShadow)?;
        let own = ours.measure(Demand::Everything)?;
        ours.rest()?;
        let rate = whole(theirs_paced.frames_per_second)?;
        let own_paced = ours.measure(Demand::PerSecond(rate))?;
        ours.rest()?;
        ours.station.change(Strategy::Direct)?;
        eprintln!(
            "  vdpasim_net, round {round} of {rounds}: QEMU {theirs}, one by one {theirs_paced}; \
             ours {own}, one by one {own_paced}",
        );
        flat_out.push(theirs);
        paced.push(theirs_paced);
        our_flat_out.push(own);
        our_paced.push(own_paced);
    }
    drop(ours);
    qemu.power_off()?;
    // The first exchanges belong to no round.
    let [flat_out, paced] = [flat_out, paced].map(|parts| Figures::of(parts.get(1..)));
    let [our_flat_out, our_paced] =
        [our_flat_out, our_paced].map(|parts| Figures::of(Some(&parts)));
    Ok(Compared {
        frames_per_second: median(&our_flat_out.frames),
        qemu_frames_per_second: median(&flat_out.frames),
        paced_frames_per_second: median(&paced.frames),
        cpu_us_per_frame: median(&our_paced.cpu),
        qemu_cpu_us_per_frame: median(&paced.cpu),
        cpu_us_per_frame_flat_out: median(&our_flat_out.cpu),
        qemu_cpu_us_per_frame_flat_out: median(&flat_out.cpu),
        frames_of_qemu: median(&ratios(&our_flat_out.frames, &flat_out.frames)),
        cpu_of_qemu: median(&ratios(&our_paced.cpu, &paced.cpu)),
        cpu_of_qemu_flat_out: median(&ratios(&our_flat_out.cpu, &flat_out.cpu)),
    })
}

/// The same parts of all rounds.
#[derive(Debug)]
struct Figures {
    frames: Vec<f64>,
    cpu: Vec<f64>,
}

impl Figures {
    fn of(parts: Option<&[Part]>) -> Self {
        let parts = parts.unwrap_or_default();
        Self {
            frames: parts.iter().map(|part| part.frames_per_second).collect(),
            cpu: parts.iter().map(|part| part.cpu_us_per_frame).collect(),
        }
    }
}

/// QEMU's part of a round.
fn part(exchanged: Exchanged) -> Part {
    Part {
        frames_per_second: per_second(exchanged.frames, exchanged.elapsed),
        cpu_us_per_frame: microseconds_each(exchanged.processor_time, exchanged.frames),
    }
}

/// The number of frames that take the time of ours, by QEMU's last exchange.
fn as_long(before: &[Part]) -> Result<u32> {
    let rate = before.last().map_or(0.0, |part| part.frames_per_second);
    Ok(whole(rate * PART.as_secs_f64())?.max(FEWEST))
}

/// A rate as a whole number.
fn whole(rate: f64) -> Result<u32> {
    format!("{rate:.0}")
        .parse()
        .map_err(|_| Error::invalid("QEMU's frame rate", format!("it is {rate}")))
}
