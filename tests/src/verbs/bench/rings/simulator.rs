//! Shadowed rings on the kernel's simulator, which sends frames back to their own
//! address: ours beside QEMU's, in turn, on two devices of the same kind.
//!
//! ```text
//!   a round:  QEMU sends all it can  ->  ours sends all it can  ->  ours at QEMU's rate
//!             (ours rests, direct)       (QEMU's guest rests)
//! ```
//! Both keep the same number of frames under way, of the same size, and check
//! each; a frame counts when it is back. Processor time is compared at the same rate,
//! QEMU's own: flat out, ours is cheaper for each frame, for more lie in a pass.

use std::time::{Duration, Instant};

use vdpa::relay::Strategy;

use super::figures::{median, microseconds_each, per_second, ratios};
use super::qemu::Qemu;
use super::station::Station;
use super::traffic::{Demand, Traffic};
use crate::error::{Error, Result};
use crate::sim::{self, Mapping, SimDevice};

const OURS: &str = "02:00:5e:00:53:43";
const QEMUS: &str = "02:00:5e:00:53:44";
const MTU: u16 = 1500;

/// Frames of QEMU's first exchange, which is no part of a round; later ones have as many as
/// take as long as ours, but not fewer than this.
const WARM_UP: u32 = 1000;
const FEWEST: u32 = 500;

/// Each part of a round, and before it.
const PART: Duration = Duration::from_millis(700);
const SETTLE: Duration = Duration::from_millis(100);

/// Medians of all rounds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Compared {
    pub(super) frames_per_second: f64,
    pub(super) qemu_frames_per_second: f64,
    /// At QEMU's rate.
    pub(super) cpu_us_per_frame: f64,
    /// Flat out.
    pub(super) cpu_us_per_frame_flat_out: f64,
    pub(super) qemu_cpu_us_per_frame: f64,
    /// Ours as a part of QEMU's in the same round: frames per second, and processor time.
    pub(super) frames_of_qemu: f64,
    pub(super) cpu_of_qemu: f64,
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

    /// Sends nothing, and waits until all is back.
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
    let warm_up = qemu.exchange(WARM_UP)?;
    let mut rate = per_second(warm_up.frames, warm_up.elapsed);
    let mut ours = Ours::start()?;
    let mut all: [Vec<f64>; 5] = Default::default();
    for round in 1..=rounds {
        let frames = whole(rate * PART.as_secs_f64())?.max(FEWEST);
        let theirs = qemu.exchange(frames)?;
        rate = per_second(theirs.frames, theirs.elapsed);
        let cpu = microseconds_each(theirs.processor_time, theirs.frames);
        ours.station.change(Strategy::Shadowed)?;
        let flat_out = ours.measure(Demand::Everything)?;
        ours.rest()?;
        let paced = ours.measure(Demand::PerSecond(whole(rate)?))?;
        ours.rest()?;
        ours.station.change(Strategy::Direct)?;
        eprintln!(
            "  vdpasim_net, round {round} of {rounds}: QEMU {rate:.0} frames/s at {cpu:.1} µs; ours \
             {:.0} at {:.1} µs, paced {:.0} at {:.1} µs",
            flat_out.frames_per_second,
            flat_out.cpu_us_per_frame,
            paced.frames_per_second,
            paced.cpu_us_per_frame,
        );
        let figures = [
            flat_out.frames_per_second,
            rate,
            paced.cpu_us_per_frame,
            flat_out.cpu_us_per_frame,
            cpu,
        ];
        for (list, figure) in all.iter_mut().zip(figures) {
            list.push(figure);
        }
    }
    drop(ours);
    qemu.power_off()?;
    let frames_of_qemu = median(&ratios(&all[0], &all[1]));
    let cpu_of_qemu = median(&ratios(&all[2], &all[4]));
    let [fps, qemu_fps, cpu, flat_out, qemu_cpu] = all.map(|list| median(&list));
    Ok(Compared {
        frames_per_second: fps,
        qemu_frames_per_second: qemu_fps,
        cpu_us_per_frame: cpu,
        cpu_us_per_frame_flat_out: flat_out,
        qemu_cpu_us_per_frame: qemu_cpu,
        frames_of_qemu,
        cpu_of_qemu,
    })
}

/// A rate as a whole number.
fn whole(rate: f64) -> Result<u32> {
    format!("{rate:.0}")
        .parse()
        .map_err(|_| Error::invalid("QEMU's frame rate", format!("it is {rate}")))
}
