//! ISA interrupt lines as KVM irqfds.
//!
//! Owns the tie between an eventfd and a pin of PIC and IOAPIC (the default
//! routes lead GSI *n* to both). It must not know the device.

use std::io;
use std::sync::Arc;

use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

/// An edge-triggered interrupt line: each write to the eventfd is one pulse.
/// Dropping it cuts the tie.
#[derive(Debug)]
pub struct InterruptLine {
    vm: Arc<VmFd>,
    eventfd: EventFd,
    gsi: u32,
}

impl InterruptLine {
    /// Ties `eventfd` to `gsi`, an ISA interrupt (0 to 15) or another pin of
    /// the IOAPIC (up to 23).
    ///
    /// # Errors
    /// Whatever `KVM_IRQFD` says, or no descriptor is left.
    pub fn new(vm: Arc<VmFd>, eventfd: &EventFd, gsi: u32) -> io::Result<Self> {
        // The duplicate keeps the eventfd nameable until the tie is cut.
        let eventfd = eventfd.try_clone()?;
        vm.register_irqfd(&eventfd, gsi)?;
        Ok(Self { vm, eventfd, gsi })
    }
}

impl Drop for InterruptLine {
    fn drop(&mut self) {
        if let Err(error) = self.vm.unregister_irqfd(&self.eventfd, self.gsi) {
            tracing::error!(gsi = self.gsi, %error, "interrupt line could not be cut");
        }
    }
}
