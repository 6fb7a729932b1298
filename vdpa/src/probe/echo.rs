//! Frames that can be recognised when they return.
//!
//! ```text
//!   destination 6 | source 6 | 0x88b5 | tag u64 | number u32 | padding | FNV-1a u64
//! ```
//! The checksum covers all but the addresses, because a peer that sends frames back may swap them.
//! The tag is unique to this run.

use std::time::{Duration, Instant, SystemTime};

use crate::Error;
use crate::control_queue::MacAddress;
use crate::netdev::QueuePair;

/// Ethertype "local experimental 1" (IEEE 802).
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// Bytes of a frame: more than the shortest Ethernet frame, and with padding.
const LEN: usize = 200;
/// Bytes of the checksum after it.
const SUM: usize = 8;
/// Frames to exchange.
pub(super) const FRAMES: u32 = 1000;
/// Maximum number of frames in flight.
const WINDOW: u32 = 16;
/// Maximum time for the first frame to return; after that none is expected.
const FIRST: Duration = Duration::from_secs(1);

/// The counts of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Exchange {
    pub(super) sent: u32,
    pub(super) returned: u32,
    /// Frames with this run's tag and number but a wrong checksum, or duplicates.
    pub(super) wrong: u32,
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Builds frame `number`.
fn frame(to: MacAddress, from: MacAddress, tag: u64, number: u32) -> [u8; LEN] {
    let mut frame = [0; LEN];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&ETHERTYPE);
    frame[14..22].copy_from_slice(&tag.to_be_bytes());
    frame[22..26].copy_from_slice(&number.to_be_bytes());
    for (at, byte) in (number..).zip(&mut frame[26..LEN - SUM]) {
        *byte = at.to_le_bytes()[0];
    }
    let sum = checksum(&frame[12..LEN - SUM]);
    frame[LEN - SUM..].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// The number of a frame of this run, and whether it is intact; `None` for any other frame.
fn parse(frame: &[u8], tag: u64) -> Option<(u32, bool)> {
    let number = <[u8; 4]>::try_from(frame.get(22..26)?).ok()?;
    if frame.get(12..14)? != ETHERTYPE || frame.get(14..22)? != tag.to_be_bytes() {
        return None;
    }
    let whole = frame
        .get(..LEN)
        .is_some_and(|frame| frame[LEN - SUM..] == checksum(&frame[12..LEN - SUM]).to_be_bytes());
    Some((u32::from_be_bytes(number), whole))
}

/// Sends frames and receives them until all have returned or `limit` is over.
pub(super) fn exchange(
    pair: &mut QueuePair,
    to: MacAddress,
    from: MacAddress,
    limit: Duration,
) -> Result<Exchange, Error> {
    let begin = Instant::now();
    // Unique to this run, so that a late frame of an earlier run is not counted.
    let nanoseconds = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |now| now.subsec_nanos());
    let tag = u64::from(std::process::id()) << 32 | u64::from(nanoseconds);
    let mut seen = vec![false; usize::try_from(FRAMES).unwrap_or_default()];
    let mut done = Exchange::default();
    let mut copy = [0; LEN];
    while done.returned + done.wrong < FRAMES && begin.elapsed() < limit {
        if done.returned == 0 && done.wrong == 0 && begin.elapsed() > FIRST {
            break;
        }
        let before = done.sent;
        while done.sent < FRAMES && done.sent - done.returned < WINDOW {
            if !pair.transmit.send(&frame(to, from, tag, done.sent))? {
                break;
            }
            done.sent += 1;
        }
        if done.sent != before {
            pair.transmit.flush()?;
        }
        pair.transmit.reap()?;
        let taken = pair.receive.poll(64, |frame| {
            // A frame that cannot be copied is a foreign one.
            let Some((number, whole)) = frame
                .copy_to(&mut copy)
                .ok()
                .and_then(|frame| parse(frame, tag))
            else {
                return;
            };
            let slot = usize::try_from(number)
                .ok()
                .and_then(|number| seen.get_mut(number));
            match slot {
                Some(seen) if whole && !*seen => {
                    *seen = true;
                    done.returned += 1;
                }
                _ => done.wrong += 1,
            }
        })?;
        if taken == 0 {
            std::thread::yield_now();
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_frames_of_this_run_count() {
        let mut bytes = frame([2; 6], [4; 6], 77, 5);
        assert_eq!(parse(&bytes, 77), Some((5, true)));
        assert_eq!(parse(&bytes, 78), None);
        // An echo swaps the addresses.
        bytes[..6].copy_from_slice(&[4; 6]);
        assert_eq!(parse(&bytes, 77), Some((5, true)));
        bytes[100] ^= 1;
        assert_eq!(parse(&bytes, 77), Some((5, false)));
        for len in 0..LEN {
            assert_ne!(parse(&bytes[..len], 77), Some((5, true)));
        }
    }
}
