//! The steps that replace a stopped VM by another one.
//!
//! ```text
//!   replace  checked ─> remembered in the new record ─> undone as for delete ─> as create
//!              │ cannot be                                └── fails ──> undone ─> the former
//!              └──> nothing is touched                       record again, with its NICs
//! ```
//! The new record contains the former VM until the new one is Present. So a daemon that finds an
//! interrupted replacement restores the former VM.

use vdpa_mgmt::journal::Journal as _;

use super::super::record::{Phase, Record, Step};
use super::{Lifecycle, not_undone_part, rest};
use crate::error::Error;

const NOT_REPLACED: &str = "cannot replace the VM";

impl Lifecycle<'_> {
    /// Replaces a VM that exists and does not run by `next`.
    ///
    /// # Errors
    /// A step failed. The record is the former VM's, with its NICs except those that the error
    /// names.
    pub(crate) fn replace(&self, record: &mut Record, mut next: Record) -> Result<(), Error> {
        let checked = self.host.check(self.vm, &next.spec);
        checked.map_err(Error::wrap(NOT_REPLACED))?;
        next.replaces(record.clone());
        if let Err(source) = self.keep(&next) {
            // The failed store may have written it.
            self.note(record);
            return Err(Error::wrap(NOT_REPLACED)(source));
        }
        let mut missing = Vec::new();
        let failed = if let Err(error) = self.clear(&mut next) {
            // The steps that are left are the former VM's own.
            *record.steps_mut() = std::mem::take(next.steps_mut());
            error
        } else if let Err(error) = self.build(&mut next) {
            missing = self.undo(&mut next);
            *record = next;
            if let Some(former) = record.restore_merged() {
                *record = former;
            }
            error
        } else {
            *record = next;
            return Ok(());
        };
        if record.phase == Phase::Present {
            missing.extend(self.restore(record));
        }
        let rest = rest(&missing);
        Err(Error::wrap(format!("{NOT_REPLACED}{rest}"))(failed))
    }

    /// Creates the directories and devices of a VM that was to be replaced. Returns the failures.
    fn restore(&self, record: &mut Record) -> Vec<String> {
        let restored = self.keep(record).and_then(|()| {
            self.steps(record).step(Step::Directories, || {
                self.host.make_directories(self.vm).into()
            })
        });
        match restored {
            Ok(()) => {
                let mut missing = self.restore_nics(record);
                missing.extend(self.restore_functions(record));
                missing
            }
            Err(error) => vec![not_undone_part("its directories and NICs", &error)],
        }
    }

    /// The same for callers without a client: logs failures.
    pub(super) fn restore_or_warn(&self, record: &mut Record) {
        let missing = self.restore(record);
        if !missing.is_empty() {
            let missing = missing.join("; ");
            tracing::warn!(vm = %self.vm, missing, "cannot restore all devices of a VM");
        }
    }
}
