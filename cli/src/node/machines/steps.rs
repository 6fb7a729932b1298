//! The steps of a virtual machine's life, in order, and the way back.
//!
//! ```text
//!   create   directories ─> a device for each NIC, and one that stands by ─> [start]
//!   start    devices that are gone (the host was rebooted) ─> process ─> configured, NICs, booted
//!   stop     process
//!   delete   what was begun, from the end
//!   send     marked in the record ─> asked to leave for another process
//!   receive  as create, but that its process waits for the machine
//! ```
//! Each step is in the record, and the record kept ([`Keep`]), before it is done. What fails undoes what was done before
//! it. Undoing what was not done, or is undone already, changes nothing; so after a crash anywhere the same can
//! simply be done again.
//!
//! Owns the order. How a step is done belongs to [`Host`]; tests have one in memory that fails wherever they like.

mod arriving;
mod leaving;
mod nics;

use std::fmt;

use axum::body::Bytes;
use axum::http::StatusCode;

use super::arrival::{AtEnd, Coming};
use super::departure::{Account, Departure};
use super::error::{LifeError, NotUndone, StepError};
use super::process::Identity;
use super::record::{EndedBecause, LastEnd, Phase, Record, Step};
use super::spec::{Desired, NicId, NicSpec, Restart, VmName, VmSpec};
use crate::node::peers::Peer;
use crate::node::store::StoreError;

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
    /// Which boot of the host this is.
    fn boot(&self) -> String;
    /// Makes the machine's directories.
    fn make_directories(&self, vm: &VmName) -> Result<(), StepError>;
    /// Removes them and what the machine left there.
    fn remove_directories(&self, vm: &VmName) -> Result<(), StepError>;
    /// Makes the device of a NIC, unless it is there.
    fn make_nic(&self, vm: &VmName, nic: &NicSpec) -> Result<(), StepError>;
    /// Makes the device that is to stand by for that of a NIC, which is there, unless it is there.
    fn make_stand_by(&self, vm: &VmName, nic: &NicSpec) -> Result<(), StepError>;
    /// Takes a device back.
    fn remove_nic(&self, vm: &VmName, device: &str) -> Result<(), StepError>;
    /// Starts a process for the machine.
    fn start_process(&self, vm: &VmName) -> Result<Identity, StepError>;
    /// Ends the machine's process: this one, and whichever is marked as the machine's.
    fn end_process(&self, vm: &VmName, identity: Option<Identity>) -> Result<(), StepError>;
    /// Has the process run the machine, with its NICs where the record has them.
    fn boot_machine(
        &self,
        vm: &VmName,
        identity: Identity,
        record: &Record,
    ) -> Result<(), StepError>;
    /// Gives the running machine a NIC, unless it has it.
    fn plug(&self, vm: &VmName, nic: &NicSpec) -> Result<(), StepError>;
    /// Moves the running machine's NIC of this name to this device, unless it has that, and has this one's stand by for it. The
    /// device that it leaves is free then.
    fn swap(&self, vm: &VmName, nic: &NicSpec) -> Result<(), StepError>;
    /// Whether the running machine says that its NIC of this name is on this device.
    fn is_on(&self, vm: &VmName, nic: &NicSpec) -> bool;
    /// Asks the running machine to give a NIC up, unless it has none. Returns whether it has none any more.
    fn unplug(&self, vm: &VmName, nic: &NicId) -> Result<bool, StepError>;
    /// Sees to it that the network knows where the guest is on these NICs, as far as the guest does not do it. It is no
    /// failure if nobody can.
    fn announce(&self, vm: &VmName, nics: &[NicSpec]);
    /// Asks the running machine to leave for another process; what it answers.
    fn send(&self, vm: &VmName, request: &SendRequest) -> Result<Passed, StepError>;
    /// What the machine says of its last migration, if it is this process that answers.
    fn migration(&self, vm: &VmName, identity: Identity) -> Account;
    /// Has the process wait for the machine, where the record says, with its NICs' devices.
    fn await_machine(
        &self,
        vm: &VmName,
        identity: Identity,
        record: &Record,
    ) -> Result<(), StepError>;
    /// What the process says that waits for a machine, if it is this one that answers.
    fn coming(&self, vm: &VmName, identity: Identity) -> Coming;
    /// Has the process wait no more. Whether it is gone; if not, the machine has come, or may have.
    fn call_off(&self, vm: &VmName, identity: Identity) -> Result<bool, StepError>;
    /// Tells another node that this machine does not come. If it cannot be told, it notices.
    fn withdraw(&self, vm: &VmName, peer: &Peer);
    /// Whether another node is known to have this machine.
    fn is_at(&self, vm: &VmName, peer: &Peer) -> bool;
    /// Looks what a process does.
    fn look(&self, vm: &VmName, identity: Option<Identity>) -> Found;
}

/// Where records are kept, and who hears of steps.
pub(crate) trait Keep: Send + Sync {
    /// Keeps the record; it is in a safe place when this returns.
    fn keep(&self, vm: &VmName, record: &Record) -> Result<(), StoreError>;
    /// There is no such machine any more.
    fn forget(&self, vm: &VmName) -> Result<(), StoreError>;
    /// A step is about to be done, or was.
    fn at(&self, _vm: &VmName, _moment: &Moment) {}
}

/// A place between two steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Moment {
    /// It is in the record and not done.
    Do(Act),
    /// It is done; what follows from that is not in the record yet.
    Done(Act),
    /// It is about to be undone.
    Undo(Act),
    /// It is undone and still in the record.
    Undone(Act),
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Do(act) => write!(f, "do {act}"),
            Self::Done(act) => write!(f, "done {act}"),
            Self::Undo(act) => write!(f, "undo {act}"),
            Self::Undone(act) => write!(f, "undone {act}"),
        }
    }
}

/// What is done in one go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Act {
    Directories,
    Nic(String),
    StandBy(String),
    Process,
    Boot,
    Plug(String),
    Swap(String),
    Unplug(String),
    Send,
    Await,
    CallOff,
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directories => f.write_str("directories"),
            Self::Nic(id) => write!(f, "nic {id}"),
            Self::StandBy(id) => write!(f, "stand-by {id}"),
            Self::Process => f.write_str("process"),
            Self::Boot => f.write_str("boot"),
            Self::Plug(id) => write!(f, "plug {id}"),
            Self::Swap(id) => write!(f, "swap {id}"),
            Self::Unplug(id) => write!(f, "unplug {id}"),
            Self::Send => f.write_str("send"),
            Self::Await => f.write_str("await"),
            Self::CallOff => f.write_str("call off"),
        }
    }
}

impl Act {
    fn of(step: &Step) -> Self {
        match step {
            Step::Directories => Self::Directories,
            Step::Nic { id, stand_by, .. } => Self::device(id, *stand_by),
            Step::Process { .. } => Self::Process,
        }
    }

    /// About a NIC's own device, or the one that stands by for it.
    fn device(id: &NicId, stand_by: bool) -> Self {
        match stand_by {
            true => Self::StandBy(id.to_string()),
            false => Self::Nic(id.to_string()),
        }
    }
}

/// The life of one machine.
pub(crate) struct Life<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) keep: &'a dyn Keep,
    pub(crate) vm: &'a VmName,
}

impl fmt::Debug for Life<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Life")
            .field("vm", self.vm)
            .finish_non_exhaustive()
    }
}

impl Life<'_> {
    /// Makes a machine, and starts it if it is to run.
    ///
    /// # Errors
    /// What failed. All is undone then, but for what the error names; that is in the record.
    pub(crate) fn create(&self, spec: VmSpec) -> Result<Record, LifeError> {
        self.make(Record::new(spec), |record| self.build(record))
    }

    /// Makes what is in no record yet, as `build` says.
    fn make(
        &self,
        mut record: Record,
        build: impl FnOnce(&mut Record) -> Result<(), StepError>,
    ) -> Result<Record, LifeError> {
        let made = build(&mut record).and_then(|()| {
            record.phase = Phase::Present;
            self.keep(&record)
        });
        match made {
            Ok(()) => Ok(record),
            Err(source) => {
                let not_undone = self.undo(&mut record);
                Err(LifeError::Create {
                    source: Box::new(source),
                    not_undone,
                })
            }
        }
    }

    fn build(&self, record: &mut Record) -> Result<(), StepError> {
        record.begin(Step::Directories);
        self.keep(record)?;
        self.act(Act::Directories, || self.host.make_directories(self.vm))?;
        match record.spec.state {
            Desired::Running => self.start_steps(record),
            Desired::Stopped => self.make_nics(record),
        }
    }

    /// Starts a machine that is there and does not run.
    ///
    /// # Errors
    /// What failed; then it does not run.
    pub(crate) fn start(&self, record: &mut Record) -> Result<(), LifeError> {
        let started = self.start_steps(record);
        started.map_err(|source| {
            let not_undone = self.stop_steps(record).err();
            LifeError::Start {
                source: Box::new(source),
                not_undone: not_undone
                    .map(|error| NotUndone::new(Act::Process, error))
                    .into_iter()
                    .collect(),
            }
        })
    }

    fn start_steps(&self, record: &mut Record) -> Result<(), StepError> {
        self.make_nics(record)?;
        let identity = self.start_process(record)?;
        self.act(Act::Boot, || {
            self.host.boot_machine(self.vm, identity, record)
        })
    }

    /// A process that runs no machine yet.
    fn start_process(&self, record: &mut Record) -> Result<Identity, StepError> {
        record.begin(Step::Process {
            identity: None,
            boot: self.host.boot(),
        });
        self.keep(record)?;
        let identity = self.act(Act::Process, || self.host.start_process(self.vm))?;
        record.identify(identity);
        self.keep(record)?;
        Ok(identity)
    }

    /// Remembers that a machine is not to run, before it is stopped. When somebody starts it again it begins with its NICs' own
    /// devices.
    ///
    /// # Errors
    /// The record cannot be kept.
    pub(crate) fn wants_stopped(&self, record: &mut Record) -> Result<(), LifeError> {
        record.spec.state = Desired::Stopped;
        record.leave_stand_by();
        self.keep(record)
            .map_err(|source| LifeError::Stop(Box::new(source)))
    }

    /// Ends the machine's process, if there is one.
    ///
    /// # Errors
    /// It does not end.
    pub(crate) fn stop(&self, record: &mut Record) -> Result<(), LifeError> {
        self.stop_steps(record)
            .map_err(|source| LifeError::Stop(Box::new(source)))
    }

    fn stop_steps(&self, record: &mut Record) -> Result<(), StepError> {
        let Some((identity, boot)) = record.process() else {
            return Ok(());
        };
        let identity = identity.filter(|_| boot == self.host.boot());
        self.tell(&Moment::Undo(Act::Process));
        self.host.end_process(self.vm, identity)?;
        self.tell(&Moment::Undone(Act::Process));
        record.forget_process();
        self.note(record);
        self.drop_unwanted(record);
        Ok(())
    }

    /// Takes a machine away with all that was made for it. Then the record is that of the machine that had its place before,
    /// if it is one that was still to come and there was one.
    ///
    /// # Errors
    /// What could not be undone; it is still in the record, and can be tried again.
    pub(crate) fn delete(&self, record: &mut Record) -> Result<(), LifeError> {
        record.phase = Phase::Deleting;
        // A daemon that is started later must know: what is there is to go.
        self.keep(record)
            .map_err(|source| LifeError::Delete(Box::new(source)))?;
        let not_undone = self.undo(record);
        match not_undone.is_empty() {
            true => Ok(()),
            false => Err(LifeError::Remains(not_undone)),
        }
    }

    /// Undoes all steps, the last one first. Then the record is that of the machine that had its place before, if there was
    /// one, and nobody's else.
    fn undo(&self, record: &mut Record) -> Vec<NotUndone> {
        record.phase = Phase::Deleting;
        let mut failed = Vec::new();
        let mut not_undone = Vec::new();
        while let Some(step) = record.pop() {
            let act = Act::of(&step);
            self.tell(&Moment::Undo(act.clone()));
            match self.undo_one(&step) {
                Ok(()) => {
                    self.tell(&Moment::Undone(act));
                    // What could not be undone so far is still to be: the record has it again at the end.
                    if failed.is_empty() {
                        self.note(record);
                    }
                }
                Err(error) => {
                    not_undone.push(NotUndone::new(act, error));
                    // What it was made on is still in use.
                    let blocks = matches!(step, Step::Process { .. });
                    failed.push(step);
                    if blocks {
                        break;
                    }
                }
            }
        }
        failed
            .into_iter()
            .rev()
            .for_each(|step| record.push_back(step));
        if !not_undone.is_empty() {
            self.note(record);
        } else if let Some(former) = record.gives_place_back() {
            *record = former;
            self.note(record);
        } else if let Err(error) = self.keep.forget(self.vm) {
            warn(self.vm, &error);
        }
        not_undone
    }

    fn undo_one(&self, step: &Step) -> Result<(), StepError> {
        match step {
            Step::Directories => self.host.remove_directories(self.vm),
            Step::Nic { device, .. } => self.host.remove_nic(self.vm, device),
            Step::Process { identity, boot } => {
                let identity = identity.filter(|_| *boot == self.host.boot());
                self.host.end_process(self.vm, identity)
            }
        }
    }

    /// Brings what there is in line with the record, when a daemon starts. Returns whether the machine is to be
    /// watched, and whether it is to be started.
    ///
    /// # Errors
    /// What could not be undone; it stays in the record.
    pub(crate) fn settle(&self, record: &mut Record) -> Result<Settled, LifeError> {
        match record.phase {
            Phase::Creating | Phase::Deleting => {
                self.delete(record)?;
                return Ok(match record.phase {
                    Phase::Present => Settled::stopped(record),
                    Phase::Creating | Phase::Deleting => Settled::None,
                });
            }
            Phase::Present => {}
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
            let end = LastEnd {
                reason: EndedBecause::HostRebooted,
                detail: "the host was rebooted".to_owned(),
            };
            self.waited(record, &end);
            record.last_end = Some(leaving::account_of(record, end));
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
        match (found, record.spec.state) {
            (Found::Runs | Found::Unknown, Desired::Running) if identity.is_some() => {
                Ok(Settled::Running)
            }
            // It was being started or stopped.
            (Found::Runs | Found::Unknown | Found::NotBooted, _) => {
                self.stop(record)?;
                Ok(Settled::stopped(record))
            }
            (Found::Gone, _) => {
                self.stop(record)?;
                let end = LastEnd {
                    reason: EndedBecause::Killed,
                    detail: "its process ended while no daemon looked".to_owned(),
                };
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
    pub(crate) fn ends(
        &self,
        record: &mut Record,
        end: LastEnd,
    ) -> Result<Option<LastEnd>, LifeError> {
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
    pub(crate) fn ended(&self, record: &mut Record, end: LastEnd) -> LastEnd {
        record.forget_process();
        let end = leaving::account_of(record, end);
        if !again(record.spec.restart, end.reason) {
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
    pub(crate) fn stopped(&self, record: &mut Record) -> Result<Option<LastEnd>, LifeError> {
        let end = LastEnd {
            reason: EndedBecause::Stopped,
            detail: "it was told to stop".to_owned(),
        };
        let peer = record.peer();
        let end = leaving::account_of(record, end);
        record.last_end = Some(end.clone());
        self.note(record);
        self.left_for(record, peer, end)
    }

    fn act<T>(
        &self,
        act: Act,
        work: impl FnOnce() -> Result<T, StepError>,
    ) -> Result<T, StepError> {
        self.tell(&Moment::Do(act.clone()));
        let done = work()?;
        self.tell(&Moment::Done(act));
        Ok(done)
    }

    fn tell(&self, moment: &Moment) {
        self.keep.at(self.vm, moment);
    }

    /// Keeps the record before something is done.
    pub(crate) fn keep(&self, record: &Record) -> Result<(), StepError> {
        self.keep
            .keep(self.vm, record)
            .map_err(|error| StepError::Record(Box::new(error)))
    }

    /// Keeps the record after something was undone. An old record does no harm: it tells of what is not
    /// there any more, and undoing that changes nothing.
    pub(crate) fn note(&self, record: &Record) {
        if let Err(error) = self.keep.keep(self.vm, record) {
            warn(self.vm, &error);
        }
    }
}

fn warn(vm: &VmName, error: &StoreError) {
    tracing::warn!(
        %vm,
        error = error as &dyn std::error::Error,
        "the record is not up to date"
    );
}

/// Whether a machine that ended so is to be started again. One that was stopped, but not through the node, has
/// failed as far as the node knows: the host may be shutting down, and should bring it back.
fn again(restart: Restart, because: EndedBecause) -> bool {
    // The guest would be there twice.
    if because == EndedBecause::Moved {
        return false;
    }
    match restart {
        Restart::Never => false,
        Restart::Always => true,
        Restart::OnFailure => because != EndedBecause::PoweredOff,
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
        match record.is_to_start() {
            true => Self::ToStart,
            false => Self::Stopped,
        }
    }
}

#[cfg(test)]
mod tests;
