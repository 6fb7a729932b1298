//! A separate mapping of the page that a vCPU shares with KVM (`kvm_run`).
//!
//! `kvm_ioctls` has one too, but only lends it together with the whole vCPU. The controlling thread
//! must set `immediate_exit` while the vCPU's thread is inside KVM_RUN, and the exit handler needs
//! fields that `kvm_ioctls` omits. This module owns the mapping and nothing else.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;

/// Bytes mapped: the part with the exit information (`struct kvm_run` is
/// smaller than a page; the data of port accesses follows on the next one).
const LENGTH: usize = size_of::<kvm_run>();

/// The shared page of one vCPU.
#[derive(Debug)]
pub(super) struct RunPage(NonNull<kvm_run>);

// SAFETY: needed because the pointer hides it. The mapping belongs to this value alone, is not tied
// to a thread, and every access through it is atomic or volatile.
unsafe impl Send for RunPage {}
// SAFETY: as above: all methods use `&self` and make atomic or volatile accesses to memory that the
// kernel changes at any time anyway.
unsafe impl Sync for RunPage {}

impl RunPage {
    /// Maps the page of `vcpu`. The mapping keeps the vCPU alive in the kernel.
    pub(super) fn map(vcpu: &VcpuFd) -> io::Result<Self> {
        // SAFETY: needed to share memory with KVM. A new mapping at an address of the kernel's
        // choice does not touch Rust's memory.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                LENGTH,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(address.cast())
            .map(Self)
            .ok_or_else(|| io::Error::other("a vCPU page was mapped at address 0"))
    }

    /// Makes KVM_RUN return EINTR on its next entry; `false` clears that.
    pub(super) fn set_immediate_exit(&self, on: bool) {
        // SAFETY: needed to name a field of shared memory. The pointer is
        // inside the mapping, bytes have no alignment, and in this process
        // the field is accessed only here, as an atomic.
        let field = unsafe { AtomicU8::from_ptr(&raw mut (*self.0.as_ptr()).immediate_exit) };
        field.store(on.into(), Ordering::SeqCst);
    }

    /// Bytes per element of the port access that caused the last exit: a string instruction
    /// transfers many elements at once (`rep outsb`).
    pub(super) fn port_access_size(&self) -> usize {
        // SAFETY: needed to read a union in shared memory. The pointer is
        // inside the mapping and aligned; any bytes are a valid integer.
        let size =
            unsafe { (&raw const (*self.0.as_ptr()).__bindgen_anon_1.io.size).read_volatile() };
        usize::from(size).max(1)
    }

    /// Suberror and data of a KVM_EXIT_INTERNAL_ERROR.
    pub(super) fn internal_error(&self) -> (u32, Vec<u64>) {
        // SAFETY: as in `port_access_size`; all members are integers.
        let error =
            unsafe { (&raw const (*self.0.as_ptr()).__bindgen_anon_1.internal).read_volatile() };
        let used = usize::try_from(error.ndata).unwrap_or(usize::MAX);
        let data = error.data.iter().take(used).copied().collect();
        (error.suberror, data)
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: needed to undo the mapping, which is exactly this long and
        // which nothing points into once this value is gone.
        unsafe { libc::munmap(self.0.as_ptr().cast(), LENGTH) };
    }
}
