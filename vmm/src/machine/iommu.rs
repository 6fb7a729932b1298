//! The guest's IOMMU as a part of the machine.
//!
//! Owns the addresses that the guest may map, and the PCI slots behind the IOMMU. It must not know
//! requests of its driver, nor how a device maps memory.
//!
//! ```text
//!   slot  0     3      1, 2, 4 .. 15     16 .. 31
//!         host  IOMMU  other devices     devices with `iommu=on`: endpoints 0x80 .. 0xf8
//! ```
//! The slots are fixed, because the table VIOT names them before a device is plugged in.

mod refusals;

use std::sync::Arc;

use devices::pci::Slot;
use devices::virtio::backend::{SharedMemory, Translated as _};
use devices::virtio::iommu::{Domains, Iommu, SharedDomains};
use parking_lot::Mutex;
use vdpa::iova::IovaRange;

pub(super) use self::refusals::RefusalWatch;
use super::devices::Device;
use super::passthrough::Function;
use crate::Error;
use crate::config::IommuConfig;
use crate::layout::{IOMMU_SLOT, TRANSLATED_SLOTS};

/// The name of the IOMMU among the devices.
pub(super) const IOMMU: &str = "iommu";
/// The last address that a guest may map, if its devices reach it. Hosts with the same devices have
/// the same addresses then, so the guest can migrate.
const INPUT_LAST: u64 = (1 << 46) - 1;

/// Creates the IOMMU for these devices and those that are plugged in later.
pub(super) fn create(
    config: IommuConfig,
    memory: &SharedMemory,
    devices: &mut [Device],
    functions: &[Function],
) -> (SharedDomains, Device) {
    let translated = devices.iter_mut();
    let reach = translated.filter_map(|device| Some(device.backend.translated()?.reach().last()));
    let translated = functions.iter();
    let of_functions =
        translated.filter_map(|function| Some(function.host.translation()?.lock().reach().last()));
    let last = reach
        .chain(of_functions)
        .min()
        .unwrap_or(INPUT_LAST)
        .min(INPUT_LAST);
    // Always: the first address is 0.
    let input = IovaRange::new(0, last).unwrap_or(IovaRange::ALL);
    let domains = Domains::new(memory, input, config.mappings.get(), config.boot_bypass);
    let domains = Arc::new(Mutex::new(domains));
    let device = Device {
        id: IOMMU.to_owned(),
        backend: Box::new(Iommu::new(memory.clone(), Arc::clone(&domains))),
        config: None,
        stall_kick: false,
        numa_node: None,
    };
    (domains, device)
}

/// Returns the slot of the device with this name, if it is fixed.
pub(super) fn fixed_slot(id: &str) -> Option<Slot> {
    Slot::new(IOMMU_SLOT).filter(|_| id == IOMMU)
}

/// Whether a device may be in this slot of a machine with an IOMMU. `translated`: it is behind the
/// IOMMU.
pub(super) fn takes(slot: Slot, translated: bool) -> bool {
    let slot = slot.number();
    slot != IOMMU_SLOT && TRANSLATED_SLOTS.contains(&slot) == translated
}

/// Checks a slot that a snapshot or a migration gives to a device of a machine with an IOMMU.
pub(super) fn check_slot(id: &str, slot: Slot, translated: bool) -> Result<(), Error> {
    let fits = match fixed_slot(id) {
        Some(fixed) => slot == fixed,
        None => takes(slot, translated),
    };
    if fits {
        return Ok(());
    }
    let (setting, number) = (if translated { "on" } else { "off" }, slot.number());
    Err(Error::unusable(format!(
        "cannot put device {id} with iommu={setting} into PCI slot {number}: slot {IOMMU_SLOT} is \
         for the guest's IOMMU, the slots {} to {} are for devices with iommu=on, and the others \
         for devices without; give the device the setting that it had when the VM was saved",
        TRANSLATED_SLOTS.start(),
        TRANSLATED_SLOTS.end()
    )))
}

/// Returns the number in requests of the device in this slot.
pub(super) fn endpoint(slot: Slot) -> u32 {
    u32::from(slot.number()) << 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_and_endpoints_are_those_of_the_acpi_table() {
        let slots = || (0..32).filter_map(Slot::new);
        let behind: Vec<u32> = slots()
            .filter(|&slot| takes(slot, true))
            .map(endpoint)
            .collect();
        assert_eq!(
            (behind.len(), behind.first(), behind.last()),
            (16, Some(&0x80), Some(&0xf8))
        );
        let other = slots().filter(|&slot| takes(slot, false));
        assert!(
            other
                .map(Slot::number)
                .eq([0, 1, 2].into_iter().chain(4..16))
        );
        assert_eq!(fixed_slot("iommu").map(Slot::number), Some(3));
        assert_eq!(fixed_slot("rng"), None);
    }

    #[test]
    fn a_given_slot_on_the_wrong_side_is_refused_with_the_remedy() {
        let check = |id, slot, translated| check_slot(id, Slot::new(slot).unwrap(), translated);
        for (id, slot, translated) in [
            ("net0", 15, true),
            ("net0", 3, true),
            ("net0", 16, false),
            ("net0", 3, false),
            (IOMMU, 4, false),
            (IOMMU, 16, false),
        ] {
            let error = check(id, slot, translated).unwrap_err().to_string();
            let setting = if translated { "iommu=on" } else { "iommu=off" };
            for part in [id, setting, &format!("slot {slot}:"), "give the device"] {
                assert!(error.contains(part), "{error}");
            }
        }
        for (id, slot, translated) in [
            ("net0", 16, true),
            ("net0", 31, true),
            ("net0", 4, false),
            ("net0", 15, false),
            (IOMMU, IOMMU_SLOT, false),
        ] {
            check(id, slot, translated).unwrap();
        }
    }
}
