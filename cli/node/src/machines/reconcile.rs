//! Brings the host in line with the records when a daemon starts.
//!
//! Owns which VMs are checked, and the deletion of all that belongs to none of the node's VMs
//! afterwards. [`super::steps::Lifecycle::reconcile`] interprets the record of one VM.

use std::sync::Arc;

use super::record::Record;
use super::spec::VmSpec;
use super::steps::Reconciled;
use super::vm_entry::{Live, VmEntry};
use super::{Change, Machines, supervisor};
use crate::error::Error;
use crate::snapshots::Snapshots;

impl Machines {
    /// Brings the host in line with the records: see the module. Returns when all running VMs are
    /// adopted; VMs that should run are started in the background.
    pub(crate) async fn reconcile(self: &Arc<Self>) {
        let strays = self.clone();
        let all: Vec<Arc<VmEntry>> = self.entries().values().cloned().collect();
        let mut tasks = tokio::task::JoinSet::new();
        for entry in all {
            let machines = self.clone();
            tasks.spawn(async move { machines.reconcile_one(&entry).await });
        }
        while tasks.join_next().await.is_some() {}
        let done = tokio::task::spawn_blocking(move || strays.remove_strays());
        if let Err(error) = done.await {
            tracing::error!(%error, "cannot scan for orphaned devices");
        }
    }

    async fn reconcile_one(self: &Arc<Self>, entry: &Arc<VmEntry>) {
        let reconciled = self
            .locked(entry, |machines, entry| {
                let Some(mut record) = entry.record() else {
                    return Ok::<_, Error>(Reconciled::None);
                };
                let lifecycle = machines.lifecycle(entry);
                let reconciled = lifecycle.reconcile(&mut record);
                if record.process().is_none() {
                    machines.process_gone(entry);
                }
                let reconciled = reconciled?;
                let mut may_hide = reconciled == Reconciled::Awaited;
                if reconciled == Reconciled::Running {
                    // A NIC that could not be moved may still use its former device.
                    may_hide = lifecycle.reconcile_nics(&mut record);
                    lifecycle.reconcile_disks(&mut record);
                    lifecycle.reconcile_functions(&mut record);
                }
                if may_hide {
                    // The former daemon may have been killed after it showed a device.
                    machines.hide_devices(entry.name());
                }
                Ok(reconciled)
            })
            .await;
        let vm = entry.name();
        match reconciled {
            Ok(Ok(Reconciled::Running | Reconciled::Awaited)) => {
                let identity = entry.record().and_then(|record| record.process()?.0);
                if let Some(identity) = identity {
                    entry.view().live = Some(Live::new(identity, true));
                    self.publish(vm, Change::Adopted);
                    supervisor::begin(self, entry, Some(identity));
                }
            }
            Ok(Ok(Reconciled::ToStart)) => supervisor::begin(self, entry, None),
            Ok(Ok(Reconciled::Stopped | Reconciled::None)) => {}
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(%vm, error, "cannot end or delete the rest of a VM");
                self.await_late_end(entry, true);
            }
            Err(error) => tracing::error!(%vm, %error, "cannot check a VM"),
        }
        self.tidy(entry);
    }

    /// Deletes devices of VMs that do not exist, and incomplete snapshots. Processes of such VMs
    /// were refused or ended before: see [`super::ownership`].
    fn remove_strays(&self) {
        if let Err(error) = Snapshots::of(&self.paths).remove_incomplete() {
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "cannot look for incomplete snapshots");
        }
        let wanted = |device: &str| {
            let entries: Vec<Arc<VmEntry>> = self.entries().values().cloned().collect();
            entries.iter().any(|entry| {
                let view = entry.view();
                let record = view.record.as_ref();
                let specs = record.into_iter().flat_map(Record::specs);
                let mut nics = specs.chain(&view.pending).flat_map(VmSpec::nics);
                nics.any(|nic| nic.created_names(entry.name()).any(|name| name == device))
                    || record.is_some_and(|record| record.has_device(device))
            })
        };
        if let Err(error) = self.delete_orphaned_devices(wanted) {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "cannot scan for orphaned devices"
            );
        }
    }
}
