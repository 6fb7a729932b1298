//! Guest RAM on one NUMA node of the host.
//!
//! Owns the one system call for it. The policy is set on the fresh mapping of a memfd, before any
//! access to its pages. For a memfd with pages of the usual size it belongs to the file's pages. So
//! it applies to every process that touches them first, a successor of this process included.
//!
//! For huge pages it belongs to the mapping (Documentation/admin-guide/mm/numa_memory_policy.rst,
//! "Shared Policy"). That is the only mapping, and KVM and vhost-vdpa allocate pages through it
//! too.

use std::io;

use rustix::mm::Advice;

/// Bits in a word of a node mask.
const WORD_BITS: usize = 64;

/// Allocates all pages of an untouched mapping from `node` only (`mbind` with MPOL_BIND).
///
/// # Errors
/// The kernel's error: EINVAL if there is no such node, or this process' cgroup (`cpuset.mems`) has
/// none of its memory; ENOSYS without CONFIG_NUMA.
pub(super) fn to_node(start: *mut u8, len: usize, node: u16) -> io::Result<()> {
    let node = usize::from(node);
    let mut mask = vec![0_u64; node / WORD_BITS + 1];
    if let Some(word) = mask.last_mut() {
        *word = 1 << (node % WORD_BITS);
    }
    // The kernel uses one bit less than this (`get_nodes` in mm/mempolicy.c).
    let bits = mask.len() * WORD_BITS + 1;
    // SAFETY: needed because none of the dependencies wraps mbind. The mask has as many bits as the
    // kernel reads and outlives the call, which writes nothing to this process' memory. The call
    // gets the caller's mapping by address and length only. It changes where the mapping's pages
    // come from, and neither their content nor their validity.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            len,
            libc::MPOL_BIND,
            mask.as_ptr(),
            bits,
            0,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Allocates all pages now. `false` if there are too few. The reservation counts the huge pages of
/// all nodes, so a bound mapping could end in SIGBUS at its first touch.
///
/// # Errors
/// The kernel's error; EINVAL before Linux 5.14.
pub(super) fn fill(start: *mut u8, len: usize) -> io::Result<bool> {
    loop {
        // SAFETY: needed because the advice has no safe wrapper. It makes the pages of the caller's
        // own mapping present, as a write would, and leaves their content.
        match unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxPopulateWrite) } {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::FAULT | rustix::io::Errno::NOMEM) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}
