//! Requests to a running machine, from other threads.
//!
//! Owns the queue of requests and the board on which the machine publishes what it
//! has. Everything that is asked of a running machine comes this way: a variant of [`Request`],
//! a method of [`Handle`], and an arm in `requests.rs`. It must not know how a request
//! is carried out.
//!
//! ```text
//!   any thread                               vmm thread
//!   Handle ── Request (at most 16 wait) ──> event loop ──> carried out
//!      ^ <──────────── answer ────────────────────────────────┘  │
//!      │                                                         │
//!      └── nics(), wait_change() <── board (generation) <────────┘
//! ```
//! What takes long (opening a vDPA device pins all guest RAM) is done by the
//! caller's thread, before the request is made; so the vmm thread never waits for
//! it. What only the guest can finish (an unplug) is answered at once and shows on
//! the board when it is done.
//!
//! A NIC's life:
//!
//! ```text
//!            plug_nic                unplug                       guest ejects it,
//!   (none) ----------> Plugged -----------------> UnplugRequested ---------------> (none)
//!                         ^                         |   ^    |    or resets the machine
//!                         |                         +---+    |
//!                  a reset of the machine           unplug   +-- a guest without a driver
//!                  changes nothing                  (again)      for hot-plug stays here
//! ```

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use devices::pci::Slot;
use devices::virtio::backend::SharedMemory;
use vdpa::memory::GuestMemory;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::inventory::Device;
use super::{MachineError, Resources, devices as backends};
use crate::config::VdpaConfig;

/// Requests that may wait for the machine.
const WAITING_MAX: usize = 16;

/// Where a NIC is in its life; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NicState {
    /// The guest has it, or finds it when it looks.
    Plugged,
    /// The guest was asked to eject it and has not done so yet.
    UnplugRequested,
}

/// A NIC of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicStatus {
    /// Its name.
    pub id: String,
    /// Its vhost-vdpa character device.
    pub path: PathBuf,
    /// Where the guest sees it.
    pub address: Slot,
    /// Where it is in its life.
    pub state: NicState,
    /// Different for each NIC that the machine ever had: tells a NIC from an earlier one of the
    /// same name.
    pub serial: u64,
}

/// The NICs of a machine at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nics {
    /// Grows with each change.
    pub generation: u64,
    /// All of them.
    pub nics: Vec<NicStatus>,
    /// Whether the machine is gone, with all its devices closed: nothing changes any more.
    pub ended: bool,
}

/// Why a request was not carried out. The machine is as before.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The machine is gone.
    #[error("the machine has ended")]
    Ended,
    /// Too many requests wait already.
    #[error("the machine has {WAITING_MAX} requests waiting; try again later")]
    Busy,
    /// A device of the machine has this name.
    #[error("the machine has a device {0} already; choose another id")]
    IdInUse(String),
    /// No device of the machine has this name.
    #[error("the machine has no device {0}")]
    NoSuchDevice(String),
    /// Only NICs come and go.
    #[error("device {0} is not a network device: only those can be plugged and unplugged")]
    NotANic(String),
    /// The NIC's driver does not run, or did not negotiate GUEST_ANNOUNCE.
    #[error(
        "the guest's driver of {0} cannot announce it: it is not running, or does not know how"
    )]
    NoAnnouncement(String),
    /// The device cannot be opened or shown to the guest.
    #[error(transparent)]
    Device(Box<MachineError>),
    /// The machine cannot be woken.
    #[error("cannot reach the machine's thread")]
    Wake(#[source] io::Error),
}

impl From<MachineError> for RequestError {
    fn from(error: MachineError) -> Self {
        match error {
            MachineError::DuplicateId(id) => Self::IdInUse(id),
            error => Self::Device(Box::new(error)),
        }
    }
}

/// Where the answer to a request goes.
pub(super) type Answer<T> = SyncSender<T>;

/// What can be asked of a running machine.
pub(super) enum Request {
    /// Show this opened device to the guest.
    Plug {
        device: Device,
        answer: Answer<Result<NicStatus, RequestError>>,
    },
    /// Ask the guest to give this NIC up.
    Unplug {
        id: String,
        answer: Answer<Result<NicStatus, RequestError>>,
    },
    /// Ask the guest to announce this NIC on its network.
    Announce {
        id: String,
        answer: Answer<Result<(), RequestError>>,
    },
    /// What does the machine hold?
    Resources { answer: Answer<Resources> },
}

/// What the machine publishes.
#[derive(Debug, Default)]
struct Board {
    nics: Mutex<Nics>,
    changed: Condvar,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, Nics> {
        self.nics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, nics: Vec<NicStatus>, ended: bool) {
        let mut current = self.lock();
        if current.nics != nics || current.ended != ended {
            current.nics = nics;
            current.ended = ended;
            current.generation = current.generation.wrapping_add(1);
            self.changed.notify_all();
        }
    }
}

struct Shared {
    requests: SyncSender<Request>,
    wake: Arc<EventFd>,
    board: Arc<Board>,
    /// Weak: a handle must not keep the memory of a machine that is gone.
    memory: Weak<GuestMemory>,
    ram_end: u64,
}

/// Asks a machine, from any thread but the vmm thread. Clones ask the same machine.
///
/// Requests are carried out while the machine runs; before that (and after
/// [`Machine::run`](super::Machine::run) returned) they wait, until the machine is dropped.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("board", &self.0.board)
            .finish_non_exhaustive()
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
        let id = backends::vdpa_id(config);
        // Before all RAM is mapped for nothing. The machine itself decides.
        if self.nic(&id).is_some() {
            return Err(RequestError::IdInUse(id));
        }
        let memory: SharedMemory = self.0.memory.upgrade().ok_or(RequestError::Ended)?;
        let device = backends::open_vdpa(config, &memory, self.0.ram_end)?;
        drop(memory);
        if device.nic.is_none() {
            return Err(RequestError::NotANic(id));
        }
        self.ask(|answer| Request::Plug { device, answer })?
    }

    /// Asks the guest to give a NIC up, and asks again if it was asked before. The
    /// answer comes at once; the NIC is gone, and its device free, when it is no
    /// longer listed: see [`Handle::wait_unplugged`].
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or it is no NIC.
    pub fn unplug(&self, id: &str) -> Result<NicStatus, RequestError> {
        self.ask(|answer| Request::Unplug {
            id: id.to_owned(),
            answer,
        })?
    }

    /// Asks the guest to announce a NIC on its network, as after it has moved
    /// (virtio 1.3, 5.1.6.5.4). The guest does it when it gets to it.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such device, or its driver cannot.
    pub fn announce(&self, id: &str) -> Result<(), RequestError> {
        self.ask(|answer| Request::Announce {
            id: id.to_owned(),
            answer,
        })?
    }

    /// What the machine holds of KVM.
    ///
    /// # Errors
    /// [`RequestError::Ended`] or [`RequestError::Busy`].
    pub fn resources(&self) -> Result<Resources, RequestError> {
        self.ask(|answer| Request::Resources { answer })
    }

    /// The NICs as they are now. Does not wait for the machine.
    #[must_use]
    pub fn nics(&self) -> Nics {
        self.0.board.lock().clone()
    }

    /// The NIC with this name, if there is one now.
    #[must_use]
    pub fn nic(&self, id: &str) -> Option<NicStatus> {
        let nics = self.0.board.lock();
        nics.nics.iter().find(|nic| nic.id == id).cloned()
    }

    /// The NICs as soon as their generation is not `seen` any more, or as they are
    /// after `limit`.
    #[must_use]
    pub fn wait_change(&self, seen: u64, limit: Duration) -> Nics {
        self.wait(limit, |nics| nics.generation != seen)
    }

    /// Waits until this very NIC is gone and its device free; `false` if it is still
    /// there after `limit`.
    #[must_use]
    pub fn wait_unplugged(&self, nic: &NicStatus, limit: Duration) -> bool {
        let there = |nics: &Nics| nics.nics.iter().any(|one| one.serial == nic.serial);
        !there(&self.wait(limit, |nics| !there(nics)))
    }

    fn wait(&self, limit: Duration, done: impl Fn(&Nics) -> bool) -> Nics {
        let start = Instant::now();
        let mut nics = self.0.board.lock();
        while !done(&nics) && !nics.ended {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            let waited = self.0.board.changed.wait_timeout(nics, left);
            nics = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        nics.clone()
    }

    /// Sends a request and waits for its answer.
    fn ask<T>(&self, request: impl FnOnce(Answer<T>) -> Request) -> Result<T, RequestError> {
        let (answer, answered) = mpsc::sync_channel(1);
        match self.0.requests.try_send(request(answer)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(RequestError::Busy),
            Err(TrySendError::Disconnected(_)) => return Err(RequestError::Ended),
        }
        match self.0.wake.write(1) {
            Ok(()) => {}
            // A counter at its maximum is readable too.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(RequestError::Wake(error)),
        }
        answered.recv().map_err(|_| RequestError::Ended)
    }
}

/// The machine's end of the queue. When it is dropped, waiting requests are answered with
/// [`RequestError::Ended`].
pub(super) struct Requests {
    queue: Receiver<Request>,
    wake: Arc<EventFd>,
    board: Arc<Board>,
    handle: Handle,
}

impl Requests {
    /// A queue for the machine with this memory; see [`backends::open`] for `ram_end`.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(super) fn new(memory: &SharedMemory, ram_end: u64) -> io::Result<Self> {
        let (requests, queue) = mpsc::sync_channel(WAITING_MAX);
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let board = Arc::new(Board::default());
        let handle = Handle(Arc::new(Shared {
            requests,
            wake: wake.clone(),
            board: board.clone(),
            memory: Arc::downgrade(memory),
            ram_end,
        }));
        Ok(Self {
            queue,
            wake,
            board,
            handle,
        })
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Readable when requests wait.
    pub(super) fn eventfd(&self) -> &EventFd {
        &self.wake
    }

    /// Takes the requests that wait now.
    pub(super) fn take(&self) -> Vec<Request> {
        // In this order a request in between is seen now or signalled again.
        let _ = self.wake.read();
        self.queue.try_iter().take(WAITING_MAX).collect()
    }

    /// Shows what there is now.
    pub(super) fn publish(&self, nics: Vec<NicStatus>) {
        self.board.publish(nics, false);
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.board.publish(Vec::new(), true);
    }
}

#[cfg(test)]
mod tests;
