//! The steps of a VM's NICs, which can be added, moved and removed while it runs.
//!
//! ```text
//!   add      device created, and its backup ─> plugged in
//!   swap     moved to an existing device ─> announced to the network ─> created devices deleted
//!   seat     moved to the backup device, or back; both devices stay
//!   remove   the guest releases it ─> created devices deleted
//!   the host removes its device ─> the rest of that device deleted; the next start creates it
//! ```
//! The VMM also moves a NIC to its backup device by itself; the daemon queries the devices of the
//! NICs and updates the record. The NIC stays on the backup when the policy restarts the VM. After
//! a stop by a client or a reboot of the host, the VM begins with its own devices.
//!
//! The record has the new state of a NIC before the request to the VM. So if a daemon is killed in
//! between, the next one completes the change ([`Lifecycle::reconcile_nics`]).

use super::super::record::{Record, Step};
use super::super::spec::{NicId, NicSource, NicSpec, VmSpec};
use super::{Lifecycle, not_undone_part};
use crate::error::Error;
use vdpa_mgmt::journal::{Journal as _, Outcome};

fn failed(id: &NicId, what: &str) -> impl FnOnce(Error) -> Error {
    Error::wrap(format!("cannot {what} NIC {id}"))
}

impl Lifecycle<'_> {
    /// Creates the devices of all NICs that need them.
    pub(super) fn make_nics(&self, record: &mut Record) -> Result<(), Error> {
        for nic in record.spec.nics().to_vec() {
            self.make_nic(record, &nic)?;
        }
        Ok(())
    }

    /// As [`Self::make_nics`], but continues after a failure. Returns the failures.
    pub(super) fn restore_nics(&self, record: &mut Record) -> Vec<String> {
        let nics = record.spec.nics().to_vec();
        let missing = nics.iter().filter_map(|nic| {
            let error = self.make_nic(record, nic).err()?;
            Some(not_undone_part(&format!("NIC {}", nic.id()), &error))
        });
        missing.collect()
    }

    /// Creates the devices of one NIC, if it needs any: its own first, because the backup copies
    /// its settings. If the backup is in use, the NIC's own device has failed, and a failure to
    /// create that is ignored.
    fn make_nic(&self, record: &mut Record, nic: &NicSpec) -> Result<(), Error> {
        if !record.is_on_backup(nic.id()) {
            self.make_device(record, nic, false)?;
        }
        self.make_device(record, nic, true)
    }

    fn make_device(&self, record: &mut Record, nic: &NicSpec, backup: bool) -> Result<(), Error> {
        if !nic.is_created(backup) {
            return Ok(());
        }
        let device = if backup {
            self.vm.backup(nic.id())
        } else {
            self.vm.device(nic.id())
        };
        let step = Step::Nic {
            id: nic.id().clone(),
            device,
            backup,
        };
        self.steps(record).step(step, || {
            Outcome::from(if backup {
                self.host.make_backup(self.vm, nic)
            } else {
                self.host.make_nic(self.vm, nic)
            })
        })
    }

    /// Adds a NIC to a VM: `spec` has it.
    ///
    /// # Errors
    /// A step failed. The VM is as before, except for parts that could not be undone, which are
    /// deleted when the VM stops.
    pub(crate) fn add_nic(
        &self,
        record: &mut Record,
        nic: &NicSpec,
        spec: VmSpec,
    ) -> Result<(), Error> {
        self.bring_or(record, nic, spec, "add", |lifecycle, record| {
            lifecycle.take(record, nic.id());
        })
    }

    /// Stores `spec` in the record, then brings the VM's NIC in line with it. A failure restores
    /// the record, and `undo` rolls back the rest.
    fn bring_or(
        &self,
        record: &mut Record,
        nic: &NicSpec,
        spec: VmSpec,
        what: &'static str,
        undo: impl FnOnce(&Self, &mut Record),
    ) -> Result<(), Error> {
        // From here on the NIC must exist: a daemon that starts in between completes it.
        let former = std::mem::replace(&mut record.spec, spec);
        let was_on_backup = record.is_on_backup(nic.id());
        record.set_on_backup(nic.id(), false);
        let brought = self.keep(record).and_then(|()| self.bring(record, nic));
        brought.map_err(|source| {
            record.spec = former;
            record.set_on_backup(nic.id(), was_on_backup);
            self.note(record);
            undo(self, record);
            failed(nic.id(), what)(source)
        })
    }

    /// Ensures that a VM has a NIC, on the device in the record.
    fn bring(&self, record: &mut Record, nic: &NicSpec) -> Result<(), Error> {
        self.make_nic(record, nic)?;
        if record.process().is_none() {
            return Ok(());
        }
        let now = record.nic_now(self.vm, nic);
        let plug = format_args!("plug {}", nic.id());
        self.act(plug, || self.host.plug(self.vm, &now))?;
        match now.source() {
            // It can be on no other device, unless it can come back from a backup.
            NicSource::From(_) if nic.backup().is_none() => Ok(()),
            NicSource::From(_) | NicSource::There(_) => self.swap(&now),
        }
    }

    /// Moves the running VM's NIC to this device.
    fn swap(&self, nic: &NicSpec) -> Result<(), Error> {
        let swap = format_args!("swap {}", nic.id());
        self.act(swap, || self.host.swap(self.vm, nic))
    }

    /// Moves a NIC to its backup device, or back to its own.
    ///
    /// # Errors
    /// A step failed; the NIC stays on its device.
    pub(crate) fn seat(
        &self,
        record: &mut Record,
        id: &NicId,
        on_backup: bool,
    ) -> Result<(), Error> {
        let was = record.is_on_backup(id);
        record.set_on_backup(id, on_backup);
        let seated = self.keep(record).and_then(|()| self.take_seat(record, id));
        seated.map_err(|source| {
            record.set_on_backup(id, was);
            self.note(record);
            self.back(record, id);
            failed(id, "move")(source)
        })
    }

    fn take_seat(&self, record: &mut Record, id: &NicId) -> Result<(), Error> {
        let Some(nic) = record.spec.nic(id).cloned() else {
            return Ok(());
        };
        self.make_nic(record, &nic)?;
        if record.process().is_none() {
            return Ok(());
        }
        self.swap(&record.nic_now(self.vm, &nic))
    }

    /// Queries which NICs a running VM has moved by itself to their backup device. Returns those
    /// that the record did not have there.
    pub(crate) fn query_failovers(&self, record: &mut Record) -> Vec<NicId> {
        if record.process().is_none() {
            return Vec::new();
        }
        let seated = record.spec.nics().iter().filter(|nic| {
            let backup = nic.on_backup(self.vm);
            !record.is_on_backup(nic.id())
                && backup.is_some_and(|there| self.host.is_on(self.vm, &there))
        });
        let moved: Vec<NicId> = seated.map(|nic| nic.id().clone()).collect();
        for id in &moved {
            record.set_on_backup(id, true);
        }
        if !moved.is_empty() {
            self.note(record);
        }
        for id in &moved {
            self.drop_vanished(record, id);
        }
        moved
    }

    /// Deletes the rest of the devices that were created for a NIC and that the host has removed.
    /// The NIC stays in the spec, so the next start creates them again.
    pub(crate) fn drop_vanished(&self, record: &mut Record, id: &NicId) {
        for device in record.created_for(id) {
            if self.host.is_gone(&device)
                && let Err(error) = self.drop_device(record, &device)
            {
                self.warn(id, &error, "cannot delete the rest of a removed device");
            }
        }
    }

    /// Moves a NIC to another existing device: `spec` has it. The devices created for it are
    /// deleted.
    ///
    /// # Errors
    /// A step failed; the NIC stays on its device.
    pub(crate) fn swap_nic(
        &self,
        record: &mut Record,
        nic: &NicSpec,
        spec: VmSpec,
    ) -> Result<(), Error> {
        self.bring_or(record, nic, spec, "move", |lifecycle, record| {
            lifecycle.back(record, nic.id());
        })?;
        if record.process().is_some() {
            self.host.announce(self.vm, std::slice::from_ref(nic));
        }
        self.drop_left(record);
        Ok(())
    }

    /// Ensures that a NIC whose move failed is on its former device, even if only the answer was
    /// lost.
    fn back(&self, record: &Record, id: &NicId) {
        let Some(nic) = record.spec.nic(id).filter(|_| record.process().is_some()) else {
            return;
        };
        if let Err(error) = self.swap(&record.nic_now(self.vm, nic)) {
            self.warn(id, &error, "the device of a NIC is unknown");
        }
    }

    /// Deletes devices that were created for NICs that have others now. A failure is retried when
    /// the VM has stopped.
    fn drop_left(&self, record: &mut Record) {
        for device in record.left() {
            if let Err(error) = self.drop_device(record, &device) {
                tracing::warn!(
                    vm = %self.vm,
                    device,
                    error = &error as &dyn std::error::Error,
                    "cannot delete the former device of a NIC; it stays until the VM stops"
                );
            }
        }
    }

    /// Removes a NIC from a VM. Returns whether it is gone; if not, the guest still has it.
    ///
    /// # Errors
    /// The record cannot be stored, and nothing was done; or the VM cannot be reached.
    pub(crate) fn remove_nic(&self, record: &mut Record, id: &NicId) -> Result<bool, Error> {
        let what = "remove";
        let mut after = record.clone();
        after.removes_nic(id);
        self.keep(&after).map_err(failed(id, what))?;
        *record = after;
        self.give_up(record, id).map_err(failed(id, what))
    }

    /// Requests the guest to release a NIC that the VM should no longer have, and deletes its
    /// device.
    fn give_up(&self, record: &mut Record, id: &NicId) -> Result<bool, Error> {
        if record.process().is_some() {
            let unplug = format_args!("unplug {id}");
            if !self.act(unplug, || self.host.unplug(self.vm, id))? {
                return Ok(false);
            }
        }
        self.drop_devices(record, id)?;
        Ok(true)
    }

    /// As [`Self::give_up`], for callers that cannot report a failure.
    fn take(&self, record: &mut Record, id: &NicId) -> bool {
        self.give_up(record, id).unwrap_or_else(|error| {
            self.warn(
                id,
                &error,
                "cannot remove a NIC; it stays until the VM ends",
            );
            false
        })
    }

    fn warn(&self, nic: &NicId, error: &Error, what: &str) {
        let error = error as &dyn std::error::Error;
        tracing::warn!(vm = %self.vm, %nic, error, "{what}");
    }

    /// Deletes the devices that were created for a NIC and that are no longer in use.
    fn drop_devices(&self, record: &mut Record, id: &NicId) -> Result<(), Error> {
        if record.mark_released(id) && !record.has_created(id) {
            self.note(record);
        }
        for device in record.created_for(id) {
            self.drop_device(record, &device)?;
        }
        Ok(())
    }

    /// Deletes a device that is no longer in use.
    fn drop_device(&self, record: &mut Record, device: &str) -> Result<(), Error> {
        match record.device_at(device) {
            Some(place) => self.steps(record).undo_at(place),
            None => Ok(()),
        }
    }

    /// Deletes devices of NICs that the VM should no longer have, or that are on other devices. The
    /// VM does not run.
    pub(super) fn drop_unwanted(&self, record: &mut Record) {
        for id in record.unwanted_nics() {
            self.take(record, &id);
        }
        self.drop_left(record);
    }

    /// Deletes all devices that were created for a VM whose guest is elsewhere. A start here
    /// creates them again.
    pub(super) fn delete_created(&self, record: &mut Record) {
        for id in record.created_nics() {
            if let Err(error) = self.drop_devices(record, &id) {
                self.warn(
                    &id,
                    &error,
                    "cannot delete the device of a guest that runs elsewhere",
                );
            }
        }
    }

    /// Deletes devices of NICs that the guest has released. Returns those NICs.
    pub(crate) fn drop_given_up(&self, record: &mut Record) -> Vec<NicId> {
        let unwanted = record.unwanted_nics().into_iter();
        unwanted.filter(|id| self.take(record, id)).collect()
    }

    /// Brings the NICs of a running VM in line with its record. Returns whether each one uses the
    /// device that it should.
    pub(crate) fn reconcile_nics(&self, record: &mut Record) -> bool {
        for id in record.unwanted_nics() {
            self.take(record, &id);
        }
        // Before the loop moves NICs to their devices in the record.
        self.query_failovers(record);
        let mut all = true;
        for nic in record.spec.nics().to_vec() {
            // A failed move that was not rolled back before its daemon was killed left the NIC on
            // the other device.
            let brought = self.bring(record, &nic);
            let brought = brought.and_then(|()| self.take_seat(record, nic.id()));
            if let Err(error) = brought {
                all = false;
                tracing::error!(
                    vm = %self.vm,
                    nic = %nic.id(),
                    error = &error as &dyn std::error::Error,
                    "cannot add a NIC to a VM"
                );
            }
        }
        // A NIC that could not be moved may still use the device that it should leave.
        if all {
            self.drop_left(record);
        }
        all
    }
}
