//! The power-on state of a vCPU, kept for a reboot in place.
//!
//! KVM has no ioctl that resets a vCPU. So the state is read right after creation and written back
//! later. This module owns the list of its parts and the order that KVM requires.

use kvm_bindings::{
    kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;

use super::msrs::{self, MSR_TSC};
use crate::Error;

/// All vCPU state that a guest can change, as KVM created it. Nested virtualization is not
/// included: the guest's CPUID does not offer it.
pub(super) struct InitialState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    debug_regs: kvm_debugregs,
    events: kvm_vcpu_events,
    lapic: kvm_lapic_state,
    xcrs: kvm_xcrs,
    /// 4 KiB.
    xsave: Box<kvm_xsave>,
    msrs: Vec<kvm_msr_entry>,
}

impl InitialState {
    /// Reads the state of a vCPU that has its CPUID and never ran.
    pub(super) fn capture(fd: &VcpuFd, msr_indices: &[u32]) -> Result<Self, Error> {
        Ok(Self {
            mp_state: fd
                .get_mp_state()
                .map_err(Error::failed("KVM_GET_MP_STATE"))?,
            regs: fd.get_regs().map_err(Error::failed("KVM_GET_REGS"))?,
            sregs: fd.get_sregs().map_err(Error::failed("KVM_GET_SREGS"))?,
            debug_regs: fd
                .get_debug_regs()
                .map_err(Error::failed("KVM_GET_DEBUGREGS"))?,
            events: fd
                .get_vcpu_events()
                .map_err(Error::failed("KVM_GET_VCPU_EVENTS"))?,
            lapic: fd.get_lapic().map_err(Error::failed("KVM_GET_LAPIC"))?,
            xcrs: fd.get_xcrs().map_err(Error::failed("KVM_GET_XCRS"))?,
            xsave: Box::new(fd.get_xsave().map_err(Error::failed("KVM_GET_XSAVE"))?),
            msrs: power_on_msrs(fd, msr_indices)?,
        })
    }

    /// Writes the state back. The vCPU must not be running.
    pub(super) fn restore(&self, fd: &VcpuFd) -> Result<(), Error> {
        fd.set_regs(&self.regs)
            .map_err(Error::failed("KVM_SET_REGS"))?;
        // SREGS turn SSE and AVX on or off in CR4; XCRS and XSAVE come after. SREGS are written
        // twice, first with another CR3 (paging is off, so it has no meaning). On AMD hosts KVM
        // clears the VMCB at a triple fault, and with it the root of the nested page tables. KVM
        // sets that root again only when it rebuilds its MMU context, which a change of CR3
        // triggers. Without it the vCPU would fault forever on its first instruction.
        let mut sregs = self.sregs;
        sregs.cr3 ^= 0x1000;
        for sregs in [&sregs, &self.sregs] {
            fd.set_sregs(sregs)
                .map_err(Error::failed("KVM_SET_SREGS"))?;
        }
        fd.set_xcrs(&self.xcrs)
            .map_err(Error::failed("KVM_SET_XCRS"))?;
        // SAFETY: needed because KVM may read more than the structure where dynamic features (AMX)
        // were enabled with arch_prctl. This process never does that. KVM_GET_XSAVE, which fails
        // where the structure is too small, has filled this one.
        unsafe { fd.set_xsave(&self.xsave) }.map_err(Error::failed("KVM_SET_XSAVE"))?;
        fd.set_debug_regs(&self.debug_regs)
            .map_err(Error::failed("KVM_SET_DEBUGREGS"))?;
        // KVM accepts the TSC-deadline MSR only after the local APIC is restored.
        fd.set_lapic(&self.lapic)
            .map_err(Error::failed("KVM_SET_LAPIC"))?;
        msrs::write(fd, &msrs::changed(fd, &self.msrs)?)?;
        // After SREGS, which hold a pending interrupt too.
        fd.set_vcpu_events(&self.events)
            .map_err(Error::failed("KVM_SET_VCPU_EVENTS"))?;
        fd.set_mp_state(self.mp_state)
            .map_err(Error::failed("KVM_SET_MP_STATE"))
    }

    /// The MSRs that this host's KVM knows, with their values at power-on.
    pub(super) fn msrs(&self) -> &[kvm_msr_entry] {
        &self.msrs
    }
}

fn power_on_msrs(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut found = msrs::read(fd, indices)?;
    for msr in &mut found {
        if msr.index == MSR_TSC {
            // Zero does not mean zero: KVM treats it as a new vCPU and gives it the same running
            // TSC as the others (kvm_synchronize_tsc in arch/x86/kvm/x86.c).
            msr.data = 0;
        }
    }
    Ok(found)
}
