//! The request to the guest to announce itself (virtio 1.3, 5.1.6.5.4).
//!
//! ```text
//!              announce
//!   quiet ----------------> pending: VIRTIO_NET_S_ANNOUNCE is set in `status`
//!     ^                        |
//!     +------------------------+
//!       the driver's ANNOUNCE_ACK, a reset
//! ```
//! After a guest has moved, switches learn its new location from the frames that it then sends. The
//! request comes from the VMM: the device neither makes it nor sees it. This file owns the bit. It
//! must not know how the guest is interrupted.

use virtio_bindings::virtio_net::VIRTIO_NET_S_ANNOUNCE;

/// Offset of the low byte of `struct virtio_net_config.status` (virtio 1.3, 5.1.4).
const STATUS_OFFSET: u32 = 6;

/// Whether the guest is asked to announce itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Announcement {
    pending: bool,
}

impl Announcement {
    pub(super) fn is_pending(self) -> bool {
        self.pending
    }

    pub(super) fn set(&mut self, pending: bool) {
        self.pending = pending;
    }

    /// Lays the bit over data read from device configuration at `offset`. The guest does not see
    /// the device's own bit.
    pub(super) fn cover(self, offset: u32, data: &mut [u8]) {
        let [bit, ..] = VIRTIO_NET_S_ANNOUNCE.to_le_bytes();
        let position = STATUS_OFFSET.checked_sub(offset);
        let position = position.and_then(|position| usize::try_from(position).ok());
        if let Some(status) = position.and_then(|position| data.get_mut(position)) {
            *status = *status & !bit | if self.pending { bit } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covers_one_bit_of_the_status() {
        let pending = Announcement { pending: true };
        for (offset, len, expected) in [
            (0u32, 8, vec![1, 1, 1, 1, 1, 1, 3, 1]),
            (6, 2, vec![3, 1]),
            (7, 1, vec![1]),
            (0, 6, vec![1; 6]),
            (u32::MAX, 1, vec![1]),
            (6, 0, vec![]),
        ] {
            let mut data = vec![1; len];
            pending.cover(offset, &mut data);
            assert_eq!(data, expected, "{offset}");
        }
        let mut data = [0xff];
        Announcement::default().cover(6, &mut data);
        assert_eq!(data, [0xfd], "the device's own bit is not shown");
    }
}
