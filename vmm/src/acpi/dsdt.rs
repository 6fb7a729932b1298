//! The DSDT: the devices that the guest finds by ACPI alone.
//!
//! ```text
//!   \_SB   PCI0  PCI Express host bridge: bus 0, windows for BARs, hot-plug slots
//!          GED_  receives the interrupts of hot-plug, power button and generation ID
//!          PWRB  power button
//!          VGEN  generation ID
//!          MBRD  reserves the ECAM range
//!          COM1  serial console
//!          RTC0  real-time clock
//!          Cxxx  one for each processor (xxx: index in hexadecimal)
//!   \_S5   the sleep type that means "off"
//! ```

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Name,
    Package, ResourceTemplate, Scope,
};
use acpi_tables::sdt::Sdt;

use super::encoded::Encoded;
use super::oem::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use super::{button, generation, hotplug};
use crate::layout::{
    ACPI_SLEEP_TYPE_OFF, AddressRange, Layout, PCI_CONFIG_PORT, PCI_CONFIG_PORT_LEN, PCI_ECAM,
    PCI_LAST_BUS, PCI_MMIO32, RTC_IRQ, RTC_PORT, RTC_PORT_LEN, SERIAL_IRQ, SERIAL_PORT,
    SERIAL_PORT_LEN,
};

/// Bytes in the header of a table.
const HEADER_LEN: u32 = 36;
/// Revision of the DSDT: AML integers have 64 bits.
const REVISION: u8 = 2;

/// Builds the table.
pub(super) fn dsdt(layout: &Layout, cpus: u8) -> Sdt {
    let mut system_bus = Vec::new();
    push_pci(&mut system_bus, layout);
    hotplug::push_event_device(&mut system_bus);
    button::push(&mut system_bus);
    generation::push(&mut system_bus);
    push_motherboard(&mut system_bus);
    push_legacy_device(
        &mut system_bus,
        "COM1",
        "PNP0501",
        (SERIAL_PORT, SERIAL_PORT_LEN),
        SERIAL_IRQ,
    );
    push_legacy_device(
        &mut system_bus,
        "RTC0",
        "PNP0B00",
        (RTC_PORT, RTC_PORT_LEN),
        RTC_IRQ,
    );
    for cpu in 0..cpus {
        Device::new(
            format!("C{cpu:03X}").as_str().into(),
            vec![
                &Name::new("_HID".into(), &"ACPI0007"),
                &Name::new("_UID".into(), &cpu),
            ],
        )
        .to_aml_bytes(&mut system_bus);
    }
    let mut aml = Scope::raw("_SB_".into(), system_bus);
    Name::new(
        "_S5_".into(),
        // The second type is for a second register block, which this machine lacks.
        &Package::new(vec![
            &ACPI_SLEEP_TYPE_OFF,
            &ACPI_SLEEP_TYPE_OFF,
            &0_u8,
            &0_u8,
        ]),
    )
    .to_aml_bytes(&mut aml);

    let mut table = Sdt::new(
        *b"DSDT",
        HEADER_LEN,
        REVISION,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    table.append_slice(&aml);
    table
}

/// The PCI Express host bridge. There is no _PRT: functions have MSI-X and no
/// interrupt pins.
fn push_pci(aml: &mut Vec<u8>, layout: &Layout) {
    let window32 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        low(PCI_MMIO32.start),
        low(PCI_MMIO32.end() - 1),
        None,
    );
    let mmio64 = layout.pci_mmio64();
    let window64 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        mmio64.start,
        mmio64.end() - 1,
        None,
    );
    Device::new(
        "PCI0".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
            &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_UID".into(), &0_u8),
            &Name::new("_SEG".into(), &0_u8),
            &Name::new("_BBN".into(), &0_u8),
            &Name::new("_CBA".into(), &PCI_ECAM.start),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![
                    &AddressSpace::new_bus_number(0_u16, u16::from(PCI_LAST_BUS)),
                    &IO::new(PCI_CONFIG_PORT, PCI_CONFIG_PORT, 1, PCI_CONFIG_PORT_LEN),
                    &window32,
                    &window64,
                ]),
            ),
            &Encoded(hotplug::slots()),
        ],
    )
    .to_aml_bytes(aml);
}

/// Reserves the ECAM range: Linux uses it only if a motherboard device or the memory map reserves
/// it.
fn push_motherboard(aml: &mut Vec<u8>) {
    let AddressRange { start, len } = PCI_ECAM;
    Device::new(
        "MBRD".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
            &Name::new("_UID".into(), &0_u8),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&Memory32Fixed::new(true, low(start), low(len))]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// A device with one range of ports (first, count) and one edge-triggered interrupt.
fn push_legacy_device(aml: &mut Vec<u8>, name: &str, id: &str, ports: (u16, u8), irq: u8) {
    let (first, count) = ports;
    Device::new(
        name.into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new(id)),
            &Name::new("_UID".into(), &0_u8),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![
                    &IO::new(first, first, 1, count),
                    &Interrupt::new(true, true, false, false, u32::from(irq)),
                ]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// An address or length of the 32-bit hole; a test checks that they are.
fn low(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
