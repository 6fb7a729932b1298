//! The place of one virtual machine in the daemon's memory.
//!
//! Owns the lock under which its steps are done, and what everybody may see of it meanwhile. It must not know
//! what the steps are.

use std::sync::Arc;
use std::time::Instant;

use bellhop_api::machine::{Handshake, VmState, VmStatus};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::process::Identity;
use super::record::Record;
use super::spec::{VmName, VmSpec};

/// What is known of a machine's process.
#[derive(Debug, Clone)]
pub(crate) struct Live {
    /// Which it is.
    pub(crate) identity: Identity,
    /// It was started by an earlier daemon.
    pub(crate) adopted: bool,
    /// The version of Bellhop that it runs, once it has said that.
    pub(crate) version: Option<String>,
    /// The level of its API.
    pub(crate) api: Option<u32>,
    /// What it does; none while it does not say.
    pub(crate) state: Option<VmState>,
    /// Until when its guest may power off.
    pub(crate) stopping_until: Option<Instant>,
    /// All that it reported of itself last; none while it does not answer.
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

    /// Whether it is waited for its guest to power off.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping_until.is_some_and(|end| Instant::now() < end)
    }
}

/// What everybody may see.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// None: there is no such machine, or not yet.
    pub(crate) record: Option<Record>,
    /// What it is about to become: its devices are taken from now on.
    pub(crate) pending: Option<VmSpec>,
    /// Its process.
    pub(crate) live: Option<Live>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Slot {
    name: VmName,
    /// Held while steps are done.
    pub(crate) steps: Arc<tokio::sync::Mutex<()>>,
    /// Told when there is something new about its migration.
    pub(crate) migration: Notify,
    /// Wakes all who wait for another record.
    pub(super) record_changed: Notify,
    view: Mutex<View>,
}

impl Slot {
    pub(crate) fn new(name: VmName, record: Option<Record>) -> Self {
        Self {
            name,
            steps: Arc::default(),
            migration: Notify::new(),
            record_changed: Notify::new(),
            view: Mutex::new(View {
                record,
                ..View::default()
            }),
        }
    }

    pub(crate) fn name(&self) -> &VmName {
        &self.name
    }

    /// What there is now. Never held while something is waited for.
    pub(crate) fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock()
    }

    /// This is its record now.
    pub(super) fn shows(&self, record: Option<&Record>) {
        let mut view = self.view();
        if record.is_none_or(|record| record.process().is_none()) {
            view.live = None;
        }
        view.record = record.cloned();
        drop(view);
        self.record_changed.notify_waiters();
    }

    pub(crate) fn record(&self) -> Option<Record> {
        self.view().record.clone()
    }

    /// Changes what is known of this process, unless there is another one by now.
    pub(crate) fn update(&self, identity: Identity, change: impl FnOnce(&mut Live)) {
        if let Some(live) = &mut self.view().live
            && live.identity == identity
        {
            change(live);
        }
    }

    /// Which program its process says that it is.
    pub(crate) fn is_of(&self, identity: Identity, who: &Handshake) {
        self.update(identity, |live| {
            live.version = Some(who.version.clone());
            live.api = Some(who.api);
        });
    }
}
