//! Decodes RTM_NEWLINK into a [`Link`], with bounds checks. Structures may be longer than known
//! here, on newer kernels.
//!
//! The types of netlink-packet-route do not serve here. They read a setting that the driver does
//! not know as off, and an unknown VLAN protocol as 802.1Q. [`super::Links::set`] would restore
//! both.

use super::settings::{ETH_P_8021Q, LinkState, Rates, Vlan};
use super::{Link, VirtualFunction};
use crate::link::header;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::Message;

// include/uapi/linux/if_link.h; Linux 6.12

/// In IFLA_VFINFO_LIST, one for each virtual function.
pub(super) const IFLA_VF_INFO: u16 = 1;

/// struct ifla_vf_mac: u32 vf, 32 bytes of which six are an Ethernet address.
pub(super) const IFLA_VF_MAC: u16 = 1;
/// struct ifla_vf_vlan: u32 vf, vlan, qos.
pub(super) const IFLA_VF_VLAN: u16 = 2;
/// struct ifla_vf_tx_rate: u32 vf, rate.
pub(super) const IFLA_VF_TX_RATE: u16 = 3;
/// struct ifla_vf_spoofchk: u32 vf, setting.
pub(super) const IFLA_VF_SPOOFCHK: u16 = 4;
/// struct ifla_vf_link_state: u32 vf, link_state.
pub(super) const IFLA_VF_LINK_STATE: u16 = 5;
/// struct ifla_vf_rate: u32 vf, min_tx_rate, max_tx_rate.
pub(super) const IFLA_VF_RATE: u16 = 6;
/// struct ifla_vf_rss_query_en: u32 vf, setting.
pub(super) const IFLA_VF_RSS_QUERY_EN: u16 = 7;
/// struct ifla_vf_trust: u32 vf, setting.
pub(super) const IFLA_VF_TRUST: u16 = 9;
/// Attributes IFLA_VF_VLAN_INFO.
pub(super) const IFLA_VF_VLAN_LIST: u16 = 12;

/// struct ifla_vf_vlan_info: u32 vf, vlan, qos, big-endian u16 protocol, two bytes of padding.
pub(super) const IFLA_VF_VLAN_INFO: u16 = 1;

/// A setting that the driver does not know.
pub(super) const SETTING_UNKNOWN: u32 = u32::MAX;

/// Bits of an attribute's type that are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
const NLA_TYPE_MASK: u16 = 0x3fff;

impl Link {
    /// Reads RTM_NEWLINK.
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let header = header(message)?;
        let attributes = Attributes::parse(&message.attributes)?;
        let mut virtual_functions = Vec::new();
        for (kind, value) in attributes.iter() {
            if kind & NLA_TYPE_MASK == libc::IFLA_VFINFO_LIST {
                virtual_functions = list(value)?;
            }
        }
        Ok(Self {
            index: header.index,
            name: attributes.needed_string(libc::IFLA_IFNAME)?,
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

/// Structures that are too short are left out.
fn virtual_function(bytes: &[u8]) -> Result<VirtualFunction, Malformed> {
    let mut index = None;
    let mut found = VirtualFunction::default();
    // The list repeats the VLAN, with the protocol, and takes precedence.
    let mut vlan_of_list = None;
    for (kind, value) in Attributes::parse(bytes)?.iter() {
        let kind = kind & NLA_TYPE_MASK;
        let one = || word(value, 1);
        let two = || one().zip(word(value, 2));
        match kind {
            IFLA_VF_MAC => found.mac = value.get(4..10).and_then(|mac| mac.try_into().ok()),
            IFLA_VF_VLAN => {
                found.vlan = two().and_then(|(id, qos)| Vlan::from_kernel(id, qos, ETH_P_8021Q));
            }
            IFLA_VF_VLAN_LIST => {
                vlan_of_list = outermost_vlan(value);
                // Its structures have the function's number, the list has none.
                continue;
            }
            // Of old kernels, without a minimum rate.
            IFLA_VF_TX_RATE if found.rates.is_none() => {
                found.rates = one().map(|max| Rates { min: 0, max });
            }
            IFLA_VF_RATE => found.rates = two().map(|(min, max)| Rates { min, max }),
            IFLA_VF_SPOOFCHK => found.spoof_check = switch(one()),
            IFLA_VF_TRUST => found.trust = switch(one()),
            IFLA_VF_RSS_QUERY_EN => found.query_rss = switch(one()),
            IFLA_VF_LINK_STATE => found.link_state = one().and_then(LinkState::of),
            _ => continue,
        }
        let Some(number) = word(value, 0) else {
            continue;
        };
        if index.is_some_and(|index| index != number) {
            return Err(Malformed::attribute(kind, "it is about another function"));
        }
        index = Some(number);
    }
    found.index = index.ok_or_else(|| Malformed::new("virtual function", "it has no number"))?;
    found.vlan = vlan_of_list.or(found.vlan);
    Ok(found)
}

/// The first VLAN of a list; kernels have one.
fn outermost_vlan(bytes: &[u8]) -> Option<Vlan> {
    let list = Attributes::parse(bytes).ok()?;
    let mut list = list.iter();
    let (_, value) = list.find(|(kind, _)| kind & NLA_TYPE_MASK == IFLA_VF_VLAN_INFO)?;
    let protocol = u16::from_be_bytes(value.get(12..14)?.try_into().ok()?);
    Vlan::from_kernel(word(value, 1)?, word(value, 2)?, protocol)
}

/// A setting that is on, off, or unknown to the driver.
fn switch(setting: Option<u32>) -> Option<bool> {
    setting
        .filter(|&setting| setting != SETTING_UNKNOWN)
        .map(|setting| setting != 0)
}

/// The number at a position of a structure of 32-bit numbers.
fn word(value: &[u8], position: usize) -> Option<u32> {
    let start = position * 4;
    let bytes = value.get(start..start + 4)?;
    bytes.try_into().ok().map(u32::from_ne_bytes)
}
