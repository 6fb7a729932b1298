//! The states of the conversation as the source sees them.
//!
//! ```text
//!   Connected ─offer─> Accepted ─join─> Copying ─finish─> Stopped ─wait_ready─> Ready
//!       │                  │           ^   │ round           │                    │ commit
//!       │                  │           └───┘                 │                    v ══ no way back
//!       └──────────────────┴─── error: the guest resumes ────┘           Committed ─wait_done─> ()
//! ```
//!
//! Each step consumes the state. An error of any step up to `wait_ready` leaves the guest at the
//! source. It is an [`Abort`], and the destination receives the reason after the guest resumes.
//! After an error of `commit` or `wait_done`, GO may have been sent, so the source must not run the
//! guest.

use std::io::{self, Write};
use std::time::Duration;

use super::rounds::{alive_during, send_everywhere};
use crate::migration::channel::{Channel, Connection, Standstill, Wait};
use crate::migration::dirty::DirtyPages;
use crate::migration::error::{MachineError, MigrationError, Phase};
use crate::migration::progress::Progress;
use crate::migration::protocol::{
    CONNECTION_UNKNOWN, CONNECTIONS_MAX, Hello, Message, STATE_CHUNK_MAX, Session,
};
use crate::migration::ram::{RamImage, Round};

/// A conversation that ends before GO. The destination does not know yet.
#[derive(Debug)]
#[must_use]
pub struct Abort<C> {
    /// `None`: there is no peer to notify.
    control: Option<Box<Channel<C>>>,
    phase: Phase,
    why: MigrationError,
}

impl<C: Connection> Abort<C> {
    /// Nothing has been sent yet.
    pub(super) fn unsent(why: MigrationError) -> Self {
        Self {
            control: None,
            phase: Phase::Offer,
            why,
        }
    }

    /// Sends the reason to the destination, in a second at most. Returns the destination's own
    /// reason if it hung up first.
    pub fn tell(self) -> MigrationError {
        let Self {
            control,
            phase,
            why,
        } = self;
        let Some(mut control) = control else {
            return why;
        };
        let why = control.receive_reason(phase, why);
        control.send_reason(phase, &why);
        why
    }
}

fn end<C>(control: Channel<C>, phase: Phase, why: MigrationError) -> Abort<C> {
    Abort {
        control: Some(Box::new(control)),
        phase,
        why,
    }
}

/// Nothing has been sent.
#[derive(Debug)]
pub struct Connected<C> {
    control: Channel<C>,
}

impl<C: Connection> Connected<C> {
    pub(super) fn new(control: Channel<C>) -> Self {
        Self { control }
    }

    /// Describes the machine to the destination, and waits for the answer.
    ///
    /// # Errors
    /// A [`Abort`], because of [`MigrationError::Refused`] or another error; the source owns the
    /// guest.
    pub fn offer(mut self, hello: &Hello, wait: Duration) -> Result<Accepted<C>, Abort<C>> {
        // Cloned once per migration.
        match self.exchange(&Message::Hello(hello.clone()), hello.connections, wait) {
            Ok((session, connections)) => Ok(Accepted {
                control: self.control,
                session,
                connections,
            }),
            Err(error) => Err(end(self.control, Phase::Offer, error)),
        }
    }

    /// Asks whether the machine could move, and hangs up. Nothing changes on either side.
    ///
    /// # Errors
    /// [`MigrationError::Refused`] if it could not; any other error leaves the answer unknown.
    pub fn try_out(mut self, hello: &Hello, wait: Duration) -> Result<(), MigrationError> {
        let message = Message::Try(hello.clone());
        match self.exchange(&message, hello.connections, wait) {
            Ok(_) => Ok(()),
            Err(error) => Err(end(self.control, Phase::Offer, error).tell()),
        }
    }

    fn exchange(
        &mut self,
        message: &Message<'_>,
        wanted: u16,
        wait: Duration,
    ) -> Result<(Session, u16), MigrationError> {
        let phase = Phase::Offer;
        self.control.send(phase, message)?;
        let wait = Wait::AtMost(wait);
        self.control
            .receive_expected(phase, wait, |message| match message {
                Message::Accept {
                    session,
                    connections,
                } => Ok(Ok((session, connections.min(wanted)))),
                Message::Refuse(reasons) => Ok(Err(MigrationError::Refused { reasons })),
                other => Err(other.name()),
            })?
    }
}

/// The destination has allocated the resources.
#[derive(Debug)]
pub struct Accepted<C> {
    control: Channel<C>,
    session: Session,
    connections: u16,
}

impl<C: Connection> Accepted<C> {
    /// Opens the further connections.
    ///
    /// # Errors
    /// A [`Abort`]; the source owns the guest.
    pub fn join(self, connect: &mut dyn FnMut() -> io::Result<C>) -> Result<Copying<C>, Abort<C>> {
        let mut others = Vec::new();
        for index in 1..self.connections.min(CONNECTIONS_MAX) {
            match self.join_one(index, connect) {
                Ok(channel) => others.push(channel),
                Err(error) => return Err(end(self.control, Phase::Join, error)),
            }
        }
        Ok(Copying {
            control: self.control,
            others,
            session: self.session,
            rounds: 0,
        })
    }

    fn join_one(
        &self,
        index: u16,
        connect: &mut dyn FnMut() -> io::Result<C>,
    ) -> Result<Channel<C>, MigrationError> {
        let phase = Phase::Join;
        self.control.halt().check()?;
        let stream = connect().map_err(|source| MigrationError::Broken {
            phase,
            connection: index,
            source,
        })?;
        let mut channel = Channel::new(
            stream,
            CONNECTION_UNKNOWN,
            self.control.frame_patience(),
            self.control.halt(),
        )?;
        let join = Message::Join {
            session: self.session,
            connection: index,
        };
        channel.send(phase, &join)?;
        channel.set_index(index);
        Ok(channel)
    }
}

/// Memory is being sent.
#[derive(Debug)]
pub struct Copying<C> {
    control: Channel<C>,
    others: Vec<Channel<C>>,
    session: Session,
    rounds: u32,
}

impl<C: Connection> Copying<C> {
    /// The guest is stopped from now on: everything up to GO must fit into this time.
    pub(super) fn stand_still(&mut self, standstill: Standstill) {
        self.control.end_at(Some(standstill));
        for channel in &mut self.others {
            channel.end_at(Some(standstill));
        }
    }

    /// Sends `pages` of `ram` and a fence on each connection. The guest is stopped during the last
    /// round.
    ///
    /// # Errors
    /// [`MigrationError`]; end it with [`Copying::give_up`].
    pub fn round(
        &mut self,
        ram: &RamImage,
        pages: &DirtyPages,
        last: bool,
        progress: &Progress,
    ) -> Result<(), MigrationError> {
        self.rounds = self.rounds.saturating_add(1);
        progress.round_begins(self.rounds, pages.count());
        let round = Round {
            ram,
            pages,
            connections: u16::try_from(self.others.len())
                .unwrap_or(u16::MAX)
                .saturating_add(1),
            phase: if last { Phase::Stop } else { Phase::Copy },
            round: self.rounds,
            last,
            progress,
        };
        send_everywhere(&round, &mut self.control, &mut self.others)
    }

    /// Sends a part of a device's state while the guest runs.
    pub(super) fn early(
        &mut self,
        state: &[u8],
        progress: &Progress,
    ) -> Result<(), MigrationError> {
        let sent = self.control.send(Phase::Copy, &Message::Early(state))?;
        progress.sent(sent, 0, 0);
        Ok(())
    }

    /// Runs `work` on the stopped machine and sends ALIVE until it ends. The work may take any
    /// time: the caller calls [`Copying::stand_still`] again after it.
    ///
    /// # Errors
    /// [`MigrationError`]; end it with [`Copying::give_up`].
    pub(super) fn alive_during<T>(
        &mut self,
        progress: &Progress,
        work: impl FnOnce() -> T,
    ) -> Result<T, MigrationError> {
        self.control.end_at(None);
        alive_during(Phase::Stop, &mut self.control, progress, work)
    }

    /// Sends the state that `save` writes, at most `max` bytes. The last round must have been sent.
    ///
    /// # Errors
    /// A [`Abort`]; the source owns the guest.
    pub fn finish(
        mut self,
        max: u64,
        progress: &Progress,
        save: impl FnOnce(&mut dyn Write) -> Result<(), MachineError>,
    ) -> Result<Stopped<C>, Abort<C>> {
        match self.state(max, progress, save) {
            Ok(()) => Ok(Stopped {
                control: self.control,
                session: self.session,
            }),
            Err(error) => Err(self.give_up(error)),
        }
    }

    fn state(
        &mut self,
        max: u64,
        progress: &Progress,
        save: impl FnOnce(&mut dyn Write) -> Result<(), MachineError>,
    ) -> Result<(), MigrationError> {
        let mut writer = StateWriter {
            control: &mut self.control,
            progress,
            chunk: Vec::new(),
            written: 0,
            max,
            error: None,
        };
        let saved = save(&mut writer);
        let flushed = writer.send_chunk();
        let (written, error) = (writer.written, writer.error.take());
        // The connection's error takes precedence: the error of `save` only follows from it.
        if let Some(error) = error {
            return Err(error);
        }
        saved.map_err(MigrationError::machine("save its state"))?;
        flushed?;
        let end = Message::StateEnd { len: written };
        let sent = self.control.send(Phase::Stop, &end)?;
        progress.sent(sent, 0, 0);
        Ok(())
    }

    /// Ends the conversation.
    pub fn give_up(self, error: MigrationError) -> Abort<C> {
        let Self { control, .. } = self;
        end(control, Phase::Copy, error)
    }
}

/// Cuts the state into frames.
struct StateWriter<'a, C> {
    control: &'a mut Channel<C>,
    progress: &'a Progress,
    chunk: Vec<u8>,
    written: u64,
    max: u64,
    error: Option<MigrationError>,
}

impl<C: Connection> StateWriter<'_, C> {
    fn send_chunk(&mut self) -> Result<(), MigrationError> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let sent = self
            .control
            .send(Phase::Stop, &Message::State(&self.chunk))?;
        self.progress.sent(sent, 0, 0);
        self.chunk.clear();
        Ok(())
    }
}

impl<C: Connection> Write for StateWriter<'_, C> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = STATE_CHUNK_MAX.saturating_sub(self.chunk.len());
        let (now, _) = bytes.split_at(room.min(bytes.len()));
        self.written = self
            .written
            .saturating_add(u64::try_from(now.len()).unwrap_or(u64::MAX));
        if self.written > self.max {
            return Err(io::Error::other(format!(
                "the state is larger than {} bytes",
                self.max
            )));
        }
        self.chunk.extend_from_slice(now);
        if self.chunk.len() == STATE_CHUNK_MAX
            && let Err(error) = self.send_chunk()
        {
            self.chunk.clear();
            let shown = io::Error::other(error.to_string());
            self.error = Some(error);
            return Err(shown);
        }
        Ok(now.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The guest is stopped and everything has been sent.
#[derive(Debug)]
pub struct Stopped<C> {
    control: Channel<C>,
    session: Session,
}

impl<C: Connection> Stopped<C> {
    /// Waits until the destination has restored the state.
    ///
    /// # Errors
    /// A [`Abort`]; the source owns the guest.
    pub fn wait_ready(mut self, wait: Duration) -> Result<Ready<C>, Abort<C>> {
        let (phase, wait) = (Phase::Ready, Wait::AtMost(wait));
        let ready = |message: Message<'_>| match message {
            Message::Ready => Ok(()),
            other => Err(other.name()),
        };
        match self.control.receive_expected(phase, wait, ready) {
            Ok(()) => Ok(Ready {
                control: self.control,
                session: self.session,
            }),
            Err(error) => Err(end(self.control, phase, error)),
        }
    }
}

/// The destination could run. It waits for GO, and for nothing else.
#[derive(Debug)]
pub struct Ready<C> {
    control: Channel<C>,
    session: Session,
}

impl<C: Connection> Ready<C> {
    /// Ends the conversation; the guest stays.
    pub fn give_up(self, error: MigrationError) -> Abort<C> {
        end(self.control, Phase::Ready, error)
    }

    /// Hands the guest over: sends GO. There is no way back from here, cancelled or not.
    ///
    /// # Errors
    /// [`MigrationError`]; GO may or may not have arrived. The source must not run the guest.
    pub fn commit(mut self) -> Result<Committed<C>, MigrationError> {
        // In any case, no guest at this host could resume sooner.
        self.control.end_at(None);
        self.control
            .send_anyway(Phase::Go, &Message::Go(self.session))?;
        Ok(Committed {
            control: self.control,
        })
    }
}

/// GO has been sent.
#[derive(Debug)]
pub struct Committed<C> {
    control: Channel<C>,
}

impl<C: Connection> Committed<C> {
    /// Waits until the destination reports that the guest runs there.
    ///
    /// # Errors
    /// [`MigrationError`]; the guest may or may not run there. The source must not run it.
    pub fn wait_done(mut self, wait: Duration) -> Result<(), MigrationError> {
        self.control.ignore_halt();
        let wait = Wait::AtMost(wait);
        self.control
            .receive_expected(Phase::Done, wait, |message| match message {
                Message::Done => Ok(()),
                other => Err(other.name()),
            })
    }
}
