//! The steps of a VM's functions: bound to vfio-pci, and to their former drivers again.
//!
//! ```text
//!   create, start   checked ─> has another driver: recorded with it ─> bound to vfio-pci
//!   add             recorded ─> bound ─> plugged in, if the VM runs
//!   remove          out of the spec, marked ─> the guest releases it ─> former driver
//!   start           functions that the VM no longer has get their former drivers
//!   delete          all of them do
//! ```
//! A function that has a VFIO driver before stays bound to it: its owner did that. A binding ends
//! with the host's boot. The host keeps a function that it takes back from a running VM. The VM
//! gets it again at its next start, or when a client adds it again.

use vdpa_mgmt::journal::{Journal as _, Outcome};
use vmm::config::VfioConfig;

use super::super::record::{Record, Step};
use super::super::spec::{DeviceId, VmSpec};
use super::{Lifecycle, not_undone_part};
use crate::error::Error;

impl Lifecycle<'_> {
    /// Binds the functions of a VM that does not run to vfio-pci.
    pub(super) fn bind_functions(&self, record: &mut Record) -> Result<(), Error> {
        for function in record.spec.machine().vfio.clone() {
            self.bind_function(record, &function)?;
        }
        Ok(())
    }

    fn bind_function(&self, record: &mut Record, function: &VfioConfig) -> Result<(), Error> {
        let checked = self.host.check_function(function);
        let failed = Error::wrap(format!("cannot use the function {}", function.name()));
        let Some(now) = checked.map_err(failed)? else {
            return Ok(());
        };
        // Another program may have unbound a function that was bound for this VM.
        let known = record.bound_function(now.function);
        let former = known.map_or(now, |(_, former)| former.clone());
        let step = Step::Function {
            former: former.clone(),
            boot: self.host.boot(),
        };
        let bind = || Outcome::from(self.host.bind_function(&former));
        self.steps(record).step(step, bind)
    }

    /// As [`Self::bind_functions`], but continues after a failure. Returns the failures.
    pub(super) fn restore_functions(&self, record: &mut Record) -> Vec<String> {
        let functions = record.spec.machine().vfio.clone();
        let missing = functions.iter().filter_map(|function| {
            let error = self.bind_function(record, function).err()?;
            Some(not_undone_part(&function.name(), &error))
        });
        missing.collect()
    }

    /// Gives functions that neither a VM nor its guest has their former drivers.
    pub(super) fn release_unwanted(&self, record: &mut Record) {
        for function in record.unwanted_functions() {
            let Some((place, _)) = record.bound_function(function) else {
                continue;
            };
            if let Err(error) = self.steps(record).undo_at(place) {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(vm = %self.vm, %function, error, "cannot release a function");
            }
        }
    }

    /// Adds a function to a VM: `spec` has it, under the name `id`.
    ///
    /// # Errors
    /// A step failed. The VM is as before, or the guest is requested to release the function.
    pub(crate) fn add_function(
        &self,
        record: &mut Record,
        id: &DeviceId,
        function: &VfioConfig,
        spec: VmSpec,
    ) -> Result<(), Error> {
        let former = std::mem::replace(&mut record.spec, spec);
        let added = self
            .keep(record)
            .and_then(|()| self.bring_function(record, function));
        added.map_err(|source| {
            // The VM may have the function although it answered with an error.
            for function in record.spec.without_function(id).functions_of(&record.spec) {
                record.removes_function(id, function);
            }
            record.spec = former;
            self.note(record);
            self.take_function(record, id);
            Error::wrap(format!("cannot add function {id}"))(source)
        })
    }

    /// Binds a function, and plugs it in if the VM runs.
    pub(crate) fn bring_function(
        &self,
        record: &mut Record,
        function: &VfioConfig,
    ) -> Result<(), Error> {
        if record.process().is_none() {
            return self.bind_function(record, function);
        }
        if self.host.has_function(self.vm, function)? {
            return Ok(());
        }
        self.bind_function(record, function)?;
        let plug = format_args!("plug function {}", function.name());
        self.act(plug, || self.host.plug_function(self.vm, function))
    }

    /// Removes a function from a VM. Returns whether it is gone; if not, the guest still has it.
    ///
    /// # Errors
    /// The record cannot be stored, and nothing was done; or the VM cannot be reached, or the
    /// function's former driver does not take it.
    pub(crate) fn remove_function(
        &self,
        record: &mut Record,
        id: &DeviceId,
    ) -> Result<bool, Error> {
        let failed = || Error::wrap(format!("cannot remove function {id}"));
        let mut after = record.clone();
        after.spec = record.spec.without_function(id);
        for function in after.spec.functions_of(&record.spec) {
            after.removes_function(id, function);
        }
        self.keep(&after).map_err(failed())?;
        *record = after;
        self.give_function_up(record, id).map_err(failed())
    }

    /// Requests the guest to release a function that the VM should no longer have, and gives it its
    /// former driver.
    fn give_function_up(&self, record: &mut Record, id: &DeviceId) -> Result<bool, Error> {
        if record.process().is_some() {
            let unplug = format_args!("unplug function {id}");
            if !self.act(unplug, || self.host.unplug_function(self.vm, id))? {
                return Ok(false);
            }
        }
        if record.mark_function_released(id) {
            self.note(record);
        }
        self.release_unwanted(record);
        Ok(true)
    }

    /// As [`Self::give_function_up`], but logs a failure as a warning.
    fn take_function(&self, record: &mut Record, id: &DeviceId) -> bool {
        self.give_function_up(record, id).unwrap_or_else(|error| {
            let error = &error as &dyn std::error::Error;
            let (vm, function) = (self.vm, id);
            tracing::warn!(%vm, %function, error, "cannot remove a function until the VM ends");
            false
        })
    }

    /// Releases removed functions that the guest has released. Returns whether there were any.
    pub(crate) fn drop_removed_functions(&self, record: &mut Record) -> bool {
        let removed: Vec<DeviceId> = record.removed_functions().cloned().collect();
        let mut any = false;
        for id in removed {
            any |= self.take_function(record, &id);
        }
        any
    }

    /// Brings the functions of a running VM in line with its record.
    pub(crate) fn reconcile_functions(&self, record: &mut Record) {
        self.drop_removed_functions(record);
        self.release_unwanted(record);
        for function in record.spec.machine().vfio.clone() {
            let name = function.name();
            match self.host.has_function(self.vm, &function) {
                Ok(true) => {}
                Ok(false) => tracing::warn!(
                    vm = %self.vm,
                    function = name,
                    "a VM runs without one of its functions: add it again, or restart the VM"
                ),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(vm = %self.vm, function = name, error, "cannot query a VM");
                }
            }
        }
    }
}
