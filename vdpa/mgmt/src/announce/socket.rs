//! A packet socket that sends a single frame.

use std::io;

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, sendto, socket_with};

/// The outgoing interface of a frame.
struct Interface(libc::sockaddr_ll);

impl Interface {
    fn at(index: u32) -> io::Result<Self> {
        Ok(Self(libc::sockaddr_ll {
            sll_family: u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?,
            // The kernel takes the protocol from the frame's header.
            sll_protocol: 0,
            sll_ifindex: i32::try_from(index).map_err(io::Error::other)?,
            sll_hatype: 0,
            sll_pkttype: 0,
            // The frame contains the address.
            sll_halen: 0,
            sll_addr: [0; 8],
        }))
    }
}

// SAFETY: `f` gets a pointer to a whole `sockaddr_ll`, the address type of packet sockets, and its
// size. The address lives as long as `self`, and so during the call.
unsafe impl SocketAddrArg for Interface {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        let length = SocketAddrLen::try_from(size_of::<libc::sockaddr_ll>()).unwrap_or_default();
        f((&raw const self.0).cast(), length)
    }
}

/// Sends a frame, including its Ethernet header, out of the interface with this index. It needs
/// CAP_NET_RAW.
pub(super) fn send(index: u32, frame: &[u8]) -> io::Result<()> {
    // No protocol, so nothing is received.
    let socket = socket_with(
        AddressFamily::PACKET,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // A full queue is not waited for: one lost frame does not matter.
    let sent = sendto(&socket, frame, SendFlags::DONTWAIT, &Interface::at(index)?)?;
    if sent == frame.len() {
        Ok(())
    } else {
        Err(io::Error::from(io::ErrorKind::WriteZero))
    }
}
