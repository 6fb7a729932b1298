//! A device's configuration space, as the kernel reports it (`VDPA_CMD_DEV_CONFIG_GET`; virtio 1.3,
//! 5.1.4 and 5.2.4).

use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET};
use virtio_bindings::virtio_net::{VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP};

use super::netlink::attributes::Attributes;
use super::netlink::error::Malformed;
use super::netlink::message::Message;
use super::uapi::*;

/// The configuration that a device reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The device's name.
    pub name: String,
    /// Virtio device type: 1 network, 2 block.
    pub device_id: u32,
    /// Feature bits that a driver negotiated; none before FEATURES_OK.
    pub negotiated_features: Option<u64>,
    /// Feature bits that the device offers (kernel 6.1 and later).
    pub device_features: Option<u64>,
    /// The configuration of its class.
    pub class: ClassConfig,
}

/// Configuration by class of device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClassConfig {
    /// A network device.
    Net(NetConfig),
    /// A block device.
    Block(BlkConfig),
    /// A class that the kernel's family does not describe.
    Other,
}

/// Configuration of a network device. A field is `None` if the device does not offer its feature.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetConfig {
    /// Its address.
    pub mac: Option<[u8; 6]>,
    /// `status` of the configuration space: VIRTIO_NET_S_LINK_UP, VIRTIO_NET_S_ANNOUNCE.
    pub status: Option<u16>,
    /// Maximum number of queue pairs.
    pub max_vq_pairs: Option<u16>,
    /// The largest frame's payload, in bytes.
    pub mtu: Option<u16>,
}

impl NetConfig {
    /// Whether the link is up, if the device reports it.
    #[must_use]
    pub fn link_up(&self) -> Option<bool> {
        self.status_bit(VIRTIO_NET_S_LINK_UP)
    }

    /// Whether the driver must announce itself, if the device reports it.
    #[must_use]
    pub fn announce(&self) -> Option<bool> {
        self.status_bit(VIRTIO_NET_S_ANNOUNCE)
    }

    fn status_bit(&self, bit: u32) -> Option<bool> {
        self.status.map(|status| u32::from(status) & bit != 0)
    }
}

/// Configuration of a block device. A field is `None` if the device does not offer its feature.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlkConfig {
    /// Size in sectors of 512 bytes.
    pub capacity: Option<u64>,
    /// The largest segment, in bytes.
    pub size_max: Option<u32>,
    /// The size of a block, in bytes.
    pub blk_size: Option<u32>,
    /// Maximum number of segments of a request.
    pub seg_max: Option<u32>,
    /// The number of request queues.
    pub num_queues: Option<u16>,
    /// Logical blocks in a physical one, as a power of two.
    pub physical_block_exp: Option<u8>,
    /// The first aligned logical block.
    pub alignment_offset: Option<u8>,
    /// The smallest good transfer, in logical blocks.
    pub min_io_size: Option<u16>,
    /// The best transfer, in logical blocks.
    pub opt_io_size: Option<u32>,
    /// Maximum number of sectors of a discard.
    pub max_discard_sectors: Option<u32>,
    /// Maximum number of segments of a discard.
    pub max_discard_seg: Option<u32>,
    /// The alignment of a discard, in sectors.
    pub discard_sector_alignment: Option<u32>,
    /// Maximum number of sectors of a request that writes zeroes.
    pub max_write_zeroes_sectors: Option<u32>,
    /// Maximum number of segments of such a request.
    pub max_write_zeroes_seg: Option<u32>,
    /// Whether it is read-only.
    pub read_only: Option<bool>,
    /// Whether it has a cache that can be flushed.
    pub flush: Option<bool>,
}

impl DeviceConfig {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let device_id = attributes.needed_u32(VDPA_ATTR_DEV_ID)?;
        Ok(Self {
            name: attributes.needed_string(VDPA_ATTR_DEV_NAME)?,
            device_id,
            negotiated_features: attributes.u64(VDPA_ATTR_DEV_NEGOTIATED_FEATURES)?,
            device_features: attributes.u64(VDPA_ATTR_DEV_FEATURES)?,
            class: match device_id {
                VIRTIO_ID_NET => ClassConfig::Net(net(&attributes)?),
                VIRTIO_ID_BLOCK => ClassConfig::Block(block(&attributes)?),
                _ => ClassConfig::Other,
            },
        })
    }
}

fn net(attributes: &Attributes<'_>) -> Result<NetConfig, Malformed> {
    Ok(NetConfig {
        mac: attributes.mac(VDPA_ATTR_DEV_NET_CFG_MACADDR)?,
        status: attributes.u16(VDPA_ATTR_DEV_NET_STATUS)?,
        max_vq_pairs: attributes.u16(VDPA_ATTR_DEV_NET_CFG_MAX_VQP)?,
        mtu: attributes.u16(VDPA_ATTR_DEV_NET_CFG_MTU)?,
    })
}

fn block(attributes: &Attributes<'_>) -> Result<BlkConfig, Malformed> {
    Ok(BlkConfig {
        capacity: attributes.u64(VDPA_ATTR_DEV_BLK_CFG_CAPACITY)?,
        size_max: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_SIZE_MAX)?,
        blk_size: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_BLK_SIZE)?,
        seg_max: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_SEG_MAX)?,
        num_queues: attributes.u16(VDPA_ATTR_DEV_BLK_CFG_NUM_QUEUES)?,
        physical_block_exp: attributes.u8(VDPA_ATTR_DEV_BLK_CFG_PHY_BLK_EXP)?,
        alignment_offset: attributes.u8(VDPA_ATTR_DEV_BLK_CFG_ALIGN_OFFSET)?,
        min_io_size: attributes.u16(VDPA_ATTR_DEV_BLK_CFG_MIN_IO_SIZE)?,
        opt_io_size: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_OPT_IO_SIZE)?,
        max_discard_sectors: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_MAX_DISCARD_SEC)?,
        max_discard_seg: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_MAX_DISCARD_SEG)?,
        discard_sector_alignment: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_DISCARD_SEC_ALIGN)?,
        max_write_zeroes_sectors: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_MAX_WRITE_ZEROES_SEC)?,
        max_write_zeroes_seg: attributes.u32(VDPA_ATTR_DEV_BLK_CFG_MAX_WRITE_ZEROES_SEG)?,
        read_only: attributes.flag(VDPA_ATTR_DEV_BLK_READ_ONLY)?,
        flush: attributes.flag(VDPA_ATTR_DEV_BLK_FLUSH)?,
    })
}
