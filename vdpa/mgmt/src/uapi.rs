//! Numbers of the generic netlink family `vdpa` (include/uapi/linux/vdpa.h, Linux 6.12).

pub(super) const VDPA_GENL_NAME: &str = "vdpa";
pub(super) const VDPA_GENL_VERSION: u8 = 1;

pub(super) const VDPA_CMD_MGMTDEV_NEW: u8 = 1;
pub(super) const VDPA_CMD_MGMTDEV_GET: u8 = 2;
pub(super) const VDPA_CMD_DEV_NEW: u8 = 3;
pub(super) const VDPA_CMD_DEV_DEL: u8 = 4;
pub(super) const VDPA_CMD_DEV_GET: u8 = 5;
pub(super) const VDPA_CMD_DEV_CONFIG_GET: u8 = 6;
pub(super) const VDPA_CMD_DEV_VSTATS_GET: u8 = 7;
pub(super) const VDPA_CMD_DEV_ATTR_SET: u8 = 8;

pub(super) const VDPA_ATTR_MGMTDEV_BUS_NAME: u16 = 1;
pub(super) const VDPA_ATTR_MGMTDEV_DEV_NAME: u16 = 2;
pub(super) const VDPA_ATTR_MGMTDEV_SUPPORTED_CLASSES: u16 = 3;
pub(super) const VDPA_ATTR_DEV_NAME: u16 = 4;
pub(super) const VDPA_ATTR_DEV_ID: u16 = 5;
pub(super) const VDPA_ATTR_DEV_VENDOR_ID: u16 = 6;
pub(super) const VDPA_ATTR_DEV_MAX_VQS: u16 = 7;
pub(super) const VDPA_ATTR_DEV_MAX_VQ_SIZE: u16 = 8;
pub(super) const VDPA_ATTR_DEV_MIN_VQ_SIZE: u16 = 9;
pub(super) const VDPA_ATTR_DEV_NET_CFG_MACADDR: u16 = 10;
/// The header's comment says u8; the kernel writes u16.
pub(super) const VDPA_ATTR_DEV_NET_STATUS: u16 = 11;
pub(super) const VDPA_ATTR_DEV_NET_CFG_MAX_VQP: u16 = 12;
pub(super) const VDPA_ATTR_DEV_NET_CFG_MTU: u16 = 13;
pub(super) const VDPA_ATTR_DEV_NEGOTIATED_FEATURES: u16 = 14;
pub(super) const VDPA_ATTR_DEV_MGMTDEV_MAX_VQS: u16 = 15;
pub(super) const VDPA_ATTR_DEV_SUPPORTED_FEATURES: u16 = 16;
pub(super) const VDPA_ATTR_DEV_QUEUE_INDEX: u16 = 17;
pub(super) const VDPA_ATTR_DEV_VENDOR_ATTR_NAME: u16 = 18;
pub(super) const VDPA_ATTR_DEV_VENDOR_ATTR_VALUE: u16 = 19;
pub(super) const VDPA_ATTR_DEV_FEATURES: u16 = 20;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_CAPACITY: u16 = 21;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_SIZE_MAX: u16 = 22;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_BLK_SIZE: u16 = 23;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_SEG_MAX: u16 = 24;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_NUM_QUEUES: u16 = 25;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_PHY_BLK_EXP: u16 = 26;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_ALIGN_OFFSET: u16 = 27;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_MIN_IO_SIZE: u16 = 28;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_OPT_IO_SIZE: u16 = 29;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_MAX_DISCARD_SEC: u16 = 30;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_MAX_DISCARD_SEG: u16 = 31;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_DISCARD_SEC_ALIGN: u16 = 32;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_MAX_WRITE_ZEROES_SEC: u16 = 33;
pub(super) const VDPA_ATTR_DEV_BLK_CFG_MAX_WRITE_ZEROES_SEG: u16 = 34;
pub(super) const VDPA_ATTR_DEV_BLK_READ_ONLY: u16 = 35;
pub(super) const VDPA_ATTR_DEV_BLK_FLUSH: u16 = 36;
