//! A queue pair between its thread, which uses it in turns, and the thread of the messages, which
//! stops it between two turns.
//!
//! A mutex alone would let a thread with much work lock it again and again before the other one
//! gets it. So each turn passes an entrance first, which the other thread closes.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::pair::Pair;

/// A pair, and the events of its thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) epoll: OwnedFd,
    entrance: Mutex<()>,
    pair: Mutex<Pair>,
}

/// A pair whose thread waits while this exists.
pub(super) struct Stopped<'pair> {
    pub(super) pair: MutexGuard<'pair, Pair>,
    _entrance: MutexGuard<'pair, ()>,
}

impl Shared {
    pub(super) fn new(pair: Pair, epoll: OwnedFd) -> Self {
        Self {
            epoll,
            entrance: Mutex::new(()),
            pair: Mutex::new(pair),
        }
    }

    /// The pair for a turn of its own thread.
    pub(super) fn turn(&self) -> MutexGuard<'_, Pair> {
        drop(lock(&self.entrance));
        lock(&self.pair)
    }

    /// Waits for the end of the current turn, and stops the next one.
    pub(super) fn stop(&self) -> Stopped<'_> {
        let entrance = lock(&self.entrance);
        Stopped {
            pair: lock(&self.pair),
            _entrance: entrance,
        }
    }
}

/// A panic of another thread ends the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixDatagram;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::thread;

    use super::super::port::Port;
    use super::super::rig::in_flight;
    use super::super::tap::Tap;
    use super::*;

    #[test]
    fn a_pair_with_endless_turns_can_be_stopped() {
        let (tap, _peer) = UnixDatagram::pair().unwrap();
        let tap = Port::Tap(Tap::of(OwnedFd::from(tap).into()));
        let pair = Pair::new(0, tap, in_flight(), 0).unwrap();
        let epoll = pair.epoll().unwrap();
        let shared = Shared::new(pair, epoll);
        let (turns, ends) = (AtomicU64::new(0), AtomicBool::new(false));
        let taken = || turns.load(Ordering::SeqCst);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::SeqCst) {
                    let _pair = shared.turn();
                    turns.fetch_add(1, Ordering::SeqCst);
                }
            });
            while taken() == 0 {
                thread::yield_now();
            }
            for _ in 0..1000 {
                let stopped = shared.stop();
                let before = taken();
                thread::yield_now();
                assert_eq!(taken(), before);
                drop(stopped);
            }
            ends.store(true, Ordering::SeqCst);
        });
    }
}
