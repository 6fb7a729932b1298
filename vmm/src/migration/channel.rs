//! One connection of a migration: frames in, frames out, and every wait ends.
//!
//! Owns the two counters of frames, the buffers, and the clock of each frame. The meaning and the
//! order of the messages belong to [`super::source`] and [`super::destination`].
//!
//! A whole frame must pass within the timeout, so a peer that sends a byte now and then counts as
//! silent. ALIVE restarts the clock, a limited number of times, and only where it is allowed. While
//! the guest is stopped, one deadline covers all frames together (`Channel::end_at`).

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

/// How long one system call may take before the next check for cancellation.
const SLICE: Duration = Duration::from_millis(50);
/// Limit of the ALIVEs on one connection: days of a source that sends one every few seconds.
const ALIVES_MAX: u32 = 100_000;
/// How long to wait for the reason of a peer that has hung up.
const REASON_PATIENCE: Duration = Duration::from_millis(500);

/// A connection between two hosts: a Unix socket, TCP, or TLS over one.
pub trait Connection: Read + Write + Send {
    /// Makes every `read` and `write` that would block return [`ErrorKind::WouldBlock`] or
    /// [`ErrorKind::TimedOut`] after about `timeout`. The caller can then repeat the call.
    ///
    /// # Errors
    /// The kernel's error.
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

/// How long to wait for the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// For one frame to pass, and before an idle connection counts as dead. The same on both hosts.
    pub frame: Duration,
    /// For the destination to accept: it allocates guest RAM and pins it.
    pub accept: Duration,
    /// For the destination to restore the state. The guest is stopped meanwhile, so
    /// [`SendOptions::standstill`](super::SendOptions) may end the wait earlier.
    pub ready: Duration,
    /// For the destination to report that the guest runs.
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

/// Cancels a migration from another thread. Clones share it; it cannot be undone.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Requests the end. The migration ends soon, unless GO may have been sent.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether cancellation was requested.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Ends the waits of all channels of one migration.
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

    /// Creates one that shares the cancellation but has its own failure.
    pub(super) fn apart(&self) -> Self {
        Self::new(&self.cancel)
    }

    /// Reports the failure of one channel, which ends the others.
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

/// How long to wait for a message.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wait {
    /// As long as the peer sends ALIVE in time.
    WhileAlive(Duration),
    /// At most this long, regardless of ALIVE.
    AtMost(Duration),
}

/// The deadline of all waits while the guest is stopped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Standstill {
    ends: Instant,
    limit: Duration,
}

impl Standstill {
    /// Starts now and lasts `limit`.
    pub(super) fn of(limit: Duration) -> Self {
        Self {
            ends: Instant::now() + limit,
            limit,
        }
    }

    /// Moves the deadline by `by`.
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
    /// A frame is out in part: the peer could not decode anything after it.
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

    /// Sets the number, for a connection whose first frame carries it.
    pub(super) fn set_index(&mut self, index: u16) {
        self.index = index;
    }

    pub(super) fn frame_patience(&self) -> Duration {
        self.frame_patience
    }

    /// The guest is stopped: no wait extends beyond the deadline, regardless of the number of
    /// frames. `None`: the guest runs, or this side does not own it any more.
    pub(super) fn end_at(&mut self, standstill: Option<Standstill>) {
        self.standstill = standstill;
    }

    /// The rest of `patience` for an operation that began at `started`.
    fn limited(&self, started: Instant, patience: Duration) -> Duration {
        match &self.standstill {
            Some(standstill) => patience.min(standstill.ends.saturating_duration_since(started)),
            None => patience,
        }
    }

    /// Makes `halt` end all later waits.
    pub(super) fn set_halt(&mut self, halt: &Halt) {
        self.halt = halt.clone();
    }

    /// Disables cancellation, which comes too late from here on.
    pub(super) fn ignore_halt(&mut self) {
        self.halt = Halt::default();
    }

    pub(super) fn halt(&self) -> &Halt {
        &self.halt
    }

    /// Sends a message and returns the number of bytes sent. Checks for cancellation before the
    /// first byte.
    pub(super) fn send(
        &mut self,
        phase: Phase,
        message: &Message<'_>,
    ) -> Result<u64, MigrationError> {
        self.halt.check()?;
        self.send_anyway(phase, message)
    }

    /// Like [`Channel::send`], cancelled or not.
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

    /// Sends pages without another copy. Offset and length are page-aligned.
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
        // This includes a frame that would pass at once: many of them together take time, too.
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
                    // A peer that accepts a byte now and then uses up its time as well.
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
            // Consecutive frames never make `read` wait, so `read` alone would not check the clock.
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

    /// Like [`Channel::receive`]; `take` converts the message to a value, or returns the name of
    /// one that is not allowed now.
    pub(super) fn receive_expected<T>(
        &mut self,
        phase: Phase,
        wait: Wait,
        take: impl FnOnce(Message<'_>) -> Result<T, &'static str>,
    ) -> Result<T, MigrationError> {
        let taken = take(self.receive(phase, wait)?);
        taken.map_err(|found| self.out_of_order(phase, found))
    }

    /// Receives the next frame and returns its header; its payload is in `self.payload`.
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
        // The header check limits the length by the kind of message: 1 MiB and a little at most.
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
                    // A peer that sends slowly uses up its time as well.
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

    /// Whether the failed call can be repeated.
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

    /// Sends the reason for the end to the peer, if it is reachable and does not know it.
    pub(super) fn send_reason(&mut self, phase: Phase, error: &MigrationError) {
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
            tracing::debug!(%error, "cannot tell the other host why the migration ends");
        }
    }

    /// Reads the reason that a peer may have sent before it hung up.
    pub(super) fn receive_reason(&mut self, phase: Phase, error: MigrationError) -> MigrationError {
        let hung_up = matches!(
            error,
            MigrationError::Broken { .. } | MigrationError::Closed { .. }
        );
        if !hung_up {
            return error;
        }
        // Another channel's failure has halted this one, and no guest waits for the answer.
        self.ignore_halt();
        self.standstill = None;
        match self.receive(phase, Wait::AtMost(REASON_PATIENCE)) {
            Err(
                reason @ (MigrationError::PeerFailed { .. } | MigrationError::PeerCancelled { .. }),
            ) => reason,
            _ => error,
        }
    }

    /// The error for a message that is not allowed now.
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
