//! Doorbells: pages of device registers in which a store is a kick.
//!
//! A [`Doorbell`] is one page of a vhost-vdpa device: the notification area of one queue (virtio
//! 1.3, 4.1.4.4). It is mapped into this process (`vhost_vdpa_mmap` in the kernel's
//! `drivers/vhost/vdpa.c`). The value owns the mapping. A driver in this process calls
//! [`Doorbell::ring`]; a VMM maps the page into a guest's address space and never accesses it.
//!
//! ```text
//!   Device::map_doorbell(queue) --> Mapped(Doorbell) -- drop --> unmapped
//!                               \-> Absent(why)
//! ```
//! **Lifetime.** The mapping holds the device's open file. The device stays open as long as a
//! doorbell lives, even after the [`Device`](crate::device::Device) and its IOTLB are dropped.
//! Until then no other process can open it, and `vdpa dev del` waits. To close the device, drop its
//! doorbells too, in any order. Reset, suspend and new rings leave the mapping valid, so it is
//! created once. After the hardware is pulled out, stores have no effect.
//!
//! **Map and use it only with negotiated features.** The kernel looks the page up at the mapping's
//! first *use*, and asks the parent again. mlx5 has no doorbells for queues that were not
//! negotiated, and then answers address 0, which the kernel maps. So
//! [`Device::map_doorbell`](crate::device::Device::map_doorbell) exists from *negotiated* on, and a
//! VMM maps the page for the guest only while the device runs. After the first use, stores are
//! harmless in every state: a device ignores a notification to a queue that does not run. (virtio
//! 1.3, 3.1.1 forbids the driver to send it, and the device only looks at its ring in response.)
//!
//! The page is never mapped in an IOTLB: it is not memory, and old kernels panic when they pin it.
//! So it is no [`DmaRegion`](crate::memory::DmaRegion).

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, fence};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of a doorbell: one page.
pub const DOORBELL_SIZE: usize = 4096;

/// `ENOTSUPP` of `include/linux/errno.h`. It is not meant for userspace and has no name in libc,
/// but the kernel returns it if a parent has no doorbell.
const ENOTSUPP: Errno = Errno::from_raw_os_error(524);

/// The device's answer to a request for a queue's doorbell.
#[derive(Debug)]
pub enum DoorbellAnswer {
    /// The mapped doorbell.
    Mapped(Doorbell),
    /// The queue has no doorbell that can be mapped, for this reason; kick it by its eventfd.
    Absent(&'static str),
}

/// The parent driver offers none, or one smaller than a page (vp_vdpa on a device with a small
/// `notify_off_multiplier`). The kernel returns errno 524 for both.
const NOT_OFFERED: &str = "the device has no doorbell with a page of its own (simulators have \
                           none; QEMU's virtio devices have one with page-per-vq=on)";
/// The doorbell does not begin at a page boundary, so a mapping would expose other registers.
const UNALIGNED: &str = "the doorbell shares its page with other registers";

/// The mapped doorbell of one queue. See the module.
#[derive(Debug)]
pub struct Doorbell {
    page: NonNull<u16>,
    queue: u16,
}

// SAFETY: needed because the pointer hides it. The mapping belongs to this
// value, is tied to no thread, and is accessed by volatile stores only.
unsafe impl Send for Doorbell {}
// SAFETY: as above. Stores of several threads reach the device's register, which treats each of
// them as a kick.
unsafe impl Sync for Doorbell {}

impl Doorbell {
    /// Maps page `queue` of `file`, an open vhost-vdpa device that has that queue.
    pub(crate) fn map(file: &File, queue: u16) -> io::Result<DoorbellAnswer> {
        let offset = u64::from(queue) * crate::iova::PAGE_SIZE;
        // SAFETY: needed to reach the device's page. A new mapping at an address of the kernel's
        // choice replaces nothing that Rust knows.
        let mapped = unsafe {
            mmap(
                ptr::null_mut(),
                DOORBELL_SIZE,
                // The kernel refuses PROT_READ: registers may not tolerate reads.
                ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )
        };
        match mapped {
            Ok(address) => NonNull::new(address.cast())
                .map(|page| DoorbellAnswer::Mapped(Self { page, queue }))
                .ok_or_else(|| io::Error::other("a doorbell was mapped at address 0")),
            Err(errno) => absence(errno)
                .map(DoorbellAnswer::Absent)
                .ok_or_else(|| errno.into()),
        }
    }

    /// The queue of this doorbell.
    #[must_use]
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// Kicks: a 16-bit little-endian store of `queue_index` at the page's start (virtio 1.3,
    /// 4.1.5.2, without NOTIFICATION_DATA). Earlier stores, such as a new avail index, are visible
    /// to the device first.
    ///
    /// `queue_index` is this doorbell's queue. On parents where one page serves all queues of the
    /// device (mlx5) it may be any of them.
    pub fn ring(&self, queue_index: u16) {
        fence(Ordering::SeqCst);
        // SAFETY: needed because registers are reached by raw stores only. The
        // page is mapped for writing as long as `self` lives, and its start is
        // aligned for any integer. No reference into it exists.
        unsafe { self.page.as_ptr().write_volatile(queue_index.to_le()) };
    }

    /// Address of the page in this process, for a memory slot of a hypervisor;
    /// valid as long as the doorbell lives. [`DOORBELL_SIZE`] bytes, write-only.
    #[must_use]
    pub fn host_address(&self) -> u64 {
        // Lossless: pointers have 64 bits on all supported hosts with vhost-vdpa.
        u64::try_from(self.page.as_ptr().addr()).unwrap_or(u64::MAX)
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        // SAFETY: needed to undo the mapping, which is exactly this long. Users of its address keep
        // `self` alive, so the address is no longer in use.
        let unmapped = unsafe { munmap(self.page.as_ptr().cast(), DOORBELL_SIZE) };
        if let Err(error) = unmapped {
            tracing::error!(queue = self.queue, %error, "cannot unmap a doorbell: its device stays \
                                                         open");
        }
    }
}

/// The errors of `vhost_vdpa_mmap` for a queue without a doorbell. With the arguments of
/// [`Doorbell::map`] one reason is left for EINVAL.
fn absence(errno: Errno) -> Option<&'static str> {
    match errno {
        ENOTSUPP => Some(NOT_OFFERED),
        Errno::INVAL => Some(UNALIGNED),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    /// A file whose pages stand for the device's pages.
    fn pages(count: u64) -> File {
        let file = memfd_create(c"doorbells", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, count * 4096).unwrap();
        File::from(file)
    }

    fn map(file: &File, queue: u16) -> Doorbell {
        match Doorbell::map(file, queue).unwrap() {
            DoorbellAnswer::Mapped(doorbell) => doorbell,
            DoorbellAnswer::Absent(why) => panic!("{why}"),
        }
    }

    fn mapped_at(address: u64) -> bool {
        let mut maps = String::new();
        let mut file = File::open("/proc/self/maps").unwrap();
        file.read_to_string(&mut maps).unwrap();
        maps.lines()
            .any(|line| line.starts_with(&format!("{address:08x}-")) && line.contains("doorbells"))
    }

    #[test]
    fn rings_the_page_of_its_queue_with_the_given_index() {
        use std::os::unix::fs::FileExt;

        let file = pages(4);
        let doorbell = map(&file, 3);
        assert_eq!(doorbell.queue(), 3);
        assert_eq!(doorbell.host_address() % 4096, 0);
        doorbell.ring(0x0102);
        let mut seen = [0; 4];
        file.read_exact_at(&mut seen, 3 * 4096).unwrap();
        assert_eq!(seen, [2, 1, 0, 0]);
    }

    #[test]
    fn is_write_only_and_unmapped_with_its_value() {
        let file = pages(1);
        let doorbell = map(&file, 0);
        let address = doorbell.host_address();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps
            .lines()
            .find(|line| line.starts_with(&format!("{address:08x}-")));
        assert!(line.unwrap().contains(" -w-s "), "{line:?}");
        // The mapping holds the file open, not the descriptor.
        drop(file);
        doorbell.ring(0);
        drop(doorbell);
        assert!(!mapped_at(address));
    }

    #[test]
    fn absent_is_not_an_error_but_all_else_is() {
        assert_eq!(absence(ENOTSUPP), Some(NOT_OFFERED));
        assert_eq!(absence(Errno::INVAL), Some(UNALIGNED));
        assert_eq!(absence(Errno::NOMEM), None);
        let error = Doorbell::map(&File::open("/proc/self/status").unwrap(), 0).unwrap_err();
        assert!(error.raw_os_error().is_some());
    }
}
