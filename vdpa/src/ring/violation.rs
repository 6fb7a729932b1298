//! The rules of rings that a device or a guest can break.

use crate::iova::DeviceAddress;

/// A violation of the ring rules by a device or a guest's driver (virtio 1.3, 2.7 and 2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Device: the used index moved further than the number of outstanding chains.
    #[error("the used index moved by {moved} with {outstanding} chains outstanding")]
    IndexJump {
        /// Distance of the move.
        moved: u16,
        /// Chains that the device has.
        outstanding: u16,
    },
    /// Device: a used element names a chain that the device does not have.
    #[error("used element {id} is not outstanding")]
    NotOutstanding {
        /// The element's id.
        id: u32,
    },
    /// Device: a used element of a device that works in order completes more chains than the used
    /// index allows.
    #[error("used element {id} covers {batch} chains, but the used index moved by {moved}")]
    Batch {
        /// The element's id.
        id: u32,
        /// Chains up to that one.
        batch: usize,
        /// Distance of the index move.
        moved: u16,
    },
    /// Device: it reports more written bytes than the chain has.
    #[error("the device reports {written} written bytes for a chain that takes {offered}")]
    TooLong {
        /// Bytes reported by the device.
        written: u32,
        /// Writable bytes of the chain.
        offered: u32,
    },
    /// A head or a next field is not an entry of its table.
    #[error("descriptor {index} does not exist in a table of {size}")]
    NoDescriptor {
        /// The entry named.
        index: u16,
        /// Entries of the table.
        size: u32,
    },
    /// A chain has more descriptors than the ring has entries (256 in a smaller ring), or a loop.
    #[error("a descriptor chain is longer than the ring or loops")]
    ChainTooLong,
    /// A chain in a packed ring runs into descriptors of chains in flight.
    #[error("a descriptor chain runs into descriptors that are in use")]
    Overrun,
    /// The buffer id of a chain in a packed ring is that of a chain in flight.
    #[error("buffer id {id} is in use already")]
    DuplicateId {
        /// The id.
        id: u16,
    },
    /// An indirect descriptor breaks a rule: a table in a table, a successor, or no such feature.
    /// Or the table's length is 0 or not a multiple of 16.
    #[error("an indirect descriptor is malformed")]
    Indirect,
    /// A device-readable piece follows a device-writable one.
    #[error("a readable buffer follows a writable one")]
    Order,
    /// A chain with no byte, or with 4 GiB or more.
    #[error("a descriptor chain has a length of 0 or of more than 4 GiB")]
    Length,
    /// A piece lies outside guest memory.
    #[error("a buffer of {len} bytes at {address:#x} is not in guest memory")]
    Outside {
        /// Its first byte.
        address: DeviceAddress,
        /// Bytes.
        len: u32,
    },
    /// The avail index is further ahead than the ring has entries.
    #[error("the avail index is {ahead} ahead in a ring of {size}")]
    AvailJump {
        /// Entries between the used position and the index.
        ahead: u16,
        /// Entries of the ring.
        size: u16,
    },
}

impl Violation {
    /// Whether the device broke the rule.
    pub(crate) fn is_by_device(self) -> bool {
        matches!(
            self,
            Self::IndexJump { .. }
                | Self::NotOutstanding { .. }
                | Self::Batch { .. }
                | Self::TooLong { .. }
        )
    }
}
