//! VIOT: which devices are behind the virtio-iommu (ACPI 6.5, section 5.2.34).
//!
//! The table covers slots and not devices, so that it also holds for devices that are plugged in
//! later. The number of an endpoint in requests is its bus, device and function.

use acpi_tables::viot::{PciDevice, PciRange, VIOT, VirtIoPciIommu};

use super::oem::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout::{IOMMU_SLOT, TRANSLATED_SLOTS};

/// The largest function number of a device.
const LAST_FUNCTION: u8 = 7;

pub(super) fn viot() -> VIOT {
    let mut viot = VIOT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let function = |slot, function| PciDevice::new(0, 0, slot, function);
    let iommu = VirtIoPciIommu::new(function(IOMMU_SLOT, 0));
    let iommu = viot.add_virtio_pci_iommu(iommu);
    let first = function(*TRANSLATED_SLOTS.start(), 0);
    let last = function(*TRANSLATED_SLOTS.end(), LAST_FUNCTION);
    viot.add_pci_range(PciRange::new(first, last, &iommu));
    viot
}
