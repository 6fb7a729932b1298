//! The host's end of the cable for a queue pair: a queue of a tap, or of a port.

use std::os::fd::{AsFd, BorrowedFd};

use super::tap::{Tap, Vectors};
use super::xdp::Socket;
use crate::Error;

/// What frames of the driver go to, and frames for it come from.
#[derive(Debug)]
pub enum Port {
    /// A queue of an interface of this host, with checksum and segmentation offloads.
    Tap(Tap),
    /// A queue of a network port, without offloads.
    Xdp(Box<Socket>),
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tap(tap) => tap.as_fd(),
            Self::Xdp(socket) => socket.as_fd(),
        }
    }
}

impl Port {
    /// As [`Tap::start`].
    pub(super) fn start(&mut self, features: u64, buffer: &mut [u8]) -> Result<(), Error> {
        match self {
            Self::Tap(tap) => tap.start(features, buffer),
            Self::Xdp(socket) => socket.start(buffer),
        }
    }

    /// As [`Tap::set_attached`]. A port's queue is the only one, and stays.
    pub(super) fn set_attached(&self, attached: bool) -> Result<(), Error> {
        match self {
            Self::Tap(tap) => tap.set_attached(attached),
            Self::Xdp(_) => Ok(()),
        }
    }

    /// As [`Tap::set_offloads`].
    pub(super) fn set_offloads(&self, features: u64) -> Result<(), Error> {
        match self {
            Self::Tap(tap) => tap.set_offloads(features),
            Self::Xdp(_) => Ok(()),
        }
    }

    /// The next frame with its virtio-net header, if one waits: its bytes.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
        match self {
            Self::Tap(tap) => tap.read(buffer),
            Self::Xdp(socket) => socket.read(buffer),
        }
    }

    /// Sends a frame with its virtio-net header, or drops it.
    ///
    /// # Safety
    /// The frame's memory must be mapped during the call.
    pub(super) unsafe fn write(&mut self, frame: &Vectors) -> bool {
        match self {
            // SAFETY: the caller vouches for the memory.
            Self::Tap(tap) => unsafe { tap.write(frame) },
            // SAFETY: as above.
            Self::Xdp(socket) => unsafe { socket.write(frame) },
        }
    }

    /// Ends a turn: frames that were written are on their way.
    pub(super) fn flush(&mut self) -> Result<(), Error> {
        match self {
            Self::Tap(_) => Ok(()),
            Self::Xdp(socket) => socket.flush(),
        }
    }

    /// Whether frames wait that another [`Port::flush`] may send.
    pub(super) fn is_unsent(&self) -> bool {
        match self {
            Self::Tap(_) => false,
            Self::Xdp(socket) => socket.is_unsent(),
        }
    }
}
