//! A machine that leaves for another process, or comes from one.
//!
//! Joins the order of a migration ([`crate::migration`]), which knows no machine, with the machine, which knows no
//! connection. Owns what both ends must have alike (`compat.rs`), how far a machine's leaving is (`leaving.rs`), whether it
//! could leave (`trial.rs`), the steps of the running machine meanwhile (`requests.rs`), and what is shown of a migration
//! ([`Migration`]). It must not know the API, nor how the state is saved.
//!
//! ```text
//!   source                                             destination
//!   Handle::migrate (a thread of its own)              Machine::bring_up(Origin::Migration) (the vmm thread)
//!      │ Departure ── on_vmm_thread ────> vmm thread      │ Arrival: builds the machine, fills its memory
//!      v                                                  v
//!   Moved: Exit::Moved, the process ends               Moved: Machine::run
//!   Stayed: as before                                  Stayed: no machine
//!   Unsettled: stands still ── Handle::settle ─┐       Unsettled: stands still ── Handle::settle ─┐
//!        here: goes on   there: ends  <────────┘            here: goes on   there: ends  <─────────┘
//!        told to stop: Exit::Unsettled                      told to stop: Exit::Stopped
//! ```

mod arrival;
mod compat;
mod departure;
mod leaving;
mod requests;
mod throttle;
mod trial;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use arrival::Arriving;
pub use compat::NotMovable;
pub(super) use leaving::Leaving;
pub(super) use throttle::Throttle;
pub use trial::{Obstacle, Trial};

use super::ring_watch::InFlight;
use crate::config::{CpuAffinity, HugePageSize, MemorySize, VdpaConfig};
use crate::migration::endpoint::{Endpoint, EndpointError};
use crate::migration::progress::Snapshot;
use crate::migration::tls::{Tls, TlsFiles};
use crate::migration::{Monitor, protocol::CONNECTIONS_MAX};

/// Which way a machine goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Direction {
    /// It leaves.
    Send,
    /// It comes.
    Receive,
}

/// How a machine is to leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SendConfig {
    /// Where the destination waits: `unix:/PATH` or `tcp:HOST:PORT`.
    #[schema(value_type = String)]
    pub destination: Endpoint,
    /// How long the guest may stand still, in milliseconds; 300 if not given.
    #[serde(default = "default_downtime_ms")]
    pub downtime_ms: u32,
    /// After how many seconds it is given up if the guest writes faster than memory goes over; 600 if not
    /// given.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: u32,
    /// Connections that carry memory, 1 to 16; 2 if not given.
    #[serde(default = "default_connections")]
    #[schema(minimum = 1, maximum = 16)]
    pub connections: u16,
    /// The certificates, over TCP.
    #[serde(default)]
    pub tls: Option<TlsFiles>,
    /// Over TCP without TLS: whoever is on the way can read and change the guest.
    #[serde(default)]
    pub plaintext: bool,
    /// Compare all of the guest's memory at both ends before it runs there, by checksums: if a byte differs it stays. The
    /// source reads all of its memory while the guest stands still, for longer than `downtime_ms`; the destination reads back
    /// each page as it comes. For who does not trust a device's log of what it has written.
    #[serde(default)]
    pub verify_memory: bool,
    /// Only ask whether the destination would take it, and what it would cost: nothing changes, there or here.
    #[serde(default)]
    pub dry_run: bool,
}

const fn default_downtime_ms() -> u32 {
    300
}

const fn default_timeout_s() -> u32 {
    600
}

const fn default_connections() -> u16 {
    2
}

impl SendConfig {
    /// To `destination`, with the defaults: 300 ms, 600 s, two connections.
    #[must_use]
    pub fn new(destination: Endpoint) -> Self {
        Self {
            destination,
            downtime_ms: default_downtime_ms(),
            timeout_s: default_timeout_s(),
            connections: default_connections(),
            tls: None,
            plaintext: false,
            verify_memory: false,
            dry_run: false,
        }
    }

    /// Loads the certificates.
    ///
    /// # Errors
    /// [`EndpointError`]: there are none where they are needed, or they cannot be used.
    pub fn load_tls(&self) -> Result<Option<Tls>, EndpointError> {
        load_tls(&self.destination, self.tls.as_ref(), self.plaintext)
    }

    /// Whether [`SendConfig::connections`] is possible.
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
    /// The vDPA devices here, each with the `id` of the NIC that it is to be: one for each NIC of the machine.
    #[serde(default)]
    pub vdpa: Vec<VdpaConfig>,
    /// The kernel that the guest boots from at its next reboot. No path that the source names is opened for another host, so it
    /// is required over TCP; over a Unix socket, which only this user's processes can use, it is the source's where none is
    /// given.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// The initial RAM file system of that; required over TCP where the machine has one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub initramfs: Option<PathBuf>,
    /// The most guest memory that a source may bring; without it, what this host has free when one comes (of the NUMA node and
    /// the huge pages, if those are named).
    #[serde(default)]
    #[schema(schema_with = crate::config::schema::memory_max)]
    pub max_memory: Option<MemorySize>,
    /// The guest's memory is made of these huge pages here, whatever it was made of at the source.
    #[serde(default)]
    #[schema(schema_with = crate::config::schema::hugepages)]
    pub hugepages: Option<HugePageSize>,
    /// It comes from this NUMA node here; from any where none is given, whatever the source said of its own.
    #[serde(default)]
    #[schema(maximum = 65535)]
    pub host_numa_node: Option<u16>,
    /// Which CPUs of this host each vCPU may run on; anywhere where none is given, whatever the source said of its own.
    #[serde(default)]
    #[schema(schema_with = crate::config::schema::cpu_affinity)]
    pub cpu_affinity: CpuAffinity,
    /// The certificates, over TCP.
    #[serde(default)]
    pub tls: Option<TlsFiles>,
    /// Over TCP without TLS: whoever reaches the port can send a guest.
    #[serde(default)]
    pub plaintext: bool,
}

/// What protects a migration to or from `endpoint`.
fn load_tls(
    endpoint: &Endpoint,
    files: Option<&TlsFiles>,
    plaintext: bool,
) -> Result<Option<Tls>, EndpointError> {
    match (endpoint, files) {
        (Endpoint::Tcp { .. }, None) if !plaintext => Err(EndpointError::NoTls(endpoint.clone())),
        (_, files) => Ok(files.map(Tls::load).transpose()?),
    }
}

/// How a migration ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationEnd {
    /// The guest runs at the destination.
    Moved,
    /// The guest runs at the source, or stood still there before; `why` it did not move.
    Stayed {
        /// The reason and its causes.
        why: String,
    },
    /// One of the hosts has the guest, and it cannot be known from here which: it stands still here until
    /// [`Handle::settle`](super::Handle::settle).
    Unsettled {
        /// What went wrong.
        why: String,
    },
}

#[derive(Debug, Default)]
struct Ended {
    end: Option<MigrationEnd>,
    seen: bool,
}

#[derive(Debug)]
struct Shared {
    direction: Direction,
    peer: Endpoint,
    monitor: Monitor,
    in_flight: OnceLock<InFlight>,
    ended: Mutex<Ended>,
    changed: Condvar,
}

/// A migration, for those who watch and end it. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Migration(Arc<Shared>);

impl Migration {
    /// One that begins.
    #[must_use]
    pub fn new(direction: Direction, peer: Endpoint) -> Self {
        Self(Arc::new(Shared {
            direction,
            peer,
            monitor: Monitor::default(),
            in_flight: OnceLock::new(),
            ended: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Which way it goes.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.0.direction
    }

    /// Where the other host is, or where it is waited for.
    #[must_use]
    pub fn peer(&self) -> &Endpoint {
        &self.0.peer
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Snapshot {
        self.0.monitor.progress.snapshot()
    }

    /// What NICs had been given and had not used when they were stopped to be sent; `None` before, and at the
    /// destination.
    #[must_use]
    pub fn in_flight(&self) -> Option<InFlight> {
        self.0.in_flight.get().copied()
    }

    fn stopped(&self, in_flight: InFlight) {
        // A machine is stopped once.
        let _ = self.0.in_flight.set(in_flight);
    }

    /// How it ended; `None` before.
    #[must_use]
    pub fn end(&self) -> Option<MigrationEnd> {
        self.lock().end.clone()
    }

    /// As [`Migration::end`], for somebody who waited for it: the process of a source need not wait any longer to be read.
    #[must_use]
    pub fn see_end(&self) -> Option<MigrationEnd> {
        let mut ended = self.lock();
        ended.seen = ended.end.is_some();
        self.0.changed.notify_all();
        ended.end.clone()
    }

    /// Asks for its end, until GO. It ends a moment later.
    pub fn cancel(&self) {
        self.0.monitor.cancel.cancel();
    }

    pub(super) fn monitor(&self) -> &Monitor {
        &self.0.monitor
    }

    /// It is settled where the guest is, or that it is not.
    pub(super) fn finish(&self, end: MigrationEnd) {
        match &end {
            MigrationEnd::Moved => tracing::info!(peer = %self.0.peer, "the migration is done"),
            MigrationEnd::Stayed { why } => tracing::warn!(why, "the machine did not move"),
            MigrationEnd::Unsettled { why } => tracing::error!(
                why,
                "it is not settled where the guest is: it stands still here until somebody says it"
            ),
        }
        let mut ended = self.lock();
        *ended = Ended {
            end: Some(end),
            seen: false,
        };
        self.0.changed.notify_all();
    }

    /// Waits until somebody has seen the end, at most so long.
    pub(super) fn wait_seen(&self, limit: Duration) {
        let ended = self.lock();
        drop(
            self.0
                .changed
                .wait_timeout_while(ended, limit, |ended| !ended.seen),
        );
    }

    fn lock(&self) -> MutexGuard<'_, Ended> {
        self.0.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
