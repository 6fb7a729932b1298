//! A queue of the device with a driver of this crate; a socket is the tap.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::in_flight::{IN_FLIGHT_SIZE, InFlight};
use super::port::Port;
use super::tap::Tap;
use super::{FRAME_MAX, HEADER};
use crate::device::VringBase;
use crate::iova::{DeviceAddress, PAGE_SIZE};
use crate::memory::{DeviceMemory, SharedBuffer};
use crate::ring::{DeviceQueue, Direction, DriverQueue, GuestRing, Piece, RingFeatures};

pub(super) const GUEST: u64 = 0x10_0000;
pub(super) const SIZE: u16 = 8;
/// Pages before the buffers, and all pages.
pub(super) const RING_PAGES: u64 = 4;
pub(super) const PAGES: u64 = 64;

pub(super) struct Rig {
    pub(super) buffer: Arc<SharedBuffer>,
    pub(super) driver: DriverQueue,
    pub(super) ring: DeviceQueue,
    pub(super) memory: DeviceMemory,
    pub(super) tap: Port,
    pub(super) peer: UnixDatagram,
}

impl Rig {
    pub(super) fn new(features: RingFeatures) -> Self {
        let buffer = Arc::new(SharedBuffer::new(PAGES * PAGE_SIZE, GUEST).unwrap());
        let memory = DeviceMemory::from(Arc::new(buffer.as_guest_memory().unwrap()));
        let driver = DriverQueue::new(Arc::clone(&buffer), SIZE, 0, features).unwrap();
        let ring = GuestRing::new(memory.clone(), SIZE, driver.addresses(), features).unwrap();
        let base = VringBase::initial(features.packed);
        let ring = DeviceQueue::new(ring, base, features).unwrap();
        let (tap, peer) = UnixDatagram::pair().unwrap();
        tap.set_nonblocking(true).unwrap();
        peer.set_nonblocking(true).unwrap();
        Self {
            buffer,
            driver,
            ring,
            memory,
            tap: Port::Tap(Tap::of(OwnedFd::from(tap).into())),
            peer,
        }
    }

    pub(super) fn piece(&self, page: u64, len: u32, direction: Direction) -> Piece {
        Piece {
            iova: DeviceAddress(GUEST + (RING_PAGES + page) * PAGE_SIZE),
            len,
            direction,
        }
    }

    pub(super) fn sent(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; FRAME_MAX + 1];
        let len = self.peer.recv(&mut frame).ok()?;
        frame.truncate(len);
        Some(frame)
    }

    pub(super) fn bytes(&self, page: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let offset = (RING_PAGES + page) * PAGE_SIZE;
        self.buffer.read(offset, &mut bytes).unwrap();
        bytes
    }
}

/// A file for in-flight records.
pub(super) fn in_flight_file() -> OwnedFd {
    let file = memfd_create(c"in-flight", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, IN_FLIGHT_SIZE).unwrap();
    file
}

/// A record without a predecessor.
pub(super) fn in_flight() -> InFlight {
    InFlight::new(in_flight_file().as_fd(), 0).unwrap()
}

/// A frame with a header of zeroes.
pub(super) fn frame(len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
    let header = len.min(HEADER);
    frame[..header].fill(0);
    frame
}
