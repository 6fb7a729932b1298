//! A network device's configuration: its fields, and their meaning under the negotiated features.

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS,
    VIRTIO_NET_S_LINK_UP,
};

use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32};

use crate::Error;
use crate::control_queue::MacAddress;
use crate::device::Device;

/// `struct virtio_net_config` (virtio 1.3, 5.1.4) up to the hash types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes)]
#[repr(C)]
pub struct VirtioNetConfig {
    /// The device's address.
    pub mac: MacAddress,
    /// Bits `VIRTIO_NET_S_*`.
    pub status: U16,
    /// Maximum number of queue pairs.
    pub max_virtqueue_pairs: U16,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: U16,
    /// In Mbit/s.
    pub speed: U32,
    /// 1 for full duplex.
    pub duplex: u8,
    /// In bytes.
    pub rss_max_key_size: u8,
    /// In entries.
    pub rss_max_indirection_table_length: U16,
    /// Bits `VIRTIO_NET_HASH_TYPE_*`.
    pub supported_hash_types: U32,
}

impl VirtioNetConfig {
    /// Its size in bytes.
    pub const LEN: usize = size_of::<Self>();

    /// The fields at the beginning of a device's configuration.
    #[must_use]
    pub fn of(bytes: [u8; Self::LEN]) -> Self {
        zerocopy::transmute!(bytes)
    }
}

/// Follows [`VirtioNetConfig`] in the configuration of a software NIC of Bellhop. Drivers ignore it
/// (virtio 1.3, 2.5.1). It says that the device
/// * receives every frame for its port, whatever address, VLAN or mode a driver sets,
/// * has queue pairs only, and uses each pair that the driver enables.
///
/// Such a device carries out control commands by doing nothing. VDUSE refuses CTRL_VQ, so the VMM
/// offers the control queue in its place.
pub const UNFILTERED: [u8; 8] = *b"unfilter";

/// Whether a device with an owner has [`UNFILTERED`], queue pairs only, and no control queue.
///
/// # Errors
/// As [`Device::read_config`].
pub fn is_unfiltered(device: &Device) -> Result<bool, Error> {
    let info = device.info();
    let pairs = info.queue_count() >= 2 && info.queue_count().is_multiple_of(2);
    let commands = info.features & 1 << VIRTIO_NET_F_CTRL_VQ != 0;
    let mut bytes = [0; VirtioNetConfig::LEN + UNFILTERED.len()];
    let size = usize::try_from(info.config_size).unwrap_or(usize::MAX);
    if info.device_id != VIRTIO_ID_NET || commands || !pairs || size < bytes.len() {
        return Ok(false);
    }
    device.read_config(0, &mut bytes)?;
    Ok(bytes.ends_with(&UNFILTERED))
}

/// The fields that a device reports; `None` if it lacks the feature for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct NetConfig {
    /// Its address.
    pub mac: Option<MacAddress>,
    /// Whether the link is up.
    pub link: Option<bool>,
    /// Maximum number of queue pairs; 1 without MQ.
    pub max_virtqueue_pairs: u16,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: Option<u16>,
}

impl NetConfig {
    /// Reads the fields that `features` provides.
    ///
    /// # Errors
    /// As [`Device::read_config`]; a configuration too short for a field reads as zeroes there.
    pub fn read(device: &Device, features: u64) -> Result<Self, Error> {
        let mut bytes = [0; VirtioNetConfig::LEN];
        let size = usize::try_from(device.config_size()).unwrap_or(usize::MAX);
        device.read_config(0, &mut bytes[..size.min(VirtioNetConfig::LEN)])?;
        Ok(Self::offered(&VirtioNetConfig::of(bytes), features))
    }

    fn offered(config: &VirtioNetConfig, features: u64) -> Self {
        let has = |bit: u32| features & (1 << bit) != 0;
        let link_up = u32::from(config.status.get()) & VIRTIO_NET_S_LINK_UP != 0;
        Self {
            mac: has(VIRTIO_NET_F_MAC).then_some(config.mac),
            link: has(VIRTIO_NET_F_STATUS).then_some(link_up),
            max_virtqueue_pairs: if has(VIRTIO_NET_F_MQ) {
                config.max_virtqueue_pairs.get().max(1)
            } else {
                1
            },
            mtu: has(VIRTIO_NET_F_MTU).then_some(config.mtu.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_offered_fields_are_used() {
        let mut bytes = [0; VirtioNetConfig::LEN];
        bytes[..12].copy_from_slice(&[2, 0, 0x5e, 0, 0x53, 1, 1, 0, 4, 0, 0xdc, 5]);
        let config = VirtioNetConfig::of(bytes);
        let all = NetConfig::offered(&config, u64::MAX);
        assert_eq!(all.mac, Some([2, 0, 0x5e, 0, 0x53, 1]));
        assert_eq!((all.link, all.mtu), (Some(true), Some(1500)));
        assert_eq!(all.max_virtqueue_pairs, 4);
        let none = NetConfig::offered(&config, 0);
        assert_eq!((none.mac, none.link, none.mtu), (None, None, None));
        assert_eq!(none.max_virtqueue_pairs, 1);
        let zeroes = VirtioNetConfig::of([0; VirtioNetConfig::LEN]);
        assert_eq!(NetConfig::offered(&zeroes, u64::MAX).max_virtqueue_pairs, 1);
    }

    #[test]
    fn fields_are_where_virtio_has_them() {
        let config = VirtioNetConfig::of(std::array::from_fn(|at| u8::try_from(at).unwrap()));
        let expected = VirtioNetConfig {
            mac: [0, 1, 2, 3, 4, 5],
            status: U16::new(0x0706),
            max_virtqueue_pairs: U16::new(0x0908),
            mtu: U16::new(0x0b0a),
            speed: U32::new(0x0f0e_0d0c),
            duplex: 16,
            rss_max_key_size: 17,
            rss_max_indirection_table_length: U16::new(0x1312),
            supported_hash_types: U32::new(0x1716_1514),
        };
        assert_eq!(config, expected);
    }
}
