//! The whole state of a vCPU, to resume it elsewhere: from a snapshot, on another host, in another
//! process.
//!
//! Owns the saved form, its checks, and the order in which KVM reads and sets the parts. It must
//! not know where a state comes from: it trusts a state no more than a guest. KVM checks register
//! values, and rejects those that no guest could have. This module checks lengths, counts and the
//! processor.
//!
//! **A parked vCPU has no operation in flight.** It parks only when KVM_RUN returned EINTR. KVM
//! does so after it has completed the port or memory access of the last exit (see the parent
//! module). Any operation that was in flight is then in the vCPU's registers, in guest memory or in
//! the device.
//!
//! Order of saving, with all vCPUs parked: parts whose reading changes others come first.
//! KVM_GET_MP_STATE processes a pending INIT or start-up IPI, KVM_GET_VCPU_EVENTS puts a pending
//! exception's payload into CR2 and DR6.
//!
//! Order of restoring (each arrow has a reason in `arch/x86/kvm/x86.c`):
//!
//! ```text
//!   CPUID            KVM checks the other parts against it
//!     v
//!   TSC of all vCPUs  the timers below are relative to it
//!     v
//!   SREGS            CR4, EFER and the APIC's base; load the PDPTRs from guest memory
//!     v
//!   REGS             forget pending exceptions
//!     v
//!   XCRS, XSAVE, DEBUGREGS
//!     v
//!   LAPIC            after its base
//!     v
//!   MSRS             TSC_DEADLINE, the last, needs an APIC in that mode
//!     v
//!   VCPU_EVENTS      after REGS
//!     v
//!   MP_STATE
//!     v
//!   KVM_KVMCLOCK_CTRL  tells the guest's watchdogs that it was stopped
//! ```
//! Guest memory must be restored before. KVM reads the page directory pointers of a guest in PAE
//! paging from there. 64-bit guests do not need KVM_SET_SREGS2, which would set them from the
//! state.

use kvm_bindings::{
    CpuId, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::thread::{Vcpu, not_set_up};
use super::tsc::{self, Tscs};
use super::{Vcpus, msrs, no_vcpu, xsave};
use crate::Error;
use crate::kvm::cpuid::{baseline, compatible};
use crate::kvm::uapi_bytes;

pub use super::msrs::MsrState;
pub use super::tsc::TscState;

/// More MSRs than any KVM has (about 300 with all machine-check banks).
const MAX_MSRS: usize = 1024;

/// A CPUID leaf as the guest reads it, `struct kvm_cpuid_entry2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuidLeaf {
    /// EAX on entry.
    pub function: u32,
    /// ECX on entry, where `flags` make it significant.
    pub index: u32,
    /// `KVM_CPUID_FLAG_*`.
    pub flags: u32,
    /// EAX, EBX, ECX and EDX on return.
    pub registers: [u32; 4],
}

impl From<&kvm_cpuid_entry2> for CpuidLeaf {
    fn from(entry: &kvm_cpuid_entry2) -> Self {
        Self {
            function: entry.function,
            index: entry.index,
            flags: entry.flags,
            registers: [entry.eax, entry.ebx, entry.ecx, entry.edx],
        }
    }
}

impl From<&CpuidLeaf> for kvm_cpuid_entry2 {
    fn from(leaf: &CpuidLeaf) -> Self {
        let [eax, ebx, ecx, edx] = leaf.registers;
        Self {
            function: leaf.function,
            index: leaf.index,
            flags: leaf.flags,
            eax,
            ebx,
            ecx,
            edx,
            padding: [0; 3],
        }
    }
}

/// A saved vCPU. KVM's structures are saved as their bytes in the layout of
/// `include/uapi/asm/kvm.h` for x86-64.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VcpuState {
    /// The CPUID that the vCPU was created with, at most 256 leaves.
    pub cpuid: Vec<CpuidLeaf>,
    /// `KVM_MP_STATE_*`: running, halted, waiting for a start-up IPI.
    pub mp_state: u32,
    /// Pending and injected events.
    #[serde(with = "uapi_bytes")]
    pub events: kvm_vcpu_events,
    /// General registers.
    #[serde(with = "uapi_bytes")]
    pub regs: kvm_regs,
    /// Segments, control registers, EFER.
    #[serde(with = "uapi_bytes")]
    pub sregs: kvm_sregs,
    /// Debug registers.
    #[serde(with = "uapi_bytes")]
    pub debug_regs: kvm_debugregs,
    /// XCR0.
    #[serde(with = "uapi_bytes")]
    pub xcrs: kvm_xcrs,
    /// The XSAVE area in standard form, in the length that KVM returned: 4096 to 65536 bytes, a
    /// multiple of 4.
    pub xsave: Vec<u8>,
    /// The local APIC's registers.
    #[serde(with = "uapi_bytes")]
    pub lapic: kvm_lapic_state,
    /// The time stamp counter.
    pub tsc: TscState,
    /// All other readable MSRs, at most 1024.
    pub msrs: Vec<MsrState>,
}

impl VcpuState {
    /// Checks that the guest can resume on a processor with the leaves `here`; see
    /// [`compatible::check`].
    ///
    /// # Errors
    /// [`Error`] that names the obstacle.
    pub fn check_cpuid(&self, here: &[kvm_cpuid_entry2]) -> Result<(), Error> {
        compatible::check(&self.cpuid_entries(), here)
    }

    fn cpuid_entries(&self) -> Vec<kvm_cpuid_entry2> {
        self.cpuid.iter().map(kvm_cpuid_entry2::from).collect()
    }

    /// All checks that are possible before anything changes.
    fn check(&self, vcpu: &Vcpu, xsave_len: usize) -> Result<(), Error> {
        self.check_cpuid(&vcpu.cpuid).map_err(other_processor)?;
        xsave::check(&self.xsave, xsave_len)
            .map_err(|source| Error::host("cannot restore the XSAVE area").because(source))?;
        if self.msrs.len() > MAX_MSRS {
            let message = format!("{} MSRs: there are at most {MAX_MSRS}", self.msrs.len());
            return Err(Error::host(message));
        }
        msrs::select(&self.msrs, vcpu.initial.msrs())
            .map(drop)
            .map_err(no_msrs)
    }
}

impl Vcpus {
    /// Reads the whole state of all vCPUs, in their order, without an effect on them.
    ///
    /// Devices that may still raise interrupts should be quiesced before: interrupts they raise
    /// later are lost.
    ///
    /// # Errors
    /// A vCPU is not paused, or KVM returns an error.
    pub fn save(&self) -> Result<Vec<VcpuState>, Error> {
        let xsave_len = xsave::len(&self.vm).map_err(not_set_up(0))?;
        let mut states = Vec::with_capacity(self.threads.len());
        for (index, thread) in (0..).zip(&self.threads) {
            let state = thread.with_vcpu(|vcpu| save(vcpu, &self.vm, xsave_len))?;
            states.push(state.map_err(not_set_up(index))?);
        }
        Ok(states)
    }

    /// Returns the CPUID that the guest sees on its first processor. The vCPUs are parked.
    ///
    /// # Errors
    /// A vCPU is not paused, or there is none.
    pub fn cpuid(&self) -> Result<Vec<CpuidLeaf>, Error> {
        let first = self.threads.first().ok_or_else(no_vcpu)?;
        first.with_vcpu(|vcpu| vcpu.cpuid.iter().map(CpuidLeaf::from).collect())
    }

    /// Checks that a guest with these leaves on its first processor can resume here. The vCPUs are
    /// parked.
    ///
    /// # Errors
    /// Those of [`Vcpus::cpuid`], or an error that names the obstacle.
    pub fn check_cpuid(&self, told: &[CpuidLeaf]) -> Result<(), Error> {
        let first = self.threads.first().ok_or_else(no_vcpu)?;
        let told: Vec<kvm_cpuid_entry2> = told.iter().map(kvm_cpuid_entry2::from).collect();
        let checked = first.with_vcpu(|vcpu| compatible::check(&told, &vcpu.cpuid))?;
        checked.map_err(other_processor).map_err(refused(0))
    }

    /// Whether [`Vcpus::restore`] would accept the states, as far as that is known without a
    /// change: their number, the processor, lengths, MSRs, the TSC's frequency.
    ///
    /// # Errors
    /// A vCPU is not paused, a state is rejected, or KVM returns an error.
    pub fn check(&self, states: &[VcpuState]) -> Result<(), Error> {
        self.checked(states).map(drop)
    }

    fn checked(&self, states: &[VcpuState]) -> Result<Option<Tscs>, Error> {
        if states.len() != self.threads.len() {
            let (saved, here) = (states.len(), self.threads.len());
            return Err(Error::host(format!(
                "the saved machine has {saved} vCPUs, but this one has {here}: give it as many"
            )));
        }
        let xsave_len = xsave::len(&self.vm).map_err(not_set_up(0))?;
        let tscs: Vec<TscState> = states.iter().map(|state| state.tsc).collect();
        let tscs = Tscs::new(&tscs).map_err(no_tsc).map_err(refused(0))?;
        for ((index, thread), state) in (0..).zip(&self.threads).zip(states) {
            let checked = thread.with_vcpu(|vcpu| {
                if let Some(tscs) = &tscs {
                    tscs.check_frequency(&vcpu.fd, &self.vm).map_err(no_tsc)?;
                }
                state.check(vcpu, xsave_len)
            })?;
            checked.map_err(refused(index))?;
        }
        Ok(tscs)
    }

    /// Sets saved states, in the order of the vCPUs, which never ran or were [reset](Vcpus::reset)
    /// before. Guest memory and kvmclock must have been restored: the TSC follows from kvmclock
    /// (see [`crate::kvm::saved`]). vCPUs that never ran get the saved CPUID. So the guest keeps
    /// the processor that it knows, even on a newer one.
    ///
    /// # Errors
    /// Those of [`Vcpus::check`], before any change. After that, if KVM rejects the value of a
    /// register or an MSR: then reset or drop the vCPUs.
    pub fn restore(&self, states: &[VcpuState]) -> Result<(), Error> {
        let tscs = self.checked(states)?;
        let xsave_len = xsave::len(&self.vm).map_err(not_set_up(0))?;
        for ((index, thread), state) in (0..).zip(&self.threads).zip(states) {
            let done = thread.with_vcpu(|vcpu| {
                set_cpuid(vcpu, state)?;
                tscs.as_ref()
                    .map_or(Ok(()), |tscs| tscs.restore_frequency(&vcpu.fd))
            })?;
            done.map_err(not_set_up(index))?;
        }
        if let Some(tscs) = &tscs {
            self.restore_tscs(tscs)?;
        }
        for ((index, thread), state) in (0..).zip(&self.threads).zip(states) {
            thread.with_vcpu(|vcpu| restore(vcpu, state, xsave_len, index))??;
        }
        Ok(())
    }

    fn restore_tscs(&self, tscs: &Tscs) -> Result<(), Error> {
        let mut offset = None;
        for (index, thread) in (0..).zip(&self.threads) {
            let done = thread.with_vcpu(|vcpu| {
                if index == 0 {
                    offset = tscs.offset(&vcpu.fd, &self.vm)?;
                }
                tscs.restore(&vcpu.fd, &self.vm, index.into(), offset)
            })?;
            done.map_err(not_set_up(index))?;
        }
        Ok(())
    }
}

/// The error for a rejected state of a vCPU.
fn refused(index: u8) -> impl FnOnce(Error) -> Error {
    move |source| {
        Error::host(format!("cannot restore the saved state of vCPU {index}")).because(source)
    }
}

fn other_processor(source: Error) -> Error {
    Error::host("the guest cannot run on this host's processor").because(source)
}

fn no_tsc(source: Error) -> Error {
    Error::host("cannot restore the time stamp counter").because(source)
}

fn no_msrs(source: Error) -> Error {
    Error::host("cannot restore the model-specific registers").because(source)
}

fn save(vcpu: &Vcpu, vm: &VmFd, xsave_len: usize) -> Result<VcpuState, Error> {
    let fd = &vcpu.fd;
    let mp_state = fd
        .get_mp_state()
        .map_err(Error::failed("KVM_GET_MP_STATE"))?
        .mp_state;
    let events = fd
        .get_vcpu_events()
        .map_err(Error::failed("KVM_GET_VCPU_EVENTS"))?;
    Ok(VcpuState {
        cpuid: vcpu.cpuid.iter().map(CpuidLeaf::from).collect(),
        mp_state,
        events,
        regs: fd.get_regs().map_err(Error::failed("KVM_GET_REGS"))?,
        sregs: fd.get_sregs().map_err(Error::failed("KVM_GET_SREGS"))?,
        debug_regs: fd
            .get_debug_regs()
            .map_err(Error::failed("KVM_GET_DEBUGREGS"))?,
        xcrs: fd.get_xcrs().map_err(Error::failed("KVM_GET_XCRS"))?,
        xsave: xsave::within(xsave::read(fd, xsave_len)?, baseline::xcr0(&vcpu.cpuid)),
        lapic: fd.get_lapic().map_err(Error::failed("KVM_GET_LAPIC"))?,
        tsc: tsc::save(fd, vm)?,
        msrs: msrs::save(fd, vcpu.initial.msrs())?,
    })
}

/// Sets the CPUID that the guest knows, which has passed [`VcpuState::check_cpuid`].
fn set_cpuid(vcpu: &mut Vcpu, state: &VcpuState) -> Result<(), Error> {
    let entries = state.cpuid_entries();
    if entries == vcpu.cpuid {
        // This also covers calls after the first run, when KVM accepts no other CPUID.
        return Ok(());
    }
    let cpuid = CpuId::from_entries(&entries)
        .map_err(|_| Error::failed("KVM_SET_CPUID2")(std::io::ErrorKind::InvalidInput))?;
    vcpu.fd
        .set_cpuid2(&cpuid)
        .map_err(Error::failed("KVM_SET_CPUID2"))?;
    vcpu.cpuid = entries;
    Ok(())
}

fn restore(vcpu: &Vcpu, state: &VcpuState, xsave_len: usize, index: u8) -> Result<(), Error> {
    tracing::debug!(
        index,
        rip = format_args!("{:#x}", state.regs.rip),
        rflags = format_args!("{:#x}", state.regs.rflags),
        cr3 = format_args!("{:#x}", state.sregs.cr3),
        mp_state = state.mp_state,
        interrupt_bitmap = ?state.sregs.interrupt_bitmap,
        events = ?state.events,
        "a vCPU gets its state"
    );
    restore_registers(&vcpu.fd, state, xsave_len).map_err(not_set_up(index))?;
    msrs::select(&state.msrs, vcpu.initial.msrs())
        .and_then(|selected| msrs::restore(&vcpu.fd, &selected))
        .map_err(no_msrs)
        .map_err(refused(index))?;
    restore_events(&vcpu.fd, state).map_err(not_set_up(index))
}

fn restore_registers(fd: &VcpuFd, state: &VcpuState, xsave_len: usize) -> Result<(), Error> {
    fd.set_sregs(&state.sregs)
        .map_err(Error::failed("KVM_SET_SREGS"))?;
    fd.set_regs(&state.regs)
        .map_err(Error::failed("KVM_SET_REGS"))?;
    fd.set_xcrs(&state.xcrs)
        .map_err(Error::failed("KVM_SET_XCRS"))?;
    xsave::write(fd, &state.xsave, xsave_len)?;
    fd.set_debug_regs(&state.debug_regs)
        .map_err(Error::failed("KVM_SET_DEBUGREGS"))?;
    fd.set_lapic(&state.lapic)
        .map_err(Error::failed("KVM_SET_LAPIC"))
}

fn restore_events(fd: &VcpuFd, state: &VcpuState) -> Result<(), Error> {
    fd.set_vcpu_events(&state.events)
        .map_err(Error::failed("KVM_SET_VCPU_EVENTS"))?;
    fd.set_mp_state(kvm_mp_state {
        mp_state: state.mp_state,
    })
    .map_err(Error::failed("KVM_SET_MP_STATE"))?;
    match fd.kvmclock_ctrl() {
        // The guest uses no kvmclock, so it has no watchdog on it either.
        Err(error) if error.errno() == libc::EINVAL => Ok(()),
        result => result.map_err(Error::failed("KVM_KVMCLOCK_CTRL")),
    }
}

#[cfg(test)]
mod tests;
