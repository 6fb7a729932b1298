//! The memory of a driver's ring and a used element in it, in either format.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::Error;
use crate::memory::SharedBuffer;

/// The memory of a ring; positions are offsets from its start.
#[derive(Debug)]
pub(crate) struct RingMemory {
    pub(super) buffer: Arc<SharedBuffer>,
    pub(super) offset: u64,
    /// Whether EVENT_IDX was negotiated.
    pub(crate) event_idx: bool,
}

impl RingMemory {
    pub(crate) fn load(&self, at: u64, ordering: Ordering) -> Result<u16, Error> {
        self.buffer.load_u16(self.offset + at, ordering)
    }

    pub(crate) fn load_u32(&self, at: u64, ordering: Ordering) -> Result<u32, Error> {
        self.buffer.load_u32(self.offset + at, ordering)
    }

    pub(crate) fn store(&self, at: u64, value: u16, ordering: Ordering) -> Result<(), Error> {
        self.buffer.store_u16(value, self.offset + at, ordering)
    }

    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.buffer.read(self.offset + at, bytes)
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        self.buffer.write(self.offset + at, bytes)
    }
}

/// The device's record of a used chain.
#[derive(Debug)]
pub(crate) struct Element {
    pub(crate) id: u32,
    pub(crate) written: u32,
    /// Maximum number of chains that it may complete.
    pub(crate) moved: u16,
}
