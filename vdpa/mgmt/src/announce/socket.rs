//! A packet socket that sends one frame.

use std::io;

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, sendto, socket_with};

/// The interface that a frame goes out of.
struct Interface(libc::sockaddr_ll);

impl Interface {
    fn at(index: u32) -> io::Result<Self> {
        Ok(Self(libc::sockaddr_ll {
            sll_family: u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?,
            // The frame has its type in it, and the kernel takes it from there.
            sll_protocol: 0,
            sll_ifindex: i32::try_from(index).map_err(io::Error::other)?,
            sll_hatype: 0,
            sll_pkttype: 0,
            // The frame has its address in it.
            sll_halen: 0,
            sll_addr: [0; 8],
        }))
    }
}

// SAFETY: `f` gets a pointer to a whole `sockaddr_ll`, which is what packet sockets take, and its size; it lives as long as
// `self`, and so during the call.
unsafe impl SocketAddrArg for Interface {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        let length = SocketAddrLen::try_from(size_of::<libc::sockaddr_ll>()).unwrap_or_default();
        f((&raw const self.0).cast(), length)
    }
}

/// Sends a frame, from its Ethernet header on, out of the interface with this index. It needs CAP_NET_RAW.
pub(super) fn send(index: u32, frame: &[u8]) -> io::Result<()> {
    // Of no protocol: nothing is received.
    let socket = socket_with(
        AddressFamily::PACKET,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // A queue that is full is not waited for: a frame more or less does not matter.
    let sent = sendto(&socket, frame, SendFlags::DONTWAIT, &Interface::at(index)?)?;
    if sent == frame.len() {
        Ok(())
    } else {
        Err(io::Error::from(io::ErrorKind::WriteZero))
    }
}
