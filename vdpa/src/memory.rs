//! The memory that a device can access: guest RAM and private shared buffers.
//!
//! The guest-memory type is in the lowest crate because every writer of guest memory must use it:
//! it records dirty pages for migration. Writers are the control virtqueue here, and the emulated
//! devices and the boot loader above. This module gives the address of memory and keeps it alive.
//! It does not depend on the use of the memory; [`crate::iotlb`] maps it for a device.

use std::fmt;
use std::io;
use std::sync::Arc;

use rustix::mm::{Advice, madvise};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{
    GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress,
};

use crate::iova::IovaRange;

pub mod address_space;
mod device_memory;
mod shared_buffer;

pub use address_space::{AddressSpace, Change, Mode, Piece, Reader, Writer};
pub use device_memory::DeviceMemory;
pub use shared_buffer::SharedBuffer;
pub(crate) use shared_buffer::not_pages;

/// Guest RAM: one or more regions of a memfd, mapped `MAP_SHARED`.
///
/// Every write through it marks the written pages in the region's bitmap. The mapping is shared
/// because software vDPA parents map nothing else (`drivers/vhost/vdpa.c`, `vhost_vdpa_va_map`
/// skips private memory).
pub type GuestMemory = GuestMemoryMmap<AtomicBitmap>;

/// Asks for transparent huge pages in a region of guest RAM (`MADV_HUGEPAGE`).
///
/// A kernel without them ignores it, as does one whose setting for shared memory is `never`
/// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`, `admin-guide/mm/transhuge.rst`).
///
/// # Errors
/// The kernel refuses the request.
pub fn advise_huge_pages(region: &GuestRegionMmap<AtomicBitmap>) -> io::Result<()> {
    // SAFETY: needed because the advice has no safe wrapper. Sound because the range is exactly the
    // mapping of `region`, and the advice leaves its content and validity unchanged.
    let advised = unsafe { madvise(region.as_ptr().cast(), region.size(), Advice::LinuxHugepage) };
    match advised {
        Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Memory that a device may access.
///
/// # Safety
/// For as long as the value lives, [`DmaRegion::host_address`] and the [`DmaRegion::size`] bytes
/// after it must stay one valid mapping. No Rust reference may point into it. The device reads and
/// writes it at any moment, so this process may access it only by volatile or atomic operations.
pub unsafe trait DmaRegion: Send + Sync + fmt::Debug {
    /// First address in this process.
    fn host_address(&self) -> u64;
    /// Length in bytes.
    fn size(&self) -> u64;
}

/// One region of guest RAM, keeping all of it mapped.
pub struct GuestRegion {
    memory: GuestMemory,
    base: u64,
    host_address: u64,
    size: u64,
}

crate::opaque_debug! {
    GuestRegion, this =>
    base: this.base,
    size: this.size,
    regions: this.memory.num_regions(),
}

impl GuestRegion {
    /// All regions of guest RAM, by ascending guest-physical address.
    #[must_use]
    pub fn all(memory: &GuestMemory) -> Vec<Arc<Self>> {
        memory
            .iter()
            .filter_map(|region| {
                let host_address = region.get_host_address(MemoryRegionAddress(0)).ok()?;
                Some(Arc::new(Self {
                    memory: memory.clone(),
                    base: region.start_addr().0,
                    host_address: u64::try_from(host_address.addr()).ok()?,
                    size: region.len(),
                }))
            })
            .collect()
    }

    /// Guest-physical address of the first byte.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Its guest-physical addresses; `None` without any.
    #[must_use]
    pub fn range(&self) -> Option<IovaRange> {
        IovaRange::from_size(self.base, self.size)
    }
}

// SAFETY: needed so that guest RAM can be mapped for a device. The region is one mmap of vm-memory.
// It lives as long as any clone of its `GuestMemory`, and `memory` is such a clone. vm-memory gives
// out no Rust references into it and accesses it volatilely.
unsafe impl DmaRegion for GuestRegion {
    fn host_address(&self) -> u64 {
        self.host_address
    }

    fn size(&self) -> u64 {
        self.size
    }
}
