//! Private memory of the VMM that a device may access.
//!
//! A [`SharedBuffer`] is a sealed memfd mapped `MAP_SHARED`, with the I/O virtual address for the
//! device. It owns the mapping in this process; the IOTLB maps it for a device. Data from a device
//! is untrusted, so access is volatile and bounds-checked, and no reference into the buffer ever
//! exists.

use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::mmap::MmapRegionError;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestRegionMmap, MmapRegion, VolatileMemory};

use super::{DmaRegion, GuestMemory};
use crate::Error;
use crate::iova::{DeviceAddress, IovaRange, PAGE_SIZE};

/// Page-aligned shared memory with an I/O virtual address.
#[derive(Debug)]
pub struct SharedBuffer {
    region: MmapRegion<()>,
    range: IovaRange,
    size: u64,
}

impl SharedBuffer {
    /// Creates a zeroed buffer of `size` bytes for a device to access at `iova`. Both are multiples
    /// of [`PAGE_SIZE`], `size` not 0.
    ///
    /// # Errors
    /// Address and size are not whole pages, or the kernel refuses.
    pub fn new(size: u64, iova: u64) -> Result<Self, Error> {
        range_of(size, iova)?;
        Self::placed(size, |_| iova)
    }

    /// As [`SharedBuffer::new`], but chooses the I/O virtual address once the buffer's address in
    /// this process is known. `place` gets that range and returns the I/O virtual address.
    ///
    /// # Errors
    /// As [`SharedBuffer::new`].
    pub fn placed(size: u64, place: impl FnOnce(IovaRange) -> u64) -> Result<Self, Error> {
        range_of(size, 0)?;
        let Ok(length) = usize::try_from(size) else {
            return Err(not_pages(size, 0));
        };
        let create = || -> rustix::io::Result<File> {
            let fd = memfd_create(
                c"vdpa-shared",
                MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
            )?;
            ftruncate(&fd, size)?;
            // The file cannot shrink, so no page can disappear under the mapping (SIGBUS).
            fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(File::from(fd))
        };
        let file = create().map_err(|errno| {
            Error::other(format!("cannot create {size} bytes of shared memory"))
                .because(io::Error::from(errno))
        })?;
        let region = MmapRegion::from_file(FileOffset::new(file, 0), length)
            .map_err(|source| not_mapped(size, source))?;
        // Lossless: pointers have 64 bits on all supported hosts with vhost-vdpa.
        let host_address = u64::try_from(region.as_ptr().addr()).unwrap_or(u64::MAX);
        let range = range_of(size, place(range_of(size, host_address)?))?;
        Ok(Self {
            region,
            range,
            size,
        })
    }

    /// The same bytes as guest memory of one region, whose guest-physical addresses are the I/O
    /// virtual ones. For code that takes a guest's rings and shall work on rings in this buffer. It
    /// is a second mapping; both may be used at once.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn as_guest_memory(&self) -> Result<GuestMemory, Error> {
        let failed = |source| not_mapped(self.size, source);
        // `placed` set one.
        let file = self.region.file_offset().cloned();
        let file =
            file.ok_or_else(|| failed(MmapRegionError::Mmap(io::ErrorKind::InvalidInput.into())))?;
        let mapping = MmapRegion::from_file(file, self.region.size()).map_err(failed)?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(self.range.first()))
            .ok_or_else(|| failed(MmapRegionError::Mmap(io::ErrorKind::InvalidInput.into())))?;
        GuestMemory::from_regions(vec![region])
            .map_err(|_| failed(MmapRegionError::Mmap(io::ErrorKind::InvalidInput.into())))
    }

    /// The file of the buffer, for another process. It cannot shrink.
    ///
    /// # Errors
    /// The limit of open files is reached.
    pub fn file(&self) -> Result<File, Error> {
        let file = self
            .region
            .file_offset()
            .map(|file| file.file().try_clone());
        let file = file.ok_or_else(|| Error::other("a shared buffer without a file"))?;
        file.map_err(Error::context("too many open files"))
    }

    /// The I/O virtual addresses of the buffer.
    #[must_use]
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// The I/O virtual address of `len` bytes at `offset`.
    ///
    /// # Errors
    /// The bytes are not all inside the buffer.
    pub fn iova(&self, offset: u64, len: u64) -> Result<DeviceAddress, Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size => Ok(DeviceAddress(self.range.first() + offset)),
            _ => Err(self.bounds(offset, len)),
        }
    }

    /// Copies bytes out. The device may change them meanwhile.
    ///
    /// # Errors
    /// The bytes are not all inside the buffer.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let start = self.index(offset, len)?;
        let slice = self.region.get_slice(start, data.len());
        slice.map_err(|_| self.bounds(offset, len))?.copy_to(data);
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// The bytes are not all inside the buffer.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let start = self.index(offset, len)?;
        let slice = self.region.get_slice(start, data.len());
        slice.map_err(|_| self.bounds(offset, len))?.copy_from(data);
        Ok(())
    }

    /// Reads a little-endian 16-bit value atomically.
    ///
    /// # Errors
    /// Outside the buffer, or `offset` is odd.
    pub fn load_u16(&self, offset: u64, ordering: Ordering) -> Result<u16, Error> {
        let start = self.index(offset, 2)?;
        self.region
            .as_volatile_slice()
            .load::<u16>(start, ordering)
            .map(u16::from_le)
            .map_err(|_| self.bounds(offset, 2))
    }

    /// Writes a little-endian 16-bit value atomically.
    ///
    /// # Errors
    /// Outside the buffer, or `offset` is odd.
    pub fn store_u16(&self, value: u16, offset: u64, ordering: Ordering) -> Result<(), Error> {
        let start = self.index(offset, 2)?;
        self.region
            .as_volatile_slice()
            .store(value.to_le(), start, ordering)
            .map_err(|_| self.bounds(offset, 2))
    }

    /// Reads a little-endian 32-bit value atomically.
    ///
    /// # Errors
    /// Outside the buffer, or `offset` is no multiple of 4.
    pub fn load_u32(&self, offset: u64, ordering: Ordering) -> Result<u32, Error> {
        let start = self.index(offset, 4)?;
        self.region
            .as_volatile_slice()
            .load::<u32>(start, ordering)
            .map(u32::from_le)
            .map_err(|_| self.bounds(offset, 4))
    }

    fn index(&self, offset: u64, len: u64) -> Result<usize, Error> {
        self.iova(offset, len)?;
        usize::try_from(offset).map_err(|_| self.bounds(offset, len))
    }

    /// An access outside the buffer, or an unaligned atomic one.
    fn bounds(&self, offset: u64, len: u64) -> Error {
        let size = self.size;
        Error::other(format!(
            "access of {len} bytes at offset {offset:#x} of a shared buffer of {size:#x} bytes"
        ))
    }
}

/// The range of whole pages for a buffer.
fn range_of(size: u64, iova: u64) -> Result<IovaRange, Error> {
    IovaRange::from_size(iova, size)
        .filter(|_| iova.is_multiple_of(PAGE_SIZE) && size.is_multiple_of(PAGE_SIZE))
        .ok_or_else(|| not_pages(size, iova))
}

/// Address or size is not a multiple of the page size, or the range is empty or wraps.
pub(crate) fn not_pages(size: u64, iova: u64) -> Error {
    Error::other(format!(
        "a shared buffer of {size:#x} bytes at IOVA {iova:#x} is not a range of whole 4 KiB pages"
    ))
}

fn not_mapped(size: u64, source: MmapRegionError) -> Error {
    Error::other(format!("cannot map {size} bytes of shared memory")).because(source)
}

// SAFETY: needed so that the buffer can be mapped for a device. `region` is one mmap that lives as
// long as this value, and its file cannot shrink. All access in this module is volatile or atomic
// through vm-memory, which creates no references to plain data.
unsafe impl DmaRegion for SharedBuffer {
    fn host_address(&self) -> u64 {
        // Lossless: pointers have 64 bits on all supported hosts with vhost-vdpa.
        u64::try_from(self.region.as_ptr().addr()).unwrap_or(u64::MAX)
    }

    fn size(&self) -> u64 {
        self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_anything_but_whole_pages() {
        for (size, iova) in [
            (0, 0),
            (1, 0),
            (4096, 1),
            (8192, u64::MAX - 4095),
            (u64::MAX, 0),
        ] {
            let error = SharedBuffer::new(size, iova).unwrap_err();
            assert!(error.to_string().ends_with("whole 4 KiB pages"), "{error}");
        }
        SharedBuffer::new(4096, u64::MAX - 4095).unwrap();
    }

    #[test]
    fn guest_memory_shows_the_same_bytes_at_the_same_addresses() {
        let buffer = SharedBuffer::placed(8192, |at| at.first()).unwrap();
        assert_eq!(buffer.range().first(), buffer.host_address());
        let memory = buffer.as_guest_memory().unwrap();
        buffer.write(4096, &[1, 2, 3]).unwrap();
        let mut seen = [0; 3];
        let place = GuestAddress(buffer.range().first() + 4096);
        memory.read_slice(&mut seen, place).unwrap();
        assert_eq!(seen, [1, 2, 3]);
        memory.write_slice(&[9], place).unwrap();
        buffer.read(4096, &mut seen).unwrap();
        assert_eq!(seen, [9, 2, 3]);
        assert!(SharedBuffer::placed(4096, |_| 1).is_err());
        assert!(SharedBuffer::placed(0, |_| 0).is_err());
    }

    #[test]
    fn every_access_is_checked() {
        let buffer = SharedBuffer::new(4096, 0x10_0000).unwrap();
        buffer.write(4092, &[1, 2, 3, 4]).unwrap();
        let mut data = [0; 4];
        buffer.read(4092, &mut data).unwrap();
        assert_eq!(data, [1, 2, 3, 4]);
        assert_eq!(buffer.load_u16(4094, Ordering::Acquire).unwrap(), 0x0403);
        assert_eq!(
            buffer.load_u32(4092, Ordering::Acquire).unwrap(),
            0x0403_0201
        );
        for offset in [4094, 4096, u64::MAX - 3] {
            assert!(buffer.load_u32(offset, Ordering::Relaxed).is_err());
        }
        assert_eq!(buffer.iova(4096, 0).unwrap(), DeviceAddress(0x10_1000));
        for offset in [4093, 4096, u64::MAX, u64::MAX - 3] {
            assert!(buffer.write(offset, &data).is_err());
            assert!(buffer.read(offset, &mut data).is_err());
        }
        for offset in [1, 4095, 4096, u64::MAX] {
            assert!(buffer.load_u16(offset, Ordering::Relaxed).is_err());
            assert!(buffer.store_u16(0, offset, Ordering::Relaxed).is_err());
        }
    }
}
