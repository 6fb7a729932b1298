//! All of vDPA on this machine as one tree, from NICs to the programs that use them.
//!
//! ```text
//!   PCI function ─┬─ virtual function ── representor, /dev/vfio/N ── holder, VM
//!                 ├─ subfunction ─────── representor
//!                 └─(each)─ management device ── vDPA device ─┬─ /dev/vhost-vdpa-N ── holder, VM
//!   simulator, VDUSE ────── management device ── …            └─ queues: doorbell, posting
//! ```
//!
//! The parts are read in this order, without a lock:
//!
//! ```text
//!   netlink: management devices, vDPA devices, configurations      (Management)
//!     └─> sysfs: the place of each, its driver, its file           (assemble)
//!           └─> /proc: holders of the files, their mappings        (processes)
//! ```
//!
//! An object that appears or vanishes meanwhile is missing or complete: a directory of sysfs whose
//! inode changed during the read is read again. Nothing is opened that a trial would disturb:
//! opening a vhost-vdpa device resets it. Unknown values are reported as unknown, never guessed;
//! `tree` names the source of each part.
//!
//! This module owns the order of reading and the relations of the parts. It changes nothing and
//! does not format the tree.
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
    PostingObstacle, Queue, Representor, Subfunction, Tap, Topology, VfioGroup, VirtualFunction,
};

use super::error::Error;
use super::pci::Address;

/// Reads the tree of this machine.
///
/// The kernel's vDPA management may be unavailable: no module, another network namespace, or its
/// lock is held. Then the tree has the data from sysfs, and [`Topology::management`] shows the
/// reason. Holders that this process may not see are missing; [`Topology::all_processes_seen`]
/// shows that.
///
/// # Errors
/// [`Error`].
pub fn read() -> Result<Topology, Error> {
    of(&Management::of_this_machine()?, Path::new("/"))
}

/// The part of [`read`] for the physical function at `address`, or for that of a virtual one.
///
/// # Errors
/// [`Error`]; `NotFound` if there is none.
pub fn read_function(address: Address) -> Result<Topology, Error> {
    function_of(&Management::of_this_machine()?, Path::new("/"), address)
}

/// The tree of the machine whose files are below `root`, with the answers of its vDPA management.
/// Files are read below `sys` and `proc` there.
///
/// # Errors
/// [`Error`].
pub fn of(management: &Management, root: &Path) -> Result<Topology, Error> {
    assemble::Assembly::new(management, root)?.all()
}

/// The part of [`of`] for one physical function, or for that of a virtual one.
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
