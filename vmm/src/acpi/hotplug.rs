//! AML of PCI hot-plug: a Generic Event Device receives the interrupt, reads the affected slots
//! from the registers ([`devices::pci::PciHotplug`]) and notifies them.
//!
//! ```text
//!   GED_._EVT (its interrupt) ──> PCI0.PSCN   reads and clears INSERTED, REMOVAL
//!                   └──> PCI0.PNTF   for each bit: Notify(Sxxx, 1 device check
//!                                                              or 3 ejection request)
//!   Sxxx._EJ0 ──> EJECT = bit of the slot
//! ```
//! Every slot except the host bridge's exists (`Sxxx`: device number in hexadecimal) with _SUN and
//! _EJ0, which Linux's acpiphp requires of a hot-plug slot. There is no _STA: Linux then reads from
//! configuration space whether the slot is in use, which is always right. There is no _DSM either:
//! it would only make the guest keep BAR addresses, and BARs follow the guest.

use acpi_tables::Aml;
use acpi_tables::aml::{
    And, Arg, Device, Equal, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule,
    If, Interrupt, Local, Method, MethodCall, Name, Notify, OpRegion, OpRegionSpace, Path,
    ResourceTemplate, Store, ZERO,
};
use devices::pci::{HOTPLUG_LEN, SLOTS};

use super::{button, generation};
use crate::layout::{GENERATION_IRQ, HOTPLUG_IRQ, HOTPLUG_PORT, POWER_BUTTON_IRQ};

/// Notification: check for the device (ACPI 6.5, table 5.173).
const DEVICE_CHECK: u8 = 1;
/// Notification: eject the device.
const EJECTION_REQUEST: u8 = 3;

fn slot_path(slot: u8) -> Path {
    format!("S{slot:03X}").as_str().into()
}

/// The part inside the host bridge.
pub(super) fn slots() -> Vec<u8> {
    let mut aml = Vec::new();
    // Lossless: a constant of 12.
    let len = u8::try_from(HOTPLUG_LEN).unwrap_or(u8::MAX);
    OpRegion::new("PHPR".into(), OpRegionSpace::SystemIO, &HOTPLUG_PORT, &len)
        .to_aml_bytes(&mut aml);
    Field::new(
        "PHPR".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![
            FieldEntry::Named(*b"PINS", 32),
            FieldEntry::Named(*b"PREM", 32),
            FieldEntry::Named(*b"PEJT", 32),
        ],
    )
    .to_aml_bytes(&mut aml);
    for slot in 1..SLOTS {
        push_slot(&mut aml, slot);
    }
    push_notify(&mut aml);
    push_scan(&mut aml);
    aml
}

fn push_slot(aml: &mut Vec<u8>, slot: u8) {
    let eject: Path = "PEJT".into();
    Device::new(
        slot_path(slot),
        vec![
            &Name::new("_SUN".into(), &slot),
            &Name::new("_ADR".into(), &(u32::from(slot) << 16)),
            &Method::new(
                "_EJ0".into(),
                1,
                true,
                vec![&Store::new(&eject, &(1u32 << slot))],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// PNTF(slots, notification).
fn push_notify(aml: &mut Vec<u8>) {
    /// `If (Arg0 & bit) { Notify (Sxxx, Arg1) }`
    struct NotifyIf(u8);
    impl Aml for NotifyIf {
        fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
            let bit = 1u32 << self.0;
            let (slot, nowhere) = (slot_path(self.0), ZERO);
            If::new(
                &And::new(&nowhere, &Arg(0), &bit),
                vec![&Notify::new(&slot, &Arg(1))],
            )
            .to_aml_bytes(sink);
        }
    }
    let all: Vec<NotifyIf> = (1..SLOTS).map(NotifyIf).collect();
    let all = all.iter().map(|one| one as &dyn Aml).collect();
    Method::new("PNTF".into(), 2, true, all).to_aml_bytes(aml);
}

/// PSCN(): it clears the bits that it has read, so a change in between keeps the interrupt
/// asserted.
fn push_scan(aml: &mut Vec<u8>) {
    let (inserted, removal): (Path, Path) = ("PINS".into(), "PREM".into());
    Method::new(
        "PSCN".into(),
        0,
        true,
        vec![
            &Store::new(&Local(0), &inserted),
            &Store::new(&inserted, &Local(0)),
            &MethodCall::new("PNTF".into(), vec![&Local(0), &DEVICE_CHECK]),
            &Store::new(&Local(0), &removal),
            &Store::new(&removal, &Local(0)),
            &MethodCall::new("PNTF".into(), vec![&Local(0), &EJECTION_REQUEST]),
        ],
    )
    .to_aml_bytes(aml);
}

/// The Generic Event Device (ACPI 6.5, section 5.6.9), beside the host bridge. Its method
/// gets the number of the interrupt.
pub(super) fn push_event_device(aml: &mut Vec<u8>) {
    // Level-triggered, active high, not shared.
    let interrupt = |number: u8| Interrupt::new(true, false, false, false, u32::from(number));
    Device::new(
        "GED_".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &0_u8),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![
                    &interrupt(HOTPLUG_IRQ),
                    &interrupt(POWER_BUTTON_IRQ),
                    &interrupt(GENERATION_IRQ),
                ]),
            ),
            &Method::new(
                "_EVT".into(),
                1,
                true,
                vec![
                    &If::new(
                        &Equal::new(&Arg(0), &HOTPLUG_IRQ),
                        vec![&MethodCall::new("\\_SB_.PCI0.PSCN".into(), vec![])],
                    ),
                    &If::new(
                        &Equal::new(&Arg(0), &POWER_BUTTON_IRQ),
                        vec![&MethodCall::new(button::EVENT.path(), vec![])],
                    ),
                    &If::new(
                        &Equal::new(&Arg(0), &GENERATION_IRQ),
                        vec![&MethodCall::new(generation::EVENT.path(), vec![])],
                    ),
                ],
            ),
        ],
    )
    .to_aml_bytes(aml);
}
