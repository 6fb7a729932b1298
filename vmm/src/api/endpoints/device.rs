//! The state of a device in the guest: a part of the description of NICs and disks.

use bellhop_api::machine::{DeviceInfo, DirtyTracking, Kick, QueueInfo, WatchInfo};
use devices::virtio::backend::DirtyTracking as Tracking;
use devices::virtio::pci::{KickPath, QueueDescription};
use devices::virtio::status::DRIVER_OK;

use crate::machine::DeviceStatus;

fn queue_info(queue: &QueueDescription, watch: Option<WatchInfo>) -> QueueInfo {
    QueueInfo {
        watch,
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

impl From<&DeviceStatus> for DeviceInfo {
    fn from(status: &DeviceStatus) -> Self {
        let device = &status.description;
        // Without the ring watch there is no entry for any queue.
        let watches = status.watch.iter().copied().map(Some);
        let watches = watches.chain(std::iter::repeat(None));
        let queues = device.queues.iter().zip(watches);
        let names = |features| feature_names(features, device.device_type);
        Self {
            status: device.status,
            driver_ok: device.status & DRIVER_OK != 0,
            broken: device.is_broken(),
            features_offered: names(device.offered),
            features_negotiated: device.negotiated.map(names),
            queues: queues
                .map(|(queue, watch)| queue_info(queue, watch))
                .collect(),
            io_errors: device.io_errors,
            dirty_tracking: device.dirty_tracking.map(|tracking| match tracking {
                Tracking::Mappings => DirtyTracking::Mappings,
                Tracking::ShadowQueues => DirtyTracking::ShadowQueues,
                Tracking::AllMemory => DirtyTracking::AllMemory,
            }),
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
