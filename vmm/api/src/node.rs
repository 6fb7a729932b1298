//! The node daemon's API.

mod event;
mod nic;
mod vm;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::endpoint::Endpoint;
use crate::machine::migration::send_request;
use crate::machine::{SendConfig, TlsFiles};

pub use event::{Event, EventChange};
pub use nic::{BadNicId, NicId, NicKind, NicMove, NicSettings, NicSettingsError, NicStandBy};
pub use vm::{ConsolePaths, Desired, MayBeElsewhere, Restart, VmInfo, VmNic, VmPhase};

/// The daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// The version of Bellhop.
    pub version: String,
    /// The level of this API: grows when clients have to know of a change.
    pub api: u32,
    /// The daemon's process.
    pub pid: u32,
    /// Its socket.
    pub socket: String,
}

send_request! {
    /// To which node a machine is sent, and how.
    SendToNode {
        /// The other node's daemon: `https://HOST:PORT`, or `node:/PATH` of its socket on this
        /// host. For a process that waits (`unix:/PATH`, `tcp:HOST:PORT`) this is as the machine's
        /// own API describes it.
        pub destination: String,
        /// The machine's name there; its name here if none is given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<String>, pattern = "^[a-z0-9][a-z0-9-]{0,62}$")]
        pub name: Option<String>,
        /// What all of its NICs are made of there, as `from` of a NIC, also those on devices that
        /// are there already; without it each is made of, or found under, the same name as here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
    }
}

impl SendToNode {
    /// The same for the machine's own process, which sends it to this endpoint.
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
            downtime_ms: self.downtime_ms,
            timeout_s: self.timeout_s,
            connections: self.connections,
            verify_memory: self.verify_memory,
            dry_run: self.dry_run,
        }
    }
}

/// Where a machine is waited for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Awaited {
    /// `unix:/PATH` or `tcp:HOST:PORT`.
    pub listen: String,
}
