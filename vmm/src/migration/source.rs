//! The source of a migration: the host that the guest leaves.
//!
//! [`send`] owns the order: rounds until it converges, stop, the rest, GO. The states of the conversation are types in
//! `states.rs`. Must not know what a machine is made of.

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
use super::protocol::{CONNECTIONS_MAX, Hello};
use super::ram::RamImage;

pub use states::{Accepted, Committed, Connected, Copying, Parting, Ready, Stopped};

/// A machine that can leave. [`send`] calls these in the order in which they stand here, those from
/// [`SourceMachine::take_dirty`] to [`SourceMachine::throttle`] repeatedly; and at a failure before GO, the last two.
pub trait SourceMachine {
    /// What must be alike at the destination, as a JSON object: CPU, devices, features, queues, config space.
    ///
    /// # Errors
    /// Why this machine cannot move at all.
    fn compat(&mut self) -> Result<Value, MachineError>;

    /// From now on each page that vCPUs, devices or this process write is known to
    /// [`SourceMachine::take_dirty`]: dirty logs are on, receive queues are mediated.
    ///
    /// # Errors
    /// Why not; nothing has changed then.
    fn start_logging(&mut self) -> Result<(), MachineError>;

    /// Puts the pages that were written since the last call into `pages`, at the first call maybe more than those. Each of them
    /// is read after this returns. After [`SourceMachine::stop`] this is the last call, and nothing writes any more.
    ///
    /// # Errors
    /// What failed; the migration ends.
    fn take_dirty(&mut self, pages: &mut DirtyPages) -> Result<(), MachineError>;

    /// Holds vCPUs back for `percent` of their time, 0 to 99, until the next call.
    fn throttle(&mut self, percent: u8);

    /// Stops vCPUs and devices: after this nothing writes to guest memory.
    ///
    /// # Errors
    /// What failed; [`SourceMachine::resume`] is called then.
    fn stop(&mut self) -> Result<(), MachineError>;

    /// Reads all of the stopped machine's memory if the destination is to compare it with what it has, and gives whether it
    /// did; [`SourceMachine::save`] writes the result.
    ///
    /// # Errors
    /// What failed; [`SourceMachine::resume`] is called then.
    fn digest_memory(&mut self) -> Result<bool, MachineError>;

    /// Writes the state of the stopped machine, at most [`SendOptions::state_max`] bytes.
    ///
    /// # Errors
    /// What failed, the errors of `to` among it.
    fn save(&mut self, to: &mut dyn Write) -> Result<(), MachineError>;

    /// The last call before the first byte of GO: from here on the guest may run at the destination, whatever becomes of
    /// this process.
    ///
    /// # Errors
    /// The machine has ended meanwhile: GO is not sent.
    fn commit(&mut self) -> Result<(), MachineError>;

    /// Runs again, with its devices as they were. Called after any failure since [`SourceMachine::stop`] was
    /// begun and before GO; never after it.
    ///
    /// # Errors
    /// What failed: the guest stands still.
    fn resume(&mut self) -> Result<(), MachineError>;

    /// Undoes [`SourceMachine::start_logging`]. Called after any failure since, before GO.
    fn stop_logging(&mut self);
}

/// How a machine is to be sent.
#[derive(Debug, Clone, Copy)]
pub struct SendOptions {
    /// Connections, 1 to [`CONNECTIONS_MAX`]; the destination may allow fewer.
    pub connections: u16,
    /// When to stop the guest and when to give up.
    pub limits: Limits,
    /// How long to wait for the destination.
    pub timeouts: Timeouts,
    /// How long to wait for it in all while the guest stands still, from its stop to GO: see [`Limits::standstill`].
    pub standstill: Duration,
    /// Most bytes of the machine's state; the destination has its own limit.
    pub state_max: u64,
}

/// Moves `machine`, whose memory is `ram`, to whoever is at the other end of `first`. `connect` makes further
/// connections to the same place.
///
/// Returns when it is settled, or cannot be settled from here, who is in charge; the module's
/// documentation says when that is who. Blocks: give it a thread.
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
        // The last moment at which the user may still change their mind.
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
        Err(parting) => return sending.stay(parting),
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
        Err(why) => Outcome::Unsettled { why },
    }
}

/// Asks whoever is at the other end of `stream` whether the machine with this `compat` document and memory could come
/// there. Nothing changes on either side, and the destination waits on.
///
/// # Errors
/// [`MigrationError::Refused`] with all reasons; with any other it is not known.
pub fn try_out<C: Connection>(
    compat: Value,
    ram: &RamImage,
    stream: C,
    timeouts: &Timeouts,
) -> Result<(), MigrationError> {
    let hello = Hello {
        connections: 1,
        ram: ram.ranges(),
        compat,
    };
    let channel = Channel::new(stream, 0, timeouts.frame, &Halt::default())?;
    Connected::new(channel).try_out(&hello, timeouts.accept)
}

/// Between two rounds of a guest that writes nothing and may not be stopped yet.
const IDLE: Duration = Duration::from_millis(50);

/// How many times as long as this host the destination may take to read all of the guest's memory.
const COMPARISON_TIMES: u32 = 4;

/// A machine up to GO, and what has to be undone if it stays.
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

    /// The guest goes on first: the other host may be slow to hear why, or never hear it.
    fn stay<C: Connection>(self, parting: Parting<C>) -> Outcome {
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
        // Before what may take long: the destination waits for GO, and must learn that none comes
        // before it stops waiting and cannot tell where the guest is.
        let why = parting.tell();
        if self.logging {
            self.machine.stop_logging();
        }
        Outcome::Source { why, not_resumed }
    }

    fn until_ready<C: Connection>(
        &mut self,
        first: C,
        connect: &mut dyn FnMut() -> io::Result<C>,
    ) -> Result<Ready<C>, Parting<C>> {
        let (options, progress) = (self.options, self.progress());
        progress.ram(self.ram.len());
        progress.phase(Phase::Offer);
        let compat = self.machine.compat();
        let hello = Hello {
            connections: options.connections.clamp(1, CONNECTIONS_MAX),
            ram: self.ram.ranges(),
            compat: compat
                .map_err(MigrationError::machine("say what it is made of"))
                .map_err(Parting::unsaid)?,
        };
        let halt = Halt::new(&self.monitor.cancel);
        let channel =
            Channel::new(first, 0, options.timeouts.frame, &halt).map_err(Parting::unsaid)?;
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

    /// Sends all memory: in rounds while the guest runs, and the rest once it stands still. Gives the
    /// time that the destination may take to compare it.
    fn copy<C: Connection>(
        &mut self,
        copying: &mut Copying<C>,
    ) -> Result<Duration, MigrationError> {
        let progress = self.progress();
        progress.phase(Phase::Copy);
        let begun = Instant::now();
        let logging = self.machine.start_logging();
        logging.map_err(MigrationError::machine("log what is written to its memory"))?;
        self.logging = true;
        progress.mediated(begun.elapsed());
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
        let begun = Instant::now();
        let compared = self.machine.digest_memory();
        if !compared.map_err(MigrationError::machine("read its memory"))? {
            return Ok(Duration::ZERO);
        }
        // The time of this host, and the time that the destination may take to do the same.
        let digested = begun.elapsed();
        let comparison = digested.saturating_mul(COMPARISON_TIMES);
        copying.stand_still(standstill.extended(digested.saturating_add(comparison)));
        Ok(comparison)
    }

    /// Rounds while the guest runs; gives the pages that are left when it has to stop.
    fn converge<C: Connection>(
        &mut self,
        copying: &mut Copying<C>,
    ) -> Result<DirtyPages, MigrationError> {
        let progress = self.progress();
        let mut convergence = Convergence::new(self.options.limits);
        let mut pages = DirtyPages::all(self.ram.len());
        // What is logged up to here goes over with everything. KVM's log begins with every page in
        // it: left there, it would have all of them sent twice.
        self.take_dirty(&mut pages)?;
        let mut begun = Instant::now();
        loop {
            let (round_pages, sent_before) = (pages.count(), progress.bytes_sent());
            copying.round(self.ram, &pages, false, progress)?;
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

    fn take_dirty(&mut self, pages: &mut DirtyPages) -> Result<(), MigrationError> {
        let taken = self.machine.take_dirty(pages);
        taken.map_err(MigrationError::machine(
            "say what was written to its memory",
        ))
    }
}
