//! The structures for a kernel entered by the 64-bit Linux boot protocol: the zero page and
//! identity page tables (Linux: Documentation/arch/x86/boot.rst and zero-page.rst).
//!
//! ```text
//!   BOOT_PAGE_TABLES  +0x0000  PML4: entry 0 -> PDPT
//!                     +0x1000  PDPT: entries 0..4 -> page directories
//!                     +0x2000  4 page directories: 2 MiB pages, 0..4 GiB at their own address
//! ```

use linux_loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vdpa::memory::GuestMemory;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryError};

use crate::layout::{
    ACPI_TABLES, AddressRange, BOOT_CMDLINE, BOOT_PAGE_TABLES, BOOT_ZERO_PAGE, Layout, PAGE_SIZE,
};

/// `type_of_loader`: a loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
/// `vid_mode`: the present text mode.
const VIDEO_MODE_NORMAL: u16 = 0xffff;
/// Page directories, for 1 GiB each: the protocol requires mappings of kernel, zero page and
/// command line, which are all below 4 GiB.
const PAGE_DIRECTORIES: u64 = 4;
/// Entries in a page table of any level.
const ENTRIES: u64 = 512;
/// Bytes that one entry of a page directory maps.
const LARGE_PAGE: u64 = 2 << 20;
/// Page table entry: present and writable.
const PRESENT_WRITABLE: u64 = 0b11;
/// Page table entry: a page and not a table.
const LARGE: u64 = 1 << 7;

/// Writes the zero page: the kernel's own setup header, completed, the memory map and the addresses
/// of initramfs, command line and RSDP.
pub(super) fn write_zero_page(
    memory: &GuestMemory,
    layout: &Layout,
    header: &setup_header,
    initramfs: Option<AddressRange>,
) -> Result<(), GuestMemoryError> {
    let mut params = boot_params::zeroed();
    params.hdr = *header;
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.vid_mode = VIDEO_MODE_NORMAL;
    // A list in the file would be an address that the file chooses.
    params.hdr.setup_data = 0;
    // All of these are below 4 GiB, so the high halves of the addresses (ext_cmd_line_ptr and so
    // on) stay 0.
    params.hdr.cmd_line_ptr = low_half(BOOT_CMDLINE);
    let (start, len) = initramfs.map_or((0, 0), |range| (range.start, range.len));
    params.hdr.ramdisk_image = low_half(start);
    params.hdr.ramdisk_size = low_half(len);
    params.acpi_rsdp_addr = ACPI_TABLES;
    let mut entries = 0;
    let mut table = params.e820_table;
    for (slot, entry) in table.iter_mut().zip(layout.memory_map()) {
        *slot = boot_e820_entry {
            addr: entry.range.start,
            size: entry.range.len,
            r#type: entry.kind.code(),
        };
        entries += 1;
    }
    params.e820_table = table;
    params.e820_entries = entries;
    memory.write_obj(params, GuestAddress(BOOT_ZERO_PAGE))
}

/// The low 32 bits of a number without higher bits.
fn low_half(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Writes all entries of the page tables.
pub(super) fn write_page_tables(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    let table = |index: u64| BOOT_PAGE_TABLES + index * PAGE_SIZE;
    write_table(memory, table(0), |index| {
        if index == 0 {
            table(1) | PRESENT_WRITABLE
        } else {
            0
        }
    })?;
    write_table(memory, table(1), |index| {
        if index < PAGE_DIRECTORIES {
            table(2 + index) | PRESENT_WRITABLE
        } else {
            0
        }
    })?;
    for directory in 0..PAGE_DIRECTORIES {
        write_table(memory, table(2 + directory), |index| {
            ((directory * ENTRIES + index) * LARGE_PAGE) | PRESENT_WRITABLE | LARGE
        })?;
    }
    Ok(())
}

fn write_table(
    memory: &GuestMemory,
    address: u64,
    entry: impl Fn(u64) -> u64,
) -> Result<(), GuestMemoryError> {
    let bytes: Vec<u8> = (0..ENTRIES)
        .flat_map(|index| entry(index).to_le_bytes())
        .collect();
    memory.write_slice(&bytes, GuestAddress(address))
}
