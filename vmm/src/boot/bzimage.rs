//! bzImage kernels (`vmlinuz`), entered in 64-bit mode.
//!
//! Owns the reading of the setup header (Linux: Documentation/arch/x86/boot.rst). A
//! [`BzImageKernel`] has passed all checks. It must not know the zero page except for the header,
//! which has to be copied there.
//!
//! The structure comes from `linux-loader`, whose `BzImage::load` is not used because it does not
//! check the header. It would start a file that ends inside the header or the kernel, or one
//! without a 64-bit entry.

use std::io::{Read, Seek, SeekFrom};

use linux_loader::bootparam::{XLF_KERNEL_64, setup_header};
use vdpa::memory::GuestMemory;
use vm_memory::{ByteValued, ReadVolatile};

use super::error::{damaged, no_room, too_low, unreadable};
use super::file::{self, CopyError};
use crate::Error;
use crate::layout::AddressRange;

/// Offset of the setup header in the file and in the zero page.
const SETUP_HEADER: u64 = 0x1f1;
/// Base of the header's length: the target of the jump at 0x200.
const SETUP_HEADER_JUMP: usize = 0x202;
/// The first version of the boot protocol with `xloadflags` (2.12, Linux 3.8).
const PROTOCOL_XLOADFLAGS: u16 = 0x20c;
/// `loadflags`: the kernel is loaded at 1 MiB or above (a bzImage, not a zImage).
const LOADED_HIGH: u8 = 1;
/// Bytes in a sector of the real-mode part.
const SECTOR: u64 = 512;
/// Offset of the 64-bit entry point from the kernel's load address.
const ENTRY_64: u64 = 0x200;
/// Bytes of a paragraph, the unit of `syssize`. The file may end up to 15 bytes early.
const PARAGRAPH: u64 = 16;

/// A checked bzImage.
#[derive(Debug)]
pub(super) struct BzImageKernel {
    /// The setup header as it is in the file, to be completed and copied to the zero page.
    pub(super) header: setup_header,
    /// The protected-mode kernel in the file.
    payload: AddressRange,
    /// Its range in guest memory, which includes the space for decompression.
    pub(super) extent: AddressRange,
}

impl BzImageKernel {
    /// Reads and checks the setup header of a file of `len` bytes. The kernel must fit inside
    /// `loadable`.
    pub(super) fn parse<R: Read + Seek>(
        reader: &mut R,
        len: u64,
        loadable: AddressRange,
    ) -> Result<Self, Error> {
        let header = read_header(reader, len)?;
        let version = header.version;
        let flags = header.xloadflags;
        if version < PROTOCOL_XLOADFLAGS
            || flags & XLF_KERNEL_64 == 0
            || header.loadflags & LOADED_HIGH == 0
        {
            let [minor, major] = version.to_le_bytes();
            return Err(Error::unusable(format!(
                "it is a bzImage without a 64-bit entry point (boot protocol {major}.{minor:02}): \
                 use a 64-bit kernel of version 3.8 or later"
            )));
        }
        let payload = find_payload(&header, len)?;
        let extent = place(&header, payload.len, loadable)?;
        Ok(Self {
            header,
            payload,
            extent,
        })
    }

    /// Address of the 64-bit entry point.
    pub(super) fn entry(&self) -> u64 {
        self.extent.start + ENTRY_64
    }

    /// The highest address for a byte of the initramfs.
    pub(super) fn initramfs_max(&self) -> u64 {
        u64::from(self.header.initrd_addr_max)
    }

    /// The longest command line, without its NUL.
    pub(super) fn cmdline_max(&self) -> usize {
        usize::try_from(self.header.cmdline_size).unwrap_or(usize::MAX)
    }

    /// Reads the protected-mode kernel into memory.
    pub(super) fn load<R: ReadVolatile + Seek>(
        &self,
        reader: &mut R,
        memory: &GuestMemory,
    ) -> Result<(), CopyError> {
        reader
            .seek(SeekFrom::Start(self.payload.start))
            .map_err(|error| CopyError::File(unreadable(error)))?;
        file::copy_to_guest(reader, memory, self.extent.start, self.payload.len)
    }
}

/// Reads the setup header; zeroes the fields after the end that the header states.
fn read_header<R: Read + Seek>(reader: &mut R, len: u64) -> Result<setup_header, Error> {
    let mut header = setup_header::zeroed();
    file::check_inside(SETUP_HEADER, size_of::<setup_header>() as u64, len)?;
    reader
        .seek(SeekFrom::Start(SETUP_HEADER))
        .map_err(unreadable)?;
    reader
        .read_exact(header.as_mut_slice())
        .map_err(unreadable)?;
    // The second byte of the jump over the header is the distance.
    let [_, distance] = header.jump.to_le_bytes();
    let end = (SETUP_HEADER_JUMP + usize::from(distance))
        .saturating_sub(usize::try_from(SETUP_HEADER).unwrap_or(usize::MAX));
    if let Some(beyond) = header.as_mut_slice().get_mut(end..) {
        beyond.fill(0);
    }
    Ok(header)
}

/// Finds the protected-mode kernel after the real-mode sectors.
fn find_payload(header: &setup_header, len: u64) -> Result<AddressRange, Error> {
    // 0 means 4, for kernels older than the field; the boot sector is not counted.
    let sectors = match header.setup_sects {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let start = (sectors + 1) * SECTOR;
    let paragraphs = u64::from(header.syssize);
    if paragraphs * PARAGRAPH <= ENTRY_64 {
        return Err(damaged("it has no room for a 64-bit entry point"));
    }
    let stated = paragraphs * PARAGRAPH;
    // The last paragraph may be incomplete, and signatures may follow it.
    file::check_inside(start, stated - (PARAGRAPH - 1), len)?;
    Ok(AddressRange {
        start,
        len: stated.min(len - start),
    })
}

/// Chooses the load address: the kernel's preferred one. A relocatable kernel does not go below it,
/// and any other must be there.
fn place(
    header: &setup_header,
    payload_len: u64,
    loadable: AddressRange,
) -> Result<AddressRange, Error> {
    let start = header.pref_address;
    let alignment = u64::from(header.kernel_alignment);
    if header.relocatable_kernel != 0
        && (!alignment.is_power_of_two() || !start.is_multiple_of(alignment))
    {
        return Err(damaged("its preferred address is not aligned"));
    }
    if start < loadable.start {
        return Err(too_low(start, loadable.start));
    }
    // The kernel needs this much from there on to decompress itself before it can read the memory
    // map.
    let needed = u64::from(header.init_size).max(payload_len);
    match start.checked_add(needed) {
        Some(end) if end <= loadable.end() => Ok(AddressRange { start, len: needed }),
        _ => {
            let available = loadable.end().saturating_sub(start);
            Err(no_room(needed, start, available))
        }
    }
}

#[cfg(test)]
mod tests;
