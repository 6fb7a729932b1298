//! VLANs of a bridge's ports (net/bridge/br_vlan.c, br_netlink.c).

use std::fmt;
use std::str::FromStr;

use netlink_packet_route::link::{
    AfSpecBridge, BridgeVlanInfo, BridgeVlanInfoFlags, LinkAttribute,
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;

/// In IFLA_AF_SPEC of AF_BRIDGE.
pub(super) const IFLA_BRIDGE_VLAN_INFO: u16 = 2;

/// The number of a VLAN, 1 to 4094 (IEEE 802.1Q: 0 is none, 4095 is reserved).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct VlanId(u16);

impl VlanId {
    /// The largest number.
    pub const MAX: u16 = 4094;

    /// The number.
    #[must_use]
    pub fn get(self) -> u16 {
        self.0
    }
}

impl TryFrom<u16> for VlanId {
    type Error = Error;

    fn try_from(number: u16) -> Result<Self, Error> {
        if (1..=Self::MAX).contains(&number) {
            return Ok(Self(number));
        }
        Err(no_vlan(number))
    }
}

impl From<VlanId> for u16 {
    fn from(vlan: VlanId) -> Self {
        vlan.0
    }
}

impl FromStr for VlanId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let number = text.parse::<u16>().ok();
        number
            .and_then(|number| Self::try_from(number).ok())
            .ok_or_else(|| no_vlan(format_args!("{text:?}")))
    }
}

fn no_vlan(text: impl fmt::Display) -> Error {
    let message = format!("{text} is not a VLAN: use 1 to {}", VlanId::MAX);
    Error::new(ErrorKind::BadName, message)
}

impl fmt::Display for VlanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A VLAN of a bridge's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortVlan {
    /// Its number.
    pub vlan: VlanId,
    /// Whether untagged frames that arrive are in this VLAN. At most one of a port is.
    pub pvid: bool,
    /// Whether frames leave untagged.
    pub untagged: bool,
}

impl PortVlan {
    /// The only VLAN of a port whose neighbour does not use VLANs.
    #[must_use]
    pub fn access(vlan: VlanId) -> Self {
        Self {
            vlan,
            pvid: true,
            untagged: true,
        }
    }

    fn of(vlan: VlanId, flags: BridgeVlanInfoFlags) -> Self {
        Self {
            vlan,
            pvid: flags.contains(BridgeVlanInfoFlags::Pvid),
            untagged: flags.contains(BridgeVlanInfoFlags::Untagged),
        }
    }

    /// The attribute that adds a port to it, or removes it.
    pub(super) fn attribute(self) -> LinkAttribute {
        let mut flags = BridgeVlanInfoFlags::empty();
        flags.set(BridgeVlanInfoFlags::Pvid, self.pvid);
        flags.set(BridgeVlanInfoFlags::Untagged, self.untagged);
        let vid = self.vlan.get();
        let vlan = AfSpecBridge::VlanInfo(BridgeVlanInfo { flags, vid });
        LinkAttribute::AfSpecBridge(vec![vlan])
    }
}

/// Reads the VLANs of one AF_BRIDGE message, in which adjacent VLANs with equal flags may form a
/// range: its first and its last. A VLAN is never left out: a port without it is another port.
pub(super) fn of_message(attributes: &[u8]) -> Result<Vec<PortVlan>, Malformed> {
    let mut found: Vec<PortVlan> = Vec::new();
    for list in Attributes::parse(attributes)?.each(libc::IFLA_AF_SPEC) {
        let mut begun: Option<(u16, BridgeVlanInfoFlags)> = None;
        // Ranges of all VLANs are at most 4094 attributes of 8 bytes; Attributes has a separate
        // limit.
        let kind = IFLA_BRIDGE_VLAN_INFO;
        for bytes in Attributes::parse(list)?.each(kind) {
            let known = bytes.get(..BridgeVlanInfo::LENGTH).unwrap_or(bytes);
            let BridgeVlanInfo { flags, vid } = BridgeVlanInfo::try_from(known)
                .map_err(|error| Malformed::attribute(kind, error.to_string()))?;
            let bad = |_| Malformed::attribute(kind, format!("{vid} is not a VLAN"));
            let vlan = VlanId::try_from(vid).map_err(bad)?;
            if flags.contains(BridgeVlanInfoFlags::RangeBegin) {
                begun = Some((vid, flags));
                continue;
            }
            let ends = flags.contains(BridgeVlanInfoFlags::RangeEnd);
            let (first, flags) = match begun.take() {
                Some(range) if ends => range,
                None if !ends => (vid, flags),
                _ => return Err(Malformed::attribute(kind, "a range has one end only")),
            };
            if first > vlan.get() {
                return Err(Malformed::attribute(kind, "a range ends before it begins"));
            }
            if found.last().is_some_and(|last| last.vlan.get() >= first) {
                return Err(Malformed::attribute(kind, "VLANs are out of order"));
            }
            let range = (first..=vlan.get()).filter_map(|number| VlanId::try_from(number).ok());
            found.extend(range.map(|vlan| PortVlan::of(vlan, flags)));
        }
        if begun.is_some() {
            return Err(Malformed::new("VLANs", "a range has one end only"));
        }
    }
    Ok(found)
}
