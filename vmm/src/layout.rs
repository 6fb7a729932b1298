//! The guest-physical map: all addresses in one place.
//!
//! Owns the numbers and the arithmetic on them. It must not know KVM, files or how the ranges are
//! filled. The map depends only on the size of RAM and on the width of guest-physical addresses. So
//! two hosts with the same width lay out a guest identically.
//! ```text
//!                0 +-----------------------------------+
//!                  | RAM: boot structures below 640 KiB |  (see the BOOT consts)
//!           9_FC00 +------------------------------------+
//!                  | no RAM for the guest               |
//!           E_0000 +------------------------------------+
//!                  | ACPI tables, the RSDP first        |  124 KiB
//!           F_F000 | generation ID, reset vector        |  1 page
//!          10_0000 +------------------------------------+
//!                  | RAM: kernel, initramfs             |
//!        C000_0000 +------------------------------------+  3 GiB, or the end of RAM
//!                  | 32-bit window for PCI BARs         |  512 MiB
//!        E000_0000 +------------------------------------+
//!                  | ECAM of bus 0                      |  1 MiB
//!                  | ...                                |
//!        FEC0_0000 | I/O APIC                           |
//!        FEE0_0000 | local APICs, target of MSIs        |
//!        FFFB_C000 | KVM's identity map and TSS         |  4 pages
//!      1_0000_0000 +------------------------------------+  4 GiB
//!                  | RAM beyond the first 3 GiB         |
//!                  +------------------------------------+
//!                  | ...                                |
//!        2^(bits-1)+------------------------------------+
//!                  | 64-bit window for PCI BARs         |  at most 64 GiB
//!                  +------------------------------------+
//! ```

use std::ops::RangeInclusive;

use crate::Error;
use crate::byte_count::ByteCount;

/// Bytes in a page of the processor.
pub const PAGE_SIZE: u64 = 4096;

/// The smallest RAM (bytes) of a guest: with less, no Linux kernel decompresses itself.
pub const RAM_MIN: u64 = 16 << 20;
/// The largest RAM (bytes) of a guest, if its physical addresses are wide enough.
pub const RAM_MAX: u64 = 1 << 40;

/// The global descriptor table of the boot processor, at most 64 bytes.
pub const BOOT_GDT: u64 = 0x500;
/// The PVH start info, module list and memory map: one page.
pub const BOOT_PVH_START_INFO: u64 = 0x6000;
/// The Linux zero page (`struct boot_params`): one page.
pub const BOOT_ZERO_PAGE: u64 = 0x7000;
/// Top of the stack at entry: the boot protocols require none, and kernels set up their own.
pub const BOOT_STACK_TOP: u64 = 0x8ff0;
/// Identity page tables for the 64-bit entry: PML4, PDPT and four page
/// directories, one page each.
pub const BOOT_PAGE_TABLES: u64 = 0x9000;
/// The kernel command line with its NUL.
pub const BOOT_CMDLINE: u64 = 0x2_0000;
/// Bytes set aside for the command line, NUL included.
pub const BOOT_CMDLINE_LEN: u64 = 0x1_0000;

/// End of the RAM below 640 KiB; firmware keeps its data area in the last KiB.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// First address of the ACPI tables, the RSDP first. It is inside the area that an operating system
/// searches without a pointer from the firmware (ACPI 6.5, section 5.2.5.1).
pub const ACPI_TABLES: u64 = 0xe_0000;
/// Bytes set aside for the ACPI tables.
pub const ACPI_TABLES_LEN: u64 = 0x1_f000;
/// The page that begins with the 16 bytes of the generation ID and ends with the code at
/// [`RESET_VECTOR`]. It stays reserved after the guest has read the tables.
pub const GENERATION_ID: u64 = ACPI_TABLES + ACPI_TABLES_LEN;
/// F000:FFF0 in real mode: where a processor enters the firmware of a PC to reset the machine. It
/// has room for 16 bytes.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// First address of the RAM above the legacy area: kernels are loaded from here on.
pub const HIGH_RAM_START: u64 = 0x10_0000;

/// First address of the hole in RAM below 4 GiB.
pub const HOLE_START: u64 = 0xc000_0000;
/// First address after that hole; RAM continues here.
pub const HOLE_END: u64 = 0x1_0000_0000;
/// The 32-bit window for PCI BARs.
pub const PCI_MMIO32: AddressRange = AddressRange {
    start: HOLE_START,
    len: 0x2000_0000,
};
/// PCI Express configuration space (ECAM) of segment 0, bus 0.
pub const PCI_ECAM: AddressRange = AddressRange {
    start: 0xe000_0000,
    len: 0x10_0000,
};
/// The last PCI bus that [`PCI_ECAM`] covers.
pub const PCI_LAST_BUS: u8 = 0;
/// Registers of the I/O APIC (in the kernel).
pub const IO_APIC: AddressRange = AddressRange {
    start: 0xfec0_0000,
    len: 0x1000,
};
/// Registers of the local APICs, and the target of message-signalled interrupts.
pub const LOCAL_APIC: AddressRange = AddressRange {
    start: 0xfee0_0000,
    len: 0x10_0000,
};
/// The page for `KVM_SET_IDENTITY_MAP_ADDR`.
pub const KVM_IDENTITY_MAP: AddressRange = AddressRange {
    start: 0xfffb_c000,
    len: PAGE_SIZE,
};
/// The three pages for `KVM_SET_TSS_ADDR`.
pub const KVM_TSS: AddressRange = AddressRange {
    start: 0xfffb_d000,
    len: 3 * PAGE_SIZE,
};

/// First port of the serial console (COM1, a 16550).
pub const SERIAL_PORT: u16 = 0x3f8;
/// Ports of the serial console.
pub const SERIAL_PORT_LEN: u8 = 8;
/// Interrupt of the serial console (an input of the I/O APIC).
pub const SERIAL_IRQ: u8 = 4;
/// First port of the real-time clock (index, then data).
pub const RTC_PORT: u16 = 0x70;
/// Ports of the real-time clock.
pub const RTC_PORT_LEN: u8 = 2;
/// Interrupt of the real-time clock (an input of the I/O APIC).
pub const RTC_IRQ: u8 = 8;
/// Command port of the keyboard controller, whose only use is the reset line.
pub const I8042_COMMAND_PORT: u16 = 0x64;
/// First port of PCI configuration mechanism 1 (address, then data).
pub const PCI_CONFIG_PORT: u16 = 0xcf8;
/// Ports of PCI configuration mechanism 1.
pub const PCI_CONFIG_PORT_LEN: u8 = 8;
/// ACPI sleep control register (ACPI 6.5, section 4.8.3.7), 1 byte.
pub const ACPI_SLEEP_CONTROL_PORT: u16 = 0x600;
/// ACPI sleep status register, 1 byte.
pub const ACPI_SLEEP_STATUS_PORT: u16 = 0x601;
/// ACPI reset register (ACPI 6.5, section 4.8.3.6), 1 byte.
pub const ACPI_RESET_PORT: u16 = 0x602;
/// The value whose write to [`ACPI_RESET_PORT`] resets the machine.
pub const ACPI_RESET_VALUE: u8 = 1;
/// First port of the PCI hot-plug registers ([`devices::pci::PciHotplug`]).
pub const HOTPLUG_PORT: u16 = 0x610;
/// Interrupt of PCI hot-plug: an input of the I/O APIC without an ISA device, and so without a PIC
/// input.
pub const HOTPLUG_IRQ: u8 = 16;
/// The power button's register ([`devices::legacy::event`]), 1 byte.
pub const POWER_BUTTON_PORT: u16 = 0x620;
/// Interrupt of the power button; without a PIC input like [`HOTPLUG_IRQ`].
pub const POWER_BUTTON_IRQ: u8 = 17;
/// The register that reports a changed generation ID ([`devices::legacy::event`]), 1 byte.
pub const GENERATION_PORT: u16 = 0x630;
/// Interrupt of a changed generation ID; without a PIC input like [`HOTPLUG_IRQ`].
pub const GENERATION_IRQ: u8 = 18;
/// The sleep type (SLP_TYP) that means "off" in [`ACPI_SLEEP_CONTROL_PORT`].
pub const ACPI_SLEEP_TYPE_OFF: u8 = 5;

/// Narrowest guest-physical address (bits) with a map; no x86-64 processor has less.
const PHYSICAL_BITS_MIN: u8 = 36;
/// Widest address in use: a Linux guest with 4-level page tables reaches no further.
const PHYSICAL_BITS_USED: u8 = 46;
/// Width (bits) of guest-physical addresses that all hosts of a mixed cluster have: desktops have
/// 39, servers more.
const PHYSICAL_BITS_COMMON: u8 = 39;
/// Widest address of x86-64.
const PHYSICAL_BITS_MAX: u8 = 52;
/// The PCI slot of the guest's IOMMU.
pub const IOMMU_SLOT: u8 = 3;
/// The PCI slots behind it.
pub const TRANSLATED_SLOTS: RangeInclusive<u8> = 16..=31;
/// Largest 64-bit window for PCI BARs, in bytes.
const PCI_MMIO64_MAX: u64 = 64 << 30;

/// Addresses `start..start + len`. All ranges of this module end below 2^52.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl AddressRange {
    /// First address after the range; saturates at the end of the address space.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Whether the two ranges share an address.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

/// The kind of a range of the map, as firmware reports it to the operating system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Usable RAM.
    Ram,
    /// Not usable.
    Reserved,
    /// ACPI tables; usable once they have been read.
    Acpi,
}

impl MemoryKind {
    /// The number in an E820 or PVH memory map (ACPI 6.5, table 15.5).
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Ram => 1,
            Self::Reserved => 2,
            Self::Acpi => 3,
        }
    }
}

/// One entry of the memory map given to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryMapEntry {
    /// The addresses.
    pub range: AddressRange,
    /// The kind of memory.
    pub kind: MemoryKind,
}

/// The map of one guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    ram_size: u64,
    mmio64: AddressRange,
}

impl Layout {
    /// Creates the map for `ram_size` bytes of RAM and guest-physical addresses of `physical_bits`
    /// bits (CPUID leaf 0x8000_0008, EAX bits 7..0, *as the guest sees it*).
    ///
    /// # Errors
    /// The size is below [`RAM_MIN`], too large for the map or not whole pages, or the width is
    /// outside 36..=52.
    pub fn new(ram_size: u64, physical_bits: u8) -> Result<Self, Error> {
        let mmio64 = mmio64_window(physical_bits)?;
        // The hole shifts the rest of RAM up by its own length.
        let max = RAM_MAX.min(mmio64.start - (HOLE_END - HOLE_START));
        if ram_size < RAM_MIN {
            return Err(Error::unusable(format!(
                "{} of memory is too small for a kernel: give the guest {} or more",
                ByteCount(ram_size),
                ByteCount(RAM_MIN)
            )));
        }
        if ram_size > max {
            return Err(Error::unusable(format!(
                "{} of memory is too much: {physical_bits}-bit guest-physical addresses leave room \
                 for {}",
                ByteCount(ram_size),
                ByteCount(max)
            )));
        }
        if !ram_size.is_multiple_of(PAGE_SIZE) {
            return Err(Error::unusable(format!(
                "memory of {ram_size} bytes is not a multiple of the page size of {PAGE_SIZE} bytes"
            )));
        }
        Ok(Self { ram_size, mmio64 })
    }

    /// Size of RAM in bytes.
    #[must_use]
    pub fn ram_size(&self) -> u64 {
        self.ram_size
    }

    /// RAM from address 0 to the hole.
    #[must_use]
    pub fn ram_below_hole(&self) -> AddressRange {
        AddressRange {
            start: 0,
            len: self.ram_size.min(HOLE_START),
        }
    }

    /// RAM from 4 GiB on, if any.
    #[must_use]
    pub fn ram_above_hole(&self) -> Option<AddressRange> {
        let len = self.ram_size.saturating_sub(HOLE_START);
        (len > 0).then_some(AddressRange {
            start: HOLE_END,
            len,
        })
    }

    /// The ranges backed by memory, in ascending order.
    pub fn ram(&self) -> impl Iterator<Item = AddressRange> {
        std::iter::once(self.ram_below_hole()).chain(self.ram_above_hole())
    }

    /// RAM below the hole that kernel and initramfs may fill: from 1 MiB to the hole.
    #[must_use]
    pub fn loadable(&self) -> AddressRange {
        AddressRange {
            start: HIGH_RAM_START,
            len: self.ram_below_hole().end() - HIGH_RAM_START,
        }
    }

    /// The 64-bit window for PCI BARs. Depends on the address width alone.
    #[must_use]
    pub fn pci_mmio64(&self) -> AddressRange {
        self.mmio64
    }

    /// The memory map for the guest (E820, PVH), ascending and disjoint.
    #[must_use]
    pub fn memory_map(&self) -> Vec<MemoryMapEntry> {
        let entry = |start, end, kind| MemoryMapEntry {
            range: AddressRange {
                start,
                len: end - start,
            },
            kind,
        };
        let mut map = vec![
            entry(0, LOW_RAM_END, MemoryKind::Ram),
            entry(LOW_RAM_END, 0xa_0000, MemoryKind::Reserved),
            entry(ACPI_TABLES, GENERATION_ID, MemoryKind::Acpi),
            entry(GENERATION_ID, HIGH_RAM_START, MemoryKind::Reserved),
            entry(HIGH_RAM_START, self.ram_below_hole().end(), MemoryKind::Ram),
            // Linux accepts MCFG only if the range is reserved here or by a device of the DSDT;
            // early in boot only this one can be read.
            entry(PCI_ECAM.start, PCI_ECAM.end(), MemoryKind::Reserved),
            entry(KVM_IDENTITY_MAP.start, KVM_TSS.end(), MemoryKind::Reserved),
        ];
        map.extend(self.ram_above_hole().map(|range| MemoryMapEntry {
            range,
            kind: MemoryKind::Ram,
        }));
        map
    }
}

/// Width (bits) of guest-physical addresses for a guest with `ram_size` bytes that is to move
/// between hosts of different widths. It is the smallest width of at least 39 with room for its
/// RAM, regardless of this host. So all hosts lay the guest out identically.
#[must_use]
pub fn common_physical_bits(ram_size: u64) -> u8 {
    (PHYSICAL_BITS_COMMON..PHYSICAL_BITS_USED)
        .find(|bits| ram_size <= (1 << (bits - 1)) - (HOLE_END - HOLE_START))
        .unwrap_or(PHYSICAL_BITS_USED)
}

/// The 64-bit window: the first bytes of the upper half of the address space. Its position must not
/// depend on the size of RAM, or BARs would move when memory is added. The upper quarter stays
/// free, where AMD hosts reserve addresses for HyperTransport.
fn mmio64_window(physical_bits: u8) -> Result<AddressRange, Error> {
    if !(PHYSICAL_BITS_MIN..=PHYSICAL_BITS_MAX).contains(&physical_bits) {
        return Err(Error::unusable(format!(
            "the processor reports {physical_bits}-bit physical addresses, which x86-64 does not \
             have"
        )));
    }
    let bits = physical_bits.min(PHYSICAL_BITS_USED);
    Ok(AddressRange {
        start: 1 << (bits - 1),
        len: PCI_MMIO64_MAX.min(1 << (bits - 2)),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FIXED: [AddressRange; 6] = [
        PCI_MMIO32,
        PCI_ECAM,
        IO_APIC,
        LOCAL_APIC,
        KVM_IDENTITY_MAP,
        KVM_TSS,
    ];

    fn assert_disjoint(ranges: &[AddressRange]) {
        for (index, one) in ranges.iter().enumerate() {
            assert!(one.len > 0);
            assert!(one.start.checked_add(one.len).is_some());
            for other in &ranges[index + 1..] {
                assert!(!one.overlaps(other), "{one:x?} meets {other:x?}");
            }
        }
    }

    #[test]
    fn boot_structures_are_apart_and_in_low_ram() {
        let page = |start| AddressRange {
            start,
            len: PAGE_SIZE,
        };
        let ranges = [
            AddressRange {
                start: BOOT_GDT,
                len: 64,
            },
            page(BOOT_PVH_START_INFO),
            page(BOOT_ZERO_PAGE),
            page(BOOT_STACK_TOP & !(PAGE_SIZE - 1)),
            AddressRange {
                start: BOOT_PAGE_TABLES,
                len: 6 * PAGE_SIZE,
            },
            AddressRange {
                start: BOOT_CMDLINE,
                len: BOOT_CMDLINE_LEN,
            },
        ];
        assert_disjoint(&ranges);
        assert!(ranges.iter().all(|range| range.end() <= LOW_RAM_END));
        assert_eq!(GENERATION_ID + PAGE_SIZE, HIGH_RAM_START);
        assert_eq!(RESET_VECTOR + 16, HIGH_RAM_START);
    }

    #[test]
    fn ports_are_apart() {
        let ports = [
            (SERIAL_PORT, u64::from(SERIAL_PORT_LEN)),
            (RTC_PORT, u64::from(RTC_PORT_LEN)),
            (I8042_COMMAND_PORT, 1),
            (PCI_CONFIG_PORT, u64::from(PCI_CONFIG_PORT_LEN)),
            (ACPI_SLEEP_CONTROL_PORT, 1),
            (ACPI_SLEEP_STATUS_PORT, 1),
            (ACPI_RESET_PORT, 1),
            (HOTPLUG_PORT, devices::pci::HOTPLUG_LEN),
            (POWER_BUTTON_PORT, devices::legacy::event::ACPI_EVENT_LEN),
            (GENERATION_PORT, devices::legacy::event::ACPI_EVENT_LEN),
        ]
        .map(|(port, len)| AddressRange {
            start: u64::from(port),
            len,
        });
        assert_disjoint(&ports);
    }

    #[test]
    fn refuses_sizes_and_widths() {
        let refused = |size, bits| Layout::new(size, bits).unwrap_err().to_string();
        assert!(refused(0, 40).contains("too small"));
        assert_eq!(
            refused(1 << 20, 40),
            "1 MiB of memory is too small for a kernel: give the guest 16 MiB or more"
        );
        assert!(Layout::new(RAM_MIN, 40).is_ok());
        assert!(refused(RAM_MIN + 1, 40).contains("not a multiple of the page size"));
        assert!(Layout::new(RAM_MAX, 46).is_ok());
        for (size, bits) in [
            (RAM_MAX + PAGE_SIZE, 46),
            (RAM_MAX, 40),
            (u64::MAX, 52),
            (1 << 36, 36),
        ] {
            assert!(refused(size, bits).contains("too much"));
        }
        for bits in [0, 35, 53, 255] {
            assert!(refused(RAM_MIN, bits).contains("x86-64 does not have"));
        }
    }

    #[test]
    fn a_guest_of_a_mixed_cluster_has_room_for_its_ram_and_no_bit_more() {
        const GIB: u64 = 1 << 30;
        for (size, bits) in [
            (RAM_MIN, 39),
            (255 * GIB, 39),
            (256 * GIB, 40),
            (511 * GIB, 40),
            (512 * GIB, 41),
            (RAM_MAX, 42),
            (u64::MAX, 46),
        ] {
            assert_eq!(common_physical_bits(size), bits, "{size:#x}");
            assert_eq!(
                Layout::new(size, bits).is_ok(),
                size <= RAM_MAX,
                "{size:#x}"
            );
        }
    }

    proptest! {
        #[test]
        fn nothing_overlaps(pages in RAM_MIN / PAGE_SIZE..=RAM_MAX / PAGE_SIZE, bits in 36u8..=52) {
            let size = pages * PAGE_SIZE;
            let Ok(layout) = Layout::new(size, bits) else {
                // The only remaining reason is that it does not fit.
                prop_assert!(size > (1 << (bits - 1)) - (1 << 30));
                return Ok(());
            };
            let mut ranges: Vec<_> = layout.ram().collect();
            prop_assert_eq!(ranges.iter().map(|range| range.len).sum::<u64>(), size);
            ranges.extend(FIXED);
            ranges.push(layout.pci_mmio64());
            assert_disjoint(&ranges);
            prop_assert!(ranges.iter().all(|range| range.end() <= 1 << bits));

            let map = layout.memory_map();
            prop_assert!(map.windows(2).all(|pair| pair[0].range.end() <= pair[1].range.start));
            for entry in &map {
                // Usable memory is backed, and never a device.
                if entry.kind == MemoryKind::Ram {
                    let backed = layout.ram().any(|ram| {
                        ram.start <= entry.range.start && entry.range.end() <= ram.end()
                    });
                    prop_assert!(backed);
                }
            }
        }
    }
}
