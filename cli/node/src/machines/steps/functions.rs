//! The steps of a VM's functions: bound to vfio-pci, and to their former drivers again.
//!
//! ```text
//!   create, start   checked ─> has another driver: recorded with it ─> bound to vfio-pci
//!   start           functions that the VM no longer has get their former drivers
//!   delete          all of them do
//! ```
//! A function that has a VFIO driver before stays bound to it: its owner did that. A binding ends
//! with the host's boot.

use vdpa_mgmt::journal::{Journal as _, Outcome};
use vmm::config::VfioConfig;

use super::super::record::{Record, Step};
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

    /// Gives functions that a VM no longer has their former drivers. The VM does not run.
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
}
