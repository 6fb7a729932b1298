#![allow(clippy::unwrap_used, reason = "tests")]
use netlink_packet_core::{DefaultNla, Emitable};
use proptest::prelude::*;

use super::links::{Operation, only, vlans_of};
use super::uapi::*;
use super::*;
use crate::error::ErrorKind;
use crate::netlink::error::Refusal;
use crate::netlink::exchange::Answer;
use crate::netlink::message::{Message, nested, string, value};

fn message(family: u8, index: u32, flags: u32, attributes: &[DefaultNla]) -> Message {
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    Message {
        message_type: RTM_NEWLINK,
        header: header(family, index, flags, 0),
        attributes: bytes,
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
        AF_UNSPEC,
        7,
        IFF_UP | IFF_LOWER_UP,
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
        AF_UNSPEC,
        8,
        0,
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

#[test]
fn gaps_and_contradictions_are_malformed() {
    let nameless = message(AF_UNSPEC, 7, 0, &[value(IFLA_MTU, &1500_u32.to_ne_bytes())]);
    let named = |more: DefaultNla| {
        let attributes = [string(IFLA_IFNAME, "a"), more];
        Link::of(&message(AF_UNSPEC, 7, 0, &attributes))
    };
    assert!(Link::of(&nameless).is_err());
    assert!(named(value(IFLA_MTU, &[1, 2])).is_err());
    assert!(named(value(IFLA_MASTER, &[])).is_err());
    assert!(named(value(IFLA_PHYS_SWITCH_ID, &[0; 33])).is_err());
    assert_eq!(
        named(value(IFLA_PHYS_SWITCH_ID, &[]))
            .unwrap()
            .phys_switch_id,
        None
    );
    assert_eq!(
        named(string(IFLA_PHYS_PORT_NAME, ""))
            .unwrap()
            .phys_port_name,
        None
    );
    for index in [0, u32::MAX, 1 << 31] {
        let odd = message(AF_UNSPEC, index, 0, &[string(IFLA_IFNAME, "a")]);
        assert!(Link::of(&odd).is_err(), "{index}");
    }
    for messages in [vec![], vec![bridge(), port()]] {
        assert!(only(&answer(messages), Link::of).is_err());
    }
}

fn info(flags: u16, vlan: u16) -> DefaultNla {
    let mut bytes = flags.to_ne_bytes().to_vec();
    bytes.extend(vlan.to_ne_bytes());
    value(IFLA_BRIDGE_VLAN_INFO, &bytes)
}

fn vlans(infos: &[DefaultNla]) -> Answer {
    let specification = nested(IFLA_AF_SPEC | 0x8000, infos);
    let other = message(AF_BRIDGE, 9, 0, &[nested(IFLA_AF_SPEC, &[info(6, 5)])]);
    let own_switch = message(
        AF_BRIDGE,
        8,
        0,
        &[nested(IFLA_AF_SPEC, &[value(1, &[0, 0])])],
    );
    answer(vec![
        other,
        message(AF_BRIDGE, 8, 0, &[specification]),
        own_switch,
    ])
}

fn vlan(number: u16) -> VlanId {
    number.try_into().unwrap()
}

#[test]
fn vlans_of_a_port_are_read() {
    let untagged = BRIDGE_VLAN_INFO_PVID | BRIDGE_VLAN_INFO_UNTAGGED;
    let found = vlans(&[
        info(untagged, 1),
        info(BRIDGE_VLAN_INFO_RANGE_BEGIN, 10),
        info(BRIDGE_VLAN_INFO_RANGE_END, 4094),
    ]);
    let found = vlans_of(&found, 8).unwrap();
    assert_eq!(found.len(), 1 + 4085);
    assert_eq!(found[0], PortVlan::access(vlan(1)));
    assert_eq!((found[1].vlan, found[4085].vlan), (vlan(10), vlan(4094)));
    assert!(!found[1].pvid && !found[1].untagged);
    assert_eq!(vlans_of(&vlans(&[]), 8), Ok(Vec::new()));
    assert_eq!(vlans_of(&answer(vec![]), 8), Ok(Vec::new()));
}

#[test]
fn impossible_vlans_are_malformed() {
    let (begin, end) = (BRIDGE_VLAN_INFO_RANGE_BEGIN, BRIDGE_VLAN_INFO_RANGE_END);
    for infos in [
        vec![info(0, 0)],
        vec![info(0, 4095)],
        vec![info(0, u16::MAX)],
        vec![value(IFLA_BRIDGE_VLAN_INFO, &[0, 0, 1])],
        vec![info(begin, 5)],
        vec![info(end, 5)],
        vec![info(begin, 5), info(begin, 6)],
        vec![info(begin, 5), info(0, 6)],
        vec![info(begin, 6), info(end, 5)],
        vec![info(0, 5), info(0, 5)],
        vec![info(0, 5), info(0, 4)],
        vec![info(begin, 1), info(end, 9), info(0, 9)],
    ] {
        assert!(vlans_of(&vlans(&infos), 8).is_err(), "{infos:?}");
    }
    let mut twice = vlans(&[info(0, 5)]);
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
        let ranges = [info(8, 10), info(16, 20), info(6, 30)];
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
