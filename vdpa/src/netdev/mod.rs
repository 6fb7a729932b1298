//! A network driver in userspace over a vhost-vdpa device, without a VM. It does for Rust what
//! DPDK's virtio-user does for C.
//!
//! ```text
//!          Netdev::start              suspend
//!   Device --------------> running ---------------> suspended
//!    + Iotlb                |  ^                        |
//!                    pairs: |  +-------- resume --------+
//!               RxQueue, TxQueue
//! ```
//! Queues exist only for a started device, so nothing can be sent before. They are separate values
//! and may move to separate threads. While the device is suspended, their work waits in the rings.
//! A reset of the device invalidates them: start it again for new ones.
//!
//! **Memory.** All rings and buffers of a device are in one
//! [`SharedBuffer`](crate::memory::SharedBuffer). The device accesses it at this process's own
//! addresses (IOVA = VA) if its range allows that, else in the private window.
//! [`Driver::guest_memory`] presents the same bytes as a guest's memory, so that code for a guest's
//! rings works on these.
//!
//! **As a guest.** [`Netdev::relay_set`] gives the queues to a
//! [`SvqSet`](crate::relay::SvqSet), which then changes their path to the device, transparently
//! for the driver. [`Driver::start_relayed`] starts devices again that must be reset for that.
//!
//! **Two ways to use it.** Polling: [`RxQueue::poll`] and [`TxQueue::send`] make no system call
//! except a kick without a doorbell, and do not allocate. Asynchronous: the queues are
//! [`AsFd`](std::os::fd::AsFd) (the call eventfd, non-blocking). The order is as with NAPI:
//! ```text
//!   wait for the fd -> clear_call -> disable_interrupts -> poll until it gives 0
//!     ^                                                       |
//!     +------- false --- enable_interrupts --- true (more) ---+--> poll again
//! ```
//! Frames are Ethernet frames without their virtio header. No offload is negotiated, so the header
//! is zeroes. The source of frames is the caller's concern.

mod config;
mod features;
mod queue;
mod receive;
mod relayed;
mod start;
mod transmit;

pub use self::config::{NetConfig, UNFILTERED, VirtioNetConfig, is_unfiltered};
pub use self::features::{Chains, Kick, Options};
pub use self::queue::{Counters, Virtqueue};
pub use self::receive::{Received, RxQueue};
pub use self::start::{Driver, Netdev, QueuePair};
pub use self::transmit::TxQueue;

/// Bytes of `struct virtio_net_hdr_v1`, before each frame (virtio 1.3, 5.1.6).
pub const HEADER_LEN: u32 = 12;

#[cfg(test)]
mod tests;
