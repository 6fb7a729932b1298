//! The device with its mappings, and the guest's data queues on it.
//!
//! Owns the device, its mappings and the list of its queues. It must not know the purpose of a
//! queue in a network, nor when queues are relayed.

use std::sync::Arc;

use vdpa::device::{Device, State, VringAddresses, VringBase, VringConfig};
use vdpa::iotlb::Iotlb;
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, DeviceMemory, GuestRegion};
use vdpa::relay::{RelayedQueue, SvqSet};
use vdpa::ring::{GuestRing, RingFeatures};
use vdpa::uapi::BackendFeatures;
use vdpa::window::PrivateWindow;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use vmm_sys_util::eventfd::EventFd;

use super::device::VdpaOptions;
use super::doorbells::DeviceDoorbells;
use super::eventfd::{new_eventfd, signal};
use crate::Error;
use crate::virtio::backend::{Queue, QueueAddresses};

pub(super) const WINDOW: &str = "the device reaches too few addresses";
const NOT_RELAYED: &str = "cannot relay the device's queues";

/// A data queue of a started device.
#[derive(Debug)]
pub(super) struct DataQueue {
    pub(super) index: u16,
    pub(super) addresses: QueueAddresses,
    pub(super) kick: Arc<EventFd>,
    pub(super) call: Option<Arc<EventFd>>,
}

impl DataQueue {
    /// Returns the device's settings for working on the guest's ring itself. `unrouted` is its call
    /// while the guest has none.
    pub(super) fn config<'a>(
        &'a self,
        base: VringBase,
        unrouted: &'a Arc<EventFd>,
    ) -> VringConfig<'a> {
        VringConfig {
            size: self.addresses.size,
            addresses: vring_addresses(&self.addresses),
            base,
            kick: Some(&self.kick),
            call: Some(self.call.as_ref().unwrap_or(unrouted)),
        }
    }
}

impl From<Queue> for DataQueue {
    fn from(queue: Queue) -> Self {
        Self {
            index: queue.index,
            addresses: queue.addresses,
            kick: queue.kick,
            call: queue.call,
        }
    }
}

/// The device and its queues; see the module.
#[derive(Debug)]
pub(super) struct Rings {
    /// Name of the device for messages.
    pub(super) id: String,
    pub(super) device: Device,
    /// After `device`, so that the device is closed only after its mappings are gone.
    pub(super) iotlb: Iotlb,
    /// Addresses for the rings of relayed queues.
    pub(super) window: PrivateWindow,
    pub(super) memory: DeviceMemory,
    /// Guest RAM, by guest-physical addresses.
    pub(super) ram: Vec<IovaRange>,
    /// The device can begin and stop anywhere in a ring.
    pub(super) keeps_positions: bool,
    /// The doorbells, which keep the device open: see [`vdpa::doorbell`].
    pub(super) doorbells: DeviceDoorbells,
    /// The call of queues for which the guest has no vector at DRIVER_OK. It is never read. But
    /// vp_vdpa gives a queue an interrupt only if the queue has a call at that time, and the guest
    /// may route the queue later.
    pub(super) unrouted: Arc<EventFd>,
    /// The enabled queues since the last start.
    pub(super) queues: Vec<DataQueue>,
}

impl Rings {
    /// Maps guest RAM for an owned device. A device behind the guest's IOMMU gets nothing, and an
    /// address space of its own, below the window.
    pub(super) fn new(
        device: Device,
        mut iotlb: Iotlb,
        options: &VdpaOptions,
        mut memory: DeviceMemory,
        ram_end: u64,
    ) -> Result<Self, Error> {
        let range = device.info().iova_range;
        let window = PrivateWindow::new(range, ram_end).map_err(Error::context(WINDOW))?;
        if options.iommu {
            let last = window.range().first().checked_sub(1);
            let below = last.and_then(|last| IovaRange::new(range.first(), last));
            let space = AddressSpace::new(below.ok_or_else(|| Error::other(WINDOW))?);
            memory = DeviceMemory::behind(Arc::clone(memory.ram()), Arc::new(space));
        } else {
            iotlb
                .map_guest_memory(0, memory.ram())
                .map_err(Error::context("cannot map guest memory for the device"))?;
        }
        let regions = GuestRegion::all(memory.ram()).into_iter();
        let ram = regions.filter_map(|region| region.range());
        Ok(Self {
            id: options.id.clone(),
            ram: ram.collect(),
            keeps_positions: device.keeps_ring_positions()?,
            doorbells: DeviceDoorbells::new(&device, options.doorbell)?,
            unrouted: Arc::new(new_eventfd()?),
            queues: Vec::new(),
            device,
            iotlb,
            window,
            memory,
        })
    }

    pub(super) fn is_net(&self) -> bool {
        self.device.device_id() == VIRTIO_ID_NET
    }

    pub(super) fn is_running(&self) -> bool {
        self.device.state() == State::Running
    }

    /// Whether the device has all of these abilities, in any state.
    pub(super) fn offers(&self, abilities: BackendFeatures) -> bool {
        self.device.backend_features().contains(abilities)
    }

    /// Whether the running device has all of these abilities.
    pub(super) fn can(&self, abilities: BackendFeatures) -> bool {
        self.is_running() && self.offers(abilities)
    }

    pub(super) fn queue(&self, index: u16) -> Option<&DataQueue> {
        self.queues.iter().find(|queue| queue.index == index)
    }

    /// Prepares a data queue of the negotiated device: its doorbell and, if the device works on the
    /// guest's ring itself, its ring.
    pub(super) fn prepare(
        &mut self,
        queue: &DataQueue,
        base: VringBase,
        direct: bool,
    ) -> Result<(), Error> {
        let Self { device, id, .. } = self;
        if direct {
            let config = queue.config(base, &self.unrouted);
            device.set_vring(queue.index, &config, &self.memory.reach())?;
        }
        self.doorbells.prepare(device, id, queue.index)
    }

    /// Sends one spurious kick and call for every data queue: a real one may have been lost.
    pub(super) fn signal_all(&self) {
        for queue in &self.queues {
            signal(&queue.kick);
            if let Some(call) = &queue.call {
                signal(call);
            }
        }
    }

    /// Whether the device only reads a queue's buffers.
    pub(super) fn transmits(&self, queue: u16) -> bool {
        // receiveq1, transmitq1, receiveq2, … (virtio 1.3, 5.1.2).
        self.is_net() && !queue.is_multiple_of(2)
    }

    /// Returns all data queues as direct relays.
    pub(super) fn relay_set(&mut self, features: u64) -> Result<SvqSet, Error> {
        let queues = self.queues.iter();
        let queues = queues
            .map(|queue| self.relayed_queue(queue, features))
            .collect::<Result<_, _>>()?;
        let (iotlb, window) = (&mut self.iotlb, &mut self.window);
        let set = SvqSet::new(self.device.info(), features, queues, iotlb, window);
        set.map_err(Error::context(NOT_RELAYED))
    }

    pub(super) fn relayed_queue(
        &self,
        queue: &DataQueue,
        features: u64,
    ) -> Result<RelayedQueue, Error> {
        let index = queue.index;
        let ring = GuestRing::new(
            self.memory.clone(),
            queue.addresses.size,
            vring_addresses(&queue.addresses),
            RingFeatures::of(features),
        )
        .map_err(RelayedQueue::refused(index));
        Ok(RelayedQueue {
            index,
            ring: ring.map_err(Error::context(NOT_RELAYED))?,
            kick: Arc::clone(&queue.kick),
            call: Arc::clone(queue.call.as_ref().unwrap_or(&self.unrouted)),
        })
    }

    /// Frees the relays' memory, which the device no longer uses.
    pub(super) fn end_relays(&mut self, set: SvqSet) {
        if let Err(error) = set.finish(&self.memory, &mut self.iotlb, &mut self.window) {
            tracing::error!(
                device = %self.id,
                error = &error as &dyn std::error::Error,
                "cannot unmap the memory of relays"
            );
        }
    }
}

pub(super) fn vring_addresses(addresses: &QueueAddresses) -> VringAddresses {
    VringAddresses {
        descriptor: addresses.descriptor,
        driver: addresses.driver,
        device: addresses.device,
    }
}
