//! The traffic of a migrating guest, and how long it stops, by the host's clock.
//!
//! The simulator sends frames back to their own address, so the guest is its own peer. It sends
//! numbered frames at an even pace, checks each that returns and notes the time. These times are of
//! the guest's own clock, which may stop with the guest. QEMU gives a guest the clock of its stop,
//! Bellhop the current time. So the guest is asked for its time before and after. The time by which
//! it fell behind the host's clock is added to the gap at the switch.
//!
//! ```text
//!   host   ──┬─────────────┬───────────────[ stop ······ run ]──────────────┬──▶
//!            │ now?        │ POST          last seen    moved               │ now?
//!   guest  ──┴─────────────┴───────────────[  ≤ 0 … whole gap ]─────────────┴──▶
//!              offset          gaps before     gap that touches the switch     offset
//! ```
//! A question and its answer take milliseconds on an emulated serial console. The quickest of
//! several counts. Its remaining error is alike before and after, so the difference is better than
//! either.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::guest::Guest;

/// Bytes of a frame, with its Ethernet header.
const SIZE: u32 = 590;

/// Frames with which the guest's capacity is measured, and how many of them are in flight.
const CAPACITY_FRAMES: u32 = 2000;
const CAPACITY_WINDOW: u32 = 64;

/// Questions for the time; the quickest counts.
const QUESTIONS: usize = 20;

/// The host's clock, in microseconds since an origin that both VMMs share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Host(Instant);

impl Host {
    pub(super) fn new() -> Self {
        Self(Instant::now())
    }

    fn at(self, time: Instant) -> f64 {
        time.saturating_duration_since(self.0).as_secs_f64() * 1e6
    }
}

/// The offset between a guest's clock and the host's; microseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    host: Host,
    /// The guest's clock less the host's.
    ahead: f64,
    /// How long the question took that gave the offset.
    pub(super) asked_for: f64,
}

impl Clock {
    /// Asks the guest for its time.
    ///
    /// # Errors
    /// Those of [`Guest::command`].
    pub(super) fn of(guest: &mut Guest, host: Host) -> Result<Self> {
        let mut best: Option<Self> = None;
        for _ in 0..QUESTIONS {
            let before = host.at(Instant::now());
            let answer = guest.command("now")?;
            let after = host.at(Instant::now());
            let now = microseconds(&answer, "now_us")?;
            let one = Self {
                host,
                ahead: now - (before + after) / 2.0,
                asked_for: after - before,
            };
            if best.is_none_or(|best| one.asked_for < best.asked_for) {
                best = Some(one);
            }
        }
        best.ok_or_else(|| Error::invalid("the guest's clock", "it was not asked for"))
    }

    /// Converts a time of the host to the guest's clock; whole microseconds.
    fn guest_time(&self, time: Instant) -> String {
        format!("{:.0}", (self.host.at(time) + self.ahead).max(0.0))
    }

    /// How far the guest's clock has fallen behind since.
    pub(super) fn fell_behind(&self, later: &Self) -> f64 {
        self.ahead - later.ahead
    }
}

/// Frames per second that return to the guest when it sends all it can.
///
/// # Errors
/// Frames were damaged; those of [`Guest::command`].
pub(super) fn capacity(guest: &mut Guest) -> Result<f64> {
    let answer = guest.command(&format!(
        "frames {CAPACITY_FRAMES} {SIZE} {CAPACITY_WINDOW}"
    ))?;
    if answer["corrupt"] != 0 {
        return Err(Error::invalid("the guest's frames", answer.to_string()));
    }
    let elapsed = microseconds(&answer, "elapsed_us")?;
    Ok(microseconds(&answer, "rx")? * 1e6 / elapsed.max(1.0))
}

/// Starts to send.
///
/// # Errors
/// Those of [`Guest::command`].
pub(super) fn begin(guest: &mut Guest, rate: u32) -> Result<()> {
    guest
        .command(&format!("paced-on {rate} {SIZE}"))
        .map(|_| ())
}

/// The totals of all frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct Totals {
    pub(super) lost: f64,
    /// Frames sent per second.
    pub(super) rate: f64,
}

/// Ends the traffic.
///
/// # Errors
/// A frame was damaged or came twice; those of [`Guest::command`].
pub(super) fn end(guest: &mut Guest) -> Result<Totals> {
    let answer = guest.command("paced-off")?;
    if answer["corrupt"] != 0 || answer["duplicate"] != 0 {
        return Err(Error::invalid(
            "the traffic of a guest that moved",
            format!("frames were damaged, or came twice: {answer}"),
        ));
    }
    let sent = microseconds(&answer, "tx")?;
    let elapsed = microseconds(&answer, "elapsed_us")?;
    Ok(Totals {
        lost: microseconds(&answer, "lost")?,
        rate: sent * 1e6 / elapsed.max(1.0),
    })
}

/// Gaps without a frame between two points in time; milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gaps {
    /// Of gaps that began and ended between both.
    pub(super) p99: f64,
    pub(super) longest: f64,
    /// The longest gap that begins before the end and ends after the beginning.
    pub(super) touching: f64,
}

/// Gaps between two points in time of the host, by the guest's clock as it was then.
///
/// # Errors
/// Those of [`Guest::command`].
pub(super) fn gaps(guest: &mut Guest, clock: &Clock, from: Instant, to: Instant) -> Result<Gaps> {
    let (from, to) = (clock.guest_time(from), clock.guest_time(to));
    let answer = guest.command(&format!("paced-gaps {from} {to}"))?;
    let of = |name| microseconds(&answer, name).map(|number| number / 1e3);
    Ok(Gaps {
        p99: of("p99_us")?,
        longest: of("longest_us")?,
        touching: of("touching_us")?,
    })
}

fn microseconds(answer: &Value, name: &str) -> Result<f64> {
    answer[name]
        .as_f64()
        .ok_or_else(|| Error::invalid(answer.to_string(), format!("it has no number {name:?}")))
}

/// How long to wait for a condition, and how often to check it.
pub(super) fn wait_until(
    what: &'static str,
    limit: Duration,
    between: Duration,
    mut is: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    while !is()? {
        if started.elapsed() > limit {
            return Err(Error::invalid(what, format!("not after {limit:?}")));
        }
        std::thread::sleep(between);
    }
    Ok(())
}
