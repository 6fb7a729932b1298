//! The network device's configuration, as far as this driver reads it.
//!
//! ```text
//!   struct virtio_net_config (virtio 1.3, 5.1.4), little-endian:
//!    0  u8 mac[6]   6  u16 status   8  u16 max_virtqueue_pairs   10  u16 mtu
//! ```

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};

use crate::control_queue::MacAddress;
use crate::device::{Device, DeviceError};

/// Bytes of the fields above.
const LEN: usize = 12;

/// What the device says of itself; `None` where it does not offer to say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct NetConfig {
    /// Its address.
    pub mac: Option<MacAddress>,
    /// Whether the link is up.
    pub link: Option<bool>,
    /// Queue pairs it can have; 1 without MQ.
    pub max_virtqueue_pairs: u16,
    /// Largest packet in bytes, Ethernet header not counted.
    pub mtu: Option<u16>,
}

impl NetConfig {
    /// Reads what `features` says is there.
    ///
    /// # Errors
    /// As [`Device::read_config`]; a configuration too short for a field reads as
    /// zeroes there.
    pub fn read(device: &Device, features: u64) -> Result<Self, DeviceError> {
        let mut bytes = [0; LEN];
        let size = usize::try_from(device.config_size()).unwrap_or(usize::MAX);
        device.read_config(0, &mut bytes[..size.min(LEN)])?;
        Ok(Self::parse(bytes, features))
    }

    fn parse(bytes: [u8; LEN], features: u64) -> Self {
        let [m0, m1, m2, m3, m4, m5, s0, s1, p0, p1, t0, t1] = bytes;
        let has = |bit: u32| features & (1 << bit) != 0;
        let status = u32::from(u16::from_le_bytes([s0, s1]));
        let pairs = u16::from_le_bytes([p0, p1]);
        Self {
            mac: has(VIRTIO_NET_F_MAC).then_some([m0, m1, m2, m3, m4, m5]),
            link: has(VIRTIO_NET_F_STATUS).then_some(status & VIRTIO_NET_S_LINK_UP != 0),
            max_virtqueue_pairs: if has(VIRTIO_NET_F_MQ) {
                pairs.max(1)
            } else {
                1
            },
            mtu: has(VIRTIO_NET_F_MTU).then_some(u16::from_le_bytes([t0, t1])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_offered_is_believed() {
        let bytes = [2, 0, 0x5e, 0, 0x53, 1, 1, 0, 4, 0, 0xdc, 5];
        let all = NetConfig::parse(bytes, u64::MAX);
        assert_eq!(all.mac, Some([2, 0, 0x5e, 0, 0x53, 1]));
        assert_eq!((all.link, all.mtu), (Some(true), Some(1500)));
        assert_eq!(all.max_virtqueue_pairs, 4);
        let none = NetConfig::parse(bytes, 0);
        assert_eq!((none.mac, none.link, none.mtu), (None, None, None));
        assert_eq!(none.max_virtqueue_pairs, 1);
        assert_eq!(NetConfig::parse([0; 12], u64::MAX).max_virtqueue_pairs, 1);
    }
}
