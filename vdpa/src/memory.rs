//! The one guest-memory type of the project.
//!
//! It lives in the lowest crate because every writer of guest memory (the
//! control virtqueue here, the emulated devices and the boot loader above)
//! must go through the same type: it is what records dirty pages for
//! migration. It knows nothing of what the memory is used for.

use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::AtomicBitmap;

/// Guest RAM: one or more regions of a memfd, mapped `MAP_SHARED`.
///
/// Every write through it marks the touched pages in the region's bitmap.
/// The mapping is shared because software vDPA parents map nothing else
/// (`drivers/vhost/vdpa.c`, `vhost_vdpa_va_map` skips private memory).
pub type GuestMemory = GuestMemoryMmap<AtomicBitmap>;
