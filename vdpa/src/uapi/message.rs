//! IOTLB messages, as they are written to the device's file descriptor.
//!
//! A message is `struct vhost_msg_v2` (72 bytes, native endianness):
//!
//! ```text
//!  0  u32 type = VHOST_IOTLB_MSG_V2     8  u64 iova     32  u8 perm
//!  4  u32 asid                         16  u64 size     33  u8 type of operation
//!                                      24  u64 uaddr    34  zeroes up to 72
//! ```
//! This module has the encoding only; [`crate::iotlb`] tracks the mappings.

use super::{
    VHOST_ACCESS_RO, VHOST_ACCESS_RW, VHOST_ACCESS_WO, VHOST_IOTLB_BATCH_BEGIN,
    VHOST_IOTLB_BATCH_END, VHOST_IOTLB_INVALIDATE, VHOST_IOTLB_MSG_V2, VHOST_IOTLB_UPDATE,
};

/// Size of a message in bytes.
pub const MESSAGE_SIZE: usize = 72;
/// Offset of the ASID in `struct vhost_msg_v2`.
pub(crate) const ASID_OFFSET: usize = 4;
/// Offset of `struct vhost_iotlb_msg` in `struct vhost_msg_v2`.
pub(crate) const IOTLB_OFFSET: usize = 8;
/// Offsets in `struct vhost_iotlb_msg`.
pub(crate) const IOVA_OFFSET: usize = 0;
pub(crate) const SIZE_OFFSET: usize = 8;
pub(crate) const UADDR_OFFSET: usize = 16;
pub(crate) const PERM_OFFSET: usize = 24;
pub(crate) const TYPE_OFFSET: usize = 25;

/// The device's access to a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// The device only reads (VHOST_ACCESS_RO).
    ReadOnly,
    /// The device only writes (VHOST_ACCESS_WO).
    WriteOnly,
    /// Both (VHOST_ACCESS_RW).
    ReadWrite,
}

impl Access {
    /// Whether all of `wanted` is allowed.
    #[must_use]
    pub const fn allows(self, wanted: Self) -> bool {
        self.bits() & wanted.bits() == wanted.bits()
    }

    const fn bits(self) -> u8 {
        match self {
            Self::ReadOnly => VHOST_ACCESS_RO,
            Self::WriteOnly => VHOST_ACCESS_WO,
            Self::ReadWrite => VHOST_ACCESS_RW,
        }
    }
}

/// One change of an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IotlbMessage {
    /// Maps `size` bytes at `iova` to the process's memory at `host_address`.
    Update {
        /// Address space.
        asid: u32,
        /// First I/O virtual address.
        iova: u64,
        /// Bytes.
        size: u64,
        /// First address in this process.
        host_address: u64,
        /// The device's access.
        access: Access,
    },
    /// Removes every mapping that touches `size` bytes at `iova`.
    Invalidate {
        /// Address space.
        asid: u32,
        /// First I/O virtual address.
        iova: u64,
        /// Bytes.
        size: u64,
    },
    /// Begins a batch: changes need not reach the device before [`IotlbMessage::BatchEnd`].
    BatchBegin {
        /// The one address space of the batch.
        asid: u32,
    },
    /// Applies all changes since [`IotlbMessage::BatchBegin`] to the device.
    BatchEnd {
        /// The one address space of the batch.
        asid: u32,
    },
}

impl IotlbMessage {
    /// The bytes to write.
    #[must_use]
    pub fn encode(&self) -> [u8; MESSAGE_SIZE] {
        let (asid, iova, size, host_address, perm, kind) = match *self {
            Self::Update {
                asid,
                iova,
                size,
                host_address,
                access,
            } => (
                asid,
                iova,
                size,
                host_address,
                access.bits(),
                VHOST_IOTLB_UPDATE,
            ),
            Self::Invalidate { asid, iova, size } => {
                (asid, iova, size, 0, 0, VHOST_IOTLB_INVALIDATE)
            }
            Self::BatchBegin { asid } => (asid, 0, 0, 0, 0, VHOST_IOTLB_BATCH_BEGIN),
            Self::BatchEnd { asid } => (asid, 0, 0, 0, 0, VHOST_IOTLB_BATCH_END),
        };
        let mut bytes = [0; MESSAGE_SIZE];
        let mut put = |offset: usize, field: &[u8]| {
            bytes[offset..offset + field.len()].copy_from_slice(field);
        };
        put(0, &VHOST_IOTLB_MSG_V2.to_ne_bytes());
        put(ASID_OFFSET, &asid.to_ne_bytes());
        put(IOTLB_OFFSET + IOVA_OFFSET, &iova.to_ne_bytes());
        put(IOTLB_OFFSET + SIZE_OFFSET, &size.to_ne_bytes());
        put(IOTLB_OFFSET + UADDR_OFFSET, &host_address.to_ne_bytes());
        put(IOTLB_OFFSET + PERM_OFFSET, &[perm]);
        put(IOTLB_OFFSET + TYPE_OFFSET, &[kind]);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_every_field_at_its_place() {
        let bytes = IotlbMessage::Update {
            asid: 0x0102_0304,
            iova: 0x1112_1314_1516_1718,
            size: 0x2122_2324_2526_2728,
            host_address: 0x3132_3334_3536_3738,
            access: Access::WriteOnly,
        }
        .encode();
        assert_eq!(bytes[..4], 2u32.to_ne_bytes());
        assert_eq!(bytes[4..8], 0x0102_0304u32.to_ne_bytes());
        assert_eq!(bytes[8..16], 0x1112_1314_1516_1718u64.to_ne_bytes());
        assert_eq!(bytes[16..24], 0x2122_2324_2526_2728u64.to_ne_bytes());
        assert_eq!(bytes[24..32], 0x3132_3334_3536_3738u64.to_ne_bytes());
        assert_eq!(bytes[32..34], [2, 2]);
        assert_eq!(bytes[34..], [0; 38]);
        assert_eq!(IotlbMessage::BatchBegin { asid: 0 }.encode()[33], 5);
        assert_eq!(IotlbMessage::BatchEnd { asid: 0 }.encode()[33], 6);
        let invalidate = IotlbMessage::Invalidate {
            asid: 0,
            iova: 0,
            size: 1,
        };
        assert_eq!(invalidate.encode()[32..34], [0, 3]);
    }
}
