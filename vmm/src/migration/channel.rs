//! One connection of a migration: frames in, frames out, and no wait without an end.
//!
//! Owns the two counters of frames, the buffers, and the clock of each frame. What the messages mean and
//! when they may come is for [`super::source`] and [`super::destination`].
//!
//! A whole frame must pass within the patience, so a peer that sends a byte now and then is as silent as one
//! that sends none. ALIVE starts the clock anew, a limited number of times, and only where it may. While the guest stands
//! still there is one end for all frames together (`Channel::end_at`).

use std::fmt;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vdpa::causes::in_one_line;

use super::error::{MigrationError, Phase};
use super::protocol::{
    FRAME_HEADER_LEN, FrameError, Header, Kind, Message, decode_message, encode_message, seal,
};

/// How long one system call may take before cancellation is looked at.
const SLICE: Duration = Duration::from_millis(50);
/// ALIVEs that are taken on one connection: days of a source that sends one every few seconds.
const ALIVES_MAX: u32 = 100_000;
/// How long a peer that has hung up is asked for its reason.
const REASON_PATIENCE: Duration = Duration::from_millis(500);

/// A connection between two hosts: a Unix socket, TCP, or TLS over one.
pub trait Connection: Read + Write + Send {
    /// Makes every `read` and `write` that cannot go on return [`ErrorKind::WouldBlock`] or
    /// [`ErrorKind::TimedOut`] after about `timeout`. The same call can be repeated then.
    ///
    /// # Errors
    /// What the kernel says.
    fn set_timeout(&mut self, timeout: Duration) -> io::Result<()>;
}

impl Connection for UnixStream {
    fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

impl Connection for TcpStream {
    fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        // READY and GO are a few bytes that the guest waits for.
        self.set_nodelay(true)?;
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

/// How long to wait for the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// For one frame to pass, and before an idle connection counts as dead. Alike on both hosts.
    pub frame: Duration,
    /// For the destination to accept: it makes guest RAM, and pins it.
    pub accept: Duration,
    /// For the destination to restore the state. The guest stands still meanwhile, so
    /// [`SendOptions::standstill`](super::SendOptions) may end it earlier.
    pub ready: Duration,
    /// For the destination to say that the guest runs.
    pub done: Duration,
}

impl Default for Timeouts {
    /// 15 s for a frame, 120 s to accept, 30 s to get ready, 30 s to run.
    fn default() -> Self {
        Self {
            frame: Duration::from_secs(15),
            accept: Duration::from_secs(120),
            ready: Duration::from_secs(30),
            done: Duration::from_secs(30),
        }
    }
}

/// Ends a migration from another thread. Clones share it; it cannot be taken back.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks for the end. It comes soon, but not once GO may have been sent.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it has been asked for.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What ends the waits of all channels of one migration.
#[derive(Debug, Clone, Default)]
pub(super) struct Halt {
    cancel: Cancel,
    failed: Arc<AtomicBool>,
}

impl Halt {
    pub(super) fn new(cancel: &Cancel) -> Self {
        Self {
            cancel: cancel.clone(),
            failed: Arc::default(),
        }
    }

    /// One that is cancelled with this one, and fails by itself.
    pub(super) fn apart(&self) -> Self {
        Self::new(&self.cancel)
    }

    /// Another channel failed: the others need not go on.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// # Errors
    /// [`MigrationError::Cancelled`], for either reason.
    pub(super) fn check(&self) -> Result<(), MigrationError> {
        if self.cancel.is_cancelled() || self.failed.load(Ordering::Acquire) {
            return Err(MigrationError::Cancelled);
        }
        Ok(())
    }
}

/// How long a message may take to come.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wait {
    /// As long as the peer says ALIVE in time.
    WhileAlive(Duration),
    /// Not longer, whatever the peer says.
    AtMost(Duration),
}

/// When all waiting ends because the guest stands still.
#[derive(Debug, Clone, Copy)]
pub(super) struct Standstill {
    ends: Instant,
    limit: Duration,
}

impl Standstill {
    /// From now on, for so long.
    pub(super) fn of(limit: Duration) -> Self {
        Self {
            ends: Instant::now() + limit,
            limit,
        }
    }

    /// For so long more.
    pub(super) fn extended(self, by: Duration) -> Self {
        Self {
            ends: self.ends + by,
            limit: self.limit.saturating_add(by),
        }
    }
}

/// A connection that speaks the protocol.
pub(super) struct Channel<C> {
    stream: C,
    index: u16,
    sent: u32,
    received: u32,
    alives: u32,
    frame_patience: Duration,
    standstill: Option<Standstill>,
    halt: Halt,
    /// A frame has gone out in part: nothing that is sent now would be understood.
    torn: bool,
    out: Vec<u8>,
    payload: Vec<u8>,
}

impl<C> fmt::Debug for Channel<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel")
            .field("index", &self.index)
            .field("sent", &self.sent)
            .field("received", &self.received)
            .finish_non_exhaustive()
    }
}

impl<C: Connection> Channel<C> {
    pub(super) fn new(
        mut stream: C,
        index: u16,
        frame_patience: Duration,
        halt: &Halt,
    ) -> Result<Self, MigrationError> {
        stream
            .set_timeout(SLICE.min(frame_patience))
            .map_err(|source| MigrationError::Broken {
                phase: Phase::Offer,
                connection: index,
                source,
            })?;
        Ok(Self {
            stream,
            index,
            sent: 0,
            received: 0,
            alives: 0,
            frame_patience,
            standstill: None,
            halt: halt.clone(),
            torn: false,
            out: Vec::new(),
            payload: Vec::new(),
        })
    }

    pub(super) fn index(&self) -> u16 {
        self.index
    }

    /// What the channel learns its number from, for a connection whose first frame tells it.
    pub(super) fn set_index(&mut self, index: u16) {
        self.index = index;
    }

    pub(super) fn frame_patience(&self) -> Duration {
        self.frame_patience
    }

    /// The guest stands still: however many frames there are yet, nothing is waited for beyond that. `None`: it does not,
    /// or not for this side to say any more.
    pub(super) fn end_at(&mut self, standstill: Option<Standstill>) {
        self.standstill = standstill;
    }

    /// What is left of `patience` for something that began at `started`.
    fn limited(&self, started: Instant, patience: Duration) -> Duration {
        match &self.standstill {
            Some(standstill) => patience.min(standstill.ends.saturating_duration_since(started)),
            None => patience,
        }
    }

    /// This ends its waits from now on.
    pub(super) fn set_halt(&mut self, halt: &Halt) {
        self.halt = halt.clone();
    }

    /// Cancellation comes too late from here on.
    pub(super) fn ignore_halt(&mut self) {
        self.halt = Halt::default();
    }

    pub(super) fn halt(&self) -> &Halt {
        &self.halt
    }

    /// Sends a message. Gives the bytes that went out. Cancellation is looked at before the first byte.
    pub(super) fn send(
        &mut self,
        phase: Phase,
        message: &Message<'_>,
    ) -> Result<u64, MigrationError> {
        self.halt.check()?;
        self.send_anyway(phase, message)
    }

    /// As [`Channel::send`], cancelled or not.
    pub(super) fn send_anyway(
        &mut self,
        phase: Phase,
        message: &Message<'_>,
    ) -> Result<u64, MigrationError> {
        let mut out = std::mem::take(&mut self.out);
        let result = encode_message(message, self.index, self.sent, &mut out)
            .map_err(|source| self.malformed(phase, source))
            .and_then(|()| self.write(phase, &mut [IoSlice::new(&out)]));
        self.out = out;
        result
    }

    /// Sends pages without copying them once more. Offset and length are page-aligned.
    pub(super) fn send_pages(
        &mut self,
        phase: Phase,
        offset: u64,
        data: &[u8],
    ) -> Result<u64, MigrationError> {
        self.halt.check()?;
        let offset = offset.to_le_bytes();
        let header = seal(Kind::Pages, self.index, self.sent, &[&offset, data])
            .map_err(|source| self.malformed(phase, source))?;
        self.write(
            phase,
            &mut [
                IoSlice::new(&header),
                IoSlice::new(&offset),
                IoSlice::new(data),
            ],
        )
    }

    fn write(
        &mut self,
        phase: Phase,
        mut slices: &mut [IoSlice<'_>],
    ) -> Result<u64, MigrationError> {
        let started = Instant::now();
        let patience = self.limited(started, self.frame_patience);
        // Also a frame that would pass at once: many of them together take time, too.
        if patience.is_zero() {
            return Err(self.silent(phase, started));
        }
        let mut total = 0_u64;
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match self.stream.write_vectored(slices) {
                Ok(0) => return Err(self.closed(phase)),
                Ok(count) => {
                    self.torn = true;
                    total = total.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
                    IoSlice::advance_slices(&mut slices, count);
                    // A peer that takes a byte now and then has used up its time as well.
                    if !slices.is_empty() && started.elapsed() >= patience {
                        return Err(self.silent(phase, started));
                    }
                }
                Err(error) => self.repeat(phase, error, started, patience)?,
            }
        }
        loop {
            match self.stream.flush() {
                Ok(()) => break,
                Err(error) => self.repeat(phase, error, started, patience)?,
            }
        }
        self.torn = false;
        self.sent = self.sent.wrapping_add(1);
        Ok(total)
    }

    /// Waits for the next message that is not ALIVE.
    ///
    /// # Errors
    /// [`MigrationError`]; CANCEL and FAILED are errors too.
    pub(super) fn receive(
        &mut self,
        phase: Phase,
        wait: Wait,
    ) -> Result<Message<'_>, MigrationError> {
        let mut started = Instant::now();
        let header = loop {
            self.halt.check()?;
            let patience = match wait {
                Wait::WhileAlive(patience) => {
                    started = Instant::now();
                    patience
                }
                Wait::AtMost(patience) => patience,
            };
            let patience = self.limited(started, patience);
            let header = self.receive_frame(phase, started, patience)?;
            if header.kind() != Kind::Alive {
                break header;
            }
            // Frames that come one after the other never make `read` wait, and so never look at the clock.
            if started.elapsed() >= patience {
                return Err(self.silent(phase, started));
            }
            self.alives += 1;
            if self.alives > ALIVES_MAX {
                return Err(MigrationError::TooManyAlives);
            }
        };
        let message = decode_message(&header, &self.payload);
        match message.map_err(|source| self.malformed(phase, source))? {
            Message::Cancel => Err(MigrationError::PeerCancelled { phase }),
            Message::Failed(text) => Err(MigrationError::PeerFailed { phase, text }),
            message => Ok(message),
        }
    }

    /// As [`Channel::receive`]; `take` makes a value of the message, or gives the name of one that may
    /// not come now.
    pub(super) fn receive_expected<T>(
        &mut self,
        phase: Phase,
        wait: Wait,
        take: impl FnOnce(Message<'_>) -> Result<T, &'static str>,
    ) -> Result<T, MigrationError> {
        let taken = take(self.receive(phase, wait)?);
        taken.map_err(|found| self.out_of_order(phase, found))
    }

    /// The next frame's header; its payload is in `self.payload`.
    fn receive_frame(
        &mut self,
        phase: Phase,
        started: Instant,
        patience: Duration,
    ) -> Result<Header, MigrationError> {
        let mut bytes = [0; FRAME_HEADER_LEN];
        self.read(phase, &mut bytes, started, patience)?;
        let header = Header::decode(bytes, self.index, self.received)
            .map_err(|source| self.malformed(phase, source))?;
        let mut payload = std::mem::take(&mut self.payload);
        // No more than the table allows for this kind of message: 1 MiB and a little.
        payload.resize(header.payload_len(), 0);
        let result = self.read(phase, &mut payload, started, patience);
        self.payload = payload;
        result?;
        header
            .check(&self.payload)
            .map_err(|source| self.malformed(phase, source))?;
        self.received = self.received.wrapping_add(1);
        Ok(header)
    }

    fn read(
        &mut self,
        phase: Phase,
        mut buffer: &mut [u8],
        started: Instant,
        patience: Duration,
    ) -> Result<(), MigrationError> {
        while !buffer.is_empty() {
            match self.stream.read(buffer) {
                Ok(0) => return Err(self.closed(phase)),
                Ok(count) => {
                    buffer = buffer.get_mut(count..).unwrap_or(&mut []);
                    // A peer that dribbles has used up its time as well.
                    if !buffer.is_empty() && started.elapsed() >= patience {
                        return Err(self.silent(phase, started));
                    }
                }
                Err(error) => {
                    self.halt.check()?;
                    self.repeat(phase, error, started, patience)?;
                }
            }
        }
        Ok(())
    }

    /// Whether the call that failed so can be made again.
    fn repeat(
        &self,
        phase: Phase,
        error: io::Error,
        started: Instant,
        patience: Duration,
    ) -> Result<(), MigrationError> {
        match error.kind() {
            ErrorKind::Interrupted => Ok(()),
            ErrorKind::WouldBlock | ErrorKind::TimedOut if started.elapsed() < patience => Ok(()),
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Err(self.silent(phase, started)),
            ErrorKind::UnexpectedEof => Err(self.closed(phase)),
            _ => Err(MigrationError::Broken {
                phase,
                connection: self.index,
                source: error,
            }),
        }
    }

    /// Tells the peer why this side does not go on, if it can still be told and does not know.
    pub(super) fn say_why(&mut self, phase: Phase, error: &MigrationError) {
        // Nothing is sent after this.
        self.frame_patience = self.frame_patience.min(REASON_PATIENCE);
        self.standstill = None;
        let message = match error {
            MigrationError::PeerFailed { .. }
            | MigrationError::PeerCancelled { .. }
            | MigrationError::Refused { .. } => return,
            MigrationError::Cancelled => Message::Cancel,
            other => Message::Failed(in_one_line(other)),
        };
        if !self.torn
            && let Err(error) = self.send_anyway(phase, &message)
        {
            tracing::debug!(%error, "the other host could not be told why the migration ends");
        }
    }

    /// Where the peer hung up, it may have said why before.
    pub(super) fn ask_why(&mut self, phase: Phase, error: MigrationError) -> MigrationError {
        let hung_up = matches!(
            error,
            MigrationError::Broken { .. } | MigrationError::Closed { .. }
        );
        if !hung_up {
            return error;
        }
        // Another channel's failure has told this one to end, and no guest waits for the answer.
        self.ignore_halt();
        self.standstill = None;
        match self.receive(phase, Wait::AtMost(REASON_PATIENCE)) {
            Err(
                reason @ (MigrationError::PeerFailed { .. } | MigrationError::PeerCancelled { .. }),
            ) => reason,
            _ => error,
        }
    }

    /// A message that may not come now.
    pub(super) fn out_of_order(&self, phase: Phase, found: &'static str) -> MigrationError {
        MigrationError::OutOfOrder {
            phase,
            connection: self.index,
            found,
        }
    }

    fn malformed(&self, phase: Phase, source: FrameError) -> MigrationError {
        MigrationError::Malformed {
            phase,
            connection: self.index,
            source,
        }
    }

    fn closed(&self, phase: Phase) -> MigrationError {
        MigrationError::Closed {
            phase,
            connection: self.index,
        }
    }

    fn silent(&self, phase: Phase, started: Instant) -> MigrationError {
        let connection = self.index;
        match &self.standstill {
            Some(standstill) if Instant::now() >= standstill.ends => MigrationError::StoodStill {
                phase,
                connection,
                limit: standstill.limit,
            },
            _ => MigrationError::Silent {
                phase,
                connection,
                waited: started.elapsed(),
            },
        }
    }
}
