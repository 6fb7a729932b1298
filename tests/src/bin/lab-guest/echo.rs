//! Sends every frame back to whoever sent it, once it was checked.
//!
//! The other side of [`crate::frames`] with a peer: addresses are swapped, the
//! rest stays, so that both ends check every byte and the sender's window paces
//! the traffic in both directions.

use crate::network::{self, Address};
use crate::{frames, info};
use lab::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// How long one wait takes at most.
const TURN: Duration = Duration::from_millis(20);

/// `echo`: until `count` frames went back, or nothing came for `silence`. Says
/// first when it listens: what comes before that is lost.
pub(crate) fn echo(nic: &str, count: u64, silence: Duration) -> Result<Value> {
    let own = network::address(nic)?;
    let socket = frames::packet_socket(nic)?;
    let mut buffer = frames::receive_buffer(frames::maximum_size(nic)?);
    let before = info::statistics(nic);
    crate::say("", &json!({ "listening": nic }));
    let started = Instant::now();
    let mut progress = started;
    let (mut echoed, mut corrupt) = (0_u64, 0_u64);
    while echoed < count && progress.elapsed() < silence {
        let Some(length) = frames::receive(&socket, &mut buffer)? else {
            wait(&socket, PollFlags::IN)?;
            continue;
        };
        progress = Instant::now();
        let frame = buffer.get_mut(..length).unwrap_or_default();
        if !frames::is_intact(frame) {
            corrupt += 1;
        } else if turn_round(frame, &own) {
            send(&socket, frame, progress + silence)?;
            echoed += 1;
        }
    }
    let value = json!({ "echoed": echoed, "corrupt": corrupt });
    Ok(frames::described(nic, value, started.elapsed(), &before))
}

/// Addresses a frame to its sender. Others than for this NIC are left alone:
/// to echo those of a third one would confuse the switch.
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
