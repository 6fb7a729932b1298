//! The destination of a migration: the host that the guest comes to.
//!
//! [`receive`] owns the order; the states of the conversation are types in `states.rs`. Must not know what a machine is made of.
//! Everything that comes over a connection is checked before it is used, and nothing is kept that has no limit.

mod door;
mod states;

use std::io;
use std::thread;
use std::time::Duration;

use super::channel::{Channel, Connection, Halt, Timeouts};
use super::error::{MachineError, MigrationError, Outcome, Phase};
use super::progress::Monitor;
use super::protocol::{CONNECTIONS_MAX, Hello, RamRange, Refusal};
use super::ram::RamImage;

use door::Door;

pub use states::{Accepted, Asked, AwaitingGo, Go, Listening, Restoring, Room, Running};

/// A machine that can arrive. [`receive`] calls these in the order in which they stand here.
pub trait DestinationMachine {
    /// Checks what the source has and makes ready for it: guest RAM of the same ranges, all zeros, and what takes long, such as
    /// opening devices and pinning memory.
    ///
    /// # Errors
    /// All the reasons why not, at least one.
    fn prepare(&mut self, hello: &Hello) -> Result<RamImage, Vec<Refusal>>;

    /// Checks the same for a source that only asks, and keeps nothing of it: afterwards everything is as it was, so that a
    /// machine can still come. Gives the ranges that guest RAM would have.
    ///
    /// # Errors
    /// All the reasons why not, at least one.
    fn try_out(&mut self, hello: &Hello) -> Result<Vec<RamRange>, Vec<Refusal>>;

    /// Checks the state, whose bytes are those that the source has written, and restores of it what nobody outside the machine
    /// notices: vCPUs, interrupt controllers, the board. Guest RAM is complete. Nothing may act yet, neither vCPUs nor devices,
    /// since the source's answer for the guest until GO; so devices take their states only in [`DestinationMachine::run`].
    ///
    /// # Errors
    /// What failed; the source is in charge.
    fn restore(&mut self, state: &[u8]) -> Result<(), MachineError>;

    /// Starts the devices with their states, and runs. Only a whole GO of the source makes a [`Go`].
    ///
    /// # Errors
    /// What failed, such as a device that does not take its state. The source does not resume by itself.
    fn run(&mut self, go: Go) -> Result<(), MachineError>;
}

/// What a destination allows.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveOptions {
    /// Connections, 1 to [`CONNECTIONS_MAX`].
    pub connections: u16,
    /// How long to wait for the source.
    pub timeouts: Timeouts,
    /// Most bytes of the machine's state.
    pub state_max: u64,
    /// Memory (bytes, zeros included) that all rounds together may write, in multiples of guest RAM.
    pub rounds_max: u32,
}

impl Default for ReceiveOptions {
    /// 16 connections, a state of 64 MiB, memory 1000 times over.
    fn default() -> Self {
        Self {
            connections: CONNECTIONS_MAX,
            timeouts: Timeouts::default(),
            state_max: 64 << 20,
            rounds_max: 1000,
        }
    }
}

/// Somebody who has connected and said what it wants.
#[derive(Debug)]
pub struct Visitor<C> {
    listening: Listening<C>,
    asked: Asked,
}

impl<C: Connection> Visitor<C> {
    /// Waits for the first words of whoever has connected over `stream`.
    fn ask(stream: C, patience: Duration, halt: &Halt) -> Result<Self, MigrationError> {
        let channel = Channel::new(stream, 0, patience, halt)?;
        let (listening, asked) = Listening::new(channel).hello()?;
        Ok(Self { listening, asked })
    }
}

/// Waits for somebody who says what it wants; `accept` as in [`receive`]. Others who connect meanwhile and are slow, or no source
/// at all, keep it from nothing: several are asked at once.
///
/// # Errors
/// [`MigrationError::Cancelled`]; or no connection can be accepted any more.
pub fn greet<C: Connection>(
    accept: &mut dyn FnMut() -> io::Result<C>,
    options: &ReceiveOptions,
    monitor: &Monitor,
) -> Result<Visitor<C>, MigrationError> {
    let patience = options.timeouts.frame;
    let halt = Halt::new(&monitor.cancel);
    let ask = move |stream, halt: &Halt| match Visitor::ask(stream, patience, halt) {
        Ok(visitor) => Some(visitor),
        Err(_) if halt.check().is_err() => None,
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "no machine came over a connection; waiting for the next"
            );
            None
        }
    };
    let greeted = thread::scope(|scope| {
        let mut door = Door::new(&halt, Phase::Offer);
        loop {
            halt.check()?;
            if let Some(visitor) = door.next(scope, accept, 0, ask)? {
                return Ok(visitor);
            }
        }
    });
    greeted.map(|mut visitor: Visitor<C>| {
        // That of the door says by now that nobody is to be asked.
        visitor.listening.set_halt(&halt);
        visitor
    })
}

/// Takes the machine that comes over `first`. `accept` gives the next connection to the same place; it waits a
/// short while at most and then returns [`io::ErrorKind::WouldBlock`].
///
/// Returns when it is settled, or cannot be settled from here, who is in charge; the module's
/// documentation says when that is who. At [`Outcome::Unsettled`] `machine` holds the guest: complete, stopped.
/// Blocks: give it a thread.
pub fn receive<C: Connection, M: DestinationMachine>(
    machine: &mut M,
    first: C,
    accept: &mut dyn FnMut() -> io::Result<C>,
    options: &ReceiveOptions,
    monitor: &Monitor,
) -> Outcome {
    let halt = Halt::new(&monitor.cancel);
    monitor.progress.phase(Phase::Offer);
    match Visitor::ask(first, options.timeouts.frame, &halt) {
        Ok(visitor) => receive_from(machine, visitor, accept, options, monitor),
        Err(why) => stays(why),
    }
}

/// As [`receive`], from somebody who was [greeted](greet).
pub fn receive_from<C: Connection, M: DestinationMachine>(
    machine: &mut M,
    visitor: Visitor<C>,
    accept: &mut dyn FnMut() -> io::Result<C>,
    options: &ReceiveOptions,
    monitor: &Monitor,
) -> Outcome {
    let restoring = match until_restored(machine, visitor, accept, options, monitor) {
        Ok(restoring) => restoring,
        Err(why) => return stays(why),
    };
    if monitor.cancel.is_cancelled() {
        return stays(restoring.give_up(MigrationError::Cancelled));
    }
    // From the first byte of READY on, the source may be sending GO.
    let go = restoring.ready().and_then(|awaiting| {
        monitor.progress.phase(Phase::Go);
        awaiting.wait_go(options.timeouts.frame)
    });
    let (go, mut running) = match go {
        Ok(go) => go,
        // The source says that it has not sent GO, and never will.
        Err(why @ (MigrationError::PeerFailed { .. } | MigrationError::PeerCancelled { .. })) => {
            return stays(why);
        }
        Err(why) => return Outcome::Unsettled { why },
    };
    monitor.progress.phase(Phase::Done);
    match machine.run(go).map_err(MigrationError::machine("run")) {
        Ok(()) => {
            monitor.progress.runs();
            // The guest runs, whether the source hears of it or not.
            if let Err(error) = running.done() {
                tracing::warn!(%error, "the source could not be told that the guest runs here");
            }
            Outcome::Destination
        }
        Err(why) => {
            running.failed(&why);
            Outcome::Unsettled { why }
        }
    }
}

fn stays(why: MigrationError) -> Outcome {
    Outcome::Source {
        why,
        not_resumed: None,
    }
}

fn until_restored<C: Connection, M: DestinationMachine>(
    machine: &mut M,
    Visitor { listening, asked }: Visitor<C>,
    accept: &mut dyn FnMut() -> io::Result<C>,
    options: &ReceiveOptions,
    monitor: &Monitor,
) -> Result<Restoring<C>, MigrationError> {
    let progress = &*monitor.progress;
    progress.phase(Phase::Offer);
    let connections = options.connections.clamp(1, CONNECTIONS_MAX);
    let hello = match asked {
        Asked::Take(hello) => hello,
        Asked::Try(hello) => return Err(try_out(machine, listening, &hello, connections)),
    };
    let ram = match machine.prepare(&hello) {
        Ok(ram) => ram,
        Err(reasons) => return Err(listening.refuse(reasons)),
    };
    if ram.ranges() != hello.ram {
        return Err(listening.refuse(vec![different_ram(&hello, &ram.ranges())]));
    }
    progress.ram(ram.len());
    let accepted = listening.accept(connections.min(hello.connections))?;
    progress.phase(Phase::Copy);
    let room = Room {
        ram: &ram,
        memory_max: ram.len().saturating_mul(u64::from(options.rounds_max)),
        state_max: options.state_max,
        progress,
    };
    let restoring = accepted.receive(accept, options.timeouts.frame, &room)?;
    progress.phase(Phase::Ready);
    progress.stopped();
    let restored = machine.restore(restoring.state());
    match restored.map_err(MigrationError::machine("restore its state")) {
        Ok(()) => Ok(restoring),
        Err(error) => Err(restoring.give_up(error)),
    }
}

/// Answers a source that only asks. Gives the reason for which nothing comes.
fn try_out<C: Connection, M: DestinationMachine>(
    machine: &mut M,
    listening: Listening<C>,
    hello: &Hello,
    connections: u16,
) -> MigrationError {
    match machine.try_out(hello) {
        Ok(ranges) if ranges == hello.ram => {
            match listening.accept(connections.min(hello.connections)) {
                Ok(_) => MigrationError::OnlyTried,
                Err(error) => error,
            }
        }
        Ok(ranges) => listening.refuse(vec![different_ram(hello, &ranges)]),
        Err(reasons) => listening.refuse(reasons),
    }
}

fn different_ram(hello: &Hello, ranges: &[RamRange]) -> Refusal {
    let total = |ranges: &[RamRange]| {
        let lengths = ranges.iter().map(|range| range.len);
        lengths.fold(0_u64, u64::saturating_add)
    };
    Refusal {
        what: "guest memory".to_owned(),
        source: format!("{} bytes in {} pieces", total(&hello.ram), hello.ram.len()),
        destination: format!("{} bytes in {} pieces", total(ranges), ranges.len()),
        remedy: "give the destination the same memory size".to_owned(),
    }
}

/// How long a connection that has been accepted may take to say HELLO, TLS included. A source looks at its machine meanwhile.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// How long a further one may take to say JOIN.
const JOIN_PATIENCE: Duration = Duration::from_secs(2);
