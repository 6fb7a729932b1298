#![allow(clippy::unwrap_used, reason = "tests")]
use libc::{IFLA_IFNAME, IFLA_VFINFO_LIST, RTM_NEWLINK};
use netlink_packet_core::{DefaultNla, Emitable, Nla as _};
use proptest::prelude::*;

use super::decode::*;
use super::links::refused;
use super::*;
use crate::netlink::error::Refusal;
use crate::netlink::exchange::Answer;
use crate::netlink::message::{Message, nested, string};
use crate::pci::tests::Sysfs;

fn numbers(kind: u16, values: &[u32]) -> DefaultNla {
    let bytes = values.iter().flat_map(|value| value.to_ne_bytes());
    DefaultNla::new(kind, bytes.collect())
}

fn settings() -> Vec<Setting> {
    vec![
        Setting::Mac([2, 0, 0, 0, 0, 9]),
        Setting::Vlan(Vlan::new(100, 3, VlanProtocol::Dot1Ad).unwrap()),
        Setting::Rates(Rates::new(10, 20).unwrap()),
        Setting::SpoofCheck(true),
        Setting::LinkState(LinkState::Enable),
        Setting::Trust(false),
    ]
}

/// A driver's report of a virtual function with those settings.
fn virtual_function(index: u32) -> DefaultNla {
    let raw = |setting: &Setting| {
        let attribute = setting.attribute(index);
        let mut bytes = vec![0; attribute.value_len()];
        attribute.emit_value(&mut bytes);
        DefaultNla::new(attribute.kind(), bytes)
    };
    let mut attributes: Vec<DefaultNla> = settings().iter().map(raw).collect();
    attributes.extend([
        numbers(IFLA_VF_VLAN, &[index, 100, 3]),
        numbers(IFLA_VF_TX_RATE, &[index, 20]),
        numbers(IFLA_VF_RSS_QUERY_EN, &[index, SETTING_UNKNOWN]),
        // An attribute of a future kernel.
        numbers(999, &[1]),
    ]);
    nested(IFLA_VF_INFO | 0x8000, &attributes)
}

fn message(attributes: &[DefaultNla]) -> Message {
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    let mut header = vec![0; 16];
    header[4..8].copy_from_slice(&7_i32.to_ne_bytes());
    Message {
        message_type: RTM_NEWLINK,
        header,
        attributes: bytes,
    }
}

fn link() -> Message {
    let list = [virtual_function(0), virtual_function(1)];
    message(&[
        string(IFLA_IFNAME, "enp1s0"),
        nested(IFLA_VFINFO_LIST | 0x8000, &list),
    ])
}

#[test]
fn settings_are_read_back() {
    let link = Link::of(&link()).unwrap();
    assert_eq!((link.index, link.name.as_str()), (7, "enp1s0"));
    assert_eq!(link.virtual_functions.len(), 2);
    let second = &link.virtual_functions[1];
    assert_eq!(second.index, 1);
    assert_eq!(second.query_rss, None);
    for setting in settings() {
        assert_eq!(setting.former(second), Some(setting));
    }
}

#[test]
fn attributes_are_laid_out_as_the_kernel_reads_them() {
    let bytes = |setting: Setting| {
        let attribute = setting.attribute(3);
        let mut bytes = vec![0; attribute.buffer_len()];
        attribute.emit(&mut bytes);
        bytes
    };
    let mac = bytes(Setting::Mac([2, 0, 0, 0, 0, 9]));
    assert_eq!(mac.len(), 4 + 4 + 32);
    assert_eq!(mac[8..14], [2, 0, 0, 0, 0, 9]);
    let vlan = bytes(Setting::Vlan(
        Vlan::new(100, 3, VlanProtocol::Dot1Q).unwrap(),
    ));
    let mut expected = 24_u16.to_ne_bytes().to_vec();
    expected.extend(IFLA_VF_VLAN_LIST.to_ne_bytes());
    expected.extend(20_u16.to_ne_bytes());
    expected.extend(IFLA_VF_VLAN_INFO.to_ne_bytes());
    for number in [3_u32, 100, 3] {
        expected.extend(number.to_ne_bytes());
    }
    expected.extend([0x81, 0x00, 0, 0]);
    assert_eq!(vlan, expected);
}

#[test]
fn an_old_kernel_reports_less() {
    let list = nested(
        IFLA_VF_INFO,
        &[
            numbers(IFLA_VF_VLAN, &[0, 5, 1]),
            numbers(IFLA_VF_TX_RATE, &[0, 40]),
        ],
    );
    let link = message(&[string(IFLA_IFNAME, "a"), nested(IFLA_VFINFO_LIST, &[list])]);
    let read = Link::of(&link).unwrap();
    let vlan = Vlan::new(5, 1, VlanProtocol::Dot1Q).unwrap();
    assert_eq!(read.virtual_functions[0].vlan, Some(vlan));
    let rates = Rates { min: 0, max: 40 };
    assert_eq!(read.virtual_functions[0].rates, Some(rates));
    assert_eq!(read.virtual_functions[0].trust, None);
}

#[test]
fn contradictions_and_gaps_are_malformed() {
    let of = |attributes: &[DefaultNla]| {
        let info = nested(IFLA_VF_INFO, attributes);
        Link::of(&message(&[
            string(IFLA_IFNAME, "a"),
            nested(IFLA_VFINFO_LIST, &[info]),
        ]))
    };
    // No number, two numbers.
    assert!(of(&[]).is_err());
    assert!(
        of(&[
            numbers(IFLA_VF_TRUST, &[0, 1]),
            numbers(IFLA_VF_SPOOFCHK, &[1, 1])
        ])
        .is_err()
    );
    for kind in [
        IFLA_VF_MAC,
        IFLA_VF_VLAN,
        IFLA_VF_TX_RATE,
        IFLA_VF_SPOOFCHK,
        IFLA_VF_LINK_STATE,
        IFLA_VF_RATE,
        IFLA_VF_RSS_QUERY_EN,
        IFLA_VF_TRUST,
    ] {
        // A structure that is too short, alone and beside another one.
        assert!(of(&[DefaultNla::new(kind, vec![0, 0])]).is_err(), "{kind}");
        let read = of(&[numbers(kind, &[4]), numbers(200, &[])]);
        let expected = VirtualFunction {
            index: 4,
            ..VirtualFunction::default()
        };
        assert_eq!(read.unwrap().virtual_functions, [expected], "{kind}");
    }
    // Out of range, or a list that is cut: unknown.
    let odd = of(&[
        numbers(IFLA_VF_VLAN, &[0, 70_000, 0]),
        numbers(IFLA_VF_LINK_STATE, &[0, 9]),
        DefaultNla::new(IFLA_VF_VLAN_LIST, vec![8, 0, 1]),
    ]);
    let odd = odd.unwrap().virtual_functions.remove(0);
    assert_eq!((odd.vlan, odd.link_state), (None, None));
    // No name, no index, no link, two links.
    assert!(Link::of(&message(&[])).is_err());
    let mut nameless = link();
    nameless.header.fill(0);
    assert!(Link::of(&nameless).is_err());
    for messages in [vec![], vec![link(), link()]] {
        let answer = Answer {
            messages,
            warning: None,
        };
        assert!(crate::link::only(&answer, Link::of).is_err());
    }
}

#[test]
fn an_answer_cut_anywhere_is_an_error_or_less() {
    let whole = link();
    for length in 0..whole.attributes.len() {
        let cut = Message {
            attributes: whole.attributes[..length].to_vec(),
            ..whole.clone()
        };
        if let Ok(read) = Link::of(&cut) {
            assert!(read.virtual_functions.is_empty(), "{length}");
        }
    }
    for length in 0..8 {
        let mut cut = whole.clone();
        cut.header.truncate(length);
        assert!(Link::of(&cut).is_err());
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut message = link();
        for (position, byte) in changes {
            let position = position.index(message.attributes.len());
            message.attributes[position] = byte;
        }
        let _ = Link::of(&message);
    }
}

#[test]
fn refusals_become_remedies() {
    let operation = "set the VLAN of virtual function 3 of enp1s0";
    for (errno, words) in [
        (libc::EPERM, "CAP_NET_ADMIN"),
        (libc::EOPNOTSUPP, "its driver has no such setting"),
        (libc::ENODEV, "no network interface enp1s0"),
        (
            libc::EINVAL,
            "cannot set the VLAN of virtual function 3 of enp1s0",
        ),
    ] {
        let kernel = Refusal::of(errno, Some("why"));
        let error = refused(operation, "enp1s0", true, kernel.clone());
        let text = error.to_string();
        assert!(text.contains(words), "{text}");
        // The kernel's explanation is the cause, and appears once.
        assert!(!text.contains("why"), "{text}");
        let source = std::error::Error::source(&error).unwrap();
        assert_eq!(source.to_string(), kernel.to_string());
    }
}

#[test]
fn impossible_settings_of_virtual_functions_are_refused() {
    assert_eq!(Vlan::new(0, 0, VlanProtocol::Dot1Q).unwrap(), Vlan::NONE);
    for (id, qos, protocol) in [
        (4095, 0, VlanProtocol::Dot1Q),
        (1, 8, VlanProtocol::Dot1Q),
        (0, 1, VlanProtocol::Dot1Q),
        (0, 0, VlanProtocol::Dot1Ad),
    ] {
        assert!(Vlan::new(id, qos, protocol).is_err());
    }
    assert!(Rates::new(5, 0).is_ok());
    assert!(Rates::new(5, 4).is_err());
    assert!(Setting::Mac([1, 0, 0, 0, 0, 0]).check().is_err());
    assert!(Setting::Rates(Rates { min: 5, max: 4 }).check().is_err());
}

#[test]
fn virtual_functions_are_counted() {
    let physical = "0000:01:00.0".parse().unwrap();
    let virtual_one = "0000:01:00.1".parse().unwrap();
    let sysfs = Sysfs::new("count");
    let file = "devices/0000:01:00.0/sriov_numvfs";
    let pci = sysfs.pci();
    let refused = |address, count| {
        let error = pci.set_virtual_functions(address, count).unwrap_err();
        error.kind()
    };
    assert_eq!(refused(physical, 5), ErrorKind::Unusable);
    assert_eq!(refused(virtual_one, 1), ErrorKind::NoSriov);
    // An unchanged number, or only a check: nothing is written.
    pci.set_virtual_functions(physical, 1).unwrap();
    pci.check_virtual_functions(physical, 3).unwrap();
    assert!(pci.check_virtual_functions(physical, 5).is_err());
    assert_eq!(sysfs.written(file), "1\n");
    pci.set_virtual_functions(physical, 3).unwrap();
    assert_eq!(sysfs.written(file), "3\n");
    pci.set_virtual_functions(physical, 0).unwrap();
    assert_eq!(sysfs.written(file), "0\n");
    std::fs::remove_file(sysfs.0.join("devices/0000:01:00.0/sriov_totalvfs")).unwrap();
    assert_eq!(refused(physical, 1), ErrorKind::NoSriov);
}
