//! The receiver's side of all rounds. Received data is untrusted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use super::{RamImage, carrier};
use crate::migration::channel::{Channel, Connection, Wait};
use crate::migration::error::{MigrationError, Phase};
use crate::migration::progress::Progress;
use crate::migration::protocol::Message;

/// Bytes of memory that one migration may still write, zeros included; shared by its connections.
#[derive(Debug)]
pub(in crate::migration) struct Budget {
    limit: u64,
    left: AtomicU64,
}

impl Budget {
    pub(in crate::migration) fn new(limit: u64) -> Self {
        Self {
            limit,
            left: AtomicU64::new(limit),
        }
    }

    fn take(&self, bytes: u64) -> Result<(), MigrationError> {
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(bytes)
            })
            .map(drop)
            .map_err(|_| MigrationError::TooMuch {
                what: "memory",
                limit: self.limit,
            })
    }
}

/// Receives the pages of all rounds that one connection carries, until its last ROUND_END. The
/// first connection also carries early states, which go to `early`.
///
/// # Errors
/// [`MigrationError`]: a page outside RAM, on the wrong connection or beyond the budget, or a
/// message that is not allowed here.
pub(in crate::migration) fn receive_rounds<C: Connection>(
    ram: &RamImage,
    connections: u16,
    channel: &mut Channel<C>,
    budget: &Budget,
    progress: &Progress,
    early: Option<&SyncSender<Vec<u8>>>,
) -> Result<(), MigrationError> {
    let phase = Phase::Copy;
    let index = u64::from(channel.index());
    let patience = Wait::WhileAlive(channel.frame_patience());
    let place = |offset, len| {
        if carrier(offset, connections) == index {
            budget.take(len)
        } else {
            Err(MigrationError::Page {
                offset,
                len,
                problem: "for another connection",
            })
        }
    };
    let mut rounds = 0_u32;
    loop {
        match channel.receive(phase, patience)? {
            Message::Pages { offset, data } => {
                let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
                place(offset, len)?;
                ram.write(offset, data)?;
                progress.sent(len, len / super::PAGE_SIZE, 0);
            }
            Message::Zeros(runs) => {
                for run in runs {
                    place(run.offset(), run.len())?;
                    ram.write_zeros(run.offset(), run.len())?;
                    progress.sent(0, 0, run.count);
                }
            }
            Message::RoundEnd { round, last } => {
                if rounds.checked_add(1) != Some(round) {
                    return Err(channel.out_of_order(phase, "ROUND_END of another round"));
                }
                // A round without pages costs work too.
                budget.take(super::PAGE_SIZE)?;
                rounds = round;
                progress.round(round);
                if last {
                    return Ok(());
                }
            }
            Message::Early(data) if let Some(early) = early => {
                // Waits for the machine. It has gone only after an error of its own.
                early
                    .send(data.to_vec())
                    .map_err(|_| MigrationError::machine("take early states")("it has ended"))?;
            }
            other => {
                let name = other.name();
                return Err(channel.out_of_order(phase, name));
            }
        }
    }
}
