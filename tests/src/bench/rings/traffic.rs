//! Traffic: frames from one end to the other and back, or from one end to itself where the device
//! loops them back. Each frame is checked when it arrives.
//!
//! ```text
//!   layout of a frame: destination, source (6 bytes each), Ethernet type 0x88b5,
//!   number (8 bytes, little-endian), zeroes
//! ```
//! One thread drives all ends, as a guest's network stack does: interrupts are off while there is
//! work and on before it sleeps. The owner sets the rate while the thread runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use vdpa::control_queue::MacAddress;
use vdpa::netdev::{QueuePair, Received};
use vmm_sys_util::eventfd::EventFd;

use super::{failed, wait};
use crate::error::{Error, Result};

/// Bytes of a frame, with the Ethernet header, without its checksum.
pub(super) const FRAME: usize = 64;
/// Frames of one end that may be in flight.
pub(super) const WINDOW: u32 = 128;
/// IEEE 802 local experimental Ethernet type 1.
const TYPE: [u8; 2] = [0x88, 0xb5];
/// Bytes of destination and source.
const ADDRESSES: usize = 12;
const NUMBER: std::ops::Range<usize> = 14..22;
/// Frames received before the peer has its turn.
const BUDGET: usize = 64;
/// The longest sleep of the thread. It is far longer than any wait for a frame, so a lost interrupt
/// would show in the figures.
const LOOK: Duration = Duration::from_millis(500);
/// With frames in flight and no arrival for this long, a frame is lost.
const STALL: Duration = Duration::from_secs(10);

/// How many frames are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Demand {
    /// None.
    Nothing,
    /// This many per second, from each end.
    PerSecond(u32),
    /// As many as the window has room for.
    Everything,
}

impl Demand {
    fn to_word(self) -> u32 {
        match self {
            Self::Nothing => 0,
            Self::PerSecond(frames) => frames,
            Self::Everything => u32::MAX,
        }
    }

    fn of_word(word: u32) -> Self {
        match word {
            0 => Self::Nothing,
            u32::MAX => Self::Everything,
            frames => Self::PerSecond(frames),
        }
    }
}

/// State that the thread and its owner share.
#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    /// See [`Demand::of_word`].
    demand: AtomicU32,
    /// Frames that arrived, at all ends.
    arrived: AtomicU32,
    /// Signals that a field above has changed. Non-blocking.
    changed: EventFd,
}

/// Traffic that flows until it is dropped.
#[derive(Debug)]
pub(super) struct Traffic {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Traffic {
    /// Starts with nothing to send. Each end sends to the next, the last end to the first.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn start(ends: Vec<(QueuePair, MacAddress)>) -> Result<Self> {
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            demand: AtomicU32::new(0),
            arrived: AtomicU32::new(0),
            changed: vdpa::eventfd::new().map_err(Error::system("create an eventfd"))?,
        });
        let theirs = Arc::clone(&shared);
        let macs: Vec<MacAddress> = ends.iter().map(|(_, mac)| *mac).collect();
        let next = macs.iter().cycle().skip(1);
        let ends: Vec<End> = ends
            .into_iter()
            .zip(next)
            .map(|((pair, mac), to)| End::new(pair, mac, *to))
            .collect();
        let thread = std::thread::Builder::new()
            .name("traffic".to_owned())
            .spawn(move || drive(ends, &theirs))
            .map_err(Error::system("start a thread"))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Sets the rate from now on.
    pub(super) fn set(&self, demand: Demand) {
        self.shared
            .demand
            .store(demand.to_word(), Ordering::Relaxed);
        self.wake();
    }

    fn wake(&self) {
        // A full counter also wakes the thread.
        let _ = self.shared.changed.write(1);
    }

    /// Frames that have arrived; wraps.
    pub(super) fn arrived(&self) -> u32 {
        self.shared.arrived.load(Ordering::Relaxed)
    }

    /// Checks that the thread runs.
    ///
    /// # Errors
    /// Why it does not: a frame was lost or damaged, or a ring failed.
    pub(super) fn check(&mut self) -> Result<()> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.end()?;
        }
        match self.thread {
            Some(_) => Ok(()),
            None => Err(Error::invalid("the traffic", "its thread has ended")),
        }
    }

    fn end(&mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(ended)) => ended,
            Some(Err(_)) => Err(Error::invalid("the traffic", "its thread panicked")),
            None => Ok(()),
        }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("lab: {}", crate::error::report(&error));
        }
    }
}

/// One end: its queues, the next frame it sends, and the next it expects.
#[derive(Debug)]
struct End {
    pair: QueuePair,
    mac: MacAddress,
    frame: [u8; FRAME],
    sent: u64,
    expected: [u8; FRAME],
    received: u64,
    /// The transmit ring is full: its completions must wake the thread.
    full: bool,
}

fn frame(from: MacAddress, to: MacAddress) -> [u8; FRAME] {
    let mut frame = [0; FRAME];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&TYPE);
    frame
}

impl End {
    fn new(pair: QueuePair, mac: MacAddress, to: MacAddress) -> Self {
        Self {
            pair,
            mac,
            frame: frame(mac, to),
            sent: 0,
            expected: [0; FRAME],
            received: 0,
            full: false,
        }
    }

    /// Takes the frames that arrived from the end with the address `from`; returns their number.
    fn receive(&mut self, from: MacAddress) -> Result<u32> {
        if self.received == 0 {
            self.expected = frame(from, self.mac);
        }
        let (expected, received) = (&mut self.expected, &mut self.received);
        let mut wrong = None;
        let mut came = 0;
        let check = |arrived: Received<'_>| {
            expected[NUMBER].copy_from_slice(&received.to_le_bytes());
            let mut buffer = [0; FRAME];
            let length = arrived.len();
            let Ok(bytes) = arrived.copy_to(&mut buffer) else {
                wrong.get_or_insert(*received);
                return;
            };
            // A switch floods frames to unknown addresses: these belong to other pairs.
            if bytes.get(..ADDRESSES) != expected.get(..ADDRESSES) {
                return;
            }
            let whole = length == FRAME && bytes == &expected[..];
            if whole {
                *received += 1;
                came += 1;
            } else {
                wrong.get_or_insert(*received);
            }
        };
        self.pair
            .receive
            .poll(BUDGET, check)
            .map_err(failed("receive frames"))?;
        match wrong {
            None => Ok(came),
            Some(number) => Err(Error::invalid(
                "a frame that arrived",
                format!("frame {number} was due, and this is another one or a damaged one"),
            )),
        }
    }

    /// Sends up to `count` frames and returns how many went out.
    fn send(&mut self, count: u64) -> Result<u64> {
        let mut sent = 0;
        self.full = false;
        while sent < count {
            self.frame[NUMBER].copy_from_slice(&self.sent.to_le_bytes());
            let gone = self.pair.transmit.send(&self.frame);
            if !gone.map_err(failed("send a frame"))? {
                self.full = true;
                break;
            }
            self.sent += 1;
            sent += 1;
        }
        if sent > 0 {
            self.pair
                .transmit
                .flush()
                .map_err(failed("kick the device"))?;
        }
        Ok(sent)
    }

    /// Enables interrupts; `true` if there is work already.
    fn listen(&mut self) -> Result<bool> {
        let asked = failed("ask for interrupts");
        let mut work = self.pair.receive.queue_mut().enable_interrupts();
        if self.full {
            let completed = self.pair.transmit.queue_mut().enable_interrupts();
            work = work.and_then(|work| Ok(work | completed?));
        }
        work.map_err(asked)
    }

    fn deafen(&mut self) -> Result<()> {
        for queue in [
            self.pair.receive.queue_mut(),
            self.pair.transmit.queue_mut(),
        ] {
            queue
                .clear_call()
                .and_then(|_| queue.disable_interrupts())
                .map_err(failed("refuse interrupts"))?;
        }
        Ok(())
    }
}

/// The number of frames that may have been sent by now at a given rate.
#[derive(Debug)]
struct Allowance {
    demand: Demand,
    since: Instant,
    /// Frames that each end had sent by then.
    base: Vec<u64>,
}

impl Allowance {
    /// The frames that may go out now, and if there are none, when the next one may.
    fn of(&self, end: usize, sent: u64) -> (u64, Option<Duration>) {
        match self.demand {
            Demand::Nothing => (0, None),
            Demand::Everything => (u64::MAX, None),
            Demand::PerSecond(rate) => {
                let base = self.base.get(end).copied().unwrap_or(sent);
                let done = sent.saturating_sub(base);
                let elapsed = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
                let due = elapsed.saturating_mul(u64::from(rate)) / 1_000_000;
                let at = (done + 1).saturating_mul(1_000_000) / u64::from(rate.max(1));
                let left = Duration::from_micros(at.saturating_sub(elapsed));
                (due.saturating_sub(done), Some(left))
            }
        }
    }
}

fn drive(mut ends: Vec<End>, shared: &Shared) -> Result<()> {
    let mut allowance = Allowance {
        demand: Demand::Nothing,
        since: Instant::now(),
        base: Vec::new(),
    };
    let mut idle: Option<Instant> = None;
    while !shared.stop.load(Ordering::Relaxed) {
        let demand = Demand::of_word(shared.demand.load(Ordering::Relaxed));
        if demand != allowance.demand {
            allowance = Allowance {
                demand,
                since: Instant::now(),
                base: ends.iter().map(|end| end.sent).collect(),
            };
        }
        let (worked, next) = turn(&mut ends, &allowance, shared)?;
        if worked {
            idle = None;
            continue;
        }
        let mut work = false;
        for end in &mut ends {
            work |= end.listen()?;
        }
        if !work {
            let since = *idle.get_or_insert_with(Instant::now);
            if is_under_way(&ends) && since.elapsed() > STALL {
                return Err(stalled(&ends));
            }
            let changed = &shared.changed;
            sleep(&ends, changed, next.map_or(LOOK, |next| next.min(LOOK)))?;
        }
        for end in &mut ends {
            end.deafen()?;
        }
    }
    Ok(())
}

/// Receives and sends at each end once. Returns whether there was work, and else when the next
/// frame is due.
fn turn(
    ends: &mut [End],
    allowance: &Allowance,
    shared: &Shared,
) -> Result<(bool, Option<Duration>)> {
    let count = ends.len();
    let mut worked = false;
    let mut next: Option<Duration> = None;
    for at in 0..count {
        let (from, to) = ((at + count - 1) % count, (at + 1) % count);
        let received_there = ends.get(to).map_or(0, |end| end.received);
        let Some(from) = ends.get(from).map(|end| end.mac) else {
            continue;
        };
        let Some(end) = ends.get_mut(at) else {
            continue;
        };
        let came = end.receive(from)?;
        if came > 0 {
            shared.arrived.fetch_add(came, Ordering::Relaxed);
        }
        // An end that sends to itself counts what has just arrived.
        let arrived = if to == at {
            end.received
        } else {
            received_there
        };
        let room = u64::from(WINDOW).saturating_sub(end.sent.saturating_sub(arrived));
        let (allowed, due) = allowance.of(at, end.sent);
        let sent = end.send(room.min(allowed))?;
        worked |= came > 0 || sent > 0;
        next = match (next, due) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
    }
    Ok((worked, next))
}

fn is_under_way(ends: &[End]) -> bool {
    let sent: u64 = ends.iter().map(|end| end.sent).sum();
    let received: u64 = ends.iter().map(|end| end.received).sum();
    sent != received
}

fn sleep(ends: &[End], changed: &EventFd, limit: Duration) -> Result<()> {
    let mut descriptors: Vec<PollFd<'_>> = ends
        .iter()
        .flat_map(|end| {
            [
                PollFd::new(&end.pair.receive, PollFlags::IN),
                PollFd::new(&end.pair.transmit, PollFlags::IN),
            ]
        })
        .chain([PollFd::from_borrowed_fd(
            vdpa::eventfd::descriptor(changed),
            PollFlags::IN,
        )])
        .collect();
    wait::until(&mut descriptors, Some(limit))?;
    let _ = changed.read();
    Ok(())
}

fn stalled(ends: &[End]) -> Error {
    let stands: Vec<String> = ends
        .iter()
        .map(|end| {
            format!(
                "sent {}, received {}, receive ring at {:?}, transmit ring at {:?}",
                end.sent,
                end.received,
                end.pair.receive.queue().positions(),
                end.pair.transmit.queue().positions()
            )
        })
        .collect();
    Error::invalid(
        "the traffic",
        format!("no frame arrived for {STALL:?}: {}", stands.join("; ")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_passes_through_a_word() {
        for demand in [
            Demand::Nothing,
            Demand::PerSecond(1),
            Demand::PerSecond(15_000),
            Demand::Everything,
        ] {
            assert_eq!(Demand::of_word(demand.to_word()), demand);
        }
    }

    #[test]
    fn a_rate_is_kept_and_gives_the_time_of_the_next_frame() {
        let Some(since) = Instant::now().checked_sub(Duration::from_secs(1)) else {
            return;
        };
        let allowance = Allowance {
            demand: Demand::PerSecond(10),
            since,
            base: vec![100],
        };
        assert_eq!(allowance.of(0, 100).0, 10);
        assert_eq!(allowance.of(0, 104).0, 6);
        let (none, next) = allowance.of(0, 110);
        assert_eq!(none, 0);
        let next = next.unwrap_or_default();
        assert!(next > Duration::ZERO && next <= Duration::from_millis(100));
        // Late frames are sent at once, early ones never.
        assert_eq!(allowance.of(0, 200).0, 0);
    }
}
