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

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

pub use bellhop_api::machine::{Direction, InFlight, ReceiveConfig, SendConfig};

pub use arrival::Arriving;
pub(super) use leaving::Leaving;
pub(super) use throttle::Throttle;

use crate::Error;
use crate::migration::Monitor;
use crate::migration::endpoint::Endpoint;
use crate::migration::progress::Snapshot;
use crate::migration::tls::{Tls, TlsFiles};

/// What protects a migration to or from `endpoint`: its certificates, loaded.
///
/// # Errors
/// `BadTls`: there are none where they are needed, or they cannot be used.
pub fn load_tls(
    endpoint: &Endpoint,
    files: Option<&TlsFiles>,
    plaintext: bool,
) -> Result<Option<Tls>, Error> {
    match (endpoint, files) {
        (Endpoint::Tcp { .. }, None) if !plaintext => Err(Error::tls(format!(
            "{endpoint} leaves this host: say which certificates protect the guest (certificate, \
             key, authority), or that it is to go in plaintext"
        ))),
        (_, files) => Ok(files.map(Tls::load).transpose()?),
    }
}

/// A duration in whole milliseconds, as the API has it.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
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
        self.0.ended.lock().end.clone()
    }

    /// As [`Migration::end`], for somebody who waited for it: the process of a source need not wait any longer to be read.
    #[must_use]
    pub fn see_end(&self) -> Option<MigrationEnd> {
        let mut ended = self.0.ended.lock();
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
        let mut ended = self.0.ended.lock();
        *ended = Ended {
            end: Some(end),
            seen: false,
        };
        self.0.changed.notify_all();
    }

    /// Waits until somebody has seen the end, at most so long.
    pub(super) fn wait_seen(&self, limit: Duration) {
        let mut ended = self.0.ended.lock();
        let changed = &self.0.changed;
        changed.wait_while_for(&mut ended, |ended| !ended.seen, limit);
    }
}
