//! Everything about vDPA on this machine as one tree, from NICs to the programs that use them.
//!
//! ```text
//!   PCI function ─┬─ virtual function ── representor
//!                 ├─ subfunction ─────── representor
//!                 └─(each)─ management device ── vDPA device ─┬─ /dev/vhost-vdpa-N ── holder, its VM
//!   simulator, VDUSE ────── management device ── …            └─ queues: doorbell, posted interrupt
//! ```
//!
//! Read in this order, and never locked:
//!
//! ```text
//!   netlink: management devices, vDPA devices, configurations      (Management)
//!     └─> sysfs: where each is, its driver, its file               (assemble)
//!           └─> /proc: who has the files open, what they mapped    (processes)
//! ```
//!
//! What comes or goes meanwhile is missing or whole: a directory of sysfs whose inode changed while it was
//! read is read again. Nothing is opened that a trial would disturb: opening a vhost-vdpa device resets it.
//! What cannot be known is unknown, never guessed; `tree` says of each part where it comes from.
//!
//! Owns the order of reading and how the parts belong together. Changes nothing. Must not know how the tree
//! is shown.
//!
//! ```no_run
//! for function in vdpa_mgmt::topology::read()?.physical_functions {
//!     for one in function.virtual_functions {
//!         println!("{} is virtual function {}", one.function.address, one.index);
//!     }
//! }
//! # Ok::<(), vdpa_mgmt::Error>(())
//! ```

mod assemble;
mod directory;
mod interrupts;
mod management;
mod ports;
mod processes;
mod tree;

use std::path::Path;

pub use management::{Management, ManagementState};
pub use processes::{BellhopRun, DeviceHolder};
pub use tree::{
    Class, Device, Doorbell, ManagementDevice, PciFunction, PhysicalFunction, PostedInterrupt,
    PostingObstacle, Queue, Representor, Subfunction, Topology, VirtualFunction,
};

use super::error::Error;
use super::pci::Address;

/// What is on this machine.
///
/// Without the kernel's vDPA management (no module, another network namespace, or somebody who
/// holds its lock) the tree has what sysfs tells, and [`Topology::management`] says so. Holders
/// that this process may not see are missing; [`Topology::all_processes_seen`] says that.
///
/// # Errors
/// [`Error`].
pub fn read() -> Result<Topology, Error> {
    of(&Management::of_this_machine()?, Path::new("/"))
}

/// The part of [`read`] that belongs to the physical function at `address`, or to that of a virtual
/// one.
///
/// # Errors
/// [`Error`]; `NotFound` if there is none.
pub fn read_function(address: Address) -> Result<Topology, Error> {
    function_of(&Management::of_this_machine()?, Path::new("/"), address)
}

/// What is on the machine whose files are below `root`, with what its vDPA management said. Files
/// are read below `sys` and `proc` there.
///
/// # Errors
/// [`Error`].
pub fn of(management: &Management, root: &Path) -> Result<Topology, Error> {
    assemble::Assembly::new(management, root)?.all()
}

/// The part of [`of`] that belongs to one physical function, or to that of a virtual one.
///
/// # Errors
/// As [`of`]; `NotFound` if there is none.
pub fn function_of(
    management: &Management,
    root: &Path,
    address: Address,
) -> Result<Topology, Error> {
    assemble::Assembly::new(management, root)?.one(address)
}

#[cfg(test)]
mod tests;
