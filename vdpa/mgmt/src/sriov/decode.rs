//! Decodes RTM_NEWLINK into a [`Link`], with bounds checks. Structures may be longer than known
//! here (on newer kernels), never shorter.

use super::settings::{LinkState, Rates, Vlan};
use super::uapi::*;
use super::{Link, VirtualFunction};
use crate::link::uapi::IFLA_IFNAME;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::Message;

/// Bits of an attribute's type that are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
const NLA_TYPE_MASK: u16 = 0x3fff;

impl Link {
    /// Reads RTM_NEWLINK: `struct ifinfomsg` (family u8, padding, type u16, index i32, flags,
    /// change), then attributes.
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let index = message
            .header
            .get(4..8)
            .and_then(|index| index.try_into().ok());
        let index = index.map(i32::from_ne_bytes);
        let attributes = Attributes::parse(&message.attributes)?;
        let mut virtual_functions = Vec::new();
        for (kind, value) in attributes.iter() {
            if kind & NLA_TYPE_MASK == IFLA_VFINFO_LIST {
                virtual_functions = list(value)?;
            }
        }
        Ok(Self {
            index: index
                .filter(|&index| index > 0)
                .ok_or_else(|| Malformed::new("link", "it has no index"))?,
            name: attributes.needed_string(IFLA_IFNAME)?,
            virtual_functions,
        })
    }
}

fn list(bytes: &[u8]) -> Result<Vec<VirtualFunction>, Malformed> {
    let mut found = Vec::new();
    for (kind, value) in Attributes::parse(bytes)?.iter() {
        if kind & NLA_TYPE_MASK == IFLA_VF_INFO {
            found.push(virtual_function(value)?);
        }
    }
    Ok(found)
}

fn virtual_function(bytes: &[u8]) -> Result<VirtualFunction, Malformed> {
    let attributes = Attributes::parse(bytes)?;
    let mut index = None;
    let mut found = VirtualFunction::default();
    // The list repeats the VLAN, with the protocol, and takes precedence.
    let mut vlan_of_list = None;
    for (kind, value) in attributes.iter() {
        let kind = kind & NLA_TYPE_MASK;
        match kind {
            IFLA_VF_MAC => {
                let mac = value.get(4..10).and_then(|mac| mac.try_into().ok());
                found.mac = Some(mac.ok_or_else(|| short(kind))?);
            }
            IFLA_VF_VLAN => {
                let (vlan, qos) = (word(kind, value, 1)?, word(kind, value, 2)?);
                found.vlan = Vlan::from_kernel(vlan, qos, ETH_P_8021Q);
            }
            IFLA_VF_VLAN_LIST => vlan_of_list = vlans(value)?,
            // Of old kernels, without a minimum rate.
            IFLA_VF_TX_RATE if found.rates.is_none() => {
                let max = word(kind, value, 1)?;
                found.rates = Some(Rates { min: 0, max });
            }
            IFLA_VF_RATE => {
                let (min, max) = (word(kind, value, 1)?, word(kind, value, 2)?);
                found.rates = Some(Rates { min, max });
            }
            IFLA_VF_SPOOFCHK => found.spoof_check = switch(kind, value)?,
            IFLA_VF_TRUST => found.trust = switch(kind, value)?,
            IFLA_VF_RSS_QUERY_EN => found.query_rss = switch(kind, value)?,
            IFLA_VF_LINK_STATE => found.link_state = LinkState::of(word(kind, value, 1)?),
            _ => continue,
        }
        // Each structure except the list begins with the function's number.
        if kind != IFLA_VF_VLAN_LIST {
            let number = word(kind, value, 0)?;
            if index.is_some_and(|index| index != number) {
                return Err(Malformed::attribute(kind, "it is about another function"));
            }
            index = Some(number);
        }
    }
    found.index = index.ok_or_else(|| Malformed::new("virtual function", "it has no number"))?;
    found.vlan = vlan_of_list.or(found.vlan);
    Ok(found)
}

/// The outermost VLAN of a list; kernels have one.
fn vlans(bytes: &[u8]) -> Result<Option<Vlan>, Malformed> {
    for (kind, value) in Attributes::parse(bytes)?.iter() {
        let kind = kind & NLA_TYPE_MASK;
        if kind != IFLA_VF_VLAN_INFO {
            continue;
        }
        let (vlan, qos) = (word(kind, value, 1)?, word(kind, value, 2)?);
        let protocol = value.get(12..14).and_then(|bytes| bytes.try_into().ok());
        let protocol = u16::from_be_bytes(protocol.ok_or_else(|| short(kind))?);
        return Ok(Vlan::from_kernel(vlan, qos, protocol));
    }
    Ok(None)
}

/// A setting that is on, off, or unknown to the driver.
fn switch(kind: u16, value: &[u8]) -> Result<Option<bool>, Malformed> {
    let setting = word(kind, value, 1)?;
    Ok((setting != SETTING_UNKNOWN).then_some(setting != 0))
}

/// The number at a position of a structure of 32-bit numbers.
fn word(kind: u16, value: &[u8], position: usize) -> Result<u32, Malformed> {
    let start = position * 4;
    let bytes = value.get(start..start + 4);
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    bytes.map(u32::from_ne_bytes).ok_or_else(|| short(kind))
}

fn short(kind: u16) -> Malformed {
    Malformed::attribute(kind, "it is too short")
}
