//! Frames whose return is recognised.
//!
//! ```text
//!   destination 6 | source 6 | 0x88b5 | tag u64 | number u32 | filling | FNV-1a of all but the addresses, u64
//! ```
//! The tag is this run's own. A peer that sends frames back may swap the addresses,
//! so they are not in the checksum.

use std::time::{Duration, Instant, SystemTime};

use crate::Error;
use crate::control_queue::MacAddress;
use crate::netdev::QueuePair;

/// Ethertype "local experimental 1" (IEEE 802).
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// Bytes of a frame: more than the shortest Ethernet frame, and with a filling.
const LEN: usize = 200;
/// Bytes of the checksum behind it.
const SUM: usize = 8;
/// Frames to exchange.
pub(super) const FRAMES: u32 = 1000;
/// Frames under way at once.
const WINDOW: u32 = 16;
/// How long the first frame may take; after that nothing is expected to come back.
const FIRST: Duration = Duration::from_secs(1);

/// What became of the frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Exchange {
    pub(super) sent: u32,
    pub(super) returned: u32,
    /// With this run's tag and number but a wrong checksum, or a second time.
    pub(super) wrong: u32,
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Frame `number`.
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

/// The number of a frame of this run, and whether it is whole; `None` for any other frame.
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

/// Sends frames and takes them back until all are there or `limit` is over.
pub(super) fn exchange(
    pair: &mut QueuePair,
    to: MacAddress,
    from: MacAddress,
    limit: Duration,
) -> Result<Exchange, Error> {
    let begin = Instant::now();
    // Of this run, so that a late frame of an earlier one is not taken for ours.
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
            // A copy that fails is a frame that is not ours.
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
        // Swapped addresses are what an echo does.
        bytes[..6].copy_from_slice(&[4; 6]);
        assert_eq!(parse(&bytes, 77), Some((5, true)));
        bytes[100] ^= 1;
        assert_eq!(parse(&bytes, 77), Some((5, false)));
        for len in 0..LEN {
            assert_ne!(parse(&bytes[..len], 77), Some((5, true)));
        }
    }
}
