//! The checks of a probe, each with a result.

use std::error::Error;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::echo::{self, FRAMES};
use super::identity::Identity;
use crate::causes::in_one_line;
use crate::control_queue::MacAddress;
use crate::device::{Device, VringBase};
use crate::iotlb::Iotlb;
use crate::netdev::{Kick, Netdev, Options, TxQueue};

/// Maximum time for the device to send one frame.
const PATIENCE: Duration = Duration::from_secs(2);
/// A locally administered address that no device of this project has: frames to it reach no device.
const ABSENT: MacAddress = [0x02, 0xfe, 0xed, 0xfe, 0xed, 0x01];

/// The options of a probe.
#[derive(Debug, Clone, Copy)]
pub struct ProbeOptions {
    /// Destination of the frames; the device's own address if `None`. A peer shall send them back.
    pub peer: Option<MacAddress>,
    /// Maximum duration of the traffic.
    pub traffic: Duration,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It works.
    Ok,
    /// It does not work.
    Failed,
    /// The device does not offer it.
    NotOffered,
    /// The check allows no conclusion; the detail has the reason.
    Inconclusive,
}

/// A check and its result.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Check {
    /// The subject of the check, one word or two.
    pub name: &'static str,
    /// The result.
    pub outcome: Outcome,
    /// The observation, or the reason why there is none.
    pub detail: String,
    /// Duration of the check.
    pub milliseconds: u64,
}

/// A result without name and duration.
type Result = std::result::Result<(Outcome, String), Box<dyn Error>>;

fn ok(detail: impl Into<String>) -> Result {
    Ok((Outcome::Ok, detail.into()))
}

fn failed(detail: impl Into<String>) -> Result {
    Ok((Outcome::Failed, detail.into()))
}

fn not_offered(detail: impl Into<String>) -> Result {
    Ok((Outcome::NotOffered, detail.into()))
}

fn inconclusive(detail: impl Into<String>) -> Result {
    Ok((Outcome::Inconclusive, detail.into()))
}

/// Runs checks and collects their results.
struct Runner<'a> {
    checks: Vec<Check>,
    progress: &'a mut dyn FnMut(&str),
}

impl Runner<'_> {
    fn check(&mut self, name: &'static str, attempt: impl FnOnce() -> Result) {
        (self.progress)(name);
        let begin = Instant::now();
        let (outcome, detail) = match attempt() {
            Ok(result) => result,
            Err(error) => (Outcome::Failed, in_one_line(error.as_ref())),
        };
        let milliseconds = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.checks.push(Check {
            name,
            outcome,
            detail,
            milliseconds,
        });
    }
}

/// Runs all checks of a network device; a device of another class gets a single check that reports
/// it.
pub(super) fn all(
    device: Device,
    iotlb: Iotlb,
    identity: &Identity,
    options: &ProbeOptions,
    progress: &mut dyn FnMut(&str),
) -> Vec<Check> {
    let mut runner = Runner {
        checks: Vec::new(),
        progress,
    };
    let Some(network) = &identity.network else {
        runner.check("start", || {
            inconclusive("not a network device: only its own description was checked")
        });
        return runner.checks;
    };
    let missing = device.missing_doorbell(1);
    let mut running = None;
    runner.check("start", || {
        let netdev = Netdev::start(device, iotlb, &Options::default())?;
        let format = if netdev.device.is_packed() {
            "packed"
        } else {
            "split"
        };
        let entries = netdev
            .driver
            .pairs
            .first()
            .map_or(0, |pair| pair.transmit.queue().size());
        let result = ok(format!("{format} rings of {entries} entries"));
        running = Some(netdev);
        result
    });
    let Some(mut netdev) = running else {
        return runner.checks;
    };
    runner.check("traffic", || {
        traffic(&mut netdev, network.mac, network.link, options)
    });
    runner.check("doorbell", || doorbell(&mut netdev, missing?));
    runner.check("interrupt", || interrupt(&mut netdev));
    suspension(&mut runner, netdev);
    runner.checks
}

fn traffic(
    netdev: &mut Netdev,
    own: Option<MacAddress>,
    link: Option<bool>,
    options: &ProbeOptions,
) -> Result {
    let Some(own) = own else {
        return inconclusive("the device has no address of its own to send from");
    };
    let Some(pair) = netdev.driver.pairs.first_mut() else {
        return failed("there is no queue pair");
    };
    let done = echo::exchange(pair, options.peer.unwrap_or(own), own, options.traffic)?;
    let (sent, returned) = (done.sent, done.returned);
    let completed = pair.transmit.queue().counters().packets;
    if done.wrong > 0 {
        return failed(format!("{} of {sent} frames came back damaged", done.wrong));
    }
    if returned == FRAMES {
        return ok(format!("{returned} frames came back unchanged"));
    }
    if returned > 0 && options.peer.is_none() && returned < sent / 2 {
        return failed(format!("only {returned} of {sent} frames came back"));
    }
    if returned > 0 {
        return ok(format!(
            "{returned} of {sent} frames came back unchanged in the time given"
        ));
    }
    if completed == 0 {
        return failed(format!("the device took none of {sent} frames"));
    }
    if options.peer.is_some() {
        return failed(format!(
            "sent {sent} frames, nothing came back from the peer: does it echo, and is it on \
             the same network?"
        ));
    }
    let down = if link == Some(false) {
        "; the link is down"
    } else {
        ""
    };
    inconclusive(format!(
        "sent, nothing came back (no loopback: normal on a switch{down})"
    ))
}

/// Sends one frame to an unassigned address, kicking in any case.
pub(crate) fn send_one(transmit: &mut TxQueue) -> std::result::Result<bool, crate::Error> {
    let mut frame = [0; 60];
    frame[..6].copy_from_slice(&ABSENT);
    frame[6..12].copy_from_slice(&ABSENT);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    let taken = transmit.send(&frame)?;
    // Flush with the frame: the kick decision must not be left for the next one.
    transmit.flush()?;
    transmit.queue_mut().force_kick()?;
    Ok(taken)
}

fn doorbell(netdev: &mut Netdev, missing: Option<&str>) -> Result {
    if let Some(why) = missing {
        return not_offered(why);
    }
    let transmit = netdev.driver.transmit()?;
    transmit.drain(PATIENCE)?;
    if transmit.queue_mut().set_kick_by(Kick::Doorbell) != Kick::Doorbell {
        return failed("the device offered it, but it cannot be mapped after negotiation");
    }
    if send_one(transmit)? && transmit.drain(PATIENCE)? {
        ok("mapped, and the device reacted to a store")
    } else {
        failed("mapped, but the device did not react to a store within 2 s")
    }
}

fn interrupt(netdev: &mut Netdev) -> Result {
    let transmit = netdev.driver.transmit()?;
    transmit.drain(PATIENCE)?;
    transmit.queue_mut().clear_call()?;
    transmit.queue_mut().enable_interrupts()?;
    let begin = Instant::now();
    send_one(transmit)?;
    let called = wait(transmit, PATIENCE)?;
    let elapsed = begin.elapsed();
    transmit.queue_mut().disable_interrupts()?;
    if called {
        transmit.queue_mut().clear_call()?;
        transmit.drain(PATIENCE)?;
        return ok(format!("{} µs after the kick", elapsed.as_micros()));
    }
    if transmit.drain(PATIENCE)? {
        failed("the device used a buffer but did not signal the call eventfd within 2 s")
    } else {
        failed("the device did not use a buffer within 2 s")
    }
}

/// Whether the call eventfd is signalled in time.
pub(crate) fn wait(transmit: &TxQueue, limit: Duration) -> std::result::Result<bool, crate::Error> {
    let limit = Timespec::try_from(limit).unwrap_or(Timespec {
        tv_sec: 2,
        tv_nsec: 0,
    });
    let mut fds = [PollFd::new(transmit, PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&limit)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                return Err(crate::Error::other("an eventfd failed").because(errno));
            }
        }
    }
}

fn suspension(runner: &mut Runner<'_>, mut netdev: Netdev) {
    let mut suspended = false;
    runner.check("suspend", || {
        if !netdev.device.can_suspend() {
            return not_offered("the device lacks the backend feature SUSPEND");
        }
        netdev.driver.transmit()?.drain(PATIENCE)?;
        netdev.suspend()?;
        suspended = true;
        ok("")
    });
    if !suspended {
        return;
    }
    runner.check("ring state", || ring_state(&mut netdev));
    runner.check("resume", || {
        if !netdev
            .device
            .backend_features()
            .contains(crate::uapi::BackendFeatures::RESUME)
        {
            return not_offered("the device lacks the backend feature RESUME");
        }
        netdev.resume()?;
        let transmit = netdev.driver.transmit()?;
        if send_one(transmit)? && transmit.drain(PATIENCE)? {
            ok("frames continue")
        } else {
            failed("the device takes no frame afterwards")
        }
    });
}

fn ring_state(netdev: &mut Netdev) -> Result {
    let queue = netdev.driver.transmit()?.queue();
    match netdev.device.vring_base(queue.index()) {
        Ok(base) if base == expected_base(queue.positions(), netdev.device.is_packed()) => {
            ok(format!("{base:?}"))
        }
        Ok(base) => failed(format!(
            "the device reports {base:?}, but the driver is at {:?}",
            queue.positions()
        )),
        Err(error) => not_offered(in_one_line(&error)),
    }
}

/// The ring position of a device that has no work left: the driver's position.
pub(crate) fn expected_base(positions: (u16, u16), packed: bool) -> VringBase {
    let (available, used) = positions;
    let number = u32::from(available) | u32::from(used) << 16;
    match VringBase::from_kernel(number, true) {
        Some(base) if packed => base,
        _ => VringBase::Split { index: available },
    }
}
