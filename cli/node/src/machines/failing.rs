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

use super::health::{Place, Verdict, judge, reason};
use super::record::{Phase, Record};
use super::slot::Slot;
use super::spec::{NicId, NicSpec, VmName};
use super::{Change, Machines};

/// The directory of devices.
const SYSFS: &str = "/sys";

impl Machines {
    /// Handles a devlink notification; workers move the affected NICs. Reads sysfs and the records
    /// of NICs.
    pub(crate) fn hears_devlink(self: &Arc<Self>, notice: &Notice) {
        let failed = {
            let mut in_error = self.in_error.lock();
            match notice {
                Notice::Event(Event::Health(reporter)) => {
                    in_error.hears(reporter).then_some(reporter)
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
            self.hears_failure(reporter);
        }
    }

    fn hears_failure(self: &Arc<Self>, reporter: &HealthReporter) {
        let slots: Vec<Arc<Slot>> = self.slots().values().cloned().collect();
        let why = reason(reporter);
        let mut made = None;
        for slot in slots {
            let Some(record) = slot.record().filter(is_concerned) else {
                continue;
            };
            for nic in record.spec.nics() {
                let stand_by = nic.on_stand_by(slot.name());
                let Some(stand_by) = stand_by.filter(|_| !record.is_on_stand_by(nic.id())) else {
                    continue;
                };
                let made = made.get_or_insert_with(|| self.made_nics());
                let place = |nic: &NicSpec| self.place_of(slot.name(), nic, made);
                match judge(reporter, &place(nic), &place(&stand_by)) {
                    Verdict::Untouched => {}
                    Verdict::FailOver => self.fail_over(&slot, nic.id(), why.clone()),
                    Verdict::Both => {
                        let why = format!("{why}, and the backup device depends on it, too");
                        self.tells_not_moved(slot.name(), nic.id(), why);
                    }
                }
            }
        }
    }

    fn fail_over(self: &Arc<Self>, slot: &Arc<Slot>, id: &NicId, why: String) {
        let (machines, slot, id) = (self.clone(), slot.clone(), id.clone());
        self.runtime.spawn(async move {
            let work = move |machines: &Self, slot: &Slot| machines.fail_over_now(slot, &id, why);
            if let Err(error) = machines.locked(&slot, work).await {
                tracing::warn!(vm = %slot.name(), %error, "cannot check a failed NIC");
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
    fn fail_over_now(&self, slot: &Slot, id: &NicId, why: String) {
        let vm = slot.name();
        let Some(mut record) = slot.record().filter(is_concerned) else {
            return;
        };
        let stands_by = record.spec.nic(id).and_then(|nic| nic.on_stand_by(vm));
        if stands_by.is_none() {
            return;
        }
        let life = self.life(slot);
        if life.look_for_failovers(&mut record).contains(id) || record.is_on_stand_by(id) {
            return self.tells_failed_over(vm, id, why);
        }
        match life.seat(&mut record, id, true) {
            Ok(()) => self.tells_failed_over(vm, id, why),
            Err(error) => {
                let error = in_one_line(&error);
                self.tells_not_moved(vm, id, format!("{why}; {error}"));
            }
        }
    }

    fn tells_failed_over(&self, vm: &VmName, id: &NicId, why: String) {
        tracing::warn!(%vm, nic = %id, why, "failover: a NIC moved to its backup device");
        self.tell(vm, Change::NicFailedOver(id.clone(), Some(why)));
    }

    fn tells_not_moved(&self, vm: &VmName, id: &NicId, why: String) {
        tracing::error!(%vm, nic = %id, why, "failover: a NIC stays on its failed device");
        self.tell(vm, Change::NicNotFailedOver(id.clone(), why));
    }
}

/// Whether a VM has NICs that can move: it runs here.
fn is_concerned(record: &Record) -> bool {
    record.phase == Phase::Present && record.process().is_some() && record.arrival.is_none()
}
