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
//! Owns the records, their limits and the clients that wait for them.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use bellhop_api::ErrorBody;
use bellhop_api::machine::{
    Direction, EndReason, MigrationPhase, MigrationStatus, SnapshotInfo, SnapshotRequest,
    UpgradeRequest, VmStatus,
};
use bellhop_api::node::{
    Operation, OperationKind, OperationPhase, OperationProgress, OperationQuery, OperationResult,
    SnapshotName, UpgradeInfo, VmSnapshotRequest,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::JoinHandle;
use vmm::http::Problem as _;

use super::condition::Condition;
use super::departure::remedy;
use super::error::unfinished;
use super::slot::Slot;
use super::spec::{VmName, VmSpec};
use super::steps::Passed;
use super::vmm::not_in_time;
use super::{Change, Machines};
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
/// How long an upgrade may take: far longer than a guest tolerates being paused.
const UPGRADE_TIME: Duration = Duration::from_secs(600);
/// The interval of checks of an upgrade.
const LOOK: Duration = Duration::from_millis(200);

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
    Answered(Passed),
}

#[derive(Debug)]
struct Entry {
    operation: Operation,
    /// A client has cancelled it.
    cancelled: bool,
}

/// All kept operations, by ID.
#[derive(Debug)]
pub(crate) struct Operations {
    all: Mutex<BTreeMap<String, Entry>>,
    /// Wakes all clients that wait for an end.
    ended: Notify,
    waiting: Semaphore,
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
            waiting: Semaphore::new(WAITING_MAX),
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

    /// One operation, once it has ended or this time is over.
    ///
    /// # Errors
    /// It does not exist, or too many clients wait.
    pub(crate) async fn wait(&self, id: &str, time: Duration) -> Result<Operation, Error> {
        let _place = self.waiting.try_acquire().map_err(|_| {
            let message = format!("{WAITING_MAX} clients already wait for operations");
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
    fn running(&self, kind: OperationKind, vm: &VmName) -> Option<String> {
        let all = self.all.lock();
        let mut all = all.values().map(|entry| &entry.operation);
        let found = all.find(|one| {
            one.kind == kind && one.phase == OperationPhase::Running && one.target == vm.as_str()
        });
        found.map(|one| one.id.clone())
    }

    fn begin(&self, kind: OperationKind, vm: &VmName, requested: Requested) -> Operation {
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
    fn at_end(
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
    fn show_end(&self, operation: Operation) -> Vec<String> {
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

    fn update(&self, id: &str, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.all.lock().get_mut(id) {
            change(entry);
        }
    }

    /// Fails if too many run.
    fn check_room(&self) -> Result<(), Error> {
        let all = self.all.lock();
        let running = all.values().filter(|one| !one.operation.phase.is_end());
        if running.count() < RUNNING_MAX {
            return Ok(());
        }
        let message = format!("{RUNNING_MAX} operations are already running");
        Err(Error::unavailable("busy", message).hint("try again later"))
    }
}

pub(super) fn since_1970() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn cut(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}

/// An error as a record keeps it.
fn kept(error: &Error) -> ErrorBody {
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
fn end_of(vm: &VmName, status: &MigrationStatus) -> Option<Result<(), Error>> {
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
        MigrationPhase::Unsettled => {
            let remedy = remedy(vm.as_str());
            let message =
                format!("{vm} is stopped, and may run at the destination: {why}; {remedy}");
            Some(Err(Error::conflict("may_be_elsewhere", message)))
        }
        _ => None,
    }
}

/// The end of an operation.
type End = Result<Option<OperationResult>, Error>;

impl Machines {
    fn begin_operation(&self, kind: OperationKind, vm: &VmName, by: Requested) -> Operation {
        let operation = self.operations.begin(kind, vm, by);
        self.store_operation(&operation);
        self.tell_operation(vm, &operation);
        operation
    }

    fn end_operation(&self, id: &str, end: &End) {
        let end = match end {
            Ok(result) => Ok(result.clone()),
            Err(error) => Err(kept(error)),
        };
        let Some(operation) = self.operations.at_end(id, end) else {
            return;
        };
        self.store_operation(&operation);
        let dropped = self.operations.show_end(operation.clone());
        if let Ok(vm) = operation.target.parse() {
            self.tell_operation(&vm, &operation);
        }
        for id in dropped {
            if let Err(error) = self.store.remove(OPERATIONS, &id) {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(id, error, "cannot delete an old operation from the store");
            }
        }
    }

    /// Stores an operation. If this fails, the work continues, but the next daemon does not know of
    /// it.
    fn store_operation(&self, operation: &Operation) {
        if let Err(error) = self.store.put(OPERATIONS, &operation.id, operation) {
            let (id, error) = (&operation.id, &error as &dyn std::error::Error);
            tracing::error!(id, error, "cannot store an operation");
        }
    }

    fn tell_operation(&self, vm: &VmName, operation: &Operation) {
        let change = Change::Operation {
            id: operation.id.clone(),
            kind: operation.kind,
            phase: operation.phase,
            reason: operation.error.as_ref().map(|error| error.message.clone()),
        };
        self.tell(vm, change);
    }

    /// Ends the operations of the previous daemon, except migrations with a pending result.
    pub(super) fn end_interrupted(&self) {
        for operation in self.operations.list(&OperationQuery {
            phase: Some(OperationPhase::Running),
            ..OperationQuery::default()
        }) {
            let vm = operation.target.parse();
            let slot = vm.ok().and_then(|vm| self.find(&vm).ok());
            let sent = slot.is_some_and(|slot| {
                let record = slot.record();
                record.is_some_and(|record| record.departure.is_some())
            });
            if operation.kind != OperationKind::Migration || !sent {
                self.end_operation(&operation.id, &Err(interrupted()));
            }
        }
    }

    /// Handles a VM's report of the progress or the result of its migration.
    pub(super) fn migration_reports(&self, vm: &VmName, status: &MigrationStatus) {
        let Some(id) = self.operations.migration_of(vm) else {
            return;
        };
        // A phase of a later version cannot be written.
        if status.direction != Direction::Send || status.phase == MigrationPhase::Unknown {
            return;
        }
        let status = MigrationStatus {
            peer: cut(&status.peer),
            error: status.error.as_deref().map(cut),
            ..status.clone()
        };
        let end = end_of(vm, &status);
        self.operations.update(&id, |entry| {
            entry.operation.progress = Some(progress(&status));
            entry.operation.result = Some(OperationResult {
                migration: Some(status),
                ..OperationResult::default()
            });
        });
        if let Some(end) = end {
            self.end_operation(&id, &end.map(|()| None));
        }
    }

    /// Ends the migration of a VM whose process no longer knows of one: another program replaced
    /// it before this daemon read the result.
    pub(super) fn migration_forgotten(&self, vm: &VmName) {
        if let Some(id) = self.operations.migration_of(vm) {
            self.end_operation(&id, &Err(interrupted()));
        }
    }

    /// Ends the migration of a VM whose process is gone.
    pub(super) fn process_gone(&self, slot: &Slot) {
        let vm = slot.name();
        let Some(id) = self.operations.migration_of(vm) else {
            return;
        };
        // A VM that another node has leaves no record here.
        let end = slot.record().map_or(Ok(None), |record| {
            if let Some(departure) = record.may_be_elsewhere() {
                let (reason, remedy) = (departure.reason(), remedy(vm.as_str()));
                let message = format!("the location of {vm} is unknown: {reason}; {remedy}");
                return Err(Error::conflict("may_be_elsewhere", message));
            }
            match record.last_end {
                Some(end) if end.reason == EndReason::Moved => Ok(None),
                end => {
                    let why = end.map_or_else(|| "unknown reason".to_owned(), |end| end.detail);
                    let message = format!("{vm} did not migrate: its process ended: {why}");
                    Err(Error::conflict("ended", message))
                }
            }
        });
        if end.is_ok() {
            // The last report is older than the end.
            let forget = |entry: &mut Entry| entry.operation.result = None;
            self.operations.update(&id, forget);
        }
        self.end_operation(&id, &end);
    }

    /// Ends the migration of a VM that is about to be deleted.
    pub(super) fn migration_deleted(&self, vm: &VmName) {
        if let Some(id) = self.operations.migration_of(vm) {
            let message = format!("a client deleted {vm} during its migration");
            self.end_operation(&id, &Err(Error::conflict("deleting", message)));
        }
    }

    /// Sends a VM elsewhere with `send`, as an operation once the VM has answered. The caller holds
    /// the VM's lock.
    pub(super) fn send_as_operation(
        &self,
        slot: &Slot,
        by: Requested,
        send: impl FnOnce() -> Result<Passed, Error>,
    ) -> Result<Sent, Error> {
        let vm = slot.name();
        if self.operations.migration_of(vm).is_some() {
            // The result of the previous migration is available only until this one begins.
            self.look_for_guest(slot);
        }
        let sent = send();
        slot.migration.notify_one();
        let sent = sent?;
        if sent.status != StatusCode::ACCEPTED {
            return Ok(Sent::Answered(sent));
        }
        if let Some(id) = self.operations.migration_of(vm) {
            self.end_operation(&id, &Err(interrupted()));
        }
        let operation = self.begin_operation(OperationKind::Migration, vm, by);
        Ok(Sent::Begun(Box::new(operation)))
    }

    /// The last report of a VM that left this node about its migration.
    pub(crate) fn last_departure(&self, vm: &VmName) -> Option<MigrationStatus> {
        let record = self.find(vm).ok().and_then(|slot| slot.record());
        let left = record.is_none_or(|record| {
            let moved = record.departure.is_some_and(|departure| departure.moved);
            let end = record.last_end.map(|end| end.reason);
            moved || end == Some(EndReason::Moved)
        });
        if !left {
            return None;
        }
        let all = self.operations.list(&OperationQuery {
            kind: Some(OperationKind::Migration),
            target: Some(vm.to_string()),
            phase: Some(OperationPhase::Done),
        });
        all.into_iter().next_back()?.result?.migration
    }

    /// Cancels the migration of a VM that leaves.
    pub(crate) async fn cancel_migration(&self, vm: &VmName) -> Result<(), Error> {
        let vmm = self.vmm(vm)?;
        let Some(id) = self.operations.migration_of(vm) else {
            return vmm.cancel_migration().await;
        };
        // First, because the migration may have ended when the answer arrives.
        let mut before = false;
        self.operations.update(&id, |entry| {
            before = std::mem::replace(&mut entry.cancelled, true);
        });
        let asked = vmm.cancel_migration().await;
        if asked.is_err() {
            // An earlier request may have cancelled it.
            self.operations
                .update(&id, |entry| entry.cancelled = before);
        }
        asked
    }

    /// Cancels an operation.
    ///
    /// # Errors
    /// It has ended, or its kind cannot be cancelled.
    pub(crate) async fn cancel_operation(&self, id: &str) -> Result<Operation, Error> {
        let operation = self.operations.show(id)?;
        if operation.phase.is_end() {
            let message = format!("cannot cancel operation {id}: it has ended");
            return Err(Error::conflict("operation_ended", message));
        }
        if operation.kind != OperationKind::Migration {
            let message = format!(
                "cannot cancel operation {id}: it is the {} of {}, and only migrations can be \
                 cancelled",
                operation.kind, operation.target
            );
            return Err(Error::conflict("cannot_cancel", message));
        }
        self.cancel_migration(&operation.target.parse()?).await?;
        self.operations.show(id)
    }

    /// Runs the work of an operation in a task, to its end even if the client disconnects.
    async fn spawn_operation(
        self: &Arc<Self>,
        kind: OperationKind,
        vm: &VmName,
        by: Requested,
        work: impl Future<Output = End> + Send + 'static,
    ) -> Result<(Operation, JoinHandle<End>), Error> {
        let (machines, vm) = (self.clone(), vm.clone());
        let (begun, operation) = oneshot::channel();
        let task = self.runtime.spawn(async move {
            let begin = {
                let machines = machines.clone();
                move || machines.begin_operation(kind, &vm, by)
            };
            let operation = tokio::task::spawn_blocking(begin)
                .await
                .map_err(unfinished)?;
            let id = operation.id.clone();
            // The client may be gone.
            let _ = begun.send(operation);
            let end = work.await;
            let note = move || {
                machines.end_operation(&id, &end);
                end
            };
            tokio::task::spawn_blocking(note)
                .await
                .map_err(unfinished)?
        });
        let operation = operation.await;
        let operation = operation.map_err(|_| Error::failed("the operation did not begin"))?;
        Ok((operation, task))
    }

    /// Creates or replaces a VM as an operation.
    ///
    /// # Errors
    /// The spec or the precondition is wrong, or too many operations run; nothing began.
    pub(crate) async fn begin_put(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        spec: VmSpec,
        restore_from: Option<SnapshotName>,
        by: Requested,
    ) -> Result<Operation, Error> {
        spec.check(vm)?;
        let record = self.find(vm).ok().and_then(|slot| slot.record());
        condition.check(vm, record.as_ref())?;
        self.operations.check_room()?;
        let (machines, name) = (self.clone(), vm.clone());
        let work = async move {
            machines.put(&name, condition, spec, restore_from).await?;
            Ok(None)
        };
        let begun = self.spawn_operation(OperationKind::Create, vm, by, work);
        Ok(begun.await?.0)
    }

    /// Writes a snapshot as an operation, whose end a client can wait for.
    ///
    /// # Errors
    /// The VM does not run, or the name is taken; nothing began.
    pub(crate) async fn snapshot(
        self: &Arc<Self>,
        vm: &VmName,
        wanted: VmSnapshotRequest,
        by: Requested,
    ) -> Result<(Operation, impl Future<Output = Result<SnapshotInfo, Error>>), Error> {
        self.operations.check_room()?;
        let vmm = self.vmm(vm)?;
        let place = self.place_for_snapshot(vm, wanted).await?;
        let work = async move {
            let path = place.path().to_owned();
            let wanted = SnapshotRequest { path };
            let written = vmm.snapshot(&wanted).await?;
            place.complete();
            Ok(Some(OperationResult {
                snapshot: Some(SnapshotInfo {
                    path: wanted.path,
                    ..written
                }),
                ..OperationResult::default()
            }))
        };
        let begun = self.spawn_operation(OperationKind::Snapshot, vm, by, work);
        let (operation, task) = begun.await?;
        let written = async move {
            let result = task.await.map_err(unfinished)??;
            let written = result.and_then(|result| result.snapshot);
            written.ok_or_else(|| Error::failed("the snapshot has no result"))
        };
        Ok((operation, written))
    }

    /// Upgrades the VMM of a running VM as an operation. A task does all of it, because the client
    /// may disconnect after the VM has agreed.
    ///
    /// # Errors
    /// The VM rejects the request, and nothing began.
    pub(crate) async fn upgrade(
        self: &Arc<Self>,
        vm: &VmName,
        wanted: UpgradeRequest,
        by: Requested,
    ) -> Result<Operation, Error> {
        let (machines, vm) = (self.clone(), vm.clone());
        let task = self
            .runtime
            .spawn(async move { machines.begin_upgrade(&vm, wanted, by).await });
        task.await.map_err(unfinished)?
    }

    async fn begin_upgrade(
        self: &Arc<Self>,
        vm: &VmName,
        wanted: UpgradeRequest,
        by: Requested,
    ) -> Result<Operation, Error> {
        self.operations.check_room()?;
        if let Some(id) = self.operations.running(OperationKind::Upgrade, vm) {
            // Each would take the result of the first for its own.
            let message = format!("operation {id} is already upgrading {vm}");
            return Err(Error::conflict("wrong_state", message).hint("wait for its end"));
        }
        let vmm = self.vmm(vm)?;
        let before = vmm.status().await?;
        vmm.upgrade(&wanted).await?;
        let (machines, name) = (self.clone(), vm.clone());
        let work = async move { machines.await_upgrade(&name, before).await };
        let begun = self.spawn_operation(OperationKind::Upgrade, vm, by, work);
        Ok(begun.await?.0)
    }

    /// Waits until another VMM runs the VM. The API is unavailable meanwhile.
    async fn await_upgrade(&self, vm: &VmName, before: VmStatus) -> End {
        let start = Instant::now();
        while start.elapsed() < UPGRADE_TIME {
            tokio::time::sleep(LOOK).await;
            let vmm = self.vmm(vm)?;
            let Ok(now) = vmm.status().await else {
                continue;
            };
            let keeps = |why: &str| {
                let message = format!("{vm} keeps its program: {}", cut(why));
                let status = StatusCode::BAD_GATEWAY;
                Err(Error::answered(status, "not_upgraded", message))
            };
            if now.pid != before.pid {
                return keeps("its process was restarted");
            }
            if let Some(why) = &now.upgrade_error {
                return keeps(why);
            }
            if now.upgrades > before.upgrades {
                return Ok(Some(OperationResult {
                    upgrade: Some(UpgradeInfo {
                        before: cut(&before.version),
                        after: cut(&now.version),
                        downtime_ms: now.upgrade_downtime_ms,
                    }),
                    ..OperationResult::default()
                }));
            }
        }
        Err(not_in_time(UPGRADE_TIME))
    }
}

fn interrupted() -> Error {
    let message = "the result is unknown: the daemon ended, or read it too late";
    Error::conflict("interrupted", message).hint("look at the state of the virtual machine")
}

/// The progress of a migration: bytes of guest memory at the destination.
fn progress(status: &MigrationStatus) -> OperationProgress {
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
