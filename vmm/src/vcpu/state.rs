//! The power-on state of a vCPU, kept for a reboot in place.
//!
//! KVM has no ioctl that resets a vCPU, so what it made is read right after
//! creation and written back later. This module owns which parts there are and
//! the order in which KVM wants them.

use kvm_bindings::{
    KVM_MAX_MSR_ENTRIES, Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;

use crate::kvm::KvmError;

/// IA32_TIME_STAMP_COUNTER.
const MSR_TSC: u32 = 0x10;
/// Hyper-V's MSRs, which this machine does not offer. Even reading one makes
/// KVM set up a Hyper-V context for the vCPU.
const HYPERV_MSRS: std::ops::RangeInclusive<u32> = 0x4000_0000..=0x4000_01ff;

/// Everything that a guest can change about a vCPU, as KVM made it. Nested
/// virtualization is not among it: the guest's CPUID does not offer it.
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
    pub(super) fn capture(fd: &VcpuFd, msr_indices: &[u32]) -> Result<Self, KvmError> {
        Ok(Self {
            mp_state: fd
                .get_mp_state()
                .map_err(KvmError::ioctl("KVM_GET_MP_STATE"))?,
            regs: fd.get_regs().map_err(KvmError::ioctl("KVM_GET_REGS"))?,
            sregs: fd.get_sregs().map_err(KvmError::ioctl("KVM_GET_SREGS"))?,
            debug_regs: fd
                .get_debug_regs()
                .map_err(KvmError::ioctl("KVM_GET_DEBUGREGS"))?,
            events: fd
                .get_vcpu_events()
                .map_err(KvmError::ioctl("KVM_GET_VCPU_EVENTS"))?,
            lapic: fd.get_lapic().map_err(KvmError::ioctl("KVM_GET_LAPIC"))?,
            xcrs: fd.get_xcrs().map_err(KvmError::ioctl("KVM_GET_XCRS"))?,
            xsave: Box::new(fd.get_xsave().map_err(KvmError::ioctl("KVM_GET_XSAVE"))?),
            msrs: read_msrs(fd, msr_indices)?,
        })
    }

    /// Writes the state back. The vCPU must not be running.
    pub(super) fn restore(&self, fd: &VcpuFd) -> Result<(), KvmError> {
        fd.set_regs(&self.regs)
            .map_err(KvmError::ioctl("KVM_SET_REGS"))?;
        // SREGS turn SSE and AVX on or off in CR4; XCRS and XSAVE come after.
        // They are written twice, first with another CR3 (paging is off, so it
        // means nothing): on AMD hosts KVM wipes the VMCB at a triple fault,
        // the root of the nested page tables with it, and sets that root again only
        // when it rebuilds its MMU context, which a change of CR3 makes it do.
        // Without it the vCPU would fault for ever on its first instruction.
        let mut sregs = self.sregs;
        sregs.cr3 ^= 0x1000;
        for sregs in [&sregs, &self.sregs] {
            fd.set_sregs(sregs)
                .map_err(KvmError::ioctl("KVM_SET_SREGS"))?;
        }
        fd.set_xcrs(&self.xcrs)
            .map_err(KvmError::ioctl("KVM_SET_XCRS"))?;
        // SAFETY: needed because KVM may read more than the structure where
        // dynamic features (AMX) were enabled with arch_prctl. This process
        // never does that, and KVM_GET_XSAVE, which fails where the
        // structure is too small, filled this one.
        unsafe { fd.set_xsave(&self.xsave) }.map_err(KvmError::ioctl("KVM_SET_XSAVE"))?;
        fd.set_debug_regs(&self.debug_regs)
            .map_err(KvmError::ioctl("KVM_SET_DEBUGREGS"))?;
        // The TSC-deadline MSR is only taken once the local APIC is back.
        fd.set_lapic(&self.lapic)
            .map_err(KvmError::ioctl("KVM_SET_LAPIC"))?;
        write_msrs(fd, &changed_msrs(fd, &self.msrs)?)?;
        // After SREGS, which hold a pending interrupt too.
        fd.set_vcpu_events(&self.events)
            .map_err(KvmError::ioctl("KVM_SET_VCPU_EVENTS"))?;
        fd.set_mp_state(self.mp_state)
            .map_err(KvmError::ioctl("KVM_SET_MP_STATE"))
    }
}

fn read_msrs(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let wanted: Vec<kvm_msr_entry> = indices
        .iter()
        .filter(|index| !HYPERV_MSRS.contains(index))
        .map(|&index| kvm_msr_entry {
            index,
            ..Default::default()
        })
        .collect();
    let mut found = current_msrs(fd, &wanted)?;
    for msr in &mut found {
        if msr.index == MSR_TSC {
            // Zero does not mean zero: KVM takes it for a vCPU that was just
            // made and gives it the same TSC as the others, which goes on
            // counting (kvm_synchronize_tsc in arch/x86/kvm/x86.c).
            msr.data = 0;
        }
    }
    Ok(found)
}

/// The values that the MSRs in `wanted` have now.
fn current_msrs(fd: &VcpuFd, wanted: &[kvm_msr_entry]) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let mut found = Vec::with_capacity(wanted.len());
    each_batch(wanted, |msrs| {
        let done = fd.get_msrs(msrs).map_err(KvmError::ioctl("KVM_GET_MSRS"))?;
        found.extend(msrs.as_slice().iter().take(done));
        Ok(done)
    })?;
    Ok(found)
}

/// Those of `initial` that the guest has changed (the TSC always has). The others need no
/// write, and some hosts complain in their log about a write even of the
/// value that is there.
fn changed_msrs(fd: &VcpuFd, initial: &[kvm_msr_entry]) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let now = current_msrs(fd, initial)?;
    Ok(differing(initial, &now))
}

/// The entries of `initial` without an equal in `now`. Both have the same
/// order, but `now` may lack some.
fn differing(initial: &[kvm_msr_entry], now: &[kvm_msr_entry]) -> Vec<kvm_msr_entry> {
    let mut now = now.iter().peekable();
    initial
        .iter()
        .filter(|msr| {
            let same_msr = now.next_if(|current| current.index == msr.index);
            same_msr.is_none_or(|current| current.data != msr.data)
        })
        .copied()
        .collect()
}

/// Writes `msrs` in order.
pub(super) fn write_msrs(fd: &VcpuFd, msrs: &[kvm_msr_entry]) -> Result<(), KvmError> {
    each_batch(msrs, |batch| {
        fd.set_msrs(batch).map_err(KvmError::ioctl("KVM_SET_MSRS"))
    })
}

/// Calls `transfer` until every entry was offered. KVM stops at the first MSR
/// that it doesn't take (one that is read-only on this host, say): that one is
/// left out and the rest goes on.
fn each_batch(
    entries: &[kvm_msr_entry],
    mut transfer: impl FnMut(&mut Msrs) -> Result<usize, KvmError>,
) -> Result<(), KvmError> {
    let mut rest = entries;
    while !rest.is_empty() {
        let batch = rest.get(..KVM_MAX_MSR_ENTRIES).unwrap_or(rest);
        // Cannot fail: the batch is no longer than the wrapper's limit.
        let Ok(mut msrs) = Msrs::from_entries(batch) else {
            break;
        };
        let done = transfer(&mut msrs)?.min(batch.len());
        let refused = batch.get(done);
        if let Some(msr) = refused {
            tracing::debug!(index = format_args!("{:#x}", msr.index), "MSR left out");
        }
        rest = rest
            .get(done + usize::from(refused.is_some())..)
            .unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(count: u32) -> Vec<kvm_msr_entry> {
        (0..count)
            .map(|index| kvm_msr_entry {
                index,
                ..Default::default()
            })
            .collect()
    }

    #[test]
    fn refused_msrs_are_left_out_and_all_others_transferred() {
        for count in [0, 1, 255, 256, 257, 700] {
            let mut taken = Vec::new();
            each_batch(&entries(count), |msrs| {
                // Like KVM: stops in front of the first that it doesn't take.
                let good = msrs.as_slice().iter().take_while(|msr| msr.index % 7 != 3);
                let before = taken.len();
                taken.extend(good.map(|msr| msr.index));
                Ok(taken.len() - before)
            })
            .unwrap();
            let expected: Vec<u32> = (0..count).filter(|index| index % 7 != 3).collect();
            assert_eq!(taken, expected);
        }
    }

    #[test]
    fn only_what_changed_is_written() {
        let msrs = |list: &[(u32, u64)]| -> Vec<kvm_msr_entry> {
            list.iter()
                .map(|&(index, data)| kvm_msr_entry {
                    index,
                    data,
                    ..Default::default()
                })
                .collect()
        };
        let initial = msrs(&[(1, 10), (2, 20), (3, 30), (4, 40)]);
        assert!(differing(&initial, &initial).is_empty());
        // 2 changed, 3 can't be read now: it is written to be sure.
        let now = msrs(&[(1, 10), (2, 21), (4, 40)]);
        assert_eq!(differing(&initial, &now), msrs(&[(2, 20), (3, 30)]));
        assert_eq!(differing(&initial, &[]), initial);
        assert!(differing(&[], &initial).is_empty());
    }

    #[test]
    fn a_transfer_that_claims_too_much_ends() {
        each_batch(&entries(300), |_| Ok(usize::MAX)).unwrap();
    }
}
