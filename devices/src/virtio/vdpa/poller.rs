//! The thread that polls the relays of one device, and the hand-over of the relays.
//!
//! ```text
//!                 go
//!   parked  -------------->  polling      the thread has the relays, and sleeps as they say,
//!   (the backend has the       |          until a hint, a kick or the backend wakes it
//!    relays, may change them)  |
//!      ^         park          |
//!      +-----------------------+
//! ```
//! There is no lock: the relays are handed over, so a transition never meets a poll. The thread
//! ends with its [`Poller`], which exists only while queues are relayed. It must not know the
//! device: it sees rings in guest memory and eventfds.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vdpa::memory::DeviceMemory;
use vdpa::relay::{Pause, Strategy, SvqSet};
use vmm_sys_util::eventfd::EventFd;

use super::eventfd::signal;
use crate::Error;

/// Called first by each thread that polls.
static AT_START: OnceLock<fn()> = OnceLock::new();

/// Has each thread that polls relays call `start` first, to drop what it does not need. Only the
/// first call has an effect.
pub fn at_relay_start(start: fn()) {
    let _ = AT_START.set(start);
}

/// The error for relays that are lost, or have no device.
pub(super) fn relays_lost() -> Error {
    Error::other("cannot resume relayed queues: the guest's driver must reset the device")
}

/// The state that backend and thread share.
#[derive(Debug)]
struct Shared {
    /// The backend requests the relays.
    park: AtomicBool,
    /// Ends a pause of the thread.
    wake: EventFd,
    /// Notifies the backend's event loop that a queue is broken.
    failed: Arc<EventFd>,
    /// Where the device's writes are marked.
    memory: DeviceMemory,
}

/// The relays of one device with the thread that polls them; see the module.
#[derive(Debug)]
pub(super) struct Poller {
    /// `None`: the thread has the relays.
    parked: Option<Box<SvqSet>>,
    /// How each queue reached the device at the last hand-over of the relays.
    strategies: BTreeMap<u16, Strategy>,
    shared: Arc<Shared>,
    /// `None` only during drop: without it the thread ends.
    to: Option<SyncSender<Box<SvqSet>>>,
    from: Receiver<Box<SvqSet>>,
    thread: Option<JoinHandle<()>>,
}

impl Poller {
    /// Creates a parked thread. `failed` is signalled when a queue breaks.
    ///
    /// # Errors
    /// The relays, and the reason why there is no thread.
    pub(super) fn new(
        set: SvqSet,
        memory: &DeviceMemory,
        failed: &Arc<EventFd>,
    ) -> Result<Self, (SvqSet, Error)> {
        match Self::spawn(memory, failed) {
            Ok(mut poller) => {
                poller.strategies = set.strategies().collect();
                poller.parked = Some(Box::new(set));
                Ok(poller)
            }
            Err(error) => {
                let message = "cannot create a thread or eventfd for relayed queues; a limit of \
                               tasks or open files may be too low";
                Err((set, Error::other(message).because(error)))
            }
        }
    }

    /// Spawns a thread without relays.
    fn spawn(memory: &DeviceMemory, failed: &Arc<EventFd>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            park: AtomicBool::new(false),
            wake: vdpa::eventfd::new()?,
            failed: Arc::clone(failed),
            memory: memory.clone(),
        });
        let (to, given) = sync_channel::<Box<SvqSet>>(1);
        let (back, from) = sync_channel(1);
        let seen = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("relay".into())
            .spawn(move || {
                if let Some(start) = AT_START.get() {
                    start();
                }
                while let Ok(mut set) = given.recv() {
                    relay(&mut set, &seen);
                    if back.send(set).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            parked: None,
            strategies: BTreeMap::new(),
            shared,
            to: Some(to),
            from,
            thread: Some(thread),
        })
    }

    /// Stops polling. When this returns, only the caller accesses the relayed queues; a pass in
    /// progress is finished first, which is bounded.
    ///
    /// # Errors
    /// The relays are lost.
    pub(super) fn park(&mut self) -> Result<&mut SvqSet, Error> {
        if self.parked.is_none() {
            self.shared.park.store(true, Ordering::Release);
            signal(&self.shared.wake);
            let set = self.from.recv().map_err(|_| relays_lost())?;
            self.shared.park.store(false, Ordering::Relaxed);
            self.parked = Some(set);
        }
        self.parked.as_deref_mut().ok_or_else(relays_lost)
    }

    /// Starts polling.
    ///
    /// # Errors
    /// The relays are lost.
    pub(super) fn go(&mut self) -> Result<(), Error> {
        let Some(set) = self.parked.take() else {
            return Ok(());
        };
        self.strategies = set.strategies().collect();
        let sent = self.to.as_ref().map(|to| to.send(set));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(relays_lost()),
        }
    }

    /// Returns how a queue reaches the device. A change in progress counts only after
    /// [`Poller::go`].
    pub(super) fn strategy(&self, queue: u16) -> Option<Strategy> {
        self.strategies.get(&queue).copied()
    }

    /// Returns how all queues reach the device.
    pub(super) fn strategies(&self) -> Vec<(u16, Strategy)> {
        let strategies = self.strategies.iter();
        strategies
            .map(|(&queue, &strategy)| (queue, strategy))
            .collect()
    }

    /// Ends the thread and returns the relays; `None` if they are lost.
    pub(super) fn end(mut self) -> Option<SvqSet> {
        self.park().ok()?;
        self.parked.take().map(|set| *set)
    }
}

impl Drop for Poller {
    /// Ends the thread; when this returns, nothing polls.
    fn drop(&mut self) {
        self.shared.park.store(true, Ordering::Release);
        signal(&self.shared.wake);
        self.to = None;
        // A thread that panicked has reported it itself.
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread of relayed queues panicked");
        }
    }
}

/// Polls until the backend requests the relays.
fn relay(set: &mut SvqSet, shared: &Shared) {
    while !shared.park.load(Ordering::Acquire) {
        match set.poll(&shared.memory) {
            Ok(progress) => rest(set, shared, progress.pause),
            Err(error) => {
                // Its driver has to reset the device; the other queues continue until then.
                tracing::error!(
                    error = &error as &dyn StdError,
                    cause = StdError::source(&error).map(ToString::to_string),
                    "a relayed queue is broken until the device is reset"
                );
                signal(&shared.failed);
            }
        }
    }
    // The signal that woke the thread for this must not wake it again.
    let _ = shared.wake.read();
}

/// Waits for an event that ends a pause, and takes the signals.
fn rest(set: &SvqSet, shared: &Shared, pause: Pause) {
    let limit = match pause {
        Pause::None => return,
        // Pauses are milliseconds; a pause that does not fit is skipped.
        Pause::AtMost(limit) => match Timespec::try_from(limit) {
            Ok(limit) => Some(limit),
            Err(_) => return,
        },
        Pause::Forever => None,
    };
    let events: Vec<&EventFd> = std::iter::once(&shared.wake).chain(set.hints()).collect();
    let mut polled: Vec<PollFd<'_>> = events.iter().map(|event| watched(event)).collect();
    // An interrupted wait causes an early poll.
    if poll(&mut polled, limit.as_ref()).is_err() {
        return;
    }
    for (event, polled) in events.iter().zip(&polled) {
        if polled.revents().contains(PollFlags::IN) {
            // Non-blocking: an error only means that the signal was already taken.
            let _ = event.read();
        }
    }
}

fn watched(event: &EventFd) -> PollFd<'_> {
    PollFd::from_borrowed_fd(vdpa::eventfd::descriptor(event), PollFlags::IN)
}
