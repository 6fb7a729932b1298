//! Shows each step to another process before it runs, and waits for it: for tests that kill the
//! daemon between any two steps.
//!
//! ```text
//!   daemon ── "web do nic net0\n" ──> observer      the step waits
//!          <────────── one byte ───── observer      it continues, also without an observer
//! ```
//! Tests also hold a daemon at any line of its log (`lab::node`), without the daemon's help. They
//! can identify a log line only once the daemon has passed it, so a test of one given step needs
//! this module.
//!
//! Owns the connection.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

use parking_lot::Mutex;

/// A connected observer of steps.
#[derive(Debug)]
pub(crate) struct StepObserver {
    /// None once the observer has disconnected.
    stream: Mutex<Option<UnixStream>>,
}

impl StepObserver {
    /// Connects to the observer that listens on this socket.
    ///
    /// # Errors
    /// No process listens.
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        Ok(Self {
            stream: Mutex::new(Some(stream)),
        })
    }

    /// Shows a VM's next step, and waits until it may run.
    pub(crate) fn show(&self, vm: &dyn fmt::Display, place: &dyn fmt::Display) {
        let mut stream = self.stream.lock();
        let Some(open) = stream.as_mut() else {
            return;
        };
        let mut asked = || -> io::Result<()> {
            open.write_all(format!("{vm} {place}\n").as_bytes())?;
            open.read_exact(&mut [0])
        };
        if asked().is_err() {
            *stream = None;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_step_waits_for_its_observer_and_not_for_one_that_is_gone() {
        let path = std::env::temp_dir().join(format!("step-observer-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        assert!(StepObserver::connect(&path).is_err());
        let listener = UnixListener::bind(&path).unwrap();
        let observer = StepObserver::connect(&path).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        std::thread::scope(|scope| {
            let step = scope.spawn(|| observer.show(&"web", &"do process"));
            let mut said = [0; 15];
            other.read_exact(&mut said).unwrap();
            assert_eq!(&said, b"web do process\n");
            assert!(!step.is_finished());
            other.write_all(b"\n").unwrap();
            step.join().unwrap();
            drop(other);
            observer.show(&"web", &"done process");
            observer.show(&"web", &"undo process");
        });
        std::fs::remove_file(&path).unwrap();
    }
}
