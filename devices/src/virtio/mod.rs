//! Virtio: the transport, the seam behind it, and the backends.

pub mod backend;
pub mod pci;
pub mod status;
