//! Records what programs send to the kernel through generic netlink, byte for byte: a tap (`nlmon`)
//! and a packet socket on it.
//!
//! This module owns the tap and removes it when dropped. It knows no family: a request is its
//! `struct nlmsghdr` and the bytes after it. Tests compare two programs by their requests, not by
//! the kernel's reaction, so they also cover requests that no driver of the lab accepts.

use crate::error::{Error, Result};
use crate::notice;
use crate::process::output;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socket_with};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process::Command;

/// The tap's name.
const NAME: &str = "lab-nlmon";

/// NLM_F_REQUEST (include/uapi/linux/netlink.h).
const NLM_F_REQUEST: u16 = 1;

/// Size of `struct nlmsghdr`.
const HEADER: usize = 16;

/// Longer than any message of a dump.
const MESSAGE_MAX: usize = 1 << 17;

/// A tap on all netlink messages of this network namespace.
#[derive(Debug)]
pub struct NetlinkTap {
    socket: OwnedFd,
}

/// A request to the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// `nlmsg_type`: in generic netlink the family's number.
    pub message_type: u16,
    /// What follows `struct nlmsghdr`.
    pub payload: Vec<u8>,
}

impl NetlinkTap {
    /// Creates the tap and brings it up.
    ///
    /// # Errors
    /// [`Error::Program`] without the module nlmon; [`Error::System`].
    pub fn open() -> Result<Self> {
        output(Command::new("modprobe").arg("nlmon"))?;
        output(Command::new("ip").args(["link", "add", NAME, "type", "nlmon"]))?;
        // From here on a failure must not leave the tap behind.
        let tap = Self {
            socket: packet_socket()?,
        };
        output(Command::new("ip").args(["link", "set", NAME, "up"]))?;
        tap.bind()?;
        Ok(tap)
    }

    /// Requests of all programs since the last call, in their order.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn requests(&self) -> Result<Vec<Request>> {
        let mut found = Vec::new();
        let mut buffer = vec![0; MESSAGE_MAX];
        loop {
            let length = match recv(&self.socket, buffer.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok((length, _)) => length,
                Err(rustix::io::Errno::AGAIN) => return Ok(found),
                // The interface went down and up.
                Err(rustix::io::Errno::INTR | rustix::io::Errno::NETDOWN) => continue,
                Err(error) => return Err(Error::system("read the tap")(error)),
            };
            found.extend(buffer.get(..length).and_then(request));
        }
    }

    fn bind(&self) -> Result<()> {
        let failed = Error::system("bind the packet socket");
        let index = rustix::net::netdevice::name_to_index(&self.socket, NAME)
            .map_err(Error::system("find the tap"))?;
        // SAFETY: needed because the C structure has no constructor. All fields are integers, for
        // which zero is valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or_default();
        address.sll_protocol = u16::try_from(libc::ETH_P_ALL).unwrap_or_default().to_be();
        address.sll_ifindex = i32::try_from(index).unwrap_or_default();
        let length = libc::socklen_t::try_from(size_of_val(&address)).unwrap_or_default();
        // SAFETY: needed because no safe wrapper binds a packet socket. The pointer is to a whole
        // `sockaddr_ll` of the given length that lives across the call.
        let bound =
            unsafe { libc::bind(self.socket.as_raw_fd(), (&raw const address).cast(), length) };
        match bound {
            0 => Ok(()),
            _ => Err(failed(io::Error::last_os_error())),
        }
    }
}

impl Drop for NetlinkTap {
    fn drop(&mut self) {
        notice::left_behind(output(Command::new("ip").args(["link", "del", NAME])));
        let _ = rustix::system::delete_module(c"nlmon", libc::O_NONBLOCK);
    }
}

/// Protocol 0: it receives nothing until it is bound.
fn packet_socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)
        .map_err(Error::system("create a packet socket"))
}

/// The request in a packet: `struct nlmsghdr` is u32 length, u16 type, u16 flags, u32 sequence, u32
/// port.
fn request(packet: &[u8]) -> Option<Request> {
    let half = |at: usize| Some(u16::from_ne_bytes(packet.get(at..at + 2)?.try_into().ok()?));
    let length = u32::from_ne_bytes(packet.get(..4)?.try_into().ok()?);
    let payload = packet.get(HEADER..usize::try_from(length).ok()?)?;
    (half(6)? & NLM_F_REQUEST != 0).then_some(Request {
        message_type: half(4)?,
        payload: payload.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn requests_are_distinguished_from_answers() {
        let packet = |length: u32, flags: u16| {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.extend(30_u16.to_ne_bytes());
            bytes.extend(flags.to_ne_bytes());
            bytes.extend([0; 8]);
            bytes.extend([7, 1, 0, 0]);
            bytes
        };
        let found = request(&packet(20, 5)).unwrap();
        assert_eq!(found.message_type, 30);
        assert_eq!(found.payload, [7, 1, 0, 0]);
        assert_eq!(request(&packet(20, 2)), None);
        assert_eq!(request(&packet(24, 1)), None);
        assert_eq!(request(&packet(3, 1)), None);
        assert_eq!(request(&[]), None);
    }
}
