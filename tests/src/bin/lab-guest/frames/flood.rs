//! `flood`: sends as fast as possible, or at a rate, and does not wait for frames to return.

use super::{Link, MAXIMUM_COUNT, Run, Totals, described};
use crate::info;
use crate::network::Address;
use lab::error::Result;
use serde_json::{Value, json};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// A peer that is flooded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flooded {
    pub(crate) peer: Address,
    /// The flood ends when the peer has sent this many frames of its own.
    pub(crate) until: Option<u64>,
    /// Frames per second; as fast as possible without it.
    pub(crate) rate: Option<NonZeroU32>,
}

/// How long a flood continues after the last frame that it waits for. Its peer may also wait for
/// frames.
const TAIL: Duration = Duration::from_secs(1);

/// The part of a flood in which the queue may fill: one of this many.
const FILLING: u32 = 4;

/// `flood`: sends for a while without waiting for frames to return. A peer need not return frames,
/// so none count as lost. The peer may send too, so the command first reports that it listens.
pub(crate) fn flood(
    nic: &str,
    duration: Duration,
    size: usize,
    flooded: Option<Flooded>,
) -> Result<Value> {
    let before = info::statistics(nic);
    let peer = flooded.map(|flooded| flooded.peer);
    let run = Run::new(nic, size, MAXIMUM_COUNT, peer)?;
    let flood = run.flood(nic, duration, flooded)?;
    Ok(described(nic, flood.to_json(), flood.elapsed, &before))
}

/// Like [`flood`], for a NIC that the kernel does not drive. `link`, `own` and `maximum` are as in
/// [`super::exchange_over`].
pub(crate) fn over(
    link: impl Link,
    (own, maximum): (Address, usize),
    nic: &str,
    duration: Duration,
    size: usize,
    flooded: Option<Flooded>,
) -> Result<Value> {
    let peer = flooded.map(|flooded| flooded.peer);
    let run = Run::over(link, own, maximum, size, MAXIMUM_COUNT, peer)?;
    let flood = run.flood(nic, duration, flooded)?;
    Ok(flood.to_json())
}

/// The totals of a flood.
struct Flood {
    totals: Totals,
    elapsed: Duration,
    /// Frames and time after the queue has filled. Then a frame is sent when an earlier one leaves,
    /// so this is the device's rate.
    steady: (u64, Duration),
}

impl Flood {
    fn to_json(&self) -> Value {
        let (sent, elapsed) = self.steady;
        let elapsed = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        let mut value = self.totals.to_json();
        value["steady"] = json!({ "tx": sent, "elapsed_us": elapsed });
        value
    }
}

impl<L: Link> Run<L> {
    /// Sends for a while, as [`flood`] says.
    fn flood(mut self, nic: &str, duration: Duration, flooded: Option<Flooded>) -> Result<Flood> {
        let until = flooded.and_then(|flooded| flooded.until);
        let rate = flooded.and_then(|flooded| flooded.rate);
        self.expects_back = flooded.is_none();
        if flooded.is_some() {
            crate::say("", &json!({ "listening": nic }));
        }
        let started = Instant::now();
        let mut heard = 0;
        let mut heard_all = None;
        let mut running = |received, duration| {
            heard += received;
            if until.is_some_and(|until| heard >= until) {
                heard_all.get_or_insert_with(Instant::now);
            }
            started.elapsed() < duration && heard_all.is_none_or(|at| at.elapsed() < TAIL)
        };
        let mut filled = (0, Duration::ZERO);
        match rate {
            Some(rate) => {
                let interval = Duration::from_secs(1) / rate.get();
                self.drip(interval, |received| running(received, duration))?;
            }
            None => {
                self.pour(|received| running(received, duration / FILLING))?;
                filled = (self.totals.sent, started.elapsed());
                self.pour(|received| running(received, duration))?;
            }
        }
        let elapsed = started.elapsed();
        let steady = (self.totals.sent - filled.0, elapsed - filled.1);
        // A peer's own frames may never end.
        if flooded.is_none() {
            self.drain()?;
        }
        let mut totals = self.finish();
        if flooded.is_some() {
            totals.lost = 0;
        }
        Ok(Flood {
            totals,
            elapsed,
            steady,
        })
    }
}
