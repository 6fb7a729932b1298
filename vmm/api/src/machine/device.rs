//! Pluggable devices, their state in the guest, and the results of the ring watch.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

described! {
    /// Whether a device is plugged.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum PlugPhase {
        /// It is added when the machine starts.
        Configured,
        /// It is on the guest's PCI bus.
        Plugged,
        /// The guest has been asked to release it and has not done so yet.
        UnplugRequested,
        /// The host has removed its device. The driver sees that the link is down and that the
        /// device needs a reset, and the guest has been asked to release it.
        DeviceRemoved,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

described! {
    /// How a queue is kicked.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum Kick {
        /// By an exit to this process: no eventfd or doorbell is set up.
        Exit,
        /// By an eventfd inside KVM: one exit, no thread of this process.
        Eventfd,
        /// By a store in the device's own doorbell page, without an exit.
        Doorbell,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

described! {
    /// How the pages that a device writes are found.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum DirtyTracking {
        /// The pages of all writable mappings of the guest's IOMMU count as written. The device
        /// keeps its queues, its doorbells and its speed.
        Mappings,
        /// Shadow queues show which buffers the device has used.
        ShadowQueues,
        /// All memory counts as written, because the device cannot have shadow queues.
        AllMemory,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

/// A virtqueue.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct QueueInfo {
    /// Its index.
    pub index: u16,
    /// Entries that the driver chose; the largest possible number before that.
    pub size: u16,
    /// The largest possible number.
    pub max_size: u16,
    /// Whether the driver enabled it.
    pub enabled: bool,
    /// Its MSI-X vector; null if it has none.
    #[schema(required)]
    pub vector: Option<u16>,
    /// How it is kicked.
    pub kick: Kick,
    /// State of its ring; null without `ring_watch`.
    #[schema(required)]
    pub watch: Option<WatchInfo>,
}

/// A virtio device as the guest's driver has set it up.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct DeviceInfo {
    /// The device status register (virtio 1.3, 2.1).
    pub status: u8,
    /// Whether the driver runs the device.
    pub driver_ok: bool,
    /// Whether the device or its driver failed: the driver has to reset it.
    pub broken: bool,
    /// The features that the driver is offered, by name; `bit N` for one without.
    pub features_offered: Vec<String>,
    /// The negotiated features; null before the negotiation.
    #[schema(required)]
    pub features_negotiated: Option<Vec<String>>,
    /// All its queues, the control queue among them.
    pub queues: Vec<QueueInfo>,
    /// How many requests failed because of the host's storage, since the disk was opened; null for
    /// other devices.
    #[serde(default)]
    #[schema(required)]
    pub io_errors: Option<u64>,
    /// How the pages that the device writes are found during a migration; null otherwise.
    #[serde(default)]
    #[schema(required)]
    pub dirty_tracking: Option<DirtyTracking>,
}

described! {
    /// Why a queue has an alarm.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum AlarmKind {
        /// Buffers wait for the device, and it uses none of them.
        Stuck,
        /// The device has used all receive buffers, and the driver posts no others.
        DriverStalled,
        /// The avail index is further ahead of the used index than the ring has entries.
        Inconsistent,
        /// Of the request queue of the guest's IOMMU: a request was refused less than a minute ago.
        Refused,
        /// A PCI function of the host has reported an uncorrectable error, or could not be reset or
        /// resumed, and was not reset since. The queue is 0.
        DeviceError,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

impl AlarmKind {
    /// Whether it is about a device of the VM that is neither a NIC nor a disk.
    #[must_use]
    pub fn is_of_other_device(self) -> bool {
        matches!(self, Self::Refused | Self::DeviceError)
    }
}

/// A queue with an alarm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AlarmInfo {
    /// The device.
    pub device: String,
    /// The queue's index.
    pub queue: u16,
    /// The kind of the alarm.
    pub alarm: AlarmKind,
    /// The cause, for people, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

described! {
    /// State of a queue when its ring was read last.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub enum WatchPhase {
        /// The queue does not run, or was not read yet.
        #[default]
        NotRunning,
        /// The ring is packed: it has no indices in memory.
        NotWatchedPacked,
        /// The ring is not in guest memory.
        Unreadable,
        /// No buffers wait, and none moved.
        Idle,
        /// Buffers were posted or used since the last reading.
        Moving,
        /// Buffers wait, for less than the time in `ring_watch`.
        Waiting,
        /// Buffers wait for the device, and it uses none of them.
        Stuck,
        /// The device has used all receive buffers, and the driver posts no others.
        DriverStalled,
        /// The avail index is further ahead of the used index than the ring has entries.
        Inconsistent,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

impl WatchPhase {
    /// Whether the state is an alarm.
    #[must_use]
    pub fn is_alarm(self) -> bool {
        matches!(self, Self::Stuck | Self::DriverStalled | Self::Inconsistent)
    }
}

/// The ring of a queue, from its indices in guest memory, which the VMM reads once a second.
///
/// Indices have 16 bits. A queue that moves 65,536 buffers or more within a second is counted
/// modulo 65,536.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WatchInfo {
    /// State at the last reading.
    pub state: WatchPhase,
    /// Buffers that the device has not used yet; null if unknown.
    #[schema(required)]
    pub in_flight: Option<u16>,
    /// Buffers per second that the driver posted.
    pub posted_per_s: u32,
    /// Buffers per second that the device used.
    pub completed_per_s: u32,
    /// For how long the queue has been stuck, in seconds.
    pub stuck_for_s: u64,
    /// How often the VMM kicked the queue and interrupted its driver to repair it (`stall_kick`).
    #[serde(alias = "rescues")]
    pub stall_kicks: u64,
    /// Buffers that the driver posted since the device was attached.
    #[serde(default)]
    #[schema(required)]
    pub posted: u64,
    /// Buffers that the device used since the device was attached.
    #[serde(default)]
    #[schema(required)]
    pub completed: u64,
}
