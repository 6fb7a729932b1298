//! Runs a vCPU until it is interrupted or fails, and handles its exits.
//!
//! Owns the meaning of KVM's exit reasons. It must not know who interrupts the vCPU, nor allocate
//! while it handles an ordinary exit.
//!
//! A *memory fault* means that KVM_RUN fails with EFAULT: the guest has accessed a memory slot that
//! the host cannot serve. It goes to the [`FaultHandler`]. The instruction has not been executed,
//! so the next run tries it again. That happens only if the handler, or another thread since this
//! vCPU entered the guest, has changed something: a fault that stays ends the vCPU.

use std::fmt;
use std::sync::Arc;

use devices::bus::Bus;
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::failure::VcpuFailure;
use super::run_page::RunPage;

/// The address spaces for a vCPU's exits.
#[derive(Debug, Clone)]
pub struct Buses {
    /// Ports, 0 to 0xFFFF.
    pub io: Arc<Bus>,
    /// Guest-physical addresses that are not memory.
    pub mmio: Arc<Bus>,
}

/// Handles failed accesses of a guest to memory on the host, for example by unmapping a doorbell
/// that the guest has read. Called on the vCPUs' threads, possibly several at once.
pub trait FaultHandler: Send + Sync + fmt::Debug {
    /// Changes whenever any thread has unmapped something that can cause faults from the guest's
    /// address space. Read before each entry to the guest, so it must be cheap.
    fn generation(&self) -> u64;

    /// Handles a failed access at `guest_address` (`None`: the kernel does not report the address).
    /// `true` if something was unmapped, so that the guest should try the access again.
    fn memory_fault(&self, guest_address: Option<u64>) -> bool;
}

/// Handles no fault.
impl FaultHandler for () {
    fn generation(&self) -> u64 {
        0
    }

    fn memory_fault(&self, _guest_address: Option<u64>) -> bool {
        false
    }
}

/// Runs until KVM_RUN is interrupted (`Ok`) or the vCPU cannot continue.
///
/// On `Ok` the instruction that caused the last exit has been completed.
pub(super) fn run(
    fd: &mut VcpuFd,
    page: &RunPage,
    buses: &Buses,
    faults: &dyn FaultHandler,
) -> Result<(), VcpuFailure> {
    loop {
        let generation = faults.generation();
        let memory_fault = |guest_address| {
            if faults.memory_fault(guest_address) || faults.generation() != generation {
                return Ok(());
            }
            Err(VcpuFailure::MemoryFault { guest_address })
        };
        match fd.run() {
            Ok(VcpuExit::IoOut(port, data)) => {
                for element in data.chunks(page.port_access_size()) {
                    buses.io.write(port.into(), element);
                }
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                for element in data.chunks_mut(page.port_access_size()) {
                    buses.io.read(port.into(), element);
                }
            }
            Ok(VcpuExit::MmioWrite(address, data)) => buses.mmio.write(address, data),
            Ok(VcpuExit::MmioRead(address, data)) => buses.mmio.read(address, data),
            // A signal or an interrupt window: nothing to handle.
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => {}
            Ok(VcpuExit::Shutdown) => return Err(VcpuFailure::TripleFault),
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                return Err(VcpuFailure::FailEntry { reason, cpu });
            }
            Ok(VcpuExit::InternalError) => {
                let (suberror, data) = page.internal_error();
                return Err(VcpuFailure::InternalError { suberror, data });
            }
            // Replaces EFAULT where KVM knows the address (Linux 6.8).
            Ok(VcpuExit::MemoryFault { gpa, .. }) => memory_fault(Some(gpa))?,
            // All other exits are off in this machine. This includes HLT: the in-kernel local APIC
            // waits inside KVM.
            Ok(other) => return Err(VcpuFailure::UnexpectedExit(format!("{other:?}"))),
            Err(error) => match error.errno() {
                libc::EINTR => return Ok(()),
                // KVM woke an application processor that waits for its start-up IPI; the next call
                // sleeps if there is none yet.
                libc::EAGAIN => {}
                libc::EFAULT => memory_fault(None)?,
                errno => return Err(VcpuFailure::Run { errno }),
            },
        }
    }
}
