//! Moves NICs to their backup device when devlink reports that their own device has failed.
//!
//! The VMM itself notices a device that reports its failure (DEVICE_NEEDS_RESET). A report about
//! the function or port below the device reaches only the node. The move is the same as that of
//! `PATCH /v1/vms/{name}/nics/{id}`. If a NIC cannot move now, the daemon reports that and does not
//! retry: the guest may not be affected by the failure.
//!
//! Owns which NICs are checked when. [`super::health`] owns the consequence of a failure.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use vdpa::causes::in_one_line;
use vdpa_mgmt::devlink::{Event, HealthReporter, Notice};
use vdpa_mgmt::nic::MadeNic;

use super::health::{FailureAction, Place, action_for, reason};
use super::record::{Phase, Record};
use super::spec::{NicId, NicSpec, VmName};
use super::vm_entry::VmEntry;
use super::{Change, Machines};

/// The directory of devices.
const SYSFS: &str = "/sys";

impl Machines {
    /// Handles a devlink notification; workers move the affected NICs. Reads sysfs and the records
    /// of NICs.
    pub(crate) fn on_devlink_event(self: &Arc<Self>, notice: &Notice) {
        let failed = {
            let mut in_error = self.in_error.lock();
            match notice {
                Notice::Event(Event::Health(reporter)) => {
                    in_error.record_state(reporter).then_some(reporter)
                }
                Notice::Event(Event::InstanceGone(handle)) => {
                    in_error.goes(handle);
                    None
                }
                Notice::Lost => {
                    in_error.lost();
                    None
                }
                Notice::Event(_) => None,
            }
        };
        if let Some(reporter) = failed {
            self.on_device_failure(reporter);
        }
    }

    fn on_device_failure(self: &Arc<Self>, reporter: &HealthReporter) {
        let entries: Vec<Arc<VmEntry>> = self.entries().values().cloned().collect();
        let why = reason(reporter);
        let mut made = None;
        for entry in entries {
            let Some(record) = entry.record().filter(is_concerned) else {
                continue;
            };
            for nic in record.spec.nics() {
                let backup = nic.on_backup(entry.name());
                let Some(backup) = backup.filter(|_| !record.is_on_backup(nic.id())) else {
                    continue;
                };
                let made = made.get_or_insert_with(|| self.created_nics());
                let place = |nic: &NicSpec| self.place_of(entry.name(), nic, made);
                match action_for(reporter, &place(nic), &place(&backup)) {
                    FailureAction::Untouched => {}
                    FailureAction::FailOver => self.fail_over(&entry, nic.id(), why.clone()),
                    FailureAction::Both => {
                        let why = format!("{why}, and the backup device depends on it, too");
                        self.report_not_failed_over(entry.name(), nic.id(), why);
                    }
                }
            }
        }
    }

    fn fail_over(self: &Arc<Self>, entry: &Arc<VmEntry>, id: &NicId, why: String) {
        let (machines, entry, id) = (self.clone(), entry.clone(), id.clone());
        self.runtime.spawn(async move {
            let work =
                move |machines: &Self, entry: &VmEntry| machines.fail_over_now(entry, &id, why);
            if let Err(error) = machines.locked(&entry, work).await {
                tracing::warn!(vm = %entry.name(), %error, "cannot check a failed NIC");
            }
        });
    }

    /// The parents of a NIC's device; empty if they are unknown.
    fn place_of(&self, vm: &VmName, nic: &NicSpec, made: &BTreeMap<String, MadeNic>) -> Place {
        match self.vdpa_device(vm, nic) {
            Some(device) => Place::read(Path::new(SYSFS), &device, made.get(&device)),
            None => Place::default(),
        }
    }

    /// Moves a NIC whose device has failed to its backup, unless it has moved meanwhile.
    fn fail_over_now(&self, entry: &VmEntry, id: &NicId, why: String) {
        let vm = entry.name();
        let Some(mut record) = entry.record().filter(is_concerned) else {
            return;
        };
        let backup = record.spec.nic(id).and_then(|nic| nic.on_backup(vm));
        if backup.is_none() {
            return;
        }
        let lifecycle = self.lifecycle(entry);
        if lifecycle.query_failovers(&mut record).contains(id) || record.is_on_backup(id) {
            return self.report_failed_over(vm, id, why);
        }
        match lifecycle.seat(&mut record, id, true) {
            Ok(()) => self.report_failed_over(vm, id, why),
            Err(error) => {
                let error = in_one_line(&error);
                self.report_not_failed_over(vm, id, format!("{why}; {error}"));
            }
        }
    }

    fn report_failed_over(&self, vm: &VmName, id: &NicId, why: String) {
        tracing::warn!(%vm, nic = %id, why, "failover: a NIC moved to its backup device");
        self.publish(vm, Change::NicFailedOver(id.clone(), Some(why)));
    }

    fn report_not_failed_over(&self, vm: &VmName, id: &NicId, why: String) {
        tracing::error!(%vm, nic = %id, why, "failover: a NIC stays on its failed device");
        self.publish(vm, Change::NicNotFailedOver(id.clone(), why));
    }
}

/// Whether a VM has NICs that can move: it runs here.
fn is_concerned(record: &Record) -> bool {
    record.phase == Phase::Present && record.process().is_some() && record.incoming.is_none()
}
