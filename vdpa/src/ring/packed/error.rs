//! What can be wrong with a packed ring that a guest drives.

use std::fmt;

use vm_memory::GuestMemoryError;

use crate::device::VringBase;

/// The three areas of a packed ring (virtio 1.3, 2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingArea {
    /// Descriptor Area, the ring.
    Descriptor,
    /// Driver Area, the driver's event suppression.
    Driver,
    /// Device Area, the device's event suppression.
    Device,
}

impl fmt::Display for RingArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Descriptor => "descriptor area",
            Self::Driver => "driver area",
            Self::Device => "device area",
        })
    }
}

/// What is wrong with a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainFault {
    /// It runs into descriptors that the device has already.
    Overrun,
    /// More descriptors than the ring has entries (256 in a smaller ring).
    TooLong,
    /// More than 4 GiB.
    TooLarge,
    /// An indirect table of no or a broken number of descriptors, inside
    /// another one, or with a successor.
    Indirect,
    /// A buffer or an indirect table is not, or not wholly, guest memory.
    OutsideMemory,
    /// A device-readable buffer follows a device-writable one.
    Order,
    /// Its buffer id is that of a chain which the device has.
    DuplicateId,
}

impl fmt::Display for ChainFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Overrun => "it runs into descriptors that are in use",
            Self::TooLong => "it has too many descriptors",
            Self::TooLarge => "it has more than 4 GiB",
            Self::Indirect => "its indirect table is malformed",
            Self::OutsideMemory => "a buffer lies outside guest memory",
            Self::Order => "a readable buffer follows a writable one",
            Self::DuplicateId => "its buffer id is in use",
        })
    }
}

/// Why a packed ring cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum DeviceQueueError {
    /// The size is 0 or above 32768.
    #[error("a packed ring cannot have {size} entries")]
    Size {
        /// What the driver set.
        size: u16,
    },
    /// An area breaks its alignment (16, 4 and 4 bytes).
    #[error("the {area} at {address:#x} is misaligned")]
    Misaligned {
        /// Which area.
        area: RingArea,
        /// Guest-physical address.
        address: u64,
    },
    /// An area is not wholly in guest memory.
    #[error("the {area} at {address:#x}, {len} bytes, lies outside guest memory")]
    OutsideMemory {
        /// Which area.
        area: RingArea,
        /// Guest-physical address.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Two areas lie over each other.
    #[error("the {first} overlaps the {second}")]
    Overlap {
        /// One of them.
        first: RingArea,
        /// The other one.
        second: RingArea,
    },
    /// A position of a split ring, outside the ring, or one with chains in
    /// flight: those cannot be found again, for used descriptors may have
    /// taken their places.
    #[error("a packed ring of {size} entries cannot go on at {base:?}")]
    Base {
        /// The position.
        base: VringBase,
        /// Entries of the ring.
        size: u16,
    },
    /// The driver made something available that is no valid chain.
    #[error("the descriptor chain at entry {index} is malformed: {fault}")]
    Chain {
        /// The ring's entry.
        index: u16,
        /// What is wrong.
        fault: ChainFault,
    },
    /// A chain was given back that is not in flight, or, with IN_ORDER, not the
    /// oldest one.
    #[error("buffer id {id} cannot be used now")]
    NotInFlight {
        /// The id.
        id: u16,
    },
    /// Guest memory cannot be accessed.
    #[error("guest memory cannot be accessed")]
    Memory(#[source] GuestMemoryError),
}
