//! The processors of guests whose device interrupts the host: the vCPUs have one, the interrupts
//! another one.
//!
//! An interrupt of the host ends the entry of a vCPU on its processor. So the rate halves if both
//! share one. Without this, the scheduler would decide which contender that is.

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::error::{Error, Result};
use crate::restored::Restored;

/// The processor of all VMMs.
const OF_VMMS: usize = 0;

/// The mask of the processor that gets interrupts: number 1.
const OF_INTERRUPTS: &str = "2";

/// Separates the VMMs that this thread starts from the interrupts that their guests enable. The
/// other setting for interrupts is back when the value is dropped.
///
/// # Errors
/// [`Error::File`] without rights; [`Error::System`].
pub(super) fn separate() -> Result<Restored> {
    let interrupts = Restored::keep("/proc/irq/default_smp_affinity")?;
    interrupts.set(OF_INTERRUPTS)?;
    let mut processors = CpuSet::new();
    processors.set(OF_VMMS);
    sched_setaffinity(None, &processors).map_err(Error::system("choose a processor"))?;
    Ok(interrupts)
}
