//! What can go wrong with relayed queues.

use std::error::Error;
use std::io;

use crate::device::{DeviceError, VringBase};
use crate::iotlb::IotlbError;
use crate::memory::SharedBufferError;
use crate::relay::RelayError;
use crate::ring::guest::GuestRingError;
use crate::ring::{QueueError, RingFormat};
use crate::window::WindowError;

/// Why queues can't be prepared for being relayed.
#[derive(Debug, thiserror::Error)]
pub enum RelaySetError {
    /// A ring has another format than was negotiated.
    #[error("the ring of queue {queue} is {found} and {negotiated} rings were negotiated")]
    Format {
        /// The queue's index.
        queue: u16,
        /// The ring's format.
        found: RingFormat,
        /// The format that all rings must have.
        negotiated: RingFormat,
    },
    /// The device has no such queue.
    #[error("the queue cannot be relayed")]
    Device {
        /// Why.
        #[source]
        source: DeviceError,
    },
    /// No ring of that size.
    #[error("no private ring can be made")]
    Ring {
        /// Why.
        #[source]
        source: QueueError,
    },
    /// No private addresses are left.
    #[error("the private rings have no addresses")]
    Window {
        /// Why.
        #[source]
        source: WindowError,
    },
    /// No private memory.
    #[error("the private rings have no memory")]
    Memory {
        /// Why.
        #[source]
        source: SharedBufferError,
    },
    /// Private memory could not be mapped for the device.
    #[error("the private rings cannot be mapped")]
    Map {
        /// Why.
        #[source]
        source: IotlbError,
    },
    /// The guest's ring is not where a ring can be.
    #[error("queue {queue}: the guest's ring cannot be relayed")]
    Guest {
        /// Its index.
        queue: u16,
        /// Why.
        #[source]
        source: GuestRingError,
    },
    /// No eventfd.
    #[error("no eventfd can be made")]
    EventFd {
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Why a transition failed.
#[derive(Debug, thiserror::Error)]
pub enum TransitionError {
    /// A queue that is not in the set.
    #[error("queue {queue} is not among the relayed queues")]
    NoSuchQueue {
        /// Its index.
        queue: u16,
    },
    /// Private rings don't keep the order that IN_ORDER promises.
    #[error("queue {queue} cannot be shadowed: IN_ORDER was negotiated")]
    InOrder {
        /// Its index.
        queue: u16,
    },
    /// A packed ring has no used ring of its own.
    #[error(
        "queue {queue} cannot be mediated: a packed ring has no used ring of its own; shadow it"
    )]
    PackedMediated {
        /// Its index.
        queue: u16,
    },
    /// A relay failed.
    #[error("queue {queue} cannot change how it reaches the device")]
    Queue {
        /// Its index.
        queue: u16,
        /// Why.
        #[source]
        source: RelayError,
    },
    /// The device refused.
    #[error("the device refused to change its rings")]
    Device {
        /// What it refused.
        #[source]
        source: DeviceError,
    },
    /// The device begins nowhere but at the start of a ring.
    #[error("queue {queue} stands at {base} and the device refuses to begin there: shadow it")]
    Base {
        /// Its index.
        queue: u16,
        /// Where it stands.
        base: VringBase,
        /// What the kernel said.
        #[source]
        source: DeviceError,
    },
    /// The caller could not bring the device up until its rings.
    #[error("the device cannot be brought up again after its reset")]
    Negotiate {
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The caller could not replay what the guest had set.
    #[error("the control state cannot be replayed")]
    Replay {
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A queue's private memory can't be had, or not be given back.
    #[error("the private memory of queue {queue} cannot be changed")]
    Private {
        /// Its index.
        queue: u16,
        /// Why.
        #[source]
        source: Box<RelaySetError>,
    },
    /// An eventfd could not be written.
    #[error("an eventfd cannot be signalled")]
    Signal {
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// A queue that is broken.
#[derive(Debug, thiserror::Error)]
#[error("queue {queue} is broken")]
pub struct QueueFailed {
    /// Its index.
    pub queue: u16,
    /// Why.
    #[source]
    pub source: RelayError,
}
