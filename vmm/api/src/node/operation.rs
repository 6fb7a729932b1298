//! Operations: requests to the node daemon that take long.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::ErrorBody;
use crate::machine::{MigrationStatus, SnapshotInfo};

described! {
    /// What an operation does.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum OperationKind {
        /// Migrates a virtual machine to another node or process.
        Migration,
        /// Writes a snapshot of a virtual machine.
        Snapshot,
        /// Replaces the program of a running virtual machine.
        Upgrade,
        /// Creates or replaces a virtual machine.
        Create,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

described! {
    /// Phase of an operation.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum OperationPhase {
        /// It is in progress.
        Running,
        /// Ended: it succeeded.
        Done,
        /// Ended: it failed, and `error` has the reason.
        Failed,
        /// Ended: a client cancelled it.
        Cancelled,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

macro_rules! shown_as_written {
    ($($name:ident),+) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    Self::Unknown => f.write_str("unknown"),
                    word => word.serialize(f),
                }
            }
        }
    )+};
}

shown_as_written!(OperationKind, OperationPhase);

impl OperationPhase {
    /// Whether the operation has ended.
    #[must_use]
    pub fn is_end(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

/// A request that takes long. The daemon keeps the last 1000 that have ended.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    /// Its ID, for `/v1/operations/{id}`. IDs increase.
    pub id: String,
    /// What it does.
    pub kind: OperationKind,
    /// The name of its virtual machine.
    pub target: String,
    /// Its phase, or its result.
    pub phase: OperationPhase,
    /// Its progress; null if unknown.
    #[schema(required)]
    pub progress: Option<OperationProgress>,
    /// Why it failed; null otherwise.
    #[schema(required)]
    pub error: Option<ErrorBody>,
    /// Its result; null without one.
    #[schema(required)]
    pub result: Option<OperationResult>,
    /// When it began, in milliseconds since 1970.
    pub created_ms: u64,
    /// When it ended, in milliseconds since 1970; null while it runs.
    #[schema(required)]
    pub ended_ms: Option<u64>,
    /// The client that requested it, as in the audit log.
    pub requested_by: String,
    /// The ID of its request, as in the log.
    pub request_id: String,
}

/// Progress of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OperationProgress {
    /// Completed part. It shrinks when a guest writes to memory that was copied.
    pub done: u64,
    /// The whole.
    pub total: u64,
    /// The unit of both: `bytes`.
    pub unit: String,
    /// The expected downtime of the guest in a migration, in milliseconds; null if unknown.
    #[schema(required)]
    pub forecast_downtime_ms: Option<u64>,
}

/// The result of an operation, in the member of its kind.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct OperationResult {
    /// The state of the migration, also while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationStatus>,
    /// The snapshot that was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotInfo>,
    /// The programs before and after the upgrade.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<UpgradeInfo>,
}

/// A completed upgrade.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UpgradeInfo {
    /// The version of Bellhop before.
    pub before: String,
    /// The version that runs the virtual machine now.
    pub after: String,
    /// Downtime of the guest, in milliseconds; null if the machine was paused.
    #[schema(required)]
    pub downtime_ms: Option<f64>,
}

/// Which operations a list has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OperationQuery {
    /// Only those of this kind
    pub kind: Option<OperationKind>,
    /// Only those of this virtual machine
    #[param(pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
    pub target: Option<String>,
    /// Only those in this phase
    pub phase: Option<OperationPhase>,
}

/// The longest wait of a request for the end of an operation, in seconds.
pub const OPERATION_WAIT_MAX_S: u64 = 60;

/// Whether to wait for the end of an operation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OperationWait {
    /// Wait for the end for at most this many seconds
    #[param(maximum = 60)]
    pub wait: Option<u64>,
}
