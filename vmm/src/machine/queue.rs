//! The requests to a running machine, and the queue in which they wait.
//!
//! Owns the queue, the machine's end of it, and the publisher of its status. It must
//! not know the sender, nor how a machine (`M`) carries out a request.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Weak};

use bellhop_api::machine::{AlarmInfo, IommuInfo};
use devices::vfio::FunctionDescription;
use devices::virtio::backend::Backend;
use vmm_sys_util::eventfd::EventFd;

use super::devices::Device;
use super::end::End;
use super::error::{RequestError, WAITING_MAX};
use super::passthrough::{Function, Passthrough};
use super::pluggable::{
    DeviceConfig, DeviceKind, DiskStatus, NicStatus, NicSwapped, Pluggable, VfioStatus,
};
use super::saved::SavedMachine;
use super::status_publisher::{DeviceStatus, Resources, RunState, StatusPublisher, UpgradeStatus};
use crate::console::ConsoleLoss;
use crate::memory::GuestRam;

/// The channel for the answer to a request.
pub(super) type Answer<T> = SyncSender<T>;

/// A request to a running machine, an `M`.
pub(super) enum Request<M> {
    /// Plug this opened device.
    Plug {
        device: Device,
        answer: Answer<Result<Pluggable<DeviceConfig>, RequestError>>,
    },
    /// Plug this opened function of the host.
    PlugFunction {
        function: Box<Function>,
        answer: Answer<Result<Pluggable<DeviceConfig>, RequestError>>,
    },
    /// Return the state of the host's functions, by name.
    Functions {
        answer: Answer<BTreeMap<String, FunctionDescription>>,
    },
    /// Ask the guest to eject this device, if it is of this kind.
    Unplug {
        id: String,
        kind: DeviceKind,
        answer: Answer<Result<Pluggable<DeviceConfig>, RequestError>>,
    },
    /// Put this opened device behind the NIC of the same name, whose driver keeps running.
    Swap {
        device: Device,
        answer: Answer<SwapAnswer>,
    },
    /// The device of this NIC has failed: replace it by this device, or record why that is not
    /// possible.
    FailOver {
        id: String,
        serial: u64,
        device: Result<Device, RequestError>,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    /// Set or clear the backup device of this NIC.
    SetBackup {
        id: String,
        backup: Option<PathBuf>,
        answer: Answer<Result<Pluggable<DeviceConfig>, RequestError>>,
    },
    /// Return the KVM resources of the machine.
    Resources { answer: Answer<Resources> },
    /// Return the status of its devices.
    Devices { answer: Answer<Vec<DeviceStatus>> },
    /// Return KVM's counters.
    Statistics {
        answer: Answer<Result<BTreeMap<String, u64>, RequestError>>,
    },
    /// Park the vCPUs, stop the devices and return the machine's state.
    Save {
        answer: Answer<Result<SavedMachine, RequestError>>,
    },
    /// Carry out a step of a migration, which sends its own answer.
    Migration(Box<dyn FnOnce(&mut M) + Send>),
    /// Return the console's losses.
    ConsoleLoss { answer: Answer<ConsoleLoss> },
    /// Return the status of the guest's IOMMU, if it has one.
    Iommu { answer: Answer<Option<IommuInfo>> },
    /// Carry out this action.
    Perform {
        action: Action,
        answer: Answer<Result<(), RequestError>>,
    },
}

/// A request whose only result is success.
#[derive(Debug)]
pub(super) enum Action {
    /// Ask the guest to announce this NIC on its network.
    Announce(String),
    /// Start or stop recording the pages that devices write.
    DirtyLog(bool),
    /// Press the power button.
    PowerButton,
    /// Reset the machine.
    Reset,
    /// After a [`Request::Save`]: resume everything as it was.
    Unquiesce,
    /// Hold the machine for this program.
    HandOver(PathBuf),
    /// Fail if there is a function of the host that another program cannot continue.
    EnsureFunctionsContinue,
    /// Send an NMI.
    Nmi,
    /// Park the vCPUs.
    Pause,
    /// Resume the vCPUs.
    Resume,
}

/// The state that all handles of a machine share.
pub(super) struct Shared<M> {
    pub(super) requests: SyncSender<Request<M>>,
    pub(super) wake: EventFd,
    pub(super) publisher: StatusPublisher,
    /// Weak: a handle must not keep the memory of a dropped machine.
    pub(super) ram: Weak<GuestRam>,
    pub(super) ram_end: u64,
    /// Weak: a handle must not keep the VM.
    pub(super) passthrough: Weak<Passthrough>,
}

/// The vmm thread's answer to a [`Request::Swap`].
pub(super) struct SwapAnswer {
    pub(super) outcome: Result<NicSwapped, RequestError>,
    /// The old backend, or the new one after a failure: stopped, not closed.
    pub(super) unused: Box<dyn Backend>,
}

vdpa::opaque_debug!(SwapAnswer, this => outcome: this.outcome);

/// The machine's end of the queue. When it is dropped, waiting requests are answered with
/// [`RequestError::Ended`].
pub(super) struct Requests<M> {
    queue: Receiver<Request<M>>,
    pub(super) shared: Arc<Shared<M>>,
}

impl<M> Requests<M> {
    /// Creates a queue for the machine with this memory, which ends at `ram_end`: see
    /// [`devices::open`](super::devices::open). `passthrough` opens functions for it.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(super) fn new(
        ram: &Arc<GuestRam>,
        ram_end: u64,
        passthrough: Weak<Passthrough>,
    ) -> io::Result<Self> {
        let (requests, queue) = mpsc::sync_channel(WAITING_MAX);
        let shared = Arc::new(Shared {
            requests,
            wake: vdpa::eventfd::new()?,
            publisher: StatusPublisher::default(),
            ram: Arc::downgrade(ram),
            ram_end,
            passthrough,
        });
        Ok(Self { queue, shared })
    }

    /// Returns the eventfd that is readable when requests wait.
    pub(super) fn eventfd(&self) -> &EventFd {
        &self.shared.wake
    }

    /// Takes the waiting requests.
    pub(super) fn take(&self) -> Vec<Request<M>> {
        // In this order, a request that arrives in between is taken now or signalled again.
        let _ = self.shared.wake.read();
        self.queue.try_iter().take(WAITING_MAX).collect()
    }

    /// Returns the last published run state.
    pub(super) fn run_state(&self) -> RunState {
        self.shared.publisher.status.lock().run
    }

    /// Publishes the current NICs, disks and functions of the host.
    pub(super) fn publish_devices(
        &self,
        nics: Vec<NicStatus>,
        disks: Vec<DiskStatus>,
        vfio: Vec<VfioStatus>,
    ) {
        self.shared.publisher.update(|status| {
            status.nics = nics;
            status.disks = disks;
            status.vfio = vfio;
        });
    }

    /// Publishes the current alarms of queues.
    pub(super) fn publish_alarms(&self, alarms: Vec<AlarmInfo>) {
        self.shared
            .publisher
            .update(|status| status.alarms = alarms);
    }

    /// Publishes a power-on.
    pub(super) fn publish_boot(&self, paused: bool) {
        self.shared.publisher.update(|status| {
            status.run = if paused {
                RunState::Paused
            } else {
                RunState::Running
            };
            status.boots = status.boots.saturating_add(1);
            status.end = None;
        });
    }

    /// Publishes the end of the run and its reason.
    pub(super) fn publish_end(&self, end: End) {
        self.shared.publisher.update(|status| {
            status.run = RunState::Off;
            status.end = Some(end);
        });
    }

    /// Publishes the status of upgrades.
    pub(super) fn publish_upgrade(&self, upgrade: &UpgradeStatus) {
        let publisher = &self.shared.publisher;
        publisher.update(|status| status.upgrade.clone_from(upgrade));
    }

    /// Publishes the run state.
    pub(super) fn publish_run(&self, run: RunState) {
        self.shared.publisher.update(|status| status.run = run);
    }
}

impl<M> Drop for Requests<M> {
    fn drop(&mut self) {
        self.shared.publisher.update(|status| {
            status.nics.clear();
            status.disks.clear();
            status.vfio.clear();
            status.alarms.clear();
            status.run = RunState::Ended;
        });
    }
}
