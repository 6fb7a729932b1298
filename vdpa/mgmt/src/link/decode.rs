//! Decodes RTM_NEWLINK into a [`Link`], with bounds checks. Odd but harmless values (an address of
//! another length, an empty port name) are left out, so that one interface never hides the others.

use super::Link;
use super::uapi::*;
use crate::netlink::attributes::{Attributes, text};
use crate::netlink::error::Malformed;
use crate::netlink::message::Message;

/// `ifi_index` of `struct ifinfomsg`: family u8, padding u8, type u16, index i32, flags u32, change
/// u32.
pub(crate) fn index(message: &Message) -> Result<u32, Malformed> {
    word(&message.header, 4)
        .and_then(|index| i32::try_from(index).ok())
        .filter(|&index| index > 0)
        .map(i32::cast_unsigned)
        .ok_or_else(|| Malformed::new("link", "it has no index"))
}

impl Link {
    /// Reads RTM_NEWLINK.
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let index = index(message)?;
        let flags = word(&message.header, 8).unwrap_or_default();
        let attributes = Attributes::parse(&message.attributes)?;
        let mut link = Self {
            index,
            name: attributes.needed_string(IFLA_IFNAME)?,
            alternative_names: Vec::new(),
            kind: None,
            up: flags & IFF_UP != 0,
            carrier: flags & IFF_LOWER_UP != 0,
            mtu: attributes.u32(IFLA_MTU)?.unwrap_or_default(),
            mac: None,
            master: attributes.u32(IFLA_MASTER)?.filter(|&index| index != 0),
            phys_port_name: attributes
                .string(IFLA_PHYS_PORT_NAME)
                .filter(|name| !name.is_empty()),
            phys_switch_id: None,
            parent: None,
            vlan_filtering: None,
        };
        let parent = (
            attributes.string(IFLA_PARENT_DEV_BUS_NAME),
            attributes.string(IFLA_PARENT_DEV_NAME),
        );
        if let (Some(bus), Some(name)) = parent {
            link.parent = Some((bus, name));
        }
        for (kind, value) in attributes.iter() {
            match kind {
                IFLA_ADDRESS => link.mac = value.try_into().ok(),
                IFLA_PHYS_SWITCH_ID => {
                    if value.len() > SWITCH_ID_MAX {
                        return Err(Malformed::attribute(kind, "it is too long"));
                    }
                    link.phys_switch_id = (!value.is_empty()).then(|| value.to_vec());
                }
                IFLA_PROP_LIST => {
                    let names = Attributes::parse(value)?;
                    link.alternative_names
                        .extend(names.each(IFLA_ALT_IFNAME).map(text));
                }
                IFLA_LINKINFO => link.information(value)?,
                _ => {}
            }
        }
        Ok(link)
    }

    /// Reads IFLA_LINKINFO: the kind, and the data of that kind.
    fn information(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let information = Attributes::parse(bytes)?;
        self.kind = information.string(IFLA_INFO_KIND);
        if !self.is_bridge() {
            return Ok(());
        }
        for data in information.each(IFLA_INFO_DATA) {
            self.vlan_filtering = Attributes::parse(data)?.flag(IFLA_BR_VLAN_FILTERING)?;
        }
        Ok(())
    }
}

fn word(header: &[u8], start: usize) -> Option<u32> {
    let bytes = header.get(start..start.checked_add(4)?)?;
    bytes.try_into().ok().map(u32::from_ne_bytes)
}
