//! The common part of emulated devices with one queue: they take the features and the queue at
//! activation, follow changes, save and restore.
//!
//! Owns the `UserspaceQueue` while the driver runs. It must not know which device it serves.

use serde::{Deserialize, Serialize};
use vdpa::memory::DeviceMemory;
use vdpa::ring::RingFeatures;
use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};

use super::backend::{Activation, Queue, QueueChange};
use super::userspace_queue::{SavedQueue, UserspaceQueue};
use crate::Error;

const NOT_SERVED: &str = "cannot serve the queue";

/// The error for an operation that needs an inactive device.
pub(crate) fn active() -> Error {
    Error::other("the device is active already")
}

/// The error for an operation that needs an active device.
pub(crate) fn inactive() -> Error {
    Error::other("the device is not active")
}

/// The error for another queue than 0, the only one.
fn no_such_queue(index: u16) -> Error {
    Error::other(format!("there is no queue {index}"))
}

/// The offered features and the queue's maximum size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    /// Feature bits.
    pub(crate) features: u64,
    /// Largest queue size.
    pub(crate) max_size: u16,
}

impl Offer {
    /// Returns the offer of a device with this memory: behind an IOMMU with ACCESS_PLATFORM.
    pub(crate) fn over(mut self, memory: &DeviceMemory) -> Self {
        let translated = u64::from(memory.space().is_some());
        self.features |= translated << VIRTIO_F_ACCESS_PLATFORM;
        self
    }

    /// Checks the driver's choice.
    ///
    /// # Errors
    /// Features outside the offer, or without VERSION_1 or an offered ACCESS_PLATFORM.
    pub(crate) fn check(&self, features: u64) -> Result<(), Error> {
        let platform = self.features & (1 << VIRTIO_F_ACCESS_PLATFORM);
        let needed = 1 << VIRTIO_F_VERSION_1 | platform;
        if features & !self.features == 0 && features & needed == needed {
            return Ok(());
        }
        Err(Error::other(format!(
            "cannot accept features {features:#x}; offered are {:#x}",
            self.features
        )))
    }
}

/// The state of an active device with nothing in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedSingleQueue {
    features: u64,
    queue: Option<SavedQueue>,
}

/// The features and the queue of an active device.
#[derive(Debug)]
pub(crate) struct SingleQueue {
    offer: Offer,
    features: u64,
    memory: DeviceMemory,
    queue: Option<UserspaceQueue>,
}

impl SingleQueue {
    /// Takes over the driver's settings.
    ///
    /// # Errors
    /// Features, queue index or ring are invalid.
    pub(crate) fn activate(
        activation: Activation,
        offer: Offer,
        memory: DeviceMemory,
    ) -> Result<Self, Error> {
        offer.check(activation.features)?;
        let mut started = Self {
            offer,
            features: activation.features,
            memory,
            queue: None,
        };
        for queue in activation.queues {
            started.enable(queue)?;
        }
        Ok(started)
    }

    /// As [`SingleQueue::activate`], continuing at the position in `saved`.
    ///
    /// # Errors
    /// As [`SingleQueue::activate`], or `saved` does not fit `activation`, or is malformed.
    pub(crate) fn restore(
        saved: SavedSingleQueue,
        mut activation: Activation,
        offer: Offer,
        memory: DeviceMemory,
    ) -> Result<Self, Error> {
        if saved.features != activation.features
            || usize::from(saved.queue.is_some()) != activation.queues.len()
        {
            return Err(Error::other("the saved state does not fit the transport's"));
        }
        let queue = activation.queues.pop();
        let mut started = Self::activate(activation, offer, memory)?;
        if let (Some(queue), Some(saved)) = (queue, saved.queue) {
            if queue.index != 0 {
                return Err(no_such_queue(queue.index));
            }
            let restored = UserspaceQueue::restore(
                queue,
                saved,
                offer.max_size,
                RingFeatures::of(started.features),
                started.memory.clone(),
            );
            started.queue = Some(restored.map_err(Error::context(NOT_SERVED))?);
        }
        Ok(started)
    }

    /// Returns the state to save. Every popped chain must have been returned.
    pub(crate) fn save(&self) -> SavedSingleQueue {
        SavedSingleQueue {
            features: self.features,
            queue: self.queue.as_ref().map(UserspaceQueue::save),
        }
    }

    /// Whether feature bit number `bit` was negotiated.
    pub(crate) fn has(&self, bit: u32) -> bool {
        self.features.checked_shr(bit).unwrap_or(0) & 1 != 0
    }

    /// Returns the queue, if the driver enabled it.
    pub(crate) fn queue(&mut self) -> Option<&mut UserspaceQueue> {
        self.queue.as_mut()
    }

    /// Follows a change of the running device.
    ///
    /// # Errors
    /// The queue does not exist, is enabled already, or is invalid.
    pub(crate) fn change(&mut self, change: QueueChange) -> Result<(), Error> {
        match change {
            QueueChange::Call { index, call } => {
                self.queue
                    .as_mut()
                    .filter(|_| index == 0)
                    .ok_or_else(|| no_such_queue(index))?
                    .set_call(call);
                Ok(())
            }
            QueueChange::Enable(queue) => self.enable(queue),
            // RING_RESET is not offered, so the transport never requests it.
            QueueChange::Reset { index } => {
                Err(Error::other(format!("cannot reset queue {index} alone")))
            }
        }
    }

    fn enable(&mut self, queue: Queue) -> Result<(), Error> {
        if queue.index != 0 {
            return Err(no_such_queue(queue.index));
        }
        if self.queue.is_some() {
            return Err(Error::other("the queue is enabled already"));
        }
        let queue = UserspaceQueue::new(
            queue,
            self.offer.max_size,
            RingFeatures::of(self.features),
            self.memory.clone(),
        )
        .map_err(Error::context(NOT_SERVED))?;
        // The driver may have made buffers available, and kicked, before this.
        queue.kick().again();
        self.queue = Some(queue);
        Ok(())
    }
}
