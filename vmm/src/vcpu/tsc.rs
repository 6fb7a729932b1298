//! The guest's time stamp counters across a restore.
//!
//! Owns the relation between the TSCs of a VM and its kvmclock. It must not know how kvmclock
//! continues, which [`Vm::restore`](crate::kvm::Vm::restore) has decided before.
//!
//! A saved TSC comes with the value of kvmclock at the time of its reading. A restored one is
//!
//! ```text
//!   TSC = saved TSC + (kvmclock now - kvmclock then) * frequency
//! ```
//! at every moment, so that the guest's two clocks agree as before
//! (`Documentation/virt/kvm/devices/vcpu.rst`, KVM_VCPU_TSC_OFFSET, requires the same). That is
//! computed for the first vCPU. All others get the same offset to the host's counter, plus the
//! difference that the guest itself had set. A guest considers TSCs that differ between processors
//! broken.
//!
//! Offsets are set with KVM_VCPU_TSC_CTRL (Linux 5.16). Older kernels accept a value instead, and
//! give one offset to vCPUs whose values agree within a second (`kvm_synchronize_tsc` in
//! arch/x86/kvm/x86.c).

use std::io;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr, kvm_msr_entry};
use kvm_ioctls::{Cap, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

use super::msrs::{self, MSR_TSC};
use crate::Error;
use crate::kvm::saved::kvmclock_ns;

/// The requests. In their own module because the macro writes no documentation. `kvm-ioctls` has
/// them for other architectures only.
mod request {
    #![allow(missing_docs, reason = "the macro writes no documentation")]
    use kvm_bindings::{KVMIO, kvm_device_attr};
    use vmm_sys_util::ioctl_iow_nr;

    ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
    ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);
}
use request::{KVM_GET_DEVICE_ATTR, KVM_SET_DEVICE_ATTR};

/// Number of joint readings of TSC and kvmclock; the closest pair counts.
const SAMPLES: u32 = 5;
/// A deviation of the frequency that KVM accepts without scaling (`tsc_tolerance_ppm` in
/// arch/x86/kvm/x86.c), in parts per million.
const TOLERANCE_PPM: u64 = 250;

/// A saved TSC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TscState {
    /// Its value (IA32_TIME_STAMP_COUNTER).
    pub value: u64,
    /// The guest's kvmclock when it was read, in nanoseconds.
    pub kvmclock_ns: u64,
    /// Its distance to the source's host TSC (KVM_VCPU_TSC_OFFSET), in ticks modulo 2^64. It gives
    /// the distances between the vCPUs of a VM. `None` if the source's kernel did not report it.
    pub offset: Option<u64>,
    /// Its frequency in kHz (KVM_GET_TSC_KHZ); 0 if the source's kernel did not report it.
    pub khz: u32,
}

/// The frequency of a vCPU's TSC in kHz; 0 if the kernel does not know it (a host whose TSC is not
/// stable).
pub(super) fn khz(fd: &VcpuFd) -> u32 {
    fd.get_tsc_khz().unwrap_or(0)
}

/// Reads the TSC together with kvmclock.
pub(super) fn save(fd: &VcpuFd, vm: &VmFd) -> Result<TscState, Error> {
    let (kvmclock_ns, value) = sample(fd, vm)?;
    Ok(TscState {
        value,
        kvmclock_ns,
        offset: offset(fd)?,
        khz: khz(fd),
    })
}

/// The target values of a VM's TSCs.
#[derive(Debug)]
pub(super) struct Tscs {
    first: TscState,
    /// Ticks by which each vCPU is ahead of the first one, modulo 2^64.
    ahead: Vec<u64>,
}

impl Tscs {
    /// Returns `None` if there are no vCPUs.
    ///
    /// # Errors
    /// They have different frequencies; a VM has one.
    pub(super) fn new(saved: &[TscState]) -> Result<Option<Self>, Error> {
        let Some(&first) = saved.first() else {
            return Ok(None);
        };
        if let Some(other) = saved.iter().find(|tsc| tsc.khz != first.khz) {
            return Err(Error::host(format!(
                "the saved vCPUs have TSCs of {} and {} kHz",
                first.khz, other.khz
            )));
        }
        let ahead = saved.iter().map(|tsc| ahead(*tsc, first)).collect();
        Ok(Some(Self { first, ahead }))
    }

    /// Checks that this vCPU can run at the frequency.
    ///
    /// # Errors
    /// Its frequency differs, and KVM cannot scale it.
    pub(super) fn check_frequency(&self, fd: &VcpuFd, vm: &VmFd) -> Result<(), Error> {
        let here = khz(fd);
        let saved = self.first.khz;
        let close = u64::from(here.abs_diff(saved)) * 1_000_000 <= u64::from(here) * TOLERANCE_PPM;
        if saved == 0 || here == 0 || close || vm.check_extension(Cap::TscControl) {
            return Ok(());
        }
        Err(Error::host(format!(
            "the guest's TSC runs at {saved} kHz, but this host's at {here} kHz without scaling: \
             move the guest to a host with the same TSC frequency"
        )))
    }

    /// Sets the frequency of a vCPU's TSC. Call it for all vCPUs before [`Tscs::restore`].
    pub(super) fn restore_frequency(&self, fd: &VcpuFd) -> Result<(), Error> {
        let here = khz(fd);
        if self.first.khz == 0 || here == 0 || here == self.first.khz {
            return Ok(());
        }
        fd.set_tsc_khz(self.first.khz)
            .map_err(Error::failed("KVM_SET_TSC_KHZ"))
    }

    /// The offset that the first vCPU must have for correct TSCs; `None` on kernels that don't
    /// accept offsets.
    pub(super) fn offset(&self, first: &VcpuFd, vm: &VmFd) -> Result<Option<u64>, Error> {
        let Some(offset) = offset(first)? else {
            return Ok(None);
        };
        let (kvmclock_ns, value) = sample(first, vm)?;
        let wanted = self.at(0, kvmclock_ns, khz(first));
        Ok(Some(offset.wrapping_add(wanted.wrapping_sub(value))))
    }

    /// Sets the TSC of vCPU `index`. `offset` is the result of [`Tscs::offset`].
    pub(super) fn restore(
        &self,
        fd: &VcpuFd,
        vm: &VmFd,
        index: usize,
        offset: Option<u64>,
    ) -> Result<(), Error> {
        if let Some(offset) = offset {
            let wanted = offset.wrapping_add(self.ahead.get(index).copied().unwrap_or(0));
            set_offset(fd, wanted)?;
            if self::offset(fd)? != Some(wanted) {
                tracing::warn!(
                    vcpu = index,
                    "KVM cannot set the guest's TSC on this host: it jumps; kvmclock is right"
                );
            }
            return Ok(());
        }
        let data = self.at(index, kvmclock_ns(vm)?, khz(fd));
        let msr = kvm_msr_entry {
            index: MSR_TSC,
            data,
            ..Default::default()
        };
        msrs::write(fd, &[msr])
    }

    /// The TSC of vCPU `index` when kvmclock is at `kvmclock_ns`, if it runs at `khz`.
    fn at(&self, index: usize, kvmclock_ns: u64, khz: u32) -> u64 {
        let ahead = self.ahead.get(index).copied().unwrap_or(0);
        let passed = i128::from(kvmclock_ns) - i128::from(self.first.kvmclock_ns);
        self.first
            .value
            .wrapping_add(ticks(passed, khz))
            .wrapping_add(ahead)
    }
}

/// Ticks by which `tsc` is ahead of `first`.
fn ahead(tsc: TscState, first: TscState) -> u64 {
    if let (Some(offset), Some(first)) = (tsc.offset, first.offset) {
        return offset.wrapping_sub(first);
    }
    // The two were not read at the same moment, so a small difference counts as none; KVM counts a
    // second as small, too.
    let passed = i128::from(tsc.kvmclock_ns) - i128::from(first.kvmclock_ns);
    let ahead = tsc
        .value
        .wrapping_sub(first.value)
        .wrapping_sub(ticks(passed, first.khz));
    let second = u64::from(first.khz) * 1000;
    if ahead <= second || ahead.wrapping_neg() <= second {
        0
    } else {
        ahead
    }
}

/// Ticks of a counter of `khz` in `nanoseconds`, modulo 2^64.
fn ticks(nanoseconds: i128, khz: u32) -> u64 {
    let ticks = nanoseconds.saturating_mul(i128::from(khz)) / 1_000_000;
    // The remainder is never negative and below 2^64.
    u64::try_from(ticks.rem_euclid(1 << 64)).unwrap_or(0)
}

/// Reads kvmclock in nanoseconds and the TSC at (nearly) the same moment.
fn sample(fd: &VcpuFd, vm: &VmFd) -> Result<(u64, u64), Error> {
    let mut best = None;
    let mut before = kvmclock_ns(vm)?;
    for _ in 0..SAMPLES {
        let tsc = msrs::read_one(fd, MSR_TSC)?
            .ok_or(io::ErrorKind::Unsupported)
            .map_err(Error::failed("KVM_GET_MSRS(MSR_IA32_TSC)"))?;
        let after = kvmclock_ns(vm)?;
        let width = after.saturating_sub(before);
        if best.is_none_or(|(least, _)| width < least) {
            best = Some((width, (before.saturating_add(width / 2), tsc)));
        }
        before = after;
    }
    // There is at least one sample.
    Ok(best.map_or((0, 0), |(_, pair)| pair))
}

/// The vCPU's TSC offset; `None` on kernels that don't report it.
fn offset(fd: &VcpuFd) -> Result<Option<u64>, Error> {
    let mut value = 0u64;
    let attribute = offset_attribute(&raw mut value);
    // SAFETY: needed because `kvm-ioctls` has it for other architectures only. The kernel
    // writes the eight bytes at `addr`, which is `value`, alive and not otherwise used.
    let result = unsafe { ioctl_with_ref(fd, KVM_GET_DEVICE_ATTR(), &attribute) };
    if result == 0 {
        return Ok(Some(value));
    }
    let source = io::Error::last_os_error();
    match source.raw_os_error() {
        Some(libc::ENOTTY | libc::EINVAL | libc::ENXIO) => Ok(None),
        _ => Err(Error::failed("KVM_GET_DEVICE_ATTR(KVM_VCPU_TSC_OFFSET)")(
            source,
        )),
    }
}

fn set_offset(fd: &VcpuFd, offset: u64) -> Result<(), Error> {
    let mut value = offset;
    let mut attribute = offset_attribute(&raw mut value);
    // SAFETY: needed because `kvm-ioctls` has it for other architectures only. The kernel
    // reads the eight bytes at `addr`, which is `value`, alive.
    let result = unsafe { ioctl_with_mut_ref(fd, KVM_SET_DEVICE_ATTR(), &mut attribute) };
    if result == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    Err(Error::failed("KVM_SET_DEVICE_ATTR(KVM_VCPU_TSC_OFFSET)")(
        source,
    ))
}

fn offset_attribute(value: *mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        // An address has 64 bits here.
        addr: u64::try_from(value.expose_provenance()).unwrap_or(0),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tsc(value: u64, kvmclock_ns: u64, offset: Option<u64>) -> TscState {
        TscState {
            value,
            kvmclock_ns,
            offset,
            khz: 2_000_000,
        }
    }

    #[test]
    fn the_counter_follows_kvmclock() {
        let tscs = Tscs::new(&[tsc(1_000, 500, None)]).unwrap().unwrap();
        assert_eq!(tscs.at(0, 500, 2_000_000), 1_000);
        assert_eq!(tscs.at(0, 1_500, 2_000_000), 3_000);
        // kvmclock may be behind: time passes between the two readings.
        assert_eq!(tscs.at(0, 400, 2_000_000), 800);
        // An unknown frequency: the TSC does not advance.
        assert_eq!(tscs.at(0, 1_500, 0), 1_000);
    }

    #[test]
    fn vcpus_keep_the_distance_that_the_guest_gave_them() {
        let far = 10_000_000_000;
        let saved = [
            tsc(1_000, 0, Some(100)),
            tsc(1_000, 700, Some(100)),
            tsc(5, 0, Some(90)),
        ];
        let tscs = Tscs::new(&saved).unwrap().unwrap();
        assert_eq!(tscs.ahead, [0, 0, 10u64.wrapping_neg()]);
        // Without offsets, a small difference is the time between two readings.
        let saved = [
            tsc(1_000, 0, None),
            tsc(2_500, 700, None),
            tsc(1_000 + far, 0, None),
            tsc(1_000u64.wrapping_sub(far), 0, Some(3)),
        ];
        let tscs = Tscs::new(&saved).unwrap().unwrap();
        assert_eq!(tscs.ahead, [0, 0, far, far.wrapping_neg()]);
        assert_eq!(tscs.at(2, 500, 2_000_000), 2_000 + far);
    }

    #[test]
    fn absurd_values_wrap_and_do_not_overflow() {
        let saved = [
            TscState {
                khz: u32::MAX,
                ..tsc(u64::MAX, u64::MAX, None)
            },
            TscState {
                khz: u32::MAX,
                ..tsc(0, 0, Some(u64::MAX))
            },
        ];
        let tscs = Tscs::new(&saved).unwrap().unwrap();
        for clock in [0, 1, u64::MAX] {
            tscs.at(0, clock, u32::MAX);
            tscs.at(7, clock, u32::MAX);
        }
        let mut other = saved;
        other[1].khz = 1;
        let error = Tscs::new(&other).unwrap_err().to_string();
        assert!(error.ends_with("and 1 kHz"), "{error}");
        assert!(Tscs::new(&[]).unwrap().is_none());
    }
}
