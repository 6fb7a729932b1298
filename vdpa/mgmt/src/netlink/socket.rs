//! A netlink socket for exchanges with the kernel only.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recvfrom, sendto,
    socket_with,
};

use super::message::Protocol;

/// Maximum size of a datagram. The kernel puts at most 32 KiB into one part of a dump. The
/// description of one link with all its virtual functions is longer: a list of at most 64 KiB.
const DATAGRAM_MAX: usize = 128 * 1024;

/// A netlink socket, bound to a port that the kernel chooses.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

impl Socket {
    /// Opens a socket. `patience` is the maximum time for one datagram.
    pub(super) fn open(protocol: Protocol, patience: Duration) -> io::Result<Self> {
        let socket = Self::bound(protocol)?;
        // Explanations with errors, which then do not repeat the whole request.
        socket.set_option(libc::NETLINK_EXT_ACK, 1)?;
        socket.set_option(libc::NETLINK_CAP_ACK, 1)?;
        socket.set_patience(Some(patience))?;
        Ok(socket)
    }

    /// Opens a socket that only listens to a multicast group.
    pub(crate) fn listen(protocol: Protocol, group: u32) -> io::Result<Self> {
        let socket = Self::bound(protocol)?;
        let group = libc::c_int::try_from(group).map_err(io::Error::other)?;
        socket.set_option(libc::NETLINK_ADD_MEMBERSHIP, group)?;
        Ok(socket)
    }

    fn bound(protocol: Protocol) -> io::Result<Self> {
        let fd = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            match protocol {
                Protocol::Generic => Some(GENERIC),
                // NETLINK_ROUTE is protocol 0.
                Protocol::Route => None,
            },
        )?;
        bind(&fd, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self {
            fd,
            buffer: vec![0; DATAGRAM_MAX],
        })
    }

    /// Sets the maximum time for one datagram; `None` is forever. Zero does not wait.
    pub(crate) fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        // The kernel interprets zero as forever.
        let patience = patience.map(|patience| patience.max(Duration::from_micros(1)));
        Ok(set_socket_timeout(&self.fd, Timeout::Recv, patience)?)
    }

    /// Sends a request. The kernel carries it out in this call: it may sleep uninterruptibly while
    /// the vDPA lock is held or a device is in use.
    pub(super) fn send(&self, message: &[u8]) -> io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        let sent = retry(|| sendto(&self.fd, message, SendFlags::empty(), &kernel))?;
        if sent != message.len() {
            return Err(io::Error::new(
                io::ErrorKind::WriteZero,
                "the kernel took only part of the request",
            ));
        }
        Ok(())
    }

    /// Sets a numeric netlink option.
    fn set_option(&self, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        let size = libc::socklen_t::try_from(size_of_val(&value)).map_err(io::Error::other)?;
        // SAFETY: rustix has no netlink options, hence the direct call. The descriptor is open
        // during the call. The pointer and size describe `value`, which the kernel only reads.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_NETLINK,
                option,
                (&raw const value).cast(),
                size,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The next datagram from the kernel. Those of other processes are dropped: any process may
    /// send to this socket.
    pub(crate) fn receive(&mut self) -> io::Result<&[u8]> {
        loop {
            let (fd, buffer) = (&self.fd, &mut self.buffer);
            let (_, length, sender) =
                retry(|| recvfrom(fd, buffer.as_mut_slice(), RecvFlags::TRUNC))?;
            let from_kernel = sender
                .and_then(|sender| SocketAddrNetlink::try_from(sender).ok())
                .is_some_and(|sender| sender.pid() == 0);
            if !from_kernel {
                continue;
            }
            if length > self.buffer.len() {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!(
                        "a datagram of {length} bytes is longer than any that the kernel sends"
                    ),
                ));
            }
            return Ok(self.buffer.get(..length).unwrap_or_default());
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}
