//! Rings that the VMM itself works on: the common part of both formats.
//!
//! A driver-side queue owns its ring's memory and tracks the chains that the device has. A
//! device-side queue works on a ring in guest memory, a [`GuestRing`]. The use of the buffers
//! belongs to the caller.
//!
//! ```text
//!                        split (virtio 1.3, 2.7)    packed (virtio 1.3, 2.8)
//!   DriverQueue has      split::Driver         or   packed::Driver
//!   DeviceQueue is       split::DeviceQueue    or   packed::DeviceQueue
//!   GuestRing is         split::GuestRing      or   packed::GuestRing
//! ```

mod device;
mod driver;
pub mod guest;
mod guest_ring;
mod in_order;
mod layout;
mod order;
pub mod packed;
mod ring_memory;
pub mod split;
mod violation;

use std::fmt;

use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_RING_PACKED};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

pub use self::device::DeviceQueue;
pub use self::driver::DriverQueue;
pub use self::guest_ring::GuestRing;
pub(crate) use self::guest_ring::not_known;
pub use self::layout::{PackedLayout, RingLayout, SplitLayout};
pub use self::violation::Violation;
use crate::Error;
use crate::device::{RING_SIZE_MAX, VringBase};
use crate::iova::{DeviceAddress, IovaRange, PAGE_SIZE};
use crate::memory::{SharedBuffer, not_pages};

/// The format of a ring; all rings of a device have the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingFormat {
    /// Three areas (virtio 1.3, 2.7).
    Split,
    /// One ring that both sides write, VIRTIO_F_RING_PACKED (virtio 1.3, 2.8).
    Packed,
}

impl RingFormat {
    /// Whether a ring can have `size` entries.
    #[must_use]
    pub const fn takes(self, size: u16) -> bool {
        match self {
            // Not zero, and as a 16-bit number never above 32768.
            Self::Split => size.is_power_of_two(),
            Self::Packed => size > 0 && size <= RING_SIZE_MAX,
        }
    }

    fn check(self, size: u16) -> Result<(), Error> {
        if self.takes(size) {
            return Ok(());
        }
        Err(Error::other(format!(
            "a {self} ring cannot have {size} entries"
        )))
    }
}

impl fmt::Display for RingFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Split => "split",
            Self::Packed => "packed",
        })
    }
}

/// The negotiated features that change how a ring is read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingFeatures {
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_IN_ORDER.
    pub in_order: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
}

impl RingFeatures {
    /// The ring features in a mask of negotiated features.
    #[must_use]
    pub const fn of(features: u64) -> Self {
        const fn has(features: u64, bit: u32) -> bool {
            features & (1 << bit) != 0
        }
        Self {
            packed: has(features, VIRTIO_F_RING_PACKED),
            event_idx: has(features, VIRTIO_RING_F_EVENT_IDX),
            in_order: has(features, VIRTIO_F_IN_ORDER),
            indirect: has(features, VIRTIO_RING_F_INDIRECT_DESC),
        }
    }

    /// The ring's format.
    #[must_use]
    pub const fn format(self) -> RingFormat {
        if self.packed {
            RingFormat::Packed
        } else {
            RingFormat::Split
        }
    }
}

/// The device's access to a piece of memory.
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
    /// Address of the first byte.
    pub iova: DeviceAddress,
    /// Bytes.
    pub len: u32,
    /// The device's access.
    pub direction: Direction,
}

/// A chain, copied once out of guest memory: later changes by the driver have no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The guest's name for the chain, for [`DeviceQueue::push_used`]: its first descriptor, or its
    /// buffer id in a packed ring.
    pub id: u16,
    /// The pieces at device addresses, device-readable ones first; none is empty. Each was
    /// inside guest memory when checked.
    pub pieces: Vec<Piece>,
}

impl Chain {
    /// The pieces that the device reads, and those that it writes.
    #[must_use]
    pub fn split(&self) -> (&[Piece], &[Piece]) {
        let reads = |piece: &Piece| piece.direction == Direction::DeviceReads;
        self.pieces.split_at(self.pieces.partition_point(reads))
    }
}

/// A used chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The value that [`DriverQueue::add`] returned for the chain.
    pub head: u16,
    /// Bytes that the device reports as written; at most the chain's writable bytes.
    pub written: u32,
}

/// The chain has no pieces, an empty piece, more than 4 GiB, or a device-readable piece after a
/// device-writable one (virtio 1.3, 2.7.4.2).
pub(crate) fn no_chain() -> Error {
    Error::other("the buffers do not form a valid descriptor chain")
}

/// The ring has another format or fewer entries, or it would begin with chains in flight.
fn cannot_begin(base: VringBase) -> Error {
    Error::other(format!(
        "an empty ring of this size and format cannot begin at {base}"
    ))
}

/// Checks a chain; returns the number of bytes that the device may write.
fn check_chain(chain: &[Piece]) -> Result<u32, Error> {
    let (mut total, mut writable) = (0u32, 0u32);
    for piece in chain {
        total = total.checked_add(piece.len).ok_or_else(no_chain)?;
        let fits = IovaRange::from_size(piece.iova.0, u64::from(piece.len));
        match piece.direction {
            _ if fits.is_none() => return Err(no_chain()),
            Direction::DeviceWrites => writable += piece.len,
            Direction::DeviceReads if writable > 0 => return Err(no_chain()),
            Direction::DeviceReads => {}
        }
    }
    if chain.is_empty() {
        Err(no_chain())
    } else {
        Ok(writable)
    }
}

/// Zeroes a ring of `total` bytes and returns its I/O virtual address: a ring in used memory would
/// begin with old indices.
fn prepare(buffer: &SharedBuffer, offset: u64, total: u64) -> Result<DeviceAddress, Error> {
    let start = buffer.iova(offset, total)?;
    if !offset.is_multiple_of(PAGE_SIZE) {
        return Err(not_pages(total, start.0));
    }
    let page = [0; 4096];
    for at in (0..total).step_by(page.len()) {
        buffer.write(offset + at, &page)?;
    }
    Ok(start)
}

/// Writes a chain into an indirect table at `offset` of a ring's buffer; returns the one piece for
/// the table. `encode` gets a piece and the index of the next one.
fn write_table(
    buffer: &SharedBuffer,
    offset: u64,
    chain: &[Piece],
    encode: impl Fn(&Piece, Option<u16>) -> [u8; 16],
) -> Result<Piece, Error> {
    let entries = u16::try_from(chain.len()).map_err(|_| no_chain())?;
    let len = 16 * u32::from(entries);
    let iova = buffer.iova(offset, u64::from(len))?;
    for (next, piece) in (1..=entries).zip(chain) {
        let bytes = encode(piece, Some(next).filter(|&next| next < entries));
        buffer.write(offset + 16 * u64::from(next - 1), &bytes)?;
    }
    Ok(Piece {
        iova,
        len,
        direction: Direction::DeviceReads,
    })
}
