//! The effect of a request on one VM, under that VM's lock and on a worker thread.
//!
//! Owns the rules for when a request is possible.

use bellhop_api::machine::{MigrationStatus, WantedState};
use bellhop_api::node::SnapshotName;
use vmm::config::{DiskConfig, VfioConfig};

use super::error::{
    arriving, deleting, no_disk, no_function, no_nic, no_vm, not_running, other_device, other_nic,
    vm_runs,
};
use super::host::check_disk;
use super::outgoing::remedy;
use super::process::Identity;
use super::record::{Phase, Record};
use super::spec::{Desired, DeviceId, ExistingDevice, NicId, NicSpec, VmName, VmSpec};
use super::steps::{ProxiedResponse, SendRequest};
use super::vm_entry::{Live, VmEntry};
use super::{Change, Machines, Put, Removed, supports_api};
use crate::error::Error;

impl Machines {
    pub(super) fn check_level(&self, vm: &VmName, live: &Live) -> Result<(), Error> {
        match (live.api, &live.version) {
            (Some(level), Some(version)) if !supports_api(level) => {
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
        entry: &VmEntry,
        spec: VmSpec,
        restore_from: Option<&SnapshotName>,
    ) -> Result<Put, Error> {
        let next = match restore_from {
            None => Record::new(spec),
            Some(snapshot) => self.restored(spec, snapshot)?,
        };
        let left = entry
            .record()
            .filter(|record| record.phase != Phase::Present);
        if let Some(mut record) = left {
            // The rest of a VM that could not be undone. If it was to replace another VM, that one
            // is restored.
            self.lifecycle(entry).delete(&mut record)?;
        }
        let Some(mut record) = entry.record() else {
            let _admitted = self.admit()?;
            self.reserve(entry, &next.spec)?;
            self.lifecycle(entry).create(next)?;
            self.publish(entry.name(), Change::Created);
            return Ok(Put::Created);
        };
        check_here(entry.name(), &record)?;
        if next.restore_from.is_none() && next.spec.is_same_machine(&record.spec) {
            let wanted = match next.spec.state {
                Desired::Running if record.process().is_some() && record.is_on() => {
                    return Ok(Put::Same);
                }
                Desired::Running => WantedState::Running,
                Desired::Stopped if record.process().is_some() => {
                    let hint = "PUT /v1/vms/{name}/state with `state: Stopped` asks its guest";
                    return Err(vm_runs(entry.name(), "stop", hint));
                }
                Desired::Stopped => WantedState::Stopped,
            };
            return self.change_now(entry, wanted).map(|()| Put::Same);
        }
        if record.process().is_some() {
            let message = format!(
                "another virtual machine {} is running: stop it before you replace it, or use \
                 another name",
                entry.name()
            );
            return Err(Error::conflict("other_vm_runs", message));
        }
        // Otherwise it would run under the name and with the NICs of a guest that may run
        // elsewhere.
        check_location_known(entry.name(), &record)?;
        self.reserve(entry, &next.spec)?;
        self.lifecycle(entry).replace(&mut record, next)?;
        self.publish(entry.name(), Change::Replaced);
        Ok(Put::Replaced)
    }

    pub(super) fn delete_now(&self, entry: &VmEntry, force: bool) -> Result<(), Error> {
        let mut record = entry.record().ok_or_else(|| no_vm(entry.name()))?;
        // An incoming VM, or a half deleted one, has no guest to ask.
        let has_guest = record.phase == Phase::Present && record.incoming.is_none();
        if has_guest && record.process().is_some() && !force {
            let hint = "PUT /v1/vms/{name}/state with `state: Stopped` stops it; `?force=true` \
                        deletes it nevertheless";
            return Err(vm_runs(entry.name(), "delete", hint));
        }
        self.migration_deleted(entry.name());
        record.forget_former();
        self.lifecycle(entry).delete(&mut record)?;
        self.publish(entry.name(), Change::Deleted);
        Ok(())
    }

    /// The record of a VM whose state can change.
    pub(super) fn changeable(&self, entry: &VmEntry) -> Result<Record, Error> {
        let vm = entry.name();
        let record = entry.record().ok_or_else(|| no_vm(vm))?;
        if record.phase != Phase::Present {
            return Err(deleting(vm));
        }
        check_here(vm, &record)?;
        Ok(record)
    }

    pub(super) fn change_now(&self, entry: &VmEntry, wanted: WantedState) -> Result<(), Error> {
        let vm = entry.name();
        let mut record = self.changeable(entry)?;
        let runs = record.process().is_some();
        match wanted {
            WantedState::Running | WantedState::Paused if runs => {
                if let Some(live) = &entry.view().live {
                    self.check_level(vm, live)?;
                }
                if wanted == WantedState::Running && !record.is_on() {
                    self.keep_on(entry, &mut record)?;
                }
                self.runtime.block_on(self.api_of(vm).want(wanted))
            }
            WantedState::Paused => Err(not_running(vm)),
            WantedState::Running => {
                check_location_known(vm, &record)?;
                record.turn_on();
                let started = self.lifecycle(entry).start(&mut record);
                if started.is_err() {
                    // The client knows of the failure: the daemon does not retry without a request.
                    record.spec.state = Desired::Stopped;
                    self.lifecycle(entry).note(&mut record);
                }
                started
            }
            WantedState::Stopped => self.end_now(entry, record, false),
        }
    }

    /// Sends an event if the guest of a VM may run elsewhere.
    pub(super) fn report_unknown_location(&self, vm: &VmName, record: &Record) {
        if let Some(outgoing) = record.migration_unknown() {
            let reason = outgoing.reason();
            tracing::error!(%vm, "{reason}");
            self.publish(vm, Change::MigrationUnknown(reason));
        }
    }

    /// Requests a running VM to leave for another process. The record has the mark before.
    pub(super) fn send_now(
        &self,
        entry: &VmEntry,
        request: &SendRequest,
    ) -> Result<ProxiedResponse, Error> {
        let mut record = self.sendable(entry)?;
        self.lifecycle(entry).send(&mut record, request)
    }

    /// The record of a running VM, which can be requested to leave.
    pub(super) fn sendable(&self, entry: &VmEntry) -> Result<Record, Error> {
        let record = self.present(entry)?;
        if record.process().is_none() {
            check_location_known(entry.name(), &record)?;
            return Err(not_running(entry.name()));
        }
        Ok(record)
    }

    /// Queries the result of a migration from a VM that was sent elsewhere.
    pub(super) fn query_migration(&self, entry: &VmEntry) {
        if let Some(mut record) = entry.record() {
            self.lifecycle(entry).query_migration(&mut record);
            if record.outgoing.is_none() {
                self.migration_forgotten(entry.name());
            }
        }
    }

    /// Handles the report of this process that the guest runs elsewhere.
    pub(super) fn on_guest_moved(
        &self,
        entry: &VmEntry,
        process: Option<Identity>,
        status: &MigrationStatus,
    ) {
        let Some(mut record) = entry.record() else {
            return;
        };
        if record
            .process()
            .is_some_and(|(identity, _)| identity == process)
        {
            self.migration_reports(entry.name(), status);
            self.lifecycle(entry).mark_moved(&mut record);
        }
    }

    /// Resolves where a VM's guest is: through the VM if it runs, otherwise in its record.
    pub(super) fn resolve_migration_now(&self, entry: &VmEntry, here: bool) -> Result<(), Error> {
        let vm = entry.name();
        let mut record = self.there(entry)?;
        if record.process().is_some() {
            self.runtime.block_on(self.api_of(vm).resolve(here))?;
            if here {
                self.lifecycle(entry).query_migration(&mut record);
                self.query_incoming(entry);
            } else {
                self.lifecycle(entry).mark_moved(&mut record);
            }
            return Ok(());
        }
        if record.outgoing.is_none() {
            let message = format!("the location of the guest of {vm} is already known");
            return Err(Error::conflict("resolved", message));
        }
        let (came, peer) = (record.incoming.is_some(), record.peer());
        self.lifecycle(entry).resolve_migration(&mut record, here)?;
        self.publish(vm, Change::MigrationResolved { here });
        if !here {
            let gone = match (came, peer) {
                // It never was a VM of this node.
                (true, _) => self.lifecycle(entry).delete(&mut record).map(|()| true),
                (false, Some(peer)) => self.lifecycle(entry).leave_for(&mut record, &peer),
                (false, None) => Ok(false),
            };
            if gone? {
                self.publish_deleted(entry);
            }
        }
        Ok(())
    }

    /// Sends an event if there is no VM of this name any more.
    pub(super) fn publish_deleted(&self, entry: &VmEntry) {
        if entry.record().is_none() {
            self.publish(entry.name(), Change::Deleted);
        }
    }

    /// As [`Self::there`], but fails for an incoming VM.
    fn present(&self, entry: &VmEntry) -> Result<Record, Error> {
        let record = self.there(entry)?;
        check_here(entry.name(), &record)?;
        Ok(record)
    }

    /// The record of an existing VM whose process, if any, has a supported API level.
    fn there(&self, entry: &VmEntry) -> Result<Record, Error> {
        let vm = entry.name();
        let record = entry.record().ok_or_else(|| no_vm(vm))?;
        if record.phase != Phase::Present {
            return Err(deleting(vm));
        }
        if let Some(live) = &entry.view().live {
            self.check_level(vm, live)?;
        }
        Ok(record)
    }

    pub(super) fn add_nic_now(&self, entry: &VmEntry, nic: &NicSpec) -> Result<Put, Error> {
        let vm = entry.name();
        let mut record = self.present(entry)?;
        if let Some(there) = record.spec.nic(nic.id()) {
            return if there == nic {
                Ok(Put::Same)
            } else {
                Err(other_nic(vm, nic.id()))
            };
        }
        // The guest has not released an earlier NIC of this name.
        if record.has_created(nic.id()) {
            return Err(other_nic(vm, nic.id()));
        }
        if record.spec.disk(nic.id()).is_some() {
            return Err(other_device(vm, nic.id()));
        }
        let spec = record.spec.with_nic(nic.clone())?;
        spec.check(vm)?;
        self.reserve(entry, &spec)?;
        self.lifecycle(entry).add_nic(&mut record, nic, spec)?;
        self.publish(vm, Change::NicAdded(nic.id().clone()));
        Ok(Put::Created)
    }

    pub(super) fn swap_nic_now(
        &self,
        entry: &VmEntry,
        id: &NicId,
        device: ExistingDevice,
    ) -> Result<(), Error> {
        let vm = entry.name();
        let mut record = self.present(entry)?;
        let nic = record.spec.nic(id).ok_or_else(|| no_nic(vm, id))?;
        let moved = nic.moved_to(device);
        if let Some(on_backup) = self.seat_of(vm, nic, &moved) {
            return self.seat(entry, record, id, on_backup);
        }
        if *nic == moved {
            return Ok(());
        }
        let spec = record.spec.with_nic_replaced(&moved);
        spec.check(vm)?;
        self.reserve(entry, &spec)?;
        self.lifecycle(entry).swap_nic(&mut record, &moved, spec)?;
        self.hide_devices(vm);
        self.publish(vm, Change::NicMoved(id.clone()));
        Ok(())
    }

    /// Whether a move to the device of `moved` means the NIC's backup device (true) or its own
    /// (false). None if it is another device, or the NIC has no backup.
    fn seat_of(&self, vm: &VmName, nic: &NicSpec, moved: &NicSpec) -> Option<bool> {
        let backup = nic.on_backup(vm)?;
        let to = self.device_of(vm, moved);
        let is_there = |nic: &NicSpec| self.device_of(vm, nic) == to;
        if is_there(&backup) {
            Some(true)
        } else {
            is_there(nic).then_some(false)
        }
    }

    /// Moves a NIC to its backup device, or back to its own.
    fn seat(
        &self,
        entry: &VmEntry,
        mut record: Record,
        id: &NicId,
        on_backup: bool,
    ) -> Result<(), Error> {
        let lifecycle = self.lifecycle(entry);
        // The VM may have done so by itself.
        lifecycle.query_failovers(&mut record);
        if record.is_on_backup(id) != on_backup {
            lifecycle.seat(&mut record, id, on_backup)?;
        }
        self.hide_devices(entry.name());
        self.publish(entry.name(), Change::NicMoved(id.clone()));
        Ok(())
    }

    /// Records which NICs a VM has moved by itself to their backup device.
    pub(super) fn query_failovers(&self, entry: &VmEntry) {
        let Some(mut record) = entry
            .record()
            .filter(|record| record.phase == Phase::Present)
        else {
            return;
        };
        let moved = self.lifecycle(entry).query_failovers(&mut record);
        if !moved.is_empty() {
            self.hide_devices(entry.name());
        }
        for id in moved {
            self.publish(entry.name(), Change::NicFailedOver(id, None));
        }
    }

    /// Rolls back the rest of a NIC's devices that the host has removed.
    pub(super) fn drop_vanished(&self, entry: &VmEntry, id: &NicId) {
        let record = entry.record();
        if let Some(mut record) = record.filter(|record| record.phase == Phase::Present) {
            self.lifecycle(entry).drop_vanished(&mut record, id);
            // A device that was not created for the NIC is gone, too.
            self.hide_devices(entry.name());
        }
    }

    pub(super) fn remove_nic_now(&self, entry: &VmEntry, id: &NicId) -> Result<Removed, Error> {
        let vm = entry.name();
        let mut record = self.present(entry)?;
        // A NIC that the guest was already requested to release is requested again.
        if record.spec.nic(id).is_none() && !record.has_created(id) {
            return Err(no_nic(vm, id));
        }
        let gone = self.lifecycle(entry).remove_nic(&mut record, id)?;
        if gone {
            self.publish(vm, Change::NicRemoved(id.clone()));
            Ok(Removed::Gone)
        } else {
            Ok(Removed::Asked)
        }
    }

    /// Adds a disk. `disk` has the name `id`.
    pub(super) fn add_disk_now(
        &self,
        entry: &VmEntry,
        id: &DeviceId,
        disk: &DiskConfig,
    ) -> Result<Put, Error> {
        let vm = entry.name();
        let mut record = self.present(entry)?;
        match record.spec.disk(id) {
            Some(there) if there == disk => return Ok(Put::Same),
            Some(_) => return Err(other_device(vm, id)),
            None => {}
        }
        let is_nic = record.spec.nic(id).is_some() || record.has_created(id);
        // The guest has not released an earlier disk of this name.
        if is_nic || record.removed_disks().contains(id) {
            return Err(other_device(vm, id));
        }
        let spec = record.spec.with_disk(disk.clone());
        spec.check(vm)?;
        if record.process().is_none() {
            check_disk(disk)?;
        }
        self.lifecycle(entry)
            .add_disk(&mut record, id, disk, spec)?;
        self.publish(vm, Change::DiskAdded(id.clone()));
        Ok(Put::Created)
    }

    pub(super) fn remove_disk_now(&self, entry: &VmEntry, id: &DeviceId) -> Result<Removed, Error> {
        let vm = entry.name();
        let mut record = self.present(entry)?;
        // The guest is requested again to release a disk that it still has.
        if record.spec.disk(id).is_none() && !record.removed_disks().contains(id) {
            return Err(no_disk(vm, id));
        }
        if self.lifecycle(entry).remove_disk(&mut record, id)? {
            self.publish(vm, Change::DiskRemoved(id.clone()));
            Ok(Removed::Gone)
        } else {
            Ok(Removed::Asked)
        }
    }
}

impl Machines {
    pub(super) fn add_function_now(
        &self,
        entry: &VmEntry,
        id: &DeviceId,
        function: &VfioConfig,
    ) -> Result<Put, Error> {
        let vm = entry.name();
        let mut record = self.present(entry)?;
        if let Some(there) = record.spec.function(id) {
            let settings = |one: &VfioConfig| VfioConfig {
                id: None,
                ..one.clone()
            };
            if settings(there) != settings(function) {
                return Err(other_device(vm, id));
            }
            // The host may have taken it from the running VM.
            self.lifecycle(entry)
                .bring_function(&mut record, function)?;
            return Ok(Put::Same);
        }
        if record.removed_functions().any(|one| one == id) {
            return Err(other_device(vm, id));
        }
        let spec = record.spec.with_function(function.clone());
        spec.check(vm)?;
        self.reserve(entry, &spec)?;
        self.lifecycle(entry)
            .add_function(&mut record, id, function, spec)?;
        self.functions_changed(vm);
        Ok(Put::Created)
    }

    pub(super) fn remove_function_now(
        &self,
        entry: &VmEntry,
        id: &DeviceId,
    ) -> Result<Removed, Error> {
        let vm = entry.name();
        let mut record = self.present(entry)?;
        let is_removed = record.removed_functions().any(|one| one == id);
        // The guest is requested again to release a function that it still has.
        if record.spec.function(id).is_none() && !is_removed {
            return Err(no_function(vm, id));
        }
        if self.lifecycle(entry).remove_function(&mut record, id)? {
            self.functions_changed(vm);
            Ok(Removed::Gone)
        } else {
            Ok(Removed::Asked)
        }
    }

    pub(super) fn functions_changed(&self, vm: &VmName) {
        let fields = vec!["/spec/vfio".to_owned()];
        self.publish(vm, Change::SpecChanged(fields));
    }
}

/// Fails if the VM's guest has not arrived yet.
fn check_here(vm: &VmName, record: &Record) -> Result<(), Error> {
    if record.incoming.is_some() && record.outgoing.is_none() {
        Err(arriving(vm))
    } else {
        Ok(())
    }
}

/// Fails if a VM has no process and its guest may run elsewhere.
pub(super) fn check_location_known(vm: &VmName, record: &Record) -> Result<(), Error> {
    match record.migration_unknown() {
        None => Ok(()),
        Some(outgoing) => {
            let (reason, remedy) = (outgoing.reason(), remedy(vm.as_str()));
            let message = format!("cannot start {vm}: {reason}; {remedy}");
            Err(Error::conflict("migration_unknown", message))
        }
    }
}
