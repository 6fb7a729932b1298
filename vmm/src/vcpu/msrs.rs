//! The model-specific registers of a vCPU: which ones belong to its state, and how they are read
//! and written in batches.
//!
//! Owns the list of the state's MSRs, and the handling of an MSR that a host rejects. It must not
//! know why they are read or written.
//!
//! `KVM_GET_MSR_INDEX_LIST` names most of them, but not all that a guest can change. The memory
//! type ranges, the machine-check banks and IA32_DEBUGCTL are missing there (`msrs_to_save` and
//! `emulated_msrs` in arch/x86/kvm/x86.c). It also names some that are not state (see
//! [`is_state`]).

use std::ops::RangeInclusive;

use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::kvm::cpuid::compatible::{self, Register};

/// IA32_TIME_STAMP_COUNTER.
pub(super) const MSR_TSC: u32 = 0x10;
/// IA32_TSC_DEADLINE.
const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// Hyper-V's MSRs, which this machine does not offer. Even reading one makes
/// KVM set up a Hyper-V context for the vCPU.
const HYPERV_MSRS: RangeInclusive<u32> = 0x4000_0000..=0x4000_01ff;
/// The capabilities of VMX. Nested virtualization is hidden from the guest.
const VMX_CAPABILITY_MSRS: RangeInclusive<u32> = 0x480..=0x493;
/// MSR_KVM_WALL_CLOCK, old and new number, and MSR_KVM_ASYNC_PF_ACK.
const KVM_COMMAND_MSRS: [u32; 3] = [0x11, 0x4b56_4d00, 0x4b56_4d07];

/// Machine-check banks in KVM (`KVM_MAX_MCE_BANKS`), four MSRs each from IA32_MC0_CTL on.
const MC_BANKS: RangeInclusive<u32> = 0x400..=0x400 + 4 * 32 - 1;
/// IA32_MTRR_PHYSBASE0 to IA32_MTRR_PHYSMASK7.
const MTRR_VARIABLE: RangeInclusive<u32> = 0x200..=0x20f;
/// The MTRRs of the first MiB, and IA32_MTRR_DEF_TYPE.
const MTRR_FIXED: [u32; 12] = [
    0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f, 0x2ff,
];
/// IA32_DEBUGCTL.
const MSR_DEBUGCTL: u32 = 0x1d9;

/// MSRs that a host may reject without harm to a guest from another one. Each of them only
/// describes the processor, and a kernel reads it at its start. KVM rejects a value that promises a
/// feature this host lacks.
const DISPENSABLE: [u32; 3] = [
    0x8b,  // IA32_BIOS_SIGN_ID: the microcode's revision
    0xce,  // MSR_PLATFORM_INFO: the base frequency, and whether CPUID can be made to fault
    0x345, // IA32_PERF_CAPABILITIES: the performance counters' formats
];

/// MSRs that exist only for a guest that sees their feature: index, CPUID leaf, bit. Some versions
/// of KVM set them to the host's value in any case, and another host may reject that.
const OF_FEATURES: [(u32, u32, Register, u32); 2] = [
    // IA32_ARCH_CAPABILITIES.
    (0x10a, 7, Register::Edx, 29),
    // IA32_PERF_CAPABILITIES: PDCM.
    (0x345, 1, Register::Ecx, 15),
];

/// A saved MSR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsrState {
    /// Its index, as in ECX of RDMSR.
    pub index: u32,
    /// Its value.
    pub value: u64,
}

/// All MSRs of a vCPU's power-on state: those that KVM lists, and those that it omits. Reading them
/// shows which ones a host has.
pub(super) fn all(listed: Vec<u32>) -> Vec<u32> {
    let forgotten = MTRR_VARIABLE
        .chain(MTRR_FIXED)
        .chain([MSR_DEBUGCTL])
        .chain(MC_BANKS);
    let mut all = listed;
    for index in forgotten {
        if !all.contains(&index) {
            all.push(index);
        }
    }
    all.retain(|index| !HYPERV_MSRS.contains(index));
    all
}

/// Whether a guest that sees the leaves `shown` has the MSR, as far as KVM does not decide that
/// itself.
pub(super) fn belongs(index: u32, shown: &[kvm_cpuid_entry2]) -> bool {
    let feature = OF_FEATURES.iter().find(|(msr, ..)| *msr == index);
    feature.is_none_or(|&(_, leaf, register, bit)| {
        compatible::value(shown, leaf, 0, register) & (1 << bit) != 0
    })
}

/// Whether the MSR goes into a saved vCPU. The TSC is saved separately. The wall clock is a
/// command: KVM writes the time to guest memory, which may have another use by now. The
/// acknowledgement of a page is a command too.
fn is_state(index: u32) -> bool {
    index != MSR_TSC
        && !HYPERV_MSRS.contains(&index)
        && !VMX_CAPABILITY_MSRS.contains(&index)
        && !KVM_COMMAND_MSRS.contains(&index)
}

/// Reads the MSRs for a saved vCPU; `power_on` has those that this host knows.
pub(super) fn save(fd: &VcpuFd, power_on: &[kvm_msr_entry]) -> Result<Vec<MsrState>, Error> {
    let wanted: Vec<kvm_msr_entry> = power_on
        .iter()
        .filter(|msr| is_state(msr.index))
        .copied()
        .collect();
    let now = current(fd, &wanted)?;
    let saved = now.iter().map(|msr| MsrState {
        index: msr.index,
        value: msr.data,
    });
    Ok(saved.collect())
}

/// Selects the saved MSRs to write on this host, in the order of writing.
///
/// # Errors
/// An MSR that Bellhop never saves, or that does not exist here.
pub(super) fn select(
    saved: &[MsrState],
    power_on: &[kvm_msr_entry],
) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut known: Vec<u32> = power_on.iter().map(|msr| msr.index).collect();
    known.sort_unstable();
    let mut selected = Vec::with_capacity(saved.len());
    for &MsrState { index, value } in saved {
        if !is_state(index) {
            let message = format!("MSR {index:#x} does not belong in a saved vCPU");
            return Err(Error::host(message));
        }
        if known.binary_search(&index).is_ok() {
            selected.push(kvm_msr_entry {
                index,
                data: value,
                ..Default::default()
            });
        } else if value != 0 && !DISPENSABLE.contains(&index) {
            return Err(Error::host(format!(
                "MSR {index:#x} is {value:#x} and does not exist on this host: restore on the same \
                 kind of host, or on a newer kernel"
            )));
        }
        // The guest has never used this MSR, which another version of KVM has.
    }
    // The deadline starts a timer, which needs all other state in place.
    selected.sort_by_key(|msr| msr.index == MSR_TSC_DEADLINE);
    Ok(selected)
}

/// Writes the result of [`select`], as far as it differs from the present values.
///
/// # Errors
/// The host rejects a value, or an ioctl failed.
pub(super) fn restore(fd: &VcpuFd, selected: &[kvm_msr_entry]) -> Result<(), Error> {
    let failed = |source| Error::host("cannot transfer the MSRs").because(source);
    let changed = changed(fd, selected).map_err(failed)?;
    let write = |batch: &mut Msrs| {
        fd.set_msrs(batch)
            .map_err(Error::failed("KVM_SET_MSRS"))
            .map_err(failed)
    };
    each_batch(&changed, write, |msr| {
        if DISPENSABLE.contains(&msr.index) {
            log_left_out(msr);
            return Ok(());
        }
        Err(Error::host(format!(
            "this host rejects the value {:#x} of MSR {:#x}",
            msr.data, msr.index
        )))
    })
}

/// Reads those of `indices` that can be read.
pub(super) fn read(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, Error> {
    let wanted: Vec<kvm_msr_entry> = indices
        .iter()
        .map(|&index| kvm_msr_entry {
            index,
            ..Default::default()
        })
        .collect();
    current(fd, &wanted)
}

/// The present value of one MSR; `None` if it can't be read.
pub(super) fn read_one(fd: &VcpuFd, index: u32) -> Result<Option<u64>, Error> {
    Ok(read(fd, &[index])?.first().map(|msr| msr.data))
}

/// Writes `msrs` in order; skips those that the host rejects.
pub(super) fn write(fd: &VcpuFd, msrs: &[kvm_msr_entry]) -> Result<(), Error> {
    each_batch(
        msrs,
        |batch| fd.set_msrs(batch).map_err(Error::failed("KVM_SET_MSRS")),
        left_out,
    )
}

/// The present values of the MSRs in `wanted`.
fn current(fd: &VcpuFd, wanted: &[kvm_msr_entry]) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut found = Vec::with_capacity(wanted.len());
    let transfer = |msrs: &mut Msrs| {
        let done = fd.get_msrs(msrs).map_err(Error::failed("KVM_GET_MSRS"))?;
        found.extend(msrs.as_slice().iter().take(done));
        Ok(done)
    };
    each_batch(wanted, transfer, left_out)?;
    Ok(found)
}

/// Returns those of `wanted` whose present value differs (the TSC's always does). The others need
/// no write, and some hosts log a complaint even about a write of the present value.
pub(super) fn changed(fd: &VcpuFd, wanted: &[kvm_msr_entry]) -> Result<Vec<kvm_msr_entry>, Error> {
    let now = current(fd, wanted)?;
    Ok(differing(wanted, &now))
}

/// The entries of `wanted` without an equal in `now`. Both have the same
/// order, but `now` may lack some.
fn differing(wanted: &[kvm_msr_entry], now: &[kvm_msr_entry]) -> Vec<kvm_msr_entry> {
    let mut now = now.iter().peekable();
    wanted
        .iter()
        .filter(|msr| {
            let same_msr = now.next_if(|current| current.index == msr.index);
            same_msr.is_none_or(|current| current.data != msr.data)
        })
        .copied()
        .collect()
}

fn log_left_out(msr: &kvm_msr_entry) {
    tracing::debug!(index = format_args!("{:#x}", msr.index), "MSR left out");
}

fn left_out(msr: &kvm_msr_entry) -> Result<(), Error> {
    log_left_out(msr);
    Ok(())
}

/// Calls `transfer` until every entry was offered. KVM stops at the first MSR that it rejects (one
/// that is read-only on this host, for example). `refused` decides whether to skip that one and
/// continue.
fn each_batch(
    entries: &[kvm_msr_entry],
    mut transfer: impl FnMut(&mut Msrs) -> Result<usize, Error>,
    mut refused: impl FnMut(&kvm_msr_entry) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut rest = entries;
    while !rest.is_empty() {
        let batch = rest.get(..KVM_MAX_MSR_ENTRIES).unwrap_or(rest);
        // Cannot fail: the batch is no longer than the wrapper's limit.
        let Ok(mut msrs) = Msrs::from_entries(batch) else {
            break;
        };
        let done = transfer(&mut msrs)?.min(batch.len());
        let stopped_at = batch.get(done);
        if let Some(msr) = stopped_at {
            refused(msr)?;
        }
        rest = rest
            .get(done + usize::from(stopped_at.is_some())..)
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
            let transfer = |msrs: &mut Msrs| {
                // Like KVM: stops before the first that it rejects.
                let good = msrs.as_slice().iter().take_while(|msr| msr.index % 7 != 3);
                let before = taken.len();
                taken.extend(good.map(|msr| msr.index));
                Ok(taken.len() - before)
            };
            each_batch(&entries(count), transfer, left_out).unwrap();
            let expected: Vec<u32> = (0..count).filter(|index| index % 7 != 3).collect();
            assert_eq!(taken, expected);
        }
    }

    #[test]
    fn a_refusal_can_end_the_transfer() {
        let refused = |msr: &kvm_msr_entry| Err(Error::host(msr.index.to_string()));
        let error = each_batch(&entries(5), |_| Ok(2), refused).unwrap_err();
        assert_eq!(error.to_string(), "2");
    }

    #[test]
    fn only_changed_values_are_written() {
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
        each_batch(&entries(300), |_| Ok(usize::MAX), left_out).unwrap();
    }

    #[test]
    fn the_list_is_completed() {
        let all = all(vec![MSR_TSC, 0x277, 0x2ff, 0x4000_0000]);
        assert_eq!(all[..3], [MSR_TSC, 0x277, 0x2ff]);
        assert_eq!(all.len(), 3 + 16 + 11 + 1 + 128);
        assert!(all.contains(&MSR_DEBUGCTL) && all.contains(&0x47f));
    }

    #[test]
    fn msrs_of_hidden_features_are_not_there() {
        let leaf = |function, ecx, edx| kvm_cpuid_entry2 {
            function,
            ecx,
            edx,
            ..Default::default()
        };
        let shown = [leaf(1, 1 << 15, 0), leaf(7, 0, 1 << 29)];
        assert!(
            [0x10a, 0x345, 0x174]
                .iter()
                .all(|&msr| belongs(msr, &shown))
        );
        let hidden = [leaf(1, !(1 << 15), !0), leaf(7, !0, !(1 << 29))];
        assert!(!belongs(0x10a, &hidden) && !belongs(0x345, &hidden) && belongs(0x174, &[]));
    }

    #[test]
    fn saved_msrs_are_selected_by_this_host() {
        let here = entries(16);
        let saved = |list: &[(u32, u64)]| -> Vec<MsrState> {
            let state = |&(index, value)| MsrState { index, value };
            list.iter().map(state).collect()
        };
        let selected = select(&saved(&[(3, 7), (0x100, 0), (0x8b, 5), (1, 0)]), &here).unwrap();
        let selected: Vec<_> = selected.iter().map(|msr| (msr.index, msr.data)).collect();
        assert_eq!(selected, [(3, 7), (1, 0)]);
        let error = select(&saved(&[(0x100, 1)]), &here)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("MSR 0x100 is 0x1 and does not exist"),
            "{error}"
        );
        for index in [MSR_TSC, 0x11, 0x480, 0x4000_0000, 0x4b56_4d00] {
            let result = select(&saved(&[(index, 0)]), &entries(0x20));
            let error = result.unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("MSR {index:#x} does not belong")),
                "{error}"
            );
        }
        let with_deadline = [
            kvm_msr_entry {
                index: MSR_TSC_DEADLINE,
                ..Default::default()
            },
            kvm_msr_entry {
                index: 0xc000_0080,
                ..Default::default()
            },
        ];
        let order = select(
            &saved(&[(MSR_TSC_DEADLINE, 1), (0xc000_0080, 2)]),
            &with_deadline,
        );
        let order: Vec<u32> = order.unwrap().iter().map(|msr| msr.index).collect();
        assert_eq!(order, [0xc000_0080, MSR_TSC_DEADLINE]);
    }
}
