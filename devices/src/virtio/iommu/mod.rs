//! virtio-iommu (virtio 1.3, 5.13): the guest's driver decides which memory its devices reach.
//!
//! ```text
//!   vCPU: kick of the request queue
//!     |  all requests that wait
//!     v
//!   request -----> domains -----> endpoint (one per device behind the IOMMU) ----> Translated
//!     parses         books, address spaces     its function's lock                 its mappings
//!     <--- statuses ---+
//! ```
//! **Requests are served in the thread of the vCPU that kicked.** Linux spins for the answer with
//! interrupts disabled, so a thread of the VMM would only make it wait longer. Adjacent MAPs and
//! UNMAPs are one change set for each domain. The VMM answers them after every device has followed.
//!
//! The event queue reports faults of emulated devices. vDPA devices report none to the VMM, so the
//! driver's buffers stay there unused, and the queue has no state.
//!
//! Owns the request queue while the driver runs. The domains are shared with the machine, which
//! adds and removes devices. It must not know the transport, nor how a device maps memory.

mod domains;
mod endpoint;
#[cfg(test)]
mod explore;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod fuzz;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod recorder;
mod request;
mod saved;

use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use vdpa::memory::{DeviceMemory, GuestMemory};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_IOMMU;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::EventFd;

pub use self::domains::{Counters, Domains, MAPPINGS_MAX, Refusal};
pub use self::endpoint::Endpoint;
#[cfg(any(test, feature = "fuzz"))]
pub use self::fuzz::iommu_anything;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use self::recorder::{Recorder, domains};
pub use self::saved::{DOMAINS_STATE_VERSION, DomainsState};

use self::domains::LAST_DOMAIN;
use self::request::{PROBE_SIZE, Reply, Request, parse};
use super::backend::{
    Activation, Backend, Event, Outcome, QueueChange, QueueRole, SavedState, SharedMemory,
};
use super::saved_state;
use super::single_queue::{Offer, SavedSingleQueue, SingleQueue, active, inactive};
use super::userspace_queue::{Kick, UserspaceQueue};
use crate::Error;

/// Maximum number of requests served in one go: a vCPU waits for them. In tests they fit into a
/// queue at once.
pub const REQUESTS_PER_KICK: usize = if cfg!(test) { 64 } else { 1024 };

// Features (virtio 1.3, 5.13.3). Not offered: BYPASS (3), which BYPASS_CONFIG supersedes, and MMIO
// (5).
const F_INPUT_RANGE: u64 = 1;
const F_DOMAIN_RANGE: u64 = 1 << 1;
const F_MAP_UNMAP: u64 = 1 << 2;
const F_PROBE: u64 = 1 << 4;
const F_BYPASS_CONFIG: u64 = 1 << 6;
const FEATURES: u64 = F_INPUT_RANGE
    | F_DOMAIN_RANGE
    | F_MAP_UNMAP
    | F_PROBE
    | F_BYPASS_CONFIG
    | 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_RING_F_INDIRECT_DESC;

const REQUEST_QUEUE: u16 = 0;
const QUEUE_SIZES: [u16; 2] = [256, 64];
const OFFER: Offer = Offer {
    features: FEATURES,
    max_size: QUEUE_SIZES[0],
};
const KICK: u16 = 0;

/// 4 KiB, and each greater power of two.
const PAGE_SIZES: u64 = !0xfff;
/// Length of `struct virtio_iommu_config`, and the offset of its only writable field.
const CONFIG_LEN: u32 = 40;
const CONFIG_BYPASS: u32 = 36;

pub(super) const STATE_NAME: &str = "virtio-iommu";
pub(super) const STATE_VERSION: u32 = 1;

/// The domains, shared by the device and the machine.
pub type SharedDomains = Arc<Mutex<Domains>>;

/// The payload of a saved state: `None` for an inactive device.
#[derive(Debug, Serialize, Deserialize)]
struct Saved(Option<SavedSingleQueue>);

/// The IOMMU; see the module.
#[derive(Debug)]
pub struct Iommu {
    memory: DeviceMemory,
    domains: SharedDomains,
    kick: Option<Kick>,
    active: Option<SingleQueue>,
}

impl Iommu {
    /// Creates an inactive device over `memory`.
    #[must_use]
    pub fn new(memory: SharedMemory, domains: SharedDomains) -> Self {
        Self {
            // Its own rings are not translated.
            memory: memory.into(),
            domains,
            kick: None,
            active: None,
        }
    }

    /// Returns the device configuration (virtio 1.3, 5.13.4).
    fn config(&self) -> Vec<u8> {
        let domains = self.domains.lock();
        let input = domains.input();
        [
            &PAGE_SIZES.to_le_bytes()[..],
            &input.first().to_le_bytes(),
            &input.last().to_le_bytes(),
            &0u32.to_le_bytes(),
            &LAST_DOMAIN.to_le_bytes(),
            &PROBE_SIZE.to_le_bytes(),
            &[u8::from(domains.bypass), 0, 0, 0],
        ]
        .concat()
    }

    /// Serves the requests that wait.
    fn serve(&mut self) -> Outcome {
        let mut outcome = Outcome::default();
        let Some(queue) = self.active.as_mut().and_then(SingleQueue::queue) else {
            return outcome;
        };
        match serve(queue, self.memory.ram(), &self.domains) {
            // The vmm thread continues.
            Ok(true) => queue.kick().again(),
            Ok(false) => {}
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "the driver of virtio-iommu broke its queue");
                queue.set_broken();
                outcome.needs_reset = true;
            }
        }
        outcome
    }
}

/// Serves requests until none waits, or too many came. `Ok(true)`: there are more.
fn serve(
    queue: &mut UserspaceQueue,
    memory: &GuestMemory,
    domains: &Mutex<Domains>,
) -> Result<bool, Error> {
    let mut served = 0;
    while served < REQUESTS_PER_KICK {
        let (replies, requests, failure) = take(queue, memory, REQUESTS_PER_KICK - served);
        served += requests.len();
        let statuses = domains.lock().serve(&requests);
        for ((reply, request), status) in replies.iter().zip(&requests).zip(statuses) {
            let written = reply.write(memory, request, status)?;
            queue.push_used(reply.chain, written)?;
        }
        queue.signal_used()?;
        match failure {
            Some(error) => return Err(error),
            None if requests.is_empty() && !queue.arm()? => return Ok(false),
            None => {}
        }
    }
    Ok(true)
}

/// Takes at most `limit` requests from the queue, and the reason if it is broken. An ATTACH ends
/// the pass: it can map all of a domain, so its answer and the domains' lock wait for no other one.
fn take(
    queue: &mut UserspaceQueue,
    memory: &GuestMemory,
    limit: usize,
) -> (Vec<Reply>, Vec<Request>, Option<Error>) {
    let (mut replies, mut requests) = (Vec::new(), Vec::new());
    while requests.len() < limit {
        let parsed = match queue.pop() {
            Ok(None) => break,
            Ok(Some(chain)) => parse(memory, &chain),
            Err(error) => Err(error),
        };
        match parsed {
            Ok((reply, request)) => {
                let attaches = matches!(request, Request::Attach { .. });
                replies.push(reply);
                requests.push(request);
                if attaches {
                    break;
                }
            }
            Err(error) => return (replies, requests, Some(error)),
        }
    }
    (replies, requests, None)
}

/// Leaves out the event queue.
fn without_events(mut activation: Activation) -> Activation {
    let queues = &mut activation.queues;
    queues.retain(|queue| queue.index == REQUEST_QUEUE);
    activation
}

impl Backend for Iommu {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_IOMMU
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn queue_role(&self, queue: u16) -> QueueRole {
        match queue {
            REQUEST_QUEUE => QueueRole::Request,
            _ => QueueRole::Receive,
        }
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn config_len(&self) -> u32 {
        CONFIG_LEN
    }

    fn read_config(&mut self, offset: u32, data: &mut [u8]) {
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        let fields = self.config();
        data.fill(0);
        for (to, from) in data.iter_mut().zip(fields.iter().skip(skipped)) {
            *to = *from;
        }
    }

    fn changes_config(&self) -> bool {
        false
    }

    fn write_config(&mut self, offset: u32, data: &[u8]) {
        if offset == CONFIG_BYPASS
            && let [bypass @ (0 | 1)] = data
        {
            self.domains.lock().set_bypass(*bypass == 1);
        }
    }

    fn events(&mut self, kicks: &[Arc<EventFd>]) -> Vec<Event> {
        self.kick = kicks.first().and_then(|kick| {
            Kick::new(Arc::clone(kick))
                .inspect_err(|error| tracing::error!(%error, "virtio-iommu gets no kicks"))
                .ok()
        });
        let events = self.kick.iter().map(|kick| Event {
            fd: kick.fd(),
            token: KICK,
        });
        events.collect()
    }

    fn serves_inline(&self, queue: u16) -> bool {
        queue == REQUEST_QUEUE
    }

    fn kicked(&mut self, _queue: u16) -> Outcome {
        self.serve()
    }

    fn negotiate(&mut self, features: u64) -> Result<(), Error> {
        OFFER.check(features)
    }

    fn memory(&self) -> Option<&DeviceMemory> {
        Some(&self.memory)
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        if self.active.is_some() {
            return Err(active());
        }
        let memory = self.memory.clone();
        let activation = without_events(activation);
        self.active = Some(SingleQueue::activate(activation, OFFER, memory)?);
        Ok(())
    }

    fn change(&mut self, change: QueueChange) -> Result<(), Error> {
        let index = match &change {
            QueueChange::Call { index, .. } | QueueChange::Reset { index } => *index,
            QueueChange::Enable(queue) => queue.index,
        };
        let active = self.active.as_mut().ok_or_else(inactive)?;
        if index == REQUEST_QUEUE {
            active.change(change)
        } else {
            Ok(())
        }
    }

    fn reset(&mut self) {
        self.active = None;
        self.domains.lock().reset();
    }

    fn process(&mut self, token: u16) -> Outcome {
        if token != KICK {
            return Outcome::default();
        }
        if let Some(kick) = &self.kick {
            kick.drain();
        }
        self.serve()
    }

    fn save(&mut self) -> Result<SavedState, Error> {
        // Nothing is in flight between two calls. The machine saves the domains.
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
            let memory = self.memory.clone();
            let activation = without_events(activation);
            self.active = Some(SingleQueue::restore(saved, activation, OFFER, memory)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
