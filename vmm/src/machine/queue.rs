//! What can be asked of a running machine, and the queue in which that waits.
//!
//! Owns the queue, the machine's end of it, and the board on which the machine publishes. It must
//! not know who asks, nor how a machine (`M`) carries out a request.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Weak};

use bellhop_api::machine::AlarmInfo;
use devices::virtio::backend::{Backend, SharedMemory};
use vdpa::memory::GuestMemory;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::board::{Board, DeviceStatus, Resources, RunState, UpgradeStatus};
use super::devices::Device;
use super::end::End;
use super::error::{RequestError, WAITING_MAX};
use super::pluggable::{DeviceConfig, DeviceKind, DiskStatus, NicStatus, NicSwapped, Pluggable};
use super::saved::SavedMachine;
use crate::console::ConsoleLoss;
use crate::memory::GuestRam;

/// Where the answer to a request goes.
pub(super) type Answer<T> = SyncSender<T>;

/// What can be asked of a running machine, an `M`.
pub(super) enum Request<M> {
    /// Show this opened device to the guest.
    Plug {
        device: Device,
        answer: Answer<Result<Pluggable<DeviceConfig>, RequestError>>,
    },
    /// Ask the guest to give this device up, if it is of this kind.
    Unplug {
        id: String,
        kind: DeviceKind,
        answer: Answer<Result<Pluggable<DeviceConfig>, RequestError>>,
    },
    /// Put this opened device behind the NIC of its name, whose driver goes on.
    Swap {
        device: Device,
        answer: Answer<SwapAnswer>,
    },
    /// The device of this NIC has failed: put this one in its place, or know why it can't be had.
    FailOver {
        id: String,
        serial: u64,
        device: Result<Device, RequestError>,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    /// Have this device stand by for the one of this NIC, or none.
    StandBy {
        id: String,
        failover: Option<PathBuf>,
        answer: Answer<Result<Pluggable<DeviceConfig>, RequestError>>,
    },
    /// What does the machine hold?
    Resources { answer: Answer<Resources> },
    /// What are its devices like?
    Devices { answer: Answer<Vec<DeviceStatus>> },
    /// What has KVM counted?
    Statistics {
        answer: Answer<Result<BTreeMap<String, u64>, RequestError>>,
    },
    /// Park the vCPUs, stop the devices and give the machine's state.
    Save {
        answer: Answer<Result<SavedMachine, RequestError>>,
    },
    /// Carry out a step of a migration, which answers by itself.
    Migration(Box<dyn FnOnce(&mut M) + Send>),
    /// What did the console lose?
    ConsoleLoss { answer: Answer<ConsoleLoss> },
    /// Do this.
    Act {
        action: Action,
        answer: Answer<Result<(), RequestError>>,
    },
}

/// What a machine does on request, with no result but success.
#[derive(Debug)]
pub(super) enum Action {
    /// Ask the guest to announce this NIC on its network.
    Announce(String),
    /// Record which pages devices write, or no longer.
    DirtyLog(bool),
    /// Press the power button.
    PowerButton,
    /// Reset the machine.
    Reset,
    /// After a [`Request::Save`]: let everything go on as it was.
    GoOn,
    /// Stand still for this program.
    HandOver(PathBuf),
    /// Send an NMI.
    Nmi,
    /// Park the vCPUs.
    Pause,
    /// Let the vCPUs go on.
    Resume,
}

/// What all handles of a machine have in common.
pub(super) struct Shared<M> {
    pub(super) requests: SyncSender<Request<M>>,
    pub(super) wake: EventFd,
    pub(super) board: Board,
    /// Weak: a handle must not keep the memory of a machine that is gone.
    pub(super) memory: Weak<GuestMemory>,
    pub(super) ram: Weak<GuestRam>,
    pub(super) ram_end: u64,
}

/// What the vmm thread answers to a [`Request::Swap`].
pub(super) struct SwapAnswer {
    pub(super) outcome: Result<NicSwapped, RequestError>,
    /// The old backend, or after a failure the new one: stopped, not closed.
    pub(super) unused: Box<dyn Backend>,
}

impl fmt::Debug for SwapAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapAnswer")
            .field("outcome", &self.outcome)
            .finish_non_exhaustive()
    }
}

/// The machine's end of the queue. When it is dropped, waiting requests are answered with
/// [`RequestError::Ended`].
pub(super) struct Requests<M> {
    queue: Receiver<Request<M>>,
    pub(super) shared: Arc<Shared<M>>,
}

impl<M> Requests<M> {
    /// A queue for the machine with this memory, which ends at `ram_end`: see
    /// [`devices::open`](super::devices::open).
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(super) fn new(
        memory: &SharedMemory,
        ram: &Arc<GuestRam>,
        ram_end: u64,
    ) -> io::Result<Self> {
        let (requests, queue) = mpsc::sync_channel(WAITING_MAX);
        let shared = Arc::new(Shared {
            requests,
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            board: Board::default(),
            memory: Arc::downgrade(memory),
            ram: Arc::downgrade(ram),
            ram_end,
        });
        Ok(Self { queue, shared })
    }

    /// Readable when requests wait.
    pub(super) fn eventfd(&self) -> &EventFd {
        &self.shared.wake
    }

    /// Takes the requests that wait now.
    pub(super) fn take(&self) -> Vec<Request<M>> {
        // In this order a request in between is seen now or signalled again.
        let _ = self.shared.wake.read();
        self.queue.try_iter().take(WAITING_MAX).collect()
    }

    /// What the machine was last said to do.
    pub(super) fn run_state(&self) -> RunState {
        self.shared.board.status.lock().run
    }

    /// Shows which NICs and disks there are now.
    pub(super) fn publish_devices(&self, nics: Vec<NicStatus>, disks: Vec<DiskStatus>) {
        self.shared.board.update(|status| {
            status.nics = nics;
            status.disks = disks;
        });
    }

    /// Shows what is wrong with queues now.
    pub(super) fn publish_alarms(&self, alarms: Vec<AlarmInfo>) {
        self.shared.board.update(|status| status.alarms = alarms);
    }

    /// Shows that the machine was powered on.
    pub(super) fn publish_boot(&self, paused: bool) {
        self.shared.board.update(|status| {
            status.run = if paused {
                RunState::Paused
            } else {
                RunState::Running
            };
            status.boots = status.boots.saturating_add(1);
            status.end = None;
        });
    }

    /// Shows that the run is over, and why.
    pub(super) fn publish_end(&self, end: End) {
        self.shared.board.update(|status| {
            status.run = RunState::Off;
            status.end = Some(end);
        });
    }

    /// Shows which programs went on with the machine.
    pub(super) fn publish_upgrade(&self, upgrade: &UpgradeStatus) {
        let board = &self.shared.board;
        board.update(|status| status.upgrade.clone_from(upgrade));
    }

    /// Shows what the machine does now.
    pub(super) fn publish_run(&self, run: RunState) {
        self.shared.board.update(|status| status.run = run);
    }
}

impl<M> Drop for Requests<M> {
    fn drop(&mut self) {
        self.shared.board.update(|status| {
            status.nics.clear();
            status.disks.clear();
            status.alarms.clear();
            status.run = RunState::Ended;
        });
    }
}
