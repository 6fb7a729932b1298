//! One virtqueue served by this process, as the emulated devices use it.
//!
//! It owns the device side of the ring (a split one through `virtio-queue`, a
//! packed one through `vdpa::ring::packed`), the checks on what the driver wrote
//! there, and interrupt suppression. It must not know what the buffers mean.
//!
//! `virtio-queue` bounds every walk (a chain by the size of its table, the
//! avail index by the ring size) but ends a malformed chain silently, so that
//! it looks like a shorter valid one; it follows indirect tables of 65,535
//! entries; it ignores VIRTQ_AVAIL_F_NO_INTERRUPT; and it takes rings that lie
//! over each other. Those gaps are closed here.
//!
//! ```text
//!            pop: malformed chain, avail index ahead by more than the size; set_broken
//!   serving --------------------------------------------------------------------------> broken
//! ```
//! A broken queue hands out nothing any more; only a device reset ends that
//! (virtio 1.3, 2.1.2: DEVICE_NEEDS_RESET).

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::device::VringBase;
use vdpa::ring::RingFeatures;
use vdpa::ring::packed::{DeviceQueue, DeviceQueueError};
use virtio_queue::{Queue as SplitRing, QueueT};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::backend::{Queue, SharedMemory};

#[cfg(test)]
pub(crate) mod driver;
mod packed;
mod split;
#[cfg(test)]
mod tests;

/// Most descriptors taken from one chain. Virtio 1.3, 2.7.5.3.1 limits a chain
/// to the queue size; drivers that use indirect tables sometimes go further,
/// so that the bound is the largest ring offered here.
pub(crate) const MAX_DESCRIPTORS: usize = 256;

/// The three parts of a split virtqueue (virtio 1.3, 2.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingPart {
    /// Descriptor Area.
    Descriptor,
    /// Driver Area (avail ring).
    Driver,
    /// Device Area (used ring).
    Device,
}

impl fmt::Display for RingPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Descriptor => "descriptor area",
            Self::Driver => "driver area",
            Self::Device => "device area",
        })
    }
}

/// What is wrong with a descriptor chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainFault {
    /// It ends in the middle: a loop, an index at or above the table size, an
    /// indirect table inside another, of a bad length or outside memory, or more
    /// than 4 GiB in total.
    Unfinished,
    /// More than 256 descriptors.
    TooLong,
    /// A buffer is not, or not wholly, guest memory.
    OutsideMemory,
    /// A device-readable buffer follows a device-writable one.
    Order,
}

impl fmt::Display for ChainFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unfinished => "it does not end properly",
            Self::TooLong => "it has too many descriptors",
            Self::OutsideMemory => "a buffer lies outside guest memory",
            Self::Order => "a readable buffer follows a writable one",
        })
    }
}

/// Why a queue cannot be, or can no longer be, served.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The size is 0, above the offered maximum, or for a split ring no power of two.
    #[error(
        "queue size {size} is not possible: the maximum is {max}, and a split ring takes powers of two"
    )]
    Size {
        /// What the driver set.
        size: u16,
        /// What was offered.
        max: u16,
    },
    /// A part of the ring breaks its alignment (16, 2 and 4 bytes).
    #[error("the {part} at {address:#x} is misaligned")]
    Misaligned {
        /// Which part.
        part: RingPart,
        /// Guest-physical address.
        address: u64,
    },
    /// A part of the ring is not wholly in guest memory.
    #[error("the {part} at {address:#x}, {len} bytes, lies outside guest memory")]
    OutsideMemory {
        /// Which part.
        part: RingPart,
        /// Guest-physical address.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The used ring, which the device writes, lies over another part.
    #[error("the device area overlaps the {part}")]
    Overlap {
        /// The part that would be overwritten.
        part: RingPart,
    },
    /// The driver made something available that is no valid chain.
    #[error("the descriptor chain at index {head} is malformed: {fault}")]
    Chain {
        /// Descriptor index of the chain's head.
        head: u16,
        /// What is wrong.
        fault: ChainFault,
    },
    /// The ring itself is not as it must be, such as an avail index that is
    /// ahead by more than the queue size.
    #[error("the ring is malformed")]
    Ring(#[source] virtio_queue::Error),
    /// A packed ring is not as it must be.
    #[error("the packed ring cannot be served")]
    Packed(#[from] DeviceQueueError),
    /// A saved position of the other ring format.
    #[error("the saved queue and the negotiated features have different ring formats")]
    SavedFormat,
    /// Saved indices that no drained queue can have.
    #[error(
        "saved queue indices {next_avail} and {next_used} differ although nothing is in flight"
    )]
    SavedIndices {
        /// Next avail index.
        next_avail: u16,
        /// Next used index.
        next_used: u16,
    },
    /// An eventfd could not be prepared.
    #[error("the eventfd of the queue cannot be used")]
    Event(#[source] io::Error),
}

/// A run of guest-physical memory that was inside guest memory when checked.
/// Guest memory does not shrink while a device holds it, so that stays true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// First address.
    pub(crate) address: GuestAddress,
    /// Length in bytes, never 0.
    pub(crate) len: u32,
}

/// A descriptor chain, copied once out of guest memory: what the driver
/// changes there afterwards has no effect.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// What names it in the used ring: the descriptor index of its head, or the
    /// buffer id in a packed ring.
    pub(crate) head: u16,
    /// Buffers that the device reads, in order.
    pub(crate) readable: Vec<Segment>,
    /// Buffers that the device writes, in order.
    pub(crate) writable: Vec<Segment>,
}

/// The state of a queue with nothing in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedQueue {
    position: SavedPosition,
    broken: bool,
}

/// Where a queue stands, by ring format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum SavedPosition {
    Split { next_avail: u16, next_used: u16 },
    Packed { base: VringBase },
}

/// The device side of one ring.
#[derive(Debug)]
enum Ring {
    Split(SplitRing),
    Packed(DeviceQueue),
}

/// The kick eventfd of a queue, never blocking.
#[derive(Debug, Clone)]
pub(crate) struct Kick(Arc<EventFd>);

impl Kick {
    /// Takes the eventfd and makes it non-blocking, so that a spurious wake-up
    /// cannot hang the event loop.
    pub(crate) fn new(event: Arc<EventFd>) -> io::Result<Self> {
        // SAFETY: fcntl on a descriptor that `event` keeps open; F_GETFL takes no
        // pointer. There is no safe wrapper for an eventfd of vmm-sys-util.
        let flags = unsafe { libc::fcntl(event.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(io::Error::last_os_error());
        }
        if flags & libc::O_NONBLOCK == 0 {
            // SAFETY: as above; F_SETFL takes the flags by value.
            let result =
                unsafe { libc::fcntl(event.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self(event))
    }

    /// The descriptor to poll.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Takes all pending kicks.
    pub(crate) fn drain(&self) {
        // The only failure is "none pending".
        let _ = self.0.read();
    }

    /// Makes the event loop come back: there is more to do than one turn allows.
    pub(crate) fn again(&self) {
        // The only failure is a counter at its maximum, which is readable too.
        let _ = self.0.write(1);
    }
}

/// The device side of one virtqueue.
#[derive(Debug)]
pub(crate) struct UserspaceQueue {
    ring: Ring,
    memory: SharedMemory,
    kick: Kick,
    call: Option<Arc<EventFd>>,
    broken: bool,
}

impl UserspaceQueue {
    /// Takes over a queue that the driver programmed, at its beginning.
    ///
    /// `max_size` is what was offered for it, `features` are as negotiated.
    ///
    /// # Errors
    /// The size, alignment or place of the ring is not acceptable.
    pub(crate) fn new(
        queue: Queue,
        max_size: u16,
        features: RingFeatures,
        memory: SharedMemory,
    ) -> Result<Self, QueueError> {
        Self::start(queue, max_size, features, memory, None)
    }

    fn start(
        queue: Queue,
        max_size: u16,
        features: RingFeatures,
        memory: SharedMemory,
        saved: Option<SavedPosition>,
    ) -> Result<Self, QueueError> {
        let addresses = queue.addresses;
        let ring = if features.packed {
            let base = match saved {
                None => VringBase::initial(true),
                Some(SavedPosition::Packed { base }) => base,
                Some(SavedPosition::Split { .. }) => return Err(QueueError::SavedFormat),
            };
            let ring = packed::new(&addresses, max_size, base, features, &memory)?;
            Ring::Packed(ring)
        } else {
            let (next_avail, next_used) = match saved {
                None => (0, 0),
                Some(SavedPosition::Split {
                    next_avail,
                    next_used,
                }) => (next_avail, next_used),
                Some(SavedPosition::Packed { .. }) => return Err(QueueError::SavedFormat),
            };
            let mut ring = split::new(&addresses, max_size, features.event_idx, &memory)?;
            ring.set_next_avail(next_avail);
            ring.set_next_used(next_used);
            Ring::Split(ring)
        };
        Ok(Self {
            ring,
            memory,
            kick: Kick::new(queue.kick).map_err(QueueError::Event)?,
            call: queue.call,
            broken: false,
        })
    }

    /// As [`UserspaceQueue::new`], at the saved indices, with one spurious kick
    /// and one spurious interrupt so that neither side waits for a lost one.
    ///
    /// # Errors
    /// As [`UserspaceQueue::new`], or the indices make no sense, or are of the
    /// other ring format.
    pub(crate) fn restore(
        queue: Queue,
        saved: SavedQueue,
        max_size: u16,
        features: RingFeatures,
        memory: SharedMemory,
    ) -> Result<Self, QueueError> {
        let position = match saved.position {
            SavedPosition::Split {
                next_avail,
                next_used,
            } if next_avail != next_used && !saved.broken => {
                return Err(QueueError::SavedIndices {
                    next_avail,
                    next_used,
                });
            }
            // Nobody goes on in a broken queue, so its position may be any: a
            // chain that was never given back may be in flight for ever.
            SavedPosition::Packed { .. } if saved.broken => SavedPosition::Packed {
                base: VringBase::initial(true),
            },
            position => position,
        };
        let mut restored = Self::start(queue, max_size, features, memory, Some(position))?;
        restored.broken = saved.broken;
        restored.kick.again();
        restored.call_now();
        Ok(restored)
    }

    /// The state to save. Every popped chain must have been given back.
    pub(crate) fn save(&self) -> SavedQueue {
        let position = match &self.ring {
            Ring::Split(ring) => SavedPosition::Split {
                next_avail: ring.next_avail(),
                next_used: ring.next_used(),
            },
            Ring::Packed(ring) => SavedPosition::Packed { base: ring.base() },
        };
        SavedQueue {
            position,
            broken: self.broken,
        }
    }

    /// The queue's kick.
    pub(crate) fn kick(&self) -> &Kick {
        &self.kick
    }

    /// Takes the next available chain; `None` when there is none or the queue is broken.
    ///
    /// # Errors
    /// The driver wrote something malformed: the queue is broken from now on.
    pub(crate) fn pop(&mut self) -> Result<Option<Chain>, QueueError> {
        if self.broken {
            return Ok(None);
        }
        let popped = match &mut self.ring {
            Ring::Split(ring) => split::pop(ring, &self.memory),
            Ring::Packed(ring) => packed::pop(ring),
        };
        self.broken = popped.is_err();
        popped
    }

    /// Stops serving the queue: what the driver put into a chain makes no sense.
    pub(crate) fn set_broken(&mut self) {
        self.broken = true;
    }

    /// Gives the chain at `head` back; `len` is how many bytes were written to it.
    /// The caller has made every write to its buffers, and marked it dirty, before.
    ///
    /// # Errors
    /// The used ring cannot be written: the queue is broken from now on.
    pub(crate) fn push_used(&mut self, head: u16, len: u32) -> Result<(), QueueError> {
        let pushed = match &mut self.ring {
            Ring::Split(ring) => ring
                .add_used(&*self.memory, head, len)
                .map_err(QueueError::Ring),
            Ring::Packed(ring) => ring.push_used(head, len).map_err(QueueError::Packed),
        };
        self.broken |= pushed.is_err();
        pushed
    }

    /// Asks the driver to kick from now on; `true` when chains were made
    /// available meanwhile, which no kick will announce.
    ///
    /// # Errors
    /// The ring cannot be accessed.
    pub(crate) fn arm(&mut self) -> Result<bool, QueueError> {
        if self.broken {
            return Ok(false);
        }
        match &mut self.ring {
            Ring::Split(ring) => ring
                .enable_notification(&*self.memory)
                .map_err(QueueError::Ring),
            Ring::Packed(ring) => ring.set_notifications(true).map_err(QueueError::Packed),
        }
    }

    /// Interrupts the driver for what [`UserspaceQueue::push_used`] published,
    /// unless the driver suppressed that (virtio 1.3, 2.7.7, 2.7.10 and 2.8.10).
    ///
    /// # Errors
    /// The ring cannot be accessed.
    pub(crate) fn signal_used(&mut self) -> Result<(), QueueError> {
        let wanted = match &mut self.ring {
            Ring::Split(ring) => split::wants_signal(ring, &self.memory)?,
            Ring::Packed(ring) => ring.needs_signal()?,
        };
        if wanted {
            self.call_now();
        }
        Ok(())
    }

    /// Changes the interrupt and sends a spurious one, so that none is lost.
    pub(crate) fn set_call(&mut self, call: Option<Arc<EventFd>>) {
        self.call = call;
        self.call_now();
    }

    fn call_now(&self) {
        if let Some(call) = &self.call {
            // The only failure is a counter at its maximum: the interrupt is
            // pending already.
            let _ = call.write(1);
        }
    }
}
