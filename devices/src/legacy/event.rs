//! An event register that notifies the guest: a power event, or a change of the machine's
//! generation ID.
//!
//! One register of one byte. Bit 0 is set if the event happened and the guest has not acknowledged
//! it; a write clears the bits that it sets. The intended user is the machine's ACPI code (`vmm`'s
//! DSDT), which notifies the related device (ACPI 6.5, 5.6.9). Owns the register and its interrupt.
//! It must not know the meaning of the event, nor the guest's reaction.
//!
//! ```text
//!           raise                    guest writes 1, or reset
//!   quiet ------> raised (stays) ---------------------------> quiet
//!                 interrupt asserted
//! ```
//! The interrupt is level-triggered: an event before the guest listens is not lost.

mod saved;

use std::io;

use parking_lot::Mutex;

use crate::bus::BusDevice;
use crate::hypervisor::LevelInterrupt;

pub use saved::AcpiEventState;

/// Length of the register in bytes.
pub const ACPI_EVENT_LEN: u64 = 1;
/// The bit of an event that happened.
pub const RAISED: u8 = 1;

#[derive(Debug, Default)]
struct State {
    raised: bool,
    /// The last level of the interrupt.
    asserted: bool,
}

/// An event register; see the module.
pub struct AcpiEvent {
    name: &'static str,
    interrupt: Box<dyn LevelInterrupt>,
    state: Mutex<State>,
}

vdpa::opaque_debug!(AcpiEvent, this => name: this.name, state: this.state);

impl AcpiEvent {
    /// Creates a register without an event. Messages contain `name`; the register drives
    /// `interrupt`.
    #[must_use]
    pub fn new(name: &'static str, interrupt: Box<dyn LevelInterrupt>) -> Self {
        Self {
            name,
            interrupt,
            state: Mutex::default(),
        }
    }

    /// Raises the event. Has no effect if the guest has not acknowledged the previous one.
    pub fn raise(&self) {
        self.set(&mut self.state.lock(), true);
    }

    /// Clears the event, for a guest that boots.
    pub fn reset(&self) {
        self.set(&mut self.state.lock(), false);
    }

    fn set(&self, state: &mut State, raised: bool) {
        if let Err(error) = self.try_set(state, raised) {
            tracing::error!(event = self.name, %error, "cannot set the interrupt of an event");
        }
    }

    fn try_set(&self, state: &mut State, raised: bool) -> io::Result<()> {
        state.raised = raised;
        if state.asserted != raised {
            self.interrupt.set(raised)?;
            state.asserted = raised;
        }
        Ok(())
    }
}

impl BusDevice for AcpiEvent {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (0, [first, ..]) = (offset, data)
            && self.state.lock().raised
        {
            *first = RAISED;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0 && data.first().is_some_and(|byte| byte & RAISED != 0) {
            self.set(&mut self.state.lock(), false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::saved::through_a_file;

    /// Level in bit 0, number of changes above.
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

    fn read(event: &AcpiEvent) -> u8 {
        let mut data = [0xff];
        event.read(0, &mut data);
        data[0]
    }

    #[test]
    fn an_event_stays_until_the_guest_takes_note() {
        let line = Line::default();
        let level = || line.0.load(Ordering::Relaxed);
        let event = AcpiEvent::new("test", Box::new(line.clone()));
        assert_eq!((read(&event), level()), (0, 0));
        event.raise();
        event.raise();
        assert_eq!((read(&event), level()), (RAISED, 1 << 1 | 1));
        event.write(0, &[0xfe]);
        assert_eq!(read(&event), RAISED);
        event.write(0, &[RAISED]);
        assert_eq!((read(&event), level()), (0, 2 << 1));
        event.raise();
        event.reset();
        event.reset();
        assert_eq!((read(&event), level()), (0, 4 << 1));
    }

    #[test]
    fn an_event_is_not_lost_on_the_way() {
        let source = AcpiEvent::new("test", Box::new(Line::default()));
        source.raise();
        let state = through_a_file(&source.save());
        let line = Line::default();
        let destination = AcpiEvent::new("test", Box::new(line.clone()));
        destination.restore(&state).unwrap();
        assert_eq!(read(&destination), RAISED);
        assert_eq!(line.0.load(Ordering::Relaxed), 1 << 1 | 1);
        destination
            .restore(&AcpiEventState { raised: false })
            .unwrap();
        assert_eq!(line.0.load(Ordering::Relaxed), 2 << 1);
    }

    #[test]
    fn odd_accesses_are_harmless() {
        let event = AcpiEvent::new("test", Box::new(Line::default()));
        event.raise();
        for offset in [1, u64::MAX] {
            event.write(offset, &[0xff; 8]);
            let mut data = [0xff; 8];
            event.read(offset, &mut data);
            assert_eq!(data, [0; 8]);
        }
        event.write(0, &[]);
        event.read(0, &mut []);
        let mut wide = [0xff; 4];
        event.read(0, &mut wide);
        assert_eq!(wide, [RAISED, 0, 0, 0]);
    }
}
