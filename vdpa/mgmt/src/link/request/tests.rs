//! Each request byte by byte, as the kernel reads it. The expected bytes are written by hand.

#![cfg(target_endian = "little")]
#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use crate::sriov::{LinkState, Rates, Setting, Vlan, VlanProtocol};

/// NLM_F_REQUEST | NLM_F_ACK.
const DO: u16 = 5;
/// The same with NLM_F_DUMP.
const DUMP: u16 = 0x305;

const AF_UNSPEC: u8 = 0;
const AF_BRIDGE: u8 = 7;

/// The index of the interface.
const INDEX: u32 = 0x4321;

/// An attribute with its length and padding.
fn attribute(kind: u8, value: &[u8]) -> Vec<u8> {
    let length = u8::try_from(4 + value.len()).unwrap();
    let mut bytes = vec![length, 0, kind, 0];
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// `struct nlmsghdr`: length, type, flags, sequence number, port; then what follows.
fn message(message_type: u8, flags: u16, parts: &[&[u8]]) -> Vec<u8> {
    let parts = parts.concat();
    let length = u8::try_from(16 + parts.len()).unwrap();
    let mut bytes = vec![length, 0, 0, 0, message_type, 0];
    bytes.extend(flags.to_le_bytes());
    bytes.extend([9, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(parts);
    bytes
}

/// `struct ifinfomsg`: family, type, index, flags, the mask of flags to change.
fn header(family: u8, index: u32, flags: u8, change: u8) -> Vec<u8> {
    let mut bytes = vec![family, 0, 0, 0];
    bytes.extend(index.to_le_bytes());
    bytes.extend([flags, 0, 0, 0, change, 0, 0, 0]);
    bytes
}

#[track_caller]
fn same(request: &Request, message_type: u8, flags: u16, parts: &[&[u8]]) {
    assert_eq!(request.bytes(9), message(message_type, flags, parts));
}

#[test]
fn queries_are_laid_out_as_the_kernel_reads_them() {
    // IFLA_EXT_MASK: RTEXT_FILTER_SKIP_STATS.
    let filter = attribute(29, &[8, 0, 0, 0]);
    let any = header(AF_UNSPEC, 0, 0, 0);
    same(&list(), 18, DUMP, &[&any, &filter]);
    let one = header(AF_UNSPEC, INDEX, 0, 0);
    same(&show_index(INDEX), 18, DO, &[&one, &filter]);
    // IFLA_IFNAME, or IFLA_ALT_IFNAME for a longer name; with a NUL.
    let name = attribute(3, b"fifteen-letters\0");
    let request = show_name("fifteen-letters");
    same(&request, 18, DO, &[&any, &filter, &name]);
    let name = attribute(53, b"sixteen-letters-\0");
    let request = show_name("sixteen-letters-");
    same(&request, 18, DO, &[&any, &filter, &name]);
    // RTEXT_FILTER_VF too.
    let name = attribute(3, b"eth0\0");
    let filter = attribute(29, &[9, 0, 0, 0]);
    let request = show_virtual_functions("eth0");
    same(&request, 18, DO, &[&any, &name, &filter]);
    // RTEXT_FILTER_BRVLAN_COMPRESSED.
    let filter = attribute(29, &[4, 0, 0, 0]);
    let ports = header(AF_BRIDGE, 0, 0, 0);
    same(&list_vlans(), 18, DUMP, &[&ports, &filter]);
}

#[test]
fn changes_are_laid_out_as_the_kernel_reads_them() {
    let up = header(AF_UNSPEC, INDEX, 1, 1);
    same(&set_up(INDEX, true), 19, DO, &[&up]);
    let down = header(AF_UNSPEC, INDEX, 0, 1);
    same(&set_up(INDEX, false), 19, DO, &[&down]);
    let one = header(AF_UNSPEC, INDEX, 0, 0);
    for (change, kind, value) in [
        (LinkAttribute::Mtu(9000), 4, &[0x28, 0x23, 0, 0][..]),
        (LinkAttribute::Controller(7), 10, &[7, 0, 0, 0]),
        (LinkAttribute::Controller(0), 10, &[0; 4]),
        (LinkAttribute::IfName("a2".to_owned()), 3, b"a2\0"),
        (LinkAttribute::NetNsFd(5), 28, &[5, 0, 0, 0]),
    ] {
        let request = set(INDEX, vec![change]);
        same(&request, 19, DO, &[&one, &attribute(kind, value)]);
    }
    // IFLA_AF_SPEC of IFLA_BRIDGE_VLAN_INFO: flags PVID and UNTAGGED, the VLAN.
    let port = header(AF_BRIDGE, INDEX, 0, 0);
    let vlan = VlanId::try_from(300).unwrap();
    let information = |flags| attribute(26, &attribute(2, &[flags, 0, 0x2c, 1]));
    let request = add_vlan(INDEX, PortVlan::access(vlan));
    same(&request, 19, DO, &[&port, &information(6)]);
    let request = remove_vlan(INDEX, vlan);
    same(&request, 17, DO, &[&port, &information(0)]);
}

#[test]
fn settings_of_a_virtual_function_are_laid_out_as_the_kernel_reads_them() {
    let vlan = |protocol| Setting::Vlan(Vlan::new(300, 3, protocol).unwrap());
    // The number of the function, the VLAN, its priority, its big-endian protocol, padding.
    let vlan_list = |protocol: [u8; 2]| {
        let mut bytes = vec![3, 0, 0, 0, 0x2c, 1, 0, 0, 3, 0, 0, 0];
        bytes.extend(protocol);
        bytes.extend([0, 0]);
        attribute(12, &attribute(1, &bytes))
    };
    let mut mac = vec![3, 0, 0, 0, 2, 0, 0, 0, 0, 9];
    mac.resize(36, 0);
    let one = header(AF_UNSPEC, INDEX, 0, 0);
    for (setting, expected) in [
        (Setting::Mac([2, 0, 0, 0, 0, 9]), attribute(1, &mac)),
        (vlan(VlanProtocol::Dot1Q), vlan_list([0x81, 0])),
        (vlan(VlanProtocol::Dot1Ad), vlan_list([0x88, 0xa8])),
        (vlan(VlanProtocol::Other(0x9100)), vlan_list([0x91, 0])),
        (
            Setting::Rates(Rates::new(10, 20).unwrap()),
            attribute(6, &[3, 0, 0, 0, 10, 0, 0, 0, 20, 0, 0, 0]),
        ),
        (
            Setting::SpoofCheck(true),
            attribute(4, &[3, 0, 0, 0, 1, 0, 0, 0]),
        ),
        (
            Setting::LinkState(LinkState::Disable),
            attribute(5, &[3, 0, 0, 0, 2, 0, 0, 0]),
        ),
        (
            Setting::Trust(false),
            attribute(9, &[3, 0, 0, 0, 0, 0, 0, 0]),
        ),
    ] {
        let request = set_virtual_function(INDEX, setting.attribute(3));
        // IFLA_VFINFO_LIST of IFLA_VF_INFO.
        let list = attribute(22, &attribute(1, &expected));
        same(&request, 19, DO, &[&one, &list]);
    }
}

/// The request equals that of `bridge fdb replace`, except for NLM_F_CREATE and NLM_F_REPLACE,
/// which the kernel ignores with NTF_USE.
#[test]
fn an_address_to_learn_is_laid_out_as_the_kernel_reads_it() {
    let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    let vlan = VlanId::try_from(100).unwrap();
    // struct ndmsg: AF_BRIDGE, index, NUD_REACHABLE, NTF_MASTER | NTF_USE.
    let port = [7, 0, 0, 0, 0x21, 0x43, 0, 0, 2, 0, 5, 0];
    let address = attribute(2, &mac);
    let request = learn(INDEX, mac, Some(vlan));
    same(
        &request,
        28,
        DO,
        &[&port, &address, &attribute(5, &[100, 0])],
    );
    same(&learn(INDEX, mac, None), 28, DO, &[&port, &address]);
}
