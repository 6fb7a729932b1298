//! AML of an event ([`devices::legacy::event`]). The Generic Event Device receives its interrupt,
//! clears its register and notifies its device.
//!
//! ```text
//!   GED_._EVT ──> DEVICE.METHOD   reads and clears the register ──> Notify(DEVICE, 0x80)
//! ```

use acpi_tables::Aml;
use acpi_tables::aml::{
    And, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Local, Method,
    Notify, OpRegion, OpRegionSpace, Path, Store, ZERO,
};
use devices::legacy::event::{ACPI_EVENT_LEN, RAISED};

/// The first device-specific notification (ACPI 6.5, section 5.6.6): the button was pressed in the
/// working state; the generation has changed.
const NOTIFICATION: u8 = 0x80;

/// An event by its names in AML.
#[derive(Debug, Clone, Copy)]
pub(super) struct Event {
    /// The device that is notified.
    pub(super) device: &'static str,
    /// The names of register block and register, inside the device.
    pub(super) region: &'static str,
    pub(super) register: [u8; 4],
    /// The method that serves the interrupt, inside the device.
    pub(super) method: &'static str,
    /// Port of the register.
    pub(super) port: u16,
}

impl Event {
    /// The members of the device for this event.
    pub(super) fn members(&self) -> Vec<u8> {
        let mut aml = Vec::new();
        // Lossless: a constant of 1.
        let len = u8::try_from(ACPI_EVENT_LEN).unwrap_or(u8::MAX);
        OpRegion::new(
            self.region.into(),
            OpRegionSpace::SystemIO,
            &self.port,
            &len,
        )
        .to_aml_bytes(&mut aml);
        Field::new(
            self.region.into(),
            FieldAccessType::Byte,
            FieldLockRule::NoLock,
            FieldUpdateRule::WriteAsZeroes,
            vec![FieldEntry::Named(self.register, 8)],
        )
        .to_aml_bytes(&mut aml);
        // A field's name is four ASCII characters.
        let register = String::from_utf8_lossy(&self.register).into_owned();
        let (status, device): (Path, Path) = (register.as_str().into(), self.device.into());
        Method::new(
            self.method.into(),
            0,
            true,
            vec![
                &Store::new(&Local(0), &status),
                &Store::new(&status, &Local(0)),
                &If::new(
                    &And::new(&ZERO, &Local(0), &RAISED),
                    vec![&Notify::new(&device, &NOTIFICATION)],
                ),
            ],
        )
        .to_aml_bytes(&mut aml);
        aml
    }

    /// The full path of the method.
    pub(super) fn path(&self) -> Path {
        format!("{}.{}", self.device, self.method).as_str().into()
    }
}
