//! Compares the frames that a guest sends to itself or to another guest with the other side's
//! counts.
//!
//! This module owns the judgement. Every frame must return once and whole. The device must count as
//! many on each of its two data queues, or the other guest must send as many back. Each comparison
//! has two independent counts.
//!
//! A flood continues in the guest while its VM changes: [`flood_on`], [`flood_off`].

use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::sim::SimDevice;
use serde_json::Value;
use std::time::Duration;

/// Far more than an exchange takes: a watchdog, not a measurement.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(240);

/// How long a peer listens for frames that do not arrive.
const ECHO_SILENCE: Duration = Duration::from_secs(20);

/// Frames of one exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frames {
    /// How many.
    pub count: u64,
    /// Bytes of each, with the Ethernet header, without its checksum.
    pub size: u64,
    /// How many may be in flight at once.
    pub window: u64,
}

/// Packets that a simulated network device has counted since its creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packets {
    /// On the receive queue.
    pub received: u64,
    /// On the transmit queue.
    pub transmitted: u64,
}

/// A device's counts. A device whose driver never reached FEATURES_OK refuses.
///
/// # Errors
/// Those of [`SimDevice::vstats`]; [`Error::Invalid`] for an answer without the counters.
pub fn packets(device: &SimDevice) -> Result<Packets> {
    Ok(Packets {
        received: number(&device.vstats(0)?, "rx packets")?,
        transmitted: number(&device.vstats(1)?, "tx packets")?,
    })
}

/// Makes the guest send frames through a NIC to itself.
///
/// # Errors
/// [`Error::Invalid`] unless every frame came back exactly once, unchanged; those of
/// [`Guest::command`].
pub fn exchange(guest: &mut Guest, nic: &str, frames: Frames) -> Result<()> {
    let Frames {
        count,
        size,
        window,
    } = frames;
    let answer = guest.command(&format!("frames {count} {size} {window} {nic}"))?;
    all_returned(&answer, count)
}

/// Checks a guest's answer to `frames`.
///
/// # Errors
/// [`Error::Invalid`] unless it sent so many frames, and each came back once, unchanged.
pub fn all_returned(answer: &Value, count: u64) -> Result<()> {
    expect_whole(answer, count)?;
    expect(answer, "lost", 0)
}

/// Makes a guest send frames to a peer, whose address is `mac` and which sends them back.
///
/// # Errors
/// [`Error::Invalid`] unless every frame came back exactly once, unchanged in both directions;
/// those of [`Guest::command`].
pub fn exchange_between(from: &mut Guest, to: &mut Guest, mac: &str, frames: Frames) -> Result<()> {
    exchange_from(from, "eth0", to, mac, frames)
}

/// Exchanges small and full frames, from each guest to the other. `macs`: the guest's address and
/// its peer's.
///
/// # Errors
/// As [`exchange_between`].
pub fn exchange_both_ways(guest: &mut Guest, peer: &mut Guest, macs: [&str; 2]) -> Result<()> {
    let frames = |count, size, window| Frames {
        count,
        size,
        window,
    };
    let [mac, other] = macs;
    exchange_between(guest, peer, other, frames(500, 64, 32))?;
    exchange_between(peer, guest, mac, frames(200, 1514, 8))
}

/// Like [`exchange_between`], from a NIC of the guest with another name.
///
/// # Errors
/// As [`exchange_between`].
pub fn exchange_from(
    from: &mut Guest,
    nic: &str,
    to: &mut Guest,
    mac: &str,
    frames: Frames,
) -> Result<()> {
    let Frames {
        count,
        size,
        window,
    } = frames;
    let echo = format!("echo {count} {}", ECHO_SILENCE.as_secs());
    to.listen(&echo)?;
    let frames = format!("frames {count} {size} {window} {nic} to {mac}");
    let sent = from.command_within(&frames, EXCHANGE_LIMIT)?;
    let echoed = to.answer(&echo, EXCHANGE_LIMIT)?;
    expect_whole(&sent, count)?;
    expect(&echoed, "echoed", count)?;
    expect(&echoed, "corrupt", 0)
}

/// Checks that all frames were sent and came back once.
fn expect_whole(answer: &Value, count: u64) -> Result<()> {
    for (name, wanted) in [
        ("tx", count),
        ("rx", count),
        ("corrupt", 0),
        ("duplicate", 0),
    ] {
        expect(answer, name, wanted)?;
    }
    Ok(())
}

fn expect(answer: &Value, name: &str, wanted: u64) -> Result<()> {
    let is = number(answer, name)?;
    if is == wanted {
        return Ok(());
    }
    Err(Error::invalid(
        "the exchange of frames",
        format!("{name} is {is} and should be {wanted}: {answer}"),
    ))
}

/// Sends a hundred frames through the guest's first NIC and back, which `device` must count too.
/// Tests call it after each change to a network.
///
/// # Panics
/// If a frame is missing, damaged or doubled, with the reason.
#[track_caller]
pub fn check_traffic(guest: &mut Guest, device: &SimDevice) {
    let frames = Frames {
        count: 100,
        size: 590,
        window: 16,
    };
    or_panic(exchange_counted(guest, "eth0", device, &[frames]));
}

/// Starts frames from a NIC to the device with this address, which sends them back. They continue
/// until [`flood_off`], with a window of them in flight.
///
/// # Panics
/// If the guest refuses, with the reason.
#[track_caller]
pub fn flood_on(guest: &mut Guest, nic: &str, mac: &str) {
    or_panic(guest.command(&format!("flood-on 300 64 {nic} to {mac}")));
}

/// Ends the flood.
///
/// # Panics
/// As [`assert_flood_returned`].
#[track_caller]
pub fn flood_off(guest: &mut Guest) -> Value {
    let answer = or_panic(guest.command_within("flood-off", EXCHANGE_LIMIT));
    assert_flood_returned(&answer);
    answer
}

/// Ends a flood during which the network changed.
///
/// # Panics
/// If no frame returned, one is damaged or doubled, or more than `may_lose` are missing.
#[track_caller]
pub fn flood_off_with_losses(guest: &mut Guest, may_lose: u64) {
    let answer = or_panic(guest.command_within("flood-off", EXCHANGE_LIMIT));
    println!("{answer}");
    for wrong in ["corrupt", "duplicate"] {
        assert_eq!(answer[wrong], 0, "{wrong}: {answer}");
    }
    assert!(answer["rx"].as_u64() > Some(0), "{answer}");
    let lost = or_panic(number(&answer, "lost"));
    assert!(lost <= may_lose, "{answer}");
}

/// Makes a guest send frames to a peer that sends all frames back (`echo-on`).
///
/// # Errors
/// As [`exchange`].
pub fn exchange_with(guest: &mut Guest, mac: &str, frames: Frames) -> Result<()> {
    exchange(guest, &format!("eth0 to {mac}"), frames)
}

/// Checks the answer that ends frames in the background: some were sent, and each returned once,
/// intact.
///
/// # Panics
/// If a frame is missing, damaged or doubled.
#[track_caller]
pub fn assert_flood_returned(answer: &Value) {
    println!("{answer}");
    let sent = answer["tx"].as_u64().unwrap_or_default();
    assert!(sent > 0, "{answer}");
    or_panic(all_returned(answer, sent));
}

#[track_caller]
fn or_panic<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{}", crate::error::report(&error)))
}

/// Like [`exchange`], for several sizes one after the other. The device must then have counted
/// exactly these frames.
///
/// # Errors
/// As [`exchange`]; [`Error::Invalid`] if the device counted others.
pub fn exchange_counted(
    guest: &mut Guest,
    nic: &str,
    device: &SimDevice,
    all: &[Frames],
) -> Result<()> {
    let before = packets(device)?;
    for frames in all {
        exchange(guest, nic, *frames)?;
    }
    let after = packets(device)?;
    let sum: u64 = all.iter().map(|frames| frames.count).sum();
    let moved = Packets {
        received: after.received.saturating_sub(before.received),
        transmitted: after.transmitted.saturating_sub(before.transmitted),
    };
    let wanted = Packets {
        received: sum,
        transmitted: sum,
    };
    if moved != wanted {
        return Err(Error::invalid(
            format!("the count of {}", device.name()),
            format!("it is {moved:?} for {sum} frames"),
        ));
    }
    Ok(())
}

fn number(value: &Value, name: &str) -> Result<u64> {
    value[name]
        .as_u64()
        .ok_or_else(|| Error::invalid(value.to_string(), format!("it has no number {name:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Duration;

    fn guest_that_answers(answer: &str) -> Guest {
        let script = format!("echo '@lab ready {{}}'; read l; echo '@lab {answer}'; read l");
        let command = move || {
            let mut command = Command::new("sh");
            command.args(["-c", &script]);
            command
        };
        Guest::start_command(command, Duration::from_secs(20)).unwrap()
    }

    const FRAMES: Frames = Frames {
        count: 3,
        size: 64,
        window: 1,
    };

    #[test]
    fn a_lost_or_spoiled_frame_is_an_error() {
        let answer = |tx, rx, corrupt, duplicate, lost| {
            format!(
                "{{\"tx\":{tx},\"rx\":{rx},\"corrupt\":{corrupt},\"duplicate\":{duplicate},\
                 \"lost\":{lost}}}"
            )
        };
        let judge = |answer: String| exchange(&mut guest_that_answers(&answer), "eth0", FRAMES);
        judge(answer(3, 3, 0, 0, 0)).unwrap();
        for wrong in [
            answer(3, 2, 0, 0, 1),
            answer(3, 3, 1, 0, 0),
            answer(3, 3, 0, 1, 0),
            answer(2, 2, 0, 0, 0),
            "{}".to_owned(),
        ] {
            assert!(judge(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
