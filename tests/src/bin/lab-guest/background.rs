//! A flood that goes on while other commands are obeyed: traffic for tests that
//! reset the driver or the whole guest.
//!
//! ```text
//!            flood-on                    NIC gone, down or back
//!   (none) ───────────▶ flooding ◀──────────────────────────────┐
//!      ▲                   │  └── one run of frames ends, the next begins
//!      └───── flood-off ───┘
//! ```
//!
//! Owns the thread and its counters. A run's frames cannot outlive the driver
//! that sent them, so each time the NIC comes back a run of its own begins.

use crate::frames::{self, Plan, Totals};
use crate::network::Address;
use lab::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the NIC is left alone when it is not there.
const PAUSE: Duration = Duration::from_millis(1);

/// How long frames may take to come back before the flood counts as dead.
const PROGRESS_LIMIT: Duration = Duration::from_secs(20);

/// The one flood of this guest.
static FLOOD: Mutex<Option<Flood>> = Mutex::new(None);

struct Flood {
    control: Arc<Control>,
    thread: JoinHandle<Totals>,
}

/// What the flood and its commander share.
#[derive(Debug, Default)]
pub(crate) struct Control {
    stop: AtomicBool,
    /// The first run has its address, or there is no NIC for it.
    begun: AtomicBool,
    /// Frames that came back, all runs together.
    received: AtomicU64,
}

impl Control {
    /// False once the flood is to end.
    pub(crate) fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// A run has the address that the NIC has now: what that changes to later is none of its.
    pub(crate) fn begins(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Counts frames that came back.
    pub(crate) fn count(&self, frames: u64) {
        self.received.fetch_add(frames, Ordering::Relaxed);
    }
}

fn flood() -> MutexGuard<'static, Option<Flood>> {
    FLOOD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frames under way at once to a peer, which sends them back, where nothing else is asked for.
pub(crate) const WINDOW: u64 = 16;

/// Starts the flood; to a peer that echoes, as many frames as it sends back, at most `window` of them under way.
pub(crate) fn start(nic: &str, size: usize, window: u64, peer: Option<Address>) -> Result<()> {
    if window == 0 {
        return Err(Error::invalid("WINDOW", "it is 0: nothing could be sent"));
    }
    let mut flood = flood();
    if flood.is_some() {
        return Err(Error::invalid("flood-on", "a flood is on already"));
    }
    // So that a size that never works is refused here.
    frames::check_size(nic, size)?;
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
        let mut sum = Totals::default();
        while shared.goes_on() {
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
        sum
    });
    while !control.begun.load(Ordering::Relaxed) && !thread.is_finished() {
        std::thread::sleep(PAUSE);
    }
    *flood = Some(Flood { control, thread });
    Ok(())
}

/// Ends the flood and says what became of its frames. Those that a reset of
/// the driver threw away are lost.
pub(crate) fn stop() -> Result<Totals> {
    let Flood { control, thread } = flood()
        .take()
        .ok_or_else(|| Error::invalid("flood-off", "no flood is on"))?;
    control.stop.store(true, Ordering::Relaxed);
    thread
        .join()
        .map_err(|_| Error::invalid("flood-off", "the flood's thread has panicked"))
}

/// Waits until `frames` more frames of the flood have come back.
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
