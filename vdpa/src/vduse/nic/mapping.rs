//! Memory that this process shares: a ring or frames with the kernel, or the in-flight record with
//! its successor.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vm_memory::VolatileSlice;

/// A shared mapping, until it is dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: needed because the pointer hides it. The mapping belongs to this value, is tied to no
// thread, and is accessed through volatile slices only.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file from `offset` on, for reading and writing.
    pub(super) fn new(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        // SAFETY: needed because there is no safe interface to mmap. A new mapping at an address of
        // the kernel's choice replaces nothing that Rust knows.
        let mapped = unsafe {
            mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )
        };
        let address = NonNull::new(mapped?.cast());
        let address = address.ok_or_else(|| io::Error::other("a mapping is at address 0"))?;
        Ok(Self { address, len })
    }

    /// All of it. Accesses check their bounds.
    pub(super) fn bytes(&self) -> VolatileSlice<'_> {
        // SAFETY: needed to access memory that another party changes. It is mapped for reading and
        // writing as long as `self` lives, and no Rust reference points into it.
        unsafe { VolatileSlice::new(self.address.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: needed to undo the mapping, which is exactly this long. Each slice borrows
        // `self`, so none is left.
        if let Err(error) = unsafe { munmap(self.address.as_ptr().cast(), self.len) } {
            tracing::error!(%error, "cannot unmap memory");
        }
    }
}
