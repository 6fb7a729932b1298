//! Accepts connections, which any peer can open.
//!
//! Each accepted connection sends its first message on a thread of its own, within a time limit of
//! its own. So a peer that is slow, silent or without a certificate delays no other, and many of
//! them cost only time. Connections beyond the limit wait in the kernel's queue.
//!
//! ```text
//!   accept ── asked, 32 at once ──> its request ──> answered
//!                  └── silent or unauthenticated: closed without effect
//! ```
//! Owns the number of connections asked at once. It must not know the question.

use std::io::{self, ErrorKind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope};
use std::time::Duration;

use crate::migration::channel::Halt;
use crate::migration::error::{MigrationError, Phase};
use crate::sandbox::seccomp;

/// Connections asked at once: those of a source, and as many unknown peers.
const ASKED_MAX: usize = 32;
/// How long to wait for an answer before the next connection is accepted.
const MOMENT: Duration = Duration::from_millis(10);

/// See the module. Dropping it ends all pending questions.
pub(super) struct Acceptor<T> {
    halt: Halt,
    phase: Phase,
    asked: usize,
    sender: Sender<Option<T>>,
    answers: Receiver<Option<T>>,
}

impl<T: Send> Acceptor<T> {
    /// Creates one whose questions end as soon as `halt` is set; connections arrive in `phase`.
    pub(super) fn new(halt: &Halt, phase: Phase) -> Self {
        let (sender, answers) = channel();
        Self {
            halt: halt.apart(),
            phase,
            asked: 0,
            sender,
            answers,
        }
    }

    /// Accepts the next connection, if there is one and room for it, and asks it on a thread by
    /// `ask`. `number` is its number in the migration. `ask` returns `None` for an unknown peer and
    /// ends soon after its [`Halt`] is set. Returns an answered connection, after a short while at
    /// most.
    ///
    /// # Errors
    /// The kernel provides no connection, or no thread.
    pub(super) fn next<'scope, C: Send + 'scope>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        accept: &mut dyn FnMut() -> io::Result<C>,
        number: u16,
        ask: impl FnOnce(C, &Halt) -> Option<T> + Send + 'scope,
    ) -> Result<Option<T>, MigrationError>
    where
        T: 'scope,
    {
        if self.asked < ASKED_MAX {
            match accept() {
                Ok(stream) => {
                    let (sender, halt) = (self.sender.clone(), self.halt.clone());
                    let pending = move || {
                        seccomp::enter(seccomp::Thread::Handshake);
                        // The answer is unused if the acceptor is dropped by now.
                        let _ = sender.send(ask(stream, &halt));
                    };
                    Builder::new()
                        .name("handshake".to_owned())
                        .spawn_scoped(scope, pending)
                        .map_err(MigrationError::no_thread)?;
                    self.asked += 1;
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(source) => {
                    return Err(MigrationError::Broken {
                        phase: self.phase,
                        connection: number,
                        source,
                    });
                }
            }
        }
        if self.asked == 0 {
            return Ok(None);
        }
        let Ok(answer) = self.answers.recv_timeout(MOMENT) else {
            return Ok(None);
        };
        self.asked -= 1;
        Ok(answer)
    }
}

impl<T> Drop for Acceptor<T> {
    fn drop(&mut self) {
        self.halt.fail();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Instant;

    use super::*;

    /// Waits for a byte until the halt.
    fn ask(mut stream: UnixStream, halt: &Halt) -> Option<u8> {
        stream.set_read_timeout(Some(MOMENT)).unwrap();
        let mut byte = [0];
        while halt.check().is_ok() {
            match stream.read(&mut byte) {
                Ok(1) => return Some(byte[0]),
                Ok(_) => return None,
                Err(_) => {}
            }
        }
        None
    }

    #[test]
    fn a_silent_peer_delays_no_other_and_is_disconnected_when_the_door_closes() {
        let (mut mine, mut theirs): (Vec<_>, Vec<_>) =
            (0..ASKED_MAX).map(|_| UnixStream::pair().unwrap()).unzip();
        // The connection that sends a byte is the last one with room.
        mine.last_mut().unwrap().write_all(&[7]).unwrap();
        theirs.reverse();
        let mut accept = || theirs.pop().ok_or_else(|| ErrorKind::WouldBlock.into());
        let started = Instant::now();
        let halt = Halt::default();
        let found = thread::scope(|scope| {
            let mut acceptor = Acceptor::new(&halt, Phase::Offer);
            loop {
                if let Some(found) = acceptor.next(scope, &mut accept, 0, ask).unwrap() {
                    break found;
                }
                assert!(started.elapsed() < Duration::from_secs(30));
            }
        });
        assert_eq!(found, 7);
        // The caller's halt stays unset.
        halt.check().unwrap();
        // The others stayed open until it closed.
        let mut byte = [0];
        assert_eq!(mine[0].read(&mut byte).unwrap(), 0);
    }

    #[test]
    fn strangers_are_not_counted_and_a_listener_that_fails_is_an_error() {
        let mut strangers = 10 * ASKED_MAX;
        let mut accept = || {
            strangers -= 1;
            match strangers {
                0 => Err(io::Error::from_raw_os_error(libc::EMFILE)),
                _ => UnixStream::pair().map(|(_, theirs)| theirs),
            }
        };
        let halt = Halt::default();
        let error = thread::scope(|scope| {
            let mut acceptor = Acceptor::new(&halt, Phase::Offer);
            loop {
                match acceptor.next(scope, &mut accept, 0, ask) {
                    Ok(answer) => assert_eq!(answer, None),
                    Err(error) => break error,
                }
            }
        });
        assert!(matches!(error, MigrationError::Broken { .. }), "{error:?}");
    }
}
