//! What a signal handler may ask of a machine: to stop, and to log its statistics.
//!
//! Owns the eventfds. It must not know which signals ask.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Asks a machine to stop, from any thread or from a signal handler. Clones ask
/// the same machine. The wish stays: a machine that runs later stops at once.
#[derive(Debug, Clone)]
pub struct StopHandle(Arc<StopWish>);

#[derive(Debug)]
struct StopWish {
    event: EventFd,
    asked: AtomicBool,
}

impl StopHandle {
    /// A handle that asks nothing yet, to be given to [`Machine::new`](super::Machine::new).
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(Self(Arc::new(StopWish {
            event,
            asked: AtomicBool::new(false),
        })))
    }

    /// Asks. Safe in a signal handler: it is a store and one `write`.
    pub fn stop(&self) {
        self.0.asked.store(true, Ordering::Relaxed);
        // The only failure is a counter at its maximum, which is readable too.
        let _ = self.0.event.write(1);
    }

    /// Whether somebody asked.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.asked.load(Ordering::Relaxed)
    }

    /// Readable, and never read, once somebody asked.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        &self.0.event
    }
}

/// Asks a machine that runs to log (level info) what KVM has counted, from any
/// thread or from a signal handler.
#[derive(Debug, Clone)]
pub struct StatisticsHandle(pub(super) Arc<EventFd>);

impl StatisticsHandle {
    pub(super) fn new() -> io::Result<Self> {
        EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map(|event| Self(Arc::new(event)))
    }

    /// Asks. Safe in a signal handler: it is one `write`.
    pub fn log(&self) {
        // The only failure is a counter at its maximum, which is readable too.
        let _ = self.0.write(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_handle_keeps_asking() {
        let handle = StopHandle::new().unwrap();
        let other = handle.clone();
        other.stop();
        handle.stop();
        assert_eq!(handle.eventfd().read().unwrap(), 2);
    }
}
