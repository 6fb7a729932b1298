//! The privileged end: a program at a port, and sockets of one of its queues.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags, XdpUmemReg, XdpUmemRegFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use super::ring::RING_SIZE;
use super::{CHUNK_SIZE, MTU_MAX, UMEM_SIZE, program};
use crate::Error;
use crate::control_queue::MacAddress;
use crate::memory::{DmaRegion as _, SharedBuffer};

/// How long the kernel takes at most to release the port of a process that has ended: it does so in
/// the background.
const RELEASE_TIME: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);
/// The socket's limit of bytes that the port is sending. The default of 208 KiB delays frames.
const SEND_BUFFER: usize = 4 << 20;

/// A port whose frames for a NIC go to the sockets of one queue, until this is dropped.
#[derive(Debug)]
pub struct Attachment {
    interface: String,
    index: u32,
    queue: u32,
    map: OwnedFd,
    /// Keeps the program at the port.
    _link: OwnedFd,
    /// Keeps the NIC's address in the port's filter.
    _filter: OwnedFd,
}

/// A socket of the queue, and the memory of its frames. For [`Socket::inherited`](super::Socket).
#[derive(Debug)]
pub struct Endpoint {
    /// The socket.
    pub socket: OwnedFd,
    /// The UMEM.
    pub umem: File,
}

impl Attachment {
    /// Attaches a program to the port `interface` that passes frames for `mac` and for groups to
    /// the socket of `queue`. The port accepts frames for the address.
    ///
    /// # Errors
    /// There is no such port or queue, another program is attached, the MTU is larger than
    /// [`MTU_MAX`], or the rights are missing.
    pub fn new(interface: &str, queue: u16, mac: MacAddress, mtu: u16) -> Result<Self, Error> {
        let failed = |what: &str| format!("cannot serve a queue of the port {interface}: {what}");
        if mtu > MTU_MAX {
            let what = format!("an MTU of {mtu} is more than {MTU_MAX}; choose one with --mtu");
            return Err(Error::other(failed(&what)));
        }
        let filter = socket_with(
            AddressFamily::PACKET,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(Error::context(failed("run this as root")))?;
        let index = name_to_index(&filter, interface).map_err(Error::context(failed(
            "there is no such interface; `ip link` lists them",
        )))?;
        for kind in ["rx", "tx"] {
            let queues = Path::new("/sys/class/net").join(interface).join("queues");
            if !queues.join(format!("{kind}-{queue}")).exists() {
                let what = format!(
                    "it has no {kind} queue {queue}; `ethtool -l {interface}` shows how many it \
                     has, and they count from 0"
                );
                return Err(Error::other(failed(&what)));
            }
        }
        accept(&filter, index, mac).map_err(Error::context(failed("it takes no other address")))?;

        let queue = u32::from(queue);
        let map = program::map().map_err(Error::context(failed(
            "the kernel has no AF_XDP (CONFIG_XDP_SOCKETS), or this is not root",
        )))?;
        let instructions = program::instructions(map.as_raw_fd(), queue, mac);
        let program = program::load(&instructions)
            .map_err(Error::context(failed("the kernel rejects the XDP program")))?;
        let link = patiently(|| program::attach(program.as_fd(), index));
        let link = link.map_err(|error| {
            let remedy = match error.raw_os_error() {
                Some(libc::EBUSY | libc::EEXIST) => {
                    "it has an XDP program already, of another NIC or another tool; choose another \
                     port, or detach that program (`ip link` shows it as prog/xdp)"
                }
                _ => "it takes no XDP program",
            };
            Error::other(failed(remedy)).because(error)
        })?;
        Ok(Self {
            interface: interface.to_owned(),
            index,
            queue,
            map,
            _link: link,
            _filter: filter,
        })
    }

    /// Opens a new socket of the queue, to which the program passes frames from now on. The one
    /// before must be closed.
    ///
    /// # Errors
    /// Another socket has the queue, or the memory or the rights are missing.
    pub fn endpoint(&self) -> Result<Endpoint, Error> {
        let (interface, queue) = (&self.interface, self.queue);
        let failed =
            |what: &str| format!("cannot open queue {queue} of the port {interface}: {what}");
        let socket = socket_with(
            AddressFamily::XDP,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(Error::context(failed("no AF_XDP socket")))?;
        let size = u64::try_from(UMEM_SIZE).unwrap_or(u64::MAX);
        let memory = SharedBuffer::new(size, 0)?;
        let umem = memory.file()?;
        let set_up = || -> io::Result<()> {
            sockopt::set_xdp_umem_reg(
                &socket,
                XdpUmemReg {
                    addr: memory.host_address(),
                    len: size,
                    chunk_size: CHUNK_SIZE.into(),
                    headroom: 0,
                    flags: XdpUmemRegFlags::empty(),
                    tx_metadata_len: 0,
                },
            )?;
            sockopt::set_xdp_umem_fill_ring_size(&socket, RING_SIZE)?;
            sockopt::set_xdp_umem_completion_ring_size(&socket, RING_SIZE)?;
            sockopt::set_xdp_rx_ring_size(&socket, RING_SIZE)?;
            sockopt::set_xdp_tx_ring_size(&socket, RING_SIZE)?;
            sockopt::set_socket_send_buffer_size_force(&socket, SEND_BUFFER)?;
            Ok(())
        };
        set_up().map_err(Error::context(failed(
            "the kernel takes no memory for it; it is locked memory (ulimit -l)",
        )))?;
        let flags = SocketAddrXdpFlags::XDP_COPY | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
        let address = SocketAddrXdp::new(flags, self.index, queue);
        let bound = patiently(|| Ok(bind(&socket, &address)?));
        bound.map_err(|error| {
            let remedy = match Errno::from_io_error(&error) {
                Some(Errno::BUSY) => "another AF_XDP socket has it; choose another queue",
                Some(Errno::NODEV) => "the port was removed",
                Some(Errno::NETDOWN) => "the port is down; `ip link set` brings it up",
                _ => "it takes no AF_XDP socket",
            };
            Error::other(failed(remedy)).because(error)
        })?;
        program::set_socket(self.map.as_fd(), socket.as_fd())
            .map_err(Error::context(failed("the map takes no socket")))?;
        Ok(Endpoint { socket, umem })
    }
}

/// Tries again while the kernel still has the port of a process that has ended.
fn patiently<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let begin = Instant::now();
    loop {
        match attempt() {
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && begin.elapsed() < RELEASE_TIME => {}
            done => return done,
        }
        thread::sleep(PAUSE);
    }
}

/// Has the port accept frames for this address and for all groups until `filter` is closed. That
/// socket itself receives none, because it has no protocol.
fn accept(filter: &OwnedFd, index: u32, mac: MacAddress) -> io::Result<()> {
    for kind in [libc::PACKET_MR_UNICAST, libc::PACKET_MR_ALLMULTI] {
        let mut address = [0; 8];
        for (to, from) in address.iter_mut().zip(mac) {
            *to = from;
        }
        let membership = libc::packet_mreq {
            mr_ifindex: i32::try_from(index).map_err(io::Error::other)?,
            mr_type: u16::try_from(kind).map_err(io::Error::other)?,
            mr_alen: u16::try_from(mac.len()).map_err(io::Error::other)?,
            mr_address: address,
        };
        add_membership(filter, &membership)?;
    }
    Ok(())
}

fn add_membership(socket: &OwnedFd, membership: &libc::packet_mreq) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of_val(membership)).map_err(io::Error::other)?;
    let membership: *const libc::packet_mreq = membership;
    // SAFETY: there is no safe interface to this option. The kernel reads `len` bytes of a value
    // that is borrowed during the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_ADD_MEMBERSHIP,
            membership.cast(),
            len,
        )
    };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
