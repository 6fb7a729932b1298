//! Frames that stay unread until a command requests them: data that a device wrote into the guest's
//! memory long before the guest looks at it.
//!
//! ```text
//!            kept-on                        a frame to the NIC's own address after each pause
//!   (none) ───────────▶ sending, up to N ◀── it stays where the device has written it
//!      ▲                       │
//!      └────── kept-off ───────┘  all are taken and verified
//! ```
//!
//! This module owns the thread.

use crate::frames::{self, Totals};
use lab::error::{Error, Result};
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The most frames: the socket has room for this many of any size.
const MAXIMUM_COUNT: u64 = 4096;

/// The one keeper of this guest.
static KEPT: Mutex<Option<Kept>> = Mutex::new(None);

struct Kept {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Totals>>,
}

fn kept() -> MutexGuard<'static, Option<Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `kept-on`: starts to send.
pub(crate) fn start(nic: &str, count: u64, size: usize, pause: Duration) -> Result<()> {
    if count > MAXIMUM_COUNT {
        return Err(Error::invalid(
            "N",
            format!("it is more than {MAXIMUM_COUNT}"),
        ));
    }
    let mut kept = kept();
    if kept.is_some() {
        return Err(Error::invalid("kept-on", "frames are kept already"));
    }
    // Rejects here a size that can never work.
    frames::check_size(nic, size)?;
    let stop = Arc::new(AtomicBool::new(false));
    let (seen, nic) = (Arc::clone(&stop), nic.to_owned());
    let thread = std::thread::spawn(move || {
        frames::keep_while(&nic, count, size, pause, || !seen.load(Ordering::Relaxed))
    });
    *kept = Some(Kept { stop, thread });
    Ok(())
}

/// `kept-off`: reads all of them and returns the totals.
pub(crate) fn stop() -> Result<Value> {
    let Kept { stop, thread } = kept()
        .take()
        .ok_or_else(|| Error::invalid("kept-off", "no frames are kept"))?;
    stop.store(true, Ordering::Relaxed);
    thread
        .join()
        .map_err(|_| Error::invalid("kept-off", "the keeper's thread has panicked"))?
        .map(Totals::to_json)
}
