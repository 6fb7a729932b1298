//! The tables that are plain structures: FADT, MADT and MCFG.

use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::mcfg::MCFG;

use super::oem::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout::{
    ACPI_RESET_PORT, ACPI_RESET_VALUE, ACPI_SLEEP_CONTROL_PORT, ACPI_SLEEP_STATUS_PORT, IO_APIC,
    LOCAL_APIC, PCI_ECAM, PCI_LAST_BUS,
};

/// IA-PC boot architecture flag: don't probe for VGA (ACPI 6.5, table 5.11).
const NO_VGA: u16 = 1 << 2;
/// IA-PC boot architecture flag: leave PCI Express link power management alone.
const NO_ASPM: u16 = 1 << 4;

/// A one-byte register at an I/O port.
fn port(port: u16) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(port),
    )
}

/// The fixed description: hardware-reduced, with sleep and reset registers.
///
/// The boot architecture flag "8042 present" is clear, which saves the guest a slow probe for a
/// missing keyboard. "MSI not supported" and "CMOS RTC not present" are clear too: there is an RTC.
/// There is no FACS, which only the S4 state and the global lock would need.
pub(super) fn fadt(dsdt: u64) -> FADT {
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        // No fixed power or sleep button.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = (NO_VGA | NO_ASPM).into();
    fadt.reset_reg = port(ACPI_RESET_PORT);
    fadt.reset_value = ACPI_RESET_VALUE;
    fadt.sleep_control_reg = port(ACPI_SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(ACPI_SLEEP_STATUS_PORT);
    fadt.finalize()
}

/// Interrupt controllers: a local APIC for each processor (ID and UID are the processor's index)
/// and one I/O APIC for the interrupts from 0 on. The flags stay 0: no 8259 pair.
pub(super) fn madt(cpus: u8) -> MADT {
    // Lossless: the constants are below 4 GiB; a test checks this.
    let low = |address: u64| u32::try_from(address).unwrap_or(u32::MAX);
    let mut madt = MADT::new(
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
        LocalInterruptController::Address(low(LOCAL_APIC.start)),
    );
    for cpu in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    // KVM's I/O APIC reports ID 0 until the guest sets another.
    madt.add_structure(IoApic::new(0, low(IO_APIC.start), 0));
    madt
}

/// PCI configuration space of segment 0.
pub(super) fn mcfg() -> MCFG {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(PCI_ECAM.start, 0, 0, PCI_LAST_BUS);
    mcfg
}
