//! Names of virtio device types and features in the form of iproute2's `vdpa`. iproute2 has its own
//! names for two ring features, and shows numbers for features that it does not know. This module
//! does the same, because scripts compare them. `bellhop probe` has all names.

use vdpa::features;
use vdpa_mgmt::MgmtDevice;

use crate::listing::{Item, Value};

/// Virtio device types (virtio 1.3, section 5).
const NET: u32 = 1;
const BLOCK: u32 = 2;

/// Features that iproute2 6.15 has no name for: GSO; NOTIF_CONFIG_DATA, RING_RESET, ADMIN_VQ;
/// DEVICE_STATS, VQ_NOTF_COAL, NOTF_COAL, GUEST_USO4, GUEST_USO6, HOST_USO, GUEST_HDRLEN.
const UNNAMED: [u32; 11] = [6, 39, 40, 41, 50, 52, 53, 54, 55, 56, 59];

/// The feature bits that belong to no device type (virtio 1.3, section 6).
const TRANSPORT: std::ops::RangeInclusive<u32> = 28..=41;

/// The name of a class of devices, for `type`.
pub(crate) fn device_type(device_id: u32) -> &'static str {
    match device_id {
        NET => "network",
        BLOCK => "block",
        _ => "<unknown type>",
    }
}

/// The classes in a mask of device types, for `supported_classes`.
pub(crate) fn classes(mask: u64) -> Value {
    let name = |bit| match bit {
        NET => "net",
        BLOCK => "block",
        _ => "< unknown class >",
    };
    // Bit 0 is not a device type.
    let list = bits(mask).filter(|&bit| bit > 0);
    Value::List(list.map(|bit| Item::Name(name(bit))).collect())
}

/// The class that names a management device's features.
pub(crate) fn naming_class(device: &MgmtDevice) -> u32 {
    if device.supports(NET) { NET } else { 0 }
}

/// The features in a mask.
pub(crate) fn features(mask: u64, device_id: u32) -> Value {
    Value::List(bits(mask).map(|bit| feature(bit, device_id)).collect())
}

fn feature(bit: u32, device_id: u32) -> Item {
    let name = match bit {
        28 => Some("RING_INDIRECT_DESC"),
        29 => Some("RING_EVENT_IDX"),
        _ if UNNAMED.contains(&bit) => None,
        _ if device_id == NET || TRANSPORT.contains(&bit) => features::name(bit, device_id),
        _ => None,
    };
    name.map_or(Item::Bit(bit), Item::Name)
}

fn bits(mask: u64) -> impl Iterator<Item = u32> {
    (0..u64::BITS).filter(move |bit| mask & 1 << bit != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(mask: u64, device_id: u32) -> Vec<Item> {
        match features(mask, device_id) {
            Value::List(list) => list,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn features_have_the_tools_names() {
        let mask = 1 << 5 | 1 << 6 | 1 << 24 | 1 << 28 | 1 << 29 | 1 << 33 | 1 << 40 | 1 << 56;
        let expected = [
            Item::Name("MAC"),
            Item::Bit(6),
            Item::Name("NOTIFY_ON_EMPTY"),
            Item::Name("RING_INDIRECT_DESC"),
            Item::Name("RING_EVENT_IDX"),
            Item::Name("ACCESS_PLATFORM"),
            Item::Bit(40),
            Item::Bit(56),
        ];
        assert_eq!(names(mask, NET), expected);
        let expected = [Item::Bit(5), Item::Name("VERSION_1"), Item::Bit(63)];
        assert_eq!(names(1 << 5 | 1 << 32 | 1 << 63, BLOCK), expected);
    }

    #[test]
    fn classes_have_names_but_bit_0_is_none() {
        let list = [
            Item::Name("net"),
            Item::Name("block"),
            Item::Name("< unknown class >"),
        ];
        assert_eq!(classes(0b1_0111), Value::List(list.to_vec()));
        assert_eq!(device_type(7), "<unknown type>");
    }
}
