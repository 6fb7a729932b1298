#![allow(clippy::unwrap_used, reason = "tests")]
use libc::{
    IFLA_ADDRESS, IFLA_AF_SPEC, IFLA_ALT_IFNAME, IFLA_IFNAME, IFLA_INFO_DATA, IFLA_INFO_KIND,
    IFLA_LINKINFO, IFLA_MASTER, IFLA_MTU, IFLA_PARENT_DEV_BUS_NAME, IFLA_PARENT_DEV_NAME,
    IFLA_PHYS_PORT_NAME, IFLA_PHYS_SWITCH_ID, IFLA_PROP_LIST, RTM_NEWLINK,
};
use netlink_packet_core::{DefaultNla, Emitable};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::{BridgeVlanInfoFlags as Flags, LinkFlags, LinkHeader};
use proptest::prelude::*;

use super::links::{Operation, only, vlans_of};
use super::vlan::IFLA_BRIDGE_VLAN_INFO;
use super::*;
use crate::error::ErrorKind;
use crate::netlink::error::Refusal;
use crate::netlink::exchange::Answer;
use crate::netlink::message::{Message, encoded, nested, string, value};

/// In IFLA_INFO_DATA of a bridge.
const IFLA_BR_VLAN_FILTERING: u16 = 7;

fn message(
    interface_family: AddressFamily,
    index: u32,
    flags: LinkFlags,
    attributes: &[DefaultNla],
) -> Message {
    let header = LinkHeader {
        interface_family,
        index,
        flags,
        ..LinkHeader::default()
    };
    Message {
        message_type: RTM_NEWLINK,
        header: encoded(&header),
        attributes: encoded(&attributes),
    }
}

fn answer(messages: Vec<Message>) -> Answer {
    Answer {
        messages,
        warning: None,
    }
}

/// A bridge's description in the kernel's layout.
fn bridge() -> Message {
    let data = [
        value(1, &200_u32.to_ne_bytes()),
        value(IFLA_BR_VLAN_FILTERING, &[1]),
    ];
    let information = [
        string(IFLA_INFO_KIND, "bridge"),
        nested(IFLA_INFO_DATA | 0x8000, &data),
    ];
    message(
        AddressFamily::Unspec,
        7,
        LinkFlags::Up | LinkFlags::LowerUp,
        &[
            string(IFLA_IFNAME, "br0"),
            value(IFLA_MTU, &9000_u32.to_ne_bytes()),
            value(IFLA_ADDRESS, &[2, 0, 0, 0, 0, 9]),
            nested(IFLA_LINKINFO, &information),
            nested(
                IFLA_PROP_LIST | 0x8000,
                &[string(IFLA_ALT_IFNAME, "a-bridge-with-a-long-name")],
            ),
            // An attribute of a future kernel.
            value(999, &[1]),
        ],
    )
}

fn port() -> Message {
    message(
        AddressFamily::Unspec,
        8,
        LinkFlags::empty(),
        &[
            string(IFLA_IFNAME, "enp1s0npf0vf1"),
            value(IFLA_MTU, &1500_u32.to_ne_bytes()),
            value(IFLA_MASTER, &7_u32.to_ne_bytes()),
            // An Infiniband address.
            value(IFLA_ADDRESS, &[1; 20]),
            string(IFLA_PHYS_PORT_NAME, "pf0vf1"),
            value(IFLA_PHYS_SWITCH_ID, &[1, 2, 3]),
            string(IFLA_PARENT_DEV_NAME, "0000:01:00.0"),
            string(IFLA_PARENT_DEV_BUS_NAME, "pci"),
        ],
    )
}

#[test]
fn interfaces_are_read() {
    let bridge = Link::of(&bridge()).unwrap();
    assert!(bridge.is_bridge() && bridge.up && bridge.carrier);
    assert_eq!((bridge.index, bridge.mtu), (7, 9000));
    assert_eq!(bridge.vlan_filtering, Some(true));
    assert_eq!(bridge.mac, Some([2, 0, 0, 0, 0, 9]));
    assert!(bridge.is_called("br0") && bridge.is_called("a-bridge-with-a-long-name"));
    let port = Link::of(&port()).unwrap();
    assert!(!port.is_bridge() && !port.up && !port.carrier);
    assert_eq!((port.master, port.mac), (Some(7), None));
    assert_eq!(port.phys_port_name.as_deref(), Some("pf0vf1"));
    assert_eq!(port.phys_switch_id, Some(vec![1, 2, 3]));
    let parent = ("pci".to_owned(), "0000:01:00.0".to_owned());
    assert_eq!(port.parent, Some(parent));
}

/// An interface with a name and more attributes.
fn named(more: &[DefaultNla]) -> Link {
    let attributes = [&[string(IFLA_IFNAME, "a")], more].concat();
    let flags = LinkFlags::empty();
    Link::of(&message(AddressFamily::Unspec, 7, flags, &attributes)).unwrap()
}

#[test]
fn odd_attributes_are_left_out_and_the_others_are_read() {
    let plain = named(&[]);
    let cut = [8, 0, 1];
    for odd in [
        value(IFLA_MTU, &[1, 2]),
        value(IFLA_MTU, &[0; 8]),
        value(IFLA_MASTER, &[]),
        value(IFLA_MASTER, &[7, 0, 0, 0, 0]),
        value(IFLA_ADDRESS, &[2; 20]),
        value(IFLA_PHYS_SWITCH_ID, &[1; 33]),
        value(IFLA_PHYS_SWITCH_ID, &[]),
        string(IFLA_PHYS_PORT_NAME, ""),
        value(IFLA_PROP_LIST, &cut),
        value(IFLA_LINKINFO, &cut),
        // Attributes of future kernels.
        value(200, &[]),
        value(200 | 0x8000, &cut),
    ] {
        assert_eq!(named(std::slice::from_ref(&odd)), plain, "{odd:?}");
        let mtu = value(IFLA_MTU, &1400_u32.to_ne_bytes());
        assert_eq!(named(&[odd, mtu]).mtu, 1400);
    }
}

#[test]
fn a_bridge_with_odd_data_is_a_bridge() {
    let filtering = value(IFLA_BR_VLAN_FILTERING, &[1]);
    let wide = value(IFLA_BR_VLAN_FILTERING, &[1, 0, 0, 0]);
    // The forward delay, a number of 32 bits, has 16.
    let delay = value(1, &[1, 0]);
    let future = value(200, &[1]);
    for (data, expected) in [
        (vec![filtering.clone(), delay.clone()], Some(true)),
        (vec![delay, future, filtering], Some(true)),
        (vec![wide], None),
    ] {
        let information = [
            string(IFLA_INFO_KIND, "bridge"),
            nested(IFLA_INFO_DATA, &data),
        ];
        let link = named(&[nested(IFLA_LINKINFO, &information)]);
        assert!(link.is_bridge());
        assert_eq!(link.vlan_filtering, expected, "{data:?}");
    }
}

/// Any program with CAP_NET_ADMIN in a network namespace can give such a name.
#[test]
fn odd_names_are_replaced() {
    let properties = [
        value(IFLA_ALT_IFNAME, b"\xfe\0"),
        string(200, "of a future kernel"),
        string(IFLA_ALT_IFNAME, "second"),
    ];
    let attributes = [
        value(IFLA_IFNAME, b"l\xffo\0"),
        value(IFLA_PHYS_PORT_NAME, b"p\xff"),
        nested(IFLA_PROP_LIST, &properties),
    ];
    let family = AddressFamily::Unspec;
    let link = Link::of(&message(family, 7, LinkFlags::empty(), &attributes)).unwrap();
    assert_eq!(link.name, "l\u{fffd}o");
    assert_eq!(link.phys_port_name.as_deref(), Some("p\u{fffd}"));
    assert_eq!(link.alternative_names, ["\u{fffd}", "second"]);
}

#[test]
fn gaps_and_contradictions_are_malformed() {
    let of = |index, attributes: &[DefaultNla]| {
        let family = AddressFamily::Unspec;
        Link::of(&message(family, index, LinkFlags::empty(), attributes))
    };
    assert!(of(7, &[value(IFLA_MTU, &1500_u32.to_ne_bytes())]).is_err());
    for index in [0, u32::MAX, 1 << 31] {
        assert!(of(index, &[string(IFLA_IFNAME, "a")]).is_err(), "{index}");
    }
    for messages in [vec![], vec![bridge(), port()]] {
        assert!(only(&answer(messages), Link::of).is_err());
    }
}

fn info(flags: Flags, vlan: u16) -> DefaultNla {
    let mut bytes = flags.bits().to_ne_bytes().to_vec();
    bytes.extend(vlan.to_ne_bytes());
    value(IFLA_BRIDGE_VLAN_INFO, &bytes)
}

fn vlans(infos: &[DefaultNla]) -> Answer {
    let specification = nested(IFLA_AF_SPEC | 0x8000, infos);
    let of = |index, specification| {
        let family = AddressFamily::Bridge;
        message(family, index, LinkFlags::empty(), &[specification])
    };
    let other = nested(IFLA_AF_SPEC, &[info(Flags::Pvid | Flags::Untagged, 5)]);
    let own_switch = nested(IFLA_AF_SPEC, &[value(1, &[0, 0])]);
    answer(vec![of(9, other), of(8, specification), of(8, own_switch)])
}

fn vlan(number: u16) -> VlanId {
    number.try_into().unwrap()
}

#[test]
fn vlans_of_a_port_are_read() {
    let untagged = Flags::Pvid | Flags::Untagged;
    let found = vlans(&[
        info(untagged, 1),
        info(Flags::RangeBegin, 10),
        info(Flags::RangeEnd, 4094),
    ]);
    let found = vlans_of(&found, 8).unwrap();
    assert_eq!(found.len(), 1 + 4085);
    assert_eq!(found[0], PortVlan::access(vlan(1)));
    assert_eq!((found[1].vlan, found[4085].vlan), (vlan(10), vlan(4094)));
    assert!(!found[1].pvid && !found[1].untagged);
    // Of a future kernel: a longer structure, another attribute.
    let longer = [untagged.bits(), 1, 9, 9].map(u16::to_ne_bytes).concat();
    let longer = value(IFLA_BRIDGE_VLAN_INFO, &longer);
    let found = vlans_of(&vlans(&[value(200, &[1]), longer]), 8);
    assert_eq!(found, Ok(vec![PortVlan::access(vlan(1))]));
    assert_eq!(vlans_of(&vlans(&[]), 8), Ok(Vec::new()));
    assert_eq!(vlans_of(&answer(vec![]), 8), Ok(Vec::new()));
}

#[test]
fn impossible_vlans_are_malformed() {
    let (begin, end) = (Flags::RangeBegin, Flags::RangeEnd);
    for infos in [
        vec![info(Flags::empty(), 0)],
        vec![info(Flags::empty(), 4095)],
        vec![info(Flags::empty(), u16::MAX)],
        vec![value(IFLA_BRIDGE_VLAN_INFO, &[0, 0, 1])],
        vec![info(begin, 5)],
        vec![info(end, 5)],
        vec![info(begin, 5), info(begin, 6)],
        vec![info(begin, 5), info(Flags::empty(), 6)],
        vec![info(begin, 6), info(end, 5)],
        vec![info(Flags::empty(), 5), info(Flags::empty(), 5)],
        vec![info(Flags::empty(), 5), info(Flags::empty(), 4)],
        vec![info(begin, 1), info(end, 9), info(Flags::empty(), 9)],
    ] {
        assert!(vlans_of(&vlans(&infos), 8).is_err(), "{infos:?}");
    }
    let mut twice = vlans(&[info(Flags::empty(), 5)]);
    twice.messages.push(twice.messages[1].clone());
    assert!(vlans_of(&twice, 8).is_err());
}

#[test]
fn a_vlan_is_laid_out_as_the_kernel_reads_it() {
    let attribute = PortVlan::access(vlan(100)).attribute();
    let mut bytes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut bytes);
    let mut expected = Vec::new();
    for number in [12, IFLA_AF_SPEC, 8, IFLA_BRIDGE_VLAN_INFO, 6, 100] {
        expected.extend(number.to_ne_bytes());
    }
    assert_eq!(bytes, expected);
}

#[test]
fn numbers_of_vlans_are_checked() {
    for text in ["", "0", "4095", "65536", "-1", "1.0", " 1", "0x1"] {
        assert!(text.parse::<VlanId>().is_err(), "{text:?}");
    }
    assert_eq!("4094".parse::<VlanId>().unwrap(), vlan(4094));
    let bytes = postcard::to_stdvec(&4095_u16).unwrap();
    assert!(postcard::from_bytes::<VlanId>(&bytes).is_err());
}

#[test]
fn refusals_have_a_remedy() {
    for (errno, text, new_name, words) in [
        (libc::EPERM, "set a up", false, "run it as root"),
        (libc::ENODEV, "set a down", false, "`ip link` lists them"),
        (libc::EEXIST, "rename a to b", true, "choose another name"),
        (libc::EBUSY, "rename a to b", true, "cannot rename a to b"),
        (
            libc::EEXIST,
            "set the MTU of a to 9",
            false,
            "cannot set the MTU of a to 9",
        ),
    ] {
        let operation = Operation {
            new_name_in: new_name.then_some("here"),
            ..Operation::new(text, Some("a"))
        };
        let error = operation
            .refused("here", Refusal::of(errno, None))
            .to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn names_are_checked() {
    let long = "x".repeat(16);
    for name in [
        "", ".", "..", "a/b", "a b", "a:b", "a\tb", "a\0", "a\u{a0}b", &long,
    ] {
        assert!(!is_interface_name(name), "{name:?}");
    }
    assert!(is_interface_name(&long[1..]));
}

#[test]
fn namespaces_are_distinguished_from_other_files() {
    let here = Namespace::current().unwrap();
    let process = Namespace::of_process(std::process::id()).unwrap();
    assert!(here.is_same(&process).unwrap());
    assert!(Namespace::at(std::path::Path::new("/proc/self/ns/net")).is_ok());
    for path in ["/proc/self/ns/mnt", "/proc/self/status", "/dev/null", "/"] {
        let error = Namespace::find(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unusable, "{path}: {error}");
    }
    for (name, kind) in [
        ("bellhop-no-such-namespace", ErrorKind::NotFound),
        ("4294967295", ErrorKind::NotFound),
        ("", ErrorKind::BadName),
        ("..", ErrorKind::BadName),
        ("a/b", ErrorKind::BadName),
        ("a\nb", ErrorKind::BadName),
    ] {
        assert_eq!(Namespace::find(name).unwrap_err().kind(), kind, "{name:?}");
    }
}

#[test]
fn messages_cut_anywhere_are_errors_or_shorter() {
    for whole in [bridge(), port()] {
        for length in 0..whole.attributes.len() {
            let cut = Message {
                attributes: whole.attributes[..length].to_vec(),
                ..whole.clone()
            };
            let _ = Link::of(&cut);
        }
        for length in 0..8 {
            let mut cut = whole.clone();
            cut.header.truncate(length);
            assert!(Link::of(&cut).is_err());
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in any::<prop::sample::Index>(),
    ) {
        let range = [info(Flags::RangeBegin, 10), info(Flags::RangeEnd, 20)];
        let ranges = [range.as_slice(), &[info(Flags::Pvid, 30)]].concat();
        for mut message in [bridge(), port(), vlans(&ranges).messages.remove(1)] {
            for (index, byte) in &changes {
                let length = message.attributes.len();
                message.attributes[index.index(length)] = *byte;
            }
            let length = cut.index(message.attributes.len() + 1);
            message.attributes.truncate(length);
            let _ = Link::of(&message);
            if let Ok(vlans) = vlans_of(&answer(vec![message]), 8) {
                prop_assert!(vlans.is_sorted_by_key(|one| one.vlan));
            }
        }
    }
}
