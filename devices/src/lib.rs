//! What the guest sees.

pub mod bus;
pub mod hypervisor;
pub mod pci;
pub mod virtio;

#[cfg(test)]
mod testing;
