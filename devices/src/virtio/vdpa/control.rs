//! The control virtqueue between guest and device.
//!
//! The guest's ring ends here; towards the device the VMM has a ring of its own ([`ControlQueue`]).
//! Every command is checked, forwarded, and recorded once the device has carried it out. One
//! command is in progress at a time. A device that filters nothing ([`UNFILTERED`]) has no control
//! queue, and does what any command asks for. The VMM answers for it.
//!
//! ```text
//!            guest kicks: pop, parse            submit
//!   waiting -----------------------> checked ----------> forwarded
//!     ^  ^                              |                  |    |
//!     |  +--- answered ERR: malformed --+     the device   |    | 10 s passed, or
//!     |                                       answered     |    | malformed
//!     +---------- ack byte, used ring, interrupt ----------+    v
//!                                                             broken: every command is
//!                                                             answered ERR, NEEDS_RESET
//! ```
//! Owns both rings and the deadline. One epoll descriptor covers all events, because the guest's
//! control queue can change with each negotiation. It must not know what a command means for the
//! rest of the device.

#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod fuzz;

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vdpa::control_queue::command::{COMMAND_LEN_MAX, GUEST_OFFLOADS};
use vdpa::control_queue::queue::ANSWER_TIMEOUT;
use vdpa::control_queue::{Answer, Command, ControlQueue, ControlState, Limits, Placement};
use vdpa::device::Device;
use vdpa::iotlb::Iotlb;
use vdpa::memory::DeviceMemory;
#[cfg(doc)]
use vdpa::netdev::UNFILTERED;
use vdpa::ring::{Chain, Piece, RingFeatures};
use vdpa::window::PrivateWindow;
use virtio_bindings::virtio_net::{VIRTIO_NET_ERR, VIRTIO_NET_OK};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::timerfd::TimerFd;

use super::eventfd::EVENTFD;
use super::offer::Negotiation;
use super::rings::WINDOW;
use super::saved::SavedControl;
use crate::Error;
use crate::virtio::backend::Queue;
use crate::virtio::userspace_queue::{SavedQueue, UserspaceQueue};

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::control_anything;

/// How often a caller that needs an answer polls for it.
const ANSWER_POLL: Duration = Duration::from_micros(100);

/// Commands served before the event loop gets its turn.
const COMMANDS_PER_TURN: usize = 32;

const NOT_MAPPED: &str = "cannot map the control queue for the device";

/// For `map_err`: the VMM's control queue failed.
fn failed(source: vdpa::Error) -> Error {
    Error::other("the control queue does not work").because(source)
}

/// For `map_err`: the guest's control queue is malformed.
fn not_served(source: Error) -> Error {
    Error::other("cannot serve the guest's control queue").because(source)
}

/// The result of [`Control::serve`].
#[derive(Debug, Default)]
pub(super) struct Done {
    /// Commands that the device or the VMM itself carried out.
    pub(super) commands: Vec<Command>,
    /// The device or the guest's ring has just broken a rule.
    pub(super) broken: bool,
}

/// A command that was forwarded to the device.
#[derive(Debug)]
struct Forwarded {
    /// The ID of the guest's chain.
    id: u16,
    ack: Option<Piece>,
    command: Command,
    /// When to stop waiting for the answer.
    deadline: Instant,
}

/// The guest's side, while its driver runs.
#[derive(Debug)]
struct Guest {
    queue: UserspaceQueue,
    memory: DeviceMemory,
    forwarded: Option<Forwarded>,
}

/// The control virtqueue of one device; see the module.
#[derive(Debug)]
pub(super) struct Control {
    /// The VMM's ring to the device; `None`: the device needs no command.
    queue: Option<ControlQueue>,
    /// The address space in which `queue` is mapped.
    mapped: Option<u32>,
    state: ControlState,
    /// The negotiated limits; `None` while the device is not started.
    limits: Option<Limits>,
    guest: Option<Guest>,
    broken: bool,
    /// Wakes the event loop when the forwarded command's deadline passes.
    timer: TimerFd,
    epoll: Epoll,
}

impl Control {
    /// Creates a control queue with its memory in `window`.
    pub(super) fn new(window: &mut PrivateWindow) -> Result<Self, Error> {
        let size = ControlQueue::memory_size().map_err(failed)?;
        let iova = window.allocate(size).map_err(Error::context(WINDOW))?;
        let queue = ControlQueue::new(iova, RingFeatures::default()).map_err(failed)?;
        let control = Self::without_device()?;
        control.watch(ControlOperation::Add, queue.call().as_raw_fd())?;
        Ok(Self {
            queue: Some(queue),
            ..control
        })
    }

    /// Creates a control queue for a device that needs no command.
    pub(super) fn without_device() -> Result<Self, Error> {
        let timer = TimerFd::new().map_err(Error::context(EVENTFD))?;
        let epoll = Epoll::new().map_err(Error::context(EVENTFD))?;
        let control = Self {
            queue: None,
            mapped: None,
            state: ControlState::new(),
            limits: None,
            guest: None,
            broken: false,
            timer,
            epoll,
        };
        control.watch(ControlOperation::Add, control.timer.as_raw_fd())?;
        Ok(control)
    }

    fn watch(&self, operation: ControlOperation, fd: RawFd) -> Result<(), Error> {
        let event = EpollEvent::new(EventSet::IN, 0);
        self.epoll
            .ctl(operation, fd, event)
            .map_err(Error::context(EVENTFD))
    }

    /// Maps the VMM's ring, and sets it up and enables it as queue `index` of the device.
    pub(super) fn start(
        &mut self,
        device: &mut Device,
        iotlb: &mut Iotlb,
        index: u16,
        negotiation: &Negotiation,
    ) -> Result<(), Error> {
        self.limits = Some(negotiation.limits);
        let Some(queue) = &mut self.queue else {
            return Ok(());
        };
        let placement = Placement::choose(device.info(), device.backend_features(), index);
        let asid = placement.asid();
        if let Some(other) = self.mapped.take_if(|mapped| *mapped != asid) {
            let unmapped = queue.unmap(iotlb, other);
            unmapped.map_err(Error::context(NOT_MAPPED))?;
        }
        if self.mapped.is_none() {
            queue.map(iotlb, asid).map_err(Error::context(NOT_MAPPED))?;
            self.mapped = Some(asid);
        }
        if let Placement::OwnAddressSpace { group, asid } = placement {
            device.set_group_asid(group, asid)?;
        }
        queue.restart(negotiation.ring()).map_err(failed)?;
        device.set_vring(index, &queue.vring_config(), &[queue.range()])?;
        Ok(device.enable_vring(index)?)
    }

    /// Sends commands of the VMM and waits for each answer. The state keeps those that the guest
    /// could have sent: on another device the VMM sends its own again.
    pub(super) fn replay(&mut self, commands: &[Command]) -> Result<(), Error> {
        for command in commands {
            let answer = match &mut self.queue {
                Some(queue) => queue.execute(command, ANSWER_TIMEOUT).map_err(failed)?,
                None => self.carry_out(command),
            };
            match answer {
                Answer::Ok if self.is_guests(command) => self.state.acknowledge(command),
                Answer::Ok => {}
                Answer::Err => {
                    return Err(Error::other(format!(
                        "the device refused to restore its former state: {command:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    fn is_guests(&self, command: &Command) -> bool {
        let bytes = command.encode();
        let limits = self.limits.as_ref();
        bytes.is_ok_and(|bytes| limits.is_some_and(|limits| Command::parse(&bytes, limits).is_ok()))
    }

    /// Serves the guest's queue from now on, from the position in `saved` if there is one.
    pub(super) fn serve_guest(
        &mut self,
        queue: Queue,
        saved: Option<SavedQueue>,
        max_size: u16,
        ring: RingFeatures,
        memory: &DeviceMemory,
    ) -> Result<(), Error> {
        let shared = memory.clone();
        let queue = match saved {
            None => UserspaceQueue::new(queue, max_size, ring, shared),
            Some(saved) => UserspaceQueue::restore(queue, saved, max_size, ring, shared),
        };
        let queue = queue.map_err(not_served)?;
        self.watch(ControlOperation::Add, queue.kick().fd())?;
        self.guest = Some(Guest {
            queue,
            memory: memory.clone(),
            forwarded: None,
        });
        Ok(())
    }

    /// Forgets the guest and its settings. The caller resets the device.
    pub(super) fn stop(&mut self) {
        self.release_guest();
        self.state = ControlState::new();
        self.limits = None;
        self.broken = false;
        self.disarm();
    }

    /// Stops serving the guest but keeps its settings: a suspended device answers no command.
    pub(super) fn release_guest(&mut self) {
        if let Some(guest) = self.guest.take()
            && let Err(error) = self.watch(ControlOperation::Delete, guest.queue.kick().fd())
        {
            tracing::error!(%error, "a kick eventfd stays in the epoll set");
        }
    }

    pub(super) fn set_call(&mut self, call: Option<Arc<EventFd>>) {
        if let Some(guest) = &mut self.guest {
            guest.queue.set_call(call);
        }
    }

    /// The device is broken and will not answer: from now on every command of the guest is answered
    /// ERR.
    pub(super) fn give_up_on_device(&mut self) {
        self.broken = true;
        // The forwarded command and the waiting ones are answered at the next turn.
        self.take_another_turn();
    }

    /// Kicks the device again: it was suspended and may have missed the kick of a command.
    pub(super) fn spurious_notify(&self) {
        if let Some(queue) = &self.queue {
            queue.spurious_notify();
        }
    }

    /// Does all work that is possible now; never blocks. Must be called when the descriptor is
    /// readable.
    pub(super) fn serve(&mut self) -> Done {
        let mut done = Done::default();
        let was_broken = self.broken;
        if let Err(error) = self.turn(&mut done) {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "the control queue is broken until the next reset"
            );
            self.broken = true;
            // The other commands of the guest must be answered too.
            self.take_another_turn();
        }
        done.broken = self.broken && !was_broken;
        done
    }

    fn turn(&mut self, done: &mut Done) -> Result<(), Error> {
        if let Some(guest) = &self.guest {
            guest.queue.kick().drain();
        }
        for _ in 0..COMMANDS_PER_TURN {
            if !self.take_answer(done)? || !self.take_command(done)? {
                return Ok(());
            }
        }
        self.take_another_turn();
        Ok(())
    }

    /// Makes the event loop call [`Control::serve`] once more.
    fn take_another_turn(&self) {
        if let Some(guest) = &self.guest {
            guest.queue.kick().again();
        }
    }

    /// Answers the forwarded command if possible. Returns `true` if none is in progress.
    fn take_answer(&mut self, done: &mut Done) -> Result<bool, Error> {
        if self.broken {
            return self.give_up().map(|()| true);
        }
        let Some(queue) = &mut self.queue else {
            return Ok(true);
        };
        let polled = queue.poll();
        let Some(forwarded) = self.take_forwarded() else {
            return polled.map(|_| true).map_err(failed);
        };
        if matches!(polled, Ok(None)) && Instant::now() < forwarded.deadline {
            if let Some(guest) = &mut self.guest {
                guest.forwarded = Some(forwarded);
            }
            return Ok(false);
        }
        self.disarm();
        let answer = match polled {
            Ok(Some(answer)) => answer,
            Ok(None) | Err(_) => Answer::Err,
        };
        self.answer(forwarded.id, forwarded.ack, answer)?;
        if polled.map_err(failed)?.is_none() {
            self.broken = true;
            tracing::error!(
                command = ?forwarded.command,
                "the device did not answer a control command within {ANSWER_TIMEOUT:?}"
            );
        } else if answer == Answer::Ok {
            self.state.acknowledge(&forwarded.command);
            done.commands.push(forwarded.command);
        }
        Ok(true)
    }

    fn take_forwarded(&mut self) -> Option<Forwarded> {
        self.guest.as_mut()?.forwarded.take()
    }

    /// Cleans up after a device that broke a rule: answers the command that it had, and stops
    /// listening.
    fn give_up(&mut self) -> Result<(), Error> {
        self.disarm();
        if let Some(queue) = &self.queue {
            // An untaken signal would wake the event loop for ever. The error is EAGAIN: there was
            // no signal.
            let _ = queue.call().read();
        }
        match self.take_forwarded() {
            Some(forwarded) => self.answer(forwarded.id, forwarded.ack, Answer::Err),
            None => Ok(()),
        }
    }

    /// Takes the guest's next command. Returns `false` if there is none.
    fn take_command(&mut self, done: &mut Done) -> Result<bool, Error> {
        let Some(guest) = &mut self.guest else {
            return Ok(false);
        };
        let Some(chain) = guest.queue.pop().map_err(not_served)? else {
            return guest.queue.arm().map_err(not_served);
        };
        let ack = chain.split().1.first().copied();
        let command = self.limits.and_then(|limits| {
            let bytes = read_command(&chain, &guest.memory)?;
            match Command::parse(&bytes, &limits) {
                Ok(command) => Some(command),
                Err(error) => {
                    tracing::debug!(%error, "refusing a control command");
                    None
                }
            }
        });
        match command {
            _ if self.broken => self.answer(chain.id, ack, Answer::Err)?,
            None => self.answer(chain.id, ack, Answer::Err)?,
            // Carried out by the VMM: nothing is sent to the device.
            Some(Command::AnnounceAck) => {
                done.commands.push(Command::AnnounceAck);
                self.answer(chain.id, ack, Answer::Ok)?;
            }
            Some(command) => {
                let Some(queue) = &mut self.queue else {
                    let answer = self.carry_out(&command);
                    if answer == Answer::Ok {
                        self.state.acknowledge(&command);
                        done.commands.push(command);
                    }
                    self.answer(chain.id, ack, answer)?;
                    return Ok(true);
                };
                guest.forwarded = Some(Forwarded {
                    id: chain.id,
                    ack,
                    command: command.clone(),
                    deadline: Instant::now() + ANSWER_TIMEOUT,
                });
                queue.submit(&command).map_err(failed)?;
                let timer = self.timer.reset(ANSWER_TIMEOUT, None);
                timer.map_err(Error::context(EVENTFD))?;
            }
        }
        Ok(true)
    }

    /// Answers for a device that needs no command. Its offloads are those of the negotiation.
    fn carry_out(&self, command: &Command) -> Answer {
        let features = self.limits.map_or(0, |limits| limits.features);
        match command {
            Command::GuestOffloadsSet(offloads) if *offloads != features & GUEST_OFFLOADS => {
                Answer::Err
            }
            _ => Answer::Ok,
        }
    }

    /// Returns the guest's chain with an ack, and interrupts.
    fn answer(&mut self, id: u16, ack: Option<Piece>, answer: Answer) -> Result<(), Error> {
        let Some(guest) = &mut self.guest else {
            return Ok(());
        };
        let byte = match answer {
            Answer::Ok => VIRTIO_NET_OK,
            Answer::Err => VIRTIO_NET_ERR,
        };
        let [byte, ..] = byte.to_le_bytes();
        let written = ack.is_some_and(|ack| {
            let ack = GuestAddress(ack.iova.0);
            guest.memory.write_obj(byte, ack).is_ok()
        });
        let used = guest.queue.push_used(id, u32::from(written));
        used.and_then(|()| guest.queue.signal_used())
            .map_err(not_served)
    }

    fn disarm(&mut self) {
        if let Err(error) = self.timer.clear() {
            tracing::error!(%error, "cannot stop a timer");
        }
    }

    /// Waits until no command is in progress, for at most its deadline. Returns the commands that
    /// the device carried out meanwhile. The caller holds the transport's lock. So a device that
    /// does not answer delays requests and a stop by at most [`ANSWER_TIMEOUT`]; then it is broken.
    pub(super) fn finish(&mut self) -> Result<Vec<Command>, Error> {
        let mut done = Done::default();
        while !self.take_answer(&mut done)? {
            std::thread::sleep(ANSWER_POLL);
        }
        Ok(done.commands)
    }

    pub(super) fn save(&self) -> SavedControl {
        SavedControl {
            state: self.state.clone(),
            guest: self.guest.as_ref().map(|guest| guest.queue.save()),
        }
    }
}

impl AsRawFd for Control {
    /// Readable whenever [`Control::serve`] has something to do.
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

/// Returns the bytes of a command; `None` if it is longer than any command.
fn read_command(chain: &Chain, memory: &DeviceMemory) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for piece in chain.split().0 {
        let len = usize::try_from(piece.len).ok()?;
        let start = bytes.len();
        let end = start
            .checked_add(len)
            .filter(|&end| end <= COMMAND_LEN_MAX)?;
        bytes.resize(end, 0);
        memory
            .read_slice(&mut bytes[start..], GuestAddress(piece.iova.0))
            .ok()?;
    }
    Some(bytes)
}
