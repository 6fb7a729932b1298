//! The features that a guest is offered, and those that its driver negotiates. The offer is the
//! device's features without those that the VMM keeps, plus the VMM's own features.
//!
//! | own feature | offered if |
//! |---|---|
//! | GUEST_ANNOUNCE | STATUS and CTRL_VQ are passed on; the VMM sets the bit and takes the ack |
//! | MAC | the device has no address but accepts CTRL_MAC_ADDR, and the user gives an address |
//! | RING_RESET | the device can suspend and resume, and keeps ring positions |
//!
//! A queue is reset while the device is suspended. An own feature is never negotiated with the
//! device, whether or not the device offers the same bit. This file owns the decision and its log
//! lines. It must not know how the features are implemented.

use vdpa::control_queue::Limits;
use vdpa::device::{Device, DeviceInfo};
use vdpa::features::{self, Policy};
use vdpa::ring::RingFeatures;
use vdpa::uapi::BackendFeatures;
use virtio_bindings::virtio_config::VIRTIO_F_RING_RESET;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_ANNOUNCE,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_STATUS,
};

/// The features that a guest is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    /// The device's features that are passed on.
    passed: u64,
    /// The VMM's own.
    own: u64,
}

/// The properties of a device apart from its features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Abilities {
    /// A queue can be reset while the device is suspended.
    resets_queues: bool,
    /// The user gives a MAC address.
    mac_given: bool,
}

/// The guest's negotiation, as far as it is needed later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Negotiation {
    pub(super) features: u64,
    /// Index of the control queue, if the guest negotiated one.
    pub(super) control_queue: Option<u16>,
    pub(super) limits: Limits,
}

impl Negotiation {
    pub(super) fn has(&self, bit: u32) -> bool {
        self.features & (1 << bit) != 0
    }

    /// Returns the ring features of all rings of the device, the guest's and the VMM's.
    pub(super) fn ring(&self) -> RingFeatures {
        RingFeatures::of(self.features)
    }
}

impl Offer {
    /// Decides the offer, and logs each bit that is withheld or added, with its reason.
    ///
    /// # Errors
    /// The device was not reset.
    pub(super) fn new(device: &Device, id: &str, mac_given: bool) -> Result<Self, vdpa::Error> {
        let info = device.info();
        let needed = BackendFeatures::SUSPEND | BackendFeatures::RESUME;
        let abilities = Abilities {
            resets_queues: device.keeps_ring_positions()?
                && device.backend_features().contains(needed),
            mac_given,
        };
        let (offer, withheld) = Self::decide(info, abilities);
        for (bit, reason) in withheld {
            let name = features::name(bit, info.device_id).unwrap_or("unnamed");
            tracing::info!(device = %id, bit, name, %reason, "feature withheld from the guest");
        }
        let own = features::describe(offer.own, info.device_id);
        tracing::info!(device = %id, features = %own, "features that the VMM offers on its own");
        Ok(offer)
    }

    fn decide(info: &DeviceInfo, abilities: Abilities) -> (Self, Vec<(u32, features::Reason)>) {
        let passed = features::pass_through(info.features, info.device_id, Policy::default());
        let has = |bit: u32| passed.features & (1 << bit) != 0;
        let is_net = info.device_id == VIRTIO_ID_NET;
        let announces = is_net && has(VIRTIO_NET_F_STATUS) && has(VIRTIO_NET_F_CTRL_VQ);
        let takes_mac = is_net && has(VIRTIO_NET_F_CTRL_MAC_ADDR) && !has(VIRTIO_NET_F_MAC);
        let own: u64 = [
            (VIRTIO_NET_F_GUEST_ANNOUNCE, announces),
            (VIRTIO_NET_F_MAC, takes_mac && abilities.mac_given),
            (VIRTIO_F_RING_RESET, abilities.resets_queues),
        ]
        .into_iter()
        .filter(|(_, offered)| *offered)
        .fold(0, |bits, (bit, _)| bits | 1 << bit);
        let offer = Self {
            passed: passed.features,
            own,
        };
        // Features that the VMM offers in the device's place are not withheld.
        let withheld = passed.withheld.into_iter();
        let withheld = withheld.filter(|(bit, _)| own & (1 << bit) == 0).collect();
        (offer, withheld)
    }

    /// Returns all features that the guest is offered.
    pub(super) fn all(self) -> u64 {
        self.passed | self.own
    }

    /// Whether the device has feature number `bit` and the guest gets it.
    pub(super) fn passes(self, bit: u32) -> bool {
        self.passed & (1 << bit) != 0
    }

    /// Whether the guest is offered feature number `bit`.
    pub(super) fn has(self, bit: u32) -> bool {
        self.all() & (1 << bit) != 0
    }

    /// Returns the part of the guest's choice that concerns the device.
    pub(super) fn for_device(self, chosen: u64) -> u64 {
        chosen & !self.own
    }
}

#[cfg(test)]
mod tests {
    use vdpa::iova::IovaRange;

    use super::*;

    const VERSION_1: u64 = 1 << 32;
    const STATUS: u64 = 1 << VIRTIO_NET_F_STATUS;
    const CTRL_VQ: u64 = 1 << VIRTIO_NET_F_CTRL_VQ;
    const CTRL_MAC_ADDR: u64 = 1 << VIRTIO_NET_F_CTRL_MAC_ADDR;
    const ANNOUNCE: u64 = 1 << VIRTIO_NET_F_GUEST_ANNOUNCE;
    const MAC: u64 = 1 << VIRTIO_NET_F_MAC;
    const RING_RESET: u64 = 1 << VIRTIO_F_RING_RESET;

    fn offer(device_id: u32, features: u64, resets_queues: bool, mac_given: bool) -> Offer {
        let info = DeviceInfo {
            device_id,
            features,
            backend_features: BackendFeatures::empty(),
            config_size: 24,
            iova_range: IovaRange::new(0, u64::MAX).unwrap(),
            groups: 1,
            address_spaces: 1,
            queues: Vec::new(),
        };
        let abilities = Abilities {
            resets_queues,
            mac_given,
        };
        Offer::decide(&info, abilities).0
    }

    #[test]
    fn announcing_needs_a_status_and_a_control_queue_and_not_the_device() {
        for device_has in [0, ANNOUNCE] {
            for (features, offered) in [
                (STATUS | CTRL_VQ, true),
                (STATUS, false),
                (CTRL_VQ, false),
                (0, false),
            ] {
                let offer = offer(1, VERSION_1 | features | device_has, false, false);
                assert_eq!(offer.all() & ANNOUNCE != 0, offered, "{features:#x}");
                assert_eq!(offer.for_device(u64::MAX) & ANNOUNCE == 0, offered);
                assert!(!offer.passes(VIRTIO_NET_F_GUEST_ANNOUNCE));
            }
        }
        // Bits 16 and 17 mean something else on a block device.
        let block = offer(2, VERSION_1 | STATUS | CTRL_VQ, false, false);
        assert_eq!(block.all() & ANNOUNCE, 0);
    }

    #[test]
    fn an_address_is_the_vmms_only_where_the_device_has_none_and_takes_one() {
        let takes = VERSION_1 | CTRL_VQ | CTRL_MAC_ADDR;
        for (features, given, own) in [
            (takes, true, true),
            (takes, false, false),
            (takes | MAC, true, false),
            (VERSION_1 | CTRL_VQ, true, false),
        ] {
            let offer = offer(1, features, false, given);
            assert_eq!(offer.for_device(MAC) == 0, own, "{features:#x} {given}");
            assert_eq!(offer.has(VIRTIO_NET_F_MAC), own || features & MAC != 0);
        }
    }

    #[test]
    fn ring_reset_never_reaches_the_device() {
        for features in [VERSION_1, VERSION_1 | RING_RESET] {
            let able = offer(2, features, true, false);
            assert!(able.has(VIRTIO_F_RING_RESET));
            assert_eq!(able.for_device(able.all()), VERSION_1);
            let unable = offer(2, features, false, false);
            assert!(!unable.has(VIRTIO_F_RING_RESET));
        }
    }
}
