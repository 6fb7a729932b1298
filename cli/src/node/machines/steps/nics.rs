//! The steps of a machine's NICs: they come, move to other devices and go, also while it runs.
//!
//! ```text
//!   add      device made ─> plugged in
//!   swap     moved to a device that is there ─> the network is told ─> what was made for it taken back
//!   remove   the guest gives it up ─> what was made for it taken back
//! ```
//! What a NIC is to be is in the record before the machine is asked. So a daemon that is killed in between is followed by
//! one that does the rest ([`Life::settle_nics`]).

use super::super::error::{LifeError, StepError};
use super::super::record::{Record, Step};
use super::super::spec::{NicId, NicSource, NicSpec, VmSpec};
use super::{Act, Life, Moment};

impl Life<'_> {
    /// Devices for all NICs that need one made.
    pub(super) fn make_nics(&self, record: &mut Record) -> Result<(), StepError> {
        for nic in record.spec.nics().to_vec() {
            self.make_nic(record, &nic)?;
        }
        Ok(())
    }

    /// The device of one NIC, if it needs one made.
    pub(crate) fn make_nic(&self, record: &mut Record, nic: &NicSpec) -> Result<(), StepError> {
        if !matches!(nic.source(), NicSource::From(_)) {
            return Ok(());
        }
        if record.made(nic.id()).is_none() {
            record.begin(Step::Nic {
                id: nic.id().clone(),
                device: self.vm.device(nic.id()),
            });
            self.keep(record)?;
        }
        self.act(Act::Nic(nic.id().to_string()), || {
            self.host.make_nic(self.vm, nic)
        })
    }

    /// Gives a machine one more NIC: `spec` has it.
    ///
    /// # Errors
    /// What failed; the machine is as before then, but for what could not be undone, which goes when the machine
    /// stops.
    pub(crate) fn add_nic(
        &self,
        record: &mut Record,
        nic: &NicSpec,
        spec: VmSpec,
    ) -> Result<(), LifeError> {
        self.bring_or(record, nic, spec, "added", |life, record| {
            life.take(record, nic.id());
        })
    }

    /// Puts `spec` into the record, then sees to it that the machine has the NIC as it says. If that fails the record is as
    /// it was, and `undo` takes back what was done.
    fn bring_or(
        &self,
        record: &mut Record,
        nic: &NicSpec,
        spec: VmSpec,
        what: &'static str,
        undo: impl FnOnce(&Self, &mut Record),
    ) -> Result<(), LifeError> {
        // From here on it is to be there: a daemon that is started in between sees to it.
        let former = std::mem::replace(&mut record.spec, spec);
        let brought = self.keep(record).and_then(|()| self.bring(record, nic));
        brought.map_err(|source| {
            record.spec = former;
            self.note(record);
            undo(self, record);
            LifeError::Nic {
                id: nic.id().clone(),
                what,
                source: Box::new(source),
            }
        })
    }

    /// Sees to it that a machine has a NIC, and on this device.
    fn bring(&self, record: &mut Record, nic: &NicSpec) -> Result<(), StepError> {
        self.make_nic(record, nic)?;
        if record.process().is_none() {
            return Ok(());
        }
        let id = nic.id().to_string();
        self.act(Act::Plug(id.clone()), || self.host.plug(self.vm, nic))?;
        match nic.source() {
            // It can have no other.
            NicSource::From(_) => Ok(()),
            NicSource::Path(_) | NicSource::Device(_) => {
                self.act(Act::Swap(id), || self.host.swap(self.vm, nic))
            }
        }
    }

    /// Moves a NIC to another device, which is there already: `spec` has it so. What was made for it goes.
    ///
    /// # Errors
    /// What failed; the NIC stays where it was.
    pub(crate) fn swap_nic(
        &self,
        record: &mut Record,
        nic: &NicSpec,
        spec: VmSpec,
    ) -> Result<(), LifeError> {
        self.bring_or(record, nic, spec, "moved", |life, record| {
            life.back(record, nic.id());
        })?;
        if record.process().is_some() {
            self.host.announce(self.vm, std::slice::from_ref(nic));
        }
        self.drop_left(record, nic.id());
        Ok(())
    }

    /// Sees to it that a NIC that could not be moved is where it was, also if only the answer was lost.
    fn back(&self, record: &Record, id: &NicId) {
        let Some(nic) = record.spec.nic(id).filter(|_| record.process().is_some()) else {
            return;
        };
        let back = self.act(Act::Swap(id.to_string()), || self.host.swap(self.vm, nic));
        if let Err(error) = back {
            tracing::warn!(
                vm = %self.vm,
                nic = %id,
                error = &error as &dyn std::error::Error,
                "it is not known on which device a NIC is"
            );
        }
    }

    /// Takes back the device that was made for a NIC that has another one by now. If that fails it is tried again when the
    /// machine has stopped.
    fn drop_left(&self, record: &mut Record, id: &NicId) {
        if let Err(error) = self.drop_device(record, id) {
            tracing::warn!(
                vm = %self.vm,
                nic = %id,
                error = &error as &dyn std::error::Error,
                "the device that a NIC has left stays until the machine stops"
            );
        }
    }

    /// Takes a NIC away from a machine. Returns whether it is gone; if not, the guest has it still.
    ///
    /// # Errors
    /// The record cannot be kept, and nothing was done; or the machine cannot be asked.
    pub(crate) fn remove_nic(&self, record: &mut Record, id: &NicId) -> Result<bool, LifeError> {
        let failed = |source| LifeError::Nic {
            id: id.clone(),
            what: "taken away",
            source: Box::new(source),
        };
        let mut after = record.clone();
        after.spec = record.spec.without_nic(id);
        after.gives_up(id);
        self.keep(&after).map_err(failed)?;
        *record = after;
        self.give_up(record, id).map_err(failed)
    }

    /// Has the guest give a NIC up that it is not to have any more, and takes its device back.
    fn give_up(&self, record: &mut Record, id: &NicId) -> Result<bool, StepError> {
        if record.process().is_some() {
            let gone = self.act(Act::Unplug(id.to_string()), || {
                self.host.unplug(self.vm, id)
            })?;
            if !gone {
                return Ok(false);
            }
        }
        self.drop_device(record, id)?;
        Ok(true)
    }

    /// As [`Self::give_up`], where nobody can be told that it failed.
    fn take(&self, record: &mut Record, id: &NicId) -> bool {
        self.give_up(record, id).unwrap_or_else(|error| {
            tracing::warn!(
                vm = %self.vm,
                nic = %id,
                error = &error as &dyn std::error::Error,
                "a NIC stays until the machine ends"
            );
            false
        })
    }

    /// Takes back the device of a NIC that nobody has any more, if one was made.
    fn drop_device(&self, record: &mut Record, id: &NicId) -> Result<(), StepError> {
        let Some(device) = record.made(id).map(str::to_owned) else {
            if record.gave_up(id) {
                self.note(record);
            }
            return Ok(());
        };
        let act = Act::Nic(id.to_string());
        self.tell(&Moment::Undo(act.clone()));
        self.host.remove_nic(self.vm, &device)?;
        self.tell(&Moment::Undone(act));
        record.forget_nic(id);
        self.note(record);
        Ok(())
    }

    /// Takes back devices of NICs that the machine is not to have any more, or that are on another one. It does not run.
    pub(super) fn drop_unwanted(&self, record: &mut Record) {
        for id in record.unwanted_nics() {
            self.take(record, &id);
        }
        for id in record.left() {
            self.drop_left(record, &id);
        }
    }

    /// Takes back all devices that were made for a machine whose guest is elsewhere. They are made again if it is started here.
    pub(super) fn drop_made(&self, record: &mut Record) {
        for id in record.all_made() {
            self.drop_left(record, &id);
        }
    }

    /// Takes back devices of NICs that the guest has given up. Returns which.
    pub(crate) fn drop_given_up(&self, record: &mut Record) -> Vec<NicId> {
        let unwanted = record.unwanted_nics().into_iter();
        unwanted.filter(|id| self.take(record, id)).collect()
    }

    /// Has a running machine have the NICs that it is to have, and no other that was made for it.
    pub(crate) fn settle_nics(&self, record: &mut Record) {
        for id in record.unwanted_nics() {
            self.take(record, &id);
        }
        for nic in record.spec.nics().to_vec() {
            match self.bring(record, &nic) {
                Ok(()) if record.left().contains(nic.id()) => self.drop_left(record, nic.id()),
                Ok(()) => {}
                Err(error) => tracing::error!(
                    vm = %self.vm,
                    nic = %nic.id(),
                    error = &error as &dyn std::error::Error,
                    "a machine lacks a NIC"
                ),
            }
        }
    }
}
