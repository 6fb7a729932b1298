//! A guest that sends as fast as it can.

use std::time::Duration;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::figures::per_second;
use crate::guest::Guest;

/// An address that no device has.
const SINK: &str = "52:54:5e:11:59:7f";

/// Seconds for which a guest sends. It reports the rate of the last three quarters.
const SENDING: u64 = 4;

/// The most frames that the device has not used yet when the guest stops: a whole queue.
const QUEUE: u64 = 256;

/// How long a guest may take for its answer, and how long its boot may be silent.
pub(super) const LIMIT: Duration = Duration::from_secs(120);

/// What a guest has sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    /// All frames.
    pub(super) frames: u32,
    /// The steady rate.
    pub(super) frames_per_second: f64,
}

/// Lets a guest send frames of `size` bytes, with their Ethernet header, for some seconds.
///
/// # Errors
/// [`Error::Invalid`] when its device did not take them.
pub(super) fn flood(guest: &mut Guest, size: u32) -> Result<Sent> {
    let flood = format!("flood {SENDING} {size} eth0 to {SINK}");
    guest.listen(&flood)?;
    let answer = guest.answer(&flood, LIMIT)?;
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let sent = number(&answer["tx"]);
    let used = number(&answer["statistics"]["tx_packets"]);
    let steady = u32::try_from(number(&answer["steady"]["tx"])).unwrap_or_default();
    if steady == 0 || sent.abs_diff(used) > QUEUE {
        let why = format!("its device did not take the frames: {answer}");
        return Err(Error::invalid("the guest", why));
    }
    let elapsed = Duration::from_micros(number(&answer["steady"]["elapsed_us"]));
    Ok(Sent {
        frames: u32::try_from(sent).unwrap_or(u32::MAX),
        frames_per_second: per_second(steady, elapsed),
    })
}
