//! Decodes RTM_NEWLINK into a [`Link`], attribute by attribute. Odd values (an address or number of
//! another length, an empty name) are left out, so that one interface never hides the others.

use netlink_packet_core::{NlasIterator, Parseable as _, parse_u32};
use netlink_packet_route::link::{InfoBridge, LinkFlags, LinkHeader, LinkPhysId};

use super::Link;
use crate::netlink::attributes::{Attributes, text};
use crate::netlink::error::Malformed;
use crate::netlink::message::Message;

/// The header of an RTM_NEWLINK about an existing interface.
pub(crate) fn header(message: &Message) -> Result<LinkHeader, Malformed> {
    LinkHeader::parse(&message.header)
        .ok()
        .filter(|header| i32::try_from(header.index).is_ok_and(|index| index > 0))
        .ok_or_else(|| Malformed::new("link", "it has no index"))
}

impl Link {
    /// Reads RTM_NEWLINK.
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let header = header(message)?;
        let attributes = Attributes::parse(&message.attributes)?;
        let mut link = Self {
            index: header.index,
            name: attributes.needed_string(libc::IFLA_IFNAME)?,
            alternative_names: Vec::new(),
            kind: None,
            up: header.flags.contains(LinkFlags::Up),
            carrier: header.flags.contains(LinkFlags::LowerUp),
            mtu: 0,
            mac: None,
            master: None,
            phys_port_name: attributes
                .string(libc::IFLA_PHYS_PORT_NAME)
                .filter(|name| !name.is_empty()),
            phys_switch_id: None,
            parent: None,
            vlan_filtering: None,
        };
        let parent = (
            attributes.string(libc::IFLA_PARENT_DEV_BUS_NAME),
            attributes.string(libc::IFLA_PARENT_DEV_NAME),
        );
        if let (Some(bus), Some(name)) = parent {
            link.parent = Some((bus, name));
        }
        for (kind, value) in attributes.iter() {
            match kind {
                libc::IFLA_ADDRESS => link.mac = value.try_into().ok(),
                libc::IFLA_MTU => link.mtu = parse_u32(value).unwrap_or_default(),
                libc::IFLA_MASTER => {
                    link.master = parse_u32(value).ok().filter(|&index| index != 0);
                }
                libc::IFLA_PHYS_SWITCH_ID => link.phys_switch_id = switch_id(value),
                libc::IFLA_PROP_LIST => link.properties(value),
                libc::IFLA_LINKINFO => link.information(value),
                _ => {}
            }
        }
        Ok(link)
    }

    /// Reads IFLA_PROP_LIST: alternative names.
    fn properties(&mut self, bytes: &[u8]) {
        if let Ok(list) = Attributes::parse(bytes) {
            let names = list.each(libc::IFLA_ALT_IFNAME).map(text);
            self.alternative_names.extend(names);
        }
    }

    /// Reads IFLA_LINKINFO: the kind, and the data of that kind.
    fn information(&mut self, bytes: &[u8]) {
        let Ok(information) = Attributes::parse(bytes) else {
            return;
        };
        self.kind = information.string(libc::IFLA_INFO_KIND);
        if !self.is_bridge() {
            return;
        }
        for data in information.each(libc::IFLA_INFO_DATA) {
            for attribute in NlasIterator::new(data).map_while(Result::ok) {
                if let Ok(InfoBridge::VlanFiltering(on)) = InfoBridge::parse(&attribute) {
                    self.vlan_filtering = Some(on);
                }
            }
        }
    }
}

/// The id of a switch. The crate cuts one that is longer than any of the kernel, and a part is
/// another switch's.
fn switch_id(bytes: &[u8]) -> Option<Vec<u8>> {
    let id = LinkPhysId::parse(bytes).ok()?;
    (id.len == bytes.len() && id.len != 0).then(|| bytes.to_vec())
}
