//! A queue of a network port as the host's end of the cable, through an AF_XDP socket.
//!
//! ```text
//!   privileged:    Attachment (XDP program, its map, the port's address filter)
//!                      └─ endpoint() ─> Endpoint (socket of the queue, UMEM in a memfd)
//!   in a sandbox:  Socket (the rings, the UMEM) <── the two files of the Endpoint
//! ```
//! The program passes frames of the queue to the socket if they are for the NIC's address or for a
//! group. The others go to the host, as without it. All of it ends with the processes that have it
//! open. Each worker gets a socket of its own, so no ring has a state of another process.
//!
//! The kernel copies each frame between the port and the UMEM (copy mode), so each driver works.
//! The kernel's indices, addresses and lengths are checked before each use.
//!
//! Source: `Documentation/networking/af_xdp.rst` and `linux/if_xdp.h` of Linux 6.12.

mod attachment;
mod program;
mod ring;
mod socket;

pub use self::attachment::{Attachment, Endpoint};
pub use self::socket::Socket;

/// Bytes of a chunk of the UMEM, which holds one frame: the kernel's maximum.
const CHUNK_SIZE: u16 = 4096;
/// The same, for addresses.
const CHUNK: u64 = CHUNK_SIZE as u64;
/// Bytes of the UMEM.
const UMEM_SIZE: usize = 2 * ring::CHUNKS as usize * CHUNK_SIZE as usize;
/// Bytes before a received frame (`XDP_PACKET_HEADROOM` in linux/bpf.h).
const HEADROOM: u16 = 256;
/// Bytes of an Ethernet header with a VLAN tag.
const ETHERNET: u16 = 18;
/// The largest MTU: a chunk holds a whole frame behind the kernel's headroom.
pub const MTU_MAX: u16 = CHUNK_SIZE - HEADROOM - ETHERNET;
#[cfg(test)]
mod tests;
