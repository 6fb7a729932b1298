//! The transmit queue.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::HEADER_LEN;
use super::queue::Virtqueue;
use crate::Error;
use crate::ring::Direction;

/// A transmit queue.
#[derive(Debug)]
pub struct TxQueue {
    queue: Virtqueue,
}

/// No offload is requested: `flags`, `gso_type` and all other fields are 0.
const HEADER: [u8; 12] = [0; 12];

impl TxQueue {
    pub(super) fn new(queue: Virtqueue) -> Self {
        Self { queue }
    }

    /// Copies a frame into the ring; `false`: the ring is full, until the device returns buffers.
    /// The device may not look before [`TxQueue::flush`].
    ///
    /// # Errors
    /// The frame is empty or too long, or the device broke the ring.
    pub fn send(&mut self, frame: &[u8]) -> Result<bool, Error> {
        let maximum = self.queue.frame_max();
        let len = u32::try_from(frame.len())
            .ok()
            .filter(|len| (1..=maximum).contains(len))
            .ok_or_else(|| {
                Error::other(format!(
                    "cannot send a frame of {} bytes: the device takes up to {maximum}",
                    frame.len()
                ))
            })?;
        let slot = match self.queue.take_slot() {
            Some(slot) => slot,
            None => {
                self.reap()?;
                match self.queue.take_slot() {
                    Some(slot) => slot,
                    None => return Ok(false),
                }
            }
        };
        let offset = self.queue.offset(slot);
        self.queue.memory().write(offset, &HEADER)?;
        self.queue
            .memory()
            .write(offset + u64::from(HEADER_LEN), frame)?;
        if let Err(error) = self.queue.post(slot, len, Direction::DeviceReads) {
            self.queue.give_slot(slot);
            return Err(error);
        }
        self.queue.counters.bytes += u64::from(len);
        Ok(true)
    }

    /// Kicks the device for all sent frames, if it wants a kick.
    ///
    /// # Errors
    /// The device broke the ring, or the eventfd failed.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.queue.kick_if_wanted()
    }

    /// Sends frames until the ring is full, with one kick; returns their number.
    ///
    /// # Errors
    /// As [`TxQueue::send`] and [`TxQueue::flush`]; frames before a wrong one are sent.
    pub fn send_burst<'a>(
        &mut self,
        frames: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<usize, Error> {
        let mut sent = 0;
        let mut result = Ok(());
        for frame in frames {
            match self.send(frame) {
                Ok(true) => sent += 1,
                Ok(false) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        if sent > 0 {
            self.flush()?;
        }
        result.map(|()| sent)
    }

    /// Reclaims the buffers that the device has used; returns their number.
    ///
    /// # Errors
    /// The device broke the ring.
    pub fn reap(&mut self) -> Result<usize, Error> {
        let mut count = 0;
        while let Some((slot, _)) = self.queue.pop()? {
            self.queue.give_slot(slot);
            self.queue.counters.packets += 1;
            count += 1;
        }
        Ok(count)
    }

    /// Waits until the device returns all buffers; `false` if that takes longer than `limit`.
    pub(crate) fn drain(&mut self, limit: Duration) -> Result<bool, Error> {
        let begin = Instant::now();
        while self.queue.outstanding() > 0 {
            self.reap()?;
            if begin.elapsed() > limit {
                return Ok(false);
            }
            std::thread::yield_now();
        }
        Ok(true)
    }

    /// Bytes of the largest frame that can be sent.
    #[must_use]
    pub fn frame_max(&self) -> u32 {
        self.queue.frame_max()
    }

    /// The common part of both directions.
    #[must_use]
    pub fn queue(&self) -> &Virtqueue {
        &self.queue
    }

    /// As [`TxQueue::queue`].
    pub fn queue_mut(&mut self) -> &mut Virtqueue {
        &mut self.queue
    }
}

impl AsFd for TxQueue {
    /// Readable when buffers may have been returned.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.call_fd()
    }
}
