//! The announcement frame: a Reverse ARP request (RFC 903) that no host answers. Its only purpose
//! is that switches learn from its sender address; QEMU sends the same (`announce_self`).

use crate::link::VlanId;
use crate::sriov::{Vlan, VlanProtocol};

/// The shortest frame without its checksum, in bytes (IEEE 802.3).
const FRAME_MIN: usize = 60;

const ETH_P_RARP: u16 = 0x8035;
const ETH_P_IP: u16 = 0x0800;
/// The ARP hardware type of Ethernet (RFC 826).
const ARPHRD_ETHER: u16 = 1;
/// "request reverse" (RFC 903).
const REQUEST_REVERSE: u16 = 3;

/// A tag of a VLAN (IEEE 802.1Q).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag {
    ether_type: u16,
    /// Priority and number.
    control: u16,
}

impl Tag {
    /// The tag that a bridge adds.
    pub(super) fn of(vlan: VlanId) -> Self {
        Self {
            ether_type: VlanProtocol::Dot1Q.ether_type(),
            control: vlan.get(),
        }
    }

    /// The tag that a NIC adds to a virtual function's frames; `None` if it adds none.
    pub(super) fn of_function(vlan: Vlan) -> Option<Self> {
        (vlan.id() != 0).then(|| Self {
            ether_type: vlan.protocol().ether_type(),
            control: u16::from(vlan.qos()) << 13 | vlan.id(),
        })
    }
}

/// A broadcast request for the protocol address of `mac`, from `mac` itself, with this tag.
pub(super) fn reverse_arp(mac: [u8; 6], tag: Option<Tag>) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(mac);
    if let Some(tag) = tag {
        frame.extend(tag.ether_type.to_be_bytes());
        frame.extend(tag.control.to_be_bytes());
    }
    for word in [ETH_P_RARP, ARPHRD_ETHER, ETH_P_IP] {
        frame.extend(word.to_be_bytes());
    }
    // The address lengths of both kinds.
    frame.extend([6, 4]);
    frame.extend(REQUEST_REVERSE.to_be_bytes());
    // Sender and target; the protocol addresses are unknown.
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    frame.resize(FRAME_MIN.max(frame.len()), 0);
    frame
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

    #[test]
    fn a_frame_follows_rfc_903() {
        #[rustfmt::skip]
        let expected = [
            // Ethernet: broadcast, from the guest, Reverse ARP.
            0xff, 0xff, 0xff, 0xff, 0xff, 0xff,  0x52, 0x54, 0, 0x12, 0x34, 0x56,  0x80, 0x35,
            // ar$hrd, ar$pro, ar$hln, ar$pln, ar$op.
            0, 1,  8, 0,  6,  4,  0, 3,
            // ar$sha, ar$spa, ar$tha, ar$tpa.
            0x52, 0x54, 0, 0x12, 0x34, 0x56,  0, 0, 0, 0,
            0x52, 0x54, 0, 0x12, 0x34, 0x56,  0, 0, 0, 0,
        ];
        let frame = reverse_arp(MAC, None);
        assert_eq!(frame[..42], expected);
        assert_eq!(frame[42..], [0; 18]);
    }

    #[test]
    fn a_tag_stands_before_the_type() {
        let plain = reverse_arp(MAC, None);
        let vlan = Vlan::new(100, 5, VlanProtocol::Dot1Ad).unwrap();
        for (tag, bytes) in [
            (Tag::of(VlanId::try_from(100).unwrap()), [0x81, 0, 0, 100]),
            (Tag::of_function(vlan).unwrap(), [0x88, 0xa8, 0xa0, 100]),
        ] {
            let tagged = reverse_arp(MAC, Some(tag));
            assert_eq!(tagged[..12], plain[..12]);
            assert_eq!(tagged[12..16], bytes);
            assert_eq!(tagged[16..46], plain[12..42]);
            assert_eq!(tagged.len(), 60);
        }
        assert_eq!(Tag::of_function(Vlan::NONE), None);
    }
}
