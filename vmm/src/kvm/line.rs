//! Interrupt lines: edges of ISA devices as KVM irqfds, levels by ioctl.
//!
//! Owns the connection between an eventfd and a pin of PIC and IOAPIC (the default routes connect
//! GSI *n* to both). Level-triggered lines need no eventfd: their devices change the level so
//! seldom that a system call each time is cheap. It must not know the device.

use std::io;
use std::sync::Arc;

use devices::hypervisor::LevelInterrupt;
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

/// An edge-triggered interrupt line: each write to the eventfd is one pulse. Dropping it removes
/// the connection.
#[derive(Debug)]
pub struct InterruptLine {
    vm: Arc<VmFd>,
    eventfd: EventFd,
    gsi: u32,
}

impl InterruptLine {
    /// Connects `eventfd` to `gsi`, an ISA interrupt (0 to 15) or another pin of the IOAPIC (up to
    /// 23).
    ///
    /// # Errors
    /// `KVM_IRQFD` failed, or no descriptor is left.
    pub fn new(vm: Arc<VmFd>, eventfd: &EventFd, gsi: u32) -> io::Result<Self> {
        // The drop needs the eventfd to remove the connection, so this keeps a duplicate.
        let eventfd = eventfd.try_clone()?;
        vm.register_irqfd(&eventfd, gsi)?;
        Ok(Self { vm, eventfd, gsi })
    }
}

impl Drop for InterruptLine {
    fn drop(&mut self) {
        if let Err(error) = self.vm.unregister_irqfd(&self.eventfd, self.gsi) {
            tracing::error!(gsi = self.gsi, %error, "cannot disconnect an interrupt line");
        }
    }
}

/// A level-triggered input of the I/O APIC.
#[derive(Debug)]
pub struct LevelLine {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl LevelLine {
    /// The input of `gsi` in the default routes.
    #[must_use]
    pub fn new(vm: Arc<VmFd>, gsi: u32) -> Self {
        Self { vm, gsi }
    }
}

impl LevelInterrupt for LevelLine {
    fn set(&self, asserted: bool) -> io::Result<()> {
        self.vm
            .set_irq_line(self.gsi, asserted)
            .map_err(io::Error::from)
    }
}
