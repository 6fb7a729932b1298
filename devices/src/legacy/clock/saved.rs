//! The clock's saved state. It excludes the time: a restored clock shows the host's time.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Clock, INDEX_MASK, REGISTER_B_MASK, Registers, SET, UPDATE_IN_PROGRESS};
use crate::Error;
use crate::saved::ensure;

const DEVICE: &str = "real-time clock";

/// A saved clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockState {
    /// The index register; bits 6:0.
    pub index: u8,
    /// Register A, without the update bit.
    pub register_a: u8,
    /// Register B.
    pub register_b: u8,
    /// The alarm registers: seconds, minutes, hours.
    pub alarm: [u8; 3],
    /// The time since 1970 at which the driver stopped updates; present exactly if SET is set in
    /// register B.
    pub held: Option<Duration>,
}

impl Clock {
    /// Returns the registers.
    #[must_use]
    pub fn save(&self) -> ClockState {
        let registers = self.registers.lock();
        ClockState {
            index: registers.index,
            register_a: registers.a,
            register_b: registers.b,
            alarm: registers.alarm,
            held: registers.held,
        }
    }

    /// Restores saved registers.
    ///
    /// # Errors
    /// Bits that cannot be set, or a held time without SET.
    pub fn restore(&self, state: &ClockState) -> Result<(), Error> {
        ensure(
            state.index & !INDEX_MASK == 0
                && state.register_a & UPDATE_IN_PROGRESS == 0
                && state.register_b & !REGISTER_B_MASK == 0,
            DEVICE,
            "bits that cannot be set",
        )?;
        ensure(
            state.held.is_some() == (state.register_b & SET != 0),
            DEVICE,
            "a held time without SET, or SET without a held time",
        )?;
        let mut registers = self.registers.lock();
        *registers = Registers {
            index: state.index,
            a: state.register_a,
            b: state.register_b,
            alarm: state.alarm,
            held: state.held,
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HOURS_24, INDEX, MINUTES_ALARM, REGISTER_B, SECONDS};
    use super::*;
    use crate::bus::BusDevice;
    use crate::saved::through_a_file;

    #[test]
    fn a_clock_continues_on_another_host() {
        let clock = Clock::with_time(Box::new(|| Duration::from_secs(59)));
        for (register, value) in [(MINUTES_ALARM, 0x31), (REGISTER_B, SET | HOURS_24)] {
            clock.write(INDEX, &[register, value]);
        }
        clock.write(INDEX, &[SECONDS]);
        let state = through_a_file(&clock.save());
        assert_eq!(state.held, Some(Duration::from_secs(59)));

        let other = Clock::with_time(Box::new(|| Duration::from_secs(7)));
        other.restore(&state).unwrap();
        assert_eq!(other.save(), state);
        let mut data = [0];
        other.read(1, &mut data);
        assert_eq!(data, [0x59]);
        // The driver resumes updates: the time is that of the new host.
        other.write(INDEX, &[REGISTER_B, HOURS_24]);
        other.write(INDEX, &[SECONDS]);
        other.read(1, &mut data);
        assert_eq!(data, [0x07]);
    }

    #[test]
    fn impossible_states_change_nothing() {
        let clock = Clock::new();
        let good = clock.save();
        let held = Some(Duration::MAX);
        for bad in [
            ClockState {
                index: 0x80,
                ..good.clone()
            },
            ClockState {
                register_a: UPDATE_IN_PROGRESS,
                ..good.clone()
            },
            ClockState {
                register_b: 0x40,
                ..good.clone()
            },
            ClockState {
                register_b: SET,
                ..good.clone()
            },
            ClockState {
                held,
                ..good.clone()
            },
        ] {
            clock.restore(&bad).unwrap_err();
            assert_eq!(clock.save(), good);
        }
        // An absurd time is valid.
        let absurd = ClockState {
            register_b: SET,
            held,
            ..good
        };
        clock.restore(&absurd).unwrap();
        clock.read(1, &mut [0; 1]);
    }
}
