//! Numbers of rtnetlink about virtual functions (include/uapi/linux/rtnetlink.h, if_link.h,
//! if_ether.h; Linux 6.12).

pub(super) const IFLA_VFINFO_LIST: u16 = 22;

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

/// Size of a hardware address in struct ifla_vf_mac, in bytes.
pub(super) const MAX_ADDR_LEN: usize = 32;

pub(super) const ETH_P_8021Q: u16 = 0x8100;
pub(super) const ETH_P_8021AD: u16 = 0x88a8;
