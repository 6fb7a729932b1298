//! Brings the host in line with the records when a daemon starts.
//!
//! Owns which VMs are checked, and the deletion of all that belongs to none of the node's VMs
//! afterwards. [`super::steps::Life::settle`] interprets the record of one VM.

use std::sync::Arc;

use super::record::Record;
use super::slot::{Live, Slot};
use super::spec::{VmName, VmSpec};
use super::steps::Settled;
use super::{Change, Machines, supervisor};
use crate::error::Error;
use crate::snapshots::Snapshots;

impl Machines {
    /// Brings the host in line with the records: see the module. Returns when all running VMs are
    /// adopted; VMs that should run are started in the background.
    pub(crate) async fn settle(self: &Arc<Self>) {
        let strays = self.clone();
        let all: Vec<Arc<Slot>> = self.slots().values().cloned().collect();
        let mut tasks = tokio::task::JoinSet::new();
        for slot in all {
            let machines = self.clone();
            tasks.spawn(async move { machines.settle_one(&slot).await });
        }
        while tasks.join_next().await.is_some() {}
        let done = tokio::task::spawn_blocking(move || strays.remove_strays());
        if let Err(error) = done.await {
            tracing::error!(%error, "strays were not looked for");
        }
    }

    async fn settle_one(self: &Arc<Self>, slot: &Arc<Slot>) {
        let settled = self
            .locked(slot, |machines, slot| {
                let Some(mut record) = slot.record() else {
                    return Ok::<_, Error>(Settled::None);
                };
                let life = machines.life(slot);
                let settled = life.settle(&mut record);
                if record.process().is_none() {
                    machines.process_gone(slot);
                }
                let settled = settled?;
                if settled == Settled::Running {
                    life.settle_nics(&mut record);
                    life.settle_disks(&mut record);
                }
                Ok(settled)
            })
            .await;
        let vm = slot.name();
        match settled {
            Ok(Ok(Settled::Running | Settled::Awaited)) => {
                let identity = slot.record().and_then(|record| record.process()?.0);
                if let Some(identity) = identity {
                    slot.view().live = Some(Live::new(identity, true));
                    self.tell(vm, Change::Adopted);
                    supervisor::begin(self, slot, Some(identity));
                }
            }
            Ok(Ok(Settled::ToStart)) => supervisor::begin(self, slot, None),
            Ok(Ok(Settled::Stopped | Settled::None)) => {}
            Ok(Err(error)) => tracing::error!(
                %vm,
                error = &error as &dyn std::error::Error,
                "what is left of a machine stays"
            ),
            Err(error) => tracing::error!(%vm, %error, "a machine was not looked at"),
        }
        self.tidy(slot);
    }

    /// Deletes devices and processes of VMs that do not exist, and incomplete snapshots.
    fn remove_strays(&self) {
        if let Err(error) = Snapshots::of(&self.paths).remove_incomplete() {
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "cannot look for incomplete snapshots");
        }
        let known = |name: &str| {
            let name = name.parse::<VmName>();
            name.is_ok_and(|name| self.slots().contains_key(&name))
        };
        if let Err(error) = self.end_strays(known) {
            tracing::error!(%error, "processes of no machine's were not ended");
        }
        let wanted = |device: &str| {
            let slots: Vec<Arc<Slot>> = self.slots().values().cloned().collect();
            slots.iter().any(|slot| {
                let view = slot.view();
                let record = view.record.as_ref();
                let specs = record.into_iter().flat_map(Record::specs);
                let mut nics = specs.chain(&view.pending).flat_map(VmSpec::nics);
                nics.any(|nic| nic.made_names(slot.name()).any(|name| name == device))
                    || record.is_some_and(|record| record.has_device(device))
            })
        };
        if let Err(error) = self.remove_stray_devices(wanted) {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "devices of no machine's were not looked for"
            );
        }
    }
}
