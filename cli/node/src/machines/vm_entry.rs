//! The entry of one VM in the daemon's memory.
//!
//! Owns the lock for the VM's steps, and the state that readers see meanwhile. It must not know the
//! steps.

use std::sync::Arc;
use std::time::Instant;

use bellhop_api::machine::{Handshake, VmState, VmStatus};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use vmm::http::budget::Budget;

use super::operations::cut;
use super::process::Identity;
use super::record::Record;
use super::spec::{VmName, VmSpec};
use crate::peers::Reception;

/// Clients' requests to a VM's process at a time. It serves 64 connections: the rest is for the
/// daemon itself.
const REQUESTS_MAX: usize = 32;
/// Clients that wait at a time for a change of a VM's process. It serves 32: the rest is for the
/// supervisor.
const WATCHES_MAX: usize = 16;

/// The known state of a VM's process.
#[derive(Debug, Clone)]
pub(crate) struct Live {
    /// Its identity.
    pub(crate) identity: Identity,
    /// Whether an earlier daemon started it.
    pub(crate) adopted: bool,
    /// The version of Bellhop that it runs, once it has reported that.
    pub(crate) version: Option<String>,
    /// The level of its API.
    pub(crate) api: Option<u32>,
    /// Its state; none while it does not report one.
    pub(crate) state: Option<VmState>,
    /// The deadline for its guest to power off.
    pub(crate) stopping_until: Option<Instant>,
    /// Its last full report; none while it does not answer.
    pub(crate) said: Option<Arc<VmStatus>>,
}

impl Live {
    pub(crate) fn new(identity: Identity, adopted: bool) -> Self {
        Self {
            identity,
            adopted,
            version: None,
            api: None,
            state: None,
            stopping_until: None,
            said: None,
        }
    }

    /// Whether the daemon waits for its guest to power off.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping_until.is_some_and(|end| Instant::now() < end)
    }
}

/// The state that readers see.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// None: the VM does not exist, or not yet.
    pub(crate) record: Option<Record>,
    /// The spec that it is about to get: its devices are reserved from now on.
    pub(crate) pending: Option<VmSpec>,
    /// Its process.
    pub(crate) live: Option<Live>,
    /// Why its process has not ended, although it was killed.
    pub(crate) not_ended: Option<String>,
}

/// The entry of a VM: see the module.
#[derive(Debug)]
pub(crate) struct VmEntry {
    name: VmName,
    /// Held while steps are done.
    pub(crate) steps: Arc<tokio::sync::Mutex<()>>,
    /// Notified when its migration has news.
    pub(crate) migration: Notify,
    /// Wakes all tasks that wait for a change of the record.
    pub(super) record_changed: Notify,
    /// Clients' requests to its process, except watches.
    pub(super) requests: Budget,
    /// Clients' watches of its process.
    pub(super) watches: Budget,
    /// For the process that is about to wait for the VM.
    pub(super) reception: Mutex<Option<Reception>>,
    view: Mutex<View>,
}

impl VmEntry {
    pub(crate) fn new(name: VmName, record: Option<Record>) -> Self {
        Self {
            name,
            steps: Arc::default(),
            migration: Notify::new(),
            record_changed: Notify::new(),
            requests: Budget::new(REQUESTS_MAX),
            watches: Budget::new(WATCHES_MAX),
            reception: Mutex::default(),
            view: Mutex::new(View {
                record,
                ..View::default()
            }),
        }
    }

    pub(crate) fn name(&self) -> &VmName {
        &self.name
    }

    /// The current state. The guard must not be held across a wait.
    pub(crate) fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock()
    }

    /// Publishes this record.
    pub(super) fn shows(&self, record: Option<&Record>) {
        let mut view = self.view();
        if record.is_none_or(|record| record.process().is_none()) {
            view.live = None;
            view.not_ended = None;
        }
        view.record = record.cloned();
        drop(view);
        self.record_changed.notify_waiters();
    }

    pub(crate) fn record(&self) -> Option<Record> {
        self.view().record.clone()
    }

    /// Changes the known state of this process, unless another one has replaced it.
    pub(crate) fn update(&self, identity: Identity, change: impl FnOnce(&mut Live)) {
        if let Some(live) = &mut self.view().live
            && live.identity == identity
        {
            change(live);
        }
    }

    /// Records the program that its process reports.
    pub(crate) fn is_of(&self, identity: Identity, who: &Handshake) {
        self.update(identity, |live| {
            live.version = Some(cut(&who.version));
            live.api = Some(who.api);
        });
    }
}
