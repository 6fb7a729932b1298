//! A flood that continues while other commands run: traffic for tests that reset the driver or the
//! whole guest.
//!
//! ```text
//!            flood-on                    NIC gone, down or back
//!   (none) ───────────▶ flooding ◀──────────────────────────────┐
//!      ▲                   │  └── one run of frames ends, the next begins
//!      └───── flood-off ───┘
//! ```
//!
//! This module owns the thread and its counters. A run's frames cannot outlive the driver that sent
//! them, so a new run begins each time the NIC comes back.

use crate::frames::{self, Plan, Totals};
use crate::network::Address;
use crate::vfio;
use lab::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The pause before the next attempt while the NIC is missing.
const PAUSE: Duration = Duration::from_millis(1);

/// How long frames may take to return before the flood counts as dead.
const PROGRESS_LIMIT: Duration = Duration::from_secs(20);

/// The one flood of this guest.
static FLOOD: Mutex<Option<Flood>> = Mutex::new(None);

struct Flood {
    control: Arc<Control>,
    thread: JoinHandle<Result<Totals>>,
}

/// State that the flood and its controller share.
#[derive(Debug, Default)]
pub(crate) struct Control {
    stop: AtomicBool,
    /// Set when the first run has its address, or when there is no NIC for it.
    begun: AtomicBool,
    /// Frames that returned, over all runs.
    received: AtomicU64,
}

impl Control {
    /// False once the flood must end.
    pub(crate) fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Records that a run has read the NIC's current address. A later change does not affect the
    /// run.
    pub(crate) fn begins(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Counts frames that returned.
    pub(crate) fn count(&self, frames: u64) {
        self.received.fetch_add(frames, Ordering::Relaxed);
    }
}

fn flood() -> MutexGuard<'static, Option<Flood>> {
    FLOOD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The default number of frames in flight to a peer that sends them back.
pub(crate) const WINDOW: u64 = 16;

/// Starts the flood. To a peer that echoes, it sends as many frames as the peer returns, with at
/// most `window` in flight.
pub(crate) fn start(nic: &str, size: usize, window: u64, peer: Option<Address>) -> Result<()> {
    if window == 0 {
        return Err(Error::invalid("WINDOW", "it is 0: nothing could be sent"));
    }
    let mut flood = flood();
    if flood.is_some() {
        return Err(Error::invalid("flood-on", "a flood is on already"));
    }
    if nic == vfio::NIC {
        vfio::check_on()?;
    } else {
        // Rejects here a size that can never work.
        frames::check_size(nic, size)?;
    }
    let control = Arc::new(Control::default());
    let nic = nic.to_owned();
    let plan = Plan {
        count: frames::MAXIMUM_COUNT,
        size,
        window,
        peer,
    };
    let shared = Arc::clone(&control);
    let thread = std::thread::spawn(move || {
        if nic == vfio::NIC {
            return vfio::exchange_while(&plan, &shared);
        }
        let mut sum = Totals::default();
        while shared.running() {
            let totals = match peer {
                None => frames::flood_while(&nic, size, &shared),
                Some(_) => frames::exchange_while(&nic, &plan, &shared),
            };
            match totals {
                Ok(totals) => sum.add(&totals),
                // The NIC is gone, or not up yet.
                Err(_) => {
                    shared.begins();
                    std::thread::sleep(PAUSE);
                }
            }
        }
        Ok(sum)
    });
    while !control.begun.load(Ordering::Relaxed) && !thread.is_finished() {
        std::thread::sleep(PAUSE);
    }
    *flood = Some(Flood { control, thread });
    Ok(())
}

/// Ends the flood and returns its totals. Frames that a reset of the driver discarded are lost.
pub(crate) fn stop() -> Result<Totals> {
    let Flood { control, thread } = flood()
        .take()
        .ok_or_else(|| Error::invalid("flood-off", "no flood is on"))?;
    control.stop.store(true, Ordering::Relaxed);
    thread
        .join()
        .map_err(|_| Error::invalid("flood-off", "the flood's thread has panicked"))?
}

/// Waits until `frames` more frames of the flood have returned.
pub(crate) fn wait_for(frames: u64) -> Result<()> {
    if frames == 0 {
        return Ok(());
    }
    let control = flood()
        .as_ref()
        .map(|flood| Arc::clone(&flood.control))
        .ok_or_else(|| Error::invalid("FRAMES", "no flood is on"))?;
    let wanted = control
        .received
        .load(Ordering::Relaxed)
        .saturating_add(frames);
    let started = Instant::now();
    while control.received.load(Ordering::Relaxed) < wanted {
        if started.elapsed() > PROGRESS_LIMIT {
            let limit = PROGRESS_LIMIT.as_secs();
            return Err(Error::invalid(
                "the flood",
                format!("fewer than {frames} frames came back in {limit} s"),
            ));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_can_be_asked_of_a_flood_that_is_off() {
        assert!(stop().is_err());
        assert!(wait_for(1).is_err());
        assert!(wait_for(0).is_ok());
        assert!(start("no-such-nic", 64, WINDOW, None).is_err());
    }
}
