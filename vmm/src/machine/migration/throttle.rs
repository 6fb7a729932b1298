//! vCPUs that are held back: the last means against a guest that writes faster than its memory goes over.
//!
//! Owns the rhythm. It must not know why they are held back, nor stop or run them itself.
//!
//! ```text
//!   |<------------- 50 ms ------------->|
//!   | held for N per cent |     run     | ...
//! ```

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// Nanoseconds of one turn.
const TURN: i64 = 50_000_000;

/// Whether vCPUs are to run now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Turn {
    Hold,
    Run,
}

/// A timer that says when vCPUs are to be held and when to run.
#[derive(Debug)]
pub(in super::super) struct Throttle {
    timer: OwnedFd,
    percent: u8,
    turn: Turn,
}

impl Throttle {
    /// For 1 to 99 per cent. It says something at once.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(in super::super) fn new(percent: u8) -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let this = Self {
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            percent: percent.clamp(1, 99),
            turn: Turn::Run,
        };
        this.arm(1)?;
        Ok(this)
    }

    /// Another share, from the next turn on.
    pub(in super::super) fn set(&mut self, percent: u8) {
        self.percent = percent.clamp(1, 99);
    }

    /// What is to be done after the timer's event.
    pub(in super::super) fn next(&mut self) -> Turn {
        // An error only says that there is none.
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        let held = TURN / 100 * i64::from(self.percent);
        let nanoseconds = match self.turn {
            Turn::Run => {
                self.turn = Turn::Hold;
                held
            }
            Turn::Hold => {
                self.turn = Turn::Run;
                TURN - held
            }
        };
        if let Err(error) = self.arm(nanoseconds) {
            tracing::warn!(%error, "vCPUs cannot be held back any longer");
            self.turn = Turn::Run;
        }
        self.turn
    }

    fn arm(&self, nanoseconds: i64) -> io::Result<()> {
        let timer = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec {
                tv_sec: 0,
                tv_nsec: nanoseconds,
            },
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer)?;
        Ok(())
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
