//! The tables as a guest reads them: by following pointers from the RSDP.

use proptest::prelude::*;

use super::*;
use crate::layout::{
    ACPI_RESET_PORT, ACPI_SLEEP_CONTROL_PORT, ACPI_SLEEP_STATUS_PORT, GENERATION_ID, IO_APIC,
    KVM_TSS, LOCAL_APIC, MemoryKind, PAGE_SIZE, PCI_ECAM, PCI_MMIO32, RAM_MAX,
};
use crate::memory::GuestRam;

const MIB: u64 = 1 << 20;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// The table at `address`, its signature and checksum checked.
fn table<'a>(area: &'a [u8], address: u64, signature: &[u8; 4]) -> &'a [u8] {
    let at = usize::try_from(address - ACPI_TABLES).unwrap();
    assert!(at.is_multiple_of(TABLE_ALIGNMENT));
    let len = usize::try_from(u32_at(area, at + 4)).unwrap();
    let table = &area[at..at + len];
    assert_eq!(&table[..4], signature);
    assert_eq!(sum(table), 0, "checksum of {}", signature.escape_ascii());
    assert_eq!(&table[10..16], &OEM_ID);
    table
}

struct Tables<'a> {
    fadt: &'a [u8],
    madt: &'a [u8],
    mcfg: &'a [u8],
    dsdt: &'a [u8],
    viot: Option<&'a [u8]>,
}

fn follow(area: &[u8]) -> Tables<'_> {
    assert_eq!(&area[..8], b"RSD PTR ");
    assert_eq!(area[15], 2);
    assert_eq!((sum(&area[..20]), sum(&area[..36])), (0, 0));
    assert_eq!(u32_at(area, 20), 36);
    let xsdt = table(area, u64_at(area, 24), b"XSDT");
    let with_iommu = xsdt.len() == 36 + 4 * 8;
    assert!(with_iommu || xsdt.len() == 36 + 3 * 8);
    let fadt = table(area, u64_at(xsdt, 36), b"FACP");
    Tables {
        fadt,
        madt: table(area, u64_at(xsdt, 44), b"APIC"),
        mcfg: table(area, u64_at(xsdt, 52), b"MCFG"),
        dsdt: table(area, u64_at(fadt, 140), b"DSDT"),
        viot: with_iommu.then(|| table(area, u64_at(xsdt, 60), b"VIOT")),
    }
}

#[test]
fn fixed_description_is_hardware_reduced_with_registers() {
    let area = build(&Layout::new(256 * MIB, 40).unwrap(), 1, false);
    let fadt = follow(&area).fadt;
    assert_eq!(fadt.len(), 276);
    let flags = u32_at(fadt, 112);
    assert_ne!(flags & (1 << 20), 0, "HW_REDUCED_ACPI");
    assert_ne!(flags & (1 << 10), 0, "RESET_REG_SUP");
    // No VGA; MSI is not switched off; the RTC is not declared absent.
    assert_eq!(fadt[109] & 0b10_1110, 0b00_0100);
    let register = |at: usize| (fadt[at], fadt[at + 1], u64_at(fadt, at + 4));
    assert_eq!(register(116), (1, 8, u64::from(ACPI_RESET_PORT)));
    assert_eq!(fadt[128], 1);
    assert_eq!(register(244), (1, 8, u64::from(ACPI_SLEEP_CONTROL_PORT)));
    assert_eq!(register(256), (1, 8, u64::from(ACPI_SLEEP_STATUS_PORT)));
}

#[test]
fn one_local_apic_for_each_processor() {
    for cpus in [1, 2, 32, 255] {
        let area = build(&Layout::new(256 * MIB, 40).unwrap(), cpus, false);
        let madt = follow(&area).madt;
        assert_eq!(u64::from(u32_at(madt, 36)), LOCAL_APIC.start);
        assert_eq!(u32_at(madt, 40), 0, "no 8259");
        let mut at = 44;
        for cpu in 0..cpus {
            assert_eq!(&madt[at..at + 8], [0, 8, cpu, cpu, 1, 0, 0, 0]);
            at += 8;
        }
        assert_eq!(madt[at..at + 2], [1, 12]);
        assert_eq!(u64::from(u32_at(madt, at + 4)), IO_APIC.start);
        assert_eq!(madt.len(), at + 12);
    }
}

#[test]
fn configuration_space_is_bus_0() {
    let area = build(&Layout::new(256 * MIB, 40).unwrap(), 1, false);
    let mcfg = follow(&area).mcfg;
    assert_eq!(mcfg.len(), 44 + 16);
    assert_eq!(u64_at(mcfg, 44), PCI_ECAM.start);
    assert_eq!(mcfg[52..56], [0, 0, 0, 0]);
    assert_eq!(PCI_ECAM.len, 1 << 20);
}

#[test]
fn an_iommu_has_the_upper_slots_behind_it() {
    let layout = Layout::new(256 * MIB, 40).unwrap();
    assert!(follow(&build(&layout, 1, false)).viot.is_none());
    let area = build(&layout, 1, true);
    let viot = follow(&area).viot.unwrap();
    assert_eq!((viot.len(), viot[8]), (88, 1));
    // Two nodes from offset 48 on.
    assert_eq!(viot[36..48], [2, 0, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    // virtio-pci IOMMU at segment 0, 00:03.0.
    let iommu = [3, 0, 16, 0, 0, 0, 0x18, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(viot[48..64], iommu);
    // PCI range: endpoints from 0x80, segments, 00:10.0 to 00:1f.7, behind the node at 48.
    let range = [
        1, 0, 24, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0xff, 0, 48, 0, 0, 0, 0, 0, 0, 0,
    ];
    assert_eq!(viot[64..], range);
}

#[test]
fn devices_are_there() {
    let layout = Layout::new(256 * MIB, 40).unwrap();
    let area = build(&layout, 11, false);
    let dsdt = follow(&area).dsdt;
    let has = |bytes: &[u8]| dsdt.windows(bytes.len()).any(|window| window == bytes);
    for name in [
        "PCI0", "MBRD", "COM1", "RTC0", "C000", "C00A", "ACPI0007", "_S5_", "GED_", "ACPI0013",
        "S001", "S01F", "_EJ0", "_EVT", "PSCN", "PWRB", "PBEV", "VGEN", "VGEV",
    ] {
        assert!(has(name.as_bytes()), "{name}");
    }
    assert!(!has(b"C00B"));
    // The host bridge's own slot and those that don't exist.
    assert!(!has(b"S000") && !has(b"S020"));
    // Name (_SUN, 31) Name (_ADR, 0x1f0000); _EJ0 stores bit 31.
    assert!(has(b"_SUN\x0a\x1f\x08_ADR\x0c\x00\x00\x1f\x00"));
    assert!(has(b"_EJ0\x09\x70\x0c\x00\x00\x00\x80PEJT"));
    // OperationRegion (PHPR, SystemIO, 0x610, 12).
    assert!(has(b"\x5b\x80PHPR\x01\x0b\x10\x06\x0a\x0c"));
    // OperationRegion (PBRG, SystemIO, 0x620, 1); Notify (\\_SB.PWRB, 0x80).
    assert!(has(b"\x5b\x80PBRG\x01\x0b\x20\x06") && has(b"\x86\\\x2e_SB_PWRB\x0a\x80"));
    // Interrupts 16 to 18, level, high, exclusive.
    assert!(has(&[
        0x89, 6, 0, 1, 1, 16, 0, 0, 0, 0x89, 6, 0, 1, 1, 17, 0, 0, 0, 0x89, 6, 0, 1, 1, 18, 0, 0, 0
    ]));
    assert!(has(&layout.pci_mmio64().start.to_le_bytes()));
    assert!(has(&(layout.pci_mmio64().end() - 1).to_le_bytes()));
    // IO(0x3f8, 0x3f8, 1, 8), then interrupt 4, edge, high, exclusive.
    assert!(has(&[
        0x47, 1, 0xf8, 3, 0xf8, 3, 1, 8, 0x89, 6, 0, 3, 1, 4, 0, 0, 0
    ]));
    // Name (_S5_, Package (4) { 5, 5, 0, 0 }).
    assert!(
        has(&[
            0x08, b'_', b'S', b'5', b'_', 0x12, 8, 4, 0x0a, 5, 0x0a, 5, 0x00, 0x00
        ]) || has(&[
            0x08, b'_', b'S', b'5', b'_', 0x12, 10, 4, 0x0a, 5, 0x0a, 5, 0x0a, 0, 0x0a, 0
        ])
    );
}

#[test]
fn the_dsdt_has_the_address_of_the_generation_id_and_no_table_is_there() {
    let layout = Layout::new(256 * MIB, 40).unwrap();
    let area = build(&layout, 1, false);
    let dsdt = follow(&area).dsdt;
    let has = |bytes: &[u8]| dsdt.windows(bytes.len()).any(|window| window == bytes);
    assert!(has(
        b"\x08_HID\x0dVMGENCTR\0\x08_CID\x0dVM_Gen_Counter\0\x08_DDN\x0dVM_Gen_Counter\0"
    ));
    // Name (ADDR, Package (2) { 0xff000, 0 }).
    assert!(has(b"\x08ADDR\x12\x08\x02\x0c\x00\xf0\x0f\x00\x00"));
    // OperationRegion (VGRG, SystemIO, 0x630, 1); Notify (\\_SB.VGEN, 0x80).
    assert!(has(b"\x5b\x80VGRG\x01\x0b\x30\x06") && has(b"\x86\\\x2e_SB_VGEN\x0a\x80"));
    // A page that stays reserved, aligned, inside RAM, behind the tables.
    let page = layout
        .memory_map()
        .into_iter()
        .find(|entry| entry.range.start == GENERATION_ID);
    let page = page.unwrap();
    assert_eq!(
        (page.range.len, page.kind),
        (PAGE_SIZE, MemoryKind::Reserved)
    );
    assert!(
        GENERATION_ID.is_multiple_of(PAGE_SIZE)
            && page.range.end() <= layout.ram_below_hole().end()
    );
    assert!(ACPI_TABLES + area.len() as u64 <= GENERATION_ID);
}

#[test]
fn the_32_bit_ranges_are_32_bits_wide() {
    for range in [PCI_MMIO32, PCI_ECAM, IO_APIC, LOCAL_APIC, KVM_TSS] {
        assert!(range.end() <= u64::from(u32::MAX));
    }
}

#[test]
fn written_where_the_guest_looks_and_again_on_reboot() {
    let layout = Layout::new(16 * MIB, 40).unwrap();
    let ram = GuestRam::new(&layout, None).unwrap();
    let expected = build(&layout, 4, false);
    for _ in 0..2 {
        assert_eq!(write(ram.memory(), &layout, 4, false).unwrap(), ACPI_TABLES);
        let mut bytes = vec![0; expected.len()];
        ram.memory()
            .read_slice(&mut bytes, GuestAddress(ACPI_TABLES))
            .unwrap();
        assert_eq!(bytes, expected);
        ram.memory()
            .write_slice(&[0xa5; 4096], GuestAddress(ACPI_TABLES))
            .unwrap();
    }
    let error = write(ram.memory(), &layout, 0, false).unwrap_err();
    assert!(
        error.to_string().contains("at least one processor"),
        "{error}"
    );
}

proptest! {
    #[test]
    fn every_machine_fits(
        cpus in 1u8..=255,
        pages in 4096u64..=RAM_MAX / PAGE_SIZE,
        bits in 42u8..=52,
    ) {
        let layout = Layout::new(pages * PAGE_SIZE, bits).unwrap();
        let area = build(&layout, cpus, true);
        prop_assert!(area.len() as u64 <= ACPI_TABLES_LEN);
        follow(&area);
    }
}
