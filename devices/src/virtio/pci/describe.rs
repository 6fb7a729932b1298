//! The description of a device at one moment, for people and for programs that watch machines.

use super::common::{CommonConfig, NO_VECTOR, QueueState};
use super::notify::{KickPath, NotifyDoorbells};
use crate::virtio::backend::{Backend, DirtyTracking, QueueAddresses, QueueRole};
use crate::virtio::status::{FAILED, FEATURES_OK, NEEDS_RESET};

/// A queue at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueDescription {
    /// Its index.
    pub index: u16,
    /// The size that the driver programmed; the maximum before that.
    pub size: u16,
    /// The maximum size.
    pub max_size: u16,
    /// Whether the driver enabled it.
    pub enabled: bool,
    /// Its MSI-X vector, if it has one.
    pub vector: Option<u16>,
    /// The path of its kicks.
    pub kick: KickPath,
}

/// A queue on which the device works now, for observers of its ring in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningRing {
    /// Its index.
    pub index: u16,
    /// The addresses that the driver programmed, not checked against guest memory.
    pub addresses: QueueAddresses,
    /// Whether it is a packed ring (virtio 1.3, 2.8), whose addresses have another meaning.
    pub packed: bool,
    /// Its purpose.
    pub role: QueueRole,
    /// Grows whenever a driver starts the device, or restarts one of its queues: the ring's indices
    /// then begin again.
    pub start: u64,
}

/// A device at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Virtio device type (virtio 1.3, section 5).
    pub device_type: u32,
    /// The device status register (virtio 1.3, 2.1).
    pub status: u8,
    /// The features that the driver is offered.
    pub offered: u64,
    /// The negotiated features; `None` before the negotiation.
    pub negotiated: Option<u64>,
    /// All queues, in the order of their indices.
    pub queues: Vec<QueueDescription>,
    /// How many requests failed because of the host's storage, if it is a disk.
    pub io_errors: Option<u64>,
    /// How the pages that it writes are found, while they are recorded.
    pub dirty_tracking: Option<DirtyTracking>,
}

impl DeviceDescription {
    pub(super) fn new(
        backend: &dyn Backend,
        common: &CommonConfig,
        notify: &NotifyDoorbells,
    ) -> Self {
        let saved = common.save();
        let agreed = saved.status & FEATURES_OK != 0;
        let queue = |(index, (state, max_size)): (u16, (&QueueState, u16))| QueueDescription {
            index,
            size: state.addresses.size,
            max_size,
            enabled: state.enabled,
            vector: (state.vector != NO_VECTOR).then_some(state.vector),
            kick: notify.kick_path(index),
        };
        let queues = saved.queues.iter().zip(common.max_sizes());
        Self {
            device_type: backend.device_type(),
            status: saved.status,
            offered: common.offer(),
            negotiated: agreed.then_some(saved.driver_features),
            queues: (0..).zip(queues).map(queue).collect(),
            io_errors: backend.io_errors(),
            dirty_tracking: backend.dirty_tracking(),
        }
    }

    /// Whether the device or its driver has failed: only a reset by the driver helps.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.status & (NEEDS_RESET | FAILED) != 0
    }
}
