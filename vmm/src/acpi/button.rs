//! AML of the power button: a control-method power button (ACPI 6.5, 4.8.2.2.1.2). Its
//! notification asks the guest's operating system to shut down.

use acpi_tables::Aml;
use acpi_tables::aml::{Device, EISAName, Name};

use super::encoded::Encoded;
use super::event::Event;
use crate::layout::POWER_BUTTON_PORT;

/// The button was pressed.
pub(super) const EVENT: Event = Event {
    device: "\\_SB_.PWRB",
    region: "PBRG",
    register: *b"PBST",
    method: "PBEV",
    port: POWER_BUTTON_PORT,
};

/// The device, on the system bus.
pub(super) fn push(aml: &mut Vec<u8>) {
    Device::new(
        "PWRB".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C0C")),
            &Name::new("_UID".into(), &0_u8),
            &Encoded(EVENT.members()),
        ],
    )
    .to_aml_bytes(aml);
}
