//! Numbers of the generic netlink family `devlink` (include/uapi/linux/devlink.h, Linux 6.12).

pub(super) const DEVLINK_GENL_NAME: &str = "devlink";
pub(super) const DEVLINK_GENL_VERSION: u8 = 1;
pub(super) const DEVLINK_GENL_MCGRP_CONFIG_NAME: &str = "config";

pub(super) const DEVLINK_CMD_GET: u8 = 1;
pub(super) const DEVLINK_CMD_NEW: u8 = 3;
pub(super) const DEVLINK_CMD_DEL: u8 = 4;
pub(super) const DEVLINK_CMD_PORT_GET: u8 = 5;
pub(super) const DEVLINK_CMD_PORT_SET: u8 = 6;
pub(super) const DEVLINK_CMD_PORT_NEW: u8 = 7;
pub(super) const DEVLINK_CMD_PORT_DEL: u8 = 8;
pub(super) const DEVLINK_CMD_ESWITCH_GET: u8 = 29;
pub(super) const DEVLINK_CMD_ESWITCH_SET: u8 = 30;
pub(super) const DEVLINK_CMD_RELOAD: u8 = 37;
pub(super) const DEVLINK_CMD_PARAM_GET: u8 = 38;
pub(super) const DEVLINK_CMD_PARAM_SET: u8 = 39;
pub(super) const DEVLINK_CMD_PARAM_NEW: u8 = 40;
pub(super) const DEVLINK_CMD_PARAM_DEL: u8 = 41;
pub(super) const DEVLINK_CMD_INFO_GET: u8 = 51;
pub(super) const DEVLINK_CMD_HEALTH_REPORTER_GET: u8 = 52;
pub(super) const DEVLINK_CMD_HEALTH_REPORTER_RECOVER: u8 = 54;
pub(super) const DEVLINK_CMD_RATE_GET: u8 = 74;
pub(super) const DEVLINK_CMD_RATE_SET: u8 = 75;
pub(super) const DEVLINK_CMD_RATE_NEW: u8 = 76;
pub(super) const DEVLINK_CMD_RATE_DEL: u8 = 77;

pub(super) const DEVLINK_ATTR_BUS_NAME: u16 = 1;
pub(super) const DEVLINK_ATTR_DEV_NAME: u16 = 2;
pub(super) const DEVLINK_ATTR_PORT_INDEX: u16 = 3;
pub(super) const DEVLINK_ATTR_PORT_TYPE: u16 = 4;
pub(super) const DEVLINK_ATTR_PORT_DESIRED_TYPE: u16 = 5;
pub(super) const DEVLINK_ATTR_PORT_NETDEV_IFINDEX: u16 = 6;
pub(super) const DEVLINK_ATTR_PORT_NETDEV_NAME: u16 = 7;
pub(super) const DEVLINK_ATTR_PORT_IBDEV_NAME: u16 = 8;
pub(super) const DEVLINK_ATTR_PORT_SPLIT_GROUP: u16 = 10;
pub(super) const DEVLINK_ATTR_ESWITCH_MODE: u16 = 25;
pub(super) const DEVLINK_ATTR_ESWITCH_INLINE_MODE: u16 = 26;
pub(super) const DEVLINK_ATTR_ESWITCH_ENCAP_MODE: u16 = 62;
pub(super) const DEVLINK_ATTR_PORT_FLAVOUR: u16 = 77;
pub(super) const DEVLINK_ATTR_PORT_NUMBER: u16 = 78;
pub(super) const DEVLINK_ATTR_PORT_SPLIT_SUBPORT_NUMBER: u16 = 79;
pub(super) const DEVLINK_ATTR_PARAM: u16 = 80;
pub(super) const DEVLINK_ATTR_PARAM_NAME: u16 = 81;
pub(super) const DEVLINK_ATTR_PARAM_GENERIC: u16 = 82;
pub(super) const DEVLINK_ATTR_PARAM_TYPE: u16 = 83;
pub(super) const DEVLINK_ATTR_PARAM_VALUES_LIST: u16 = 84;
pub(super) const DEVLINK_ATTR_PARAM_VALUE: u16 = 85;
pub(super) const DEVLINK_ATTR_PARAM_VALUE_DATA: u16 = 86;
pub(super) const DEVLINK_ATTR_PARAM_VALUE_CMODE: u16 = 87;
pub(super) const DEVLINK_ATTR_INFO_DRIVER_NAME: u16 = 98;
pub(super) const DEVLINK_ATTR_INFO_SERIAL_NUMBER: u16 = 99;
pub(super) const DEVLINK_ATTR_INFO_VERSION_FIXED: u16 = 100;
pub(super) const DEVLINK_ATTR_INFO_VERSION_RUNNING: u16 = 101;
pub(super) const DEVLINK_ATTR_INFO_VERSION_STORED: u16 = 102;
pub(super) const DEVLINK_ATTR_INFO_VERSION_NAME: u16 = 103;
pub(super) const DEVLINK_ATTR_INFO_VERSION_VALUE: u16 = 104;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER: u16 = 114;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER_NAME: u16 = 115;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER_STATE: u16 = 116;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER_ERR_COUNT: u16 = 117;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER_RECOVER_COUNT: u16 = 118;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER_GRACEFUL_PERIOD: u16 = 120;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER_AUTO_RECOVER: u16 = 121;
pub(super) const DEVLINK_ATTR_PORT_PCI_PF_NUMBER: u16 = 127;
pub(super) const DEVLINK_ATTR_PORT_PCI_VF_NUMBER: u16 = 128;
pub(super) const DEVLINK_ATTR_RELOAD_FAILED: u16 = 136;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER_DUMP_TS_NS: u16 = 137;
pub(super) const DEVLINK_ATTR_NETNS_ID: u16 = 140;
pub(super) const DEVLINK_ATTR_HEALTH_REPORTER_AUTO_DUMP: u16 = 141;
pub(super) const DEVLINK_ATTR_PORT_FUNCTION: u16 = 145;
pub(super) const DEVLINK_ATTR_INFO_BOARD_SERIAL_NUMBER: u16 = 146;
pub(super) const DEVLINK_ATTR_PORT_LANES: u16 = 147;
pub(super) const DEVLINK_ATTR_PORT_SPLITTABLE: u16 = 148;
pub(super) const DEVLINK_ATTR_PORT_EXTERNAL: u16 = 149;
pub(super) const DEVLINK_ATTR_PORT_CONTROLLER_NUMBER: u16 = 150;
pub(super) const DEVLINK_ATTR_RELOAD_ACTION: u16 = 153;
pub(super) const DEVLINK_ATTR_RELOAD_ACTIONS_PERFORMED: u16 = 154;
pub(super) const DEVLINK_ATTR_DEV_STATS: u16 = 156;
pub(super) const DEVLINK_ATTR_RELOAD_STATS: u16 = 157;
pub(super) const DEVLINK_ATTR_RELOAD_STATS_ENTRY: u16 = 158;
pub(super) const DEVLINK_ATTR_RELOAD_STATS_LIMIT: u16 = 159;
pub(super) const DEVLINK_ATTR_RELOAD_STATS_VALUE: u16 = 160;
pub(super) const DEVLINK_ATTR_REMOTE_RELOAD_STATS: u16 = 161;
pub(super) const DEVLINK_ATTR_RELOAD_ACTION_INFO: u16 = 162;
pub(super) const DEVLINK_ATTR_RELOAD_ACTION_STATS: u16 = 163;
pub(super) const DEVLINK_ATTR_PORT_PCI_SF_NUMBER: u16 = 164;
pub(super) const DEVLINK_ATTR_RATE_TYPE: u16 = 165;
pub(super) const DEVLINK_ATTR_RATE_TX_SHARE: u16 = 166;
pub(super) const DEVLINK_ATTR_RATE_TX_MAX: u16 = 167;
pub(super) const DEVLINK_ATTR_RATE_NODE_NAME: u16 = 168;
pub(super) const DEVLINK_ATTR_RATE_PARENT_NODE_NAME: u16 = 169;
pub(super) const DEVLINK_ATTR_NESTED_DEVLINK: u16 = 175;
pub(super) const DEVLINK_ATTR_RATE_TX_PRIORITY: u16 = 177;
pub(super) const DEVLINK_ATTR_RATE_TX_WEIGHT: u16 = 178;

/// In DEVLINK_ATTR_PORT_FUNCTION (enum devlink_port_function_attr).
pub(super) const DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR: u16 = 1;
pub(super) const DEVLINK_PORT_FN_ATTR_STATE: u16 = 2;
pub(super) const DEVLINK_PORT_FN_ATTR_OPSTATE: u16 = 3;
/// struct nla_bitfield32: u32 value, u32 selector.
pub(super) const DEVLINK_PORT_FN_ATTR_CAPS: u16 = 4;
pub(super) const DEVLINK_PORT_FN_ATTR_DEVLINK: u16 = 5;
pub(super) const DEVLINK_PORT_FN_ATTR_MAX_IO_EQS: u16 = 6;

/// enum devlink_port_flavour.
pub(super) const DEVLINK_PORT_FLAVOUR_PHYSICAL: u16 = 0;
pub(super) const DEVLINK_PORT_FLAVOUR_CPU: u16 = 1;
pub(super) const DEVLINK_PORT_FLAVOUR_DSA: u16 = 2;
pub(super) const DEVLINK_PORT_FLAVOUR_PCI_PF: u16 = 3;
pub(super) const DEVLINK_PORT_FLAVOUR_PCI_VF: u16 = 4;
pub(super) const DEVLINK_PORT_FLAVOUR_VIRTUAL: u16 = 5;
pub(super) const DEVLINK_PORT_FLAVOUR_UNUSED: u16 = 6;
pub(super) const DEVLINK_PORT_FLAVOUR_PCI_SF: u16 = 7;

/// enum devlink_eswitch_mode.
pub(super) const DEVLINK_ESWITCH_MODE_LEGACY: u16 = 0;

/// Longest hardware address (include/linux/netdevice.h), in bytes.
pub(super) const MAX_ADDR_LEN: usize = 32;

/// Types of parameters are those of attributes (enum in include/net/netlink.h).
pub(super) const NLA_U8: u8 = 1;
pub(super) const NLA_U16: u8 = 2;
pub(super) const NLA_U32: u8 = 3;
pub(super) const NLA_U64: u8 = 4;
pub(super) const NLA_STRING: u8 = 5;
pub(super) const NLA_FLAG: u8 = 6;

/// Room for a parameter's string, with its NUL (include/net/devlink.h), in bytes.
pub(super) const DEVLINK_PARAM_MAX_STRING_VALUE: usize = 32;
