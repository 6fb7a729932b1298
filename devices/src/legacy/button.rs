//! The power button, by which the outside asks the guest to shut down.
//!
//! One register of a byte. Bit 0 says that the button was pressed and the guest has not
//! taken note; a write clears the bits that it sets. The intended user is the
//! machine's ACPI code (`vmm`'s DSDT), which tells the guest of a control-method power
//! button (ACPI 6.5, 4.8.2.2.1.2). Owns the register and its interrupt; must not know what the
//! guest does about it.
//!
//! ```text
//!             press                     guest writes 1, or reset
//!   released ------> pressed (stays) ---------------------------> released
//!                    interrupt asserted
//! ```
//! The interrupt is level-triggered: a press before the guest listens is not lost.

mod saved;

use std::fmt;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::bus::BusDevice;
use crate::hypervisor::LevelInterrupt;

pub use saved::PowerButtonState;

/// Bytes of the register.
pub const POWER_BUTTON_LEN: u64 = 1;
/// The bit that says "pressed".
pub const PRESSED: u8 = 1;

#[derive(Debug, Default)]
struct State {
    pressed: bool,
    /// What the interrupt was set to last.
    asserted: bool,
}

/// See the module.
pub struct PowerButton {
    interrupt: Box<dyn LevelInterrupt>,
    state: Mutex<State>,
}

impl fmt::Debug for PowerButton {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PowerButton")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl PowerButton {
    /// A button that nobody has pressed, and the interrupt that it drives.
    #[must_use]
    pub fn new(interrupt: Box<dyn LevelInterrupt>) -> Self {
        Self {
            interrupt,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Presses it. Pressing again before the guest took note changes nothing.
    pub fn press(&self) {
        self.set(&mut self.state(), true);
    }

    /// Forgets a press, for a guest that starts anew.
    pub fn reset(&self) {
        self.set(&mut self.state(), false);
    }

    fn set(&self, state: &mut State, pressed: bool) {
        if let Err(error) = self.try_set(state, pressed) {
            tracing::error!(%error, "the power button's interrupt cannot be set");
        }
    }

    fn try_set(&self, state: &mut State, pressed: bool) -> io::Result<()> {
        state.pressed = pressed;
        if state.asserted != pressed {
            self.interrupt.set(pressed)?;
            state.asserted = pressed;
        }
        Ok(())
    }
}

impl BusDevice for PowerButton {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (0, [first, ..]) = (offset, data)
            && self.state().pressed
        {
            *first = PRESSED;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0 && data.first().is_some_and(|byte| byte & PRESSED != 0) {
            self.set(&mut self.state(), false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::saved::through_a_file;

    /// Its level in bit 0, the number of changes above.
    #[derive(Debug, Default, Clone)]
    struct Line(Arc<AtomicU32>);

    impl LevelInterrupt for Line {
        fn set(&self, asserted: bool) -> io::Result<()> {
            let changes = self.0.load(Ordering::Relaxed) >> 1;
            self.0
                .store((changes + 1) << 1 | u32::from(asserted), Ordering::Relaxed);
            Ok(())
        }
    }

    fn read(button: &PowerButton) -> u8 {
        let mut data = [0xff];
        button.read(0, &mut data);
        data[0]
    }

    #[test]
    fn a_press_stays_until_the_guest_takes_note() {
        let line = Line::default();
        let level = || line.0.load(Ordering::Relaxed);
        let button = PowerButton::new(Box::new(line.clone()));
        assert_eq!((read(&button), level()), (0, 0));
        button.press();
        button.press();
        assert_eq!((read(&button), level()), (PRESSED, 1 << 1 | 1));
        button.write(0, &[0xfe]);
        assert_eq!(read(&button), PRESSED);
        button.write(0, &[PRESSED]);
        assert_eq!((read(&button), level()), (0, 2 << 1));
        button.press();
        button.reset();
        button.reset();
        assert_eq!((read(&button), level()), (0, 4 << 1));
    }

    #[test]
    fn a_press_is_not_lost_on_the_way() {
        let source = PowerButton::new(Box::new(Line::default()));
        source.press();
        let state = through_a_file(&source.save());
        let line = Line::default();
        let destination = PowerButton::new(Box::new(line.clone()));
        destination.restore(&state).unwrap();
        assert_eq!(read(&destination), PRESSED);
        assert_eq!(line.0.load(Ordering::Relaxed), 1 << 1 | 1);
        destination
            .restore(&PowerButtonState { pressed: false })
            .unwrap();
        assert_eq!(line.0.load(Ordering::Relaxed), 2 << 1);
    }

    #[test]
    fn odd_accesses_are_harmless() {
        let button = PowerButton::new(Box::new(Line::default()));
        button.press();
        for offset in [1, u64::MAX] {
            button.write(offset, &[0xff; 8]);
            let mut data = [0xff; 8];
            button.read(offset, &mut data);
            assert_eq!(data, [0; 8]);
        }
        button.write(0, &[]);
        button.read(0, &mut []);
        let mut wide = [0xff; 4];
        button.read(0, &mut wide);
        assert_eq!(wide, [PRESSED, 0, 0, 0]);
    }
}
