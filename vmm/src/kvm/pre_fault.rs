//! Has KVM map guest memory before the guest touches it: `KVM_PRE_FAULT_MEMORY` (Linux 6.11,
//! `Documentation/virt/kvm/api.rst`, 4.143).
//!
//! If another writer has filled a machine's memory, its second-stage page tables (EPT, NPT) are
//! empty. Its guest would fault at the first access to each page, all within moments of its resume.
//!
//! Owns descriptors of the vCPUs, which carry the requests: the page tables are the VM's, but a
//! vCPU has to walk them. It must not know why or when memory is to be mapped. The vCPUs must be
//! parked: KVM locks a vCPU that runs, so a request would wait until it stops.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use kvm_bindings::{KVM_CAP_PRE_FAULT_MEMORY, kvm_pre_fault_memory};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;

use crate::Error;

/// The request. In its own module because the macro writes no documentation.
mod request {
    #![allow(missing_docs, reason = "the macro writes no documentation")]
    use kvm_bindings::{KVMIO, kvm_pre_fault_memory};
    use vmm_sys_util::ioctl_iowr_nr;

    ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);
}
use request::KVM_PRE_FAULT_MEMORY;

/// The kernel accepts whole pages only.
const PAGE: u64 = 4096;
/// Nearby addresses use the same vCPU, so that threads that fill different parts of memory rarely
/// wait for one another. A power of two.
const STRIPE: u64 = 1 << 20;
/// Limit of the repetitions of an incomplete request. The guest's own access maps the rest.
const TRIES: u32 = 8;

/// Maps guest memory for the VM's parked vCPUs.
pub struct PreFault {
    vcpus: Vec<OwnedFd>,
    refused: AtomicBool,
}

impl fmt::Debug for PreFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreFault")
            .field("vcpus", &self.vcpus.len())
            .field("refused", &self.refused)
            .finish()
    }
}

impl PreFault {
    /// Whether this kernel supports it for this VM.
    #[must_use]
    pub fn is_supported(vm: &VmFd) -> bool {
        vm.check_extension_raw(KVM_CAP_PRE_FAULT_MEMORY.into()) > 0
    }

    /// Duplicates a vCPU's descriptor for [`PreFault::new`].
    ///
    /// # Errors
    /// An ioctl failed because no descriptor is left.
    pub fn descriptor(vcpu: &VcpuFd) -> Result<OwnedFd, Error> {
        // SAFETY: needed because `VcpuFd` lends no `BorrowedFd`. It owns the descriptor, and lives
        // longer than this call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        borrowed
            .try_clone_to_owned()
            .map_err(Error::failed("F_DUPFD_CLOEXEC"))
    }

    /// Uses these descriptors of vCPUs of one VM.
    #[must_use]
    pub fn new(vcpus: Vec<OwnedFd>) -> Self {
        Self {
            vcpus,
            refused: AtomicBool::new(false),
        }
    }

    /// Maps the pages of `len` bytes at `guest_address`, as if the guest had read them. The range
    /// must be existing memory: a page that the host has not allocated yet is allocated. Does
    /// nothing if the kernel refuses; the guest's own accesses then map the pages, as on older
    /// kernels.
    pub fn map(&self, guest_address: u64, len: u64) {
        if self.refused.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.try_map(guest_address, len)
            && !self.refused.swap(true, Ordering::Relaxed)
        {
            tracing::debug!(
                %error,
                "KVM refuses KVM_PRE_FAULT_MEMORY; the guest maps its memory itself"
            );
        }
    }

    fn try_map(&self, guest_address: u64, len: u64) -> io::Result<()> {
        let stripe = usize::try_from(guest_address / STRIPE).unwrap_or(0);
        let Some(vcpu) = stripe
            .checked_rem(self.vcpus.len())
            .and_then(|index| self.vcpus.get(index))
        else {
            return Ok(());
        };
        let first = guest_address / PAGE * PAGE;
        let end = guest_address
            .saturating_add(len)
            .div_ceil(PAGE)
            .saturating_mul(PAGE);
        let mut range = kvm_pre_fault_memory {
            gpa: first,
            size: end.saturating_sub(first),
            ..Default::default()
        };
        for _ in 0..TRIES {
            // The kernel removes the mapped part from the range, and may stop before the end.
            if range.size == 0 {
                return Ok(());
            }
            // SAFETY: needed because no crate wraps this ioctl. The descriptor is a vCPU's, and the
            // structure is the ioctl's. The kernel writes only to that structure: the rest of the
            // range.
            let result = unsafe { ioctl_with_mut_ref(vcpu, KVM_PRE_FAULT_MEMORY(), &mut range) };
            if result == 0 {
                continue;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                _ => return Err(error),
            }
        }
        Ok(())
    }
}
