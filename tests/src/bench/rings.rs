//! `cargo lab bench rings`: measures the cost of relays, beside QEMU's shadow virtqueues.
//!
//! * Frames/s direct, used-shadow and full-shadow, and the time of a change: two lab NICs on one
//!   switch, with `vdpa::netdev` as the guest.
//! * Shadow rings beside QEMU's, frames/s and processor time of a frame: two `vdpasim_net`. One
//!   guest is `vdpa::netdev`, the other the lab's guest in QEMU.
//!
//! `cargo bench -p vdpa --bench relay` measures the cost of a pass by itself, without a kernel.

mod pair;
mod qemu;
mod simulator;
mod station;
mod traffic;
mod wait;

use super::print_json;
use launcher::verbs::bench::RingsArguments;
use serde::Serialize;

use self::pair::Rate;
use self::simulator::Compared;
use crate::error::{Error, Result};
use crate::figures::{median, percentile, rounded};
use crate::sim;

/// Guest memory that is mapped while rings change, in MiB: the time must not depend on it.
const SMALL_MIB: u64 = 256;
const LARGE_MIB: u64 = 1024;
/// How often each of the six changes is measured.
const LAPS: u32 = 34;

pub(super) fn measure(arguments: &RingsArguments) -> Result<()> {
    sim::require_lab()?;
    let rates = pair::rates(arguments.rounds)?;
    let [small, large] = pair::changes([SMALL_MIB, LARGE_MIB], LAPS)?;
    let measured = Measured {
        rates,
        small,
        large,
        compared: simulator::compare(arguments.rounds)?,
    };
    measured.show(arguments.rounds);
    print_json(arguments.common.json, &measured.report())
}

/// The keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    direct_fps: f64,
    used_shadow_fps: f64,
    shadow_fps: f64,
    qemu_svq_fps: f64,
    switch_ms: f64,
    vmm_cpu_us_per_frame_shadow: f64,
    qemu_cpu_us_per_frame_shadow: f64,
}

/// All figures.
#[derive(Debug)]
struct Measured {
    rates: [Rate; 3],
    small: Vec<f64>,
    large: Vec<f64>,
    compared: Compared,
}

impl Measured {
    fn report(&self) -> Report {
        let [direct, used_shadow, shadow] = self.rates.map(|rate| rate.frames_per_second);
        Report {
            direct_fps: rounded(direct, 0),
            used_shadow_fps: rounded(used_shadow, 0),
            shadow_fps: rounded(shadow, 0),
            qemu_svq_fps: rounded(self.compared.qemu_frames_per_second, 0),
            switch_ms: rounded(median(&self.small), 3),
            vmm_cpu_us_per_frame_shadow: rounded(self.compared.cpu_us_per_frame, 2),
            qemu_cpu_us_per_frame_shadow: rounded(self.compared.qemu_cpu_us_per_frame, 2),
        }
    }

    /// Prints the table, with the source of each figure.
    fn show(&self, rounds: u32) {
        let row =
            |what: &str, value: String, from: &str| eprintln!("  {what:<31} {value:>10}  {from}");
        let compared = &self.compared;
        let [direct, used_shadow, shadow] = self.rates;
        eprintln!();
        eprintln!(
            "  Medians of {rounds} interleaved rounds; 64-byte frames, 128 under way at each end"
        );
        eprintln!();
        eprintln!(
            "  two lab NICs on one switch, a driver in userspace (vdpa::netdev) at each end; \
             frames of both directions"
        );
        for (what, rate) in [
            ("direct", direct),
            ("used-shadow (receive)", used_shadow),
            ("shadow (both queues)", shadow),
        ] {
            let note = format!(
                "{:.2} of direct in the same round; relaying thread {:.1} µs a frame",
                rate.of_direct, rate.cpu_us_per_frame
            );
            row(
                &format!("{what}, frames/s"),
                format!("{:.0}", rate.frames_per_second),
                &note,
            );
        }
        for (mib, times) in [(SMALL_MIB, &self.small), (LARGE_MIB, &self.large)] {
            let note = format!(
                "p99 {:.2}; {} changes under traffic, all six ways between strategies",
                percentile(times, 99),
                times.len()
            );
            row(
                &format!("change, {mib} MiB mapped, ms"),
                format!("{:.2}", median(times)),
                &note,
            );
        }
        eprintln!();
        eprintln!("  vdpasim_net, one for each: frames that came back to their sender");
        row(
            "QEMU x-svq=on, frames/s",
            format!("{:.0}", compared.qemu_frames_per_second),
            "the guest is Linux, whose processor shares the host's two with QEMU and the device",
        );
        row(
            "shadow, frames/s",
            format!("{:.0}", compared.frames_per_second),
            &format!(
                "{:.2} times QEMU's in the same round; but the guest is a driver in userspace",
                compared.frames_of_qemu
            ),
        );
        row(
            "QEMU x-svq=on, µs a frame",
            format!("{:.1}", compared.qemu_cpu_us_per_frame),
            &format!(
                "its busiest thread but the guest's processor; frames one by one, {:.0} a second; \
                 flat out {:.1}",
                compared.paced_frames_per_second, compared.qemu_cpu_us_per_frame_flat_out
            ),
        );
        row(
            "shadow, µs a frame",
            format!("{:.1}", compared.cpu_us_per_frame),
            &format!(
                "relaying thread; so as well: {:.2} times QEMU's in the same round; flat out \
                 {:.1}, {:.2} times",
                compared.cpu_of_qemu,
                compared.cpu_us_per_frame_flat_out,
                compared.cpu_of_qemu_flat_out
            ),
        );
        eprintln!();
    }
}

/// For `map_err`: puts the action in front of a library error and its causes.
fn failed<E>(action: &'static str) -> impl FnOnce(E) -> Error
where
    E: std::error::Error + Send + Sync + 'static,
{
    move |error| Error::System {
        action,
        source: std::io::Error::other(error),
    }
}
