//! A queue pair: a receive queue and a transmit queue of the driver, and the host's end for both.
//!
//! ```text
//!             start, resume           leave                   stop
//!   no rings ---------------> rings ---------> positions ------------> no rings
//!                               ^---- enter ------'
//! ```
//! A ring that is not mapped at the moment waits for the next change of the mappings. The tap's
//! queue gets frames once the driver has filled the receive queue: it is attached from then to the
//! reset.

use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vmm_sys_util::eventfd::EventFd;

use super::super::{Device, QueueInfo};
use super::in_flight::InFlight;
use super::poll::Poll;
use super::port::Port;
use super::receive::{Fault, Receive};
use super::transmit::Transmit;
use crate::Error;
use crate::device::VringBase;
use crate::eventfd;
use crate::memory::DeviceMemory;
use crate::ring::{DeviceQueue, GuestRing, RingFeatures};

/// The queues of a pair, and the names of their kicks.
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// The name of the tap's event.
pub(super) const TAP: u64 = 2;
/// Names of other events begin here.
pub(super) const OTHERS: u64 = 3;

/// Until the next attempt at an interrupt that came before the kernel had set DRIVER_OK.
const RETRY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};
/// No wait.
pub(super) const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};
/// Each event of these is reported once, so nothing is read to clear it.
const EDGE: EventFlags = EventFlags::IN.union(EventFlags::ET);

/// Where a queue's ring begins.
#[derive(Debug, Clone, Copy)]
enum Begin {
    /// At the base that the driver's side set.
    AtBase,
    /// At the position that the ring shows, for the successor of another process.
    WhereTheRingIs,
}

#[derive(Debug)]
struct Queue {
    kick: EventFd,
    /// What the driver set, with the position where the ring continues.
    info: Option<QueueInfo>,
    ring: Option<DeviceQueue>,
    /// The driver broke the ring.
    is_broken: bool,
    /// There may be work. Of the receive queue: a frame, or a buffer for one.
    is_awake: bool,
    /// An interrupt could not be sent yet.
    owes_interrupt: bool,
}

impl Queue {
    fn new() -> Result<Self, Error> {
        Ok(Self {
            kick: eventfd::new().map_err(Error::context("cannot create an eventfd"))?,
            info: None,
            ring: None,
            is_broken: false,
            is_awake: false,
            owes_interrupt: false,
        })
    }

    /// Takes the ring away, and keeps its position.
    fn leave(&mut self) {
        if let (Some(ring), Some(info)) = (self.ring.take(), &mut self.info) {
            info.base = ring.base().at_used();
        }
    }
}

/// A pair, which one thread serves.
#[derive(Debug)]
pub(super) struct Pair {
    /// The kernel's number of the receive queue. The transmit queue has the next one.
    first: u32,
    port: Port,
    /// The tap's queue gets frames.
    is_attached: bool,
    /// The driver's memory. Without it no ring is in use.
    memory: Option<DeviceMemory>,
    /// The negotiated features, between DRIVER_OK and reset.
    features: Option<u64>,
    queues: [Queue; 2],
    receive: Receive,
    transmit: Transmit,
    poll: Option<Poll>,
    /// The thread looks for work without kicks of the driver.
    is_polling: bool,
}

impl Pair {
    pub(super) fn new(
        number: u32,
        port: Port,
        in_flight: InFlight,
        poll_percent: u8,
    ) -> Result<Self, Error> {
        Ok(Self {
            first: number.saturating_mul(2),
            port,
            is_attached: false,
            memory: None,
            features: None,
            queues: [Queue::new()?, Queue::new()?],
            receive: Receive::new(),
            transmit: Transmit::new(in_flight),
            poll: (poll_percent > 0).then(|| Poll::new(poll_percent, Instant::now())),
            is_polling: false,
        })
    }

    /// The events of the pair's thread, with the kicks. The tap's follow when it is attached.
    pub(super) fn epoll(&self) -> Result<OwnedFd, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(Error::context("no epoll"))?;
        for (name, queue) in (0..).zip(&self.queues) {
            let kick = eventfd::descriptor(&queue.kick);
            epoll::add(&epoll, kick, EventData::new_u64(name), EDGE).map_err(cannot_wait())?;
        }
        Ok(epoll)
    }

    /// Begins for a driver with these features, and takes over the queues that it has enabled.
    pub(super) fn start(
        &mut self,
        device: &Device,
        features: u64,
        memory: Option<DeviceMemory>,
    ) -> Result<(), Error> {
        self.port.start(features, self.receive.buffer())?;
        self.features = Some(features);
        self.memory = memory;
        self.take_over(RECEIVE, device, Begin::AtBase)?;
        self.take_over(TRANSMIT, device, Begin::AtBase)
    }

    /// Continues for a driver that had another process before. The rings show the position of that
    /// process. Chains that it had taken and not returned are taken again.
    pub(super) fn resume(
        &mut self,
        device: &Device,
        features: u64,
        memory: Option<DeviceMemory>,
    ) -> Result<(), Error> {
        self.port.set_offloads(features)?;
        self.transmit.resume();
        self.features = Some(features);
        self.memory = memory;
        for index in [RECEIVE, TRANSMIT] {
            if let Err(error) = self.take_over(index, device, Begin::WhereTheRingIs) {
                self.broken(index, &error)?;
            }
            if let Some(queue) = self.queues.get_mut(index) {
                // The process before may not have sent its last one.
                queue.owes_interrupt = queue.ring.is_some();
            }
        }
        Ok(())
    }

    /// Stops all use of the driver's memory.
    pub(super) fn stop(&mut self) {
        for queue in &mut self.queues {
            queue.ring = None;
            queue.info = None;
            queue.is_broken = false;
            queue.is_awake = false;
            queue.owes_interrupt = false;
        }
        self.receive.stop();
        self.transmit.stop();
        if let Err(error) = self.port.set_attached(false) {
            // A reset does not need the tap.
            let error: &dyn std::error::Error = &error;
            tracing::debug!(error, "a queue of the tap stays attached");
        }
        self.is_attached = false;
        self.features = None;
        self.memory = None;
    }

    /// The rings leave the memory, and keep their positions.
    pub(super) fn leave(&mut self) {
        self.queues.iter_mut().for_each(Queue::leave);
        self.memory = None;
    }

    /// The rings continue in this memory.
    pub(super) fn enter(&mut self, memory: Option<DeviceMemory>) {
        self.memory = memory;
        for index in [RECEIVE, TRANSMIT] {
            if let Err(error) = self.place(index) {
                let error: &dyn std::error::Error = &error;
                let queue = self.number(index);
                tracing::warn!(error, queue, "the driver has unmapped a ring");
            }
        }
    }

    /// Where a queue's ring is, or continues. The number is that in the pair.
    pub(super) fn position(&self, index: usize) -> Option<VringBase> {
        let queue = self.queues.get(index)?;
        match &queue.ring {
            Some(ring) => Some(ring.base().at_used()),
            None => queue.info.map(|info| info.base),
        }
    }

    /// Whether the driver broke a ring.
    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn is_broken(&self) -> bool {
        self.queues.iter().any(|queue| queue.is_broken)
    }

    /// The kernel's number of a queue.
    fn number(&self, index: usize) -> u32 {
        self.first.saturating_add(u32::from(index == TRANSMIT))
    }

    /// Takes over a queue if the driver has enabled it.
    fn take_over(&mut self, index: usize, device: &Device, begin: Begin) -> Result<(), Error> {
        let number = self.number(index);
        let (Some(features), Some(queue)) = (self.features, self.queues.get_mut(index)) else {
            return Ok(());
        };
        let packed = features & 1 << VIRTIO_F_RING_PACKED != 0;
        // Also for a queue that is not enabled: its first kick shows that it is.
        device.set_kick(number, &queue.kick)?;
        let info = device.queue(number, packed)?;
        if !info.ready {
            return Ok(());
        }
        let base = match begin {
            Begin::AtBase => info.base.at_used(),
            Begin::WhereTheRingIs => {
                let ring = self.ring(&info, features)?;
                if index == RECEIVE && is_mergeable(features) {
                    ring.restore_unfinished()?;
                }
                ring.used_position()?
            }
        };
        if let Some(queue) = self.queues.get_mut(index) {
            queue.info = Some(QueueInfo { base, ..info });
        }
        self.place(index)
    }

    /// The driver's ring.
    fn ring(&self, info: &QueueInfo, features: u64) -> Result<GuestRing, Error> {
        let memory = self.memory.clone();
        let memory = memory.ok_or_else(|| Error::other("the driver has mapped no memory"))?;
        let size = u16::try_from(info.size);
        let size = size.map_err(Error::context("the driver gave the ring an invalid size"))?;
        GuestRing::new(memory, size, info.addresses, RingFeatures::of(features))
    }

    /// Serves a queue's ring from its position on, and wakes the pair's thread.
    fn place(&mut self, index: usize) -> Result<(), Error> {
        let (Some(features), Some(queue)) = (self.features, self.queues.get(index)) else {
            return Ok(());
        };
        let (Some(info), false) = (queue.info, queue.is_broken) else {
            return Ok(());
        };
        let ring = self.ring(&info, features)?;
        let size = ring.size();
        let ring = DeviceQueue::new(ring, info.base, RingFeatures::of(features))?;
        if index == RECEIVE {
            let mergeable = is_mergeable(features);
            let packed = features & 1 << VIRTIO_F_RING_PACKED != 0;
            let is_in_use = info.base != VringBase::initial(packed);
            self.receive.restart(mergeable, size, is_in_use);
        }
        if let Some(queue) = self.queues.get_mut(index) {
            queue.ring = Some(ring);
            let woken = queue.kick.write(1);
            woken.map_err(Error::context("cannot wake the thread of a queue"))?;
        }
        Ok(())
    }

    /// An event of the pair's thread.
    pub(super) fn event(&mut self, name: u64) {
        let index = usize::try_from(name).unwrap_or(usize::MAX);
        if let Some(queue) = self.queues.get_mut(index) {
            queue.is_awake = true;
        }
        if index == RECEIVE {
            self.receive.kicked();
        }
        if name == TAP
            && let Some(queue) = self.queues.get_mut(RECEIVE)
        {
            queue.is_awake = true;
        }
    }

    /// One turn of each queue that may have work. Returns the limit of the wait for events.
    pub(super) fn turn(
        &mut self,
        device: &Device,
        epoll: &OwnedFd,
    ) -> Result<Option<&'static Timespec>, Error> {
        let mut found = self.receive(device, epoll)?;
        found |= self.transmit(device)?;
        self.interrupt(RECEIVE, device)?;
        self.interrupt(TRANSMIT, device)?;
        self.port.flush()?;
        self.look_again(found);
        let has = |has: fn(&Queue) -> bool| self.queues.iter().any(has);
        Ok(if has(|queue| queue.is_awake) {
            Some(&NOW)
        } else if self.port.is_unsent() || has(|queue| queue.owes_interrupt) {
            Some(&RETRY)
        } else {
            None
        })
    }

    /// Takes over a queue that was enabled after DRIVER_OK, which only its kick shows. Returns
    /// whether it may have work.
    fn wakes(&mut self, index: usize, device: &Device) -> Result<bool, Error> {
        let Some(queue) = self.queues.get_mut(index) else {
            return Ok(false);
        };
        let is_awake = std::mem::take(&mut queue.is_awake);
        if is_awake
            && queue.info.is_none()
            && !queue.is_broken
            && let Err(error) = self.take_over(index, device, Begin::AtBase)
        {
            self.broken(index, &error)?;
        }
        Ok(is_awake)
    }

    /// A turn of the receive queue. Returns whether there was a frame.
    fn receive(&mut self, device: &Device, epoll: &OwnedFd) -> Result<bool, Error> {
        let is_awake = self.wakes(RECEIVE, device)?;
        let [queue, _] = &mut self.queues;
        let (true, Some(ring), Some(memory)) = (is_awake, &mut queue.ring, &self.memory) else {
            return Ok(false);
        };
        let turn = match self.receive.is_in_use(ring) {
            Ok(false) => return Ok(false),
            Ok(true) => {
                if !self.is_attached {
                    self.port.set_attached(true)?;
                    watch(epoll, &self.port)?;
                    self.is_attached = true;
                }
                self.receive.turn(ring, memory, &mut self.port)
            }
            Err(error) => Err(Fault::Ring(error)),
        };
        match turn {
            Ok(turn) => {
                queue.is_awake = turn.again;
                queue.owes_interrupt |= turn.interrupt;
                self.interrupt(RECEIVE, device)?;
                return Ok(turn.found);
            }
            Err(Fault::Ring(error)) => self.broken(RECEIVE, &error)?,
            Err(Fault::Tap(error)) => return Err(error),
        }
        Ok(false)
    }

    /// A turn of the transmit queue. Returns whether there was a frame.
    fn transmit(&mut self, device: &Device) -> Result<bool, Error> {
        let is_awake = self.wakes(TRANSMIT, device)?;
        let [_, queue] = &mut self.queues;
        let (true, Some(ring), Some(memory)) = (is_awake, &mut queue.ring, &self.memory) else {
            return Ok(false);
        };
        match self
            .transmit
            .turn(ring, memory, &mut self.port, !self.is_polling)
        {
            Ok(turn) => {
                queue.is_awake = turn.again;
                queue.owes_interrupt |= turn.interrupt;
                return Ok(turn.found);
            }
            Err(error) => self.broken(TRANSMIT, &error)?,
        }
        Ok(false)
    }

    /// Looks for work again at once, or asks the driver for a kick, if the thread may poll.
    fn look_again(&mut self, found: bool) {
        let [_, queue] = &mut self.queues;
        let was_polling = self.is_polling;
        self.is_polling = match &mut self.poll {
            Some(poll) if queue.ring.is_some() => poll.after_turn(found, Instant::now()),
            Some(poll) if was_polling => {
                poll.end(Instant::now());
                false
            }
            _ => false,
        };
        queue.is_awake |= self.is_polling || was_polling;
    }

    /// Stops a queue until the driver resets the device. Frames of the pair go to others.
    fn broken(&mut self, index: usize, error: &Error) -> Result<(), Error> {
        let number = self.number(index);
        if let Some(queue) = self.queues.get_mut(index) {
            let error: &dyn std::error::Error = error;
            tracing::warn!(
                error,
                queue = number,
                "a queue stops until the driver resets the NIC"
            );
            queue.leave();
            queue.is_broken = true;
        }
        if index == RECEIVE {
            self.port.set_attached(false)?;
        }
        Ok(())
    }

    fn interrupt(&mut self, index: usize, device: &Device) -> Result<(), Error> {
        let number = self.number(index);
        if let Some(queue) = self.queues.get_mut(index)
            && queue.owes_interrupt
        {
            queue.owes_interrupt = !device.interrupt(number)?;
        }
        Ok(())
    }
}

/// Whether a frame for the driver may take several buffers.
fn is_mergeable(features: u64) -> bool {
    features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0
}

/// Has the thread wait for frames of the tap, too.
fn watch(epoll: &OwnedFd, port: &Port) -> Result<(), Error> {
    match epoll::add(epoll, port, EventData::new_u64(TAP), EDGE) {
        // Since the driver before.
        Err(Errno::EXIST) => Ok(()),
        added => added.map_err(cannot_wait()),
    }
}

/// For `map_err`.
pub(super) fn cannot_wait() -> impl FnOnce(Errno) -> Error {
    Error::context("cannot wait for events")
}
