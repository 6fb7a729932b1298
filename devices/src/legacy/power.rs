//! Power-off and reset requests of the guest.
//!
//! Two devices signal one [`PowerSignal`]: the registers of hardware-reduced ACPI (ACPI 6.5,
//! 4.8.3.6 and 4.8.3.7) and the keyboard controller's reset command. They own no machine state; the
//! holder of the signal decides.
//!
//! ```text
//!   idle --request--> requested (the first one stays) --take--> idle
//! ```

mod saved;

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use vm_superio::{I8042Device, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::BusDevice;

pub use saved::PowerState;

/// The request of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PowerRequest {
    /// Soft off (ACPI state S5).
    Off,
    /// Reset of the whole machine.
    Reset,
}

/// Carries one [`PowerRequest`] from a vCPU to the machine.
#[derive(Debug)]
pub struct PowerSignal {
    event: EventFd,
    request: Mutex<Option<PowerRequest>>,
}

impl PowerSignal {
    /// Creates a signal with no request.
    ///
    /// # Errors
    /// No eventfd can be created.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            event: vdpa::eventfd::new()?,
            request: Mutex::new(None),
        })
    }

    /// Returns the eventfd, which becomes readable when there is a request.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        &self.event
    }

    /// Sets the request. Of several requests before the next [`PowerSignal::take`], the first one
    /// counts.
    pub fn request(&self, request: PowerRequest) {
        self.request.lock().get_or_insert(request);
        // The only failure is a counter at its maximum, which is readable too.
        let _ = self.event.write(1);
    }

    /// Clears the eventfd and keeps the request, which must not be served now.
    pub fn hold(&self) {
        // An error only means that there is no signal.
        let _ = self.event.read();
    }

    /// Signals a kept request again, if there is one.
    pub fn release(&self) {
        if self.request.lock().is_some() {
            // The only failure is a counter at its maximum, which is readable too.
            let _ = self.event.write(1);
        }
    }

    /// Takes the request and clears the eventfd.
    pub fn take(&self) -> Option<PowerRequest> {
        // In this order, a request that arrives in between is taken now or signalled again.
        let _ = self.event.read();
        self.request.lock().take()
    }
}

/// Number of bytes that [`AcpiPower`] occupies.
pub const ACPI_POWER_LEN: u64 = 3;
/// Offset of the sleep control register (FADT field SLEEP_CONTROL_REG).
pub const SLEEP_CONTROL: u64 = 0;
/// Offset of the sleep status register (FADT field SLEEP_STATUS_REG).
pub const SLEEP_STATUS: u64 = 1;
/// Offset of the reset register (FADT field RESET_REG).
pub const RESET: u64 = 2;
/// SLP_TYP for soft off: the first element of `\_S5` in the DSDT.
pub const SLEEP_TYPE_OFF: u8 = 5;
/// The value that a write to the reset register must have (FADT field RESET_VALUE).
pub const RESET_VALUE: u8 = 1;

/// SLP_EN of the sleep control register.
const SLEEP_ENABLE: u8 = 1 << 5;

/// The sleep control, sleep status and reset registers, one byte each.
#[derive(Debug)]
pub struct AcpiPower {
    signal: Arc<PowerSignal>,
}

impl AcpiPower {
    /// Creates registers that signal `signal`.
    #[must_use]
    pub fn new(signal: Arc<PowerSignal>) -> Self {
        Self { signal }
    }
}

impl BusDevice for AcpiPower {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // SLP_EN reads as 0, and WAK_STS is never set: the machine does not sleep.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (register, &value) in (offset..=u64::MAX).zip(data) {
            match register {
                SLEEP_CONTROL
                    if value & SLEEP_ENABLE != 0 && (value >> 2) & 7 == SLEEP_TYPE_OFF =>
                {
                    self.signal.request(PowerRequest::Off);
                }
                RESET if value == RESET_VALUE => self.signal.request(PowerRequest::Reset),
                _ => {}
            }
        }
    }
}

/// Number of bytes that [`KeyboardController`] occupies, from port 0x60 to 0x64.
pub const KEYBOARD_CONTROLLER_LEN: u64 = 5;

struct ResetTrigger(Arc<PowerSignal>);

impl Trigger for ResetTrigger {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        self.0.request(PowerRequest::Reset);
        Ok(())
    }
}

/// An i8042 that supports only the reset command (0xfe to port 0x64).
pub struct KeyboardController(Mutex<I8042Device<ResetTrigger>>);

vdpa::opaque_debug!(KeyboardController);

impl KeyboardController {
    /// Creates a controller that signals `signal`.
    #[must_use]
    pub fn new(signal: Arc<PowerSignal>) -> Self {
        Self(Mutex::new(I8042Device::new(ResetTrigger(signal))))
    }
}

impl BusDevice for KeyboardController {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut device = self.0.lock();
        for (register, byte) in (offset..=u64::MAX).zip(data) {
            *byte = u8::try_from(register).map_or(0xff, |register| device.read(register));
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut device = self.0.lock();
        for (register, &value) in (offset..=u64::MAX).zip(data) {
            if let Ok(register) = u8::try_from(register) {
                let Ok(()) = device.write(register, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signal() -> Arc<PowerSignal> {
        Arc::new(PowerSignal::new().unwrap())
    }

    #[test]
    fn sleep_control_needs_type_and_enable() {
        let signal = signal();
        let power = AcpiPower::new(Arc::clone(&signal));
        for value in 0..=u8::MAX {
            power.write(SLEEP_CONTROL, &[value]);
            let off = value & 0x3c == 0x34;
            assert_eq!(signal.eventfd().read().is_ok(), off);
            assert_eq!(signal.take(), off.then_some(PowerRequest::Off));
        }
        power.write(SLEEP_STATUS, &[0xff]);
        let mut data = [0xff; 3];
        power.read(SLEEP_CONTROL, &mut data);
        assert_eq!(data, [0; 3]);
        assert_eq!(signal.take(), None);
    }

    #[test]
    fn resets() {
        let signal = signal();
        let power = AcpiPower::new(Arc::clone(&signal));
        power.write(RESET, &[0]);
        assert_eq!(signal.take(), None);
        // Also as the last byte of a wider access.
        power.write(SLEEP_STATUS, &[0, RESET_VALUE]);
        assert_eq!(signal.take(), Some(PowerRequest::Reset));

        let keyboard = KeyboardController::new(Arc::clone(&signal));
        keyboard.write(0, &[0xfe]);
        keyboard.write(4, &[0xff]);
        assert_eq!(signal.take(), None);
        keyboard.write(4, &[0xfe]);
        assert_eq!(signal.take(), Some(PowerRequest::Reset));
        let mut status = [0xff];
        keyboard.read(4, &mut status);
        // Input buffer empty: a driver that waits for that continues.
        assert_eq!(status, [0]);
    }

    #[test]
    fn the_first_request_counts() {
        let signal = signal();
        signal.request(PowerRequest::Off);
        signal.request(PowerRequest::Reset);
        assert_eq!(signal.take(), Some(PowerRequest::Off));
        assert_eq!(signal.take(), None);
    }

    #[test]
    fn odd_accesses_are_harmless() {
        let signal = signal();
        let power = AcpiPower::new(Arc::clone(&signal));
        let keyboard = KeyboardController::new(signal.clone());
        for device in [&power as &dyn BusDevice, &keyboard] {
            for offset in [0, 3, 255, 256, u64::MAX - 8] {
                device.write(offset, &[0; 8]);
                device.write(offset, &[]);
                device.read(offset, &mut [0; 8]);
            }
        }
        assert_eq!(signal.take(), None);
    }
}
