//! AML of the power button: the Generic Event Device hears its interrupt, clears its
//! register ([`devices::legacy::button`]) and notifies a control-method power button (ACPI
//! 6.5, 4.8.2.2.1.2), which the guest's operating system takes for a wish to shut down.
//!
//! ```text
//!   GED_._EVT ──> PWRB.PBEV   reads and clears PBST ──> Notify(PWRB, 0x80)
//! ```

use acpi_tables::Aml;
use acpi_tables::aml::{
    And, Device, EISAName, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If,
    Local, Method, Name, Notify, OpRegion, OpRegionSpace, Path, Store, ZERO,
};
use devices::legacy::button::{POWER_BUTTON_LEN, PRESSED};

use crate::layout::POWER_BUTTON_PORT;

/// Notification: the button was pressed while the system works (ACPI 6.5, table 5.176).
const PRESSED_WHILE_WORKING: u8 = 0x80;

/// The method that [`Generic Event Device`](super::hotplug) calls.
pub(super) const EVENT: &str = "\\_SB_.PWRB.PBEV";

/// The device, on the system bus.
pub(super) fn push(aml: &mut Vec<u8>) {
    // Lossless: a constant of 1.
    let len = u8::try_from(POWER_BUTTON_LEN).unwrap_or(u8::MAX);
    let (status, button): (Path, Path) = ("PBST".into(), "\\_SB_.PWRB".into());
    Device::new(
        "PWRB".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C0C")),
            &Name::new("_UID".into(), &0_u8),
            &OpRegion::new(
                "PBRG".into(),
                OpRegionSpace::SystemIO,
                &POWER_BUTTON_PORT,
                &len,
            ),
            &Field::new(
                "PBRG".into(),
                FieldAccessType::Byte,
                FieldLockRule::NoLock,
                FieldUpdateRule::WriteAsZeroes,
                vec![FieldEntry::Named(*b"PBST", 8)],
            ),
            &Method::new(
                "PBEV".into(),
                0,
                true,
                vec![
                    &Store::new(&Local(0), &status),
                    &Store::new(&status, &Local(0)),
                    &If::new(
                        &And::new(&ZERO, &Local(0), &PRESSED),
                        vec![&Notify::new(&button, &PRESSED_WHILE_WORKING)],
                    ),
                ],
            ),
        ],
    )
    .to_aml_bytes(aml);
}
