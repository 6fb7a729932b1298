//! Throttles vCPUs: the last means against a guest that writes memory faster than it is sent.
//!
//! Owns the rhythm. It must not know the reason, and does not stop or run vCPUs itself.
//!
//! ```text
//!   |<------------- 50 ms ------------->|
//!   | held for N per cent |     run     | ...
//! ```

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use crate::event_loop::Timer;

/// The length of one turn.
const TURN: Duration = Duration::from_millis(50);

/// Whether vCPUs are to run now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::machine) enum Turn {
    Hold,
    Run,
}

/// A timer that determines when to hold vCPUs and when to run them.
#[derive(Debug)]
pub(in crate::machine) struct Throttle {
    timer: Timer,
    percent: u8,
    turn: Turn,
}

impl Throttle {
    /// Creates a throttle of 1 to 99 per cent. Its timer fires at once.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(in crate::machine) fn new(percent: u8) -> io::Result<Self> {
        let this = Self {
            timer: Timer::new()?,
            percent: percent.clamp(1, 99),
            turn: Turn::Run,
        };
        this.timer.set(Duration::from_nanos(1), Duration::ZERO)?;
        Ok(this)
    }

    /// Sets another percentage, from the next turn on.
    pub(in crate::machine) fn set(&mut self, percent: u8) {
        self.percent = percent.clamp(1, 99);
    }

    /// Returns what to do after the timer's event.
    pub(in crate::machine) fn next(&mut self) -> Turn {
        self.timer.take();
        let held = TURN / 100 * u32::from(self.percent);
        let (turn, time) = match self.turn {
            Turn::Run => (Turn::Hold, held),
            Turn::Hold => (Turn::Run, TURN - held),
        };
        self.turn = turn;
        if let Err(error) = self.timer.set(time, Duration::ZERO) {
            tracing::warn!(%error, "cannot throttle vCPUs any longer");
            self.turn = Turn::Run;
        }
        self.turn
    }
}

impl AsRawFd for Throttle {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_take_turns() {
        let mut throttle = Throttle::new(150).unwrap();
        assert_eq!(throttle.percent, 99);
        throttle.set(20);
        for _ in 0..3 {
            assert_eq!(throttle.next(), Turn::Hold);
            assert_eq!(throttle.next(), Turn::Run);
        }
    }
}
