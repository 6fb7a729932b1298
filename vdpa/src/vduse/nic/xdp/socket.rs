//! The unprivileged end: frames through the rings of a socket.
//!
//! ```text
//!   UMEM:  | CHUNKS chunks to receive | CHUNKS chunks to transmit |
//!
//!   fill ring ─> kernel ─> receive ring ─> read ─> fill ring
//!   write ─> transmit ring ─> kernel ─> completion ring ─> free
//! ```
//! Each chunk is in one place only: in a ring, with the kernel, or in `free`. So no ring overflows.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::xdp::XdpMmapOffsets;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use vm_memory::{ByteValued, VolatileSlice};

use super::super::HEADER;
use super::super::mapping::Mapping;
use super::super::tap::Vectors;
use super::ring::{CHUNKS, RING_SIZE, Ring};
use super::{CHUNK, ETHERNET, MTU_MAX, UMEM_SIZE};
use crate::Error;

/// Bytes of the chunks to receive, which are the first ones.
const RECEIVE_SIZE: u64 = CHUNKS as u64 * CHUNK;
/// Most system calls per turn that have the kernel transmit. One transmits 32 frames at most
/// (`TX_BATCH_SIZE` in net/xdp/xsk.c), and a turn adds up to 64.
const ATTEMPTS: usize = 4;

/// A frame in the UMEM (`struct xdp_desc`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) options: u32,
}

// SAFETY: needed to access it in shared memory. All bits of its integers are valid, and it has no
// padding.
unsafe impl ByteValued for Descriptor {}

/// A socket that a privileged process has bound to a queue of a port, with its UMEM.
#[derive(Debug)]
pub struct Socket {
    file: OwnedFd,
    umem: Mapping,
    fill: Ring<u64>,
    completion: Ring<u64>,
    receive: Ring<Descriptor>,
    transmit: Ring<Descriptor>,
    /// The chunks to transmit that the kernel does not have.
    free: Vec<u64>,
    /// For each chunk to transmit: the kernel has it.
    is_lent: Vec<bool>,
    /// Bytes of the largest frame to transmit.
    frame_max: usize,
    /// The kernel may have to be woken for frames to transmit.
    is_unsent: bool,
    /// The kernel may have to be woken for chunks to receive.
    is_refilled: bool,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Socket {
    /// The socket and the UMEM of an [`Endpoint`](super::Endpoint), which another process has
    /// opened. Frames to transmit have packets of at most `mtu` bytes.
    ///
    /// # Errors
    /// The kernel cannot map the rings, or reports an unusable layout.
    pub fn inherited(file: OwnedFd, umem: BorrowedFd<'_>, mtu: u16) -> Result<Self, Error> {
        let layout = sockopt::xdp_mmap_offsets(&file);
        let layout = layout.map_err(Error::context("the file is no AF_XDP socket"))?;
        let rings = file.try_clone();
        let rings = rings.map_err(Error::context("too many open files"))?;
        Self::new(file, rings.as_fd(), umem, &layout, mtu)
    }

    /// `file` is woken, and the rings are parts of `rings`.
    pub(super) fn new(
        file: OwnedFd,
        rings: BorrowedFd<'_>,
        umem: BorrowedFd<'_>,
        layout: &XdpMmapOffsets,
        mtu: u16,
    ) -> Result<Self, Error> {
        let [receive, transmit] = [libc::XDP_PGOFF_RX_RING, libc::XDP_PGOFF_TX_RING];
        let umem = Mapping::new(umem, 0, UMEM_SIZE);
        let umem = umem.map_err(Error::context("cannot map the frames of the AF_XDP socket"))?;
        let mut socket = Self {
            file,
            umem,
            fill: Ring::map(rings, libc::XDP_UMEM_PGOFF_FILL_RING, &layout.fr)?,
            completion: Ring::map(rings, libc::XDP_UMEM_PGOFF_COMPLETION_RING, &layout.cr)?,
            receive: Ring::map(rings, receive.cast_unsigned(), &layout.rx)?,
            transmit: Ring::map(rings, transmit.cast_unsigned(), &layout.tx)?,
            free: (0..u64::from(CHUNKS)).map(transmit_chunk).collect(),
            is_lent: vec![false; CHUNKS as usize],
            frame_max: usize::from(mtu.min(MTU_MAX) + ETHERNET),
            is_unsent: false,
            is_refilled: true,
        };
        for number in 0..u64::from(CHUNKS) {
            socket.fill.add(number * CHUNK)?;
        }
        socket.fill.publish()?;
        Ok(socket)
    }

    /// Drops the frames that wait.
    pub(in super::super) fn start(&mut self, buffer: &mut [u8]) -> Result<(), Error> {
        for _ in 0..RING_SIZE {
            if self.read(buffer)?.is_none() {
                break;
            }
        }
        self.flush()
    }

    /// The next frame behind a header of zeroes, if one waits: its bytes with the header.
    pub(in super::super) fn read(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
        let Some(Descriptor { address, len, .. }) = self.receive.take()? else {
            return Ok(None);
        };
        let within = address % CHUNK;
        let chunk = address - within;
        let len_in_chunk = within.checked_add(len.into()).filter(|&end| end <= CHUNK);
        let frame = len_in_chunk
            .filter(|_| chunk < RECEIVE_SIZE)
            .and_then(|_| self.frame(address, len))
            .ok_or_else(|| impossible(address))?;
        let Some((header, rest)) = buffer.split_at_mut_checked(HEADER) else {
            return Ok(None);
        };
        header.fill(0);
        let copied = frame.copy_to(rest);
        if self.fill.room()? == 0 {
            return Err(impossible(address));
        }
        self.fill.add(chunk)?;
        self.fill.publish()?;
        self.is_refilled = true;
        Ok(Some(HEADER + copied))
    }

    /// Sends a frame without its header. Drops one that is too long or too short, and those that
    /// the port cannot send in time. The kernel sends it in [`Socket::flush`] at the latest.
    ///
    /// # Safety
    /// The frame's memory must be mapped during the call.
    pub(in super::super) unsafe fn write(&mut self, frame: &Vectors) -> bool {
        let len = frame.0.iter().map(|piece| piece.iov_len);
        let len = len.fold(0, usize::saturating_add).saturating_sub(HEADER);
        // Drivers expect an Ethernet header, and the kernel checks nothing.
        if !(libc::ETH_HLEN as usize..=self.frame_max).contains(&len) {
            return false;
        }
        let Ok(1..) = self.transmit.room() else {
            return false;
        };
        let Some(address) = self.free.pop() else {
            return false;
        };
        // At most CHUNK, see `frame_max`.
        let len = u32::try_from(len).unwrap_or(0);
        if let Some(chunk) = self.frame(address, len) {
            // SAFETY: the caller vouches for the addresses.
            unsafe { gather(frame, chunk) };
        }
        if let Some(is_lent) = self.is_lent(address) {
            *is_lent = true;
        }
        self.is_unsent = true;
        let descriptor = Descriptor {
            address,
            len,
            options: 0,
        };
        self.transmit.add(descriptor).is_ok() && self.transmit.publish().is_ok()
    }

    /// Wakes the kernel if it has to be, and takes back the chunks of frames that were sent.
    pub(in super::super) fn flush(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.is_refilled) && self.fill.needs_wakeup()? {
            // Only wakes the kernel, so its answer does not matter.
            let _ = recv(&self.file, &mut [0_u8; 0], RecvFlags::DONTWAIT);
        }
        for _ in 0..ATTEMPTS {
            if !self.is_unsent {
                break;
            }
            self.is_unsent = self.transmit.needs_wakeup()?
                && match send(&self.file, &[], SendFlags::DONTWAIT) {
                    Ok(_) => false,
                    Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::INTR) => true,
                    // As without a cable. The frames wait until the port is up.
                    Err(Errno::NETDOWN) => false,
                    Err(Errno::NXIO) => {
                        return Err(Error::other("the port of the NIC was removed"));
                    }
                    Err(error) => return Err(Error::context("cannot send frames")(error)),
                };
        }
        while let Some(address) = self.completion.take()? {
            match self.is_lent(address) {
                Some(is_lent) if *is_lent => *is_lent = false,
                _ => return Err(impossible(address)),
            }
            self.free.push(address);
        }
        Ok(())
    }

    /// Whether [`Socket::flush`] is due again after a moment.
    pub(in super::super) fn is_unsent(&self) -> bool {
        self.is_unsent
    }

    fn frame(&self, address: u64, len: u32) -> Option<VolatileSlice<'_>> {
        let slice = self.umem.bytes();
        slice
            .subslice(usize::try_from(address).ok()?, usize::try_from(len).ok()?)
            .ok()
    }

    /// Whether the kernel has the chunk to transmit at this address, if there is one.
    fn is_lent(&mut self, address: u64) -> Option<&mut bool> {
        let offset = address.checked_sub(RECEIVE_SIZE)?;
        let index = usize::try_from(offset / CHUNK).ok()?;
        self.is_lent
            .get_mut(index)
            .filter(|_| offset.is_multiple_of(CHUNK))
    }
}

fn transmit_chunk(number: u64) -> u64 {
    RECEIVE_SIZE + number * CHUNK
}

/// Copies a frame without its header. Writes no more than `chunk` holds.
///
/// # Safety
/// The frame's memory must be mapped during the call.
unsafe fn gather(frame: &Vectors, chunk: VolatileSlice<'_>) {
    let (mut skip, mut at) = (HEADER, 0);
    for piece in &frame.0 {
        // SAFETY: the caller vouches for it. A volatile slice, because the driver changes its
        // memory at any time.
        let piece = unsafe { VolatileSlice::new(piece.iov_base.cast(), piece.iov_len) };
        let skipped = skip.min(piece.len());
        skip -= skipped;
        let (Ok(from), Ok(to)) = (piece.offset(skipped), chunk.offset(at)) else {
            return;
        };
        from.copy_to_volatile_slice(to);
        at += from.len();
    }
}

fn impossible(address: u64) -> Error {
    Error::other(format!(
        "the kernel reports address {address:#x}, which the NIC has not given to it"
    ))
}
