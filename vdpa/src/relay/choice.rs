//! Chooses the relay strategy for a device, with the reason.

use std::fmt;

use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_RING_PACKED};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use super::Strategy;
use crate::device::DeviceInfo;
use crate::uapi::BackendFeatures;

/// The reason for a choice of [`choose`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// SUSPEND and RESUME: rings can be changed in place.
    SuspendsAndResumes,
    /// No SUSPEND: the device must be reset and started again on private rings.
    NoSuspend,
    /// SUSPEND, but no RESUME.
    NoResume,
    /// SUSPEND and RESUME, but packed rings, which have no separate used ring.
    PackedRings,
    /// The driver relies on used elements in order, which private rings do not keep, and the device
    /// cannot get a used shadow.
    InOrder,
    /// As [`Reason::InOrder`], because its rings are packed.
    PackedInOrder,
    /// A reset loses the device's chains in flight; only a network may lose or repeat them.
    NotANetwork,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SuspendsAndResumes => "the device suspends and resumes",
            Self::NoSuspend => "the device cannot suspend, so it is reset",
            Self::NoResume => "the device suspends but does not resume, so it is reset",
            Self::PackedRings => {
                "the device suspends and resumes, but a packed ring has no separate used ring"
            }
            Self::InOrder => "IN_ORDER was negotiated and the device cannot suspend",
            Self::PackedInOrder => {
                "IN_ORDER was negotiated and a packed ring has no separate used ring"
            }
            Self::NotANetwork => {
                "the device cannot suspend, and only a network device may repeat chains in flight"
            }
        })
    }
}

/// The strategy for the receive queues of a device with these negotiated `features` and
/// `acknowledged` backend features. [`Strategy::Direct`] means that it cannot be relayed. Only a
/// try shows whether ring state can be read. If a change to a used shadow fails for that reason,
/// shadow remains.
#[must_use]
pub fn choose(
    info: &DeviceInfo,
    acknowledged: BackendFeatures,
    features: u64,
) -> (Strategy, Reason) {
    let has = |bit: u32| features & (1 << bit) != 0;
    let suspends = acknowledged.contains(BackendFeatures::SUSPEND);
    let resumes = acknowledged.contains(BackendFeatures::RESUME);
    let packed = has(VIRTIO_F_RING_PACKED);
    if packed && has(VIRTIO_F_IN_ORDER) {
        (Strategy::Direct, Reason::PackedInOrder)
    } else if suspends && resumes && packed {
        (Strategy::FullShadow, Reason::PackedRings)
    } else if suspends && resumes {
        (Strategy::UsedShadow, Reason::SuspendsAndResumes)
    } else if has(VIRTIO_F_IN_ORDER) {
        (Strategy::Direct, Reason::InOrder)
    } else if info.device_id != VIRTIO_ID_NET {
        (Strategy::Direct, Reason::NotANetwork)
    } else if suspends {
        (Strategy::FullShadow, Reason::NoResume)
    } else {
        (Strategy::FullShadow, Reason::NoSuspend)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iova::IovaRange;

    #[test]
    fn follows_from_the_devices_abilities() {
        let info = |device_id| DeviceInfo {
            device_id,
            features: u64::MAX,
            backend_features: BackendFeatures::all(),
            queues: Vec::new(),
            groups: 1,
            address_spaces: 1,
            config_size: 0,
            iova_range: IovaRange::new(0, u64::MAX).unwrap(),
        };
        let (net, block) = (info(1), info(2));
        let both = BackendFeatures::SUSPEND | BackendFeatures::RESUME;
        let none = BackendFeatures::empty();
        let (packed, in_order) = (1 << VIRTIO_F_RING_PACKED, 1 << VIRTIO_F_IN_ORDER);
        for (info, acknowledged, features, wanted) in [
            (
                &net,
                both,
                0,
                (Strategy::UsedShadow, Reason::SuspendsAndResumes),
            ),
            (
                &block,
                both,
                in_order,
                (Strategy::UsedShadow, Reason::SuspendsAndResumes),
            ),
            (
                &block,
                both,
                packed,
                (Strategy::FullShadow, Reason::PackedRings),
            ),
            (
                &net,
                none,
                packed,
                (Strategy::FullShadow, Reason::NoSuspend),
            ),
            (
                &net,
                both,
                packed | in_order,
                (Strategy::Direct, Reason::PackedInOrder),
            ),
            (
                &block,
                none,
                packed,
                (Strategy::Direct, Reason::NotANetwork),
            ),
            (&net, none, 0, (Strategy::FullShadow, Reason::NoSuspend)),
            (
                &net,
                BackendFeatures::SUSPEND,
                0,
                (Strategy::FullShadow, Reason::NoResume),
            ),
            (&net, none, in_order, (Strategy::Direct, Reason::InOrder)),
            (&block, none, 0, (Strategy::Direct, Reason::NotANetwork)),
        ] {
            assert_eq!(choose(info, acknowledged, features), wanted);
        }
    }
}
