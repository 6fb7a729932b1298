//! The settings of a virtual function, checked before they are sent.

use std::fmt;

use netlink_packet_core::{DefaultNla, Nla as _};
use netlink_packet_route::link::{
    VfInfo, VfInfoLinkState, VfInfoMac, VfInfoRate, VfInfoSpoofCheck, VfInfoTrust, VfLinkState,
    VfVlan, VfVlanInfo, VlanProtocol as KnownProtocol,
};

use crate::error::{Error, ErrorKind};

/// EtherTypes (include/uapi/linux/if_ether.h).
pub(super) const ETH_P_8021Q: u16 = 0x8100;
const ETH_P_8021AD: u16 = 0x88a8;

/// The largest VLAN; 4095 is reserved (IEEE 802.1Q).
const VLAN_MAX: u16 = 4094;

/// The largest priority.
const QOS_MAX: u8 = 7;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

/// The tag of a VLAN's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VlanProtocol {
    /// 802.1Q, the usual one.
    Dot1Q,
    /// 802.1ad, the outer one of two.
    Dot1Ad,
    /// Another EtherType, which only a driver reports.
    Other(u16),
}

impl VlanProtocol {
    pub(crate) fn of(ether_type: u16) -> Self {
        match ether_type {
            ETH_P_8021Q => Self::Dot1Q,
            ETH_P_8021AD => Self::Dot1Ad,
            other => Self::Other(other),
        }
    }

    pub(crate) fn ether_type(self) -> u16 {
        match self {
            Self::Dot1Q => ETH_P_8021Q,
            Self::Dot1Ad => ETH_P_8021AD,
            Self::Other(other) => other,
        }
    }
}

impl fmt::Display for VlanProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dot1Q => f.write_str("802.1Q"),
            Self::Dot1Ad => f.write_str("802.1ad"),
            Self::Other(other) => write!(f, "{other:#06x}"),
        }
    }
}

/// The VLAN that a NIC assigns to a virtual function's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vlan {
    id: u16,
    qos: u8,
    protocol: VlanProtocol,
}

impl Vlan {
    /// No VLAN.
    pub const NONE: Self = Self {
        id: 0,
        qos: 0,
        protocol: VlanProtocol::Dot1Q,
    };

    /// A VLAN of 1 to 4094, with a priority of 0 to 7; 0 and 0 are no VLAN.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn new(id: u16, qos: u8, protocol: VlanProtocol) -> Result<Self, Error> {
        if id > VLAN_MAX {
            return Err(invalid(format!(
                "{id} is not a VLAN: use 1 to {VLAN_MAX}, or 0 for none"
            )));
        }
        if qos > QOS_MAX {
            return Err(invalid(format!(
                "{qos} is not a priority: qos is 0 to {QOS_MAX}"
            )));
        }
        if id == 0 && (qos != 0 || protocol != VlanProtocol::Dot1Q) {
            return Err(invalid(
                "qos and proto need a VLAN: give `vlan` a number other than 0",
            ));
        }
        Ok(Self { id, qos, protocol })
    }

    /// A driver's values. `None` if out of range.
    pub(crate) fn from_kernel(id: u32, qos: u32, ether_type: u16) -> Option<Self> {
        Some(Self {
            id: u16::try_from(id).ok().filter(|&id| id <= VLAN_MAX + 1)?,
            qos: u8::try_from(qos).ok().filter(|&qos| qos <= QOS_MAX)?,
            protocol: VlanProtocol::of(ether_type),
        })
    }

    /// Its attribute in the list of a virtual function.
    fn attribute(&self, virtual_function: u32) -> VfVlan {
        let known = match self.protocol {
            VlanProtocol::Dot1Ad => KnownProtocol::Ieee8021Ad,
            VlanProtocol::Dot1Q | VlanProtocol::Other(_) => KnownProtocol::Ieee8021Q,
        };
        let (id, qos) = (u32::from(self.id), u32::from(self.qos));
        let attribute = VfVlan::Info(VfVlanInfo::new(virtual_function, id, qos, known));
        let VlanProtocol::Other(other) = self.protocol else {
            return attribute;
        };
        // The crate has no other protocol, and a driver gets back what it reported.
        let mut bytes = vec![0; attribute.value_len()];
        attribute.emit_value(&mut bytes);
        if let Some(protocol) = bytes.get_mut(12..14) {
            protocol.copy_from_slice(&other.to_be_bytes());
        }
        VfVlan::Other(DefaultNla::new(attribute.kind(), bytes))
    }

    /// Its number; 0 for no VLAN.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// The priority of its frames.
    #[must_use]
    pub fn qos(&self) -> u8 {
        self.qos
    }

    /// The tag of its frames.
    #[must_use]
    pub fn protocol(&self) -> VlanProtocol {
        self.protocol
    }
}

/// Limits on the transmit rate of a virtual function, in Mbit/s; 0 is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rates {
    /// Guaranteed rate.
    pub min: u32,
    /// Maximum rate.
    pub max: u32,
}

impl Rates {
    /// Valid limits.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn new(min: u32, max: u32) -> Result<Self, Error> {
        if max != 0 && min > max {
            return Err(invalid(format!(
                "min_tx_rate {min} is above max_tx_rate {max} (Mbit/s; 0 is no limit)"
            )));
        }
        Ok(Self { min, max })
    }
}

/// A virtual function's end of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// As the physical function's.
    Auto,
    /// Always up: virtual functions reach each other without a cable.
    Enable,
    /// Always down.
    Disable,
}

impl LinkState {
    pub(super) fn of(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Auto),
            1 => Some(Self::Enable),
            2 => Some(Self::Disable),
            _ => None,
        }
    }
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Enable => "enable",
            Self::Disable => "disable",
        })
    }
}

/// One setting of a virtual function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Its address; zero lets it choose one.
    Mac([u8; 6]),
    /// Its VLAN.
    Vlan(Vlan),
    /// Its rates.
    Rates(Rates),
    /// Whether frames with a foreign sender address are dropped.
    SpoofCheck(bool),
    /// Its end of the link.
    LinkState(LinkState),
    /// Whether it may change its address, or receive everything.
    Trust(bool),
}

/// The settings of a virtual function, as the driver of the physical one reports them. `None` is an
/// unknown setting.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VirtualFunction {
    /// Its number, from 0.
    pub index: u32,
    /// Its address; zero if it chooses one itself.
    pub mac: Option<[u8; 6]>,
    /// The VLAN that the NIC assigns to its frames.
    pub vlan: Option<Vlan>,
    /// Whether frames with a foreign sender address are dropped.
    pub spoof_check: Option<bool>,
    /// Whether it may change its address, or receive everything.
    pub trust: Option<bool>,
    /// Limits on its transmit rate.
    pub rates: Option<Rates>,
    /// Its end of the link.
    pub link_state: Option<LinkState>,
    /// Whether it may read the RSS configuration.
    pub query_rss: Option<bool>,
}

impl Setting {
    /// Fails for an impossible setting.
    pub(super) fn check(&self) -> Result<(), Error> {
        match self {
            Self::Mac([first, ..]) if first & 1 != 0 => Err(invalid(
                "a virtual function cannot have a multicast address",
            )),
            // Checked again, because the fields are public.
            Self::Rates(rates) => Rates::new(rates.min, rates.max).map(drop),
            _ => Ok(()),
        }
    }

    /// The current value of the same setting, if the driver reports it.
    pub(crate) fn former(&self, now: &VirtualFunction) -> Option<Self> {
        match self {
            Self::Mac(_) => now.mac.map(Self::Mac),
            Self::Vlan(_) => now.vlan.map(Self::Vlan),
            Self::Rates(_) => now.rates.map(Self::Rates),
            Self::SpoofCheck(_) => now.spoof_check.map(Self::SpoofCheck),
            Self::LinkState(_) => now.link_state.map(Self::LinkState),
            Self::Trust(_) => now.trust.map(Self::Trust),
        }
    }

    /// The setting's name, as part of a sentence.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Mac(_) => "MAC address",
            Self::Vlan(_) => "VLAN",
            Self::Rates(_) => "rates",
            Self::SpoofCheck(_) => "spoof check",
            Self::LinkState(_) => "link state",
            Self::Trust(_) => "trust",
        }
    }

    /// The attribute that sets it for a virtual function.
    pub(crate) fn attribute(&self, virtual_function: u32) -> VfInfo {
        match self {
            Self::Mac(mac) => VfInfo::Mac(VfInfoMac::new(virtual_function, mac)),
            Self::Vlan(vlan) => VfInfo::VlanList(vec![vlan.attribute(virtual_function)]),
            Self::Rates(rates) => {
                VfInfo::Rate(VfInfoRate::new(virtual_function, rates.min, rates.max))
            }
            Self::SpoofCheck(on) => {
                VfInfo::SpoofCheck(VfInfoSpoofCheck::new(virtual_function, *on))
            }
            Self::LinkState(state) => {
                let state = match state {
                    LinkState::Auto => VfLinkState::Auto,
                    LinkState::Enable => VfLinkState::Enable,
                    LinkState::Disable => VfLinkState::Disable,
                };
                VfInfo::LinkState(VfInfoLinkState::new(virtual_function, state))
            }
            Self::Trust(on) => VfInfo::Trust(VfInfoTrust::new(virtual_function, *on)),
        }
    }
}
