//! virtio-rng (virtio 1.3, 5.4): random bytes of the host for the guest.
//!
//! Owns the request queue while the driver runs. It must not know the transport. Work is bounded:
//! [`MAX_BYTES`] for each request and [`REQUESTS_PER_TURN`] for each turn of the event loop. The
//! specification lets the device fill less than the buffer.
//!
//! ```text
//!              activate, restore
//!   inactive ---------------------> active
//!      ^    <---------------------    |
//!      |            reset             | save
//!      +---------------------------<--+
//! ```

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::memory::DeviceMemory;
use vdpa::ring::Chain;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
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
use crate::Error;

/// Maximum number of random bytes for one request.
pub const MAX_BYTES: usize = 4096;
/// Maximum number of requests served before the event loop gets its turn again.
pub const REQUESTS_PER_TURN: usize = 64;

const FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;
const QUEUE_SIZE: u16 = 256;
const OFFER: Offer = Offer {
    features: FEATURES,
    max_size: QUEUE_SIZE,
};
const KICK: u16 = 0;
pub(super) const STATE_NAME: &str = "virtio-rng";
pub(super) const STATE_VERSION: u32 = 1;

/// The payload of a saved state: `None` for an inactive device.
#[derive(Debug, Serialize, Deserialize)]
struct Saved(Option<SavedSingleQueue>);

/// The random number device.
#[derive(Debug)]
pub struct Rng {
    memory: DeviceMemory,
    /// Its place behind the guest's IOMMU, if it is behind it.
    place: Option<OwnSpace>,
    offer: Offer,
    kick: Option<Kick>,
    active: Option<SingleQueue>,
}

impl Rng {
    /// Creates an inactive device over `memory`.
    #[must_use]
    pub fn new(memory: impl Into<DeviceMemory>) -> Self {
        let memory = memory.into();
        Self {
            place: OwnSpace::of(&memory),
            offer: OFFER.over(&memory),
            memory,
            kick: None,
            active: None,
        }
    }

    /// The driver starts the device.
    fn unblock(&mut self) {
        self.place.iter_mut().for_each(OwnSpace::unblock);
    }
}

/// Serves one turn. `Ok(true)`: there is more work.
fn serve(queue: &mut UserspaceQueue, memory: &DeviceMemory) -> Result<bool, Error> {
    let answered = answer(queue, memory);
    queue.signal_used()?;
    answered
}

/// As [`serve`], without a signal.
fn answer(queue: &mut UserspaceQueue, memory: &DeviceMemory) -> Result<bool, Error> {
    for _ in 0..REQUESTS_PER_TURN {
        if let Some(chain) = queue.pop()? {
            let written = fill(&chain, memory);
            queue.push_used(chain.id, written)?;
        } else if !queue.arm()? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Fills the writable part of a chain and returns the number of bytes.
fn fill(chain: &Chain, memory: &DeviceMemory) -> u32 {
    let mut entropy = [0u8; MAX_BYTES];
    let (_, writable) = chain.split();
    let wanted: usize = writable
        .iter()
        .map(|piece| usize::try_from(piece.len).unwrap_or(MAX_BYTES))
        .fold(0, usize::saturating_add)
        .min(MAX_BYTES);
    if let Err(error) = getrandom(&mut entropy[..wanted]) {
        tracing::warn!(%error, "cannot get random bytes from the host");
        return 0;
    }
    let mut rest = &entropy[..wanted];
    let mut written = 0u32;
    for piece in writable {
        let len = rest
            .len()
            .min(usize::try_from(piece.len).unwrap_or(MAX_BYTES));
        let (now, later) = rest.split_at(len);
        if memory.write_slice(now, GuestAddress(piece.iova.0)).is_err() {
            break;
        }
        written = written.saturating_add(u32::try_from(len).unwrap_or(0));
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    written
}

/// Fills `buffer` from the kernel's generator.
fn getrandom(mut buffer: &mut [u8]) -> io::Result<()> {
    while !buffer.is_empty() {
        // SAFETY: the system call writes at most `buffer.len()` bytes to `buffer`, which this
        // function borrows mutably; no safe wrapper is among the dependencies.
        let result = unsafe { libc::getrandom(buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        match usize::try_from(result) {
            Ok(filled) => buffer = buffer.get_mut(filled..).unwrap_or_default(),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

#[cfg(any(test, feature = "fuzz"))]
impl Rng {
    /// As [`Backend::activate`], also with a packed ring, which the device does not offer.
    pub(super) fn activate_any(&mut self, activation: Activation) -> Result<(), Error> {
        let packed = Offer {
            features: self.offer.features
                | 1 << virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED,
            ..self.offer
        };
        let memory = self.memory.clone();
        self.active = Some(SingleQueue::activate(activation, packed, memory)?);
        Ok(())
    }
}

impl Backend for Rng {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
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
        0
    }

    fn read_config(&mut self, _offset: u32, data: &mut [u8]) {
        data.fill(0);
    }

    fn write_config(&mut self, _offset: u32, _data: &[u8]) {}

    fn events(&mut self, kicks: &[Arc<EventFd>]) -> Vec<Event> {
        self.kick = kicks.first().and_then(|kick| {
            Kick::new(Arc::clone(kick))
                .inspect_err(|error| tracing::error!(%error, "virtio-rng gets no kicks"))
                .ok()
        });
        let events = self.kick.iter().map(|kick| Event {
            fd: kick.fd(),
            token: KICK,
        });
        events.collect()
    }

    fn negotiate(&mut self, features: u64) -> Result<(), Error> {
        self.offer.check(features)
    }

    fn memory(&self) -> Option<&DeviceMemory> {
        Some(&self.memory)
    }

    fn translated(&mut self) -> Option<&mut dyn Translated> {
        self.place.as_mut().map(|place| place as _)
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        if self.active.is_some() {
            return Err(active());
        }
        self.unblock();
        let memory = self.memory.clone();
        self.active = Some(SingleQueue::activate(activation, self.offer, memory)?);
        Ok(())
    }

    fn change(&mut self, change: QueueChange) -> Result<(), Error> {
        self.active.as_mut().ok_or_else(inactive)?.change(change)
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn process(&mut self, token: u16) -> Outcome {
        let mut outcome = Outcome::default();
        if token != KICK {
            return outcome;
        }
        if let Some(kick) = &self.kick {
            kick.drain();
        }
        let Some(queue) = self.active.as_mut().and_then(SingleQueue::queue) else {
            return outcome;
        };
        match serve(queue, &self.memory) {
            Ok(true) => queue.kick().again(),
            Ok(false) => {}
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "the driver of virtio-rng broke its queue");
                outcome.needs_reset = true;
            }
        }
        outcome
    }

    fn save(&mut self) -> Result<SavedState, Error> {
        // Nothing is in flight between two calls.
        let saved = Saved(self.active.take().map(|active| active.save()));
        saved_state::encode(STATE_NAME, STATE_VERSION, &saved)
    }

    fn check_state(&self, state: &SavedState) -> Result<(), Error> {
        saved_state::decode::<Saved>(state, STATE_NAME, STATE_VERSION).map(drop)
    }

    fn restore(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error> {
        if self.active.is_some() {
            return Err(active());
        }
        let Saved(saved) = saved_state::decode(state, STATE_NAME, STATE_VERSION)?;
        // Saved before the driver was ready: there is nothing to start.
        if let Some(saved) = saved {
            self.unblock();
            let memory = self.memory.clone();
            let started = SingleQueue::restore(saved, activation, self.offer, memory)?;
            self.active = Some(started);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
