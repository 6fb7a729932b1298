//! The sender's side of a round.

use super::{RamImage, STRIPE, ZEROS};
use crate::migration::channel::{Channel, Connection};
use crate::migration::dirty::{DirtyPages, PAGE_SIZE, PageRun};
use crate::migration::error::{MigrationError, Phase};
use crate::migration::progress::Progress;
use crate::migration::protocol::{Message, RUN_PAGES_MAX, ZEROS_MAX};

/// Sends the pages of one round that the channel's connection carries, and then ROUND_END.
#[derive(Debug)]
pub(in crate::migration) struct Round<'a> {
    pub(in crate::migration) ram: &'a RamImage,
    pub(in crate::migration) pages: &'a DirtyPages,
    pub(in crate::migration) connections: u16,
    pub(in crate::migration) phase: Phase,
    pub(in crate::migration) round: u32,
    pub(in crate::migration) last: bool,
    pub(in crate::migration) progress: &'a Progress,
}

/// Sends one connection's part of the round.
///
/// # Errors
/// [`MigrationError`] of the connection, or [`MigrationError::Memory`].
pub(in crate::migration) fn send_round<C: Connection>(
    round: &Round<'_>,
    channel: &mut Channel<C>,
) -> Result<(), MigrationError> {
    let mut sender = Sender {
        round,
        channel,
        zeros: Vec::new(),
        buffer: Vec::new(),
    };
    let mut stripe = u64::from(sender.channel.index());
    let stripes = round.ram.len().div_ceil(STRIPE);
    while stripe < stripes {
        let first = stripe * RUN_PAGES_MAX;
        for run in round.pages.runs(first..first + RUN_PAGES_MAX) {
            sender.run(run)?;
        }
        stripe += u64::from(round.connections.max(1));
    }
    sender.flush_zeros()?;
    let end = Message::RoundEnd {
        round: round.round,
        last: round.last,
    };
    let sent = sender.channel.send(round.phase, &end)?;
    round.progress.sent(sent, 0, 0);
    Ok(())
}

struct Sender<'a, C> {
    round: &'a Round<'a>,
    channel: &'a mut Channel<C>,
    /// Runs of zeros that are not sent yet.
    zeros: Vec<PageRun>,
    buffer: Vec<u8>,
}

impl<C: Connection> Sender<'_, C> {
    /// Sends consecutive pages within one stripe.
    fn run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        let ram = self.round.ram;
        let end = run.offset().saturating_add(run.len()).min(ram.len());
        let data = ram.data_after(run.offset(), end);
        self.zeros(run.offset() / PAGE_SIZE, (data - run.offset()) / PAGE_SIZE)?;
        if data == end {
            return Ok(());
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        // At most a stripe.
        buffer.resize(usize::try_from(end - data).unwrap_or(0), 0);
        let result = ram
            .read(data, &mut buffer)
            .and_then(|()| self.content(data / PAGE_SIZE, &buffer));
        self.buffer = buffer;
        result
    }

    /// Sends the content from page `first` on: zero pages separately from the others.
    fn content(&mut self, first: u64, content: &[u8]) -> Result<(), MigrationError> {
        let (pages, _) = content.as_chunks::<4096>();
        let mut page = first;
        for same in pages.chunk_by(|a, b| (*a == ZEROS) == (*b == ZEROS)) {
            let count = u64::try_from(same.len()).unwrap_or(u64::MAX);
            if same.first() == Some(&ZEROS) {
                self.zeros(page, count)?;
            } else {
                let sent = self.channel.send_pages(
                    self.round.phase,
                    page.saturating_mul(PAGE_SIZE),
                    same.as_flattened(),
                )?;
                self.round.progress.sent(sent, count, 0);
            }
            page = page.saturating_add(count);
        }
        Ok(())
    }

    fn zeros(&mut self, first: u64, count: u64) -> Result<(), MigrationError> {
        if count == 0 {
            return Ok(());
        }
        self.zeros.push(PageRun { first, count });
        if self.zeros.len() >= ZEROS_MAX {
            self.flush_zeros()?;
        }
        Ok(())
    }

    fn flush_zeros(&mut self) -> Result<(), MigrationError> {
        if self.zeros.is_empty() {
            return Ok(());
        }
        let pages = self.zeros.iter().map(|run| run.count).sum();
        let message = Message::Zeros(std::mem::take(&mut self.zeros));
        let sent = self.channel.send(self.round.phase, &message)?;
        self.round.progress.sent(sent, 0, pages);
        Ok(())
    }
}
