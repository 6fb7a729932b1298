//! Long work of VMs: each piece begins and ends its operation.
//!
//! Owns which event ends an operation. It must not know how operations are kept
//! ([`super::operations`]).

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use bellhop_api::machine::{
    Direction, EndReason, MigrationPhase, MigrationStatus, SnapshotInfo, SnapshotRequest,
    UpgradeRequest, VmStatus,
};
use bellhop_api::node::{
    Operation, OperationKind, OperationPhase, OperationQuery, OperationResult, SnapshotName,
    UpgradeInfo, VmSnapshotRequest,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use vmm::sandbox::namespaces::Access;

use super::condition::Condition;
use super::error::unfinished;
use super::operations::{Entry, Requested, Sent, cut, end_of, kept, progress};
use super::outgoing::remedy;
use super::spec::{VmName, VmSpec};
use super::steps::ProxiedResponse;
use super::vm_entry::VmEntry;
use super::vmm::not_in_time;
use super::{Change, Machines};
use crate::error::Error;
use crate::store::OPERATIONS;

/// The interval of checks of an upgrade.
const LOOK: Duration = Duration::from_millis(200);
/// How long an upgrade may take: far longer than a guest tolerates being paused.
const UPGRADE_TIME: Duration = Duration::from_secs(600);

/// The end of an operation.
type End = Result<Option<OperationResult>, Error>;

impl Machines {
    fn begin_operation(&self, kind: OperationKind, vm: &VmName, by: Requested) -> Operation {
        let operation = self.operations.begin(kind, vm, by);
        self.store_operation(&operation);
        self.publish_operation(vm, &operation);
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
            self.publish_operation(&vm, &operation);
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

    fn publish_operation(&self, vm: &VmName, operation: &Operation) {
        let change = Change::Operation {
            id: operation.id.clone(),
            kind: operation.kind,
            phase: operation.phase,
            reason: operation.error.as_ref().map(|error| error.message.clone()),
        };
        self.publish(vm, change);
    }

    /// Ends the operations of the previous daemon, except migrations with a pending result.
    pub(super) fn end_interrupted(&self) {
        for operation in self.operations.list(&OperationQuery {
            phase: Some(OperationPhase::Running),
            ..OperationQuery::default()
        }) {
            let vm = operation.target.parse();
            let entry = vm.ok().and_then(|vm| self.find(&vm).ok());
            let sent = entry.is_some_and(|entry| {
                let record = entry.record();
                record.is_some_and(|record| record.outgoing.is_some())
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
    pub(super) fn process_gone(&self, entry: &VmEntry) {
        let vm = entry.name();
        let Some(id) = self.operations.migration_of(vm) else {
            return;
        };
        // A VM that another node has leaves no record here.
        let end = entry.record().map_or(Ok(None), |record| {
            if let Some(outgoing) = record.migration_unknown() {
                let (reason, remedy) = (outgoing.reason(), remedy(vm.as_str()));
                let message = format!("the location of {vm} is unknown: {reason}; {remedy}");
                return Err(Error::conflict("migration_unknown", message));
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
        entry: &VmEntry,
        by: Requested,
        send: impl FnOnce() -> Result<ProxiedResponse, Error>,
    ) -> Result<Sent, Error> {
        let vm = entry.name();
        if self.operations.migration_of(vm).is_some() {
            // The result of the previous migration is available only until this one begins.
            self.query_migration(entry);
        }
        let sent = send();
        entry.migration.notify_one();
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
    pub(crate) fn last_outgoing(&self, vm: &VmName) -> Option<MigrationStatus> {
        let record = self.find(vm).ok().and_then(|entry| entry.record());
        let left = record.is_none_or(|record| {
            let moved = record.outgoing.is_some_and(|outgoing| outgoing.moved);
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
        let record = self.find(vm).ok().and_then(|entry| entry.record());
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
        let (machines, name) = (self.clone(), vm.clone());
        let work = async move {
            let path = place.path().to_owned();
            let written = vmm.snapshot(&SnapshotRequest { path }).await;
            machines.hide_soon(&name, place.files()).await;
            // The file system may be slow, and a failed snapshot may have many files to delete.
            let keep = move || {
                let written = written?;
                let path = place.complete()?;
                Ok::<_, Error>(SnapshotInfo { path, ..written })
            };
            let kept = tokio::task::spawn_blocking(keep);
            Ok(Some(OperationResult {
                snapshot: Some(kept.await.map_err(unfinished)??),
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
        let files = vec![(wanted.program.clone(), Access::Execute)];
        let (entry, program) = (self.find(vm)?, files.clone());
        let shown = self.locked(&entry, move |machines, entry| {
            machines.show_files(entry.name(), program)
        });
        shown.await??;
        if let Err(error) = vmm.upgrade(&wanted).await {
            self.hide_soon(vm, files).await;
            return Err(error);
        }
        let (machines, name) = (self.clone(), vm.clone());
        let work = async move {
            let end = machines.await_upgrade(&name, before).await;
            machines.hide_soon(&name, files).await;
            end
        };
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
