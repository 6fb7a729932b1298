//! The steps of a VM's life, in order, and their rollback.
//!
//! ```text
//!   create   directories ─> a device for each NIC, and its backup ─> functions bound to vfio-pci
//!              ─> [start]
//!   replace  checked ─> undone as for delete ─> as create ─> fails: undone, former VM restored
//!   start    devices that are gone (the host was rebooted) ─> process ─> configured, NICs, booted
//!   ask      marked in the record ─> requested to power off
//!   stop     process
//!   delete   the begun steps, the last one first
//!   send     marked in the record ─> requested to leave for another process
//!   receive  as create, but that its process waits for the VM
//! ```
//! Each step is in the stored record before it runs ([`Journal`]). A failure rolls back the steps
//! before it. To undo a step that was not done, or is undone already, changes nothing. So after a
//! crash at any point the same can be repeated.
//!
//! Owns the order. [`Host`] owns the effect of a step; tests have an in-memory host that fails at
//! any call.

mod disks;
mod functions;
mod incoming;
mod nics;
mod outgoing;
mod replacing;

use std::fmt;
use std::path::Path;

use axum::body::Bytes;
use axum::http::StatusCode;
use bellhop_api::machine::{End, EndReason};
use vdpa::causes::in_one_line;
use vdpa_mgmt::journal::{Journal, StepEvent};
use vdpa_mgmt::pci::FormerDriver;
use vmm::config::{DiskConfig, VfioConfig};
use vmm::migration::endpoint::Endpoint;

use super::incoming::{IncomingOutcome, IncomingReport};
use super::outgoing::{MigrationReport, OutgoingMigration};
use super::process::Identity;
use super::record::{Phase, Record, Step};
use super::spec::{Desired, DeviceId, NicId, NicSpec, Restart, VmName, VmSpec};
use crate::error::Error;
use crate::peers::Peer;

/// The state of a process that was started to run a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessState {
    /// It does not exist.
    Gone,
    /// It exists and runs no VM yet.
    NotBooted,
    /// It runs the VM.
    Runs,
    /// It exists but does not report its state, or has a later API level: the daemon does not touch
    /// it.
    Unknown,
}

/// A request to a VM to leave for another process. Its body may have the secrets of a pairing.
#[derive(Clone)]
pub(crate) struct SendRequest {
    /// The destination, as far as the request names it.
    pub(crate) destination: String,
    /// The body for the VM.
    pub(crate) body: Bytes,
    /// Where the daemon opens connections for the VM, if `body` names a descriptor for that.
    pub(crate) endpoint: Option<Endpoint>,
    /// The ID of the request.
    pub(crate) request_id: String,
    /// The destination node, if a node waits for the VM.
    pub(crate) peer: Option<Peer>,
}

vdpa::opaque_debug!(SendRequest, this => destination: this.destination);

/// The answer of a VM.
#[derive(Debug, Clone)]
pub(crate) struct ProxiedResponse {
    pub(crate) status: StatusCode,
    /// A JSON document.
    pub(crate) body: Bytes,
}

/// The host that the steps act on. All methods can be repeated.
pub(crate) trait Host: Send + Sync {
    /// Stores the record; it is durable when this returns.
    fn keep(&self, vm: &VmName, record: &Record) -> Result<(), Error>;
    /// Removes the record of a VM.
    fn forget(&self, vm: &VmName) -> Result<(), Error>;
    /// Observes a step: called before and after it is done or undone.
    fn at(&self, _vm: &VmName, _place: &dyn fmt::Display) {}
    /// The boot ID of the host.
    fn boot(&self) -> String;
    /// Checks whether a VM can be created with this spec, as far as possible without a change.
    fn check(&self, vm: &VmName, spec: &VmSpec) -> Result<(), Error>;
    /// Creates the VM's directories.
    fn make_directories(&self, vm: &VmName) -> Result<(), Error>;
    /// Removes the directories with all files of the VM.
    fn remove_directories(&self, vm: &VmName) -> Result<(), Error>;
    /// Creates the device of a NIC, unless it exists.
    fn make_nic(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error>;
    /// Creates a NIC's backup device, unless it exists. The NIC's own device exists already.
    fn make_backup(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error>;
    /// Deletes a device.
    fn remove_nic(&self, vm: &VmName, device: &str) -> Result<(), Error>;
    /// Whether the host has no such device any more.
    fn is_gone(&self, device: &str) -> bool;
    /// Checks whether the VM can have this function. Returns its driver if it must be bound to
    /// vfio-pci first. The VM does not run.
    fn check_function(&self, function: &VfioConfig) -> Result<Option<FormerDriver>, Error>;
    /// Binds a function to vfio-pci, unless it is.
    fn bind_function(&self, former: &FormerDriver) -> Result<(), Error>;
    /// Whether the running VM has a function of this name.
    fn has_function(&self, vm: &VmName, function: &VfioConfig) -> Result<bool, Error>;
    /// Plugs a function that is bound to VFIO into the running VM.
    fn plug_function(&self, vm: &VmName, function: &VfioConfig) -> Result<(), Error>;
    /// Requests the running VM to release a function. Returns whether it has no function of this
    /// name now.
    fn unplug_function(&self, vm: &VmName, id: &DeviceId) -> Result<bool, Error>;
    /// Gives a function its former driver again, unless it has another one meanwhile.
    fn release_function(&self, vm: &VmName, former: &FormerDriver) -> Result<(), Error>;
    /// The user for the VM's process; none if it has the daemon's.
    fn user(&self, _vm: &VmName) -> Result<Option<u32>, Error> {
        Ok(None)
    }
    /// Starts a process for the VM, with the user in the record.
    fn start_process(&self, vm: &VmName, record: &Record) -> Result<Identity, Error>;
    /// Ends the VM's process: this one, and any other with the VM's mark.
    fn end_process(&self, vm: &VmName, identity: Option<Identity>) -> Result<(), Error>;
    /// Boots the VM in the process, or restores it from the snapshot in the record. Its NICs are on
    /// the devices in the record.
    fn boot_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error>;
    /// Plugs a NIC into the running VM, unless it has the NIC.
    fn plug(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error>;
    /// Moves the running VM's NIC of this name to this device, unless it is there, and sets the
    /// backup of this NIC. The former device is free afterwards.
    fn swap(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error>;
    /// Whether the running VM reports that its NIC of this name is on this device.
    fn is_on(&self, vm: &VmName, nic: &NicSpec) -> bool;
    /// Requests the running VM to release a NIC, if it has it. Returns whether the NIC is gone.
    fn unplug(&self, vm: &VmName, nic: &NicId) -> Result<bool, Error>;
    /// Plugs a disk into the running VM, unless it has the disk.
    fn plug_disk(&self, vm: &VmName, id: &DeviceId, disk: &DiskConfig) -> Result<(), Error>;
    /// Requests the running VM to release a disk. Returns whether it has no disk of this name now.
    /// Then the VM no longer sees `image` either.
    fn unplug_disk(&self, vm: &VmName, id: &DeviceId, image: Option<&Path>) -> Result<bool, Error>;
    /// Announces the guest's place on these NICs to the network, unless the guest does so itself. A
    /// failed announcement is not an error.
    fn announce(&self, vm: &VmName, nics: &[NicSpec]);
    /// Presses the running VM's power button.
    fn press_button(&self, vm: &VmName) -> Result<(), Error>;
    /// Requests the running VM to leave for another process; returns its answer.
    fn send(&self, vm: &VmName, request: &SendRequest) -> Result<ProxiedResponse, Error>;
    /// The VM's report about its last migration, if this process answers.
    fn migration(&self, vm: &VmName, identity: Identity) -> MigrationReport;
    /// Makes the process wait for the VM at the address in the record, with the devices of the VM's
    /// NICs.
    fn await_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error>;
    /// The report of the process that waits for the VM, if this process answers.
    fn incoming_report(&self, vm: &VmName, identity: Identity) -> IncomingReport;
    /// Makes the process stop waiting. Returns whether it is gone; if not, the VM has arrived, or
    /// may have.
    fn cancel_incoming(&self, vm: &VmName, identity: Identity) -> Result<bool, Error>;
    /// Notifies another node that this VM does not arrive. If the node is unreachable, it finds out
    /// by itself.
    fn withdraw(&self, vm: &VmName, peer: &Peer);
    /// Whether another node is known to have this VM.
    fn is_at(&self, vm: &VmName, peer: &Peer) -> bool;
    /// The state of a process.
    fn look(&self, vm: &VmName, identity: Option<Identity>) -> ProcessState;
}

/// The life of one VM.
pub(crate) struct Lifecycle<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) vm: &'a VmName,
}

vdpa::opaque_debug!(Lifecycle<'_>, this => vm: this.vm);

/// The steps in the record of one VM.
struct Steps<'a> {
    lifecycle: &'a Lifecycle<'a>,
    record: &'a mut Record,
}

impl Journal for Steps<'_> {
    type Step = Step;
    type Error = Error;

    fn name(&self) -> &str {
        self.lifecycle.vm.as_str()
    }

    fn steps(&mut self) -> &mut Vec<Step> {
        self.record.steps_mut()
    }

    fn place(&mut self, step: &Step) -> usize {
        self.record.place(step)
    }

    fn persist(&mut self) -> Result<(), Error> {
        self.lifecycle.keep(self.record)
    }

    fn watch(&mut self, event: StepEvent, step: &Step) -> Result<(), Error> {
        self.lifecycle.at(event, step);
        Ok(())
    }

    fn undo(&mut self, step: &Step) -> Result<(), Error> {
        let Lifecycle { host, vm } = self.lifecycle;
        match step {
            Step::Directories => host.remove_directories(vm),
            Step::Nic { device, .. } => host.remove_nic(vm, device),
            Step::Function { boot, .. } if *boot != host.boot() => Ok(()),
            Step::Function { former, .. } => host.release_function(vm, former),
            Step::Process { identity, boot } => {
                host.end_process(vm, identity.filter(|_| *boot == host.boot()))?;
                self.record.guest_ended();
                Ok(())
            }
        }
    }

    fn keeps_those_before(step: &Step) -> bool {
        // The objects of the steps before it are still in use.
        matches!(step, Step::Process { .. })
    }
}

impl Lifecycle<'_> {
    /// Creates a VM. Starts it if it should run, or starts a process that waits for it.
    ///
    /// # Errors
    /// A step failed. All is rolled back, except parts that the error names; those are in the
    /// record.
    pub(crate) fn create(&self, mut record: Record) -> Result<Record, Error> {
        match self.build(&mut record) {
            Ok(()) => Ok(record),
            Err(source) => {
                let rest = rest(&self.undo(&mut record));
                Err(Error::wrap(format!("cannot create the VM{rest}"))(source))
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
            Desired::Stopped => {
                self.make_nics(record)?;
                self.bind_functions(record)?;
            }
        }
        let mut present = record.clone();
        present.phase = Phase::Present;
        let is_restored = present.restore_from.take().is_some();
        if present.incoming.is_none() {
            present.forget_former();
        }
        self.keep(&present)?;
        *record = present;
        if is_restored {
            self.host.announce(self.vm, record.spec.nics());
        }
        Ok(())
    }

    /// Undoes the steps of the former VM.
    fn clear(&self, record: &mut Record) -> Result<(), Error> {
        let count = record.steps().len();
        if count > 0 {
            self.keep(record)?;
        }
        (0..count)
            .rev()
            .try_for_each(|place| self.steps(record).undo_at(place))
    }

    /// Starts a VM that exists and does not run.
    ///
    /// # Errors
    /// A step failed; the VM does not run.
    pub(crate) fn start(&self, record: &mut Record) -> Result<(), Error> {
        self.start_steps(record).map_err(|source| {
            let not_undone = self.stop_steps(record).err();
            let not_undone = not_undone.map(|error| not_undone_part("its process", &error));
            let rest = rest(not_undone.as_slice());
            Error::wrap(format!("cannot start the VM{rest}"))(source)
        })
    }

    fn start_steps(&self, record: &mut Record) -> Result<(), Error> {
        self.make_nics(record)?;
        self.release_unwanted(record);
        self.bind_functions(record)?;
        let process = Step::Process {
            identity: None,
            boot: self.host.boot(),
        };
        record.user = self.host.user(self.vm)?;
        let start = record.clone();
        let identity = self
            .steps(record)
            .step(process, || self.host.start_process(self.vm, &start).into())?;
        record.identify(identity);
        self.keep(record)?;
        match record.incoming {
            None => self.act("boot", || self.host.boot_machine(self.vm, identity, record)),
            Some(_) => self.act("await", || {
                self.host.await_machine(self.vm, identity, record)
            }),
        }
    }

    /// Records that a VM should not run, before it is stopped. Its next start begins with the NICs'
    /// own devices.
    ///
    /// # Errors
    /// The record cannot be stored.
    pub(crate) fn mark_stopped(
        &self,
        record: &mut Record,
        until_reboot: bool,
    ) -> Result<(), Error> {
        record.turn_off(until_reboot.then(|| self.host.boot()));
        record.clear_on_backup();
        self.keep(record).map_err(Error::context(NOT_STOPPED))
    }

    /// Records that a VM should not run, and requests its guest to power off. From then on no
    /// restart policy starts it, even if the guest powers off late.
    ///
    /// # Errors
    /// The guest did not receive the request. The record is as before.
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

    /// Changes the spec of a VM. Its process, if any, keeps the VM that it runs.
    ///
    /// # Errors
    /// The record cannot be stored; it is as before.
    pub(crate) fn change_spec(&self, record: &mut Record, spec: VmSpec) -> Result<(), Error> {
        let mut next = record.clone();
        next.change_spec(spec);
        if let Err(error) = self.keep(&next) {
            // The failed store may have written it.
            self.note(record);
            return Err(error);
        }
        *record = next;
        Ok(())
    }

    /// Ends the VM's process, if any.
    ///
    /// # Errors
    /// The process does not end.
    pub(crate) fn stop(&self, record: &mut Record) -> Result<(), Error> {
        self.stop_steps(record).map_err(|error| {
            let hint = error.remedy();
            let error = Error::context(NOT_STOPPED)(error);
            match hint {
                Some(hint) => error.hint(hint),
                None => error,
            }
        })
    }

    fn stop_steps(&self, record: &mut Record) -> Result<(), Error> {
        if let Some(place) = record.process_at() {
            self.steps(record).undo_at(place)?;
            self.drop_unwanted(record);
        }
        Ok(())
    }

    /// Deletes a VM with all that was created for it. If it was incoming and there was a former VM,
    /// the record is that of the former VM afterwards.
    ///
    /// # Errors
    /// A step cannot be undone; it stays in the record, and the client may retry.
    pub(crate) fn delete(&self, record: &mut Record) -> Result<(), Error> {
        record.phase = Phase::Deleting;
        // A later daemon must know that the rest is to be deleted.
        self.keep(record)
            .map_err(Error::context("cannot delete the VM"))?;
        let not_undone = self.undo(record);
        if not_undone.is_empty() {
            Ok(())
        } else {
            let list = not_undone.join("; ");
            let message = format!("cannot delete the VM completely; not undone: {list}");
            Err(Error::failed(message).hint(if record.process().is_some() {
                NOT_ENDED
            } else {
                "fix the cause and delete it again"
            }))
        }
    }

    /// Undoes all steps, the last one first. If there was a former VM, the record is that of the
    /// former VM afterwards.
    fn undo(&self, record: &mut Record) -> Vec<String> {
        record.phase = Phase::Deleting;
        let left = self.steps(record).roll_back();
        if left.is_empty() {
            if let Some(former) = record.restore_previous() {
                *record = former;
                self.note(record);
            } else if let Err(error) = self.host.forget(self.vm) {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(vm = %self.vm, error, "cannot update the VM's record");
            }
        }
        left.into_iter()
            .filter_map(|(step, error)| Some(not_undone_part(&step.part(), &error?)))
            .collect()
    }

    /// As [`Self::delete`]. If the VM was to replace another one, that one gets its devices again,
    /// and the answer is true.
    ///
    /// # Errors
    /// As [`Self::delete`].
    pub(crate) fn delete_or_restore(&self, record: &mut Record) -> Result<bool, Error> {
        let replaces = record.incoming.is_none();
        self.delete(record)?;
        if record.phase != Phase::Present {
            return Ok(false);
        }
        // It may be off only until the host's reboot.
        if replaces {
            self.restore_or_warn(record);
        }
        Ok(true)
    }

    /// Brings the host in line with the record when a daemon starts. Returns whether the VM must be
    /// watched, and whether it must be started.
    ///
    /// # Errors
    /// A step cannot be undone; it stays in the record.
    pub(crate) fn reconcile(&self, record: &mut Record) -> Result<Reconciled, Error> {
        if record.phase != Phase::Present && !self.delete_or_restore(record)? {
            return Ok(Reconciled::None);
        }
        if record.forget_functions(&self.host.boot()) {
            self.note(record);
        }
        if record
            .off_in_boot
            .take_if(|boot| *boot != self.host.boot())
            .is_some()
        {
            self.note(record);
        }
        let Some((identity, boot)) = record.process() else {
            if let (Some(incoming), None) = (&record.incoming, &record.outgoing) {
                // The former daemon ended after the process's exit, and before it recorded the
                // result.
                record.outgoing = Some(OutgoingMigration::lost_incoming(&incoming.listen));
                self.note(record);
            }
            return Ok(Reconciled::stopped(record));
        };
        if boot != self.host.boot() {
            record.forget_process();
            // Their own devices are created again.
            record.clear_on_backup();
            let end = End::new(EndReason::HostRebooted, "the host was rebooted");
            self.incoming_ended(record, &end);
            record.last_end = Some(record.resulting_end(end));
            self.note(record);
            return Ok(Reconciled::stopped(record));
        }
        let found = self.host.look(self.vm, identity);
        if record.incoming.is_some() && found != ProcessState::Gone {
            // The answer is not final: the guest may arrive, or may have arrived, meanwhile.
            self.query_incoming(record);
            return Ok(match record.incoming {
                Some(_) => Reconciled::Awaited,
                None => Reconciled::Running,
            });
        }
        if found == ProcessState::Runs {
            self.query_migration(record);
        }
        let may_run = record.is_on() || record.asked_to_power_off;
        match (found, may_run) {
            (ProcessState::Runs | ProcessState::Unknown, true) if identity.is_some() => {
                Ok(Reconciled::Running)
            }
            // A start or stop was in progress.
            (ProcessState::Runs | ProcessState::Unknown | ProcessState::NotBooted, _) => {
                self.stop(record)?;
                Ok(Reconciled::stopped(record))
            }
            (ProcessState::Gone, _) => {
                self.stop(record)?;
                let end = End::new(EndReason::Killed, "its process ended while no daemon ran");
                if self.ends(record, end)?.is_none() {
                    return Ok(Reconciled::None);
                }
                Ok(Reconciled::stopped(record))
            }
        }
    }

    /// The end of a process that outlived an attempt to end it.
    pub(crate) fn late_end(&self, record: &Record, end: End) -> End {
        if record.is_on() {
            // Meanwhile a client has requested it to run.
            end
        } else {
            End::new(EndReason::Stopped, STOPPED)
        }
    }

    /// As [`Self::ended`], also for VMs that leave nothing here: one that has not arrived, and one
    /// that another node has now. Returns nothing for those.
    ///
    /// # Errors
    /// A step of such a VM cannot be undone; it stays in the record.
    pub(crate) fn ends(&self, record: &mut Record, end: End) -> Result<Option<End>, Error> {
        if record.incoming.is_some()
            && self.incoming_ended(record, &end) == IncomingOutcome::RollBack
        {
            self.delete(record)?;
            return Ok(None);
        }
        let peer = record.peer();
        let end = self.ended(record, end);
        self.left_for(record, peer, end)
    }

    /// Records the end of the VM's process and its reason, and whether the restart policy starts
    /// the VM again. Returns the resulting end.
    pub(crate) fn ended(&self, record: &mut Record, end: End) -> End {
        if record.asked_to_power_off {
            // As for a stopped VM.
            record.clear_on_backup();
        }
        record.forget_process();
        let end = record.resulting_end(end);
        // A VM that was turned off for the host's shutdown must run after it, whatever the reason
        // of its end.
        let stays = record.off_in_boot.is_none() || end.reason == EndReason::Moved;
        if stays && !again(record.spec.restart, end.reason) {
            record.spec.state = Desired::Stopped;
        }
        record.last_end = Some(end.clone());
        self.note(record);
        end
    }

    /// Records that the VM's process was ended because the VM should not run. Returns the resulting
    /// end; nothing if another node has the VM now.
    ///
    /// # Errors
    /// As [`Self::ends`].
    pub(crate) fn stopped(&self, record: &mut Record) -> Result<Option<End>, Error> {
        let end = End::new(EndReason::Stopped, STOPPED);
        let peer = record.peer();
        let end = record.resulting_end(end);
        record.last_end = Some(end.clone());
        self.note(record);
        self.left_for(record, peer, end)
    }

    fn steps<'a>(&'a self, record: &'a mut Record) -> Steps<'a> {
        Steps {
            lifecycle: self,
            record,
        }
    }

    /// Runs an action that leaves nothing to undo.
    fn act<T>(
        &self,
        what: impl fmt::Display,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.at(StepEvent::Begin, &what);
        let done = work()?;
        self.at(StepEvent::Done, &what);
        Ok(done)
    }

    fn at(&self, event: StepEvent, what: &dyn fmt::Display) {
        self.host.at(self.vm, &format_args!("{event} {what}"));
    }

    /// Stores the record before a step.
    pub(crate) fn keep(&self, record: &Record) -> Result<(), Error> {
        let kept = self.host.keep(self.vm, record);
        kept.map_err(Error::wrap("cannot store the record of the VM"))
    }

    /// Stores the record after a step, and ignores a failure.
    pub(crate) fn note(&self, record: &mut Record) {
        self.steps(record).note();
    }
}

const NOT_STOPPED: &str = "cannot stop the VM";
/// The remedy for a process that does not end.
pub(super) const NOT_ENDED: &str = "repair the storage (`dmesg`): once the process ends, the \
                                    daemon finishes without another request";
const STOPPED: &str = "a client stopped it";

/// A part of a VM that could not be undone, and the cause.
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

/// Whether a VM with this end must restart. A stop without a request to the node counts as a
/// failure: the host may be shutting down, and must restore the VM afterwards.
fn again(restart: Restart, because: EndReason) -> bool {
    // Otherwise the guest would run twice.
    if because == EndReason::Moved {
        return false;
    }
    match restart {
        Restart::Never => false,
        Restart::Always => true,
        Restart::OnFailure => because != EndReason::PoweredOff,
    }
}

/// The action for a VM after a daemon's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reconciled {
    /// The VM does not exist any more.
    None,
    /// It runs, and must be watched.
    Running,
    /// Its process waits for its arrival, and must be watched.
    Awaited,
    /// It does not run and should.
    ToStart,
    /// It does not run and should not.
    Stopped,
}

impl Reconciled {
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
