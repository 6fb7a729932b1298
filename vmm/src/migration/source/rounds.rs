//! One round over all connections at once.
//!
//! Owns the threads of a round: one per connection beyond the first. A connection that has sent its
//! part sends ALIVE until the others have, so that the destination can tell slow from dead.

use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::migration::channel::{Channel, Connection};
use crate::migration::error::{MigrationError, Phase};
use crate::migration::progress::Progress;
use crate::migration::protocol::Message;
use crate::migration::ram::{Round, send_round};
use crate::sandbox::seccomp;

/// Sends the round, and returns the first error. All threads have ended by then.
pub(super) fn send_everywhere<C: Connection>(
    round: &Round<'_>,
    control: &mut Channel<C>,
    others: &mut [Channel<C>],
) -> Result<(), MigrationError> {
    let fence = Fence::new(others.len().saturating_add(1));
    let first_error = Mutex::new(None);
    let part = |channel: &mut Channel<C>| {
        if let Err(error) = send_part(round, channel, &fence) {
            // The others fail at their next wait; their errors are not the cause.
            first_error.lock().get_or_insert(error);
            channel.halt().fail();
        }
    };
    let part = &part;
    thread::scope(|scope| {
        for channel in others {
            let spawned = thread::Builder::new()
                .name(format!("migrate{}", channel.index()))
                .spawn_scoped(scope, move || {
                    seccomp::enter(seccomp::Thread::Migrate);
                    part(channel);
                });
            if let Err(source) = spawned {
                control.halt().fail();
                first_error
                    .lock()
                    .get_or_insert(MigrationError::no_thread(source));
                // It will not arrive.
                drop(AtFence(&fence));
            }
        }
        part(control);
    });
    first_error.into_inner().map_or(Ok(()), Err)
}

fn send_part<C: Connection>(
    round: &Round<'_>,
    channel: &mut Channel<C>,
    fence: &Fence,
) -> Result<(), MigrationError> {
    let arrival = AtFence(fence);
    send_round(round, channel)?;
    drop(arrival);
    // The guest waits during the last round.
    if round.phase == Phase::Copy {
        send_alive(round.phase, channel, round.progress, fence)?;
    }
    Ok(())
}

/// Runs `work` and sends ALIVE until it ends. Returns its result, or the connection's error.
pub(super) fn alive_during<C: Connection, T>(
    phase: Phase,
    channel: &mut Channel<C>,
    progress: &Progress,
    work: impl FnOnce() -> T,
) -> Result<T, MigrationError> {
    let fence = Fence::new(1);
    let mut sent = Ok(());
    let worked = thread::scope(|scope| {
        let end = AtFence(&fence);
        thread::Builder::new()
            .name("migrate-alive".into())
            .spawn_scoped(scope, || {
                seccomp::enter(seccomp::Thread::Migrate);
                sent = send_alive(phase, channel, progress, &fence);
            })
            .map_err(MigrationError::no_thread)?;
        let worked = work();
        drop(end);
        Ok(worked)
    });
    sent.and(worked)
}

/// Sends ALIVE until all have arrived at the fence.
fn send_alive<C: Connection>(
    phase: Phase,
    channel: &mut Channel<C>,
    progress: &Progress,
    fence: &Fence,
) -> Result<(), MigrationError> {
    while !fence.all_within(channel.frame_patience() / 4) {
        let sent = channel.send(phase, &Message::Alive)?;
        progress.sent(sent, 0, 0);
    }
    Ok(())
}

/// Counts connections that have not finished their part.
struct Fence {
    left: Mutex<usize>,
    changed: Condvar,
}

impl Fence {
    fn new(count: usize) -> Self {
        Self {
            left: Mutex::new(count),
            changed: Condvar::new(),
        }
    }

    /// Waits until all have finished, up to `timeout`. Returns whether they have.
    fn all_within(&self, timeout: Duration) -> bool {
        let mut left = self.left.lock();
        self.changed
            .wait_while_for(&mut left, |left| *left > 0, timeout);
        *left == 0
    }
}

/// One part, counted on drop: at its end or at a failure.
struct AtFence<'a>(&'a Fence);

impl Drop for AtFence<'_> {
    fn drop(&mut self) {
        let mut left = self.0.left.lock();
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.0.changed.notify_all();
        }
    }
}
