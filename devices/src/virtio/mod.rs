//! Virtio: the transport, the seam behind it, and the backends.

pub mod backend;
pub mod block;
pub mod pci;
pub mod rng;
pub mod saved_state;
pub mod single_queue;
pub mod status;
pub mod userspace_queue;
pub mod vdpa;
