//! The driver's memory: the files behind the device's mappings, mapped here.
//!
//! ```text
//!   Mappings --IOTLB_GET_FD, from 0 up--> entry, file --mmap--> region at its I/O virtual address
//!                                                                  |
//!                          all readable and writable? DeviceMemory | else behind an AddressSpace
//! ```
//! A change of the mappings replaces all of them. A region that stays the same keeps its pages.
//! The process that maps memory chooses addresses, files and offsets, so all are checked.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};

use super::Device;
use crate::Error;
use crate::iotlb::Access;
use crate::iova::{IovaRange, PAGE_SIZE};
use crate::memory::{AddressSpace, DeviceMemory, GuestMemory, Mode, Piece, advise_huge_pages};
use crate::uapi::vduse::{VDUSE_ACCESS_RO, VDUSE_ACCESS_RW, VDUSE_ACCESS_WO, vduse_iotlb_entry};

/// Most mappings at a time. A guest's IOMMU with more of them needs another kind of device.
pub const MAPPINGS_MAX: usize = 4096;

/// Nothing reads these marks, so one is for a gigabyte.
const UNTRACKED: NonZeroUsize = match NonZeroUsize::new(1 << 30) {
    Some(size) => size,
    None => NonZeroUsize::MIN,
};

/// The kernel's number of hugetlbfs (linux/magic.h).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// A file, by its identity in the kernel.
#[derive(Debug, Clone)]
struct Known {
    identity: (u64, u64),
    file: Arc<File>,
    /// Bytes of a page: the kernel maps no part of a reserved huge one.
    page: u64,
}

impl Known {
    fn new(identity: (u64, u64), file: File) -> Result<Self, Error> {
        // The block size of the file itself is no help: with transparent huge pages it is that of
        // a huge page, too.
        let system = rustix::fs::fstatfs(&file).map_err(cannot_map)?;
        let page = match system.f_type {
            HUGETLBFS_MAGIC => u64::try_from(system.f_bsize).map_err(cannot_map)?,
            _ => PAGE_SIZE,
        };
        Ok(Self {
            identity,
            file: Arc::new(file),
            page,
        })
    }
}

/// A mapping with its region.
#[derive(Debug, Clone)]
struct Entry {
    mapping: vduse_iotlb_entry,
    identity: (u64, u64),
    access: Access,
    region: Arc<GuestRegionMmap<AtomicBitmap>>,
}

/// The mappings of one device.
#[derive(Debug, Default)]
pub struct Mappings {
    /// Each file once: many mappings have the same one.
    files: Vec<Known>,
    /// By address.
    entries: Vec<Entry>,
}

impl Mappings {
    /// Forgets all mappings.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Replaces all mappings with those that the kernel has now. `None`: there are none.
    ///
    /// # Errors
    /// A mapping is not of whole pages of its file, overlaps another one, or cannot be mapped here.
    /// Or there are more than [`MAPPINGS_MAX`]. None is left then.
    pub fn read(&mut self, device: &Device) -> Result<Option<DeviceMemory>, Error> {
        self.replace(|from| device.mapping(from))
    }

    pub(super) fn replace(
        &mut self,
        mut find: impl FnMut(u64) -> Result<Option<(vduse_iotlb_entry, File)>, Error>,
    ) -> Result<Option<DeviceMemory>, Error> {
        let before = std::mem::take(self);
        let mut collect = || {
            let mut from = Some(0);
            while let Some(first) = from {
                let Some((mapping, file)) = find(first)? else {
                    break;
                };
                if self.entries.len() >= MAPPINGS_MAX {
                    return Err(Error::other(format!(
                        "the driver has more than {MAPPINGS_MAX} mappings: use the NIC without an \
                         IOMMU in the guest"
                    )));
                }
                self.add(&before, first, mapping, file)?;
                from = mapping.last.checked_add(1);
            }
            self.memory()
        };
        let memory = collect();
        if memory.is_err() {
            self.clear();
        }
        memory
    }

    fn add(
        &mut self,
        before: &Self,
        first: u64,
        mapping: vduse_iotlb_entry,
        file: File,
    ) -> Result<(), Error> {
        let invalid = || {
            Error::other(format!(
                "invalid mapping {:#x}-{:#x} at {:#x} of its file, access {}",
                mapping.start, mapping.last, mapping.offset, mapping.perm
            ))
        };
        let access = match mapping.perm {
            VDUSE_ACCESS_RO => Access::ReadOnly,
            VDUSE_ACCESS_WO => Access::WriteOnly,
            VDUSE_ACCESS_RW => Access::ReadWrite,
            _ => return Err(invalid()),
        };
        let size = IovaRange::new(mapping.start, mapping.last).and_then(|range| range.size());
        let is_aligned = |number: u64| number.is_multiple_of(PAGE_SIZE);
        let metadata = file.metadata().map_err(cannot_map)?;
        // The kernel's own buffers, for a driver on this host, have no length.
        let end = if metadata.is_file() {
            metadata.len()
        } else {
            u64::MAX
        };
        let size = size
            .filter(|&size| is_aligned(size | mapping.start | mapping.offset))
            .filter(|_| mapping.start >= first)
            .filter(|&size| {
                mapping
                    .offset
                    .checked_add(size)
                    .is_some_and(|last| last <= end)
            })
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(invalid)?;
        let identity = (metadata.dev(), metadata.ino());
        let mut files = self.files.iter().chain(&before.files);
        let known = match files.find(|known| known.identity == identity) {
            Some(known) => known.clone(),
            None => Known::new(identity, file)?,
        };
        if !(mapping.start | mapping.offset | size as u64).is_multiple_of(known.page) {
            return Err(Error::other(format!(
                "the driver maps a part of a reserved huge page: use the NIC without an IOMMU in \
                 the guest, or give the guest no reserved huge pages (mapping {:#x}-{:#x})",
                mapping.start, mapping.last
            )));
        }
        if !self.files.iter().any(|other| other.identity == identity) {
            self.files.push(known.clone());
        }
        let same = before
            .entries
            .binary_search_by_key(&mapping.start, |entry| entry.mapping.start)
            .ok()
            .and_then(|index| before.entries.get(index))
            .filter(|entry| entry.mapping == mapping && entry.identity == identity);
        let region = match same {
            Some(entry) => Arc::clone(&entry.region),
            None => {
                let protection = match access {
                    Access::ReadOnly => libc::PROT_READ,
                    // x86 has no pages that are only written.
                    Access::WriteOnly | Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
                };
                let region =
                    MmapRegionBuilder::new_with_bitmap(size, AtomicBitmap::new(size, UNTRACKED))
                        .with_file_offset(FileOffset::from_arc(known.file, mapping.offset))
                        .with_mmap_prot(protection)
                        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                        .build()
                        .map_err(cannot_map)?;
                let region = GuestRegionMmap::new(region, GuestAddress(mapping.start));
                let region = region.ok_or_else(invalid)?;
                // The first access to a page may be here.
                advise_huge_pages(&region).map_err(cannot_map)?;
                Arc::new(region)
            }
        };
        self.entries.push(Entry {
            mapping,
            identity,
            access,
            region,
        });
        Ok(())
    }

    fn memory(&self) -> Result<Option<DeviceMemory>, Error> {
        if self.entries.is_empty() {
            return Ok(None);
        }
        let regions = self.entries.iter();
        let regions = regions.map(|entry| Arc::clone(&entry.region)).collect();
        let memory = Arc::new(GuestMemory::from_arc_regions(regions).map_err(cannot_map)?);
        let is_free = |entry: &Entry| entry.access == Access::ReadWrite;
        if self.entries.iter().all(is_free) {
            return Ok(Some(memory.into()));
        }
        // A write to a read-only region would end this process, so each access is checked.
        let space = AddressSpace::new(IovaRange::ALL);
        space.change(|space| {
            space.set_mode(Mode::Mapped);
            self.entries.iter().try_for_each(|entry| {
                let range = IovaRange::new(entry.mapping.start, entry.mapping.last);
                let range = range.ok_or_else(|| Error::other("an empty mapping"))?;
                let (gpa, access) = (range.first(), entry.access);
                space.map(range, Piece { gpa, access })
            })
        })?;
        Ok(Some(DeviceMemory::behind(memory, Arc::new(space))))
    }
}

fn cannot_map<E>(error: E) -> Error
where
    E: std::error::Error + Send + Sync + 'static,
{
    Error::other("cannot map the driver's memory").because(error)
}

#[cfg(test)]
mod tests;
