//! Guest RAM: one memfd, mapped shared, split at the hole below 4 GiB.
//!
//! Owns the file and its mappings. It knows the addresses of RAM ([`crate::layout`]), but not its
//! users. The machine creates KVM memory slots from [`GuestRam::slots`], and the vDPA backend
//! creates IOTLB entries.
//!
//! ```text
//!   memfd "guest-ram"     0 ............ 3 GiB ............... size
//!                         |  slot 0        |  slot 1              |
//!   guest-physical        0 .......... 3 GiB     4 GiB .......... size + 1 GiB
//! ```
//!
//! RAM is a file mapped `MAP_SHARED` only. Software vDPA parents skip any other memory without an
//! error, and the file can be passed to a successor of this process. Its NUMA node is set before
//! any of its pages is touched (`bind.rs`).

mod bind;
mod free;

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use vdpa::memory::{GuestMemory, advise_huge_pages};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, MmapRegion};

use crate::Error;
use crate::byte_count::ByteCount;
use crate::config::HugePageSize;
use crate::layout::{AddressRange, Layout};

pub(crate) use free::free;

/// One contiguous piece of guest RAM, for KVM and the IOTLB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamSlot {
    /// Guest-physical addresses.
    pub guest: AddressRange,
    /// First address in this process.
    pub host_address: u64,
    /// Offset of the first byte in the memfd.
    pub file_offset: u64,
}

/// Guest RAM of one machine. Dropping it unmaps it and closes the memfd, once
/// the last clone of [`GuestRam::memory`] is gone too.
#[derive(Debug)]
pub struct GuestRam {
    memory: GuestMemory,
    file: Arc<File>,
    slots: Vec<RamSlot>,
}

impl GuestRam {
    /// Creates and maps the RAM of `layout`, zero-filled, on pages of the host's usual size or on
    /// huge pages.
    ///
    /// The file is sealed: no process, including this one, can change its size any more. So no
    /// access to the mapping can fault.
    ///
    /// # Errors
    /// [`Error`]; nothing is left behind.
    pub fn new(layout: &Layout, hugepages: Option<HugePageSize>) -> Result<Self, Error> {
        Self::on_node(layout, hugepages, None)
    }

    /// Like [`GuestRam::new`], from one NUMA node's memory. Huge pages of a node are all allocated
    /// at once: their reservation does not consider nodes. [`crate::host`] knows the nodes.
    ///
    /// # Errors
    /// [`Error`]; nothing is left behind.
    pub fn on_node(
        layout: &Layout,
        hugepages: Option<HugePageSize>,
        node: Option<u16>,
    ) -> Result<Self, Error> {
        let size = layout.ram_size();
        let info = rustix::system::sysinfo();
        check_size(
            size,
            // Both fields are u64 or narrower on every Linux target.
            info.totalram.saturating_mul(u64::from(info.mem_unit)),
            hugepages,
        )?;
        let file = Arc::new(make_file(size, hugepages)?);
        Self::map(layout, file, hugepages, node)
    }

    /// Maps RAM that another process has created for the same layout, with its content. Its pages
    /// stay where they are, on any node.
    ///
    /// # Errors
    /// The file is no guest memory, or cannot be mapped.
    pub fn adopt(
        layout: &Layout,
        file: File,
        hugepages: Option<HugePageSize>,
    ) -> Result<Self, Error> {
        let size = layout.ram_size();
        // If the file shrank, access to the removed part would raise SIGBUS.
        let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let seals = rustix::fs::fcntl_get_seals(&file);
        let fits = file.metadata().is_ok_and(|metadata| metadata.len() == size);
        if !fits || !seals.is_ok_and(|seals| seals.contains(sealed)) {
            let size = ByteCount(size);
            return Err(Error::unusable(format!(
                "the file is not sealed memory of {size}"
            )));
        }
        Self::map(layout, Arc::new(file), hugepages, None)
    }

    /// Maps the file according to the layout.
    fn map(
        layout: &Layout,
        file: Arc<File>,
        hugepages: Option<HugePageSize>,
        node: Option<u16>,
    ) -> Result<Self, Error> {
        let size = layout.ram_size();
        let mut regions = Vec::new();
        let mut slots = Vec::new();
        let mut file_offset = 0;
        for guest in layout.ram() {
            let region = map_region(&file, file_offset, guest, hugepages, size)?;
            if let Some(node) = node {
                bind_region(&region, node, hugepages, size)?;
            }
            slots.push(RamSlot {
                guest,
                // Lossless: usize is 64 bits wide on x86-64.
                host_address: region.as_ptr().addr() as u64,
                file_offset,
            });
            regions.push(region);
            file_offset += guest.len;
        }
        let memory = GuestMemory::from_regions(regions)
            .map_err(|source| cannot("lay out", size)(io::Error::other(source)))?;
        Ok(Self {
            memory,
            file,
            slots,
        })
    }

    /// The memory itself. Clones are cheap and share it.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The contiguous pieces, one or two, in ascending order.
    #[must_use]
    pub fn slots(&self) -> &[RamSlot] {
        &self.slots
    }

    /// The memfd behind all slots.
    #[must_use]
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }
}

/// Rejects sizes that the kernel would grant now and fail to provide later.
fn check_size(size: u64, host: u64, hugepages: Option<HugePageSize>) -> Result<(), Error> {
    if size > host {
        let (size, host) = (ByteCount(size), ByteCount(host));
        return Err(Error::unusable(format!(
            "{size} of guest memory is more than this host's {host}"
        )));
    }
    match hugepages.map(HugePageSize::bytes) {
        Some(page) if !size.is_multiple_of(page) => Err(Error::unusable(format!(
            "memory of {size} bytes is not a multiple of the huge page size of {}",
            ByteCount(page)
        ))),
        _ => Ok(()),
    }
}

/// A sealed memfd of `size` bytes.
fn make_file(size: u64, hugepages: Option<HugePageSize>) -> Result<File, Error> {
    let os = |step| move |source: rustix::io::Errno| cannot(step, size)(source.into());
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match hugepages {
        None => {}
        Some(HugePageSize::Size2M) => flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        Some(HugePageSize::Size1G) => flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
    }
    let file = match (rustix::fs::memfd_create("guest-ram", flags), hugepages) {
        (Ok(file), _) => File::from(file),
        (Err(source), Some(huge))
            if matches!(
                source,
                rustix::io::Errno::NODEV | rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS
            ) =>
        {
            let page = ByteCount(huge.bytes());
            let message = format!("this host's kernel or processor has no huge pages of {page}");
            return Err(Error::unusable(message).because(io::Error::from(source)));
        }
        (Err(source), _) => return Err(os("create")(source)),
    };
    rustix::fs::ftruncate(&file, size).map_err(os("size"))?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(os("seal"))?;
    Ok(file)
}

/// Maps `guest.len` bytes of the file from `file_offset` on.
fn map_region(
    file: &Arc<File>,
    file_offset: u64,
    guest: AddressRange,
    hugepages: Option<HugePageSize>,
    size: u64,
) -> Result<GuestRegionMmap<AtomicBitmap>, Error> {
    let os = |step, source| cannot(step, size)(source);
    let len = usize::try_from(guest.len).map_err(|source| os("map", io::Error::other(source)))?;
    // Not MAP_NORESERVE, which the crate's own constructor sets: with huge pages, a pool that is
    // too small would raise SIGBUS during the run.
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let mut region = MmapRegion::<AtomicBitmap>::build(
        Some(FileOffset::from_arc(Arc::clone(file), file_offset)),
        len,
        protection.bits().cast_signed(),
        MapFlags::SHARED.bits().cast_signed(),
    )
    .map_err(|error| match (error, hugepages) {
        (vm_memory::mmap::MmapRegionError::Mmap(source), Some(huge))
            if source.raw_os_error() == Some(rustix::io::Errno::NOMEM.raw_os_error()) =>
        {
            not_enough_huge_pages(size, huge).because(source)
        }
        (vm_memory::mmap::MmapRegionError::Mmap(source), _) => os("map", source),
        (other, _) => os("map", io::Error::other(other)),
    })?;
    region.set_hugetlbfs(hugepages.is_some());
    // A child of this process must not have the guest's memory. A core dump must be neither as
    // large as the guest nor hold its secrets.
    for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
        // SAFETY: needed because the advice has no safe wrapper. Sound because
        // the range is exactly the mapping that `region` owns, and both kinds
        // of advice leave its content and validity in this process unchanged.
        unsafe { rustix::mm::madvise(region.as_ptr().cast(), len, advice) }
            .map_err(|source| os("advise on", source.into()))?;
    }
    let region = GuestRegionMmap::new(region, GuestAddress(guest.start))
        .ok_or_else(|| os("lay out", io::ErrorKind::InvalidInput.into()))?;
    if hugepages.is_none() {
        advise_huge_pages(&region).map_err(|source| os("advise on", source))?;
    }
    Ok(region)
}

/// Allocates the pages of an untouched region from one node.
fn bind_region(
    region: &GuestRegionMmap<AtomicBitmap>,
    node: u16,
    hugepages: Option<HugePageSize>,
    size: u64,
) -> Result<(), Error> {
    let (start, len) = (region.as_ptr(), region.size());
    bind::to_node(start, len, node).map_err(|source| {
        Error::unusable(format!(
            "cannot bind guest memory to NUMA node {node}; the cgroup of this process \
             (cpuset.mems) may not have it"
        ))
        .because(source)
    })?;
    let Some(huge) = hugepages else {
        return Ok(());
    };
    match bind::fill(start, len) {
        Ok(true) => Ok(()),
        Ok(false) => {
            let page = huge.bytes();
            Err(Error::unusable(format!(
                "NUMA node {node} has too few free huge pages: the guest needs {} of {}; reserve \
                 more with `echo N > \
                 /sys/devices/system/node/node{node}/hugepages/hugepages-{}kB/nr_hugepages`",
                size / page,
                ByteCount(page),
                page >> 10
            )))
        }
        Err(source) => Err(cannot("fill", size)(source)),
    }
}

/// The error of a failed step.
fn cannot(step: &str, size: u64) -> impl FnOnce(io::Error) -> Error {
    let message = format!("cannot {step} guest memory of {}", ByteCount(size));
    move |source| Error::unusable(message).because(source)
}

fn not_enough_huge_pages(size: u64, huge: HugePageSize) -> Error {
    let page = huge.bytes();
    let sysctl = match huge {
        HugePageSize::Size2M => " (or sysctl vm.nr_hugepages)",
        HugePageSize::Size1G => "",
    };
    Error::unusable(format!(
        "too few free huge pages: the guest needs {} of {}; reserve more with `echo N > \
         /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages`{sysctl}",
        size / page,
        ByteCount(page),
        page >> 10
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion};

    use super::*;
    use crate::layout::{HOLE_END, HOLE_START, PAGE_SIZE};

    const MIB: u64 = 1 << 20;

    #[test]
    fn slots_match_the_layout_and_the_file() {
        // Perhaps more than this host has, but the test touches none of it.
        for size in [16 * MIB, HOLE_START, HOLE_START + 64 * MIB] {
            let layout = Layout::new(size, 46).unwrap();
            let file = Arc::new(make_file(size, None).unwrap());
            let ram = GuestRam::map(&layout, file, None, None).unwrap();
            assert_eq!(ram.file().metadata().unwrap().len(), size);
            let mut next = 0;
            for (slot, region) in ram.slots().iter().zip(ram.memory().iter()) {
                assert_eq!(slot.file_offset, next);
                assert_eq!(slot.guest.start, region.start_addr().0);
                assert_eq!(slot.guest.len, region.len());
                assert_eq!(slot.host_address, region.as_ptr().addr() as u64);
                assert!(slot.host_address.is_multiple_of(PAGE_SIZE));
                next += slot.guest.len;
            }
            assert_eq!(next, size);
            assert_eq!(ram.slots().len(), ram.memory().num_regions());
            if size > HOLE_START {
                assert_eq!(ram.slots()[1].guest.start, HOLE_END);
                // Bytes above the hole follow the first slot in the file.
                ram.memory()
                    .write_obj(0x1234_5678_u32, GuestAddress(HOLE_END + 4))
                    .unwrap();
                let mut word = [0; 4];
                ram.file().read_exact_at(&mut word, HOLE_START + 4).unwrap();
                assert_eq!(u32::from_le_bytes(word), 0x1234_5678);
            }
        }
    }

    #[test]
    fn shared_sealed_and_recorded_as_dirty() {
        let layout = Layout::new(16 * MIB, 40).unwrap();
        let ram = GuestRam::new(&layout, None).unwrap();
        assert!(ram.file().set_len(8 * MIB).is_err());
        assert!(ram.file().set_len(32 * MIB).is_err());
        ram.memory().write_obj(7_u8, GuestAddress(0x3000)).unwrap();
        let region = ram.memory().iter().next().unwrap();
        let dirty = |address| {
            region.get_host_address(address).is_ok()
                && vm_memory::bitmap::Bitmap::dirty_at(
                    MmapRegion::bitmap(region),
                    usize::try_from(address.0).unwrap(),
                )
        };
        assert!(dirty(vm_memory::MemoryRegionAddress(0x3000)));
        assert!(!dirty(vm_memory::MemoryRegionAddress(0x4000)));
        let mut byte = [0];
        ram.file().read_exact_at(&mut byte, 0x3000).unwrap();
        assert_eq!(byte, [7]);
    }

    /// The kernel's policy of the mapping with this start: `bind:0` or `default`.
    fn policy(ram: &GuestRam) -> Option<String> {
        let start = format!("{:x} ", ram.slots()[0].host_address);
        let maps = std::fs::read_to_string("/proc/self/numa_maps").ok()?;
        let line = maps.lines().find(|line| line.starts_with(&start))?;
        line.split_whitespace().nth(1).map(str::to_owned)
    }

    #[test]
    fn memory_is_bound_to_a_node() {
        let layout = Layout::new(16 * MIB, 40).unwrap();
        let Some(before) = policy(&GuestRam::new(&layout, None).unwrap()) else {
            eprintln!("a kernel without NUMA: there is nothing to bind to");
            return;
        };
        assert_eq!(before, "default");
        let ram = GuestRam::on_node(&layout, None, Some(0)).unwrap();
        assert_eq!(policy(&ram).as_deref(), Some("bind:0"));
        ram.memory().write_obj(7_u8, GuestAddress(0x3000)).unwrap();
        for node in [63, 64, 1023, u16::MAX] {
            let error = GuestRam::on_node(&layout, None, Some(node)).unwrap_err();
            assert!(
                error.to_string().contains(&format!("NUMA node {node};")),
                "{error}"
            );
        }
    }

    #[test]
    fn refuses_more_than_the_host_has() {
        let error = check_size(64 << 30, 16 << 30, None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "64 GiB of guest memory is more than this host's 16 GiB"
        );
        assert!(check_size(16 << 30, 16 << 30, None).is_ok());
    }

    #[test]
    fn refuses_odd_sizes_for_huge_pages() {
        let error = check_size(17 * MIB, 1 << 40, Some(HugePageSize::Size2M)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "memory of 17825792 bytes is not a multiple of the huge page size of 2 MiB"
        );
        assert!(check_size(18 * MIB, 1 << 40, Some(HugePageSize::Size2M)).is_ok());
        assert!(check_size(1 << 30, 1 << 40, Some(HugePageSize::Size1G)).is_ok());
    }

    #[test]
    fn names_the_setting_when_huge_pages_run_out() {
        let error = not_enough_huge_pages(512 * MIB, HugePageSize::Size2M);
        assert_eq!(
            error.to_string(),
            "too few free huge pages: the guest needs 256 of 2 MiB; reserve more with `echo N > \
             /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages` (or sysctl vm.nr_hugepages)"
        );
    }
}
