//! The MAC address that a guest sees on a vDPA network device.
//!
//! The address is configured, or is the device's own at start. It is laid over the device
//! configuration, and the control virtqueue sets it in the device at each start. That is needed
//! because some parent drivers keep an address that an earlier driver set (vdpa_sim), and others
//! never had the configured one. It must not know how a command reaches the device.

use vdpa::control_queue::Command;

/// Bytes of `struct virtio_net_config.mac`, the first field (virtio 1.3, 5.1.4).
const MAC_LEN: usize = 6;

/// The address of one network device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MacOverlay {
    /// The address that the guest finds after each reset.
    configured: [u8; MAC_LEN],
    /// The address that the guest sees now.
    current: [u8; MAC_LEN],
}

impl MacOverlay {
    pub(super) fn new(configured: [u8; MAC_LEN]) -> Self {
        Self {
            configured,
            current: configured,
        }
    }

    /// Returns the address that the device must have now.
    pub(super) fn current(&self) -> [u8; MAC_LEN] {
        self.current
    }

    /// Returns the address that the guest finds after each reset.
    pub(super) fn configured(&self) -> [u8; MAC_LEN] {
        self.configured
    }

    /// Takes over an address from a saved state.
    pub(super) fn restore(&mut self, current: [u8; MAC_LEN]) {
        self.current = current;
    }

    /// Discards the guest's changes.
    pub(super) fn reset(&mut self) {
        self.current = self.configured;
    }

    /// Records a command that the device has carried out.
    pub(super) fn note(&mut self, done: &Command) {
        if let Command::MacAddrSet(address) = done {
            self.current = *address;
        }
    }

    /// Lays the address over data read from device configuration at `offset`.
    pub(super) fn cover(&self, offset: u32, data: &mut [u8]) {
        let Ok(start) = usize::try_from(offset) else {
            return;
        };
        for (place, byte) in data.iter_mut().zip(self.current.iter().skip(start)) {
            *place = *byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covers_only_the_address() {
        let mac = MacOverlay::new([1, 2, 3, 4, 5, 6]);
        for (offset, len, expected) in [
            (0u32, 8, vec![1, 2, 3, 4, 5, 6, 0xaa, 0xaa]),
            (4, 4, vec![5, 6, 0xaa, 0xaa]),
            (6, 2, vec![0xaa, 0xaa]),
            (u32::MAX, 1, vec![0xaa]),
            (3, 1, vec![4]),
        ] {
            let mut data = vec![0xaa; len];
            mac.cover(offset, &mut data);
            assert_eq!(data, expected, "{offset}");
        }
    }
}
