//! What the guest made of a device: a part of what is said of NICs and disks.

use devices::virtio::pci::{KickPath, QueueDescription};
use devices::virtio::status::DRIVER_OK;
use serde::Serialize;
use utoipa::ToSchema;

use super::queue_watch::WatchInfo;
use crate::machine::{DeviceStatus, WatchStatus};

/// How a queue is kicked.
#[derive(Debug, Serialize, ToSchema)]
pub(super) enum Kick {
    /// Through this process: the guest has not mapped the device, or nothing better can be had.
    Exit,
    /// An eventfd inside KVM: one exit, no thread of this process.
    Eventfd,
    /// The device's own doorbell page: a store without an exit.
    Doorbell,
}

/// A virtqueue.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct QueueInfo {
    /// Its index.
    index: u16,
    /// Entries that the driver chose; the largest possible number before that.
    size: u16,
    /// The largest possible number.
    max_size: u16,
    /// Whether the driver enabled it.
    enabled: bool,
    /// Its MSI-X vector, if it has one.
    vector: Option<u16>,
    /// How it is kicked.
    kick: Kick,
    /// What the watch of its ring saw last; none if nobody watches (`ring_watch`).
    watch: Option<WatchInfo>,
}

impl QueueInfo {
    fn new(queue: &QueueDescription, watch: Option<&WatchStatus>) -> Self {
        Self {
            watch: watch.map(WatchInfo::from),
            index: queue.index,
            size: queue.size,
            max_size: queue.max_size,
            enabled: queue.enabled,
            vector: queue.vector,
            kick: match queue.kick {
                KickPath::Exit => Kick::Exit,
                KickPath::Eventfd => Kick::Eventfd,
                KickPath::Doorbell => Kick::Doorbell,
            },
        }
    }
}

/// A virtio device as the guest's driver has set it up.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DeviceInfo {
    /// The device status register (virtio 1.3, 2.1).
    status: u8,
    /// Whether the driver runs the device.
    driver_ok: bool,
    /// Whether the device or its driver gave up: only a reset by the driver helps.
    broken: bool,
    /// The features that the driver is offered, by name; `bit N` for one without.
    features_offered: Vec<String>,
    /// The features that were agreed on; none before that.
    features_negotiated: Option<Vec<String>>,
    /// All its queues, the control queue among them.
    queues: Vec<QueueInfo>,
}

impl From<&DeviceStatus> for DeviceInfo {
    fn from(status: &DeviceStatus) -> Self {
        let device = &status.description;
        // Where nobody watches there is nothing for any queue.
        let watches = status.watch.iter().map(Some).chain(std::iter::repeat(None));
        let queues = device.queues.iter().zip(watches);
        let names = |features| feature_names(features, device.device_type);
        Self {
            status: device.status,
            driver_ok: device.status & DRIVER_OK != 0,
            broken: device.is_broken(),
            features_offered: names(device.offered),
            features_negotiated: device.negotiated.map(names),
            queues: queues
                .map(|(queue, watch)| QueueInfo::new(queue, watch))
                .collect(),
        }
    }
}

fn feature_names(features: u64, device_type: u32) -> Vec<String> {
    let bits = (0..u64::BITS).filter(|bit| features & (1 << bit) != 0);
    bits.map(|bit| {
        vdpa::features::name(bit, device_type).map_or_else(|| format!("bit {bit}"), str::to_owned)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_have_names() {
        assert_eq!(
            feature_names(1 << 5 | 1 << 32 | 1 << 49, 1),
            ["MAC", "VERSION_1", "bit 49"]
        );
    }
}
