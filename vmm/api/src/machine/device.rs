//! Devices that come and go, what the guest made of them, and what the watch of their rings saw.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a device is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum PlugPhase {
    /// It comes when the machine starts.
    Configured,
    /// The guest has it, or finds it when it looks.
    Plugged,
    /// The guest was asked to give it up and has not done so yet.
    UnplugRequested,
    /// A word of a later version.
    #[serde(other, skip_serializing)]
    Unknown,
}

/// How a queue is kicked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Kick {
    /// Through this process: the guest has not mapped the device, or nothing better can be had.
    Exit,
    /// An eventfd inside KVM: one exit, no thread of this process.
    Eventfd,
    /// The device's own doorbell page: a store without an exit.
    Doorbell,
    /// A word of a later version.
    #[serde(other, skip_serializing)]
    Unknown,
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
    /// Its MSI-X vector, if it has one.
    pub vector: Option<u16>,
    /// How it is kicked.
    pub kick: Kick,
    /// What the watch of its ring saw last; none if nobody watches (`ring_watch`).
    pub watch: Option<WatchInfo>,
}

/// A virtio device as the guest's driver has set it up.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DeviceInfo {
    /// The device status register (virtio 1.3, 2.1).
    pub status: u8,
    /// Whether the driver runs the device.
    pub driver_ok: bool,
    /// Whether the device or its driver gave up: only a reset by the driver helps.
    pub broken: bool,
    /// The features that the driver is offered, by name; `bit N` for one without.
    pub features_offered: Vec<String>,
    /// The features that were agreed on; none before that.
    pub features_negotiated: Option<Vec<String>>,
    /// All its queues, the control queue among them.
    pub queues: Vec<QueueInfo>,
}

/// What is wrong with a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum AlarmKind {
    /// Buffers wait for the device, and it uses none.
    Stuck,
    /// The device has used all receive buffers, and the driver posts no others.
    DriverStalled,
    /// The avail index is further ahead of the used index than the ring has entries.
    Inconsistent,
    /// A word of a later version.
    #[serde(other, skip_serializing)]
    Unknown,
}

/// A queue that something is wrong with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AlarmInfo {
    /// The device.
    pub device: String,
    /// The queue's index.
    pub queue: u16,
    /// What is wrong.
    pub alarm: AlarmKind,
}

/// What was seen of a queue last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum WatchPhase {
    /// It does not run, or was not looked at yet.
    NotRunning,
    /// It runs, but a packed ring has no indices in memory to look at.
    NotWatchedPacked,
    /// It runs, but its ring is not in guest memory.
    Unreadable,
    /// Nothing happened, and nothing had to.
    Idle,
    /// Buffers were posted or used.
    Moving,
    /// Nothing happens that should, for less than `ring_watch`'s time.
    Waiting,
    /// Buffers wait for the device, and it uses none.
    Stuck,
    /// The device has used all receive buffers, and the driver posts no others.
    DriverStalled,
    /// The avail index is further ahead of the used index than the ring has entries.
    Inconsistent,
    /// A word of a later version.
    #[serde(other, skip_serializing)]
    Unknown,
}

/// The ring of a queue as its indices in guest memory show it, looked at once a second.
///
/// Indices have 16 bits: a queue that moves by 65,536 buffers or more within a second is counted
/// without the multiples of that.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WatchInfo {
    /// What was seen last.
    pub state: WatchPhase,
    /// Buffers that the device has and has not used; none where it cannot be told.
    pub in_flight: Option<u16>,
    /// Buffers per second that the driver posted.
    pub posted_per_s: u32,
    /// Buffers per second that the device used.
    pub completed_per_s: u32,
    /// For how many seconds the queue has hung.
    pub stuck_for_s: u64,
    /// How often it was kicked and its driver interrupted because of that (`rescue`).
    pub rescues: u64,
    /// Buffers that the driver posted since the device was attached.
    #[serde(default)]
    #[schema(required)]
    pub posted: u64,
    /// Buffers that the device used since the device was attached.
    #[serde(default)]
    #[schema(required)]
    pub completed: u64,
}
