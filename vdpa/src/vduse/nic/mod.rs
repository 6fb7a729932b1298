//! A network device in userspace between a driver's rings and a tap.
//!
//! ```text
//!   driver's rings 1, 3, … --Transmit--> tap --> bridge     messages --Nic--> rings, memory
//!   driver's rings 0, 2, … <--Receive--- tap <-- bridge     stop eventfd --> the end
//! ```
//! One thread does all of it: [`Nic::serve`]. So a change of mappings never meets an access, and
//! there is no lock. A frame is copied once, with its virtio-net header, on its way to the driver's
//! buffers; the tap passes checksum and segmentation offloads through. Nothing is
//! allocated for a frame. The buffers belong to the driver: they may be malformed, unmapped, or
//! change at any time. A driver that breaks a ring stops that ring until it resets the device.

mod features;
mod flow;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod fuzz;
mod receive;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod rig;
mod serve;
mod tap;
mod transmit;

pub use self::features::{Configuration, OFFERED, PACKED, PAIRS_MAX};
#[cfg(any(test, feature = "fuzz"))]
pub use self::fuzz::serve_anything;
pub use self::serve::Nic;
pub use self::tap::Tap;

/// Bytes of `struct virtio_net_hdr_v1`, and of the tap's header.
const HEADER: usize = 12;
/// The largest frame with segmentation offload, with an Ethernet and a VLAN header.
const FRAME_MAX: usize = HEADER + 18 + 65535;
/// Frames per turn: the other queues and messages wait no longer.
const BUDGET: usize = 64;

/// The result of a transmit queue's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Turn {
    /// More work is waiting, for which no event comes.
    again: bool,
    /// The driver wants an interrupt.
    interrupt: bool,
}

#[cfg(test)]
mod tests;
