//! The devices' interface to the hypervisor, as traits.
//!
//! The machine (`vmm`) implements them with KVM irqfds, GSI routes and ioeventfds; tests implement
//! them with plain eventfds. Devices do not own descriptors of the hypervisor, and do not know how
//! an interrupt reaches a vCPU.

use std::fmt;
use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

/// A message-signalled interrupt as the guest programmed it into an MSI-X
/// table entry (PCI 3.0, section 6.8.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiMessage {
    /// Message address, low and high half joined.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// One interrupt vector of one device, with an eventfd in front of it.
///
/// ```text
///             unmask(message)
///   masked  ------------------>  routed
///           <------------------
///                 mask()
/// ```
/// While *routed*, a write to [`MsiVector::eventfd`] injects the message without running any thread
/// of this process. While *masked*, the write stays pending in the eventfd's counter, and the next
/// unmask delivers it: that is the Pending Bit of MSI-X.
pub trait MsiVector: Send + Sync + fmt::Debug {
    /// Returns the eventfd that triggers this vector; it stays the same for the vector's life.
    fn eventfd(&self) -> &EventFd;

    /// Routes the vector to `message`, replacing the previous route.
    ///
    /// # Errors
    /// The error of the hypervisor (no free route, invalid message).
    fn unmask(&self, message: MsiMessage) -> io::Result<()>;

    /// Stops delivery; later triggers stay pending.
    ///
    /// # Errors
    /// The error of the hypervisor.
    fn mask(&self) -> io::Result<()>;

    /// Whether a trigger waits for the next unmask (the MSI-X Pending Bit).
    fn pending(&self) -> bool;
}

/// Allocates interrupt vectors. Dropping a vector frees it.
pub trait MsiVectors: Send + Sync + fmt::Debug {
    /// Allocates one vector, masked.
    ///
    /// # Errors
    /// No vector is left, or no eventfd can be created.
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>>;
}

/// A level-triggered input of the interrupt controller, driven by one device.
pub trait LevelInterrupt: Send + Sync + fmt::Debug {
    /// Asserts or deasserts the input, which keeps its level until the next call.
    ///
    /// # Errors
    /// The error of the hypervisor.
    fn set(&self, asserted: bool) -> io::Result<()>;
}

/// Pages of a device's registers that are mapped in this process, for a guest. They are a doorbell,
/// where a store is a kick, or a part of a BAR.
///
/// # Safety
/// As long as the value lives, [`DevicePages::host_address`] must stay the same, a multiple of
/// 4096, and the start of one valid mapping of [`DevicePages::size`] bytes. No Rust reference may
/// point into the mapping: the guest stores there at any moment.
pub unsafe trait DevicePages: Send + Sync + fmt::Debug {
    /// Returns the first address in this process.
    fn host_address(&self) -> u64;

    /// Returns the length in bytes, a multiple of 4096; it stays the same.
    fn size(&self) -> u64 {
        4096
    }
}

/// Determines the effect of the guest's accesses to a device without an exit to a VMM thread. A
/// write signals an eventfd (KVM ioeventfd), or reaches a page of the device itself (KVM memory
/// slot). Such a page is a doorbell, or a part of a BAR.
///
/// Both may be at one address for a moment, while the caller changes from one to the other without
/// a gap. Which one a write then reaches is unspecified. The eventfd must not stay: on Intel hosts
/// it would prevent the page from being used.
pub trait DeviceMappings: Send + Sync + fmt::Debug {
    /// Signals `eventfd` on every guest write to guest-physical `address`, with any value and any
    /// width of 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// An eventfd is already attached there, or the error of the hypervisor.
    fn attach(&self, address: u64, eventfd: &EventFd) -> io::Result<()>;

    /// Undoes [`DeviceMappings::attach`] with the same arguments.
    ///
    /// # Errors
    /// Nothing was attached there.
    fn detach(&self, address: u64, eventfd: &EventFd) -> io::Result<()>;

    /// Maps `pages` into the guest at guest-physical `address`, a multiple of 4096. They are not
    /// guest memory: they are never logged as dirty, and devices never reach them.
    ///
    /// # Errors
    /// An address is in use, or the error of the hypervisor.
    fn map(&self, address: u64, pages: Arc<dyn DevicePages>) -> io::Result<()>;

    /// Undoes [`DeviceMappings::map`]. When it returns, no access of the guest reaches the pages,
    /// and they are released.
    ///
    /// # Errors
    /// No pages are mapped there, or the hypervisor refuses; they then stay.
    fn unmap(&self, address: u64) -> io::Result<()>;
}
