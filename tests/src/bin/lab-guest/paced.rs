//! Sends frames at an even pace and records the gaps between those that return. The traffic serves
//! to measure a guest that migrates, or whose device changes.
//!
//! ```text
//!            paced-on             a frame each 1/RATE s to the NIC's own address
//!   (none) ───────────▶ sending ◀── it returns: check its number, note the time ──┐
//!      ▲                   │  └───────────────────────────────────────────────────┘
//!      └──── paced-off ────┘  the times stay until the next paced-on, for paced-gaps
//! ```
//!
//! This module owns the thread and the times. They are of the guest's own monotonic clock, which
//! may stop with the guest; the user compares it with another clock before and after (`now`).
//! Frames that lie in the socket when one is read count as arrived at the same time.

use crate::frames::{self, Totals};
use lab::error::{Error, Result};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most frames per second.
const MAXIMUM_RATE: u32 = 1_000_000;

/// The most arrivals that are recorded, to bound the memory.
const MAXIMUM_NOTED: usize = 4_000_000;

/// When frames returned, in microseconds of [`now`], in order.
type Arrivals = Arc<Mutex<Vec<u64>>>;

/// The one paced sender of this guest.
static PACED: Mutex<Paced> = Mutex::new(Paced {
    running: None,
    arrivals: None,
});

struct Paced {
    running: Option<Running>,
    /// The arrivals of the current or last sender.
    arrivals: Option<Arrivals>,
}

struct Running {
    stop: Arc<AtomicBool>,
    started: Instant,
    thread: JoinHandle<Result<Totals>>,
}

fn paced() -> MutexGuard<'static, Paced> {
    PACED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `now`: the guest's monotonic clock, in microseconds.
pub(crate) fn now() -> u64 {
    Duration::try_from(clock_gettime(ClockId::Monotonic))
        .ok()
        .and_then(|now| u64::try_from(now.as_micros()).ok())
        .unwrap_or_default()
}

/// `paced-on`: sends `rate` frames per second.
pub(crate) fn start(nic: &str, size: usize, rate: u32) -> Result<()> {
    if rate == 0 || rate > MAXIMUM_RATE {
        let reason = format!("it is not in 1..={MAXIMUM_RATE}");
        return Err(Error::invalid("RATE", reason));
    }
    let mut paced = paced();
    if paced.running.is_some() {
        return Err(Error::invalid("paced-on", "frames are sent already"));
    }
    // Rejects here a size that can never work.
    frames::check_size(nic, size)?;
    let stop = Arc::new(AtomicBool::new(false));
    let arrivals = Arrivals::default();
    let (seen, noted, nic) = (Arc::clone(&stop), Arc::clone(&arrivals), nic.to_owned());
    let thread = std::thread::spawn(move || {
        frames::paced_while(
            &nic,
            size,
            Duration::from_secs(1) / rate,
            || !seen.load(Ordering::Relaxed),
            |frames| note(&noted, now(), frames),
        )
    });
    paced.arrivals = Some(arrivals);
    paced.running = Some(Running {
        stop,
        started: Instant::now(),
        thread,
    });
    Ok(())
}

fn note(arrivals: &Arrivals, now: u64, frames: u64) {
    let mut arrivals = arrivals.lock().unwrap_or_else(PoisonError::into_inner);
    for _ in 0..frames {
        if arrivals.len() < MAXIMUM_NOTED {
            arrivals.push(now);
        }
    }
}

/// `paced-off`: ends the sender and returns the totals of its frames.
pub(crate) fn stop() -> Result<Value> {
    let Running {
        stop,
        started,
        thread,
    } = paced()
        .running
        .take()
        .ok_or_else(|| Error::invalid("paced-off", "no frames are sent"))?;
    let elapsed = started.elapsed();
    stop.store(true, Ordering::Relaxed);
    let totals = thread
        .join()
        .map_err(|_| Error::invalid("paced-off", "the sender's thread has panicked"))??;
    let mut answer = totals.to_json();
    if let Some(object) = answer.as_object_mut() {
        let elapsed = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        object.insert("elapsed_us".into(), elapsed.into());
    }
    Ok(answer)
}

/// `paced-gaps`: gaps between consecutive frames of the current or last sender.
pub(crate) fn gaps(from: u64, to: u64) -> Result<Value> {
    let arrivals = paced()
        .arrivals
        .clone()
        .ok_or_else(|| Error::invalid("paced-gaps", "no frames were sent"))?;
    let arrivals = arrivals.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Gaps::between(&arrivals, from, to).to_json())
}

/// The gaps between two points in time; microseconds.
#[derive(Debug, Default, PartialEq, Eq)]
struct Gaps {
    /// Gaps that began and ended between both.
    count: usize,
    median: u64,
    p99: u64,
    longest: u64,
    /// The longest gap that began before the end and ended after the beginning.
    touching: u64,
    touching_began: u64,
}

impl Gaps {
    fn between(arrivals: &[u64], from: u64, to: u64) -> Self {
        let mut within = Vec::new();
        let mut gaps = Self::default();
        for pair in arrivals.windows(2) {
            let &[began, ended] = pair else { continue };
            let gap = ended.saturating_sub(began);
            if began >= from && ended <= to {
                within.push(gap);
            }
            if began < to && ended > from && gap > gaps.touching {
                gaps.touching = gap;
                gaps.touching_began = began;
            }
        }
        within.sort_unstable();
        gaps.count = within.len();
        gaps.median = percentile(&within, 50);
        gaps.p99 = percentile(&within, 99);
        gaps.longest = within.last().copied().unwrap_or_default();
        gaps
    }

    fn to_json(&self) -> Value {
        json!({
            "count": self.count,
            "median_us": self.median,
            "p99_us": self.p99,
            "longest_us": self.longest,
            "touching_us": self.touching,
            "touching_began_us": self.touching_began,
        })
    }
}

/// The value that `percent` percent of these sorted values do not exceed; 0 without values.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let position = sorted.len() * percent / 100;
    let last = sorted.len().saturating_sub(1);
    sorted.get(position.min(last)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_within_or_touch() {
        let arrivals = [10, 20, 25, 100, 101];
        assert_eq!(
            Gaps::between(&arrivals, 10, 100),
            Gaps {
                count: 3,
                median: 10,
                p99: 75,
                longest: 75,
                touching: 75,
                touching_began: 25,
            }
        );
        let one = Gaps::between(&arrivals, 30, 40);
        assert_eq!((one.count, one.touching), (0, 75));
        let none = Gaps::between(&arrivals, 101, 200);
        assert_eq!((none.count, none.touching), (0, 0));
        assert_eq!(Gaps::between(&[], 0, 1), Gaps::default());
    }

    #[test]
    fn nothing_can_be_asked_of_a_sender_that_never_ran() {
        assert!(stop().is_err());
        assert!(gaps(0, 1).is_err());
        assert!(start("no-such-nic", 64, 100).is_err());
        assert!(start("lo", 64, 0).is_err());
        assert!(now() > 0);
    }
}
