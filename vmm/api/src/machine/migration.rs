//! Migration: a VM that leaves for another process, or arrives from one.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::{CpuAffinity, HugePageSize, MemorySize, VdpaConfig, schema};
use crate::endpoint::Endpoint;

/// The most connections that carry a guest's memory.
pub const CONNECTIONS_MAX: u16 = 16;

described! {
    /// Direction of a migration.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum Direction {
        /// The machine leaves this host.
        Send,
        /// The machine comes to this host.
        Receive,
    }
}

/// The default limit of a migrated guest's downtime, in milliseconds.
pub const DOWNTIME_MS: u32 = 300;
/// The default timeout of a migration, in seconds.
pub const TIMEOUT_S: u32 = 600;
/// The default number of connections that carry memory.
pub const CONNECTIONS: u16 = 2;

pub(crate) const fn downtime_ms() -> u32 {
    DOWNTIME_MS
}

pub(crate) const fn timeout_s() -> u32 {
    TIMEOUT_S
}

pub(crate) const fn connections() -> u16 {
    CONNECTIONS
}

/// Defines a request to send a VM: its own fields, then those that all such requests have. With
/// serde's `flatten` an error would name neither the path of a wrong field nor the known fields.
macro_rules! send_request {
    ($(#[$meta:meta])* $name:ident { $($own:tt)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($own)*
            /// The longest downtime of the guest, in milliseconds; 300 by default.
            #[serde(default = "crate::machine::migration::downtime_ms")]
            pub downtime_ms: u32,
            /// After how many seconds it fails if the guest writes faster than memory is copied;
            /// 600 by default.
            #[serde(default = "crate::machine::migration::timeout_s")]
            pub timeout_s: u32,
            /// Connections that carry memory; 2 by default.
            #[serde(default = "crate::machine::migration::connections")]
            #[schema(minimum = 1, maximum = 16)]
            pub connections: u16,
            /// Compare checksums of all guest memory before the guest runs at the destination. If a
            /// byte differs, it stays. The downtime is longer than `downtime_ms`, because the
            /// source reads all memory meanwhile.
            // Omitted unless requested: an older VM process knows neither this field nor the next.
            #[serde(default, skip_serializing_if = "std::ops::Not::not")]
            pub verify_memory: bool,
            /// Only report whether the destination accepts the machine, and the expected cost.
            #[serde(default, skip_serializing_if = "std::ops::Not::not")]
            pub dry_run: bool,
        }
    };
}
pub(crate) use send_request;

send_request! {
    /// How a machine is to leave.
    SendConfig {
        /// Where the destination waits: `unix:/PATH` or `tcp:HOST:PORT`.
        #[schema(value_type = String)]
        pub destination: Endpoint,
        /// The certificates, over TCP.
        #[serde(default)]
        pub tls: Option<TlsFiles>,
        /// Over TCP without TLS: anyone on the path can read and change the guest.
        #[serde(default)]
        pub plaintext: bool,
    }
}

impl SendConfig {
    /// A migration to `destination` with the defaults: 300 ms, 600 s, two connections.
    #[must_use]
    pub fn new(destination: Endpoint) -> Self {
        Self {
            destination,
            downtime_ms: DOWNTIME_MS,
            timeout_s: TIMEOUT_S,
            connections: CONNECTIONS,
            tls: None,
            plaintext: false,
            verify_memory: false,
            dry_run: false,
        }
    }

    /// Whether [`SendConfig::connections`] is valid.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        (1..=CONNECTIONS_MAX).contains(&self.connections)
    }
}

/// How a machine is to come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReceiveConfig {
    /// Where to wait for the source: `unix:/PATH` or `tcp:HOST:PORT`.
    #[schema(value_type = String)]
    pub listen: Endpoint,
    /// The vDPA devices here, each with the `id` of the NIC that it is to be: one for each NIC of
    /// the machine.
    #[serde(default)]
    pub vdpa: Vec<VdpaConfig>,
    /// The kernel that the guest boots from at its next reboot. No path that the source names is
    /// opened for another host, so it is required over TCP; over a Unix socket, which only this
    /// user's processes can use, it is the source's where none is given.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// The initial RAM file system of that; required over TCP where the machine has one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub initramfs: Option<PathBuf>,
    /// The most guest memory that a source may bring; without it, what this host has free when one
    /// comes (of the NUMA node and the huge pages, if those are named).
    #[serde(default)]
    #[schema(schema_with = schema::memory_max)]
    pub max_memory: Option<MemorySize>,
    /// The guest's memory is made of these huge pages here, whatever it was made of at the source.
    #[serde(default)]
    #[schema(schema_with = schema::hugepages)]
    pub hugepages: Option<HugePageSize>,
    /// It comes from this NUMA node here; from any where none is given, whatever the source said of
    /// its own.
    #[serde(default)]
    #[schema(maximum = 65535)]
    pub host_numa_node: Option<u16>,
    /// Which CPUs of this host each vCPU may run on; anywhere where none is given, whatever the
    /// source said of its own.
    #[serde(default)]
    #[schema(schema_with = schema::cpu_affinity)]
    pub cpu_affinity: CpuAffinity,
    /// The certificates, over TCP.
    #[serde(default)]
    pub tls: Option<TlsFiles>,
    /// Over TCP without TLS: anyone who reaches the port can send a guest.
    #[serde(default)]
    pub plaintext: bool,
}

/// The certificates of a migration over TCP. Both hosts have such files, with certificates of the
/// same authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// This host's certificate, then those between it and its authority (PEM). At the destination
    /// it is for the name or IP address in `destination` of the source. Extended key usages, if
    /// any, are for clients at the source and for servers at the destination.
    #[schema(value_type = String)]
    pub certificate: PathBuf,
    /// Its private key (PEM), readable by its owner only.
    #[schema(value_type = String)]
    pub key: PathBuf,
    /// The authorities whose certificate the other host may have (PEM).
    #[schema(value_type = String)]
    pub authority: PathBuf,
}

/// Which way the machine is to go.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MigrationRequest {
    /// Send it.
    Send(SendConfig),
    /// Wait for it.
    Receive(ReceiveConfig),
}

described! {
    /// Phase of a migration, or how it ended.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub enum MigrationPhase {
        /// Connects to the other host and asks it to take the machine.
        #[default]
        Offer,
        /// The destination accepts; further connections are opened.
        Join,
        /// Memory is copied while the guest runs.
        Copy,
        /// The guest is stopped; the remaining memory and state are copied.
        Stop,
        /// The destination restores the state.
        Ready,
        /// The source hands the guest over.
        Go,
        /// The destination starts the guest.
        Done,
        /// Ended: the guest runs at the destination.
        Moved,
        /// Ended: the guest stayed at the source; `error` has the reason.
        Stayed,
        /// Ended, and it is unknown which host has the guest. It is stopped here until
        /// `PATCH /v1/vm/migration` resolves it.
        Unsettled,
        /// A word of a later version: it has not ended.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

impl fmt::Display for MigrationPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("Unknown"),
            phase => phase.serialize(f),
        }
    }
}

/// How far a migration is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MigrationStatus {
    /// Which way.
    pub direction: Direction,
    /// Where the destination is, or where the source is waited for.
    pub peer: String,
    /// What it does.
    pub phase: MigrationPhase,
    /// Rounds over memory so far.
    pub rounds: u32,
    /// Milliseconds since it began; at a destination since it began to wait for the source, which
    /// may be long before one came.
    pub elapsed_ms: u64,
    /// Bytes of guest memory.
    pub ram_bytes: u64,
    /// Bytes on the wire; at the destination, of pages.
    pub sent_bytes: u64,
    /// Pages that went over with their content, all rounds.
    pub pages: u64,
    /// Pages of which only was said that they are zero.
    pub zero_pages: u64,
    /// Bytes of memory that this round has still to send.
    pub left_bytes: u64,
    /// Bytes per second on the wire.
    pub bytes_per_second: u64,
    /// Bytes of memory per second that guest and devices write, a page counting as a whole.
    pub dirty_bytes_per_second: u64,
    /// Share of their time that vCPUs are held back, in per cent.
    #[schema(maximum = 100)]
    pub throttle_percent: u8,
    /// Expected downtime if the guest were stopped now, in milliseconds; null in the first round.
    #[schema(required)]
    pub forecast_downtime_ms: Option<u64>,
    /// Rounds until it can be stopped; null if that is not known, or never.
    #[schema(required)]
    pub forecast_rounds: Option<u32>,
    /// Downtime of the guest so far, in milliseconds; null before it was stopped.
    #[schema(required)]
    pub downtime_ms: Option<f64>,
    /// What NICs had been given and had not used when the guest was stopped; null before, and at
    /// the destination.
    #[schema(required)]
    pub in_flight: Option<InFlight>,
    /// How long it took to have all writes logged, NICs' among them, in milliseconds; null before
    /// that is done, and at the destination.
    #[schema(required)]
    pub mediation_ms: Option<f64>,
    /// What of `downtime_ms` took how long, as the source sees it.
    #[serde(default)]
    #[schema(required)]
    pub downtime_parts_ms: DowntimeParts,
    /// Why it did not move, or is not settled; null in all other cases.
    #[schema(required)]
    pub error: Option<String>,
}

/// Parts of the downtime, in milliseconds; null for a part that has not ended.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
pub struct DowntimeParts {
    /// vCPUs were parked, devices stopped.
    #[schema(required)]
    pub stop: Option<f64>,
    /// The last pages went over.
    #[schema(required)]
    pub memory: Option<f64>,
    /// The state of vCPUs and devices went over.
    #[schema(required)]
    pub state: Option<f64>,
    /// The destination restored it.
    #[schema(required)]
    pub ready: Option<f64>,
    /// The destination started its devices and the guest.
    #[schema(required)]
    pub go: Option<f64>,
}

/// Buffers that NICs had been given and had not used when the guest was stopped, by what the queues
/// are for. Packed rings do not tell it, and are not counted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InFlight {
    /// Receive buffers that were not filled.
    pub rx: u32,
    /// Frames that were not sent.
    pub tx: u32,
    /// Commands on control queues that were not answered.
    pub cvq: u32,
}

/// Whether the machine could be sent, and what that would cost. Nothing has changed, there or here.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MigrationTrial {
    /// Where it would go.
    pub destination: String,
    /// Whether the destination would take it now.
    pub movable: bool,
    /// Why not: all that is in the way.
    pub obstacles: Vec<MigrationObstacle>,
    /// What it would cost. The node daemon does not say it of a node that does not even wait for
    /// the machine.
    #[serde(flatten)]
    #[schema(value_type = Forecast)]
    pub forecast: Option<Forecast>,
}

/// What sending a machine would cost.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Forecast {
    /// Bytes of guest memory.
    pub ram_bytes: u64,
    /// Bytes of it that hold data, of which at most all go over at first; those that the guest
    /// writes meanwhile go once more.
    pub data_bytes: u64,
    /// Bytes per second on the wire when the machine was last sent there; null if it never was, or
    /// not for long enough.
    #[schema(required)]
    pub bytes_per_second: Option<u64>,
    /// How long `data_bytes` take at that rate, in milliseconds; null where it is not known.
    #[schema(required)]
    pub copy_ms: Option<u64>,
    /// How long the destination took just now to open its devices and map all guest memory for
    /// them, which most NICs pin, in milliseconds; null if it refused, did not answer, or was not
    /// asked. It does that once more before memory is sent, while the guest runs.
    #[schema(required)]
    pub prepare_ms: Option<u64>,
    /// Assumed downtime of a guest that writes nothing, in milliseconds, for devices and state.
    pub downtime_min_ms: u64,
    /// The longest downtime, in milliseconds: the guest is stopped once the rest should fit.
    pub downtime_max_ms: u64,
}

/// What is in the way of a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationObstacle {
    /// What it is, with how it is here and there.
    pub reason: String,
    /// What helps, a command where there is one; null if nothing is known.
    #[schema(required)]
    pub remedy: Option<String>,
}

described! {
    /// The host that has the guest of an indeterminate migration.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum Place {
        /// This host: the guest resumes here.
        #[serde(alias = "here")]
        Here,
        /// The other host: this machine ends.
        #[serde(alias = "there")]
        There,
    }
}

/// What is to be settled.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SettleRequest {
    /// Which host has the guest.
    pub settle: Place,
}
