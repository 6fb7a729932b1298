//! The node daemon's API.

mod device_id;
mod event;
mod labels;
mod nic;
mod operation;
mod plan;
mod role;
mod snapshot;
mod spec_change;
mod vm;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::endpoint::Endpoint;
use crate::machine::migration::send_request;
use crate::machine::{MigrationSecret, SendConfig, TlsFiles};

pub use device_id::{BadDeviceId, DeviceId};
pub use event::{Event, EventChange};
pub use labels::{
    BadLabel, Labels, Selector, annotations_schema, check_annotations, check_labels, labels_schema,
};
pub use nic::{HostNicSpec, NicBackup, NicId, NicKind, NicMove, NicSettings, NicSettingsError};
pub use operation::{
    OPERATION_WAIT_MAX_S, Operation, OperationKind, OperationPhase, OperationProgress,
    OperationQuery, OperationResult, OperationWait, UpgradeInfo,
};
pub use plan::Plan;
pub use role::{BadRole, Role};
pub use snapshot::{BadSnapshotName, Snapshot, SnapshotName, VmSnapshotRequest};
pub use spec_change::{Applied, SpecChange, VmChanges};
pub use vm::{
    AfterGrace, BadPhase, ConsolePaths, Desired, GRACE_PERIOD_MAX_S, GRACE_PERIOD_S,
    MigrationUnknown, Restart, StopMode, Vm, VmNicDevice, VmObserved, VmPhase, VmStateChange,
};

/// The daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// The version of Bellhop.
    pub version: String,
    /// The level of this API. It increases for changes that clients must know about.
    pub api: u32,
    /// The daemon's process.
    pub pid: u32,
    /// Its socket.
    pub socket: String,
    /// Whether the node takes no new virtual machines.
    #[serde(default)]
    #[schema(required)]
    pub cordoned: bool,
}

/// Which events a stream has, where it begins and whether it ends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventQuery {
    /// Only events of this VM
    #[param(pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
    pub vm: Option<String>,
    /// Only events with this word as `change`
    #[serde(rename = "type")]
    #[param(value_type = Option<EventChange>)]
    pub kind: Option<String>,
    /// Begin after this generation; 0 means the oldest stored event. The header Last-Event-ID takes
    /// precedence. Without both the stream has new events only.
    pub since: Option<u64>,
    /// `false`: end after the events that have happened
    pub follow: Option<bool>,
}

/// Which virtual machines a list has: those that match all members.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct VmQuery {
    /// Only those with these labels: `KEY=VALUE`, or `KEY` with any value, with commas between
    #[param(
        pattern = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}(=[A-Za-z0-9._/-]{0,63})?\
                   (,[A-Za-z0-9][A-Za-z0-9._/-]{0,62}(=[A-Za-z0-9._/-]{0,63})?){0,31}$",
        example = "tier=web"
    )]
    pub label: Option<String>,
    /// Only those in this phase
    #[param(value_type = Option<VmPhase>)]
    pub phase: Option<String>,
}

described! {
    /// A log of a virtual machine.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum VmLog {
        /// The messages of its process.
        Vmm,
        /// The output of its guest.
        Console,
    }
}

impl fmt::Display for VmLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The default number of lines of a log.
pub const LOG_LINES: u32 = 1000;
/// The maximum number of lines of a log.
pub const LOG_LINES_MAX: u32 = 100_000;
/// The header with the position after a part of a log.
pub const LOG_POSITION: &str = "x-log-position";
/// The header of a part of a log that follows a gap.
pub const LOG_GAP: &str = "x-log-gap";

/// Which part of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LogQuery {
    /// Number of lines from the end: 1000 without this and `after`
    #[param(maximum = 100000)]
    pub tail: Option<u32>,
    /// The text after this value of the header `x-log-position`; `tail` is ignored then
    #[param(pattern = "^[0-9]{1,19}-[0-9]{1,19}-[0-9]{1,19}$")]
    pub after: Option<String>,
}

/// How a client uses a console.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ConsoleQuery {
    /// `true`: only read the output, beside any number of other clients
    pub read_only: Option<bool>,
    /// `true`: disconnect the client that writes, and write instead
    pub take: Option<bool>,
    /// `true`: send the last 64 KiB of earlier output first
    pub history: Option<bool>,
}

send_request! {
    /// The destination node of a machine, and how to send it.
    SendToNode {
        /// The other node's daemon: `https://HOST:PORT`, or `node:/PATH` of its socket on this
        /// host. `unix:/PATH` and `tcp:HOST:PORT` name a waiting process, as in the VM's own API.
        pub destination: String,
        /// The machine's name at the destination; the same name by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<String>, pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
        pub name: Option<String>,
        /// The source of all of its NICs at the destination, like `from` of a NIC. It also replaces
        /// NICs on existing devices. By default each NIC is created from, or found under, the same
        /// name as here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
        /// The PCI address of each of its VFIO functions at the destination, by the function's
        /// name. By default each has the same address as here.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub vfio: BTreeMap<String, String>,
    }
}

impl SendToNode {
    /// The same request for the VM's own process, which sends the VM to this endpoint.
    #[must_use]
    pub fn to_endpoint(
        &self,
        destination: Endpoint,
        tls: Option<TlsFiles>,
        plaintext: bool,
    ) -> SendConfig {
        SendConfig {
            destination,
            tls,
            plaintext,
            pairing: None,
            fd: None,
            downtime_ms: self.downtime_ms,
            timeout_s: self.timeout_s,
            connections: self.connections,
            verify_memory: self.verify_memory,
            dry_run: self.dry_run,
        }
    }
}

/// The address at which a node waits for a machine, and its terms.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Awaited {
    /// `unix:/PATH` or `tcp:HOST:PORT`.
    pub listen: String,
    /// The source must know it.
    #[schema(value_type = String, pattern = "^[0-9a-f]{64}$")]
    pub secret: MigrationSecret,
    /// The certificate of the destination for this migration (PEM), over TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
}
