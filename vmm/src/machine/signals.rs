//! Requests that a signal handler can send to a machine: stop, and log statistics.
//!
//! Owns the eventfds. It must not know which signals send them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::EventFd;

/// Asks a machine to stop, from any thread or from a signal handler. Clones address the same
/// machine. The request stays set: a machine that runs later stops at once.
#[derive(Debug, Clone)]
pub struct StopHandle(Arc<StopWish>);

#[derive(Debug)]
struct StopWish {
    event: EventFd,
    asked: AtomicBool,
}

impl StopHandle {
    /// Creates a handle with no request set, to be passed to [`Machine::new`](super::Machine::new).
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn new() -> io::Result<Self> {
        let event = vdpa::eventfd::new()?;
        Ok(Self(Arc::new(StopWish {
            event,
            asked: AtomicBool::new(false),
        })))
    }

    /// Requests the stop. Safe in a signal handler: it is a store and one `write`.
    pub fn stop(&self) {
        self.0.asked.store(true, Ordering::Relaxed);
        // The only failure is a counter at its maximum, which is readable too.
        let _ = self.0.event.write(1);
    }

    /// Whether a stop was requested.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.asked.load(Ordering::Relaxed)
    }

    /// Returns the eventfd, which is readable, and never read, once a stop was requested.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        &self.0.event
    }
}

/// Asks a running machine to log KVM's counters (level info), from any thread or from a signal
/// handler.
#[derive(Debug, Clone)]
pub struct StatisticsHandle(pub(super) Arc<EventFd>);

impl StatisticsHandle {
    pub(super) fn new() -> io::Result<Self> {
        vdpa::eventfd::new().map(|event| Self(Arc::new(event)))
    }

    /// Requests the log entry. Safe in a signal handler: it is one `write`.
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
