//! Management devices and the vDPA devices that they created.

use super::name::MgmtDeviceName;
use super::netlink::attributes::Attributes;
use super::netlink::error::Malformed;
use super::netlink::message::Message;
use super::uapi::*;

/// A management device, on which vDPA devices are created, such as a PCI function or a simulator
/// (`VDPA_CMD_MGMTDEV_GET`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MgmtDevice {
    /// Its name, with its bus if it is on one.
    pub name: MgmtDeviceName,
    /// The supported classes of devices, as a mask of virtio device types (`1 << VIRTIO_ID_NET`,
    /// …).
    pub supported_classes: u64,
    /// Maximum number of virtqueues of one device. VDUSE reports 0 for no limit.
    pub max_supported_vqs: Option<u32>,
    /// Virtio feature bits that its devices can have (kernel 5.17 and later).
    pub supported_features: Option<u64>,
}

impl MgmtDevice {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let classes = attributes.u64(VDPA_ATTR_MGMTDEV_SUPPORTED_CLASSES)?;
        Ok(Self {
            name: MgmtDeviceName::of(&attributes)?,
            supported_classes: classes.unwrap_or_default(),
            max_supported_vqs: attributes.u32(VDPA_ATTR_DEV_MGMTDEV_MAX_VQS)?,
            supported_features: attributes.u64(VDPA_ATTR_DEV_SUPPORTED_FEATURES)?,
        })
    }

    /// Whether it can create devices of this virtio type.
    #[must_use]
    pub fn supports(&self, device_id: u32) -> bool {
        1_u64
            .checked_shl(device_id)
            .is_some_and(|class| self.supported_classes & class != 0)
    }
}

/// A vDPA device (`VDPA_CMD_DEV_GET`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdpaDevice {
    /// Its name, set at creation.
    pub name: String,
    /// The management device that created it.
    pub mgmtdev: MgmtDeviceName,
    /// Virtio device type: 1 network, 2 block.
    pub device_id: u32,
    /// The vendor's number (`get_vendor_id`): a PCI vendor, or 0.
    pub vendor_id: Option<u32>,
    /// The number of its virtqueues.
    pub max_vqs: Option<u32>,
    /// The largest ring, in entries.
    pub max_vq_size: Option<u16>,
    /// The smallest ring, in entries (kernel 5.17 and later).
    pub min_vq_size: Option<u16>,
}

impl VdpaDevice {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        Ok(Self {
            name: attributes.needed_string(VDPA_ATTR_DEV_NAME)?,
            mgmtdev: MgmtDeviceName::of(&attributes)?,
            device_id: attributes.needed_u32(VDPA_ATTR_DEV_ID)?,
            vendor_id: attributes.u32(VDPA_ATTR_DEV_VENDOR_ID)?,
            max_vqs: attributes.u32(VDPA_ATTR_DEV_MAX_VQS)?,
            max_vq_size: attributes.u16(VDPA_ATTR_DEV_MAX_VQ_SIZE)?,
            min_vq_size: attributes.u16(VDPA_ATTR_DEV_MIN_VQ_SIZE)?,
        })
    }
}
