//! Numbers of rtnetlink's links (include/uapi/linux/rtnetlink.h, if_link.h, if_bridge.h, if.h;
//! Linux 6.12).

pub(crate) const RTM_NEWLINK: u16 = 16;
pub(crate) const RTM_GETLINK: u16 = 18;
pub(crate) const RTM_SETLINK: u16 = 19;
/// Of family AF_BRIDGE: removes VLANs from a port.
pub(super) const RTM_DELLINK: u16 = 17;

/// Of family AF_BRIDGE: an address behind a port (include/uapi/linux/neighbour.h).
pub(super) const RTM_NEWNEIGH: u16 = 28;

pub(crate) const AF_UNSPEC: u8 = 0;
pub(super) const AF_BRIDGE: u8 = 7;

pub(super) const IFF_UP: u32 = 1;
pub(super) const IFF_LOWER_UP: u32 = 1 << 16;

/// In `ndm_state`: the entry is neither permanent nor static.
pub(super) const NUD_REACHABLE: u16 = 2;
/// In `ndm_flags`: as if the entry had just been used.
pub(super) const NTF_USE: u8 = 1;
/// In `ndm_flags`: the entry is the bridge's, not the port's.
pub(super) const NTF_MASTER: u8 = 1 << 2;
pub(super) const NDA_LLADDR: u16 = 2;
pub(super) const NDA_VLAN: u16 = 5;

pub(super) const IFLA_ADDRESS: u16 = 1;
pub(crate) const IFLA_IFNAME: u16 = 3;
pub(super) const IFLA_MTU: u16 = 4;
pub(super) const IFLA_MASTER: u16 = 10;
pub(super) const IFLA_LINKINFO: u16 = 18;
pub(super) const IFLA_AF_SPEC: u16 = 26;
pub(super) const IFLA_NET_NS_FD: u16 = 28;
pub(crate) const IFLA_EXT_MASK: u16 = 29;
pub(super) const IFLA_PHYS_SWITCH_ID: u16 = 36;
pub(super) const IFLA_PHYS_PORT_NAME: u16 = 38;
/// Attributes IFLA_ALT_IFNAME.
pub(super) const IFLA_PROP_LIST: u16 = 52;
pub(super) const IFLA_ALT_IFNAME: u16 = 53;
pub(super) const IFLA_PARENT_DEV_NAME: u16 = 56;
pub(super) const IFLA_PARENT_DEV_BUS_NAME: u16 = 57;

/// In IFLA_LINKINFO.
pub(super) const IFLA_INFO_KIND: u16 = 1;
pub(super) const IFLA_INFO_DATA: u16 = 2;

/// In IFLA_INFO_DATA of a bridge.
pub(super) const IFLA_BR_VLAN_FILTERING: u16 = 7;

/// In IFLA_AF_SPEC of AF_BRIDGE: struct bridge_vlan_info, u16 flags, u16 vid.
pub(super) const IFLA_BRIDGE_VLAN_INFO: u16 = 2;
pub(super) const BRIDGE_VLAN_INFO_PVID: u16 = 1 << 1;
pub(super) const BRIDGE_VLAN_INFO_UNTAGGED: u16 = 1 << 2;
pub(super) const BRIDGE_VLAN_INFO_RANGE_BEGIN: u16 = 1 << 3;
pub(super) const BRIDGE_VLAN_INFO_RANGE_END: u16 = 1 << 4;

pub(crate) const RTEXT_FILTER_VF: u32 = 1;
pub(super) const RTEXT_FILTER_BRVLAN_COMPRESSED: u32 = 1 << 2;
/// Counters would make the answer several times as long.
pub(crate) const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;

/// The longest name of an interface, in bytes: IFNAMSIZ without the NUL.
pub(crate) const NAME_MAX: usize = 15;
/// The longest alternative name, in bytes: ALTIFNAMSIZ without the NUL.
pub(super) const ALTERNATIVE_NAME_MAX: usize = 127;
/// The longest phys_switch_id, in bytes (MAX_PHYS_ITEM_ID_LEN).
pub(super) const SWITCH_ID_MAX: usize = 32;
