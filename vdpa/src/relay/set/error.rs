//! What can go wrong with relayed queues, and in what state the device is then.

use std::error::Error;
use std::fmt;
use std::io;

use crate::device::{
    Device, DeviceError, Failed, Negotiated, Owned, Running, Suspended, VringBase,
};
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
    /// [`Restart::negotiate`](super::Restart::negotiate) failed.
    #[error("the device cannot be brought up again after its reset")]
    Negotiate {
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// [`Restart::replay`](super::Restart::replay) failed.
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

/// The device after a failed transition.
#[derive(Debug)]
pub enum Halted {
    /// It runs as before the transition.
    Running(Device<Running>),
    /// It is suspended and perhaps has some of the new rings: reset it and
    /// [`RelaySet::restart`](super::RelaySet::restart).
    Suspended(Device<Suspended>),
    /// It is reset.
    Reset(Device<Owned>),
    /// It was closed, because its state could not be made known.
    Gone,
}

/// Resets a device that could not be brought up.
pub(super) fn back_to_reset(device: Device<Negotiated>) -> Halted {
    match device.reset() {
        Ok(device) => Halted::Reset(device),
        Err(failed) => failed.device.map_or(Halted::Gone, Halted::Reset),
    }
}

/// A transition that failed.
#[derive(Debug)]
pub struct ChangeFailed {
    /// The device as it is now.
    pub device: Halted,
    /// Why.
    pub error: TransitionError,
}

impl fmt::Display for ChangeFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for ChangeFailed {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

/// A device that could not be brought up to the point where its rings are set.
#[derive(Debug)]
pub struct RestartFailed {
    /// The device, reset; `None` if its state could not be made known and it was closed.
    pub device: Option<Device<Owned>>,
    /// Why.
    pub source: Box<dyn Error + Send + Sync>,
}

impl fmt::Display for RestartFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for RestartFailed {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // Display shows `source` itself, so the chain goes on behind it.
        self.source.source()
    }
}

impl From<Failed<Owned>> for RestartFailed {
    fn from(failed: Failed<Owned>) -> Self {
        Self {
            device: failed.device,
            source: Box::new(failed.error),
        }
    }
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
