//! Sends commands to a NIC's control queue while other commands run: for tests that stop the device
//! at any moment.
//!
//! ```text
//!            control-on
//!   (none) ───────────▶ set another address, then the own one;
//!      ▲                accept frames to a third one for a moment ──┐
//!      │                   │  └─────────────────────────────────────┘
//!      └─── control-off ───┘ the NIC has its own address
//! ```
//!
//! This module owns the thread and its counters. A changed address is a command to the device
//! (virtio 1.3, 5.1.6.5.2), and the driver waits for the answer. Linux notifies no driver of an
//! address that does not change (`dev_set_mac_address` in net/core/dev.c). Most of the time is the
//! guest's, which notifies its whole network stack. So filter commands come in between, where the
//! device filters.

use crate::filter::Filter;
use crate::network::Address;
use crate::{frames, network};
use lab::error::{Error, Result};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The one controller of this guest.
static COMMANDS: Mutex<Option<Commands>> = Mutex::new(None);

struct Commands {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Counted>,
}

/// The counts of commands.
#[derive(Debug, Default)]
struct Counted {
    commands: u64,
    refused: u64,
    filters: u64,
}

/// How often the filter changes for each address that is set.
const FILTERS: u64 = 8;

/// The feature bit of a device that filters (virtio 1.3, 5.1.3).
const VIRTIO_NET_F_CTRL_RX: usize = 18;

fn commands() -> MutexGuard<'static, Option<Commands>> {
    COMMANDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An address that the NIC has for a moment.
fn other(mut address: Address) -> Address {
    // The simulator compares addresses like C strings: this bit makes no byte zero that was not
    // zero.
    address[5] ^= 0x80;
    address
}

/// True if the device filters: the driver sends no filter commands to one that does not.
fn filters(nic: &str) -> Result<bool> {
    // One digit for each bit, the lowest first (drivers/virtio/virtio.c).
    let features: String = frames::attribute(nic, "device/features")?;
    Ok(features.as_bytes().get(VIRTIO_NET_F_CTRL_RX) == Some(&b'1'))
}

/// `control-on`: starts to send commands.
pub(crate) fn start(nic: &str) -> Result<Value> {
    let mut commands = commands();
    if commands.is_some() {
        return Err(Error::invalid("control-on", "commands are sent already"));
    }
    let address = network::address(nic)?;
    let filter = filters(nic)?
        .then(|| Filter::new(frames::attribute(nic, "ifindex")?))
        .transpose()?;
    let nic = nic.to_owned();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        let mut counted = Counted::default();
        while !stopped.load(Ordering::Relaxed) {
            for address in [other(address), address] {
                counted.commands += 1;
                counted.refused += u64::from(network::tell_address(&nic, address).is_err());
            }
            if let Some(filter) = &filter {
                for _ in 0..FILTERS {
                    counted.filters += u64::from(filter.there_and_back().is_ok());
                }
            }
        }
        counted
    });
    *commands = Some(Commands { stop, thread });
    Ok(json!({ "control": "on" }))
}

/// `control-off`: ends it. Returns how often the address changed, how many of those changes were
/// rejected, and how often the filter changed.
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
