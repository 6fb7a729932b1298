//! What every emulated device with one queue does alike: take the features and
//! the queue over at activation, follow changes, save and restore.
//!
//! It owns the `UserspaceQueue` while the driver runs. It must not know which
//! device it serves.

use serde::{Deserialize, Serialize};
use vdpa::ring::RingFeatures;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

use super::backend::{Activation, Queue, QueueChange, SharedMemory};
use super::userspace_queue::{QueueError, SavedQueue, UserspaceQueue};

/// Why a device with one queue cannot do what the transport asked.
#[derive(Debug, thiserror::Error)]
pub enum SingleQueueError {
    /// Features outside the offer, or without VERSION_1.
    #[error("features {features:#x} are not acceptable; offered are {offered:#x}")]
    Features {
        /// What the driver chose.
        features: u64,
        /// What was offered.
        offered: u64,
    },
    /// The device has queue 0 only.
    #[error("there is no queue {0}")]
    NoSuchQueue(u16),
    /// The device cannot reset single queues.
    #[error("queue {0} cannot be reset alone")]
    NoQueueReset(u16),
    /// The queue is enabled twice.
    #[error("the queue is enabled already")]
    AlreadyEnabled,
    /// The queue cannot be served.
    #[error("the queue cannot be served")]
    Queue(#[from] QueueError),
    /// The device must be inactive for that.
    #[error("the device is active already")]
    Active,
    /// The device must be active for that.
    #[error("the device is not active")]
    Inactive,
    /// The saved state has other features, or a queue where the transport has
    /// none, or the reverse.
    #[error("the saved state does not fit the transport's")]
    Mismatch,
}

/// What the offer and the queue's maximum are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    /// Feature bits.
    pub(crate) features: u64,
    /// Largest queue size.
    pub(crate) max_size: u16,
}

impl Offer {
    /// Checks what the driver chose.
    ///
    /// # Errors
    /// [`SingleQueueError::Features`].
    pub(crate) fn check(&self, features: u64) -> Result<(), SingleQueueError> {
        if features & !self.features == 0 && features & (1 << VIRTIO_F_VERSION_1) != 0 {
            Ok(())
        } else {
            Err(SingleQueueError::Features {
                features,
                offered: self.features,
            })
        }
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
    memory: SharedMemory,
    queue: Option<UserspaceQueue>,
}

impl SingleQueue {
    /// Takes over what the driver programmed.
    ///
    /// # Errors
    /// Features, queue index or ring are not acceptable.
    pub(crate) fn activate(
        activation: Activation,
        offer: Offer,
        memory: SharedMemory,
    ) -> Result<Self, SingleQueueError> {
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

    /// As [`SingleQueue::activate`], going on where `saved` stopped.
    ///
    /// # Errors
    /// Also when `saved` does not fit `activation`, or is malformed.
    pub(crate) fn restore(
        saved: SavedSingleQueue,
        mut activation: Activation,
        offer: Offer,
        memory: SharedMemory,
    ) -> Result<Self, SingleQueueError> {
        if saved.features != activation.features
            || usize::from(saved.queue.is_some()) != activation.queues.len()
        {
            return Err(SingleQueueError::Mismatch);
        }
        let queue = activation.queues.pop();
        let mut started = Self::activate(activation, offer, memory)?;
        if let (Some(queue), Some(saved)) = (queue, saved.queue) {
            if queue.index != 0 {
                return Err(SingleQueueError::NoSuchQueue(queue.index));
            }
            started.queue = Some(UserspaceQueue::restore(
                queue,
                saved,
                offer.max_size,
                RingFeatures::of(started.features),
                started.memory.clone(),
            )?);
        }
        Ok(started)
    }

    /// The state to save. Every popped chain must have been given back.
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

    /// The queue, if the driver enabled it.
    pub(crate) fn queue(&mut self) -> Option<&mut UserspaceQueue> {
        self.queue.as_mut()
    }

    /// Follows a change of the running device.
    ///
    /// # Errors
    /// The queue does not exist, is enabled already, or is not acceptable.
    pub(crate) fn change(&mut self, change: QueueChange) -> Result<(), SingleQueueError> {
        match change {
            QueueChange::Call { index, call } => {
                self.queue
                    .as_mut()
                    .filter(|_| index == 0)
                    .ok_or(SingleQueueError::NoSuchQueue(index))?
                    .set_call(call);
                Ok(())
            }
            QueueChange::Enable(queue) => self.enable(queue),
            // RING_RESET is not offered, so the transport never asks.
            QueueChange::Reset { index } => Err(SingleQueueError::NoQueueReset(index)),
        }
    }

    fn enable(&mut self, queue: Queue) -> Result<(), SingleQueueError> {
        if queue.index != 0 {
            return Err(SingleQueueError::NoSuchQueue(queue.index));
        }
        if self.queue.is_some() {
            return Err(SingleQueueError::AlreadyEnabled);
        }
        let queue = UserspaceQueue::new(
            queue,
            self.offer.max_size,
            RingFeatures::of(self.features),
            self.memory.clone(),
        )?;
        // The driver may have made buffers available, and kicked, before this.
        queue.kick().again();
        self.queue = Some(queue);
        Ok(())
    }
}
