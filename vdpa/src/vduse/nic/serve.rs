//! The thread of the device: messages of the kernel, the queues, the tap.
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
use super::features::{Configuration, PAIRS_MAX, is_usable};
use super::receive::{Fault, Receive};
use super::tap::Tap;
use super::transmit::Transmit;
use crate::Error;
use crate::device::VringBase;
use crate::eventfd;
use crate::memory::DeviceMemory;
use crate::ring::{DeviceQueue, GuestRing, RingFeatures};

/// Names of events; a queue's kick has the queue's number.
const TAP: u64 = 1 << 32;
const MESSAGE: u64 = TAP + 1;
const STOP: u64 = TAP + 2;

/// Until the next attempt at an interrupt that came before the kernel had set DRIVER_OK, or at a
/// frame that delays others.
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

/// One queue. Those with even numbers receive, and those with odd numbers transmit.
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
    queues: Vec<Queue>,
    receive: Receive,
    /// There may be a frame for the driver, or a buffer for one.
    is_receiving: bool,
    transmit: Transmit,
}

impl Nic {
    /// The device that was created from this configuration.
    ///
    /// # Errors
    /// The limit of open files is reached, or the configuration is not possible.
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
        let pairs = usize::from(configuration.checked_pairs()?);
        Ok(Self {
            device,
            tap,
            offered: configuration.features(),
            mappings: Mappings::default(),
            memory: None,
            active: None,
            queues: (0..2 * pairs).map(|_| queue()).collect::<Result<_, _>>()?,
            receive: Receive::new(pairs),
            is_receiving: false,
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
        let mut events: Vec<Event> = Vec::with_capacity(self.queues.len() + 3);
        if let Err(error) = self.resume() {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "the NIC waits until its driver resets it");
            self.stop();
        }
        loop {
            let wait = self.wait();
            events.clear();
            match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), wait) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::context("cannot wait for events")(error)),
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return Ok(()),
                    MESSAGE => self.messages()?,
                    TAP => self.is_receiving = true,
                    queue => self.wake(usize::try_from(queue).unwrap_or(usize::MAX)),
                }
            }
            self.turns()?;
        }
    }

    /// The limit of the wait for events.
    fn wait(&self) -> Option<&'static Timespec> {
        let retries = |queue: &Queue| queue.owes_interrupt;
        if self.is_receiving || self.queues.iter().any(|queue| queue.is_awake) {
            Some(&NOW)
        } else if self.is_delayed() || self.queues.iter().any(retries) {
            Some(&RETRY)
        } else {
            None
        }
    }

    /// Whether a frame delays others. Without memory no frame passes anyway.
    fn is_delayed(&self) -> bool {
        self.memory.is_some() && self.receive.is_delayed()
    }

    fn wake(&mut self, index: usize) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.is_awake = true;
        }
        if let Some(receives) = receives(index) {
            self.receive.kicked(receives);
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
        for index in 0..self.queues.len() {
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
        for number in (0..).take(self.queues.len()) {
            is_used |= self.device.queue(number, packed)?.ready;
        }
        if !is_used || !is_usable(features, self.offered) {
            return Ok(());
        }
        self.tap.set_offloads(features)?;
        self.memory = self.mappings.read(&self.device)?;
        self.active = Some(features);
        for index in 0..self.queues.len() {
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
        self.receive.stop();
        self.is_receiving = false;
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
        let number = number(index);
        // Also for a queue that is not enabled: its first kick shows that it is.
        self.device.set_kick(number, &queue.kick)?;
        let info = self.device.queue(number, packed)?;
        if !info.ready {
            return Ok(());
        }
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
        if let Some(receives) = receives(index) {
            let mergeable = features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
            let packed = features & 1 << VIRTIO_F_RING_PACKED != 0;
            let is_in_use = info.base != VringBase::initial(packed);
            self.receive.restart(receives, mergeable, size, is_in_use);
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
        for index in 0..self.queues.len() {
            if let Err(error) = self.place(index) {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, queue = index, "the driver has unmapped a ring");
            }
        }
        Ok(())
    }

    /// One turn of each queue that may have work. Receive queues share theirs, which precedes that
    /// of each transmit queue.
    fn turns(&mut self) -> Result<(), Error> {
        self.is_receiving |= self.is_delayed();
        for index in 0..self.queues.len() {
            self.enter(index);
            match receives(index) {
                Some(_) => self.receive()?,
                None => self.transmit(index)?,
            }
        }
        for index in 0..self.queues.len() {
            self.interrupt(index)?;
        }
        Ok(())
    }

    /// Takes over a queue that was enabled after DRIVER_OK, which only its kick shows.
    fn enter(&mut self, index: usize) {
        if let Some(queue) = self.queues.get(index)
            && queue.is_awake
            && queue.info.is_none()
            && !queue.is_broken
            && let Err(error) = self.take_over(index, Begin::AtBase)
        {
            self.broken(index, &error);
        }
        if let Some(queue) = self.queues.get_mut(index)
            && receives(index).is_some()
        {
            self.is_receiving |= std::mem::take(&mut queue.is_awake);
        }
    }

    /// A turn of the receive queues.
    fn receive(&mut self) -> Result<(), Error> {
        let is_receiving = std::mem::take(&mut self.is_receiving);
        let (true, Some(memory)) = (is_receiving, &self.memory) else {
            return Ok(());
        };
        let mut rings = [const { None }; PAIRS_MAX as usize];
        for (ring, queue) in rings.iter_mut().zip(self.queues.iter_mut().step_by(2)) {
            *ring = queue.ring.as_mut();
        }
        match self.receive.turn(&mut rings, memory, &self.tap) {
            Ok(again) => self.is_receiving = again,
            Err(Fault::Ring(receives, error)) => {
                self.broken(2 * receives, &error);
                self.is_receiving = true;
            }
            Err(Fault::Tap(error)) => return Err(error),
        }
        for index in (0..self.queues.len()).step_by(2) {
            if self.receive.take_interrupt(index / 2)
                && let Some(queue) = self.queues.get_mut(index)
            {
                queue.owes_interrupt = true;
                self.interrupt(index)?;
            }
        }
        Ok(())
    }

    /// A turn of a transmit queue.
    fn transmit(&mut self, index: usize) -> Result<(), Error> {
        let Some(queue) = self.queues.get_mut(index) else {
            return Ok(());
        };
        let is_awake = std::mem::take(&mut queue.is_awake);
        let (true, Some(ring), Some(memory)) = (is_awake, &mut queue.ring, &self.memory) else {
            return Ok(());
        };
        match self.transmit.turn(ring, memory, &self.tap) {
            Ok(turn) => {
                queue.is_awake = turn.again;
                queue.owes_interrupt |= turn.interrupt;
            }
            Err(error) => self.broken(index, &error),
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
            queue.owes_interrupt = !self.device.interrupt(number(index))?;
        }
        Ok(())
    }
}

/// The kernel's number of a queue. There are few, so it fits.
fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// The number of a queue among the receive queues, if it is one.
fn receives(index: usize) -> Option<usize> {
    index.is_multiple_of(2).then_some(index / 2)
}

/// Where a queue's ring is, or continues.
fn position(queue: &Queue) -> Option<VringBase> {
    match &queue.ring {
        Some(ring) => Some(ring.base().at_used()),
        None => queue.info.map(|info| info.base),
    }
}
