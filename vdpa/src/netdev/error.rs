//! What can go wrong with a network driver in userspace.

use crate::control_queue::{Answer, ControlQueueError};
use crate::device::DeviceError;
use crate::iotlb::IotlbError;
use crate::memory::SharedBufferError;
use crate::ring::QueueError;
use crate::window::WindowError;

/// Why a device could not be started. It was closed, and the kernel reset it.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No network device.
    #[error("the device has the virtio type {device_id}, and a network device has 1")]
    NotNetwork {
        /// Its type (virtio 1.3, section 5).
        device_id: u32,
    },
    /// More queue pairs than there are, or none.
    #[error(
        "{wanted} queue pairs are not possible: the device can have up to {maximum} (`vdpa dev add \
         … max_vqp N` sets that)"
    )]
    Pairs {
        /// Pairs asked for.
        wanted: u16,
        /// What the device can have.
        maximum: u16,
    },
    /// The control queue lies outside of the device's queues.
    #[error("the device says that it has {pairs} queue pairs, but it has only {queues} queues")]
    ControlQueue {
        /// Its `max_virtqueue_pairs`.
        pairs: u16,
        /// Its queues.
        queues: u16,
    },
    /// The device refused something.
    #[error("the device cannot be set up")]
    Device {
        /// What.
        #[source]
        source: DeviceError,
    },
    /// There is no room for rings and buffers in the device's address space.
    #[error("the device's address space has no room for rings and buffers")]
    Window {
        /// Why.
        #[source]
        source: WindowError,
    },
    /// Memory can't be mapped for the device.
    #[error("rings and buffers cannot be mapped for the device")]
    Iotlb {
        /// Why.
        #[source]
        source: IotlbError,
    },
    /// A queue can't be made.
    #[error("a queue cannot be made")]
    Queue {
        /// Why.
        #[source]
        source: NetdevError,
    },
    /// The control queue failed.
    #[error("the control queue does not work")]
    Control {
        /// How.
        #[source]
        source: ControlQueueError,
    },
    /// The device did not accept the number of queue pairs.
    #[error("the device answered {answer:?} to VQ_PAIRS_SET with {pairs} pairs")]
    PairsRefused {
        /// Pairs asked for.
        pairs: u16,
        /// Its answer.
        answer: Answer,
    },
}

/// Why a queue can't be used.
#[derive(Debug, thiserror::Error)]
pub enum NetdevError {
    /// Its ring.
    #[error("the ring failed")]
    Ring {
        /// How.
        #[source]
        source: QueueError,
    },
    /// Its memory.
    #[error("the memory for rings and buffers failed")]
    Memory {
        /// How.
        #[source]
        source: SharedBufferError,
    },
    /// An eventfd.
    #[error("an eventfd failed")]
    Event {
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The frame does not fit a buffer.
    #[error("a frame of {len} bytes cannot be sent: the device takes up to {maximum}")]
    FrameLength {
        /// Its bytes.
        len: usize,
        /// Bytes of the largest one.
        maximum: u32,
    },
}

impl From<QueueError> for NetdevError {
    fn from(source: QueueError) -> Self {
        Self::Ring { source }
    }
}

impl From<SharedBufferError> for NetdevError {
    fn from(source: SharedBufferError) -> Self {
        Self::Memory { source }
    }
}

impl From<DeviceError> for StartError {
    fn from(source: DeviceError) -> Self {
        Self::Device { source }
    }
}

impl From<IotlbError> for StartError {
    fn from(source: IotlbError) -> Self {
        Self::Iotlb { source }
    }
}

impl From<WindowError> for StartError {
    fn from(source: WindowError) -> Self {
        Self::Window { source }
    }
}

impl From<NetdevError> for StartError {
    fn from(source: NetdevError) -> Self {
        Self::Queue { source }
    }
}

impl From<ControlQueueError> for StartError {
    fn from(source: ControlQueueError) -> Self {
        Self::Control { source }
    }
}
