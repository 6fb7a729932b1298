//! Runs a vCPU until it is interrupted or fails, and answers its exits.
//!
//! Owns the meaning of KVM's exit reasons. It must not know who interrupts
//! the vCPU, nor allocate on the way of an ordinary exit.
//!
//! A *memory fault* (KVM_RUN fails with EFAULT: the guest's access met a memory
//! slot that the host cannot serve) is handed to the [`FaultHandler`]. The
//! instruction has not been executed, so to run again is to try it again. That is done only
//! if the handler changed something, or somebody else did since this vCPU entered
//! the guest: a fault that stays ends the vCPU.

use std::fmt;
use std::sync::Arc;

use devices::bus::Bus;
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::failure::VcpuFailure;
use super::run_page::RunPage;

/// The address spaces that a vCPU's exits go to.
#[derive(Debug, Clone)]
pub struct Buses {
    /// Ports, 0 to 0xFFFF.
    pub io: Arc<Bus>,
    /// Guest-physical addresses that are not memory.
    pub mmio: Arc<Bus>,
}

/// Who may know a remedy when a guest's access to memory fails on the host: a
/// doorbell that was read, for example, is taken away. Called on the
/// vCPU's thread, on several at once.
pub trait FaultHandler: Send + Sync + fmt::Debug {
    /// Changes whenever something that can cause faults has been taken away from the
    /// guest's address space, by whomever. Read before each entry to the
    /// guest, so cheap.
    fn generation(&self) -> u64;

    /// The guest's access at `guest_address` failed (`None`: the kernel does not say
    /// where). `true` if something was taken away, so that the access is worth
    /// another try.
    fn memory_fault(&self, guest_address: Option<u64>) -> bool;
}

/// No remedy for anything.
impl FaultHandler for () {
    fn generation(&self) -> u64 {
        0
    }

    fn memory_fault(&self, _guest_address: Option<u64>) -> bool {
        false
    }
}

/// Runs until KVM_RUN is interrupted (`Ok`) or the vCPU cannot go on.
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
            // A signal or an interrupt window: nothing was asked of us.
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => {}
            Ok(VcpuExit::Shutdown) => return Err(VcpuFailure::TripleFault),
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                return Err(VcpuFailure::FailEntry { reason, cpu });
            }
            Ok(VcpuExit::InternalError) => {
                let (suberror, data) = page.internal_error();
                return Err(VcpuFailure::InternalError { suberror, data });
            }
            // What EFAULT is called where KVM knows the address (Linux 6.8).
            Ok(VcpuExit::MemoryFault { gpa, .. }) => memory_fault(Some(gpa))?,
            // Everything else is off in this machine. HLT too: the in-kernel
            // local APIC waits inside KVM.
            Ok(other) => return Err(VcpuFailure::UnexpectedExit(format!("{other:?}"))),
            Err(error) => match error.errno() {
                libc::EINTR => return Ok(()),
                // An application processor that waits for its start-up IPI
                // was woken; KVM sleeps in the next call if there is none yet.
                libc::EAGAIN => {}
                libc::EFAULT => memory_fault(None)?,
                errno => return Err(VcpuFailure::Run { errno }),
            },
        }
    }
}
