//! Operations: long requests to the daemon, from their beginning to their result.
//!
//! ```text
//!   begin ──> running ──> done | failed | cancelled      in memory and in the store
//!                │
//!                └─ the daemon ends ──> next daemon: follows migrations, fails the rest
//! ```
//! A running request belongs to a task, which ends its operation. A migration belongs to the VM's
//! process: the supervisor queries that process, and the last report or its exit decides.
//!
//! Owns the records, their limits and the clients that wait for them. `work.rs` begins and ends the
//! work.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::StatusCode;
use bellhop_api::ErrorBody;
use bellhop_api::machine::{MigrationPhase, MigrationStatus};
use bellhop_api::node::{
    Operation, OperationKind, OperationPhase, OperationProgress, OperationQuery, OperationResult,
    Role,
};
use bellhop_common::text::since_1970;
use parking_lot::Mutex;
use tokio::sync::Notify;
use vmm::http::Problem as _;
use vmm::http::budget::Budget;
use vmm::machine::milliseconds;

use super::outgoing::remedy;
use super::spec::VmName;
use super::steps::ProxiedResponse;
use crate::error::Error;
use crate::store::{OPERATIONS, Store};

/// How many ended operations are kept.
const KEPT: usize = 1000;
/// How many may run before requests for more are refused.
const RUNNING_MAX: usize = 128;
/// How many clients may wait for the end of operations.
const WAITING_MAX: usize = 32;
/// The longest text of a VM's process in a record, in characters: the process may be hostile.
const TEXT_MAX: usize = 512;
/// The longest message: such a text, and the daemon's own.
const MESSAGE_MAX: usize = 2 * TEXT_MAX;
/// The most causes of an error.
const CAUSES_MAX: usize = 8;

/// The code of a migration whose guest stays here.
const NOT_MOVED: &str = "not_moved";

/// The requester of an operation.
#[derive(Debug, Clone)]
pub(crate) struct Requested {
    /// The client, as in the audit log.
    pub(crate) by: String,
    /// The ID of the request.
    pub(crate) request_id: String,
}

/// The answer to a request to send a VM elsewhere.
#[derive(Debug)]
pub(crate) enum Sent {
    /// It is in progress.
    Begun(Box<Operation>),
    /// The VM rejects the request, or reports only whether it could be sent.
    Answered(ProxiedResponse),
}

/// An operation in memory.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) operation: Operation,
    /// A client has cancelled it.
    pub(super) cancelled: bool,
}

/// All kept operations, by ID.
#[derive(Debug)]
pub(crate) struct Operations {
    all: Mutex<BTreeMap<String, Entry>>,
    /// Wakes all clients that wait for an end.
    ended: Notify,
    waiting: Budget,
}

impl Operations {
    /// Reads the operations from the store.
    pub(super) fn read(store: &Store) -> Result<Self, Error> {
        let all = store.all(OPERATIONS)?.into_iter();
        let all = all.map(|(id, operation)| {
            let entry = Entry {
                operation,
                cancelled: false,
            };
            (id, entry)
        });
        Ok(Self {
            all: Mutex::new(all.collect()),
            ended: Notify::new(),
            waiting: Budget::new(WAITING_MAX),
        })
    }

    /// The operations that match a query, the oldest first.
    pub(crate) fn list(&self, query: &OperationQuery) -> Vec<Operation> {
        let fits = |one: &Operation| {
            query.kind.is_none_or(|kind| one.kind == kind)
                && query.phase.is_none_or(|phase| one.phase == phase)
                && query.target.as_ref().is_none_or(|vm| one.target == *vm)
        };
        let all = self.all.lock();
        let all = all.values().map(|entry| &entry.operation);
        all.filter(|one| fits(one)).cloned().collect()
    }

    /// One operation.
    ///
    /// # Errors
    /// It does not exist.
    pub(crate) fn show(&self, id: &str) -> Result<Operation, Error> {
        let all = self.all.lock();
        let found = all.get(id).map(|entry| entry.operation.clone());
        found.ok_or_else(|| {
            let message = "the operation does not exist, or ended long ago";
            let error = Error::answered(StatusCode::NOT_FOUND, "no_such_operation", message);
            error.hint("GET /v1/operations lists them")
        })
    }

    /// One operation for a client of this role, once it has ended or this time is over.
    ///
    /// # Errors
    /// It does not exist, or too many clients wait.
    pub(crate) async fn wait(
        &self,
        id: &str,
        role: Role,
        time: Duration,
    ) -> Result<Operation, Error> {
        let _place = self.waiting.try_take(role).ok_or_else(|| {
            let message = format!("too many clients with the role {role} wait for operations");
            Error::unavailable("too_many_watchers", message).hint("ask without `wait`")
        })?;
        let end = tokio::time::Instant::now() + time;
        loop {
            // Before the check, so that no end is missed.
            let ended = self.ended.notified();
            let operation = self.show(id)?;
            if operation.phase.is_end() || tokio::time::timeout_at(end, ended).await.is_err() {
                return Ok(operation);
            }
        }
    }

    /// The migration of this VM that is in progress.
    pub(super) fn migration_of(&self, vm: &VmName) -> Option<String> {
        self.running(OperationKind::Migration, vm)
    }

    /// The operation of this kind on this VM that is in progress.
    pub(super) fn running(&self, kind: OperationKind, vm: &VmName) -> Option<String> {
        let all = self.all.lock();
        let mut all = all.values().map(|entry| &entry.operation);
        let found = all.find(|one| {
            one.kind == kind && one.phase == OperationPhase::Running && one.target == vm.as_str()
        });
        found.map(|one| one.id.clone())
    }

    pub(super) fn begin(
        &self,
        kind: OperationKind,
        vm: &VmName,
        requested: Requested,
    ) -> Operation {
        let mut all = self.all.lock();
        let now = since_1970();
        let after = all.last_key_value().and_then(|(id, _)| id.parse().ok());
        let id = now.as_micros().max(after.unwrap_or(0_u128) + 1);
        // Zero-padded, so that the order of text is the order of numbers.
        let id = format!("{id:016}");
        let operation = Operation {
            id: id.clone(),
            kind,
            target: vm.to_string(),
            phase: OperationPhase::Running,
            progress: None,
            error: None,
            result: None,
            created_ms: milliseconds(now),
            ended_ms: None,
            requested_by: cut(&requested.by),
            request_id: requested.request_id,
        };
        let entry = Entry {
            operation: operation.clone(),
            cancelled: false,
        };
        all.insert(id, entry);
        operation
    }

    /// The ended form of a running operation. It must be stored before it is visible.
    pub(super) fn at_end(
        &self,
        id: &str,
        end: Result<Option<OperationResult>, ErrorBody>,
    ) -> Option<Operation> {
        let all = self.all.lock();
        let entry = all.get(id)?;
        let mut operation = entry.operation.clone();
        if operation.phase.is_end() {
            return None;
        }
        operation.ended_ms = Some(milliseconds(since_1970()));
        match end {
            Ok(result) => {
                operation.phase = OperationPhase::Done;
                operation.result = result.or(operation.result);
            }
            Err(error) if entry.cancelled && error.code == NOT_MOVED => {
                operation.phase = OperationPhase::Cancelled;
            }
            Err(mut error) => {
                error.set_request_id(&operation.request_id);
                operation.phase = OperationPhase::Failed;
                operation.error = Some(error);
            }
        }
        Some(operation)
    }

    /// Publishes an ended operation. Returns the operations that are no longer kept.
    pub(super) fn show_end(&self, operation: Operation) -> Vec<String> {
        let mut all = self.all.lock();
        if let Some(entry) = all.get_mut(&operation.id) {
            entry.operation = operation;
        }
        let over = all.values().map(|one| &one.operation);
        let over = over.filter(|one| one.phase.is_end());
        let mut over: Vec<_> = over.map(|one| (one.ended_ms, one.id.clone())).collect();
        // A long one may have begun before others that ended long ago.
        over.sort_unstable();
        let excess = over.len().saturating_sub(KEPT);
        let dropped: Vec<String> = over.into_iter().take(excess).map(|(_, id)| id).collect();
        for id in &dropped {
            all.remove(id);
        }
        drop(all);
        self.ended.notify_waiters();
        dropped
    }

    pub(super) fn update(&self, id: &str, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.all.lock().get_mut(id) {
            change(entry);
        }
    }

    /// Fails if too many run.
    pub(super) fn check_room(&self) -> Result<(), Error> {
        let all = self.all.lock();
        let running = all.values().filter(|one| !one.operation.phase.is_end());
        if running.count() < RUNNING_MAX {
            return Ok(());
        }
        let message = format!("{RUNNING_MAX} operations are already running");
        Err(Error::unavailable("busy", message).hint("try again later"))
    }
}

pub(super) fn cut(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}

/// An error as a record keeps it.
pub(super) fn kept(error: &Error) -> ErrorBody {
    let mut body = error.to_body();
    body.causes.truncate(CAUSES_MAX);
    for text in &mut body.causes {
        *text = cut(text);
    }
    body.message = body.message.chars().take(MESSAGE_MAX).collect();
    body.detail.clone_from(&body.message);
    body
}

/// The result of a migration, from the VM's report; none: it has not ended.
pub(super) fn end_of(vm: &VmName, status: &MigrationStatus) -> Option<Result<(), Error>> {
    let why = status.error.as_deref().unwrap_or("unknown reason");
    match status.phase {
        MigrationPhase::Moved => Some(Ok(())),
        MigrationPhase::Stayed => {
            let message = format!("{vm} did not migrate and stays here: {why}");
            Some(Err(Error::answered(
                StatusCode::BAD_GATEWAY,
                NOT_MOVED,
                message,
            )))
        }
        MigrationPhase::Indeterminate => {
            let remedy = remedy(vm.as_str());
            let message =
                format!("{vm} is stopped, and may run at the destination: {why}; {remedy}");
            Some(Err(Error::conflict("migration_unknown", message)))
        }
        _ => None,
    }
}

/// The progress of a migration: bytes of guest memory at the destination.
pub(super) fn progress(status: &MigrationStatus) -> OperationProgress {
    let left = match status.rounds {
        0 => status.ram_bytes,
        _ => status.left_bytes,
    };
    OperationProgress {
        done: status.ram_bytes.saturating_sub(left),
        total: status.ram_bytes,
        unit: "bytes".to_owned(),
        forecast_downtime_ms: status.forecast_downtime_ms,
    }
}

#[cfg(test)]
mod tests;
