//! Requests to a running machine, from other threads.
//!
//! Owns the way into the queue (`queue.rs`), and gives out what the machine publishes (`board.rs`).
//! Each request to a running machine is a variant of [`Request`] or [`Action`], a method of
//! [`Handle`] and an arm in `requests.rs`; each step of a migration is a closure. It must not know
//! how a request is carried out.
//!
//! ```text
//!   any thread                               vmm thread
//!   Handle ── Request (at most 16 wait) ──> event loop ──> carried out
//!      ^ <──────────── answer ────────────────────────────────┘  │
//!      │                                                         │
//!      └── status(), on_change() <── board <─────────────────────┘
//! ```
//! What takes long (opening a vDPA device pins all guest RAM) is done by the
//! caller's thread, before the request is made; so the vmm thread never waits for
//! it. What a request leaves over and takes long to close comes back to that thread. What only the guest can finish (an unplug) is answered at once and shows on
//! the board when it is done. The life of a NIC or a disk is drawn in `pluggable.rs`.

mod swap;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TrySendError};
use std::time::Instant;

use devices::virtio::backend::SharedMemory;

use super::board::{DeviceStatus, MachineStatus, Resources};
use super::devices::{Device, open_disk, open_vdpa};
use super::error::RequestError;
use super::parts::Machine;
use super::pluggable::{DeviceConfig, DeviceKind, DiskStatus, NicStatus, Pluggable};
use super::queue::{Action, Answer, Request, Requests, Shared};
use super::snapshot::{SnapshotWriter, Written};
use crate::Error;
use crate::config::{DiskConfig, VdpaConfig};
use crate::console::ConsoleLoss;
use crate::memory::GuestRam;

/// Asks a machine, from any thread but the vmm thread. Clones ask the same machine.
///
/// Requests are carried out while the machine runs; before that (and after
/// [`Machine::run`](super::Machine::run) returned) they wait, until the machine is dropped.
#[derive(Clone)]
pub struct Handle(Arc<Shared<Machine>>);

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("board", &self.0.board)
            .finish_non_exhaustive()
    }
}

impl Requests<Machine> {
    pub(super) fn handle(&self) -> Handle {
        Handle(self.shared.clone())
    }
}

impl Machine {
    /// For asking this machine for something while it runs.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.requests.handle()
    }
}

impl Handle {
    /// Opens a vDPA network device and gives it to the guest. The device maps all guest RAM here, on
    /// the caller's thread. A guest that runs hears of the NIC by ACPI; one that
    /// boots finds it.
    ///
    /// # Errors
    /// [`RequestError`]: the name is in use, the device cannot be opened (busy, no
    /// such file, locked memory too low, …), no slot is free.
    pub fn plug_nic(&self, config: &VdpaConfig) -> Result<NicStatus, RequestError> {
        let nic = self.plug(&config.name(), |memory| {
            open_vdpa(config, memory, self.0.ram_end)
        })?;
        Ok(nic.of()?)
    }

    /// Opens a disk image and gives it to the guest under the name `id`, whatever that of
    /// `config` is. Opening and locking happen here, on the caller's thread. The guest hears
    /// of it as of a NIC.
    ///
    /// # Errors
    /// [`RequestError`]: the name is in use or none of a disk, the image cannot be opened (no
    /// such file, in use, …), no slot is free.
    pub fn plug_disk(&self, id: &str, config: &DiskConfig) -> Result<DiskStatus, RequestError> {
        let disk = self.plug(id, |memory| open_disk(id, config, memory))?;
        Ok(disk.of()?)
    }

    fn plug(
        &self,
        id: &str,
        open: impl FnOnce(&SharedMemory) -> Result<Device, Error>,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        // Before all RAM is mapped for nothing. The machine itself decides.
        if self.0.board.status.lock().has(id) {
            return Err(RequestError::IdInUse(id.to_owned()));
        }
        let device = open(&self.0.memory.upgrade().ok_or(RequestError::Ended)?)?;
        if device.config.is_none() {
            // Only a vDPA device can turn out to be something else than was wanted.
            return Err(RequestError::OtherKind {
                id: id.to_owned(),
                wanted: DeviceKind::Nic,
            });
        }
        self.ask(|answer| Request::Plug { device, answer })?
    }

    /// Asks the guest to give a NIC up, and asks again if it was asked before. The
    /// answer comes at once; the NIC is gone, and its device free, when it is no
    /// longer listed.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or it is no NIC.
    pub fn unplug_nic(&self, id: &str) -> Result<NicStatus, RequestError> {
        Ok(self.unplug(id, DeviceKind::Nic)?.of()?)
    }

    /// Asks the guest to give a disk up, as [`Handle::unplug_nic`] does. What the guest has begun
    /// to read or write is finished or cancelled before the image is closed.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or it is no disk.
    pub fn unplug_disk(&self, id: &str) -> Result<DiskStatus, RequestError> {
        Ok(self.unplug(id, DeviceKind::Disk)?.of()?)
    }

    fn unplug(&self, id: &str, kind: DeviceKind) -> Result<Pluggable<DeviceConfig>, RequestError> {
        self.ask(|answer| Request::Unplug {
            id: id.to_owned(),
            kind,
            answer,
        })?
    }

    /// Asks the guest to announce a NIC on its network, as after it has moved
    /// (virtio 1.3, 5.1.6.5.4). The guest does it when it gets to it.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or its driver cannot.
    pub fn announce(&self, id: &str) -> Result<(), RequestError> {
        self.act(Action::Announce(id.to_owned()))
    }

    /// Lets all devices record the pages that they write into guest memory's bitmap (`on`), or ends it. The guest
    /// keeps its network. A vDPA device gets relays for that, which cost processor time: for tests, and who
    /// wants to know what a migration would cost. A migration does it by itself, and meanwhile nobody else can.
    ///
    /// # Errors
    /// [`RequestError::DirtyLog`]: a device cannot; those before it are as they were. While the machine is saved or sent,
    /// [`RequestError::Saving`], [`RequestError::Migrating`] or [`RequestError::StandsStill`]. [`RequestError::Ended`] or
    /// [`RequestError::Busy`].
    pub fn dirty_log(&self, on: bool) -> Result<(), RequestError> {
        self.act(Action::DirtyLog(on))
    }

    /// What the machine holds of KVM.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn resources(&self) -> Result<Resources, RequestError> {
        self.ask(|answer| Request::Resources { answer })
    }

    /// All devices, NICs and others, with what the guest made of them.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn devices(&self) -> Result<Vec<DeviceStatus>, RequestError> {
        self.ask(|answer| Request::Devices { answer })
    }

    /// What KVM has counted: see [`Vcpus::statistics`](crate::vcpu::Vcpus::statistics).
    ///
    /// # Errors
    /// [`RequestError`]: the counters cannot be read.
    pub fn statistics(&self) -> Result<BTreeMap<String, u64>, RequestError> {
        self.ask(|answer| Request::Statistics { answer })?
    }

    /// Presses the ACPI power button: the guest is asked to shut down. What it does about
    /// it is its affair.
    ///
    /// # Errors
    /// [`RequestError::Ended`], [`RequestError::Busy`]; [`RequestError::StandsStill`]: its state is on the way to another
    /// host, and the guest there would not hear of it.
    pub fn power_button(&self) -> Result<(), RequestError> {
        self.act(Action::PowerButton)
    }

    /// Resets the machine, without asking the guest. Returns when that is decided; it has
    /// booted again when [`MachineStatus::boots`] has grown. One that is being sent and still runs is reset all the same, and
    /// moves as it is then.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`]. One that stands still is not reset: [`RequestError::Saving`] for a
    /// snapshot or another program, [`RequestError::StandsStill`] for a migration.
    pub fn reset(&self) -> Result<(), RequestError> {
        self.act(Action::Reset)
    }

    /// Sends a non-maskable interrupt to the first vCPU, which a Linux guest logs, or takes for
    /// a wish to panic (`unknown_nmi_panic`). A paused guest gets it when it goes on.
    ///
    /// # Errors
    /// [`RequestError`]: KVM refuses.
    pub fn nmi(&self) -> Result<(), RequestError> {
        self.act(Action::Nmi)
    }

    /// What of the guest's output its console has lost since the start.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn console_loss(&self) -> Result<ConsoleLoss, RequestError> {
        self.ask(|answer| Request::ConsoleLoss { answer })
    }

    /// Parks the vCPUs and returns when they are parked. Devices keep working: see
    /// [`RunState::Paused`](super::RunState::Paused). Nothing changes if they are parked already. A
    /// machine that is being sent arrives paused. One that stands still, for a snapshot or because
    /// its guest's place is not settled, is paused when it resumes.
    ///
    /// # Errors
    /// [`RequestError::Ended`], [`RequestError::Busy`]; [`RequestError::StandsStill`]: its state is on the way to another
    /// host already, and it would run there.
    pub fn pause(&self) -> Result<(), RequestError> {
        self.act(Action::Pause)
    }

    /// Lets the vCPUs of a paused machine go on. Nothing changes if they do.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`]. One that stands still is not resumed: [`RequestError::Saving`] for
    /// a snapshot or another program, [`RequestError::StandsStill`] for a migration.
    pub fn resume(&self) -> Result<(), RequestError> {
        self.act(Action::Resume)
    }

    /// Forgets why an earlier program did not go on with the machine, before another one is to.
    pub fn forget_upgrade_error(&self) {
        self.0.board.update(|status| status.upgrade.error = None);
    }

    /// Has the machine stand still for `program`: [`Machine::run`](super::Machine::run) returns
    /// [`Exit::HandedOver`](super::Exit::HandedOver). Whether `program` is one that can go on with it is not looked at here: see
    /// [`check_program`](super::check_program).
    ///
    /// # Errors
    /// [`RequestError`], and the machine is as before: a device cannot be saved, or the state not be written; a snapshot is
    /// being written ([`RequestError::Saving`]); it is being sent ([`RequestError::Migrating`],
    /// [`RequestError::StandsStill`]); a vCPU has failed ([`RequestError::Crashed`]).
    pub fn hand_over(&self, program: &Path) -> Result<(), RequestError> {
        self.act(Action::HandOver(program.to_owned()))
    }

    /// Guest RAM, as long as the machine has it.
    pub(super) fn ram(&self) -> Option<Arc<GuestRam>> {
        self.0.ram.upgrade()
    }

    /// Writes a snapshot of the whole machine into `directory`, which must not exist. Meanwhile its
    /// vCPUs are parked and its devices stopped; afterwards it is as it was, also if the snapshot fails, which
    /// then leaves nothing. The caller's thread writes.
    ///
    /// # Errors
    /// [`RequestError`]: a device cannot be saved, another snapshot is being written, the directory or a file
    /// in it cannot be made.
    pub fn snapshot(&self, directory: &Path) -> Result<Written, RequestError> {
        let writer = SnapshotWriter::new(directory)?;
        let ram = self.ram().ok_or(RequestError::Ended)?;
        let started = Instant::now();
        let machine = self.ask(|answer| Request::Save { answer })??;
        let written = writer.write(&machine, &ram);
        drop(ram);
        // In any case; and a machine that was stopped meanwhile has a good snapshot all the same.
        let went_on = self.ask_surely(|answer| Request::Act {
            action: Action::GoOn,
            answer,
        });
        let paused = started.elapsed();
        let memory_bytes = written?;
        match went_on {
            Ok(Ok(())) | Err(RequestError::Ended) => {}
            Ok(Err(error)) | Err(error) => return Err(error),
        }
        Ok(Written {
            memory_bytes,
            paused,
        })
    }

    /// The machine as it is now. Does not wait for it.
    #[must_use]
    pub fn status(&self) -> MachineStatus {
        self.0.board.status.lock().clone()
    }

    /// Has `listener` called with the status now and after each change, in their order,
    /// until the machine and all its handles are gone. It is called on the vmm
    /// thread, so it must be quick and ask this machine nothing.
    pub fn on_change(&self, listener: impl Fn(&MachineStatus) + Send + Sync + 'static) {
        let status = self.0.board.status.lock();
        listener(&status);
        self.0.board.listeners.lock().push(Box::new(listener));
    }

    /// The NIC with this name, if there is one now.
    #[must_use]
    pub fn nic(&self, id: &str) -> Option<NicStatus> {
        let status = self.0.board.status.lock();
        status.nics.iter().find(|nic| nic.id == id).cloned()
    }

    /// The disk with this name, if there is one now.
    #[must_use]
    pub fn disk(&self, id: &str) -> Option<DiskStatus> {
        let status = self.0.board.status.lock();
        status.disks.iter().find(|disk| disk.id == id).cloned()
    }

    fn act(&self, action: Action) -> Result<(), RequestError> {
        self.ask(|answer| Request::Act { action, answer })?
    }

    /// Sends a request and waits for its answer.
    pub(super) fn ask<T>(
        &self,
        request: impl FnOnce(Answer<T>) -> Request<Machine>,
    ) -> Result<T, RequestError> {
        let (answer, answered) = mpsc::sync_channel(1);
        match self.0.requests.try_send(request(answer)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(RequestError::Busy),
            Err(TrySendError::Disconnected(_)) => return Err(RequestError::Ended),
        }
        self.wait_for(&answered)
    }

    /// As [`Handle::ask`], but waits where too many wait already. For what must not be left undone because others ask a
    /// lot: a machine that stands still would do so for ever.
    pub(super) fn ask_surely<T>(
        &self,
        request: impl FnOnce(Answer<T>) -> Request<Machine>,
    ) -> Result<T, RequestError> {
        let (answer, answered) = mpsc::sync_channel(1);
        // Those who wait have woken the machine.
        let sent = self.0.requests.send(request(answer));
        sent.map_err(|_| RequestError::Ended)?;
        self.wait_for(&answered)
    }

    fn wait_for<T>(&self, answered: &Receiver<T>) -> Result<T, RequestError> {
        match self.0.wake.write(1) {
            Ok(()) => {}
            // A counter at its maximum is readable too.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(RequestError::Wake(error)),
        }
        answered.recv().map_err(|_| RequestError::Ended)
    }
}

#[cfg(test)]
mod tests;
