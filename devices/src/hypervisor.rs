//! What devices need of the hypervisor, as traits.
//!
//! The machine (`vmm`) implements them with KVM irqfds, GSI routes and
//! ioeventfds; tests implement them with plain eventfds. Devices own neither
//! file descriptors of the hypervisor nor any idea of how an interrupt gets
//! to a vCPU.

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
/// While *routed*, a write to [`MsiVector::eventfd`] injects the message
/// without any thread of ours running. While *masked*, the write stays
/// pending in the eventfd's counter and is delivered by the next unmask: that
/// is the Pending Bit of MSI-X.
pub trait MsiVector: Send + Sync + fmt::Debug {
    /// The eventfd that triggers this vector; stays the same for the vector's life.
    fn eventfd(&self) -> &EventFd;

    /// Routes the vector to `message`, replacing the route it had.
    ///
    /// # Errors
    /// Whatever the hypervisor says (no free route, bad message).
    fn unmask(&self, message: MsiMessage) -> io::Result<()>;

    /// Stops delivery; triggers from now on stay pending.
    ///
    /// # Errors
    /// Whatever the hypervisor says.
    fn mask(&self) -> io::Result<()>;

    /// Whether a trigger waits for the next unmask (the MSI-X Pending Bit).
    fn pending(&self) -> bool;
}

/// Gives out interrupt vectors. Dropping a vector returns it.
pub trait MsiVectors: Send + Sync + fmt::Debug {
    /// Allocates one vector, masked.
    ///
    /// # Errors
    /// No vector is left, or no eventfd can be made.
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>>;
}

/// A level-triggered input of the interrupt controller, which one device drives.
pub trait LevelInterrupt: Send + Sync + fmt::Debug {
    /// Asserts the input, or lets it go; it stays so until the next call.
    ///
    /// # Errors
    /// Whatever the hypervisor says.
    fn set(&self, asserted: bool) -> io::Result<()>;
}

/// A page of a device's registers that is mapped in this process and can be put
/// into a guest's address space: a store there is a kick.
///
/// # Safety
/// For as long as the value lives, [`DoorbellPage::host_address`] must stay the
/// same, a multiple of 4096, and the start of one valid mapping of 4096 bytes that
/// no Rust reference points into: the guest stores there at any moment.
pub unsafe trait DoorbellPage: Send + Sync + fmt::Debug {
    /// First address in this process.
    fn host_address(&self) -> u64;
}

/// What guest writes to a notify address do, without an exit to our threads: signal an
/// eventfd (KVM ioeventfd), or go to a page of the device itself (KVM memory
/// slot).
///
/// Both may be at one address for a moment, while the caller changes from one to
/// the other without a gap; which of them a write then reaches is not said. The
/// eventfd must not stay: on Intel hosts it would keep the page from being used.
pub trait Doorbells: Send + Sync + fmt::Debug {
    /// Signals `eventfd` on every guest write to guest-physical `address`. Any
    /// value and any width of 1, 2, 4 or 8 bytes matches.
    ///
    /// # Errors
    /// An eventfd is attached there already, or whatever the hypervisor says.
    fn attach(&self, address: u64, eventfd: &EventFd) -> io::Result<()>;

    /// Undoes [`Doorbells::attach`] with the same arguments.
    ///
    /// # Errors
    /// Nothing was attached there.
    fn detach(&self, address: u64, eventfd: &EventFd) -> io::Result<()>;

    /// Shows `page` to the guest at guest-physical `address`, a multiple of 4096. It is no
    /// guest memory: never logged as dirty, never reached by devices.
    ///
    /// # Errors
    /// Something is there already, or whatever the hypervisor says.
    fn map(&self, address: u64, page: Arc<dyn DoorbellPage>) -> io::Result<()>;

    /// Undoes [`Doorbells::map`]. When it returns, no write of the guest reaches
    /// the page any more, and it is not held any longer.
    ///
    /// # Errors
    /// No page is mapped there, or the hypervisor refuses: the page then stays.
    fn unmap(&self, address: u64) -> io::Result<()>;
}
