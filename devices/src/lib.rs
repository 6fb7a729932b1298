//! What the guest sees: buses, PCI, the virtio devices and the few legacy ones.
//!
//! Must not know KVM, HTTP, or files of the host other than a device's own backing.

pub mod bus;
pub mod hypervisor;
pub mod legacy;
pub mod pci;
pub mod saved;
pub mod virtio;

#[cfg(test)]
mod testing;
