//! The features that a guest is offered, and those that its driver negotiates. The offer is the
//! device's features without those that the VMM keeps, plus the VMM's own features.
//!
//! | own feature | offered if |
//! |---|---|
//! | CTRL_VQ, CTRL_MAC_ADDR | the device filters nothing ([`UNFILTERED`]), and has none |
//! | MQ | the same, and it has several queue pairs |
//! | GUEST_ANNOUNCE | with STATUS and CTRL_VQ; the VMM sets the bit and takes the ack |
//! | MAC | the device has no address but accepts CTRL_MAC_ADDR, and the user gives an address |
//! | STANDBY | the NIC is the standby of a failover pair, and shows a MAC address |
//! | RING_RESET | the device can suspend and resume, and keeps ring positions |
//! | ACCESS_PLATFORM | the device is behind the guest's IOMMU; the driver must accept it |
//!
//! A guest that comes from another device may use more commands and offloads. A device that filters
//! nothing takes those of [`COMMANDS`] and [`RARE`], too. They are not offered before: few devices
//! could take over such a guest.
//!
//! With `mac_lock` the guest gets no feature that changes its MAC address or a filter. The VMM then
//! negotiates CTRL_MAC_ADDR and CTRL_RX with the device for itself. It sets the configured address.
//! The device receives that address, multicast and broadcast.
//!
//! A queue is reset while the device is suspended. An own feature is never negotiated with the
//! device, whether or not the device offers the same bit. This file owns the decision and its log
//! lines. It must not know how the features are implemented.

use vdpa::control_queue::Limits;
use vdpa::device::{Device, DeviceInfo};
use vdpa::features::{self, Policy, Reason};
#[cfg(doc)]
use vdpa::netdev::UNFILTERED;
use vdpa::netdev::is_unfiltered;
use vdpa::ring::RingFeatures;
use vdpa::uapi::BackendFeatures;
use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_RING_RESET};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_RX,
    VIRTIO_NET_F_CTRL_RX_EXTRA, VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_GUEST_USO4,
    VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_MQ, VIRTIO_NET_F_STANDBY, VIRTIO_NET_F_STATUS,
};

use crate::Error;

/// The features that a guest is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    /// The device's features that are passed on.
    passed: u64,
    /// The VMM's own.
    own: u64,
    /// The device's features that only the VMM uses, through its control queue.
    kept: u64,
    /// The device's features that only guests from other devices get.
    rare: u64,
    /// Whether the guest may change neither its MAC address nor its filters.
    pub(super) mac_lock: bool,
    /// Whether the device filters nothing, so that it needs no control command.
    unfiltered: bool,
}

/// The features of commands that a device which filters nothing carries out by doing nothing.
const COMMANDS: u64 = FILTERS | 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS | 1 << VIRTIO_NET_F_MQ;

/// Offloads that a tap supports and few NICs do.
const RARE: u64 = 1 << VIRTIO_NET_F_GUEST_UFO
    | 1 << VIRTIO_NET_F_HOST_UFO
    | 1 << VIRTIO_NET_F_GUEST_USO4
    | 1 << VIRTIO_NET_F_GUEST_USO6
    | 1 << VIRTIO_NET_F_HOST_USO;

/// The commands that change a MAC address or a filter need one of these (virtio 1.3, 5.1.6.5).
const FILTERS: u64 = 1 << VIRTIO_NET_F_CTRL_MAC_ADDR
    | 1 << VIRTIO_NET_F_CTRL_RX
    | 1 << VIRTIO_NET_F_CTRL_RX_EXTRA
    | 1 << VIRTIO_NET_F_CTRL_VLAN;
/// Those that the VMM uses in the guest's place.
const KEPT: u64 = 1 << VIRTIO_NET_F_CTRL_MAC_ADDR | 1 << VIRTIO_NET_F_CTRL_RX;

/// The user's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Settings {
    /// The user gives a MAC address.
    pub(super) mac_given: bool,
    /// The user locks the MAC address and the filters.
    pub(super) mac_lock: bool,
    /// The NIC is the standby of a failover pair.
    pub(super) standby: bool,
    /// The device is behind the guest's IOMMU.
    pub(super) translated: bool,
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
    pub(super) fn new(device: &Device, id: &str, settings: Settings) -> Result<Self, vdpa::Error> {
        let info = device.info();
        // A queue can be reset while the device is suspended.
        let suspends = device
            .backend_features()
            .contains(BackendFeatures::SUSPEND_AND_RESUME);
        let abilities = Abilities {
            resets_queues: device.keeps_ring_positions()? && suspends,
            unfiltered: is_unfiltered(device)?,
        };
        let (offer, withheld) = Self::decide(info, abilities, settings);
        for (bit, reason) in withheld {
            let name = features::name(bit, info.device_id).unwrap_or("unnamed");
            tracing::info!(device = %id, bit, name, %reason, "feature withheld from the guest");
        }
        let own = features::describe(offer.own, info.device_id);
        tracing::info!(device = %id, features = %own, "features that the VMM offers on its own");
        Ok(offer)
    }

    fn decide(
        info: &DeviceInfo,
        abilities: Abilities,
        settings: Settings,
    ) -> (Self, Vec<(u32, Reason)>) {
        let Abilities {
            resets_queues,
            unfiltered,
        } = abilities;
        let is_net = info.device_id == VIRTIO_ID_NET;
        let mac_lock = settings.mac_lock && is_net;
        let locked = if mac_lock { FILTERS } else { 0 };
        let pass =
            |withhold| features::pass_through(info.features, info.device_id, Policy { withhold });
        let rare = if unfiltered {
            pass(locked).features & RARE
        } else {
            0
        };
        let passed = pass(locked | rare);
        let has = |bit: u32| passed.features & (1 << bit) != 0;
        let kept = if has(VIRTIO_NET_F_CTRL_VQ) {
            locked & info.features & KEPT
        } else {
            0
        };
        let sets_mac = (passed.features | kept) & 1 << VIRTIO_NET_F_CTRL_MAC_ADDR != 0;
        let commands = has(VIRTIO_NET_F_CTRL_VQ) || unfiltered;
        let announces = is_net && has(VIRTIO_NET_F_STATUS) && commands;
        let takes_mac = is_net && sets_mac && !has(VIRTIO_NET_F_MAC);
        let shows_mac = is_net && (has(VIRTIO_NET_F_MAC) || takes_mac && settings.mac_given);
        let own: u64 = [
            (VIRTIO_NET_F_CTRL_VQ, unfiltered),
            (VIRTIO_NET_F_CTRL_MAC_ADDR, unfiltered && !mac_lock),
            (VIRTIO_NET_F_MQ, unfiltered && info.queue_count() > 2),
            (VIRTIO_NET_F_GUEST_ANNOUNCE, announces),
            (VIRTIO_NET_F_MAC, takes_mac && settings.mac_given),
            (VIRTIO_NET_F_STANDBY, settings.standby && shows_mac),
            (VIRTIO_F_RING_RESET, resets_queues),
            (VIRTIO_F_ACCESS_PLATFORM, settings.translated),
        ]
        .into_iter()
        .filter(|(_, offered)| *offered)
        .fold(0, |bits, (bit, _)| bits | 1 << bit);
        let offer = Self {
            passed: passed.features,
            own,
            kept,
            rare,
            mac_lock,
            unfiltered,
        };
        // Features that the VMM offers in the device's place are not withheld.
        let withheld = passed.withheld.into_iter();
        let withheld = withheld.filter(|(bit, _)| own & (1 << bit) == 0);
        let withheld = withheld.map(|(bit, reason)| {
            let is_rare = rare & (1 << bit) != 0;
            (bit, if is_rare { Reason::Rare } else { reason })
        });
        let withheld = withheld.collect();
        (offer, withheld)
    }

    /// Whether the VMM answers control commands in the device's place.
    pub(super) fn is_unfiltered(self) -> bool {
        self.unfiltered
    }

    /// Returns the features that a guest is offered which negotiated `chosen` with another device.
    pub(super) fn taking_over(self, chosen: u64) -> u64 {
        self.all() | chosen & (self.commands() | self.rare)
    }

    /// Returns the features of commands that the VMM can answer in the device's place.
    fn commands(self) -> u64 {
        if self.unfiltered { COMMANDS } else { 0 }
    }

    /// Whether the device is behind the guest's IOMMU.
    pub(super) fn is_translated(self) -> bool {
        self.own & 1 << VIRTIO_F_ACCESS_PLATFORM != 0
    }

    /// Checks the driver's choice.
    ///
    /// # Errors
    /// The guest's IOMMU translates for the device, and the driver does not use it.
    pub(super) fn check(self, chosen: u64) -> Result<(), Error> {
        if !self.is_translated() || chosen & 1 << VIRTIO_F_ACCESS_PLATFORM != 0 {
            return Ok(());
        }
        Err(Error::other(
            "the driver does not accept ACCESS_PLATFORM, which a device behind the guest's IOMMU \
             needs: use a driver that does, or start the VM without iommu=on",
        ))
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

    /// Whether the address of a device can be set, by a driver that negotiated `chosen` or by the
    /// VMM in its place.
    pub(super) fn sets_mac(self, chosen: u64) -> bool {
        if self.unfiltered {
            return true;
        }
        let settable = chosen | self.kept;
        [VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_CTRL_MAC_ADDR]
            .iter()
            .all(|bit| settable & (1 << bit) != 0)
    }

    /// Whether the VMM sets the receive filter in the guest's place.
    pub(super) fn sets_filter(self) -> bool {
        self.kept & 1 << VIRTIO_NET_F_CTRL_RX != 0
    }

    /// Returns the features to negotiate with the device if the guest chose `chosen`: without the
    /// VMM's own, and with those that only the VMM uses.
    pub(super) fn for_device(self, chosen: u64) -> u64 {
        let kept = match chosen & 1 << VIRTIO_NET_F_CTRL_VQ {
            0 => 0,
            _ => self.kept,
        };
        chosen & !(self.own | self.commands()) | kept
    }
}

/// The properties of a device beside its features.
#[derive(Debug, Clone, Copy, Default)]
struct Abilities {
    /// A queue can be reset while the others work.
    resets_queues: bool,
    /// See [`UNFILTERED`].
    unfiltered: bool,
}

#[cfg(test)]
mod tests {
    use vdpa::device::QueueInfo;
    use vdpa::iova::IovaRange;
    use virtio_bindings::virtio_net::VIRTIO_NET_F_CSUM;

    use super::*;

    const VERSION_1: u64 = 1 << 32;
    const STATUS: u64 = 1 << VIRTIO_NET_F_STATUS;
    const CTRL_VQ: u64 = 1 << VIRTIO_NET_F_CTRL_VQ;
    const CTRL_MAC_ADDR: u64 = 1 << VIRTIO_NET_F_CTRL_MAC_ADDR;
    const ANNOUNCE: u64 = 1 << VIRTIO_NET_F_GUEST_ANNOUNCE;
    const MAC: u64 = 1 << VIRTIO_NET_F_MAC;
    const RING_RESET: u64 = 1 << VIRTIO_F_RING_RESET;

    fn offer(device_id: u32, features: u64, resets_queues: bool, mac_given: bool) -> Offer {
        let settings = Settings {
            mac_given,
            ..Settings::default()
        };
        decide(device_id, features, resets_queues, settings)
    }

    fn decide(device_id: u32, features: u64, resets_queues: bool, settings: Settings) -> Offer {
        let abilities = Abilities {
            resets_queues,
            unfiltered: false,
        };
        decide_for(device_id, features, 2, abilities, settings)
    }

    fn decide_for(
        device_id: u32,
        features: u64,
        queues: usize,
        abilities: Abilities,
        settings: Settings,
    ) -> Offer {
        let queue = QueueInfo {
            max_size: 256,
            group: None,
            descriptor_group: None,
        };
        let info = DeviceInfo {
            device_id,
            features,
            backend_features: BackendFeatures::empty(),
            config_size: 24,
            iova_range: IovaRange::new(0, u64::MAX).unwrap(),
            groups: 1,
            address_spaces: 1,
            queues: vec![queue; queues],
        };
        Offer::decide(&info, abilities, settings).0
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
    fn a_locked_guest_changes_neither_address_nor_filters_and_the_vmm_sets_the_address() {
        let locked = Settings {
            mac_given: true,
            mac_lock: true,
            ..Settings::default()
        };
        let has = VERSION_1 | CTRL_VQ | FILTERS;
        for (features, settable) in [(has | MAC, true), (has, true), (VERSION_1 | FILTERS, false)] {
            let offer = decide(1, features, false, locked);
            assert_eq!(offer.all() & FILTERS, 0, "{features:#x}");
            assert_eq!(offer.sets_mac(offer.all()), settable, "{features:#x}");
            let negotiated = offer.for_device(offer.all());
            assert_eq!(negotiated & FILTERS, if settable { KEPT } else { 0 });
            assert_eq!(negotiated & !features, 0, "the device offers {features:#x}");
            assert_eq!(offer.sets_filter(), settable);
            // The address is shown even if the device has none.
            assert_eq!(offer.has(VIRTIO_NET_F_MAC), settable, "{features:#x}");
        }
        // A driver without a control queue: the VMM has none either.
        let offer = decide(1, has | MAC, false, locked);
        assert_eq!(offer.for_device(VERSION_1 | MAC), VERSION_1 | MAC);
        assert!(!offer.sets_mac(VERSION_1 | MAC));
        // The same bits of a block device are not filters.
        assert!(!decide(2, VERSION_1, false, locked).mac_lock);
    }

    #[test]
    fn a_standby_shows_a_mac_address_and_does_not_ask_the_device() {
        let settings = Settings {
            standby: true,
            ..Settings::default()
        };
        let standby = 1 << VIRTIO_NET_F_STANDBY;
        for (device_id, features, offered) in [
            (1, VERSION_1 | MAC, true),
            (1, VERSION_1 | MAC | standby, true),
            (1, VERSION_1, false),
            // The same bit of a block device is no address.
            (2, VERSION_1 | MAC, false),
        ] {
            let offer = decide(device_id, features, false, settings);
            assert_eq!(offer.has(VIRTIO_NET_F_STANDBY), offered, "{features:#x}");
            assert_eq!(offer.for_device(offer.all()) & standby, 0);
        }
    }

    #[test]
    fn the_driver_of_a_translated_device_must_accept_that() {
        let translated = Settings {
            translated: true,
            ..Settings::default()
        };
        let bit = 1 << VIRTIO_F_ACCESS_PLATFORM;
        for features in [VERSION_1, VERSION_1 | bit] {
            let behind = decide(2, features, false, translated);
            // The VMM negotiates it with the device itself.
            assert_eq!(
                (behind.all(), behind.for_device(behind.all())),
                (VERSION_1 | bit, VERSION_1)
            );
            behind.check(VERSION_1 | bit).unwrap();
            let error = behind.check(VERSION_1).unwrap_err();
            assert!(error.to_string().contains("ACCESS_PLATFORM"), "{error}");
            let plain = decide(2, features, false, Settings::default());
            assert!(!plain.has(VIRTIO_F_ACCESS_PLATFORM));
            plain.check(VERSION_1).unwrap();
        }
    }

    #[test]
    fn a_device_that_filters_nothing_gets_a_control_queue_of_the_vmm() {
        let unfiltered = Abilities {
            unfiltered: true,
            ..Abilities::default()
        };
        let has = VERSION_1 | MAC | STATUS;
        let mq = 1 << VIRTIO_NET_F_MQ;
        for (queues, several) in [(2, 0), (8, mq)] {
            for mac_lock in [false, true] {
                let settings = Settings {
                    mac_lock,
                    ..Settings::default()
                };
                let offer = decide_for(1, has, queues, unfiltered, settings);
                let set_mac = if mac_lock { 0 } else { CTRL_MAC_ADDR };
                assert_eq!(offer.all(), has | CTRL_VQ | set_mac | ANNOUNCE | several);
                assert_eq!(offer.for_device(offer.all()), has);
                // The device accepts any address, whatever its driver negotiates.
                assert!(offer.sets_mac(0) && !offer.sets_filter());
            }
        }
        let offer = decide_for(1, has, 2, unfiltered, Settings::default());
        let uses = has | CTRL_VQ | FILTERS | mq;
        let other = 1 << VIRTIO_NET_F_STANDBY;
        assert_eq!(offer.taking_over(uses | other), offer.all() | uses);
        assert_eq!(offer.for_device(uses), has);
        let offloads = 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_USO;
        let offer = decide_for(1, has | offloads, 2, unfiltered, Settings::default());
        assert!(offer.has(VIRTIO_NET_F_CSUM) && !offer.has(VIRTIO_NET_F_HOST_USO));
        assert_eq!(offer.taking_over(offloads), offer.all() | offloads);
        assert_eq!(offer.for_device(has | offloads), has | offloads);
        let filtering = decide(1, has, false, Settings::default());
        assert_eq!(filtering.taking_over(uses), filtering.all());
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
