//! The structures for a PVH kernel: `struct hvm_start_info` and its targets (Xen:
//! include/public/arch-x86/hvm/start_info.h, version 1).
//!
//! ```text
//!   BOOT_PVH_START_INFO  +0x000  hvm_start_info          56 bytes
//!                        +0x040  hvm_modlist_entry       32 bytes, if there is an initramfs
//!                        +0x080  hvm_memmap_table_entry  24 bytes each
//! ```

use linux_loader::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::layout::{ACPI_TABLES, AddressRange, BOOT_CMDLINE, BOOT_PVH_START_INFO, Layout};

const MODULE_LIST: u64 = BOOT_PVH_START_INFO + 0x40;
const MEMORY_MAP: u64 = BOOT_PVH_START_INFO + 0x80;

/// The version with a memory map.
const VERSION: u32 = 1;

/// Writes the start info. [`crate::layout`] has the addresses of the command line and the ACPI
/// tables.
pub(super) fn write_start_info(
    memory: &GuestMemory,
    layout: &Layout,
    initramfs: Option<AddressRange>,
) -> Result<(), GuestMemoryError> {
    let mut memory_map_entries = 0;
    let mut at = MEMORY_MAP;
    for entry in layout.memory_map() {
        let entry = hvm_memmap_table_entry {
            addr: entry.range.start,
            size: entry.range.len,
            type_: entry.kind.code(),
            reserved: 0,
        };
        memory.write_obj(entry, GuestAddress(at))?;
        at += size_of::<hvm_memmap_table_entry>() as u64;
        memory_map_entries += 1;
    }
    let mut start_info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: VERSION,
        cmdline_paddr: BOOT_CMDLINE,
        rsdp_paddr: ACPI_TABLES,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: memory_map_entries,
        ..hvm_start_info::default()
    };
    if let Some(initramfs) = initramfs {
        let module = hvm_modlist_entry {
            paddr: initramfs.start,
            size: initramfs.len,
            ..hvm_modlist_entry::default()
        };
        memory.write_obj(module, GuestAddress(MODULE_LIST))?;
        start_info.nr_modules = 1;
        start_info.modlist_paddr = MODULE_LIST;
    }
    memory.write_obj(start_info, GuestAddress(BOOT_PVH_START_INFO))
}
