//! The effect of a request on one VM, under that VM's lock and on a worker thread.
//!
//! Owns the rules for when a request is possible.

use bellhop_api::machine::{MigrationStatus, WantedState};
use bellhop_api::node::SnapshotName;
use vmm::config::DiskConfig;

use super::departure::remedy;
use super::error::{
    arriving, deleting, no_disk, no_nic, no_vm, not_running, other_device, other_nic, vm_runs,
};
use super::host::check_disk;
use super::process::Identity;
use super::record::{Phase, Record};
use super::slot::{Live, Slot};
use super::spec::{Desired, DeviceId, ExistingDevice, NicId, NicSpec, VmName, VmSpec};
use super::steps::{Passed, SendRequest};
use super::{Change, Machines, Put, Removed, speaks};
use crate::error::Error;

impl Machines {
    pub(super) fn check_level(&self, vm: &VmName, live: &Live) -> Result<(), Error> {
        match (live.api, &live.version) {
            (Some(level), Some(version)) if !speaks(level) => {
                let message = format!(
                    "the process of {vm} runs Bellhop {version} with the unsupported API level \
                     {level}: use a daemon of that version, or stop the process"
                );
                Err(Error::conflict("other_api_level", message))
            }
            _ => Ok(()),
        }
    }

    /// Creates, replaces, starts or stops a VM. One that is restored from a snapshot is always
    /// created or replaced.
    pub(super) fn put_now(
        &self,
        slot: &Slot,
        spec: VmSpec,
        restore_from: Option<&SnapshotName>,
    ) -> Result<Put, Error> {
        let next = match restore_from {
            None => Record::new(spec),
            Some(snapshot) => self.restored(spec, snapshot)?,
        };
        let left = slot
            .record()
            .filter(|record| record.phase != Phase::Present);
        if let Some(mut record) = left {
            // The rest of a VM that could not be undone. If it was to replace another VM, that one
            // is restored.
            self.life(slot).delete(&mut record)?;
        }
        let Some(mut record) = slot.record() else {
            let _admitted = self.admit()?;
            self.reserve(slot, &next.spec)?;
            self.life(slot).create(next)?;
            self.tell(slot.name(), Change::Created);
            return Ok(Put::Created);
        };
        check_here(slot.name(), &record)?;
        if next.restore_from.is_none() && next.spec.is_same_machine(&record.spec) {
            let wanted = match next.spec.state {
                Desired::Running if record.process().is_some() && record.is_on() => {
                    return Ok(Put::Same);
                }
                Desired::Running => WantedState::Running,
                Desired::Stopped if record.process().is_some() => {
                    let hint = "PUT /v1/vms/{name}/state with `state: Stopped` asks its guest";
                    return Err(vm_runs(slot.name(), "stop", hint));
                }
                Desired::Stopped => WantedState::Stopped,
            };
            return self.change_now(slot, wanted).map(|()| Put::Same);
        }
        if record.process().is_some() {
            let message = format!(
                "another virtual machine {} is running: stop it before you replace it, or use \
                 another name",
                slot.name()
            );
            return Err(Error::conflict("other_vm_runs", message));
        }
        // Otherwise it would run under the name and with the NICs of a guest that may run
        // elsewhere.
        check_whereabouts(slot.name(), &record)?;
        self.reserve(slot, &next.spec)?;
        self.life(slot).replace(&mut record, next)?;
        self.tell(slot.name(), Change::Replaced);
        Ok(Put::Replaced)
    }

    pub(super) fn delete_now(&self, slot: &Slot, force: bool) -> Result<(), Error> {
        let mut record = slot.record().ok_or_else(|| no_vm(slot.name()))?;
        // An incoming VM, or a half deleted one, has no guest to ask.
        let has_guest = record.phase == Phase::Present && record.arrival.is_none();
        if has_guest && record.process().is_some() && !force {
            let hint = "PUT /v1/vms/{name}/state with `state: Stopped` stops it; `?force=true` \
                        deletes it nevertheless";
            return Err(vm_runs(slot.name(), "delete", hint));
        }
        self.migration_deleted(slot.name());
        record.forget_former();
        self.life(slot).delete(&mut record)?;
        self.tell(slot.name(), Change::Deleted);
        Ok(())
    }

    /// The record of a VM whose state can change.
    pub(super) fn changeable(&self, slot: &Slot) -> Result<Record, Error> {
        let vm = slot.name();
        let record = slot.record().ok_or_else(|| no_vm(vm))?;
        if record.phase != Phase::Present {
            return Err(deleting(vm));
        }
        check_here(vm, &record)?;
        Ok(record)
    }

    pub(super) fn change_now(&self, slot: &Slot, wanted: WantedState) -> Result<(), Error> {
        let vm = slot.name();
        let mut record = self.changeable(slot)?;
        let runs = record.process().is_some();
        match wanted {
            WantedState::Running | WantedState::Paused if runs => {
                if let Some(live) = &slot.view().live {
                    self.check_level(vm, live)?;
                }
                if wanted == WantedState::Running && !record.is_on() {
                    self.keep_on(slot, &mut record)?;
                }
                self.runtime.block_on(self.api_of(vm).want(wanted))
            }
            WantedState::Paused => Err(not_running(vm)),
            WantedState::Running => {
                check_whereabouts(vm, &record)?;
                record.turn_on();
                let started = self.life(slot).start(&mut record);
                if started.is_err() {
                    // The client knows of the failure: the daemon does not retry without a request.
                    record.spec.state = Desired::Stopped;
                    self.life(slot).note(&mut record);
                }
                started
            }
            WantedState::Stopped => self.end_now(slot, record, false),
        }
    }

    /// Sends an event if the guest of a VM may run elsewhere.
    pub(super) fn tell_whereabouts(&self, vm: &VmName, record: &Record) {
        if let Some(departure) = record.may_be_elsewhere() {
            let reason = departure.reason();
            tracing::error!(%vm, "{reason}");
            self.tell(vm, Change::MayBeElsewhere(reason));
        }
    }

    /// Requests a running VM to leave for another process. The record has the mark before.
    pub(super) fn send_now(&self, slot: &Slot, request: &SendRequest) -> Result<Passed, Error> {
        let mut record = self.sendable(slot)?;
        self.life(slot).send(&mut record, request)
    }

    /// The record of a running VM, which can be requested to leave.
    pub(super) fn sendable(&self, slot: &Slot) -> Result<Record, Error> {
        let record = self.present(slot)?;
        if record.process().is_none() {
            check_whereabouts(slot.name(), &record)?;
            return Err(not_running(slot.name()));
        }
        Ok(record)
    }

    /// Queries the result of a migration from a VM that was sent elsewhere.
    pub(super) fn look_for_guest(&self, slot: &Slot) {
        if let Some(mut record) = slot.record() {
            self.life(slot).look_for_guest(&mut record);
            if record.departure.is_none() {
                self.migration_forgotten(slot.name());
            }
        }
    }

    /// Handles the report of this process that the guest runs elsewhere.
    pub(super) fn hears_moved(
        &self,
        slot: &Slot,
        process: Option<Identity>,
        status: &MigrationStatus,
    ) {
        let Some(mut record) = slot.record() else {
            return;
        };
        if record
            .process()
            .is_some_and(|(identity, _)| identity == process)
        {
            self.migration_reports(slot.name(), status);
            self.life(slot).departed(&mut record);
        }
    }

    /// Resolves where a VM's guest is: through the VM if it runs, otherwise in its record.
    pub(super) fn say_where_now(&self, slot: &Slot, here: bool) -> Result<(), Error> {
        let vm = slot.name();
        let mut record = self.there(slot)?;
        if record.process().is_some() {
            self.runtime.block_on(self.api_of(vm).settle(here))?;
            if here {
                self.life(slot).look_for_guest(&mut record);
                self.look_for_arrival(slot);
            } else {
                self.life(slot).departed(&mut record);
            }
            return Ok(());
        }
        if record.departure.is_none() {
            let message = format!("the location of the guest of {vm} is already known");
            return Err(Error::conflict("settled", message));
        }
        let (came, peer) = (record.arrival.is_some(), record.peer());
        self.life(slot).say_where(&mut record, here)?;
        self.tell(vm, Change::Settled { here });
        if !here {
            let gone = match (came, peer) {
                // It never was a VM of this node.
                (true, _) => self.life(slot).delete(&mut record).map(|()| true),
                (false, Some(peer)) => self.life(slot).leaves_to(&mut record, &peer),
                (false, None) => Ok(false),
            };
            if gone? {
                self.tell_gone(slot);
            }
        }
        Ok(())
    }

    /// Sends an event if there is no VM of this name any more.
    pub(super) fn tell_gone(&self, slot: &Slot) {
        if slot.record().is_none() {
            self.tell(slot.name(), Change::Deleted);
        }
    }

    /// As [`Self::there`], but fails for an incoming VM.
    fn present(&self, slot: &Slot) -> Result<Record, Error> {
        let record = self.there(slot)?;
        check_here(slot.name(), &record)?;
        Ok(record)
    }

    /// The record of an existing VM whose process, if any, has a supported API level.
    fn there(&self, slot: &Slot) -> Result<Record, Error> {
        let vm = slot.name();
        let record = slot.record().ok_or_else(|| no_vm(vm))?;
        if record.phase != Phase::Present {
            return Err(deleting(vm));
        }
        if let Some(live) = &slot.view().live {
            self.check_level(vm, live)?;
        }
        Ok(record)
    }

    pub(super) fn add_nic_now(&self, slot: &Slot, nic: &NicSpec) -> Result<Put, Error> {
        let vm = slot.name();
        let mut record = self.present(slot)?;
        if let Some(there) = record.spec.nic(nic.id()) {
            return if there == nic {
                Ok(Put::Same)
            } else {
                Err(other_nic(vm, nic.id()))
            };
        }
        // The guest has not released an earlier NIC of this name.
        if record.has_made(nic.id()) {
            return Err(other_nic(vm, nic.id()));
        }
        if record.spec.disk(nic.id()).is_some() {
            return Err(other_device(vm, nic.id()));
        }
        let spec = record.spec.with_nic(nic.clone())?;
        spec.check(vm)?;
        self.reserve(slot, &spec)?;
        self.life(slot).add_nic(&mut record, nic, spec)?;
        self.tell(vm, Change::NicAdded(nic.id().clone()));
        Ok(Put::Created)
    }

    pub(super) fn swap_nic_now(
        &self,
        slot: &Slot,
        id: &NicId,
        device: ExistingDevice,
    ) -> Result<(), Error> {
        let vm = slot.name();
        let mut record = self.present(slot)?;
        let nic = record.spec.nic(id).ok_or_else(|| no_nic(vm, id))?;
        let moved = nic.moved_to(device);
        if let Some(on_stand_by) = self.seat_of(vm, nic, &moved) {
            return self.seat(slot, record, id, on_stand_by);
        }
        if *nic == moved {
            return Ok(());
        }
        let spec = record.spec.with_nic_replaced(&moved);
        spec.check(vm)?;
        self.reserve(slot, &spec)?;
        self.life(slot).swap_nic(&mut record, &moved, spec)?;
        self.tell(vm, Change::NicMoved(id.clone()));
        Ok(())
    }

    /// Whether a move to the device of `moved` means the NIC's backup device (true) or its own
    /// (false). None if it is another device, or the NIC has no backup.
    fn seat_of(&self, vm: &VmName, nic: &NicSpec, moved: &NicSpec) -> Option<bool> {
        let stand_by = nic.on_stand_by(vm)?;
        let to = self.device_of(vm, moved);
        let is_there = |nic: &NicSpec| self.device_of(vm, nic) == to;
        if is_there(&stand_by) {
            Some(true)
        } else {
            is_there(nic).then_some(false)
        }
    }

    /// Moves a NIC to its backup device, or back to its own.
    fn seat(
        &self,
        slot: &Slot,
        mut record: Record,
        id: &NicId,
        on_stand_by: bool,
    ) -> Result<(), Error> {
        let life = self.life(slot);
        // The VM may have done so by itself.
        life.look_for_failovers(&mut record);
        if record.is_on_stand_by(id) != on_stand_by {
            life.seat(&mut record, id, on_stand_by)?;
        }
        self.tell(slot.name(), Change::NicMoved(id.clone()));
        Ok(())
    }

    /// Records which NICs a VM has moved by itself to their backup device.
    pub(super) fn look_for_failovers(&self, slot: &Slot) {
        let Some(mut record) = slot
            .record()
            .filter(|record| record.phase == Phase::Present)
        else {
            return;
        };
        for id in self.life(slot).look_for_failovers(&mut record) {
            self.tell(slot.name(), Change::NicFailedOver(id, None));
        }
    }

    pub(super) fn remove_nic_now(&self, slot: &Slot, id: &NicId) -> Result<Removed, Error> {
        let vm = slot.name();
        let mut record = self.present(slot)?;
        // A NIC that the guest was already requested to release is requested again.
        if record.spec.nic(id).is_none() && !record.has_made(id) {
            return Err(no_nic(vm, id));
        }
        let gone = self.life(slot).remove_nic(&mut record, id)?;
        if gone {
            self.tell(vm, Change::NicRemoved(id.clone()));
            Ok(Removed::Gone)
        } else {
            Ok(Removed::Asked)
        }
    }

    /// Adds a disk. `disk` has the name `id`.
    pub(super) fn add_disk_now(
        &self,
        slot: &Slot,
        id: &DeviceId,
        disk: &DiskConfig,
    ) -> Result<Put, Error> {
        let vm = slot.name();
        let mut record = self.present(slot)?;
        match record.spec.disk(id) {
            Some(there) if there == disk => return Ok(Put::Same),
            Some(_) => return Err(other_device(vm, id)),
            None => {}
        }
        let is_nic = record.spec.nic(id).is_some() || record.has_made(id);
        // The guest has not released an earlier disk of this name.
        if is_nic || record.removed_disks().contains(id) {
            return Err(other_device(vm, id));
        }
        let spec = record.spec.with_disk(disk.clone());
        spec.check(vm)?;
        if record.process().is_none() {
            check_disk(disk)?;
        }
        self.life(slot).add_disk(&mut record, id, disk, spec)?;
        self.tell(vm, Change::DiskAdded(id.clone()));
        Ok(Put::Created)
    }

    pub(super) fn remove_disk_now(&self, slot: &Slot, id: &DeviceId) -> Result<Removed, Error> {
        let vm = slot.name();
        let mut record = self.present(slot)?;
        // The guest is requested again to release a disk that it still has.
        if record.spec.disk(id).is_none() && !record.removed_disks().contains(id) {
            return Err(no_disk(vm, id));
        }
        if self.life(slot).remove_disk(&mut record, id)? {
            self.tell(vm, Change::DiskRemoved(id.clone()));
            Ok(Removed::Gone)
        } else {
            Ok(Removed::Asked)
        }
    }
}

/// Fails if the VM's guest has not arrived yet.
fn check_here(vm: &VmName, record: &Record) -> Result<(), Error> {
    if record.arrival.is_some() && record.departure.is_none() {
        Err(arriving(vm))
    } else {
        Ok(())
    }
}

/// Fails if a VM has no process and its guest may run elsewhere.
pub(super) fn check_whereabouts(vm: &VmName, record: &Record) -> Result<(), Error> {
    match record.may_be_elsewhere() {
        None => Ok(()),
        Some(departure) => {
            let (reason, remedy) = (departure.reason(), remedy(vm.as_str()));
            let message = format!("cannot start {vm}: {reason}; {remedy}");
            Err(Error::conflict("may_be_elsewhere", message))
        }
    }
}
