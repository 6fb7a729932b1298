//! A network driver in userspace over a vhost-vdpa device, without any VM: what
//! DPDK's virtio-user is to C.
//!
//! ```text
//!          Netdev::start              suspend
//!   Device --------------> running ---------------> suspended
//!    + Iotlb                |  ^                        |
//!                    pairs: |  +-------- resume --------+
//!               RxQueue, TxQueue
//! ```
//! Queues exist only of a device that was started, so nothing can be sent before
//! that. They are values of their own and may go to threads of their own;
//! what they do while the device is suspended waits in their rings. After a reset of
//! the device they are dead: start it again for new ones.
//!
//! **Memory.** All rings and buffers of a device are one [`SharedBuffer`](crate::memory::SharedBuffer), which the
//! device sees at this process's own addresses (IOVA = VA) where its range
//! allows it, else in the private window. [`Driver::guest_memory`] shows the same
//! bytes as a guest's memory, so that whatever works on a guest's rings works on these.
//!
//! **As a guest.** [`Netdev::relay_set`] gives the queues to a [`RelaySet`](crate::relay::RelaySet), which
//! then changes how they reach the device; the driver notices nothing. [`Driver::start_relayed`]
//! brings devices up again that have to be reset for that.
//!
//! **Two ways to use it.** Polling: [`RxQueue::poll`] and [`TxQueue::send`] make no system
//! call but a kick where there is no doorbell, and allocate nothing. Asynchronous:
//! the queues are [`AsFd`](std::os::fd::AsFd) (the call eventfd, non-blocking); the order is as with
//! NAPI:
//! ```text
//!   wait for the fd -> clear_call -> disable_interrupts -> poll until it gives 0
//!     ^                                                       |
//!     +------- false --- enable_interrupts --- true (more) ---+--> poll again
//! ```
//! Frames are Ethernet frames without their virtio header; no offload is negotiated, so
//! the header is zeroes. This module must not know where frames come from.

mod config;
mod features;
mod queue;
mod receive;
mod relayed;
mod start;
mod transmit;

pub use self::config::{NetConfig, VirtioNetConfig};
pub use self::features::{Chains, Kick, Options};
pub use self::queue::{Counters, Virtqueue};
pub use self::receive::{Received, RxQueue};
pub use self::start::{Driver, Netdev, QueuePair};
pub use self::transmit::TxQueue;

/// Bytes of `struct virtio_net_hdr_v1`, before each frame (virtio 1.3, 5.1.6).
pub const HEADER_LEN: u32 = 12;

#[cfg(test)]
mod tests;
