//! Migration of a machine to another process, and from one.
//!
//! Connects the order of a migration ([`crate::migration`]), which knows no machine, with the
//! machine, which knows no connection. Owns what both ends must have alike (`compat.rs`), the
//! progress of an outgoing migration (`outgoing_state.rs`) and the check whether one is possible
//! (`trial.rs`). Owns also the steps of the running machine (`requests.rs`) and the status of a
//! migration ([`Migration`]). It must not know the API, nor how the state is saved.
//!
//! ```text
//!   source                                         destination
//!   Handle::migrate (a thread of its own)          Machine::bring_up(Origin::Migration)
//!      │ OutgoingMigration ── on_vmm_thread           │ IncomingMigration: build, fill memory
//!      v                                              v
//!   Moved: Exit::Moved, the process ends           Moved: Machine::run
//!   Stayed: as before                              Stayed: no machine
//!   Indeterminate: ── Handle::resolve ───┐         Indeterminate: ── Handle::resolve ───┐
//!        here: resumes  there: ends <────┘              here: resumes  there: ends <────┘
//!        asked to stop: Exit::Indeterminate             asked to stop: Exit::Stopped
//! ```

mod compat;
mod incoming;
mod outgoing;
mod outgoing_state;
mod primaries;
mod requests;
mod throttle;
mod trial;

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use bellhop_api::machine::Pairing;
pub use bellhop_api::machine::{Direction, InFlight, ReceiveConfig, SendConfig};

pub use incoming::Arriving;
pub(super) use outgoing_state::OutgoingState;
pub(super) use throttle::Throttle;

use crate::Error;
use crate::migration::Monitor;
use crate::migration::connector::Connector;
use crate::migration::endpoint::{Endpoint, Route};
use crate::migration::progress::Snapshot;
use crate::migration::tls::{Tls, TlsFiles};

/// Loads the certificates that protect a migration to or from `endpoint`.
///
/// # Errors
/// `BadTls`: certificates are required and missing, or they cannot be used.
fn load_tls(
    endpoint: &Endpoint,
    pairing: Option<&Pairing>,
    files: Option<&TlsFiles>,
    plaintext: bool,
) -> Result<Option<Tls>, Error> {
    if let Some(terms) = pairing.and_then(|pairing| pairing.tls.as_ref()) {
        return Tls::paired(terms).map(Some);
    }
    match (endpoint, files) {
        (Endpoint::Tcp { .. }, None) if !plaintext => Err(Error::tls(format!(
            "{endpoint} leaves this host: give the certificates that protect the guest \
             (certificate, key, authority), or allow plaintext"
        ))),
        (_, files) => Ok(files.map(Tls::load).transpose()?),
    }
}

/// Prepares an outgoing migration. `connector` is the socket of a process that opens its
/// connections.
///
/// # Errors
/// `BadTls`: certificates are required and missing, or they cannot be used. `NoDestination`: the
/// socket is no such one.
pub fn route(config: &SendConfig, connector: Option<OwnedFd>) -> Result<Route, Error> {
    let endpoint = config.destination.clone();
    let (pairing, files) = (config.pairing.as_ref(), config.tls.as_ref());
    Ok(Route {
        tls: load_tls(&endpoint, pairing, files, config.plaintext)?,
        connector: connector.map(Connector::new).transpose()?,
        endpoint,
    })
}

/// Converts a duration to whole milliseconds, the unit of the API.
#[must_use]
pub fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// How a migration ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationEnd {
    /// The guest runs at the destination.
    Moved,
    /// The guest is at the source: it runs, or it was quiesced there before. `why` gives the
    /// reason.
    Stayed {
        /// The reason and its causes.
        why: String,
    },
    /// One of the hosts has the guest, but this host cannot determine which. The machine is
    /// quiesced here until [`Handle::resolve`](super::Handle::resolve).
    Indeterminate {
        /// The cause.
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

/// A migration, for those who watch or cancel it. Clones refer to the same migration.
#[derive(Debug, Clone)]
pub struct Migration(Arc<Shared>);

impl Migration {
    /// Creates the record of a migration that begins.
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

    /// Returns the direction.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.0.direction
    }

    /// Returns the address of the other host, or the address on which this host waits for it.
    #[must_use]
    pub fn peer(&self) -> &Endpoint {
        &self.0.peer
    }

    /// Returns the progress.
    #[must_use]
    pub fn progress(&self) -> Snapshot {
        self.0.monitor.progress.snapshot()
    }

    /// Returns the buffers that NICs had received and not used when they stopped for the migration.
    /// `None` before that, and at the destination.
    #[must_use]
    pub fn in_flight(&self) -> Option<InFlight> {
        self.0.in_flight.get().copied()
    }

    fn stopped(&self, in_flight: InFlight) {
        // A machine is stopped only once.
        let _ = self.0.in_flight.set(in_flight);
    }

    /// Returns the result; `None` before the end.
    #[must_use]
    pub fn end(&self) -> Option<MigrationEnd> {
        self.0.ended.lock().end.clone()
    }

    /// As [`Migration::end`], for a caller who waited for the result: it also releases the source's
    /// process, which waits until the result is read.
    #[must_use]
    pub fn see_end(&self) -> Option<MigrationEnd> {
        let mut ended = self.0.ended.lock();
        ended.seen = ended.end.is_some();
        self.0.changed.notify_all();
        ended.end.clone()
    }

    /// Cancels the migration, which is possible until GO. It ends a moment later.
    pub fn cancel(&self) {
        self.0.monitor.cancel.cancel();
    }

    pub(super) fn monitor(&self) -> &Monitor {
        &self.0.monitor
    }

    /// Records the result: where the guest is, or that this is unknown.
    pub(super) fn finish(&self, end: MigrationEnd) {
        match &end {
            MigrationEnd::Moved => tracing::info!(peer = %self.0.peer, "migration done"),
            MigrationEnd::Stayed { why } => tracing::warn!(why, "the machine did not move"),
            MigrationEnd::Indeterminate { why } => tracing::error!(
                why,
                "the guest's location is unknown: it stays stopped here until a client resolves it"
            ),
        }
        let mut ended = self.0.ended.lock();
        *ended = Ended {
            end: Some(end),
            seen: false,
        };
        self.0.changed.notify_all();
    }

    /// Waits until a client has read the result, for at most `limit`.
    pub(super) fn wait_seen(&self, limit: Duration) {
        let mut ended = self.0.ended.lock();
        let changed = &self.0.changed;
        changed.wait_while_for(&mut ended, |ended| !ended.seen, limit);
    }
}
