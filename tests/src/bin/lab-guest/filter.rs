//! An additional address that a NIC accepts frames to (packet(7), `PACKET_ADD_MEMBERSHIP`).
//!
//! This module owns the socket that requests it. If the device filters, the driver sends it three
//! commands each time (virtio 1.3, 5.1.6.5.1 and 5.1.6.5.2). Linux notifies no other part of the
//! system, unlike for a NIC's own address, so these commands follow one another closely. The driver
//! sends them in its own work item; a change soon after another one adds no commands.

use crate::network::Address;
use lab::error::{Error, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

/// Locally administered; no NIC has it.
const STRANGER: Address = [0x52, 0x54, 0x5e, 0x11, 0x77, 0x77];

/// Time for the kernel to reach the driver's work item.
const REST: Duration = Duration::from_micros(100);

/// The filter of one NIC. Dropping it removes the address.
pub(crate) struct Filter {
    socket: OwnedFd,
    request: libc::packet_mreq,
}

impl Filter {
    /// The filter of the interface with this index, which accepts no additional frames yet.
    pub(crate) fn new(index: i32) -> Result<Self> {
        let socket = socket_with(
            AddressFamily::PACKET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(Error::system("create a packet socket"))?;
        let mut mr_address = [0; 8];
        mr_address[..STRANGER.len()].copy_from_slice(&STRANGER);
        Ok(Self {
            socket,
            request: libc::packet_mreq {
                mr_ifindex: index,
                mr_type: libc::PACKET_MR_UNICAST.try_into().unwrap_or_default(),
                mr_alen: STRANGER.len().try_into().unwrap_or_default(),
                mr_address,
            },
        })
    }

    /// Accepts frames to the address, then stops to accept them.
    pub(crate) fn there_and_back(&self) -> Result<()> {
        for option in [libc::PACKET_ADD_MEMBERSHIP, libc::PACKET_DROP_MEMBERSHIP] {
            self.set(option)?;
            std::thread::sleep(REST);
        }
        Ok(())
    }

    fn set(&self, option: i32) -> Result<()> {
        let length = libc::socklen_t::try_from(size_of_val(&self.request)).unwrap_or_default();
        // SAFETY: needed because no safe wrapper has these options. The pointer is to a whole
        // `packet_mreq` of the given length, which the kernel only reads.
        let set = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                option,
                (&raw const self.request).cast(),
                length,
            )
        };
        if set < 0 {
            return Err(Error::system("change the addresses that the NIC takes")(
                io::Error::last_os_error(),
            ));
        }
        Ok(())
    }
}
