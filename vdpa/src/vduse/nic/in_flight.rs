//! The in-flight record of a transmit queue: the position of the frame that the queue passes.
//!
//! ```text
//!   record = position ─> frame to the tap ─> chain returned: the ring's position passes the record
//! ```
//! The record outlives the process. A successor finds the ring at the recorded position only if the
//! process ended in between. It returns the chain without the frame, which the process may have
//! sent. So no frame is sent twice, and a killed process loses at most one frame of each queue.
//!
//! The receive queue needs no record: the tap gives a frame once.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes as _, VolatileMemoryError};

use super::mapping::Mapping;
use crate::Error;

/// Bytes of the file with the records of a NIC, which [`Nic::new`](super::Nic::new) maps. Zeroes:
/// no frame is in flight.
pub const IN_FLIGHT_SIZE: u64 = SIZE as u64;
const SIZE: usize = 4096;
/// Bytes from the record of a pair to the next one: a cache line, because each has a thread.
const STRIDE: usize = 64;
/// The record has a position, in its lower half: see `DeviceQueue::positions`.
const TAKEN: u32 = 1 << 31;

/// The record of a pair's transmit queue: a `u32` in native byte order.
#[derive(Debug)]
pub(super) struct InFlight {
    mapping: Mapping,
    offset: usize,
}

impl InFlight {
    /// Maps the record of this pair. The file has [`IN_FLIGHT_SIZE`] bytes.
    pub(super) fn new(file: BorrowedFd<'_>, pair: u32) -> Result<Self, Error> {
        let mapping = Mapping::new(file, 0, SIZE);
        let record = Self {
            mapping: mapping.map_err(Error::context("cannot map the in-flight record"))?,
            offset: usize::try_from(pair).map_or(SIZE, |pair| pair.saturating_mul(STRIDE)),
        };
        let loaded = record.load();
        loaded.map_err(Error::context(
            "the file has no in-flight record for this pair",
        ))?;
        Ok(record)
    }

    /// The frame at this used position of the ring is about to be sent.
    pub(super) fn set(&self, position: u16) {
        self.store(TAKEN | u32::from(position));
    }

    /// No frame is in flight.
    pub(super) fn clear(&self) {
        self.store(0);
    }

    /// The position of the frame that was sent last, or was about to be sent.
    pub(super) fn position(&self) -> Option<u16> {
        let word = self.load().unwrap_or(0);
        let [low, high, ..] = word.to_le_bytes();
        (word & TAKEN != 0).then(|| u16::from_le_bytes([low, high]))
    }

    fn load(&self) -> Result<u32, VolatileMemoryError> {
        self.mapping.bytes().load(self.offset, Ordering::Acquire)
    }

    fn store(&self, word: u32) {
        // `new` has accessed the same place.
        let _ = self
            .mapping
            .bytes()
            .store(word, self.offset, Ordering::Release);
    }
}
