//! virtio-blk (virtio 1.3, 5.2) on a raw image file.
//!
//! | part | owns |
//! |---|---|
//! | [`disk`] | the open file, its size |
//! | [`lock`] | its lock, and other holders |
//! | `request` | the layout of requests and the checks on them |
//! | `engine` | the operations in flight |
//! | [`rings`] | the io_urings of this process |
//! | [`limit`] | limits of bytes and requests per second |
//! | `translated` | the end of requests in flight before the guest's IOMMU takes their memory |
//! | here | the device: configuration, queue, reports to the driver |
//!
//! No dedicated thread does I/O. Requests are submitted when the guest kicks, and completions
//! arrive through an eventfd, both on the event loop's thread.
//!
//! ```text
//!              activate, restore
//!   inactive ---------------------> active
//!      ^    <---------------------    |
//!      |     reset (cancel, wait)     | save (wait, report)
//!      +---------------------------<--+
//!      |                              |
//!      +--- the storage answers --- resetting   (a reset whose requests cannot be cancelled)
//! ```
//! Without FLUSH negotiated, every write is durable before it is reported (5.2.6.2, write-through).
//! With it, FLUSH makes the completed writes durable.

pub mod disk;
pub mod engine;
pub mod limit;
pub mod lock;
mod request;
pub mod rings;
mod translated;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vdpa::memory::DeviceMemory;
use vdpa::ring::Piece;
use vdpa::ring::guest::access;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::backend::{
    Activation, Backend, Event, Outcome, QueueChange, QueueRole, SavedState, Translated,
};
use super::own_space::OwnSpace;
use super::saved_state;
use super::single_queue::{Offer, SavedSingleQueue, SingleQueue, active, inactive};
use super::userspace_queue::{Kick, UserspaceQueue};
use crate::{Error, ErrorKind};
use disk::{Disk, SECTOR};
use engine::{Done, Engine, Ticket};
use limit::{Limiter, RateLimits};
use request::{Limits, Operation, Request, Status};

/// Length of the identification string that GET_ID returns.
pub const ID_LEN: usize = 20;

const QUEUE_SIZE: u16 = 256;
/// Maximum data segments in one request; with header and status half a ring.
const SEG_MAX: u32 = 126;
/// Maximum bytes in one segment. Together with SEG_MAX it bounds a request.
const SIZE_MAX: u32 = 1 << 20;
/// Maximum requests taken before the event loop gets its turn again.
const REQUESTS_PER_TURN: usize = 256;
/// Length of `struct virtio_blk_config` up to and including `num_queues`.
const CONFIG_LEN: usize = 36;
/// How long a reset waits for cancelled requests, while a vCPU waits for it.
const RESET_TIME: Duration = Duration::from_millis(20);
/// How long a save waits for requests in flight, while the vCPUs are parked.
const SAVE_TIME: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
const KICK: u16 = 0;
const COMPLETION: u16 = 1;
const LIMIT: u16 = 2;
pub(super) const STATE_NAME: &str = "virtio-blk";
pub(super) const STATE_VERSION: u32 = 1;

/// The payload of a saved state.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    sectors: u64,
    read_only: bool,
    /// `None`: the device was inactive.
    active: Option<SavedSingleQueue>,
}

/// The block device.
#[derive(Debug)]
pub struct Block {
    memory: DeviceMemory,
    /// Its place behind the guest's IOMMU, if it is behind it.
    place: Option<OwnSpace>,
    engine: Engine,
    limiter: Option<Limiter>,
    id: [u8; ID_LEN],
    config: [u8; CONFIG_LEN],
    offer: Offer,
    kick: Option<Kick>,
    active: Option<SingleQueue>,
    /// The device failed outside of an event, and its driver is not notified yet.
    needs_reset: bool,
}

impl Block {
    /// Creates an inactive device on `disk`. The guest reads `id` as the disk's serial number: 1 to
    /// 20 printable ASCII characters, different for every disk.
    ///
    /// # Errors
    /// An invalid `id`, io_uring is not available, or all [`rings`] of a confined process are in
    /// use.
    pub fn new(disk: Disk, id: &str, memory: impl Into<DeviceMemory>) -> Result<Self, Error> {
        let memory = memory.into();
        let mut padded = [0; ID_LEN];
        padded
            .get_mut(..id.len())
            .filter(|_| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_graphic()))
            .ok_or_else(|| {
                let id: String = id.chars().take(64).collect();
                Error::other(format!(
                    "the disk id {id:?} must be 1 to 20 printable ASCII characters"
                ))
            })?
            .copy_from_slice(id.as_bytes());
        Ok(Self {
            config: config(&disk),
            offer: Offer {
                features: features(&disk),
                max_size: QUEUE_SIZE,
            }
            .over(&memory),
            place: OwnSpace::of(&memory),
            engine: Engine::new(disk, memory.clone(), rings::take()?),
            memory,
            limiter: None,
            id: padded,
            kick: None,
            active: None,
            needs_reset: false,
        })
    }

    /// Limits the guest's requests. Call it before [`Backend::events`].
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn limit(&mut self, limits: RateLimits) -> Result<(), Error> {
        self.limiter = Some(Limiter::new(limits)?);
        Ok(())
    }

    /// Checks that a driver can start the device, which then follows the guest's IOMMU.
    fn before_start(&mut self) -> Result<(), Error> {
        if self.active.is_some() || self.is_resetting() {
            return Err(active());
        }
        self.place.iter_mut().for_each(OwnSpace::unblock);
        Ok(())
    }

    fn started(&mut self, active: SingleQueue) {
        self.engine
            .set_write_through(!active.has(VIRTIO_BLK_F_FLUSH));
        self.active = Some(active);
    }

    /// Reports completed requests.
    fn report_all(&mut self, finished: Vec<Done>) -> Result<(), Error> {
        let Some(queue) = self.active.as_mut().and_then(SingleQueue::queue) else {
            return Ok(());
        };
        for done in finished {
            report(queue, &self.memory, done)?;
        }
        queue.signal_used()
    }

    /// Reports completed requests and takes new ones, for one turn.
    fn turn(&mut self) -> Result<(), Error> {
        let Some(queue) = self.active.as_mut().and_then(SingleQueue::queue) else {
            return Ok(());
        };
        let limits = Limits {
            sectors: self.engine.disk().sectors(),
            read_only: self.engine.disk().read_only(),
            max_bytes: u64::from(SEG_MAX) * u64::from(SIZE_MAX),
        };
        let mut taken = 0;
        let mut result = Ok(());
        // This loop ends: every further round needs completions, and at most `REQUESTS_PER_TURN`
        // operations begin.
        loop {
            for done in self.engine.reap() {
                result = result.and(report(queue, &self.memory, done));
            }
            while result.is_ok() && self.engine.has_room() {
                if taken == REQUESTS_PER_TURN {
                    queue.kick().again();
                    break;
                }
                if let Some(limiter) = &mut self.limiter
                    && !limiter.admits(Instant::now())
                {
                    break;
                }
                match next_request(queue, &self.memory, &limits) {
                    Ok(Some(request)) => {
                        taken += 1;
                        if let Some(limiter) = &mut self.limiter {
                            limiter.charge(request.operation.bytes(), Instant::now());
                        }
                        result = begin(&mut self.engine, queue, &self.memory, &self.id, request);
                    }
                    Ok(None) => break,
                    Err(error) => result = Err(error),
                }
            }
            self.engine.submit();
            if result.is_err() || !self.engine.has_completions() {
                break;
            }
        }
        if result.is_err() {
            queue.set_broken();
        }
        result.and(queue.signal_used())
    }
}

/// Returns the next request; `None` if there is none and the driver was asked to kick.
fn next_request(
    queue: &mut UserspaceQueue,
    memory: &DeviceMemory,
    limits: &Limits,
) -> Result<Option<Request>, Error> {
    for _ in 0..2 {
        if let Some(chain) = queue.pop()? {
            return Ok(Some(request::parse(memory, &chain, limits)?));
        }
        if !queue.arm()? {
            return Ok(None);
        }
    }
    // A driver that retracts available buffers must not cause an endless loop here.
    queue.kick().again();
    Ok(None)
}

/// Begins a request, or answers it at once.
fn begin(
    engine: &mut Engine,
    queue: &mut UserspaceQueue,
    memory: &DeviceMemory,
    id: &[u8; ID_LEN],
    request: Request,
) -> Result<(), Error> {
    let ticket = Ticket {
        head: request.head,
        status: request.status,
    };
    match request.operation {
        Operation::Io(io) => match engine.start(ticket, io) {
            Ok(()) => Ok(()),
            Err(_) => answer(queue, memory, ticket, Status::IoError, 0),
        },
        Operation::GetId { data } => {
            let (status, written) = match write_id(memory, id, &data) {
                Ok(written) => (Status::Ok, written),
                Err(_) => (Status::IoError, 0),
            };
            answer(queue, memory, ticket, status, written)
        }
        Operation::Finished(status) => answer(queue, memory, ticket, status, 0),
    }
}

/// Writes as much of the identification string as fits.
fn write_id(
    memory: &DeviceMemory,
    id: &[u8; ID_LEN],
    data: &[Piece],
) -> Result<u64, vm_memory::GuestMemoryError> {
    let mut rest = &id[..];
    for piece in data {
        let len = usize::try_from(piece.len).unwrap_or(ID_LEN);
        let (now, later) = rest.split_at(rest.len().min(len));
        memory.write_slice(now, GuestAddress(piece.iova.0))?;
        rest = later;
    }
    Ok(u64::try_from(ID_LEN - rest.len()).unwrap_or(0))
}

/// Reports a finished operation to the driver.
fn report(queue: &mut UserspaceQueue, memory: &DeviceMemory, done: Done) -> Result<(), Error> {
    match done.result {
        Ok(written) => answer(queue, memory, done.ticket, Status::Ok, written),
        Err(_) => answer(queue, memory, done.ticket, Status::IoError, 0),
    }
}

/// Writes the status byte, then returns the chain; `written` is the number of data bytes written to
/// it.
fn answer(
    queue: &mut UserspaceQueue,
    memory: &DeviceMemory,
    ticket: Ticket,
    status: Status,
    written: u64,
) -> Result<(), Error> {
    memory
        .write_obj(status.byte(), GuestAddress(ticket.status.0))
        .map_err(|source| Error::ring(access(ticket.status)(source)))?;
    // No overflow: a request is bounded by SEG_MAX * SIZE_MAX.
    let len = u32::try_from(written.saturating_add(1)).unwrap_or(u32::MAX);
    queue.push_used(ticket.head, len)
}

fn features(disk: &Disk) -> u64 {
    let mut features = 1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_RING_F_EVENT_IDX
        | 1 << VIRTIO_RING_F_INDIRECT_DESC
        | 1 << VIRTIO_BLK_F_SIZE_MAX
        | 1 << VIRTIO_BLK_F_SEG_MAX
        | 1 << VIRTIO_BLK_F_BLK_SIZE
        | 1 << VIRTIO_BLK_F_TOPOLOGY
        | 1 << VIRTIO_BLK_F_FLUSH;
    if disk.read_only() {
        features |= 1 << VIRTIO_BLK_F_RO;
    }
    features
}

/// Builds `struct virtio_blk_config` (virtio 1.3, 5.2.4), little-endian.
fn config(disk: &Disk) -> [u8; CONFIG_LEN] {
    let exponent = disk.physical_block_exp();
    let mut config = [0; CONFIG_LEN];
    let mut put = |offset: usize, bytes: &[u8]| {
        for (place, &byte) in config.iter_mut().skip(offset).zip(bytes) {
            *place = byte;
        }
    };
    put(0, &disk.sectors().to_le_bytes()); // capacity
    put(8, &SIZE_MAX.to_le_bytes()); // size_max
    put(12, &SEG_MAX.to_le_bytes()); // seg_max
    put(20, &u32::try_from(SECTOR).unwrap_or(512).to_le_bytes()); // blk_size
    put(24, &[exponent]); // topology.physical_block_exp
    put(26, &(1u16 << exponent.min(15)).to_le_bytes()); // topology.min_io_size
    put(34, &1u16.to_le_bytes()); // num_queues
    config
}

#[cfg(any(test, feature = "fuzz"))]
impl Block {
    /// As [`Backend::activate`], also with a packed ring, which the device does not offer.
    pub(super) fn activate_any(&mut self, activation: Activation) -> Result<(), Error> {
        let packed = Offer {
            features: self.offer.features
                | 1 << virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED,
            ..self.offer
        };
        let memory = self.memory.clone();
        self.started(SingleQueue::activate(activation, packed, memory)?);
        Ok(())
    }
}

impl Backend for Block {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn queue_role(&self, _queue: u16) -> QueueRole {
        QueueRole::Request
    }

    fn features(&self) -> u64 {
        self.offer.features
    }

    fn config_len(&self) -> u32 {
        u32::try_from(CONFIG_LEN).unwrap_or(0)
    }

    fn read_config(&mut self, offset: u32, data: &mut [u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        data.fill(0);
        for (place, &byte) in data.iter_mut().zip(self.config.iter().skip(offset)) {
            *place = byte;
        }
    }

    fn io_errors(&self) -> Option<u64> {
        Some(self.engine.errors())
    }

    // `writeback` would be writable with CONFIG_WCE, which is not offered.
    fn write_config(&mut self, _offset: u32, _data: &[u8]) {}

    fn events(&mut self, kicks: &[Arc<EventFd>]) -> Vec<Event> {
        self.kick = kicks.first().and_then(|kick| {
            Kick::new(Arc::clone(kick))
                .inspect_err(|error| tracing::error!(%error, "virtio-blk gets no kicks"))
                .ok()
        });
        let kick = self.kick.iter().map(|kick| Event {
            fd: kick.fd(),
            token: KICK,
        });
        let completion = Event {
            fd: self.engine.completion_fd(),
            token: COMPLETION,
        };
        let limit = self.limiter.iter().map(|limiter| Event {
            fd: limiter.timer_fd(),
            token: LIMIT,
        });
        kick.chain([completion]).chain(limit).collect()
    }

    fn negotiate(&mut self, features: u64) -> Result<(), Error> {
        self.offer.check(features)
    }

    fn memory(&self) -> Option<&DeviceMemory> {
        Some(&self.memory)
    }

    fn translated(&mut self) -> Option<&mut dyn Translated> {
        self.place.is_some().then_some(self as _)
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        self.before_start()?;
        let memory = self.memory.clone();
        self.started(SingleQueue::activate(activation, self.offer, memory)?);
        Ok(())
    }

    fn change(&mut self, change: QueueChange) -> Result<(), Error> {
        self.active.as_mut().ok_or_else(inactive)?.change(change)
    }

    fn reset(&mut self) {
        // Completed operations are not reported: the ring belongs to the driver again.
        self.active = None;
        self.needs_reset = false;
        self.engine.cancel();
        self.await_reset(RESET_TIME);
    }

    fn is_resetting(&self) -> bool {
        self.active.is_none() && self.engine.in_flight() > 0
    }

    fn await_reset(&mut self, limit: Duration) -> bool {
        if self.active.is_none() {
            // First: a later signal must stay.
            self.engine.acknowledge();
            self.engine.drain(limit);
        }
        !self.is_resetting()
    }

    fn process(&mut self, token: u16) -> Outcome {
        match token {
            KICK => {
                if let Some(kick) = &self.kick {
                    kick.drain();
                }
            }
            COMPLETION => self.engine.acknowledge(),
            LIMIT => {
                if let Some(limiter) = &mut self.limiter {
                    limiter.acknowledge();
                }
            }
            _ => return Outcome::default(),
        }
        let mut needs_reset = std::mem::take(&mut self.needs_reset);
        if self.is_resetting() {
            self.engine.reap();
            self.engine.submit();
        } else if let Err(error) = self.turn() {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "the driver of virtio-blk broke its queue");
            needs_reset = true;
        }
        Outcome {
            needs_reset,
            ..Outcome::default()
        }
    }

    fn save(&mut self) -> Result<SavedState, Error> {
        if self.needs_reset {
            let kind = ErrorKind::BrokenRing { queue: 0 };
            return Err(Error::new(kind, "the disk waits for a reset by its driver"));
        }
        // All begun requests are finished and reported, so that no restore has to begin a request
        // twice.
        let finished = self.engine.drain(SAVE_TIME);
        self.report_all(finished)?;
        let in_flight = self.engine.in_flight();
        if in_flight > 0 {
            return Err(Error::other(format!(
                "the disk's storage has not answered {in_flight} requests for {} s: check the \
                 storage, and try again when it answers",
                SAVE_TIME.as_secs()
            )));
        }
        let active = self.active.take();
        let saved = Saved {
            sectors: self.engine.disk().sectors(),
            read_only: self.engine.disk().read_only(),
            active: active.map(|active| active.save()),
        };
        saved_state::encode(STATE_NAME, STATE_VERSION, &saved)
    }

    fn check_state(&self, state: &SavedState) -> Result<(), Error> {
        saved_state::decode::<Saved>(state, STATE_NAME, STATE_VERSION).map(drop)
    }

    fn restore(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error> {
        self.before_start()?;
        let saved: Saved = saved_state::decode(state, STATE_NAME, STATE_VERSION)?;
        let disk = self.engine.disk();
        if saved.sectors != disk.sectors() || saved.read_only != disk.read_only() {
            return Err(Error::other(format!(
                "the saved disk has {} sectors (read-only: {}), this image {} (read-only: {})",
                saved.sectors,
                saved.read_only,
                disk.sectors(),
                disk.read_only()
            )));
        }
        // Saved before the driver was ready: there is nothing to start.
        if let Some(saved) = saved.active {
            let memory = self.memory.clone();
            self.started(SingleQueue::restore(saved, activation, self.offer, memory)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
