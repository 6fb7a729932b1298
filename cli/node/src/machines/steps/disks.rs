//! The steps of a VM's disks, which can be added and removed while it runs.
//!
//! ```text
//!   add      recorded ─> plugged in, if the VM runs
//!   remove   out of the record, marked as removed ─> the guest releases it ─> the mark goes
//! ```
//! The record changes before the request to the VM. If the daemon is killed in between, the next
//! one completes the change ([`Lifecycle::reconcile_disks`]).

use vmm::config::DiskConfig;

use super::super::record::Record;
use super::super::spec::{DeviceId, VmSpec};
use super::Lifecycle;
use crate::error::Error;

fn failed(id: &DeviceId, what: &str) -> impl FnOnce(Error) -> Error {
    Error::wrap(format!("cannot {what} disk {id}"))
}

impl Lifecycle<'_> {
    /// Adds a disk to a VM: `spec` has it, under the name `id`.
    ///
    /// # Errors
    /// A step failed. The VM is as before, or the guest is requested to release the disk.
    pub(crate) fn add_disk(
        &self,
        record: &mut Record,
        id: &DeviceId,
        disk: &DiskConfig,
        spec: VmSpec,
    ) -> Result<(), Error> {
        let former = std::mem::replace(&mut record.spec, spec);
        let added = self
            .keep(record)
            .and_then(|()| self.bring_disk(record, id, disk));
        added.map_err(|source| {
            // The VM may have the disk although it answered with an error.
            record.removes_disk(id);
            record.spec = former;
            self.note(record);
            self.take_disk(record, id);
            failed(id, "add")(source)
        })
    }

    /// Plugs a disk in, if the VM runs.
    fn bring_disk(&self, record: &Record, id: &DeviceId, disk: &DiskConfig) -> Result<(), Error> {
        if record.process().is_none() {
            return Ok(());
        }
        let plug = format_args!("plug disk {id}");
        self.act(plug, || self.host.plug_disk(self.vm, id, disk))
    }

    /// Removes a disk from a VM. Returns whether it is gone; if not, the guest still has it.
    ///
    /// # Errors
    /// The record cannot be stored, and nothing was done; or the VM cannot be reached.
    pub(crate) fn remove_disk(&self, record: &mut Record, id: &DeviceId) -> Result<bool, Error> {
        let what = "remove";
        let mut after = record.clone();
        after.removes_disk(id);
        self.keep(&after).map_err(failed(id, what))?;
        *record = after;
        self.give_disk_up(record, id).map_err(failed(id, what))
    }

    /// Requests the guest to release a disk that the VM should no longer have.
    fn give_disk_up(&self, record: &mut Record, id: &DeviceId) -> Result<bool, Error> {
        if record.process().is_some() {
            let unplug = format_args!("unplug disk {id}");
            let image = record.unneeded_image(id);
            if !self.act(unplug, || self.host.unplug_disk(self.vm, id, image))? {
                return Ok(false);
            }
        }
        if record.mark_disk_released(id) {
            self.note(record);
        }
        Ok(true)
    }

    /// As [`Self::give_disk_up`], but logs a failure as a warning.
    fn take_disk(&self, record: &mut Record, id: &DeviceId) -> bool {
        self.give_disk_up(record, id).unwrap_or_else(|error| {
            let error = &error as &dyn std::error::Error;
            let (vm, disk) = (self.vm, id);
            tracing::warn!(%vm, %disk, error, "cannot remove a disk until the VM ends");
            false
        })
    }

    /// Forgets removed disks that the guest has released. Returns those.
    pub(crate) fn drop_removed_disks(&self, record: &mut Record) -> Vec<DeviceId> {
        let removed = record.removed_disks().clone().into_iter();
        removed.filter(|id| self.take_disk(record, id)).collect()
    }

    /// Brings the disks of a running VM in line with its record.
    pub(crate) fn reconcile_disks(&self, record: &mut Record) {
        self.drop_removed_disks(record);
        for disk in &record.spec.machine().disks {
            let id = disk
                .id
                .as_deref()
                .and_then(|id| id.parse::<DeviceId>().ok());
            let brought = id.map(|id| self.bring_disk(record, &id, disk));
            if let Some(Err(error)) = brought {
                tracing::error!(
                    vm = %self.vm,
                    disk = disk.id,
                    error = &error as &dyn std::error::Error,
                    "cannot add a disk to a VM"
                );
            }
        }
    }
}
