//! AML of the generation ID: the address of its 16 bytes, and the notification that they have
//! changed.
//!
//! Source: Microsoft, "Virtual Machine Generation ID" (2012). Linux finds the device by `_HID` or
//! `_CID` (`drivers/virt/vmgenid.c`), Windows by `_CID`.

use acpi_tables::Aml;
use acpi_tables::aml::{Device, Name, Package};

use super::encoded::Encoded;
use super::event::Event;
use crate::layout::{GENERATION_ID, GENERATION_PORT};

/// The ID has changed.
pub(super) const EVENT: Event = Event {
    device: "\\_SB_.VGEN",
    region: "VGRG",
    register: *b"VGST",
    method: "VGEV",
    port: GENERATION_PORT,
};

/// The device, on the system bus.
pub(super) fn push(aml: &mut Vec<u8>) {
    // Lossless: the lower half, then the upper one.
    let [low, high] = [GENERATION_ID, GENERATION_ID >> 32]
        .map(|half| u32::try_from(half & 0xffff_ffff).unwrap_or(u32::MAX));
    Device::new(
        "VGEN".into(),
        vec![
            &Name::new("_HID".into(), &"VMGENCTR"),
            &Name::new("_CID".into(), &"VM_Gen_Counter"),
            &Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &Name::new("_UID".into(), &0_u8),
            &Name::new("ADDR".into(), &Package::new(vec![&low, &high])),
            &Encoded(EVENT.members()),
        ],
    )
    .to_aml_bytes(aml);
}
