//! Migration: a VM is sent to another process, or received from one.

use std::fmt;
use std::path::PathBuf;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::{CpuAffinity, HugePageSize, MemorySize, VdpaConfig, VfioConfig, schema};
use crate::endpoint::Endpoint;
use crate::machine::{MigrationSecret, Pairing};

/// The most connections that carry a guest's memory.
pub const CONNECTIONS_MAX: u16 = 16;

described! {
    /// Direction of a migration.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum Direction {
        /// The machine leaves this host.
        Send,
        /// The machine arrives at this host.
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

/// For serde: a possible number of connections. The daemon must refuse others before it contacts
/// the destination.
pub(crate) fn possible_connections<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    let number = u16::deserialize(from)?;
    if (1..=CONNECTIONS_MAX).contains(&number) {
        Ok(number)
    } else {
        Err(D::Error::custom(format!("must be 1 to {CONNECTIONS_MAX}")))
    }
}

/// Defines a request to send a VM: its own fields, then those of all such requests. With serde's
/// `flatten` an error would name neither the path of a wrong field nor the known fields.
macro_rules! send_request {
    ($(#[$meta:meta])* $name:ident { $($own:tt)* }) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema,
        )]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($own)*
            /// The longest downtime of the guest, in milliseconds; 300 by default.
            #[serde(default = "crate::machine::migration::downtime_ms")]
            pub downtime_ms: u32,
            /// Seconds after which the migration fails if the guest writes faster than memory is
            /// copied; 600 by default.
            #[serde(default = "crate::machine::migration::timeout_s")]
            pub timeout_s: u32,
            /// Number of connections that carry memory; 2 by default.
            #[serde(
                default = "crate::machine::migration::connections",
                deserialize_with = "crate::machine::migration::possible_connections"
            )]
            #[schema(minimum = 1, maximum = 16)]
            pub connections: u16,
            /// Compare checksums of all guest memory before the guest runs at the destination. If a
            /// byte differs, the guest stays at the source. The downtime exceeds `downtime_ms`,
            /// because the source reads all memory meanwhile.
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
    /// How to send a machine.
    SendConfig {
        /// The address on which the destination waits: `unix:/PATH` or `tcp:HOST:PORT`.
        #[schema(value_type = String)]
        pub destination: Endpoint,
        /// The certificates, over TCP.
        #[serde(default)]
        pub tls: Option<TlsFiles>,
        /// Over TCP without TLS: anyone on the path can read and change the guest.
        #[serde(default)]
        pub plaintext: bool,
        /// The terms that two node daemons have agreed on. They replace `tls` and `plaintext`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub pairing: Option<Pairing>,
        /// The index, among the passed descriptors, of a Unix socket to a process that opens the
        /// connections: it answers each byte with a connected socket. Without it, the process
        /// connects by itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub fd: Option<u32>,
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
            pairing: None,
            fd: None,
            verify_memory: false,
            dry_run: false,
        }
    }

    /// The secret that proves to the destination who sends; the default without a pairing.
    #[must_use]
    pub fn secret(&self) -> MigrationSecret {
        let pairing = self.pairing.as_ref();
        pairing.map_or_else(MigrationSecret::default, |pairing| pairing.secret)
    }
}

/// How to receive a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReceiveConfig {
    /// The address on which to wait for the source: `unix:/PATH` or `tcp:HOST:PORT`.
    #[schema(value_type = String)]
    pub listen: Endpoint,
    /// This host's vDPA devices: one for each NIC of the machine, with the NIC's `id`.
    #[serde(default)]
    pub vdpa: Vec<VdpaConfig>,
    /// This host's functions to plug once the machine runs here, each with a NIC as its `standby`.
    /// If one cannot be plugged, the guest uses its standby.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vfio: Vec<VfioConfig>,
    /// The kernel for the guest's next reboot. Over TCP it is required, because the destination
    /// opens no path that another host names. Over a Unix socket, which only this user's processes
    /// can use, the default is the source's path.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// The initial RAM file system of that kernel. Over TCP it is required if the machine has one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub initramfs: Option<PathBuf>,
    /// The most guest memory that a source may send. The default is the free memory of this host
    /// when the source connects (of the NUMA node and huge pages, if given).
    #[serde(default)]
    #[schema(schema_with = schema::memory_max)]
    pub max_memory: Option<MemorySize>,
    /// Back guest memory with these huge pages, whatever the source used.
    #[serde(default)]
    #[schema(schema_with = schema::hugepages)]
    pub hugepages: Option<HugePageSize>,
    /// Allocate guest memory on this NUMA node, whatever the source used. By default the kernel
    /// chooses.
    #[serde(default)]
    #[schema(maximum = 65535)]
    pub host_numa_node: Option<u16>,
    /// The host CPUs of each vCPU, whatever the source used. By default vCPUs run on all CPUs.
    #[serde(default)]
    #[schema(schema_with = schema::cpu_affinity)]
    pub cpu_affinity: CpuAffinity,
    /// The certificates, over TCP.
    #[serde(default)]
    pub tls: Option<TlsFiles>,
    /// Over TCP without TLS: anyone who reaches the port can send a guest.
    #[serde(default)]
    pub plaintext: bool,
    /// The terms that two node daemons have agreed on. They replace `tls` and `plaintext`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairing: Option<Pairing>,
    /// The index, among the passed descriptors, of a socket that listens at `listen`. Without it,
    /// the process listens there by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<u32>,
}

/// The certificates of a migration over TCP. Both hosts have such files, with certificates of one
/// authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// This host's certificate, followed by its intermediate certificates (PEM). The destination's
    /// certificate must be valid for the host in the source's `destination`. Extended key usages,
    /// if any, must permit clients and servers at the source, and servers at the destination.
    #[schema(value_type = String)]
    pub certificate: PathBuf,
    /// Its private key (PEM), readable by its owner only.
    #[schema(value_type = String)]
    pub key: PathBuf,
    /// The authorities that may have issued the other host's certificate (PEM).
    #[schema(value_type = String)]
    pub authority: PathBuf,
}

/// Direction and settings of a migration.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MigrationRequest {
    /// Send the machine.
    Send(SendConfig),
    /// Wait for a machine.
    Receive(ReceiveConfig),
}

described! {
    /// Phase of a migration, or its result.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub enum MigrationPhase {
        /// The source connects and offers the machine.
        #[default]
        Offer,
        /// The destination has accepted; the source opens further connections.
        Join,
        /// Memory is copied while the guest runs.
        Copy,
        /// The guest is stopped; the remaining memory and state are copied.
        Stop,
        /// The destination restores the state.
        Ready,
        /// The source hands over the guest.
        Go,
        /// The destination starts the guest.
        Done,
        /// Ended: the guest runs at the destination.
        Moved,
        /// Ended: the guest stayed at the source; `error` has the reason.
        Stayed,
        /// Ended: it is unknown which host has the guest. The guest is stopped here until
        /// `PATCH /v1/vm/migration` resolves this.
        #[serde(alias = "Unsettled")]
        Indeterminate,
        /// A word of a later version: the migration has not ended.
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

/// The state of a migration.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MigrationStatus {
    /// The direction.
    pub direction: Direction,
    /// The address of the destination, or the one on which this host waits for the source.
    pub peer: String,
    /// Phase, or result.
    pub phase: MigrationPhase,
    /// Rounds over memory so far.
    pub rounds: u32,
    /// Milliseconds since the migration began. At a destination the wait for the source counts too.
    pub elapsed_ms: u64,
    /// Bytes of guest memory.
    pub ram_bytes: u64,
    /// Bytes on the wire; at the destination only those of pages.
    pub sent_bytes: u64,
    /// Pages sent with their content, in all rounds.
    pub pages: u64,
    /// Pages sent as zero, without content.
    pub zero_pages: u64,
    /// Bytes of memory that remain in this round.
    pub left_bytes: u64,
    /// Bytes per second on the wire.
    pub bytes_per_second: u64,
    /// Bytes of memory per second that the guest and devices write. A written page counts
    /// completely.
    pub dirty_bytes_per_second: u64,
    /// Share of time in which vCPUs are throttled, in per cent.
    #[schema(maximum = 100)]
    pub throttle_percent: u8,
    /// Expected downtime if the guest stopped now, in milliseconds; null in the first round.
    #[schema(required)]
    pub forecast_downtime_ms: Option<u64>,
    /// Expected rounds until the guest can be stopped; null if unknown or if that never happens.
    #[schema(required)]
    pub forecast_rounds: Option<u32>,
    /// Downtime of the guest so far, in milliseconds; null before it was stopped.
    #[schema(required)]
    pub downtime_ms: Option<f64>,
    /// Buffers that NICs held when the guest was stopped. Null before that, and at the destination.
    #[schema(required)]
    pub in_flight: Option<InFlight>,
    /// Time until all writes were logged, those of NICs included, in milliseconds. Null before
    /// that, and at the destination.
    #[serde(alias = "mediation_ms")]
    #[schema(required)]
    pub log_start_ms: Option<f64>,
    /// Parts of `downtime_ms`, as the source measures them.
    #[serde(default)]
    #[schema(required)]
    pub downtime_parts_ms: DowntimeParts,
    /// Why the migration failed or is unresolved; null otherwise.
    #[schema(required)]
    pub error: Option<String>,
}

/// Parts of the downtime, in milliseconds; null for a part that has not ended.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
pub struct DowntimeParts {
    /// Parking vCPUs and stopping devices.
    #[schema(required)]
    pub stop: Option<f64>,
    /// Sending the last pages.
    #[schema(required)]
    pub memory: Option<f64>,
    /// Sending the state of vCPUs and devices.
    #[schema(required)]
    pub state: Option<f64>,
    /// Restoring the state at the destination.
    #[schema(required)]
    pub ready: Option<f64>,
    /// Starting the devices and the guest at the destination.
    #[schema(required)]
    pub go: Option<f64>,
}

/// Buffers that NICs held when the guest was stopped, by kind of queue. Packed rings do not show
/// this and are not counted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InFlight {
    /// Receive buffers that were not filled.
    pub rx: u32,
    /// Frames that were not sent.
    pub tx: u32,
    /// Commands on control queues without a response.
    pub cvq: u32,
}

/// Whether the machine could be sent, and the expected cost. A dry run changes neither host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MigrationTrial {
    /// The address of the destination.
    pub destination: String,
    /// Whether the destination would accept the machine now.
    pub movable: bool,
    /// All reasons against the migration.
    pub obstacles: Vec<MigrationObstacle>,
    /// The expected cost. Absent in a node daemon's response if the other node refused to wait for
    /// the machine.
    #[serde(flatten)]
    #[schema(value_type = Forecast)]
    pub forecast: Option<Forecast>,
}

/// The expected cost of a migration.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Forecast {
    /// Bytes of guest memory.
    pub ram_bytes: u64,
    /// Bytes of guest memory that hold data. The first round sends at most these. Pages that the
    /// guest writes meanwhile are sent again.
    pub data_bytes: u64,
    /// Bytes per second on the wire in the last migration to this destination; null without one, or
    /// if it was too short.
    #[schema(required)]
    pub bytes_per_second: Option<u64>,
    /// Expected time to send `data_bytes` at that rate, in milliseconds; null if unknown.
    #[schema(required)]
    pub copy_ms: Option<u64>,
    /// Time in which the destination opened its devices and mapped all guest memory for them, in
    /// milliseconds. Most NICs pin that memory. Null if the destination rejected the machine, did
    /// not answer or was not asked. A migration repeats this before it sends memory, while the
    /// guest runs.
    #[schema(required)]
    pub prepare_ms: Option<u64>,
    /// Assumed downtime for devices and state, in milliseconds, of a guest that writes nothing.
    pub downtime_min_ms: u64,
    /// The longest downtime, in milliseconds. The guest is stopped once the rest should fit.
    pub downtime_max_ms: u64,
}

/// A reason against a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationObstacle {
    /// The reason, with the values of both hosts.
    pub reason: String,
    /// A remedy, with a command if there is one; null if none is known.
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

/// The resolution of an indeterminate migration.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// Which host has the guest.
    #[serde(alias = "settle")]
    pub resolve: Place,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_has_one_to_sixteen_connections() {
        let send = |number: u32| {
            let text =
                format!(r#"{{"destination": "tcp:192.0.2.1:7444", "connections": {number}}}"#);
            serde_json::from_str::<SendConfig>(&text).map(|config| config.connections)
        };
        for number in [1, 16] {
            assert_eq!(send(number).unwrap(), u16::try_from(number).unwrap());
        }
        for number in [0, 17, 65536] {
            assert!(send(number).is_err(), "{number}");
        }
    }
}
