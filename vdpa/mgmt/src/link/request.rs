//! Requests to rtnetlink, as messages of netlink-packet-route.
//!
//! ```text
//!   RTM_GETLINK, RTM_SETLINK    struct ifinfomsg, attributes of a link
//!   the same and RTM_DELLINK, of AF_BRIDGE       VLANs of a bridge's port
//!   RTM_NEWNEIGH, of AF_BRIDGE  struct ndmsg, an address behind a bridge's port
//! ```

use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkFlags, LinkMessage, LinkVfInfo, VfInfo,
};
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};

use super::{PortVlan, VlanId};
use crate::netlink::message::{Mode, Request, string};

/// The longest name of an interface, in bytes: IFNAMSIZ without the NUL.
pub(super) const NAME_MAX: usize = libc::IF_NAMESIZE - 1;

/// Queries all interfaces. Counters would make the answer several times as long.
pub(super) fn list() -> Request {
    let filter = LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]);
    let message = about(AddressFamily::Unspec, 0, vec![filter]);
    Request::route(libc::RTM_GETLINK, Mode::Dump, &message)
}

/// Queries the interface with this index.
pub(super) fn show_index(index: u32) -> Request {
    let filter = LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]);
    show(index, vec![filter])
}

/// Queries the interface with this name, also an alternative one.
pub(super) fn show_name(name: &str) -> Request {
    let filter = LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]);
    let name = if name.len() > NAME_MAX {
        LinkAttribute::Other(string(libc::IFLA_ALT_IFNAME, name))
    } else {
        LinkAttribute::IfName(name.to_owned())
    };
    show(0, vec![filter, name])
}

/// Queries the interface with this name and its virtual functions.
pub(crate) fn show_virtual_functions(name: &str) -> Request {
    let filter = LinkAttribute::ExtMask(vec![LinkExtentMask::Vf, LinkExtentMask::SkipStats]);
    show(0, vec![LinkAttribute::IfName(name.to_owned()), filter])
}

fn show(index: u32, attributes: Vec<LinkAttribute>) -> Request {
    let message = about(AddressFamily::Unspec, index, attributes);
    Request::route(libc::RTM_GETLINK, Mode::Do, &message)
}

/// Sets an interface up or down.
pub(super) fn set_up(index: u32, up: bool) -> Request {
    let mut message = about(AddressFamily::Unspec, index, Vec::new());
    message.header.flags.set(LinkFlags::Up, up);
    message.header.change_mask = LinkFlags::Up;
    Request::route(libc::RTM_SETLINK, Mode::Do, &message)
}

/// Changes attributes of an interface.
pub(super) fn set(index: u32, attributes: Vec<LinkAttribute>) -> Request {
    let message = about(AddressFamily::Unspec, index, attributes);
    Request::route(libc::RTM_SETLINK, Mode::Do, &message)
}

/// Changes a setting of a virtual function.
pub(crate) fn set_virtual_function(index: u32, setting: VfInfo) -> Request {
    let list = vec![LinkVfInfo(vec![setting])];
    set(index, vec![LinkAttribute::VfInfoList(list)])
}

/// Queries the VLANs of all bridge ports. The kernel has no request for one port.
pub(super) fn list_vlans() -> Request {
    let filter = LinkAttribute::ExtMask(vec![LinkExtentMask::BrvlanCompressed]);
    let message = about(AddressFamily::Bridge, 0, vec![filter]);
    Request::route(libc::RTM_GETLINK, Mode::Dump, &message)
}

/// Adds a port of a bridge to a VLAN.
pub(super) fn add_vlan(port: u32, vlan: PortVlan) -> Request {
    let message = about(AddressFamily::Bridge, port, vec![vlan.attribute()]);
    Request::route(libc::RTM_SETLINK, Mode::Do, &message)
}

/// Removes a port of a bridge from a VLAN.
pub(super) fn remove_vlan(port: u32, vlan: VlanId) -> Request {
    let vlan = PortVlan {
        vlan,
        pvid: false,
        untagged: false,
    };
    let message = about(AddressFamily::Bridge, port, vec![vlan.attribute()]);
    Request::route(libc::RTM_DELLINK, Mode::Do, &message)
}

/// Makes the bridge of the port with this index learn an address there, as from a received frame:
/// `bridge fdb replace MAC dev PORT master dynamic use [vlan VLAN]`.
///
/// NTF_USE does that (`br_fdb_update`). An entry for another port is moved, and a new one ages as
/// usual. An entry set by an administrator keeps its state; without the flag a static entry would
/// become one that ages. The kernel requires NUD_REACHABLE for an entry that is neither permanent
/// nor static.
pub(super) fn learn(port: u32, mac: [u8; 6], vlan: Option<VlanId>) -> Request {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = port;
    message.header.state = NeighbourState::Reachable;
    message.header.flags = NeighbourFlags::Controller | NeighbourFlags::Use;
    let address = NeighbourAttribute::LinkLayerAddress(mac.to_vec());
    message.attributes.push(address);
    let vlan = vlan.map(|vlan| NeighbourAttribute::Vlan(vlan.get()));
    message.attributes.extend(vlan);
    Request::route(libc::RTM_NEWNEIGH, Mode::Do, &message)
}

/// A message about the interface with this index; 0 is any.
fn about(family: AddressFamily, index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.interface_family = family;
    message.header.index = index;
    message.attributes = attributes;
    message
}

#[cfg(test)]
mod tests;
