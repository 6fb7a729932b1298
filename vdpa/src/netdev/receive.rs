//! The receive queue and its frames.

use std::os::fd::{AsFd, BorrowedFd};

use super::HEADER_LEN;
use super::queue::Virtqueue;
use crate::Error;
use crate::memory::SharedBuffer;
use crate::ring::Direction;

/// A receive queue. The device has all its buffers, except those of frames in processing.
#[derive(Debug)]
pub struct RxQueue {
    queue: Virtqueue,
}

/// A received frame in memory that the device shares. It can only be copied, never borrowed.
#[derive(Debug, Clone, Copy)]
pub struct Received<'a> {
    memory: &'a SharedBuffer,
    offset: u64,
    len: u32,
}

impl Received<'_> {
    /// Length of the frame in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX)
    }

    /// Whether the frame has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the frame to the front of `to`, as much of it as fits; returns the part written.
    ///
    /// # Errors
    /// None in practice: the length was checked.
    pub fn copy_to<'b>(&self, to: &'b mut [u8]) -> Result<&'b [u8], Error> {
        let len = self.len().min(to.len());
        let to = &mut to[..len];
        self.memory.read(self.offset, to)?;
        Ok(to)
    }
}

impl RxQueue {
    /// Fills the ring; the caller kicks once the device runs.
    pub(super) fn new(queue: Virtqueue) -> Result<Self, Error> {
        let mut filled = Self { queue };
        while let Some(slot) = filled.queue.take_slot() {
            filled.post(slot)?;
        }
        Ok(filled)
    }

    fn post(&mut self, slot: u16) -> Result<(), Error> {
        let len = self.queue.frame_max();
        self.queue.post(slot, len, Direction::DeviceWrites)
    }

    /// Passes up to `limit` received frames to `receive` and returns their buffers to the device.
    /// Never blocks; returns the number of buffers taken.
    ///
    /// # Errors
    /// The device broke the ring: only a reset helps then.
    pub fn poll(
        &mut self,
        limit: usize,
        mut receive: impl FnMut(Received<'_>),
    ) -> Result<usize, Error> {
        let mut taken = 0;
        while taken < limit {
            let Some((slot, written)) = self.queue.pop()? else {
                break;
            };
            if let Some(len) = written.checked_sub(HEADER_LEN) {
                self.queue.counters.packets += 1;
                self.queue.counters.bytes += u64::from(len);
                receive(Received {
                    memory: self.queue.memory(),
                    offset: self.queue.offset(slot) + u64::from(HEADER_LEN),
                    len,
                });
            } else {
                self.queue.counters.malformed += 1;
            }
            self.post(slot)?;
            taken += 1;
        }
        if taken > 0 {
            self.queue.kick_if_wanted()?;
        }
        Ok(taken)
    }

    /// The common part of both directions.
    #[must_use]
    pub fn queue(&self) -> &Virtqueue {
        &self.queue
    }

    /// As [`RxQueue::queue`].
    pub fn queue_mut(&mut self) -> &mut Virtqueue {
        &mut self.queue
    }
}

impl AsFd for RxQueue {
    /// Readable when there may be frames.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.call_fd()
    }
}
