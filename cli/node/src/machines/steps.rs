//! The steps of a virtual machine's life, in order, and the way back.
//!
//! ```text
//!   create   directories ─> a device for each NIC, and one that stands by ─> [start]
//!   replace  checked ─> undone as for delete ─> as create ─> fails: undone, the former one is back
//!   start    devices that are gone (the host was rebooted) ─> process ─> configured, NICs, booted
//!   ask      marked in the record ─> asked to power off
//!   stop     process
//!   delete   what was begun, from the end
//!   send     marked in the record ─> asked to leave for another process
//!   receive  as create, but that its process waits for the machine
//! ```
//! Each step is in the record, and the record kept, before it is done ([`Journal`]). What fails undoes what was done
//! before it. Undoing what was not done, or is undone already, changes nothing; so after a crash anywhere the same can
//! simply be done again.
//!
//! Owns the order. How a step is done belongs to [`Host`]; tests have one in memory that fails wherever they like.

mod arriving;
mod disks;
mod leaving;
mod nics;
mod replacing;

use std::fmt;

use axum::body::Bytes;
use axum::http::StatusCode;
use bellhop_api::machine::{End, EndReason};
use vdpa::causes::in_one_line;
use vdpa_mgmt::journal::{Journal, Moment};
use vmm::config::DiskConfig;

use super::arrival::{AtEnd, Coming};
use super::departure::{Account, Departure};
use super::process::Identity;
use super::record::{Phase, Record, Step};
use super::spec::{Desired, DeviceId, NicId, NicSpec, Restart, VmName, VmSpec};
use crate::error::Error;
use crate::peers::Peer;

/// What a process that was started to run a machine turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// It is not there.
    Gone,
    /// It is there and runs no machine yet.
    NotBooted,
    /// It runs the machine.
    Runs,
    /// It is there and does not say what it does, or is of a later level: it is left alone.
    Unknown,
}

/// A request to a machine to leave for another process.
#[derive(Debug, Clone)]
pub(crate) struct SendRequest {
    /// Where to, as far as it says that.
    pub(crate) destination: String,
    /// As the machine gets it.
    pub(crate) body: Bytes,
    /// Its name, if it has one.
    pub(crate) request_id: Option<String>,
    /// The node that waits for it, if it is one.
    pub(crate) peer: Option<Peer>,
}

/// What a machine has answered.
#[derive(Debug, Clone)]
pub(crate) struct Passed {
    pub(crate) status: StatusCode,
    /// JSON.
    pub(crate) body: Bytes,
}

/// What steps are done with. All of it can be done twice.
pub(crate) trait Host: Send + Sync {
    /// Keeps the record; it is in a safe place when this returns.
    fn keep(&self, vm: &VmName, record: &Record) -> Result<(), Error>;
    /// There is no such machine any more.
    fn forget(&self, vm: &VmName) -> Result<(), Error>;
    /// Something is about to be done or undone, or was.
    fn at(&self, _vm: &VmName, _place: &dyn fmt::Display) {}
    /// Which boot of the host this is.
    fn boot(&self) -> String;
    /// Whether a machine can be created like this, as far as that shows before anything is touched.
    fn check(&self, vm: &VmName, spec: &VmSpec) -> Result<(), Error>;
    /// Makes the machine's directories.
    fn make_directories(&self, vm: &VmName) -> Result<(), Error>;
    /// Removes them and what the machine left there.
    fn remove_directories(&self, vm: &VmName) -> Result<(), Error>;
    /// Makes the device of a NIC, unless it is there.
    fn make_nic(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error>;
    /// Makes the device that is to stand by for that of a NIC, which is there, unless it is there.
    fn make_stand_by(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error>;
    /// Takes a device back.
    fn remove_nic(&self, vm: &VmName, device: &str) -> Result<(), Error>;
    /// Starts a process for the machine.
    fn start_process(&self, vm: &VmName) -> Result<Identity, Error>;
    /// Ends the machine's process: this one, and whichever is marked as the machine's.
    fn end_process(&self, vm: &VmName, identity: Option<Identity>) -> Result<(), Error>;
    /// Has the process run the machine, with its NICs where the record has them.
    fn boot_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error>;
    /// Gives the running machine a NIC, unless it has it.
    fn plug(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error>;
    /// Moves the running machine's NIC of this name to this device, unless it has that, and has this one's stand by for it. The
    /// device that it leaves is free then.
    fn swap(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error>;
    /// Whether the running machine says that its NIC of this name is on this device.
    fn is_on(&self, vm: &VmName, nic: &NicSpec) -> bool;
    /// Asks the running machine to give a NIC up, unless it has none. Returns whether it has none any more.
    fn unplug(&self, vm: &VmName, nic: &NicId) -> Result<bool, Error>;
    /// Gives the running machine a disk, unless it has it.
    fn plug_disk(&self, vm: &VmName, id: &DeviceId, disk: &DiskConfig) -> Result<(), Error>;
    /// Asks the running machine to give a disk up. Returns whether it has none of this name now.
    fn unplug_disk(&self, vm: &VmName, id: &DeviceId) -> Result<bool, Error>;
    /// Sees to it that the network knows where the guest is on these NICs, as far as the guest does not do it. It is no
    /// failure if nobody can.
    fn announce(&self, vm: &VmName, nics: &[NicSpec]);
    /// Presses the running machine's power button.
    fn press_button(&self, vm: &VmName) -> Result<(), Error>;
    /// Asks the running machine to leave for another process; what it answers.
    fn send(&self, vm: &VmName, request: &SendRequest) -> Result<Passed, Error>;
    /// What the machine says of its last migration, if it is this process that answers.
    fn migration(&self, vm: &VmName, identity: Identity) -> Account;
    /// Has the process wait for the machine, where the record says, with its NICs' devices.
    fn await_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error>;
    /// What the process says that waits for a machine, if it is this one that answers.
    fn coming(&self, vm: &VmName, identity: Identity) -> Coming;
    /// Has the process wait no more. Whether it is gone; if not, the machine has come, or may have.
    fn call_off(&self, vm: &VmName, identity: Identity) -> Result<bool, Error>;
    /// Tells another node that this machine does not come. If it cannot be told, it notices.
    fn withdraw(&self, vm: &VmName, peer: &Peer);
    /// Whether another node is known to have this machine.
    fn is_at(&self, vm: &VmName, peer: &Peer) -> bool;
    /// Looks what a process does.
    fn look(&self, vm: &VmName, identity: Option<Identity>) -> Found;
}

/// The life of one machine.
pub(crate) struct Life<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) vm: &'a VmName,
}

impl fmt::Debug for Life<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Life")
            .field("vm", self.vm)
            .finish_non_exhaustive()
    }
}

/// The steps of one machine that are in its record.
struct Steps<'a> {
    life: &'a Life<'a>,
    record: &'a mut Record,
}

impl Journal for Steps<'_> {
    type Step = Step;
    type Error = Error;

    fn name(&self) -> &str {
        self.life.vm.as_str()
    }

    fn steps(&mut self) -> &mut Vec<Step> {
        self.record.steps_mut()
    }

    fn place(&mut self, step: &Step) -> usize {
        self.record.place(step)
    }

    fn persist(&mut self) -> Result<(), Error> {
        self.life.keep(self.record)
    }

    fn watch(&mut self, moment: Moment, step: &Step) -> Result<(), Error> {
        self.life.at(moment, step);
        Ok(())
    }

    fn undo(&mut self, step: &Step) -> Result<(), Error> {
        let Life { host, vm } = self.life;
        match step {
            Step::Directories => host.remove_directories(vm),
            Step::Nic { device, .. } => host.remove_nic(vm, device),
            Step::Process { identity, boot } => {
                host.end_process(vm, identity.filter(|_| *boot == host.boot()))?;
                self.record.guest_ended();
                Ok(())
            }
        }
    }

    fn keeps_those_before(step: &Step) -> bool {
        // What it was made on is still in use.
        matches!(step, Step::Process { .. })
    }
}

impl Life<'_> {
    /// Makes a machine, and starts it, or a process that waits for it, if it is to run.
    ///
    /// # Errors
    /// What failed. All is undone then, but for what the error names; that is in the record.
    pub(crate) fn create(&self, mut record: Record) -> Result<Record, Error> {
        match self.build(&mut record) {
            Ok(()) => Ok(record),
            Err(source) => {
                let rest = rest(&self.undo(&mut record));
                Err(Error::wrap(format!("the machine cannot be made{rest}"))(
                    source,
                ))
            }
        }
    }

    fn build(&self, record: &mut Record) -> Result<(), Error> {
        self.clear(record)?;
        self.steps(record).step(Step::Directories, || {
            self.host.make_directories(self.vm).into()
        })?;
        match record.spec.state {
            Desired::Running => self.start_steps(record)?,
            Desired::Stopped => self.make_nics(record)?,
        }
        let mut present = record.clone();
        present.phase = Phase::Present;
        if present.arrival.is_none() {
            present.forget_former();
        }
        self.keep(&present)?;
        *record = present;
        Ok(())
    }

    /// Undoes what was made for the machine that had its place before.
    fn clear(&self, record: &mut Record) -> Result<(), Error> {
        let count = record.steps().len();
        if count > 0 {
            self.keep(record)?;
        }
        (0..count)
            .rev()
            .try_for_each(|place| self.steps(record).undo_at(place))
    }

    /// Starts a machine that is there and does not run.
    ///
    /// # Errors
    /// What failed; then it does not run.
    pub(crate) fn start(&self, record: &mut Record) -> Result<(), Error> {
        self.start_steps(record).map_err(|source| {
            let not_undone = self.stop_steps(record).err();
            let not_undone = not_undone.map(|error| not_undone_part("its process", &error));
            let rest = rest(not_undone.as_slice());
            Error::wrap(format!("the machine cannot be started{rest}"))(source)
        })
    }

    fn start_steps(&self, record: &mut Record) -> Result<(), Error> {
        self.make_nics(record)?;
        let process = Step::Process {
            identity: None,
            boot: self.host.boot(),
        };
        let identity = self
            .steps(record)
            .step(process, || self.host.start_process(self.vm).into())?;
        record.identify(identity);
        self.keep(record)?;
        match record.arrival {
            None => self.act("boot", || self.host.boot_machine(self.vm, identity, record)),
            Some(_) => self.act("await", || {
                self.host.await_machine(self.vm, identity, record)
            }),
        }
    }

    /// Remembers that a machine is not to run, before it is stopped. When somebody starts it again it begins with its NICs' own
    /// devices.
    ///
    /// # Errors
    /// The record cannot be kept.
    pub(crate) fn wants_stopped(
        &self,
        record: &mut Record,
        until_reboot: bool,
    ) -> Result<(), Error> {
        record.turn_off(until_reboot.then(|| self.host.boot()));
        record.leave_stand_by();
        self.keep(record).map_err(Error::context(NOT_STOPPED))
    }

    /// Remembers that a machine is not to run, and asks its guest to power off. From then on no
    /// restart policy starts it, whenever the guest does so.
    ///
    /// # Errors
    /// The guest was not asked. Then the record is as before.
    pub(crate) fn ask_to_power_off(
        &self,
        record: &mut Record,
        until_reboot: bool,
    ) -> Result<(), Error> {
        let before = record.clone();
        record.turn_off(until_reboot.then(|| self.host.boot()));
        record.asked_to_power_off = true;
        let kept = self.keep(record);
        let asked = kept.and_then(|()| self.act("power off", || self.host.press_button(self.vm)));
        asked.map_err(|source| {
            *record = before;
            self.note(record);
            Error::wrap("cannot ask the guest to power off")(source)
        })
    }

    /// Ends the machine's process, if there is one.
    ///
    /// # Errors
    /// It does not end.
    pub(crate) fn stop(&self, record: &mut Record) -> Result<(), Error> {
        self.stop_steps(record).map_err(Error::context(NOT_STOPPED))
    }

    fn stop_steps(&self, record: &mut Record) -> Result<(), Error> {
        if let Some(place) = record.process_at() {
            self.steps(record).undo_at(place)?;
            self.drop_unwanted(record);
        }
        Ok(())
    }

    /// Takes a machine away with all that was made for it. Then the record is that of the machine that had its place before,
    /// if it is one that was still to come and there was one.
    ///
    /// # Errors
    /// What could not be undone; it is still in the record, and can be tried again.
    pub(crate) fn delete(&self, record: &mut Record) -> Result<(), Error> {
        record.phase = Phase::Deleting;
        // A daemon that is started later must know: what is there is to go.
        self.keep(record)
            .map_err(Error::context("the machine cannot be deleted"))?;
        let not_undone = self.undo(record);
        if not_undone.is_empty() {
            Ok(())
        } else {
            let list = not_undone.join("; ");
            let message = format!("the machine is not deleted completely; not undone: {list}");
            Err(Error::failed(message).hint("mend the cause and delete it again"))
        }
    }

    /// Undoes all steps, the last one first. Then the record is that of the machine that had its place before, if there was
    /// one, and nobody's else.
    fn undo(&self, record: &mut Record) -> Vec<String> {
        record.phase = Phase::Deleting;
        let left = self.steps(record).roll_back();
        if left.is_empty() {
            if let Some(former) = record.gives_place_back() {
                *record = former;
                self.note(record);
            } else if let Err(error) = self.host.forget(self.vm) {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(vm = %self.vm, error, "the record is not up to date");
            }
        }
        left.into_iter()
            .filter_map(|(step, error)| Some(not_undone_part(&step.part(), &error?)))
            .collect()
    }

    /// Brings what there is in line with the record, when a daemon starts. Returns whether the machine is to be
    /// watched, and whether it is to be started.
    ///
    /// # Errors
    /// What could not be undone; it stays in the record.
    pub(crate) fn settle(&self, record: &mut Record) -> Result<Settled, Error> {
        if record.phase != Phase::Present {
            let replaces = record.arrival.is_none();
            self.delete(record)?;
            if record.phase != Phase::Present {
                return Ok(Settled::None);
            }
            // The former VM, which may be off only until the host's reboot.
            if replaces {
                self.restore_or_warn(record);
            }
        }
        if record
            .off_in_boot
            .take_if(|boot| *boot != self.host.boot())
            .is_some()
        {
            self.note(record);
        }
        let Some((identity, boot)) = record.process() else {
            if let (Some(arrival), None) = (&record.arrival, &record.departure) {
                // A daemon ended between its process's end and what that comes to.
                record.departure = Some(Departure::unheard_of(&arrival.listen));
                self.note(record);
            }
            return Ok(Settled::stopped(record));
        };
        if boot != self.host.boot() {
            record.forget_process();
            // Their own devices are made again.
            record.leave_stand_by();
            let end = End::new(EndReason::HostRebooted, "the host was rebooted");
            self.waited(record, &end);
            record.last_end = Some(record.account_of(end));
            self.note(record);
            return Ok(Settled::stopped(record));
        }
        let found = self.host.look(self.vm, identity);
        if record.arrival.is_some() && found != Found::Gone {
            // Whatever it says: the guest may come, or may have come, while it does.
            self.look_for_arrival(record);
            return Ok(match record.arrival {
                Some(_) => Settled::Awaited,
                None => Settled::Running,
            });
        }
        if found == Found::Runs {
            self.look_for_guest(record);
        }
        let may_run = record.is_on() || record.asked_to_power_off;
        match (found, may_run) {
            (Found::Runs | Found::Unknown, true) if identity.is_some() => Ok(Settled::Running),
            // It was being started or stopped.
            (Found::Runs | Found::Unknown | Found::NotBooted, _) => {
                self.stop(record)?;
                Ok(Settled::stopped(record))
            }
            (Found::Gone, _) => {
                self.stop(record)?;
                let end = End::new(
                    EndReason::Killed,
                    "its process ended while no daemon looked",
                );
                if self.ends(record, end)?.is_none() {
                    return Ok(Settled::None);
                }
                Ok(Settled::stopped(record))
            }
        }
    }

    /// As [`Self::ended`], also for machines of which nothing is to be left here then: one that has not come, and one that another
    /// node has now. Returns nothing for those.
    ///
    /// # Errors
    /// What of those could not be undone; it stays in the record.
    pub(crate) fn ends(&self, record: &mut Record, end: End) -> Result<Option<End>, Error> {
        if record.arrival.is_some() && self.waited(record, &end) == AtEnd::TakeBack {
            self.delete(record)?;
            return Ok(None);
        }
        let peer = record.peer();
        let end = self.ended(record, end);
        self.left_for(record, peer, end)
    }

    /// The machine's process has ended: why, and by the restart policy whether it is to run again. Returns what its end
    /// comes to.
    pub(crate) fn ended(&self, record: &mut Record, end: End) -> End {
        if record.asked_to_power_off {
            // As one that was stopped.
            record.leave_stand_by();
        }
        record.forget_process();
        let end = record.account_of(end);
        // One that was turned off for the host's shutdown is to run after it, however it ended.
        let stays = record.off_in_boot.is_none() || end.reason == EndReason::Moved;
        if stays && !again(record.spec.restart, end.reason) {
            record.spec.state = Desired::Stopped;
        }
        record.last_end = Some(end.clone());
        self.note(record);
        end
    }

    /// The machine's process was ended because it is not to run any more. Returns what its end comes to; nothing if another
    /// node has the machine now.
    ///
    /// # Errors
    /// As [`Self::ends`].
    pub(crate) fn stopped(&self, record: &mut Record) -> Result<Option<End>, Error> {
        let end = End::new(EndReason::Stopped, "it was told to stop");
        let peer = record.peer();
        let end = record.account_of(end);
        record.last_end = Some(end.clone());
        self.note(record);
        self.left_for(record, peer, end)
    }

    fn steps<'a>(&'a self, record: &'a mut Record) -> Steps<'a> {
        Steps { life: self, record }
    }

    /// Does something that leaves nothing to undo.
    fn act<T>(
        &self,
        what: impl fmt::Display,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.at(Moment::Begin, &what);
        let done = work()?;
        self.at(Moment::Done, &what);
        Ok(done)
    }

    fn at(&self, moment: Moment, what: &dyn fmt::Display) {
        self.host.at(self.vm, &format_args!("{moment} {what}"));
    }

    /// Keeps the record before something is done.
    pub(crate) fn keep(&self, record: &Record) -> Result<(), Error> {
        let kept = self.host.keep(self.vm, record);
        kept.map_err(Error::wrap("the record of what is done cannot be kept"))
    }

    /// Keeps the record after something was done or undone, as far as that is possible.
    pub(crate) fn note(&self, record: &mut Record) {
        self.steps(record).note();
    }
}

const NOT_STOPPED: &str = "the machine cannot be stopped";

/// A part of a machine that could not be undone, and why.
fn not_undone_part(part: &str, error: &Error) -> String {
    format!("{part} ({})", in_one_line(error))
}

fn rest(not_undone: &[String]) -> String {
    if not_undone.is_empty() {
        String::new()
    } else {
        format!("; not undone: {}", not_undone.join("; "))
    }
}

/// Whether a machine that ended so is to be started again. One that was stopped, but not through the node, has
/// failed as far as the node knows: the host may be shutting down, and should bring it back.
fn again(restart: Restart, because: EndReason) -> bool {
    // The guest would be there twice.
    if because == EndReason::Moved {
        return false;
    }
    match restart {
        Restart::Never => false,
        Restart::Always => true,
        Restart::OnFailure => because != EndReason::PoweredOff,
    }
}

/// What is to be done with a machine after a daemon's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Settled {
    /// There is none any more.
    None,
    /// It runs: it is to be watched.
    Running,
    /// Its process waits for it to come: that is to be watched.
    Awaited,
    /// It does not run and should.
    ToStart,
    /// It does not run and should not.
    Stopped,
}

impl Settled {
    fn stopped(record: &Record) -> Self {
        if record.is_to_start() {
            Self::ToStart
        } else {
            Self::Stopped
        }
    }
}

#[cfg(test)]
mod tests;
