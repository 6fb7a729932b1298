//! Commands to a NIC's control queue that go on while other commands are obeyed: for tests that stop
//! the device at any moment.
//!
//! ```text
//!            control-on
//!   (none) ───────────▶ the NIC is given the address that it has, and takes frames to another one for a moment ──┐
//!      ▲                   │  └──────────────────────────────────────────────────────────────────────────────────┘
//!      └─── control-off ───┘
//! ```
//!
//! Owns the thread and its counters. An address that is set is a command to the device even if it does not
//! change (virtio 1.3, 5.1.6.5.2), and the driver waits for the answer. Most of the time that it takes is the guest's, which
//! tells everybody in it; so commands of the filter come between, for there to be one under way more often than not.

use crate::filter::Filter;
use crate::{frames, network};
use lab::error::{Error, Result};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The one of this guest.
static COMMANDS: Mutex<Option<Commands>> = Mutex::new(None);

struct Commands {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Counted>,
}

/// What became of the commands.
#[derive(Debug, Default)]
struct Counted {
    commands: u64,
    refused: u64,
    filters: u64,
}

/// How often the filter changes for each address that is set.
const FILTERS: u64 = 8;

fn commands() -> MutexGuard<'static, Option<Commands>> {
    COMMANDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `control-on`: begins to send commands.
pub(crate) fn start(nic: &str) -> Result<Value> {
    let mut commands = commands();
    if commands.is_some() {
        return Err(Error::invalid("control-on", "commands are sent already"));
    }
    let address = network::address(nic)?;
    let filter = Filter::new(frames::attribute(nic, "ifindex")?)?;
    let nic = nic.to_owned();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        let mut counted = Counted::default();
        while !stopped.load(Ordering::Relaxed) {
            counted.commands += 1;
            counted.refused += u64::from(network::tell_address(&nic, address).is_err());
            for _ in 0..FILTERS {
                counted.filters += u64::from(filter.there_and_back().is_ok());
            }
        }
        counted
    });
    *commands = Some(Commands { stop, thread });
    Ok(json!({ "control": "on" }))
}

/// `control-off`: ends it; how often the address was set, how many of those were refused, and how often the filter changed.
pub(crate) fn stop() -> Result<Value> {
    let Commands { stop, thread } = commands()
        .take()
        .ok_or_else(|| Error::invalid("control-off", "no commands are sent"))?;
    stop.store(true, Ordering::Relaxed);
    let counted = thread
        .join()
        .map_err(|_| Error::invalid("control-off", "the thread of commands has panicked"))?;
    Ok(json!({
        "commands": counted.commands,
        "refused": counted.refused,
        "filters": counted.filters,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_sent_to_a_nic_that_is_not_there() {
        assert!(stop().is_err());
        assert!(start("no-such-nic").is_err());
        assert!(stop().is_err());
    }
}
