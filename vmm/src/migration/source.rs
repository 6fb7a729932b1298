//! The source of a migration: the host that the guest leaves.
//!
//! [`send`] owns the order: rounds until they converge, stop, the rest, GO. The states of the
//! conversation are types in `states.rs`. This module must not know what a machine consists of.

mod rounds;
mod states;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::channel::{Channel, Connection, Halt, Standstill, Timeouts};
use super::convergence::{Convergence, Decision, Limits, Measured};
use super::dirty::{DirtyPages, PAGE_SIZE};
use super::error::{MachineError, MigrationError, Outcome, Phase};
use super::progress::{Monitor, Progress};
use super::protocol::{CONNECTIONS_MAX, Hello, MigrationSecret};
use super::ram::RamImage;

pub use states::{Abort, Accepted, Committed, Connected, Copying, Ready, Stopped};

/// A machine that can leave. [`send`] calls these methods in the order of their declaration, those
/// from [`SourceMachine::take_dirty`] to [`SourceMachine::early`] repeatedly. The last two run
/// after a failure before GO.
pub trait SourceMachine {
    /// Returns the properties that must match at the destination, as a JSON object: CPU, devices,
    /// features, queues, config space.
    ///
    /// # Errors
    /// Why this machine cannot move at all.
    fn compat(&mut self) -> Result<Value, MachineError>;

    /// Starts logging: from now on [`SourceMachine::take_dirty`] sees each page that vCPUs, devices
    /// or this process write. Dirty logs are on, and the used rings of receive queues are shadowed.
    ///
    /// # Errors
    /// The step that failed; nothing has changed.
    fn start_logging(&mut self) -> Result<(), MachineError>;

    /// Adds the pages written since the last call to `pages`; the first call may add more than
    /// those. The caller reads each of them after this returns. The call after
    /// [`SourceMachine::stop`] is the last one, when nothing writes any more.
    ///
    /// # Errors
    /// The step that failed; the migration ends.
    fn take_dirty(&mut self, pages: &mut DirtyPages) -> Result<(), MachineError>;

    /// Throttles vCPUs by `percent` of their time, 0 to 99, until the next call.
    fn throttle(&mut self, percent: u8);

    /// Returns the next part of a device's state that it hands out while the guest runs, of at most
    /// [`STATE_CHUNK_MAX`](super::protocol::STATE_CHUNK_MAX) bytes. `None`: there is none for now.
    ///
    /// # Errors
    /// The step that failed; the migration ends.
    fn early(&mut self) -> Result<Option<Vec<u8>>, MachineError>;

    /// Stops vCPUs and devices: after this nothing writes to guest memory.
    ///
    /// # Errors
    /// The step that failed; the caller then calls [`SourceMachine::resume`].
    fn stop(&mut self) -> Result<(), MachineError>;

    /// Whether the destination compares all guest memory with its copy.
    fn verifies_memory(&self) -> bool;

    /// Reads all memory of the stopped machine for that comparison; [`SourceMachine::save`] writes
    /// the result. [`send`] calls it only if [`SourceMachine::verifies_memory`] returns `true`.
    ///
    /// # Errors
    /// The step that failed; the caller then calls [`SourceMachine::resume`].
    fn digest_memory(&mut self) -> Result<(), MachineError>;

    /// Writes the state of the stopped machine, at most [`SendOptions::state_max`] bytes.
    ///
    /// # Errors
    /// The step that failed, including errors of `to`.
    fn save(&mut self, to: &mut dyn Write) -> Result<(), MachineError>;

    /// The last call before the first byte of GO. From here on the guest may run at the
    /// destination, regardless of this process.
    ///
    /// # Errors
    /// The machine has ended meanwhile; the source does not send GO.
    fn commit(&mut self) -> Result<(), MachineError>;

    /// Resumes the guest, with its devices as they were. Called after any failure between the start
    /// of [`SourceMachine::stop`] and GO; never after GO.
    ///
    /// # Errors
    /// The step that failed; the guest stays stopped.
    fn resume(&mut self) -> Result<(), MachineError>;

    /// Undoes [`SourceMachine::start_logging`]. Called after any later failure before GO.
    fn stop_logging(&mut self);
}

/// Settings of an outgoing migration.
#[derive(Debug, Clone, Copy)]
pub struct SendOptions {
    /// Number of connections, 1 to [`CONNECTIONS_MAX`]; the destination may allow fewer.
    pub connections: u16,
    /// When to stop the guest and when to give up.
    pub limits: Limits,
    /// How long to wait for the destination.
    pub timeouts: Timeouts,
    /// How long to wait in total while the guest is stopped, up to GO: see [`Limits::standstill`].
    pub standstill: Duration,
    /// Limit of the machine's state in bytes; the destination has its own limit.
    pub state_max: u64,
    /// The secret that the destination expects; the default for one that expects none.
    pub secret: MigrationSecret,
}

/// Moves `machine`, whose memory is `ram`, to the peer at the other end of `first`. `connect` opens
/// further connections to the same address.
///
/// Returns when one host owns the guest, or when this host cannot determine the owner; see
/// [`crate::migration`] for the cases. Blocks: use a dedicated thread.
pub fn send<C: Connection, M: SourceMachine>(
    machine: &mut M,
    ram: &RamImage,
    first: C,
    connect: &mut dyn FnMut() -> io::Result<C>,
    options: &SendOptions,
    monitor: &Monitor,
) -> Outcome {
    let mut sending = Sending {
        machine,
        ram,
        options,
        monitor,
        logging: false,
        throttled: false,
        stopped: false,
    };
    let ready = sending.until_ready(first, connect).and_then(|ready| {
        // The last point at which the user can cancel.
        if monitor.cancel.is_cancelled() {
            return Err(ready.give_up(MigrationError::Cancelled));
        }
        match sending.machine.commit() {
            Ok(()) => Ok(ready),
            Err(error) => Err(ready.give_up(MigrationError::machine("be handed over")(error))),
        }
    });
    let ready = match ready {
        Ok(ready) => ready,
        Err(abort) => return sending.stay(abort),
    };
    monitor.progress.phase(Phase::Go);
    let done = ready.commit().and_then(|committed| {
        monitor.progress.phase(Phase::Done);
        committed.wait_done(options.timeouts.done)
    });
    match done {
        Ok(()) => {
            monitor.progress.runs();
            monitor.progress.part_done(|parts| &mut parts.go);
            Outcome::Destination
        }
        Err(why) => Outcome::Indeterminate { why },
    }
}

/// Asks the peer at the other end of `stream` whether it would accept the machine with this
/// `compat` document and memory. Nothing changes on either side, and the destination keeps waiting.
/// `secret` is as in [`SendOptions`].
///
/// # Errors
/// [`MigrationError::Refused`] with all reasons; any other error leaves the answer unknown.
pub fn try_out<C: Connection>(
    compat: Value,
    ram: &RamImage,
    stream: C,
    secret: MigrationSecret,
    timeouts: &Timeouts,
) -> Result<(), MigrationError> {
    let hello = Hello {
        secret,
        connections: 1,
        ram: ram.ranges(),
        compat,
    };
    let channel = Channel::new(stream, 0, timeouts.frame, &Halt::default())?;
    Connected::new(channel).try_out(&hello, timeouts.accept)
}

/// Pause between two rounds when the guest writes nothing and may not be stopped yet.
const IDLE: Duration = Duration::from_millis(50);

/// How much longer than this host the destination may take to read all guest memory, as a factor.
const COMPARISON_TIMES: u32 = 4;

/// A machine on its way to GO, and the state to undo if it stays.
struct Sending<'a, M> {
    machine: &'a mut M,
    ram: &'a RamImage,
    options: &'a SendOptions,
    monitor: &'a Monitor,
    logging: bool,
    throttled: bool,
    stopped: bool,
}

impl<'a, M: SourceMachine> Sending<'a, M> {
    fn progress(&self) -> &'a Progress {
        &self.monitor.progress
    }

    /// Resumes the guest first: the peer may receive the reason late or never.
    fn stay<C: Connection>(self, abort: Abort<C>) -> Outcome {
        let progress = self.progress();
        if self.throttled {
            self.machine.throttle(0);
            progress.throttle(0);
        }
        let mut not_resumed = None;
        if self.stopped {
            not_resumed = self.machine.resume().err();
            progress.runs();
        }
        // Before slow steps: the destination waits for GO. It must learn that none comes before its
        // wait ends with an unknown owner.
        let why = abort.tell();
        if self.logging {
            self.machine.stop_logging();
        }
        Outcome::Source { why, not_resumed }
    }

    fn until_ready<C: Connection>(
        &mut self,
        first: C,
        connect: &mut dyn FnMut() -> io::Result<C>,
    ) -> Result<Ready<C>, Abort<C>> {
        let (options, progress) = (self.options, self.progress());
        progress.ram(self.ram.len());
        progress.phase(Phase::Offer);
        let compat = self.machine.compat();
        let hello = Hello {
            secret: options.secret,
            connections: options.connections.clamp(1, CONNECTIONS_MAX),
            ram: self.ram.ranges(),
            compat: compat
                .map_err(MigrationError::machine("describe itself"))
                .map_err(Abort::unsent)?,
        };
        let halt = Halt::new(&self.monitor.cancel);
        let channel =
            Channel::new(first, 0, options.timeouts.frame, &halt).map_err(Abort::unsent)?;
        let accepted = Connected::new(channel).offer(&hello, options.timeouts.accept)?;
        progress.phase(Phase::Join);
        let mut copying = accepted.join(connect)?;
        let comparison = match self.copy(&mut copying) {
            Ok(comparison) => comparison,
            Err(error) => return Err(copying.give_up(error)),
        };
        let stopped = copying.finish(options.state_max, progress, |to| self.machine.save(to))?;
        progress.part_done(|parts| &mut parts.state);
        progress.phase(Phase::Ready);
        let ready = stopped.wait_ready(options.timeouts.ready.saturating_add(comparison));
        progress.part_done(|parts| &mut parts.ready);
        ready
    }

    /// Sends all memory: in rounds while the guest runs, and the rest after it stops. Returns the
    /// time that the destination may take to compare it.
    fn copy<C: Connection>(
        &mut self,
        copying: &mut Copying<C>,
    ) -> Result<Duration, MigrationError> {
        let progress = self.progress();
        progress.phase(Phase::Copy);
        let begun = Instant::now();
        let logging = self.machine.start_logging();
        logging.map_err(MigrationError::machine("log writes to its memory"))?;
        self.logging = true;
        progress.log_started(begun.elapsed());
        let mut pages = self.converge(copying)?;

        progress.phase(Phase::Stop);
        progress.stopped();
        self.stopped = true;
        let stopped = self.machine.stop();
        stopped.map_err(MigrationError::machine("stop"))?;
        self.take_dirty(&mut pages)?;
        progress.part_done(|parts| &mut parts.stop);
        let standstill = Standstill::of(self.options.standstill);
        copying.stand_still(standstill);
        copying.round(self.ram, &pages, true, progress)?;
        progress.part_done(|parts| &mut parts.memory);
        if !self.machine.verifies_memory() {
            return Ok(Duration::ZERO);
        }
        let begun = Instant::now();
        let digested = copying.alive_during(progress, || self.machine.digest_memory())?;
        digested.map_err(MigrationError::machine("read its memory"))?;
        // This host's time, and the time that the destination may take for the same.
        let digested = begun.elapsed();
        let comparison = digested.saturating_mul(COMPARISON_TIMES);
        copying.stand_still(standstill.extended(digested.saturating_add(comparison)));
        Ok(comparison)
    }

    /// Runs rounds while the guest runs. Returns the pages left to send when the guest must stop.
    fn converge<C: Connection>(
        &mut self,
        copying: &mut Copying<C>,
    ) -> Result<DirtyPages, MigrationError> {
        let progress = self.progress();
        let mut convergence = Convergence::new(self.options.limits);
        let mut pages = DirtyPages::all(self.ram.len());
        // The first round sends everything logged up to here. KVM's log begins with every page set:
        // left there, those pages would be sent twice.
        self.take_dirty(&mut pages)?;
        let mut begun = Instant::now();
        loop {
            let (round_pages, sent_before) = (pages.count(), progress.bytes_sent());
            copying.round(self.ram, &pages, false, progress)?;
            let early_left = self.send_early(copying)?;
            pages.clear();
            self.take_dirty(&mut pages)?;
            let now = Instant::now();
            let measured = Measured {
                elapsed: progress.elapsed(),
                sent_bytes: progress.bytes_sent().saturating_sub(sent_before),
                time: now.duration_since(begun),
                round_bytes: round_pages.saturating_mul(PAGE_SIZE),
                dirty_bytes: pages.count().saturating_mul(PAGE_SIZE),
            };
            begun = now;
            let (decision, forecast) = convergence.decide(&measured);
            progress.rates(
                convergence.bytes_per_second().unwrap_or(0),
                convergence.dirty_bytes_per_second(),
                forecast,
            );
            match decision {
                // Nothing to send: wait for the guest to write.
                Decision::Round if pages.is_empty() => std::thread::sleep(IDLE),
                Decision::Round => {}
                Decision::Throttle(percent) => {
                    self.throttled = true;
                    self.machine.throttle(percent);
                    progress.throttle(percent);
                }
                // The rest would lengthen the downtime.
                Decision::Stop if early_left => {}
                Decision::Stop => return Ok(pages),
                Decision::GiveUp => {
                    return Err(MigrationError::TooSlow {
                        elapsed: measured.elapsed,
                        downtime: forecast.downtime.min(Duration::from_secs(86_400)),
                    });
                }
            }
        }
    }

    /// Sends early states, for a part of the time that the other connections may be silent. Returns
    /// whether more may be left.
    fn send_early<C: Connection>(
        &mut self,
        copying: &mut Copying<C>,
    ) -> Result<bool, MigrationError> {
        let begun = Instant::now();
        while begun.elapsed() < self.options.timeouts.frame / 4 {
            let early = self.machine.early();
            match early.map_err(MigrationError::machine("read an early state"))? {
                Some(state) => copying.early(&state, self.progress())?,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    fn take_dirty(&mut self, pages: &mut DirtyPages) -> Result<(), MigrationError> {
        let taken = self.machine.take_dirty(pages);
        taken.map_err(MigrationError::machine("report writes to its memory"))
    }
}
