//! A network device in userspace between a driver's rings and a tap, or a queue of a port (`xdp`).
//!
//! ```text
//!   each pair's thread:  driver's ring 1, 3, … --Transmit--> queue 0, 1, … of the tap --> bridge
//!                        driver's ring 0, 2, … <--Receive---                          <--
//!   the first one, too:  messages --Control--> rings, memory       stop eventfd --> the end
//! ```
//! A change of mappings never meets an access: `Control` stops the pairs between two of their
//! turns, each of at most `BUDGET` frames. There is a lock per turn and none per frame, and
//! with one pair one thread. The kernel's tap chooses the receive queue of a frame, so all frames
//! of a flow arrive in one.
//!
//! A frame is copied once, with its virtio-net header, on its way to the driver's buffers. The tap
//! passes checksum and segmentation offloads through. Nothing is allocated for a frame. The buffers
//! belong to the driver: they may be malformed, unmapped, or change at any time. A driver that
//! breaks a ring stops that ring until it resets the device.

mod control;
mod features;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod fuzz;
mod in_flight;
mod mapping;
mod pair;
mod poll;
mod port;
mod receive;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod rig;
mod serve;
mod shared;
mod tap;
mod transmit;
pub mod xdp;

pub use self::features::{Configuration, OFFERED, OFFLOADS, PACKED, PAIRS_MAX};
#[cfg(any(test, feature = "fuzz"))]
pub use self::fuzz::serve_anything;
pub use self::in_flight::IN_FLIGHT_SIZE;
pub use self::port::Port;
pub use self::serve::Nic;
pub use self::tap::Tap;

/// Bytes of `struct virtio_net_hdr_v1`, and of the tap's header.
const HEADER: usize = 12;
/// The largest frame with segmentation offload, with an Ethernet and a VLAN header.
const FRAME_MAX: usize = HEADER + 18 + 65535;
/// Most frames per turn of a queue: the pair's other queue and messages wait no longer.
const BUDGET: usize = 64;
/// A turn also ends with the frame that reaches so many bytes. So the driver handles long frames
/// while this process moves others, and acknowledgments pass in between.
const BUDGET_BYTES: usize = 65536;

/// The result of a queue's turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Turn {
    /// There was a frame.
    found: bool,
    /// More work is waiting, for which no event comes.
    again: bool,
    /// The driver wants an interrupt.
    interrupt: bool,
}

#[cfg(test)]
mod tests;
