//! The features and the configuration space of the device.

use virtio_bindings::virtio_config::{
    VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_GUEST_USO4,
    VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::super::Description;
use crate::Error;
use crate::control_queue::MacAddress;
use crate::netdev::{UNFILTERED, VirtioNetConfig};

/// The feature of packed rings, as a mask.
pub const PACKED: u64 = 1 << VIRTIO_F_RING_PACKED;

/// Without these a driver cannot use the device.
const REQUIRED: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_F_ACCESS_PLATFORM;

/// Checksums and segmentation. Frames at a port ([`xdp`](super::xdp)) have no virtio-net header on
/// their way, so they stay with the guest there.
pub const OFFLOADS: u64 = 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_HOST_ECN
    | 1 << VIRTIO_NET_F_HOST_UFO
    | 1 << VIRTIO_NET_F_HOST_USO
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_NET_F_GUEST_ECN
    | 1 << VIRTIO_NET_F_GUEST_UFO
    | 1 << VIRTIO_NET_F_GUEST_USO4
    | 1 << VIRTIO_NET_F_GUEST_USO6;

/// All features of the device.
pub const OFFERED: u64 = REQUIRED
    | 1 << VIRTIO_F_RING_PACKED
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | OFFLOADS
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_NET_F_MAC
    | 1 << VIRTIO_NET_F_MTU
    | 1 << VIRTIO_NET_F_STATUS;

/// Most queue pairs of a device.
pub const PAIRS_MAX: u16 = 16;
/// The MTU of a driver without the feature.
const USUAL_MTU: u16 = 1500;
/// Entries of each queue.
const QUEUE_SIZE: u16 = 256;

/// What distinguishes one device from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Configuration {
    /// The address of the guest's interface.
    pub mac: MacAddress,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: u16,
    /// Pairs of a receive and a transmit queue, 1 to [`PAIRS_MAX`].
    pub pairs: u16,
    /// The features to offer, of [`OFFERED`]; those that VDUSE requires are always among them.
    pub features: u64,
    /// At most this share of a processor polls for each pair, in percent; 0: the threads sleep.
    pub poll_percent: u8,
}

impl Configuration {
    /// The device for [`Control::create`](super::super::Control::create).
    ///
    /// VDUSE refuses CTRL_VQ, without which a driver uses the first pair only. The VMM offers it,
    /// and MQ, for a device with [`UNFILTERED`].
    ///
    /// # Errors
    /// The number of pairs is not possible.
    pub fn description(&self) -> Result<Description, Error> {
        let status = u16::try_from(VIRTIO_NET_S_LINK_UP).unwrap_or(1);
        let mut config = [
            &self.mac[..],
            &status.to_le_bytes(),
            &self.pairs.to_le_bytes(),
            &self.mtu.to_le_bytes(),
        ]
        .concat();
        config.resize(VirtioNetConfig::LEN, 0);
        config.extend(UNFILTERED);
        Ok(Description {
            device_id: VIRTIO_ID_NET,
            features: self.features(),
            queues: vec![QUEUE_SIZE; usize::from(self.checked_pairs()?) * 2],
            config,
        })
    }

    pub(super) fn checked_pairs(&self) -> Result<u16, Error> {
        let pairs = Some(self.pairs).filter(|pairs| (1..=PAIRS_MAX).contains(pairs));
        pairs.ok_or_else(|| {
            Error::other(format!(
                "a software NIC has 1 to {PAIRS_MAX} queue pairs, not {}",
                self.pairs
            ))
        })
    }

    pub(super) fn features(&self) -> u64 {
        // The usual size needs no feature, which few NICs have: the guest can move to others.
        let unneeded = if self.mtu == USUAL_MTU {
            1 << VIRTIO_NET_F_MTU
        } else {
            0
        };
        self.features & OFFERED & !unneeded | REQUIRED
    }
}

/// Whether a driver can use the device with these features.
pub(super) fn is_usable(features: u64, offered: u64) -> bool {
    features & !offered == 0 && features & REQUIRED == REQUIRED
}
