//! Events of a node.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{OperationKind, OperationPhase};
use crate::machine::{AlarmKind, EndReason, Place};

described! {
    /// What happened to the subject of an event.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum EventChange {
        /// The daemon began to serve its API.
        Served,
        /// More happened than is kept: read the objects below the subject again.
        Lost,
        /// The object was created.
        Created,
        /// A stopped virtual machine was replaced by another one of its name.
        Replaced,
        /// A virtual machine was started.
        Started,
        /// A running virtual machine was adopted by this daemon.
        Adopted,
        /// A virtual machine runs: it was started or resumed.
        Running,
        /// A virtual machine was paused.
        Paused,
        /// The guest of a virtual machine was asked to power off.
        Stopping,
        /// A virtual machine has ended: `end`, `reason`.
        Ended,
        /// The object was deleted.
        Deleted,
        /// A virtual machine ended while it was migrated, and may run elsewhere: `reason`.
        #[serde(alias = "may_be_elsewhere")]
        MigrationUnknown,
        /// An indeterminate migration was resolved: `place`.
        #[serde(alias = "settled")]
        MigrationResolved,
        /// A virtual machine is expected from another node: `listen`.
        Awaited,
        /// A virtual machine has arrived from another node.
        Arrived,
        /// A virtual machine has not arrived from another node: `reason`.
        NotArrived,
        /// A virtual machine could not be started, and is tried again later: `reason`.
        NotStarted,
        /// A NIC was added: `nic`.
        NicAdded,
        /// A NIC was moved to another device: `nic`.
        NicMoved,
        /// A NIC has moved to its backup: `nic`, and `reason` unless its device reported it.
        NicFailedOver,
        /// A NIC has failed and stays on its device: `nic`, `reason`.
        NicNotFailedOver,
        /// The host has removed the device of a NIC, and no backup replaces it: `nic`.
        NicDeviceRemoved,
        /// A NIC was removed: `nic`.
        NicRemoved,
        /// A disk was added: `disk`.
        DiskAdded,
        /// A disk was removed: `disk`.
        DiskRemoved,
        /// A queue has an alarm: `nic` or `disk`, `queue`, `alarm`. Of the guest's IOMMU: `queue`,
        /// `alarm`, `reason`.
        AlarmRaised,
        /// A queue has no such alarm any more: the same members.
        AlarmCleared,
        /// Long work began: `operation`, `kind`.
        OperationStarted,
        /// Long work ended: `operation`, `kind`, `phase`, and `reason` if it failed.
        OperationEnded,
        /// A device appeared on the vDPA bus.
        Added,
        /// A device or port disappeared.
        Removed,
        /// A driver was bound to a vDPA device: `driver`.
        Bound,
        /// A driver was unbound from a vDPA device.
        Unbound,
        /// The object changed; of a virtual machine its spec: `detail` has the members.
        Changed,
        /// A devlink parameter was set, or is gone: `parameter`.
        Parameter,
        /// A devlink rate was set, or is gone.
        Rate,
        /// A devlink health reporter changed its state: `reporter`, `healthy`.
        Health,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

impl fmt::Display for EventChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("unknown"),
            change => change.serialize(f),
        }
    }
}

/// Something happened. Which members it has depends on `change`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Grows with each event, also from one daemon to the next: it begins with the microseconds
    /// since 1970 at the daemon's start.
    pub generation: u64,
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// The object, as its path in the API: `/v1/vms/web`.
    pub subject: String,
    /// What happened.
    pub change: EventChange,
    /// More about it, a sentence for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Why, a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The NIC of the virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic: Option<String>,
    /// The disk of the virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The queue of that NIC or disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u16>,
    /// What is wrong with that queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alarm: Option<AlarmKind>,
    /// Why the virtual machine ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<EndReason>,
    /// Which host has the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// Where a virtual machine is expected: `unix:/PATH` or `tcp:HOST:PORT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<String>,
    /// The ID of the operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// What the operation does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<OperationKind>,
    /// How the operation ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<OperationPhase>,
    /// The driver of the vDPA bus.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// The devlink parameter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameter: Option<String>,
    /// The devlink health reporter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reporter: Option<String>,
    /// Whether that reporter is healthy; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healthy: Option<bool>,
}

impl Event {
    /// An event without details. The publisher sets its generation and its time.
    #[must_use]
    pub fn new(subject: impl Into<String>, change: EventChange) -> Self {
        Self {
            generation: 0,
            time_ms: 0,
            subject: subject.into(),
            change,
            detail: None,
            reason: None,
            nic: None,
            disk: None,
            queue: None,
            alarm: None,
            end: None,
            place: None,
            listen: None,
            operation: None,
            kind: None,
            phase: None,
            driver: None,
            parameter: None,
            reporter: None,
            healthy: None,
        }
    }

    /// Adds a sentence for people.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }
}
