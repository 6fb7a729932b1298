//! The thread of the device: messages of the kernel, the two queues, the tap.
//!
//! ```text
//!            DRIVER_OK: memory, rings           reset
//!   idle ------------------------------> active -----> idle
//!                                        |    ^
//!     UPDATE_IOTLB: rings leave, new memory,  |
//!                   rings at their positions -+
//! ```
//! A process that follows another one begins active if the driver uses the device. Each message is
//! handled between two turns of the queues. A ring that is not mapped at the moment waits for the
//! next change of the mappings.

use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_F_RING_PACKED,
};
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use vmm_sys_util::eventfd::EventFd;

use super::super::{Device, Mappings, Message, QueueInfo, Request};
use super::features::{Configuration, QUEUES, is_usable};
use super::receive::{Fault, Receive};
use super::tap::Tap;
use super::transmit::Transmit;
use crate::Error;
use crate::device::VringBase;
use crate::eventfd;
use crate::memory::DeviceMemory;
use crate::ring::{DeviceQueue, GuestRing, RingFeatures};

const RECEIVE: usize = 0;

/// Names of events; a queue's kick has the queue's number.
const TAP: u64 = 16;
const MESSAGE: u64 = 17;
const STOP: u64 = 18;

/// Until the next attempt at an interrupt that came before the kernel had set DRIVER_OK.
const RETRY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Where a queue's ring begins.
#[derive(Debug, Clone, Copy)]
enum Begin {
    /// At the base that the driver's side set.
    AtBase,
    /// At the position that the ring shows, for the successor of another process.
    WhereTheRingIs,
}

/// One queue.
#[derive(Debug)]
struct Queue {
    kick: EventFd,
    /// What the driver set, with the position where the ring continues.
    info: Option<QueueInfo>,
    ring: Option<DeviceQueue>,
    /// The driver broke the ring.
    is_broken: bool,
    /// There may be work.
    is_awake: bool,
    /// An interrupt could not be sent yet.
    owes_interrupt: bool,
}

impl Queue {
    /// Takes the ring away, and keeps its position.
    fn leave(&mut self) {
        if let (Some(ring), Some(info)) = (self.ring.take(), &mut self.info) {
            info.base = ring.base().at_used();
        }
    }
}

/// A network device that serves its driver.
#[derive(Debug)]
pub struct Nic {
    device: Device,
    tap: Tap,
    offered: u64,
    mappings: Mappings,
    memory: Option<DeviceMemory>,
    /// The negotiated features, between DRIVER_OK and reset.
    active: Option<u64>,
    queues: [Queue; QUEUES],
    receive: Receive,
    transmit: Transmit,
}

impl Nic {
    /// The device that was created from this configuration.
    ///
    /// # Errors
    /// The limit of open files is reached.
    pub fn new(device: Device, tap: Tap, configuration: &Configuration) -> Result<Self, Error> {
        let queue = || -> Result<Queue, Error> {
            Ok(Queue {
                kick: eventfd::new().map_err(Error::context("cannot create an eventfd"))?,
                info: None,
                ring: None,
                is_broken: false,
                is_awake: false,
                owes_interrupt: false,
            })
        };
        Ok(Self {
            device,
            tap,
            offered: configuration.features(),
            mappings: Mappings::default(),
            memory: None,
            active: None,
            queues: [queue()?, queue()?],
            receive: Receive::new(),
            transmit: Transmit::new(),
        })
    }

    /// Serves the device until `stop` is readable. A driver that uses it already had another
    /// process before, and does not notice the change.
    ///
    /// # Errors
    /// The kernel declared the device broken, or the tap is deleted.
    pub fn serve(&mut self, stop: BorrowedFd<'_>) -> Result<(), Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(Error::context("no epoll"))?;
        let add = |fd, name, flags| {
            let added = epoll::add(&epoll, fd, EventData::new_u64(name), flags);
            added.map_err(Error::context("cannot wait for events"))
        };
        // Each event of these is reported once, so nothing is read to clear it.
        let edge = EventFlags::IN | EventFlags::ET;
        add(self.tap.as_fd(), TAP, edge)?;
        for (name, queue) in (0..).zip(&self.queues) {
            add(eventfd::descriptor(&queue.kick), name, edge)?;
        }
        add(self.device.as_fd(), MESSAGE, EventFlags::IN)?;
        add(stop, STOP, EventFlags::IN)?;
        let mut events: Vec<Event> = Vec::with_capacity(8);
        if let Err(error) = self.resume() {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "the NIC waits until its driver resets it");
            self.stop();
        }
        loop {
            let wait = if self.queues.iter().any(|queue| queue.is_awake) {
                Some(&NOW)
            } else if self.queues.iter().any(|queue| queue.owes_interrupt) {
                Some(&RETRY)
            } else {
                None
            };
            events.clear();
            match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), wait) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::context("cannot wait for events")(error)),
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return Ok(()),
                    MESSAGE => self.messages()?,
                    TAP => self.wake(RECEIVE),
                    queue => self.wake(usize::try_from(queue).unwrap_or(QUEUES)),
                }
            }
            for index in 0..QUEUES {
                self.turn(index)?;
            }
        }
    }

    fn wake(&mut self, index: usize) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.is_awake = true;
        }
    }

    fn messages(&mut self) -> Result<(), Error> {
        while let Some(message) = self.device.message()? {
            let (done, base) = self.handle(&message);
            // The process that waited may have been killed. That does not concern the others.
            if let Err(error) = self.device.answer(&message, done, base) {
                let error: &dyn std::error::Error = &error;
                tracing::debug!(error, "the kernel takes no answer");
            }
        }
        Ok(())
    }

    /// The answer to a message.
    fn handle(&mut self, message: &Message) -> (bool, Option<VringBase>) {
        let done = match message.request {
            Request::QueueState { index } => {
                let queue = usize::try_from(index)
                    .ok()
                    .and_then(|index| self.queues.get(index));
                return (queue.is_some(), queue.and_then(position));
            }
            Request::SetStatus(0) => {
                self.stop();
                Ok(())
            }
            Request::SetStatus(status) => self.set_status(status.into()),
            Request::UpdateIotlb => self.change_memory(),
            Request::Unknown => Err(Error::other("the kernel sent an unknown message")),
        };
        if let Err(error) = &done {
            let error: &dyn std::error::Error = error;
            tracing::warn!(error, request = ?message.request, "the NIC rejects a request");
        }
        (done.is_ok(), None)
    }

    fn set_status(&mut self, status: u32) -> Result<(), Error> {
        let is_set = |bit: u32| status & bit != 0;
        if !is_set(VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK) || self.active.is_some()
        {
            return Ok(());
        }
        let features = self.device.features()?;
        if !is_usable(features, self.offered) {
            return Err(Error::other(format!(
                "a driver with features {features:#x} cannot use the NIC, which offers {:#x}: it \
                 needs VERSION_1 and ACCESS_PLATFORM",
                self.offered
            )));
        }
        if is_set(VIRTIO_CONFIG_S_DRIVER_OK) {
            let started = self.start(features);
            if started.is_err() {
                self.stop();
            }
            return started;
        }
        Ok(())
    }

    fn start(&mut self, features: u64) -> Result<(), Error> {
        self.tap.start(features, self.receive.buffer())?;
        self.memory = self.mappings.read(&self.device)?;
        self.active = Some(features);
        for index in 0..QUEUES {
            self.take_over(index, Begin::AtBase)?;
        }
        Ok(())
    }

    /// Continues for a driver that uses the device already: it has enabled a queue, which a reset
    /// disables. The rings show the position of the process before. Frames that it had taken
    /// and not returned are taken again.
    fn resume(&mut self) -> Result<(), Error> {
        let features = self.device.features()?;
        let packed = features & 1 << VIRTIO_F_RING_PACKED != 0;
        let mut is_used = false;
        for number in (0..).take(QUEUES) {
            is_used |= self.device.queue(number, packed)?.ready;
        }
        if !is_used || !is_usable(features, self.offered) {
            return Ok(());
        }
        self.tap.set_offloads(features)?;
        self.memory = self.mappings.read(&self.device)?;
        self.active = Some(features);
        for index in 0..QUEUES {
            if let Err(error) = self.take_over(index, Begin::WhereTheRingIs) {
                self.broken(index, &error);
            }
            if let Some(queue) = self.queues.get_mut(index) {
                // The process before may not have sent its last one.
                queue.owes_interrupt = queue.ring.is_some();
            }
        }
        Ok(())
    }

    /// Stops all use of the driver's memory.
    fn stop(&mut self) {
        for queue in &mut self.queues {
            queue.ring = None;
            queue.info = None;
            queue.is_broken = false;
            queue.is_awake = false;
            queue.owes_interrupt = false;
        }
        self.active = None;
        self.memory = None;
        self.mappings.clear();
    }

    /// Takes over a queue if the driver has enabled it.
    fn take_over(&mut self, index: usize, begin: Begin) -> Result<(), Error> {
        let (Some(features), Some(queue)) = (self.active, self.queues.get_mut(index)) else {
            return Ok(());
        };
        let packed = features & 1 << VIRTIO_F_RING_PACKED != 0;
        // Two queues, so it fits.
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        let info = self.device.queue(number, packed)?;
        if !info.ready {
            return Ok(());
        }
        self.device.set_kick(number, &queue.kick)?;
        let base = match begin {
            Begin::AtBase => info.base.at_used(),
            Begin::WhereTheRingIs => self.ring(&info, features)?.used_position()?,
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

    /// Serves a queue's ring from its position on.
    fn place(&mut self, index: usize) -> Result<(), Error> {
        let (Some(features), Some(queue)) = (self.active, self.queues.get(index)) else {
            return Ok(());
        };
        let (Some(info), false) = (queue.info, queue.is_broken) else {
            return Ok(());
        };
        let ring = self.ring(&info, features)?;
        let size = ring.size();
        let ring = DeviceQueue::new(ring, info.base, RingFeatures::of(features))?;
        if index == RECEIVE {
            let mergeable = features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
            self.receive.restart(mergeable, size);
        }
        if let Some(queue) = self.queues.get_mut(index) {
            queue.ring = Some(ring);
            queue.is_awake = true;
        }
        Ok(())
    }

    /// The rings leave the old memory before the answer, and continue in the new one.
    fn change_memory(&mut self) -> Result<(), Error> {
        if self.active.is_none() {
            return Ok(());
        }
        self.queues.iter_mut().for_each(Queue::leave);
        self.memory = None;
        self.memory = self.mappings.read(&self.device)?;
        for index in 0..QUEUES {
            if let Err(error) = self.place(index) {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, queue = index, "the driver has unmapped a ring");
            }
        }
        Ok(())
    }

    /// One turn of a queue that may have work.
    fn turn(&mut self, index: usize) -> Result<(), Error> {
        let Some(queue) = self.queues.get(index) else {
            return Ok(());
        };
        if queue.is_awake && queue.info.is_none() && !queue.is_broken {
            // Enabled after DRIVER_OK, which only its kick shows.
            if let Err(error) = self.take_over(index, Begin::AtBase) {
                self.broken(index, &error);
            }
        }
        let Some(queue) = self.queues.get_mut(index) else {
            return Ok(());
        };
        let is_awake = std::mem::take(&mut queue.is_awake);
        let (true, Some(ring), Some(memory)) = (is_awake, &mut queue.ring, &self.memory) else {
            return self.interrupt(index);
        };
        let result = if index == RECEIVE {
            self.receive.turn(ring, memory, &self.tap)
        } else {
            self.transmit.turn(ring, memory, &self.tap)
        };
        match result {
            Ok(turn) => {
                queue.is_awake = turn.again;
                queue.owes_interrupt |= turn.interrupt;
            }
            Err(Fault::Ring(error)) => self.broken(index, &error),
            Err(Fault::Tap(error)) => return Err(error),
        }
        self.interrupt(index)
    }

    /// Stops a queue until the driver resets the device.
    fn broken(&mut self, index: usize, error: &Error) {
        if let Some(queue) = self.queues.get_mut(index) {
            let error: &dyn std::error::Error = error;
            tracing::warn!(
                error,
                queue = index,
                "a queue stops until the driver resets the NIC"
            );
            queue.leave();
            queue.is_broken = true;
        }
    }

    fn interrupt(&mut self, index: usize) -> Result<(), Error> {
        if let Some(queue) = self.queues.get_mut(index)
            && queue.owes_interrupt
        {
            let number = u32::try_from(index).unwrap_or(u32::MAX);
            queue.owes_interrupt = !self.device.interrupt(number)?;
        }
        Ok(())
    }
}

/// Where a queue's ring is, or continues.
fn position(queue: &Queue) -> Option<VringBase> {
    match &queue.ring {
        Some(ring) => Some(ring.base().at_used()),
        None => queue.info.map(|info| info.base),
    }
}
