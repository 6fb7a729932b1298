//! Rings that the VMM itself works on: what all formats have in common.
//!
//! A driver-side queue owns its ring's memory and the bookkeeping of what it
//! gave to the device; a device-side queue works on a ring in guest memory. Neither
//! must know what the buffers are for.

pub mod guest;
pub mod split;

use crate::iova::PAGE_SIZE;
use crate::memory::SharedBufferError;

/// Which side uses a piece of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The device reads it.
    DeviceReads,
    /// The device writes it.
    DeviceWrites,
}

/// A contiguous piece of memory in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// I/O virtual address of the first byte.
    pub iova: u64,
    /// Bytes.
    pub len: u32,
    /// Who does what with it.
    pub direction: Direction,
}

/// A chain that the device is done with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// What [`split::DriverQueue::add`] gave for the chain.
    pub head: u16,
    /// Bytes the device says it wrote; not more than the chain had for it.
    pub written: u32,
}

/// Why a queue can't be used.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// Not a power of two from 1 to 32768.
    #[error("a split ring cannot have {size} entries")]
    Size {
        /// Entries asked for.
        size: u16,
    },
    /// The chain has no pieces, an empty piece, more than 4 GiB, or a piece
    /// for the device to read behind one to write (virtio 1.3, 2.7.4.2).
    #[error("the buffers do not make a valid descriptor chain")]
    Chain,
    /// Not enough free descriptors.
    #[error("the ring has {free} free descriptors and {wanted} are needed")]
    Full {
        /// Free ones.
        free: u16,
        /// Pieces of the chain.
        wanted: usize,
    },
    /// The device broke the rules; the queue takes and gives nothing more
    /// until the device is reset and the queue is made anew.
    #[error("the device broke the ring")]
    Broken {
        /// What it did.
        #[source]
        source: Violation,
    },
    /// The ring does not fit the memory it was given.
    #[error("the ring does not fit its memory")]
    Memory {
        /// The access that failed.
        #[source]
        source: SharedBufferError,
    },
}

/// What a device did that no device may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The used index moved further than there were chains outstanding.
    #[error("the used index moved by {moved} with {outstanding} chains outstanding")]
    IndexJump {
        /// How far.
        moved: u16,
        /// Chains that the device has.
        outstanding: u16,
    },
    /// A used element names a chain that the device does not have.
    #[error("used element {id} is not outstanding")]
    NotOutstanding {
        /// The element's id.
        id: u32,
    },
    /// The device claims to have written more than it could.
    #[error("{written} bytes are said to be written into a chain that takes {offered}")]
    TooLong {
        /// Bytes the device claims.
        written: u32,
        /// Bytes the chain had for it.
        offered: u32,
    },
}

/// Where a split ring's areas lie in its memory.
///
/// ```text
///  0                                     used_offset
///  | descriptor table | avail ring | ... | used ring | ... |
///  +------- device reads only -----------+-- device writes -+
///            whole pages                     whole pages
/// ```
/// The used ring has pages of its own, so that the rest can be mapped
/// read-only for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitLayout {
    size: u16,
    avail_offset: u64,
    used_offset: u64,
    total: u64,
}

impl SplitLayout {
    /// The layout for a ring with `size` entries.
    ///
    /// # Errors
    /// [`QueueError::Size`].
    pub fn new(size: u16) -> Result<Self, QueueError> {
        // Not zero and, in 16 bits, never above 32768.
        if !size.is_power_of_two() {
            return Err(QueueError::Size { size });
        }
        let entries = u64::from(size);
        let avail_offset = 16 * entries;
        let used_offset = (avail_offset + 6 + 2 * entries).next_multiple_of(PAGE_SIZE);
        let total = (used_offset + 6 + 8 * entries).next_multiple_of(PAGE_SIZE);
        Ok(Self {
            size,
            avail_offset,
            used_offset,
            total,
        })
    }

    /// Bytes of memory the ring needs, in whole pages.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.total
    }

    /// Entries of the ring.
    #[must_use]
    pub fn entries(&self) -> u16 {
        self.size
    }

    /// Where the pages begin that the device writes; it only reads those before.
    #[must_use]
    pub fn used_offset(&self) -> u64 {
        self.used_offset
    }
}
