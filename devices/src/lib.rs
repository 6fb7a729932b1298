//! The devices that the guest sees: buses, PCI, the virtio devices and a few legacy ones.
//!
//! Must not know KVM, HTTP, or files of the host other than a device's own backing.

pub mod bus;
mod error;
pub mod hypervisor;
pub mod legacy;
pub mod pci;
mod saved;
pub mod virtio;

pub use error::{Error, ErrorKind};

#[cfg(test)]
mod testing;
