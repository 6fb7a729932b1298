//! The steps of a machine's NICs: they come, move to other devices and go, also while it runs.
//!
//! ```text
//!   add      device made, and the one that stands by ─> plugged in
//!   swap     moved to a device that is there ─> the network is told ─> what was made for it taken back
//!   seat     moved to the device that stands by, or back from there; both stay
//!   remove   the guest gives it up ─> what was made for it taken back
//! ```
//! A machine moves a NIC to the device that stands by also by itself; it is asked where its NICs are, and the record says so then.
//! It stays there when the machine is started again by its policy; once somebody stops it, or the host is rebooted, it begins with
//! its own devices.
//!
//! What a NIC is to be is in the record before the machine is asked. So a daemon that is killed in between is followed by
//! one that does the rest ([`Life::settle_nics`]).

use super::super::record::{Record, Step};
use super::super::spec::{NicId, NicSource, NicSpec, VmSpec};
use super::{Life, not_undone_part};
use crate::error::Error;
use vdpa_mgmt::journal::{Journal as _, Outcome};

fn failed(id: &NicId, what: &str) -> impl FnOnce(Error) -> Error {
    Error::wrap(format!("NIC {id} cannot be {what}"))
}

impl Life<'_> {
    /// Devices for all NICs that need one made.
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

    /// The devices of one NIC, if it needs any made: its own first, for the one that stands by is to be like it. Where that
    /// is in use the NIC's own has failed, and whether it can be made is nobody's concern.
    fn make_nic(&self, record: &mut Record, nic: &NicSpec) -> Result<(), Error> {
        if !record.is_on_stand_by(nic.id()) {
            self.make_device(record, nic, false)?;
        }
        self.make_device(record, nic, true)
    }

    fn make_device(&self, record: &mut Record, nic: &NicSpec, stand_by: bool) -> Result<(), Error> {
        if !nic.is_made(stand_by) {
            return Ok(());
        }
        let device = if stand_by {
            self.vm.stand_by(nic.id())
        } else {
            self.vm.device(nic.id())
        };
        let step = Step::Nic {
            id: nic.id().clone(),
            device,
            stand_by,
        };
        self.steps(record).step(step, || {
            Outcome::from(if stand_by {
                self.host.make_stand_by(self.vm, nic)
            } else {
                self.host.make_nic(self.vm, nic)
            })
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
    ) -> Result<(), Error> {
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
    ) -> Result<(), Error> {
        // From here on it is to be there: a daemon that is started in between sees to it.
        let former = std::mem::replace(&mut record.spec, spec);
        let was_on_stand_by = record.is_on_stand_by(nic.id());
        record.set_on_stand_by(nic.id(), false);
        let brought = self.keep(record).and_then(|()| self.bring(record, nic));
        brought.map_err(|source| {
            record.spec = former;
            record.set_on_stand_by(nic.id(), was_on_stand_by);
            self.note(record);
            undo(self, record);
            failed(nic.id(), what)(source)
        })
    }

    /// Sees to it that a machine has a NIC, and on the device where the record has it.
    fn bring(&self, record: &mut Record, nic: &NicSpec) -> Result<(), Error> {
        self.make_nic(record, nic)?;
        if record.process().is_none() {
            return Ok(());
        }
        let now = record.nic_now(self.vm, nic);
        let plug = format_args!("plug {}", nic.id());
        self.act(plug, || self.host.plug(self.vm, &now))?;
        match now.source() {
            // It can have no other, unless it can come back from the one that stands by.
            NicSource::From(_) if nic.stand_by().is_none() => Ok(()),
            NicSource::From(_) | NicSource::There(_) => self.swap(&now),
        }
    }

    /// Has the running machine's NIC be on this device.
    fn swap(&self, nic: &NicSpec) -> Result<(), Error> {
        let swap = format_args!("swap {}", nic.id());
        self.act(swap, || self.host.swap(self.vm, nic))
    }

    /// Moves a NIC to the device that stands by for it, or back to its own.
    ///
    /// # Errors
    /// What failed; the NIC stays where it was.
    pub(crate) fn seat(
        &self,
        record: &mut Record,
        id: &NicId,
        on_stand_by: bool,
    ) -> Result<(), Error> {
        let was = record.is_on_stand_by(id);
        record.set_on_stand_by(id, on_stand_by);
        let seated = self.keep(record).and_then(|()| self.take_seat(record, id));
        seated.map_err(|source| {
            record.set_on_stand_by(id, was);
            self.note(record);
            self.back(record, id);
            failed(id, "moved")(source)
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

    /// Asks a running machine which of its NICs it has moved by itself to the device that stands by. Returns those of which that
    /// is news.
    pub(crate) fn look_for_failovers(&self, record: &mut Record) -> Vec<NicId> {
        if record.process().is_none() {
            return Vec::new();
        }
        let seated = record.spec.nics().iter().filter(|nic| {
            let stand_by = nic.on_stand_by(self.vm);
            !record.is_on_stand_by(nic.id())
                && stand_by.is_some_and(|there| self.host.is_on(self.vm, &there))
        });
        let moved: Vec<NicId> = seated.map(|nic| nic.id().clone()).collect();
        for id in &moved {
            record.set_on_stand_by(id, true);
        }
        if !moved.is_empty() {
            self.note(record);
        }
        moved
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
    ) -> Result<(), Error> {
        self.bring_or(record, nic, spec, "moved", |life, record| {
            life.back(record, nic.id());
        })?;
        if record.process().is_some() {
            self.host.announce(self.vm, std::slice::from_ref(nic));
        }
        self.drop_left(record);
        Ok(())
    }

    /// Sees to it that a NIC that could not be moved is where it was, also if only the answer was lost.
    fn back(&self, record: &Record, id: &NicId) {
        let Some(nic) = record.spec.nic(id).filter(|_| record.process().is_some()) else {
            return;
        };
        if let Err(error) = self.swap(&record.nic_now(self.vm, nic)) {
            self.warn(id, &error, "it is not known on which device a NIC is");
        }
    }

    /// Takes back devices that were made for NICs that have others by now. If that fails it is tried again when the machine has
    /// stopped.
    fn drop_left(&self, record: &mut Record) {
        for device in record.left() {
            if let Err(error) = self.drop_device(record, &device) {
                tracing::warn!(
                    vm = %self.vm,
                    device,
                    error = &error as &dyn std::error::Error,
                    "the device that a NIC has left stays until the machine stops"
                );
            }
        }
    }

    /// Takes a NIC away from a machine. Returns whether it is gone; if not, the guest has it still.
    ///
    /// # Errors
    /// The record cannot be kept, and nothing was done; or the machine cannot be asked.
    pub(crate) fn remove_nic(&self, record: &mut Record, id: &NicId) -> Result<bool, Error> {
        let what = "taken away";
        let mut after = record.clone();
        after.spec = record.spec.without_nic(id);
        after.gives_up(id);
        self.keep(&after).map_err(failed(id, what))?;
        *record = after;
        self.give_up(record, id).map_err(failed(id, what))
    }

    /// Has the guest give a NIC up that it is not to have any more, and takes its device back.
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

    /// As [`Self::give_up`], where nobody can be told that it failed.
    fn take(&self, record: &mut Record, id: &NicId) -> bool {
        self.give_up(record, id).unwrap_or_else(|error| {
            self.warn(id, &error, "a NIC stays until the machine ends");
            false
        })
    }

    fn warn(&self, nic: &NicId, error: &Error, what: &str) {
        let error = error as &dyn std::error::Error;
        tracing::warn!(vm = %self.vm, %nic, error, "{what}");
    }

    /// Takes back the devices of a NIC that nobody has any more, if any were made.
    fn drop_devices(&self, record: &mut Record, id: &NicId) -> Result<(), Error> {
        if !record.has_made(id) && record.gave_up(id) {
            self.note(record);
        }
        for device in record.all_made_for(id) {
            self.drop_device(record, &device)?;
        }
        Ok(())
    }

    /// Takes back a device that nobody has any more.
    fn drop_device(&self, record: &mut Record, device: &str) -> Result<(), Error> {
        match record.device_at(device) {
            Some(place) => self.steps(record).undo_at(place),
            None => Ok(()),
        }
    }

    /// Takes back devices of NICs that the machine is not to have any more, or that are on another one. It does not run.
    pub(super) fn drop_unwanted(&self, record: &mut Record) {
        for id in record.unwanted_nics() {
            self.take(record, &id);
        }
        self.drop_left(record);
    }

    /// Takes back all devices that were made for a machine whose guest is elsewhere. They are made again if it is started here.
    pub(super) fn drop_made(&self, record: &mut Record) {
        for id in record.nics_made() {
            if let Err(error) = self.drop_devices(record, &id) {
                self.warn(
                    &id,
                    &error,
                    "the device of a NIC stays, whose guest is elsewhere",
                );
            }
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
        // Before they are brought where the record has them.
        self.look_for_failovers(record);
        let mut all = true;
        for nic in record.spec.nics().to_vec() {
            // A move that failed, and was not undone before its daemon was killed, left it elsewhere.
            let brought = self.bring(record, &nic);
            let brought = brought.and_then(|()| self.take_seat(record, nic.id()));
            if let Err(error) = brought {
                all = false;
                tracing::error!(
                    vm = %self.vm,
                    nic = %nic.id(),
                    error = &error as &dyn std::error::Error,
                    "a machine lacks a NIC"
                );
            }
        }
        // One that could not be moved may be on what it is to leave.
        if all {
            self.drop_left(record);
        }
    }
}
