//! vDPA devices in userspace (VDUSE): this process is the device of a driver in a guest or on this
//! host.
//!
//! ```text
//!   Control --create--> /dev/vduse/NAME --open--> Device --messages, mappings, queues--> nic::Nic
//!                              |                                                            |
//!              `vdpa dev add`  v                                                            v
//!                      vDPA device (vhost_vdpa)                               rings of crate::ring
//! ```
//! The kernel waits for the answer to each message, also while the vDPA device is added and
//! deleted. So another thread than the one that serves the device does that. This module does not
//! use netlink.
//!
//! The driver and the process that maps memory are untrusted: addresses, mappings and positions
//! are checked here. A process that truncates the file of its guest's memory ends its own NIC's
//! process with SIGBUS, and no other.

mod control;
mod device;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::indexing_slicing,
    reason = "code of tests, which fuzz targets use"
)]
mod fake;
mod memory;
mod message;
pub mod nic;

pub use self::control::{Control, Created, Description};
pub use self::device::{Device, QueueInfo};
pub use self::memory::{MAPPINGS_MAX, Mappings};
pub use self::message::{Message, Request};
