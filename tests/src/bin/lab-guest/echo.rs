//! Sends every frame back to its sender after checking it.
//!
//! This is the other side of [`crate::frames`] with a peer. It swaps the addresses and keeps the
//! rest, so that both ends check every byte and the sender's window paces the traffic in both
//! directions.

use crate::network::{self, Address};
use crate::{frames, info};
use lab::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest time of one wait.
const TURN: Duration = Duration::from_millis(20);

/// How long an echo in the background tries to send a frame.
const BLOCKED: Duration = Duration::from_secs(60);

/// Counts of frames sent back.
#[derive(Debug, Default, Clone, Copy)]
struct Echoed {
    echoed: u64,
    corrupt: u64,
}

impl Echoed {
    fn to_json(self) -> Value {
        json!({ "echoed": self.echoed, "corrupt": self.corrupt })
    }
}

/// The one echo of this guest that continues while other commands run.
static BACKGROUND: Mutex<Option<Background>> = Mutex::new(None);

struct Background {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Echoed>>,
}

fn background() -> MutexGuard<'static, Option<Background>> {
    BACKGROUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `echo-on`: echoes until `echo-off`.
pub(crate) fn start(nic: &str) -> Result<Value> {
    let mut background = background();
    if background.is_some() {
        return Err(Error::invalid("echo-on", "an echo is on already"));
    }
    let mut echo = Echo::new(nic)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            echo.turn(Instant::now() + BLOCKED)?;
        }
        Ok(echo.echoed)
    });
    *background = Some(Background { stop, thread });
    Ok(json!({ "echo": "on" }))
}

/// `echo-off`: ends it and returns the counts.
pub(crate) fn stop() -> Result<Value> {
    let Background { stop, thread } = background()
        .take()
        .ok_or_else(|| Error::invalid("echo-off", "no echo is on"))?;
    stop.store(true, Ordering::Relaxed);
    let echoed = thread
        .join()
        .map_err(|_| Error::invalid("echo-off", "the echo's thread has panicked"))?;
    Ok(echoed?.to_json())
}

/// `echo`: echoes until `count` frames went back, or no frame came for `silence`. It first reports
/// that it listens: earlier frames are lost.
pub(crate) fn echo(nic: &str, count: u64, silence: Duration) -> Result<Value> {
    let mut echo = Echo::new(nic)?;
    let before = info::statistics(nic);
    crate::say("", &json!({ "listening": nic }));
    let started = Instant::now();
    let mut progress = started;
    while echo.echoed.echoed < count && progress.elapsed() < silence {
        if echo.turn(progress + silence)? {
            progress = Instant::now();
        }
    }
    let value = echo.echoed.to_json();
    Ok(frames::described(nic, value, started.elapsed(), &before))
}

/// A NIC that sends its frames back.
struct Echo {
    own: Address,
    socket: OwnedFd,
    buffer: Vec<u8>,
    echoed: Echoed,
}

impl Echo {
    fn new(nic: &str) -> Result<Self> {
        Ok(Self {
            own: network::address(nic)?,
            socket: frames::packet_socket(nic)?,
            buffer: frames::receive_buffer(frames::maximum_size(nic)?),
            echoed: Echoed::default(),
        })
    }

    /// Sends a frame back, if there is one; `false` if there was none for a while.
    fn turn(&mut self, deadline: Instant) -> Result<bool> {
        let Some(length) = frames::receive(&self.socket, &mut self.buffer)? else {
            wait(&self.socket, PollFlags::IN)?;
            return Ok(false);
        };
        let frame = self.buffer.get_mut(..length).unwrap_or_default();
        if !frames::is_intact(frame) {
            self.echoed.corrupt += 1;
        } else if turn_round(frame, &self.own) {
            send(&self.socket, frame, deadline)?;
            self.echoed.echoed += 1;
        }
        Ok(true)
    }
}

/// Addresses a frame to its sender. It skips frames for other NICs: to echo those would confuse the
/// switch.
fn turn_round(frame: &mut [u8], own: &Address) -> bool {
    let Some((to, rest)) = frame.split_at_mut_checked(own.len()) else {
        return false;
    };
    let Some(from) = rest.get_mut(..own.len()) else {
        return false;
    };
    if to != own {
        return false;
    }
    to.swap_with_slice(from);
    true
}

fn send(socket: &OwnedFd, frame: &[u8], deadline: Instant) -> Result<()> {
    loop {
        match rustix::net::send(socket, frame, SendFlags::DONTWAIT) {
            Ok(_) => return Ok(()),
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) if Instant::now() < deadline => {
                wait(socket, PollFlags::OUT)?;
            }
            Err(error) => return Err(Error::system("send a frame back")(error)),
        }
    }
}

fn wait(socket: &OwnedFd, what: PollFlags) -> Result<()> {
    let limit =
        Timespec::try_from(TURN).map_err(|_| Error::invalid("the wait", "it is out of range"))?;
    match poll(&mut [PollFd::new(socket, what)], Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(Error::system("wait for frames")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_frames_for_this_nic_are_turned_round() {
        let own = [2, 0, 0, 0, 0, 1];
        let mut frame = [&own[..], &[2, 0, 0, 0, 0, 2], &[0x88, 0xb5]].concat();
        assert!(turn_round(&mut frame, &own));
        assert_eq!(frame[..6], [2, 0, 0, 0, 0, 2]);
        assert_eq!(frame[6..12], own);
        assert!(!turn_round(&mut frame, &own));
        for short in [0, 5, 6, 11] {
            assert!(!turn_round(&mut vec![2; short], &[2; 6]));
        }
    }
}
