//! A queue's counters, with the vendor's names (`VDPA_CMD_DEV_VSTATS_GET`).

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VQ;

use super::netlink::attributes::{Attributes, number, text};
use super::netlink::error::Malformed;
use super::netlink::message::Message;
use super::uapi::*;

/// The role of a network device's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueType {
    /// Frames to the driver.
    Receive,
    /// Frames from the driver.
    Transmit,
    /// The control virtqueue.
    Control,
}

/// Counters of one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VendorStats {
    /// The device's name.
    pub name: String,
    /// Virtio device type: 1 network (the kernel has no others).
    pub device_id: u32,
    /// Feature bits that the driver negotiated.
    pub negotiated_features: u64,
    /// Queue pairs of a device with MQ or RSS.
    pub max_vq_pairs: Option<u16>,
    /// The queue's index.
    pub queue_index: u32,
    /// Names and values in the vendor's order.
    pub counters: Vec<(String, u64)>,
}

impl VendorStats {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let mut counters = Vec::new();
        let mut name = None;
        for (kind, value) in attributes.iter() {
            match kind {
                VDPA_ATTR_DEV_VENDOR_ATTR_NAME => name = Some(text(value)),
                VDPA_ATTR_DEV_VENDOR_ATTR_VALUE => {
                    let name = name
                        .take()
                        .ok_or_else(|| Malformed::attribute(kind, "it has no name before it"))?;
                    counters.push((name, number(kind, value)?));
                }
                _ => {}
            }
        }
        let features = attributes.u64(VDPA_ATTR_DEV_NEGOTIATED_FEATURES)?;
        Ok(Self {
            name: attributes.needed_string(VDPA_ATTR_DEV_NAME)?,
            device_id: attributes.needed_u32(VDPA_ATTR_DEV_ID)?,
            negotiated_features: features.unwrap_or_default(),
            max_vq_pairs: attributes.u16(VDPA_ATTR_DEV_NET_CFG_MAX_VQP)?,
            queue_index: attributes.needed_u32(VDPA_ATTR_DEV_QUEUE_INDEX)?,
            counters,
        })
    }

    /// The role of the queue in a network device. Without MQ there is one pair, and the control
    /// queue has index 2 (virtio 1.3, 5.1.2). iproute2 6.15 then counts no pair and labels queue 0
    /// as the control queue.
    #[must_use]
    pub fn queue_type(&self) -> Option<QueueType> {
        if self.device_id != VIRTIO_ID_NET {
            return None;
        }
        let pairs = u32::from(self.max_vq_pairs.unwrap_or(1));
        let control = self.negotiated_features & 1 << VIRTIO_NET_F_CTRL_VQ != 0;
        Some(if control && self.queue_index == 2 * pairs {
            QueueType::Control
        } else if self.queue_index.is_multiple_of(2) {
            QueueType::Receive
        } else {
            QueueType::Transmit
        })
    }
}
