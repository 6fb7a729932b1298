//! Virtio feature bits: their names, and which of them a guest may have.
//!
//! [`pass_through`] decides bit by bit. A bit is withheld for one of a few [`Reason`]s. An unknown
//! bit is withheld too, because its effects could be neither checked nor restored. The caller
//! negotiates.

use std::fmt;

use virtio_bindings::virtio_blk as blk;
use virtio_bindings::virtio_config as config;
use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET};
use virtio_bindings::virtio_net as net;
use virtio_bindings::virtio_ring as ring;

/// Why a guest does not get a feature that the device offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// ACCESS_PLATFORM: the VMM negotiates it. IOVA = guest-physical address, so the guest has
    /// nothing to translate.
    TranslatedByVmm,
    /// The vhost-vdpa interface does not support it.
    NotInVhostVdpa,
    /// The VMM does this for the guest.
    DoneByVmm,
    /// Its state could not be restored after a migration or restore.
    NotRestorable,
    /// Its control-queue commands are not relayed.
    CommandsNotRelayed,
    /// NOTIFICATION_DATA: any queue may fall back from its doorbell to an eventfd, which carries
    /// the kick but not the data written.
    LostInEventfd,
    /// Useful for legacy devices only.
    Legacy,
    /// It needs another device beside this one.
    NeedsPartner,
    /// It needs a feature that is absent.
    MissingDependency,
    /// The user withholds it.
    ByUser,
    /// Few devices have it, and a guest that uses it could not move to others.
    Rare,
    /// Not known for this device type.
    Unknown,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TranslatedByVmm => "the VMM translates addresses",
            Self::NotInVhostVdpa => "vhost-vdpa has no interface for it",
            Self::DoneByVmm => "the VMM does it for the guest",
            Self::NotRestorable => "its state could not be restored",
            Self::CommandsNotRelayed => "its control commands are not relayed",
            Self::LostInEventfd => {
                "a queue may have to fall back from its doorbell to an eventfd, which loses the \
                 data"
            }
            Self::Legacy => "only legacy devices use it",
            Self::NeedsPartner => "it needs a second device",
            Self::MissingDependency => "a feature that it needs is missing",
            Self::ByUser => "switched off by the user",
            Self::Rare => "few devices have it, and the guest could not move to others",
            Self::Unknown => "not known for this device type",
        })
    }
}

/// The user's restrictions on a guest's features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    /// Mask of features to withhold, even if the device offers them.
    pub withhold: u64,
}

/// The outcome of [`pass_through`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passed {
    /// Features offered to the guest.
    pub features: u64,
    /// Features of the device that the guest is not offered; by ascending bit.
    pub withheld: Vec<(u32, Reason)>,
}

/// A feature: bit, name, and the reason if a guest does not get it.
type Row = (u32, &'static str, Option<Reason>);

/// Reserved feature bits (virtio 1.3, section 6), for every device type.
const COMMON: &[Row] = &[
    (
        config::VIRTIO_F_NOTIFY_ON_EMPTY,
        "NOTIFY_ON_EMPTY",
        Some(Reason::Legacy),
    ),
    (
        config::VIRTIO_F_ANY_LAYOUT,
        "ANY_LAYOUT",
        Some(Reason::Legacy),
    ),
    (ring::VIRTIO_RING_F_INDIRECT_DESC, "INDIRECT_DESC", None),
    (ring::VIRTIO_RING_F_EVENT_IDX, "EVENT_IDX", None),
    (config::VIRTIO_F_VERSION_1, "VERSION_1", None),
    (
        config::VIRTIO_F_ACCESS_PLATFORM,
        "ACCESS_PLATFORM",
        Some(Reason::TranslatedByVmm),
    ),
    (config::VIRTIO_F_RING_PACKED, "RING_PACKED", None),
    (config::VIRTIO_F_IN_ORDER, "IN_ORDER", None),
    (config::VIRTIO_F_ORDER_PLATFORM, "ORDER_PLATFORM", None),
    (
        config::VIRTIO_F_SR_IOV,
        "SR_IOV",
        Some(Reason::NotInVhostVdpa),
    ),
    (
        config::VIRTIO_F_NOTIFICATION_DATA,
        "NOTIFICATION_DATA",
        Some(Reason::LostInEventfd),
    ),
    (
        config::VIRTIO_F_NOTIF_CONFIG_DATA,
        "NOTIF_CONFIG_DATA",
        Some(Reason::NotInVhostVdpa),
    ),
    (
        config::VIRTIO_F_RING_RESET,
        "RING_RESET",
        Some(Reason::NotInVhostVdpa),
    ),
    (
        config::VIRTIO_F_ADMIN_VQ,
        "ADMIN_VQ",
        Some(Reason::NotInVhostVdpa),
    ),
];

/// Network device (virtio 1.3, 5.1.3).
const NET: &[Row] = &[
    (net::VIRTIO_NET_F_CSUM, "CSUM", None),
    (net::VIRTIO_NET_F_GUEST_CSUM, "GUEST_CSUM", None),
    (
        net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
        "CTRL_GUEST_OFFLOADS",
        None,
    ),
    (net::VIRTIO_NET_F_MTU, "MTU", None),
    (net::VIRTIO_NET_F_MAC, "MAC", None),
    (net::VIRTIO_NET_F_GSO, "GSO", Some(Reason::Legacy)),
    (net::VIRTIO_NET_F_GUEST_TSO4, "GUEST_TSO4", None),
    (net::VIRTIO_NET_F_GUEST_TSO6, "GUEST_TSO6", None),
    (net::VIRTIO_NET_F_GUEST_ECN, "GUEST_ECN", None),
    (net::VIRTIO_NET_F_GUEST_UFO, "GUEST_UFO", None),
    (net::VIRTIO_NET_F_HOST_TSO4, "HOST_TSO4", None),
    (net::VIRTIO_NET_F_HOST_TSO6, "HOST_TSO6", None),
    (net::VIRTIO_NET_F_HOST_ECN, "HOST_ECN", None),
    (net::VIRTIO_NET_F_HOST_UFO, "HOST_UFO", None),
    (net::VIRTIO_NET_F_MRG_RXBUF, "MRG_RXBUF", None),
    (net::VIRTIO_NET_F_STATUS, "STATUS", None),
    (net::VIRTIO_NET_F_CTRL_VQ, "CTRL_VQ", None),
    (net::VIRTIO_NET_F_CTRL_RX, "CTRL_RX", None),
    (net::VIRTIO_NET_F_CTRL_VLAN, "CTRL_VLAN", None),
    (net::VIRTIO_NET_F_CTRL_RX_EXTRA, "CTRL_RX_EXTRA", None),
    (
        net::VIRTIO_NET_F_GUEST_ANNOUNCE,
        "GUEST_ANNOUNCE",
        Some(Reason::DoneByVmm),
    ),
    (net::VIRTIO_NET_F_MQ, "MQ", None),
    (net::VIRTIO_NET_F_CTRL_MAC_ADDR, "CTRL_MAC_ADDR", None),
    (
        net::VIRTIO_NET_F_DEVICE_STATS,
        "DEVICE_STATS",
        Some(Reason::CommandsNotRelayed),
    ),
    (
        net::VIRTIO_NET_F_VQ_NOTF_COAL,
        "VQ_NOTF_COAL",
        Some(Reason::CommandsNotRelayed),
    ),
    (
        net::VIRTIO_NET_F_NOTF_COAL,
        "NOTF_COAL",
        Some(Reason::CommandsNotRelayed),
    ),
    (net::VIRTIO_NET_F_GUEST_USO4, "GUEST_USO4", None),
    (net::VIRTIO_NET_F_GUEST_USO6, "GUEST_USO6", None),
    (net::VIRTIO_NET_F_HOST_USO, "HOST_USO", None),
    (net::VIRTIO_NET_F_HASH_REPORT, "HASH_REPORT", None),
    (net::VIRTIO_NET_F_GUEST_HDRLEN, "GUEST_HDRLEN", None),
    (net::VIRTIO_NET_F_RSS, "RSS", None),
    (net::VIRTIO_NET_F_RSC_EXT, "RSC_EXT", None),
    (
        net::VIRTIO_NET_F_STANDBY,
        "STANDBY",
        Some(Reason::NeedsPartner),
    ),
    (net::VIRTIO_NET_F_SPEED_DUPLEX, "SPEED_DUPLEX", None),
];

/// Block device (virtio 1.3, 5.2.3).
const BLOCK: &[Row] = &[
    (blk::VIRTIO_BLK_F_BARRIER, "BARRIER", Some(Reason::Legacy)),
    (blk::VIRTIO_BLK_F_SIZE_MAX, "SIZE_MAX", None),
    (blk::VIRTIO_BLK_F_SEG_MAX, "SEG_MAX", None),
    (blk::VIRTIO_BLK_F_GEOMETRY, "GEOMETRY", None),
    (blk::VIRTIO_BLK_F_RO, "RO", None),
    (blk::VIRTIO_BLK_F_BLK_SIZE, "BLK_SIZE", None),
    (blk::VIRTIO_BLK_F_SCSI, "SCSI", Some(Reason::Legacy)),
    (blk::VIRTIO_BLK_F_FLUSH, "FLUSH", None),
    (blk::VIRTIO_BLK_F_TOPOLOGY, "TOPOLOGY", None),
    // The driver switches the cache by writing configuration.
    (
        blk::VIRTIO_BLK_F_CONFIG_WCE,
        "CONFIG_WCE",
        Some(Reason::NotRestorable),
    ),
    (blk::VIRTIO_BLK_F_MQ, "MQ", None),
    (blk::VIRTIO_BLK_F_DISCARD, "DISCARD", None),
    (blk::VIRTIO_BLK_F_WRITE_ZEROES, "WRITE_ZEROES", None),
    (blk::VIRTIO_BLK_F_SECURE_ERASE, "SECURE_ERASE", None),
    (blk::VIRTIO_BLK_F_ZONED, "ZONED", None),
];

/// Network features and their dependencies (virtio 1.3, 5.1.3.1): each needs one of the bits in the
/// mask. Dependencies come first in the list.
const NET_DEPENDENCIES: &[(u32, u64)] = &[
    (
        net::VIRTIO_NET_F_GUEST_TSO4,
        1 << net::VIRTIO_NET_F_GUEST_CSUM,
    ),
    (
        net::VIRTIO_NET_F_GUEST_TSO6,
        1 << net::VIRTIO_NET_F_GUEST_CSUM,
    ),
    (
        net::VIRTIO_NET_F_GUEST_ECN,
        1 << net::VIRTIO_NET_F_GUEST_TSO4 | 1 << net::VIRTIO_NET_F_GUEST_TSO6,
    ),
    (
        net::VIRTIO_NET_F_GUEST_UFO,
        1 << net::VIRTIO_NET_F_GUEST_CSUM,
    ),
    (
        net::VIRTIO_NET_F_GUEST_USO4,
        1 << net::VIRTIO_NET_F_GUEST_CSUM,
    ),
    (
        net::VIRTIO_NET_F_GUEST_USO6,
        1 << net::VIRTIO_NET_F_GUEST_CSUM,
    ),
    (net::VIRTIO_NET_F_HOST_TSO4, 1 << net::VIRTIO_NET_F_CSUM),
    (net::VIRTIO_NET_F_HOST_TSO6, 1 << net::VIRTIO_NET_F_CSUM),
    (
        net::VIRTIO_NET_F_HOST_ECN,
        1 << net::VIRTIO_NET_F_HOST_TSO4 | 1 << net::VIRTIO_NET_F_HOST_TSO6,
    ),
    (net::VIRTIO_NET_F_HOST_UFO, 1 << net::VIRTIO_NET_F_CSUM),
    (net::VIRTIO_NET_F_HOST_USO, 1 << net::VIRTIO_NET_F_CSUM),
    (
        net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
        1 << net::VIRTIO_NET_F_CTRL_VQ,
    ),
    (net::VIRTIO_NET_F_CTRL_RX, 1 << net::VIRTIO_NET_F_CTRL_VQ),
    (net::VIRTIO_NET_F_CTRL_VLAN, 1 << net::VIRTIO_NET_F_CTRL_VQ),
    (
        net::VIRTIO_NET_F_CTRL_RX_EXTRA,
        1 << net::VIRTIO_NET_F_CTRL_VQ,
    ),
    (net::VIRTIO_NET_F_MQ, 1 << net::VIRTIO_NET_F_CTRL_VQ),
    (
        net::VIRTIO_NET_F_CTRL_MAC_ADDR,
        1 << net::VIRTIO_NET_F_CTRL_VQ,
    ),
    (
        net::VIRTIO_NET_F_HASH_REPORT,
        1 << net::VIRTIO_NET_F_CTRL_VQ,
    ),
    (net::VIRTIO_NET_F_RSS, 1 << net::VIRTIO_NET_F_CTRL_VQ),
    (
        net::VIRTIO_NET_F_RSC_EXT,
        1 << net::VIRTIO_NET_F_GUEST_TSO4 | 1 << net::VIRTIO_NET_F_GUEST_TSO6,
    ),
];

fn rows(device_type: u32) -> impl Iterator<Item = &'static Row> {
    let own = match device_type {
        VIRTIO_ID_NET => NET,
        VIRTIO_ID_BLOCK => BLOCK,
        _ => &[],
    };
    COMMON.iter().chain(own)
}

/// The name of a feature bit of a device type, without prefix (`MRG_RXBUF`).
#[must_use]
pub fn name(bit: u32, device_type: u32) -> Option<&'static str> {
    rows(device_type)
        .find(|row| row.0 == bit)
        .map(|&(_, name, _)| name)
}

/// Names of all bits of a mask, separated by spaces, for logs; `bit N` for an unnamed bit.
#[must_use]
pub fn describe(features: u64, device_type: u32) -> String {
    let names: Vec<String> = (0..u64::BITS)
        .filter(|bit| features & (1 << bit) != 0)
        .map(|bit| match name(bit, device_type) {
            Some(name) => name.to_owned(),
            None => format!("bit {bit}"),
        })
        .collect();
    names.join(" ")
}

/// Selects the device's features that a guest is offered.
#[must_use]
pub fn pass_through(offered: u64, device_type: u32, policy: Policy) -> Passed {
    let mut features = 0;
    let mut withheld = Vec::new();
    for bit in (0..u64::BITS).filter(|bit| offered & (1 << bit) != 0) {
        match reason(bit, device_type, policy) {
            Some(reason) => withheld.push((bit, reason)),
            None => features |= 1 << bit,
        }
    }
    if device_type == VIRTIO_ID_NET {
        for &(bit, needs_one_of) in NET_DEPENDENCIES {
            if features & (1 << bit) != 0 && features & needs_one_of == 0 {
                features &= !(1 << bit);
                withheld.push((bit, Reason::MissingDependency));
            }
        }
    }
    withheld.sort_by_key(|&(bit, _)| bit);
    Passed { features, withheld }
}

fn reason(bit: u32, device_type: u32, policy: Policy) -> Option<Reason> {
    let Some(&(_, _, withheld)) = rows(device_type).find(|row| row.0 == bit) else {
        return Some(Reason::Unknown);
    };
    if withheld.is_some() {
        return withheld;
    }
    (policy.withhold & (1 << bit) != 0).then_some(Reason::ByUser)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(bits: &[u32]) -> u64 {
        bits.iter().fold(0, |mask, bit| mask | 1 << bit)
    }

    #[test]
    fn every_bit_is_passed_or_explained() {
        for device_type in [VIRTIO_ID_NET, VIRTIO_ID_BLOCK, 4, 0xffff] {
            let passed = pass_through(u64::MAX, device_type, Policy::default());
            let explained = passed
                .withheld
                .iter()
                .map(|&(bit, _)| bit)
                .collect::<Vec<_>>();
            assert_eq!(passed.features, !mask(&explained));
            assert!(explained.is_sorted());
            assert_eq!(passed.features & (1 << config::VIRTIO_F_ACCESS_PLATFORM), 0);
            assert_ne!(passed.features & (1 << config::VIRTIO_F_VERSION_1), 0);
        }
        assert_eq!(pass_through(0, 1, Policy::default()).withheld, []);
    }

    #[test]
    fn the_simulators_features_without_withheld_ones() {
        // The features of vdpa_sim_net: see `vdpa mgmtdev show`.
        let passed = pass_through(0x3_0883_0028, VIRTIO_ID_NET, Policy::default());
        assert_eq!(
            describe(passed.features, VIRTIO_ID_NET),
            "MTU MAC STATUS CTRL_VQ CTRL_MAC_ADDR VERSION_1"
        );
        assert_eq!(
            passed.withheld,
            [(27, Reason::Legacy), (33, Reason::TranslatedByVmm)]
        );
    }

    #[test]
    fn ring_formats_pass_with_a_control_queue() {
        let offered = mask(&[
            config::VIRTIO_F_RING_PACKED,
            config::VIRTIO_F_IN_ORDER,
            net::VIRTIO_NET_F_CTRL_VQ,
        ]);
        let passed = pass_through(offered, VIRTIO_ID_NET, Policy::default());
        assert_eq!((passed.features, passed.withheld), (offered, vec![]));
    }

    #[test]
    fn dependent_features_are_withheld_too() {
        let offered = mask(&[
            net::VIRTIO_NET_F_CTRL_VQ,
            net::VIRTIO_NET_F_MQ,
            net::VIRTIO_NET_F_GUEST_CSUM,
            net::VIRTIO_NET_F_GUEST_TSO4,
            net::VIRTIO_NET_F_GUEST_ECN,
            net::VIRTIO_NET_F_RSC_EXT,
        ]);
        let policy = Policy {
            withhold: mask(&[net::VIRTIO_NET_F_CTRL_VQ, net::VIRTIO_NET_F_GUEST_CSUM]),
        };
        let passed = pass_through(offered, VIRTIO_ID_NET, policy);
        assert_eq!(passed.features, 0);
        let by_user = passed
            .withheld
            .iter()
            .filter(|(_, reason)| *reason == Reason::ByUser);
        assert_eq!(by_user.count(), 2);
    }

    #[test]
    fn names() {
        assert_eq!(name(15, VIRTIO_ID_NET), Some("MRG_RXBUF"));
        assert_eq!(name(9, VIRTIO_ID_BLOCK), Some("FLUSH"));
        assert_eq!(name(9, 4), None);
        assert_eq!(name(64, 1), None);
        assert_eq!(describe(1 << 49, 1), "bit 49");
        // No bit is listed twice.
        for device_type in [1, 2] {
            for bit in 0..64 {
                assert!(
                    rows(device_type).filter(|row| row.0 == bit).count() < 2,
                    "{bit}"
                );
            }
        }
    }
}
