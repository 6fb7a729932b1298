//! ACPI tables: the machine's description of itself for the guest.
//!
//! Owns the tables' content and their addresses in guest memory. All values come from
//! [`crate::layout`] or the count of processors. It must not know the devices themselves. The
//! tables are static: a reboot may write them again and gets the same bytes.
//!
//! ```text
//!   ACPI_TABLES: RSDP ──> XSDT ──┬──> FADT ──> DSDT (AML)
//!                                ├──> MADT  processors and I/O APIC
//!                                ├──> MCFG  PCI configuration space
//!                                └──> VIOT  devices behind the IOMMU, if there is one
//! ```
//!
//! The machine is *hardware-reduced* (ACPI 6.5, section 4.1): no PM timer, no fixed events, no
//! legacy interrupt controllers; sleep and reset are three I/O ports. A Generic Event Device
//! notifies the guest while it runs: of PCI hot-plug (`hotplug.rs`), of the power button
//! (`button.rs`), and of a new generation (`generation.rs`).

mod button;
mod dsdt;
mod encoded;
mod event;
mod generation;
mod hotplug;
mod oem;
mod tables;
mod viot;

use acpi_tables::Aml;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress};

use self::oem::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::Error;
use crate::layout::{ACPI_TABLES, ACPI_TABLES_LEN, Layout};

/// Tables begin at multiples of this many bytes.
const TABLE_ALIGNMENT: usize = 16;

/// Writes the tables of a machine with `cpus` processors, whose APIC IDs are
/// `0..cpus`, and returns the address of the RSDP (always [`ACPI_TABLES`]). With `iommu` it has an
/// IOMMU.
///
/// # Errors
/// [`Error`]; `cpus` must not be 0.
pub fn write(memory: &GuestMemory, layout: &Layout, cpus: u8, iommu: bool) -> Result<u64, Error> {
    if cpus == 0 {
        return Err(Error::host("a machine needs at least one processor"));
    }
    let bytes = build(layout, cpus, iommu);
    // Lossless: usize is 64 bits wide on x86-64.
    if bytes.len() as u64 > ACPI_TABLES_LEN {
        return Err(Error::host(format!(
            "the ACPI tables have {} bytes, there is room for {ACPI_TABLES_LEN}",
            bytes.len()
        )));
    }
    memory
        .write_slice(&bytes, GuestAddress(ACPI_TABLES))
        .map_err(|source| {
            Error::host("cannot write the ACPI tables to guest memory").because(source)
        })?;
    Ok(ACPI_TABLES)
}

/// All tables, as in memory from [`ACPI_TABLES`] on.
fn build(layout: &Layout, cpus: u8, iommu: bool) -> Vec<u8> {
    // The RSDP comes first, where the guest looks, but points to the last table.
    let mut area = Area {
        bytes: vec![0; Rsdp::len()],
    };
    let dsdt = area.push(&dsdt::dsdt(layout, cpus));
    let mut tables = vec![
        area.push(&tables::fadt(dsdt)),
        area.push(&tables::madt(cpus)),
        area.push(&tables::mcfg()),
    ];
    if iommu {
        tables.push(area.push(&viot::viot()));
    }
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for table in tables {
        xsdt.add_entry(table);
    }
    let xsdt = area.push(&xsdt);

    let mut rsdp = Vec::with_capacity(Rsdp::len());
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    for (to, from) in area.bytes.iter_mut().zip(rsdp) {
        *to = from;
    }
    area.bytes
}

/// A growing area of tables.
struct Area {
    bytes: Vec<u8>,
}

impl Area {
    /// Appends a table and returns its guest-physical address.
    fn push(&mut self, table: &dyn Aml) -> u64 {
        let start = self.bytes.len().next_multiple_of(TABLE_ALIGNMENT);
        self.bytes.resize(start, 0);
        table.to_aml_bytes(&mut self.bytes);
        // Lossless: usize is 64 bits wide on x86-64.
        ACPI_TABLES + start as u64
    }
}

#[cfg(test)]
mod tests;
