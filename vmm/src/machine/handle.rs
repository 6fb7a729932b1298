//! Requests to a running machine, from other threads.
//!
//! Owns the sending side of the queue (`queue.rs`) and exposes the published status
//! (`status_publisher.rs`). Each request is a variant of [`Request`] or [`Action`], a method of
//! [`Handle`] and an arm in `requests.rs`. Each step of a migration is a closure. It must not know
//! how a request is carried out.
//!
//! ```text
//!   any thread                               vmm thread
//!   Handle ── Request (at most 16 wait) ──> event loop ──> carried out
//!      ^ <──────────── answer ────────────────────────────────┘  │
//!      │                                                         │
//!      └── status(), on_change() <── status <────────────────────┘
//! ```
//! The caller's thread does slow work before it sends the request: opening a vDPA device pins all
//! guest RAM. So the vmm thread never waits for it. Objects that are slow to close return to the
//! caller's thread. An operation that only the guest can finish, such as an unplug, is answered at
//! once; the status shows its completion. `pluggable.rs` draws the life cycle of a NIC or a disk.

mod swap;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TrySendError};
use std::time::Instant;

use bellhop_api::machine::IommuInfo;
use devices::vfio::FunctionDescription;
use devices::virtio::backend::SharedMemory;

use super::devices::{Device, open_disk, open_vdpa};
use super::error::RequestError;
use super::parts::Machine;
use super::pluggable::{DeviceConfig, DeviceKind, DiskStatus, NicStatus, Pluggable, VfioStatus};
use super::queue::{Action, Answer, Request, Requests, Shared};
use super::snapshot::{SnapshotWriter, Written};
use super::status_publisher::{DeviceStatus, MachineStatus, Resources};
use crate::Error;
use crate::config::{DiskConfig, VdpaConfig, VfioConfig};
use crate::console::ConsoleLoss;
use crate::memory::GuestRam;

/// Sends requests to a machine from any thread but the vmm thread. Clones address the same machine.
///
/// The machine carries out requests while it runs. Requests sent before that, or after
/// [`Machine::run`](super::Machine::run) returned, wait until the machine is dropped.
#[derive(Clone)]
pub struct Handle(Arc<Shared<Machine>>);

vdpa::opaque_debug!(Handle, this => publisher: this.0.publisher);

impl Requests<Machine> {
    pub(super) fn handle(&self) -> Handle {
        Handle(self.shared.clone())
    }
}

impl Machine {
    /// Returns a handle for requests to this machine.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.requests.handle()
    }
}

impl Handle {
    /// Opens a vDPA network device and plugs it into the guest. The device maps all guest RAM here,
    /// on the caller's thread. ACPI notifies a running guest of the NIC; a booting guest finds it.
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

    /// Opens a disk image and plugs it into the guest under the name `id`, regardless of the name
    /// in `config`. Opening and locking happen here, on the caller's thread. ACPI notifies a
    /// running guest.
    ///
    /// # Errors
    /// [`RequestError`]: the name is in use or is no disk name, the image cannot be opened (no such
    /// file, in use, …), no slot is free.
    pub fn plug_disk(&self, id: &str, config: &DiskConfig) -> Result<DiskStatus, RequestError> {
        let disk = self.plug(id, |memory| open_disk(id, config, memory))?;
        Ok(disk.of()?)
    }

    /// Opens and resets a function of the host and plugs it into the guest, as
    /// [`Handle::plug_nic`] does. The first function pins all guest RAM.
    ///
    /// # Errors
    /// [`RequestError`]: the name is in use, no slot is free, locked memory is too low, or the
    /// function cannot be given to a guest. The text has the remedy.
    pub fn plug_vfio(&self, config: &VfioConfig) -> Result<VfioStatus, RequestError> {
        self.ensure_unused(&config.name())?;
        let passthrough = self.0.passthrough.upgrade().ok_or(RequestError::Ended)?;
        let function = Box::new(passthrough.open(config, &self.memory()?)?);
        let plugged = self.ask(|answer| Request::PlugFunction { function, answer })?;
        Ok(plugged?.of()?)
    }

    /// Fails if the name is in use, before a device maps all RAM in vain. The machine makes the
    /// final decision.
    fn ensure_unused(&self, id: &str) -> Result<(), RequestError> {
        if self.0.publisher.status.lock().has(id) {
            return Err(RequestError::IdInUse(id.to_owned()));
        }
        Ok(())
    }

    fn plug(
        &self,
        id: &str,
        open: impl FnOnce(&SharedMemory) -> Result<Device, Error>,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        self.ensure_unused(id)?;
        let device = open(&self.memory()?)?;
        if device.config.is_none() {
            // Only a vDPA device can turn out to be of another kind than requested.
            return Err(RequestError::OtherKind {
                id: id.to_owned(),
                wanted: DeviceKind::Nic,
            });
        }
        self.ask(|answer| Request::Plug { device, answer })?
    }

    /// Asks the guest to eject a NIC; a repeated call asks again. The answer comes at once. The NIC
    /// is gone and its device free when the NIC is no longer listed.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or it is no NIC.
    pub fn unplug_nic(&self, id: &str) -> Result<NicStatus, RequestError> {
        Ok(self.unplug(id, DeviceKind::Nic)?.of()?)
    }

    /// Asks the guest to eject a disk, as [`Handle::unplug_nic`] does. Reads and writes in progress
    /// are completed or cancelled before the image is closed.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or it is no disk.
    pub fn unplug_disk(&self, id: &str) -> Result<DiskStatus, RequestError> {
        Ok(self.unplug(id, DeviceKind::Disk)?.of()?)
    }

    /// Asks the guest to eject a function of the host, as [`Handle::unplug_nic`] does. The function
    /// is reset before it is closed.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or it is no function of the host.
    pub fn unplug_vfio(&self, id: &str) -> Result<VfioStatus, RequestError> {
        Ok(self.unplug(id, DeviceKind::Vfio)?.of()?)
    }

    fn unplug(&self, id: &str, kind: DeviceKind) -> Result<Pluggable<DeviceConfig>, RequestError> {
        self.ask(|answer| Request::Unplug {
            id: id.to_owned(),
            kind,
            answer,
        })?
    }

    /// Asks the guest to announce a NIC on its network, as after a migration (virtio 1.3,
    /// 5.1.6.5.4). The guest does so in its own time.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or its driver cannot announce.
    pub fn announce(&self, id: &str) -> Result<(), RequestError> {
        self.act(Action::Announce(id.to_owned()))
    }

    /// Starts (`on`) or stops recording, in guest memory's bitmap, the pages that devices write.
    /// The guest keeps its network. A vDPA device is relayed meanwhile, which costs processor time.
    /// For tests, and for estimates of the cost of a migration. A migration turns recording on
    /// itself and excludes this call.
    ///
    /// # Errors
    /// [`RequestError::DirtyLog`]: a device cannot record; the devices before it are as they were.
    /// While the machine is saved or sent, [`RequestError::Saving`], [`RequestError::Migrating`] or
    /// [`RequestError::Quiesced`]. [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn dirty_log(&self, on: bool) -> Result<(), RequestError> {
        self.act(Action::DirtyLog(on))
    }

    /// Returns the KVM resources that the machine holds.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn resources(&self) -> Result<Resources, RequestError> {
        self.ask(|answer| Request::Resources { answer })
    }

    /// Returns all devices, NICs and others, with the state to which the guest has set them.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn devices(&self) -> Result<Vec<DeviceStatus>, RequestError> {
        self.ask(|answer| Request::Devices { answer })
    }

    /// Returns the state of the functions of the host that the machine has, by name.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn functions(&self) -> Result<BTreeMap<String, FunctionDescription>, RequestError> {
        self.ask(|answer| Request::Functions { answer })
    }

    /// Returns KVM's counters: see [`Vcpus::statistics`](crate::vcpu::Vcpus::statistics).
    ///
    /// # Errors
    /// [`RequestError`]: the counters cannot be read.
    pub fn statistics(&self) -> Result<BTreeMap<String, u64>, RequestError> {
        self.ask(|answer| Request::Statistics { answer })?
    }

    /// Presses the ACPI power button, which asks the guest to shut down. The guest may ignore it.
    ///
    /// # Errors
    /// [`RequestError::Ended`], [`RequestError::Busy`]; [`RequestError::Quiesced`]: the state is
    /// on its way to another host, and the guest there would miss the button.
    pub fn power_button(&self) -> Result<(), RequestError> {
        self.act(Action::PowerButton)
    }

    /// Resets the machine without asking the guest. Returns once the reset is scheduled; the guest
    /// has booted again when [`MachineStatus::boots`] has grown. A machine that is being sent and
    /// still runs is reset too, and moves in its state after the reset.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`]. A quiesced machine is not reset:
    /// [`RequestError::Saving`] for a snapshot or another program, [`RequestError::Quiesced`]
    /// for a migration.
    pub fn reset(&self) -> Result<(), RequestError> {
        self.act(Action::Reset)
    }

    /// Sends a non-maskable interrupt to the first vCPU. Linux logs it, or panics with
    /// `unknown_nmi_panic`. A paused guest receives it when it resumes.
    ///
    /// # Errors
    /// [`RequestError`]: KVM refuses.
    pub fn nmi(&self) -> Result<(), RequestError> {
        self.act(Action::Nmi)
    }

    /// Fails if the machine has a function of the host that another program cannot continue.
    ///
    /// # Errors
    /// [`RequestError::NotSavable`], [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn ensure_functions_continue(&self) -> Result<(), RequestError> {
        self.act(Action::EnsureFunctionsContinue)
    }

    /// Returns how much of the guest's output the console has lost since the start.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn console_loss(&self) -> Result<ConsoleLoss, RequestError> {
        self.ask(|answer| Request::ConsoleLoss { answer })
    }

    /// Returns the status of the guest's IOMMU; `None` without one.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn iommu(&self) -> Result<Option<IommuInfo>, RequestError> {
        self.ask(|answer| Request::Iommu { answer })
    }

    /// Parks the vCPUs and returns once they are parked. Devices keep working: see
    /// [`RunState::Paused`](super::RunState::Paused). Has no effect if they are parked already. A
    /// machine that is being sent arrives paused. A machine that is quiesced, for a snapshot or
    /// because the guest's location is unknown, is paused when it resumes.
    ///
    /// # Errors
    /// [`RequestError::Ended`], [`RequestError::Busy`]; [`RequestError::Quiesced`]: the state is
    /// already on its way to another host, where the guest would run.
    pub fn pause(&self) -> Result<(), RequestError> {
        self.act(Action::Pause)
    }

    /// Resumes the vCPUs of a paused machine. Has no effect if they run.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`]. A quiesced machine is not resumed:
    /// [`RequestError::Saving`] for a snapshot or another program, [`RequestError::Quiesced`]
    /// for a migration.
    pub fn resume(&self) -> Result<(), RequestError> {
        self.act(Action::Resume)
    }

    /// Clears the error of an earlier upgrade before another one starts.
    pub fn forget_upgrade_error(&self) {
        self.0
            .publisher
            .update(|status| status.upgrade.error = None);
    }

    /// Saves and holds the machine for `program`; [`Machine::run`](super::Machine::run) then
    /// returns [`Exit::HandedOver`](super::Exit::HandedOver). Does not check whether `program` can
    /// continue the machine: see [`check_program`](super::check_program).
    ///
    /// # Errors
    /// [`RequestError`], with the machine as before.
    ///
    /// * A device cannot be saved, or the state cannot be written.
    /// * A snapshot is being written ([`RequestError::Saving`]).
    /// * The machine is being sent ([`RequestError::Migrating`], [`RequestError::Quiesced`]).
    /// * A vCPU has failed ([`RequestError::Crashed`]).
    pub fn hand_over(&self, program: &Path) -> Result<(), RequestError> {
        self.act(Action::HandOver(program.to_owned()))
    }

    /// Returns guest RAM while the machine still has it.
    pub(super) fn ram(&self) -> Option<Arc<GuestRam>> {
        self.0.ram.upgrade()
    }

    /// Returns guest RAM for a new device.
    fn memory(&self) -> Result<SharedMemory, RequestError> {
        let ram = self.ram().ok_or(RequestError::Ended)?;
        Ok(Arc::new(ram.memory().clone()))
    }

    /// Writes a snapshot of the whole machine into `directory`, which must not exist. Meanwhile the
    /// vCPUs are parked and the devices stopped. Afterwards the machine is as before, even if the
    /// snapshot fails; a failed snapshot leaves no files. The caller's thread writes.
    ///
    /// # Errors
    /// [`RequestError`]: a device cannot be saved, another snapshot is being written, the directory
    /// or a file in it cannot be created.
    pub fn snapshot(&self, directory: &Path) -> Result<Written, RequestError> {
        let writer = SnapshotWriter::new(directory)?;
        let ram = self.ram().ok_or(RequestError::Ended)?;
        let started = Instant::now();
        let machine = self.ask(|answer| Request::Save { answer })??;
        let written = writer.write(&machine, &ram);
        drop(ram);
        // In any case. A machine that stopped meanwhile still has a valid snapshot.
        let went_on = self.ask_surely(|answer| Request::Perform {
            action: Action::Unquiesce,
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

    /// Returns the current status without waiting for the machine.
    #[must_use]
    pub fn status(&self) -> MachineStatus {
        self.0.publisher.status.lock().clone()
    }

    /// Calls `listener` with the current status and after each change, in order, until the machine
    /// and all its handles are dropped. The vmm thread calls it, so it must be quick and must send
    /// no request to this machine.
    pub fn on_change(&self, listener: impl Fn(&MachineStatus) + Send + Sync + 'static) {
        let status = self.0.publisher.status.lock();
        listener(&status);
        self.0.publisher.listeners.lock().push(Box::new(listener));
    }

    /// Returns the NIC with this name, if it exists now.
    #[must_use]
    pub fn nic(&self, id: &str) -> Option<NicStatus> {
        let status = self.0.publisher.status.lock();
        status.nics.iter().find(|nic| nic.id == id).cloned()
    }

    /// Returns the disk with this name, if it exists now.
    #[must_use]
    pub fn disk(&self, id: &str) -> Option<DiskStatus> {
        let status = self.0.publisher.status.lock();
        status.disks.iter().find(|disk| disk.id == id).cloned()
    }

    /// Returns the function of the host with this name, if it exists now.
    #[must_use]
    pub fn vfio(&self, id: &str) -> Option<VfioStatus> {
        let status = self.0.publisher.status.lock();
        let mut functions = status.vfio.iter();
        functions.find(|function| function.id == id).cloned()
    }

    fn act(&self, action: Action) -> Result<(), RequestError> {
        self.ask(|answer| Request::Perform { action, answer })?
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

    /// As [`Handle::ask`], but waits while the queue is full. For requests that must not fail
    /// because of load: a quiesced machine would stay quiesced for ever.
    pub(super) fn ask_surely<T>(
        &self,
        request: impl FnOnce(Answer<T>) -> Request<Machine>,
    ) -> Result<T, RequestError> {
        let (answer, answered) = mpsc::sync_channel(1);
        // The senders of the waiting requests have woken the machine.
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
