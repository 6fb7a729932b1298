//! The destination of a migration: the host that receives the guest.
//!
//! [`receive`] owns the order; the states of the conversation are types in `states.rs`. This module
//! must not know what a machine consists of. It checks all bytes from a connection before it uses
//! them, and everything it stores has a limit.

mod acceptor;
mod states;

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::channel::{Channel, Connection, Halt, Timeouts};
use super::error::{MachineError, MigrationError, Outcome, Phase};
use super::progress::Monitor;
use super::protocol::{CONNECTIONS_MAX, Hello, MigrationSecret, RamRange, Refusal};
use super::ram::RamImage;

use acceptor::Acceptor;

pub use states::{Accepted, Asked, AwaitingGo, Go, Listening, Restoring, Room, Running};

/// A machine that can arrive. [`receive`] calls these methods in the order of their declaration.
pub trait DestinationMachine {
    /// Checks the source's description and prepares for it: guest RAM of the same ranges, all
    /// zeros. The slow work happens here, such as opening devices and pinning memory.
    ///
    /// # Errors
    /// All reasons for the refusal, at least one.
    fn prepare(&mut self, hello: &Hello) -> Result<RamImage, Vec<Refusal>>;

    /// Makes the same checks for a source that only asks, and undoes their effects, so that a
    /// machine can still arrive. Returns the ranges that guest RAM would have.
    ///
    /// # Errors
    /// All reasons for the refusal, at least one.
    fn try_out(&mut self, hello: &Hello) -> Result<Vec<RamRange>, Vec<Refusal>>;

    /// Takes a part of a device's state, which the source has read while the guest runs there.
    ///
    /// # Errors
    /// The step that failed; the source keeps the guest.
    fn take_early(&mut self, state: &[u8]) -> Result<(), MachineError>;

    /// Checks the state, whose bytes are those that the source wrote. Restores the parts without an
    /// effect outside the machine: vCPUs, interrupt controllers, the board. Guest RAM is complete.
    ///
    /// Neither vCPUs nor devices may act yet: the source owns the guest until GO. So devices take
    /// their states only in [`DestinationMachine::run`].
    ///
    /// # Errors
    /// The step that failed; the source keeps the guest.
    fn restore(&mut self, state: &[u8]) -> Result<(), MachineError>;

    /// Starts the devices with their states, and runs the guest. Only a whole GO from the source
    /// creates a [`Go`].
    ///
    /// # Errors
    /// The step that failed, such as a device that rejects its state. The source does not resume by
    /// itself.
    fn run(&mut self, go: Go) -> Result<(), MachineError>;
}

/// The limits that a destination enforces.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveOptions {
    /// Number of connections, 1 to [`CONNECTIONS_MAX`].
    pub connections: u16,
    /// How long to wait for the source.
    pub timeouts: Timeouts,
    /// Limit of the machine's state in bytes.
    pub state_max: u64,
    /// Limit of the memory that all rounds together may write (bytes, zeros included), in multiples
    /// of guest RAM.
    pub rounds_max: u32,
    /// The secret that a source must send. `None`: any source may come.
    pub secret: Option<MigrationSecret>,
}

impl Default for ReceiveOptions {
    /// 16 connections, a state of 64 MiB, 1000 times guest RAM.
    fn default() -> Self {
        Self {
            connections: CONNECTIONS_MAX,
            timeouts: Timeouts::default(),
            state_max: 64 << 20,
            rounds_max: 1000,
            secret: None,
        }
    }
}

/// A peer that has connected and sent its HELLO.
#[derive(Debug)]
pub struct PendingConnection<C> {
    listening: Listening<C>,
    asked: Asked,
}

impl<C: Connection> PendingConnection<C> {
    /// Waits for the first message from the peer at the other end of `stream`.
    fn ask(stream: C, options: &ReceiveOptions, halt: &Halt) -> Result<Self, MigrationError> {
        let channel = Channel::new(stream, 0, options.timeouts.frame, halt)?;
        let (listening, asked) = Listening::new(channel).hello(options.secret.as_ref())?;
        Ok(Self { listening, asked })
    }
}

/// Waits for a peer that sends a HELLO; `accept` works as in [`receive`]. It waits for several
/// connections at once, so a slow or silent one does not delay a source. A peer without the secret
/// is disconnected, and the wait continues.
///
/// # Errors
/// [`MigrationError::Cancelled`], or the listener cannot accept connections any more.
pub fn greet<C: Connection>(
    accept: &mut dyn FnMut() -> io::Result<C>,
    options: &ReceiveOptions,
    monitor: &Monitor,
) -> Result<PendingConnection<C>, MigrationError> {
    let halt = Halt::new(&monitor.cancel);
    let guesses = AtomicU32::new(0);
    let guesses = &guesses;
    let ask = move |stream, halt: &Halt| match PendingConnection::ask(stream, options, halt) {
        Ok(pending) => Some(pending),
        Err(MigrationError::WrongSecret) => {
            let wrong_secrets = guesses.fetch_add(1, Ordering::Relaxed) + 1;
            tracing::warn!(wrong_secrets, "a peer without the secret of this migration");
            None
        }
        Err(_) if halt.check().is_err() => None,
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "no machine arrived over a connection; waiting for the next"
            );
            None
        }
    };
    let greeted = thread::scope(|scope| {
        let mut acceptor = Acceptor::new(&halt, Phase::Offer);
        loop {
            halt.check()?;
            if let Some(pending) = acceptor.next(scope, accept, 0, ask)? {
                return Ok(pending);
            }
        }
    });
    greeted.map(|mut pending: PendingConnection<C>| {
        // The dropped acceptor has set its halt, so use the caller's.
        pending.listening.set_halt(&halt);
        pending
    })
}

/// Receives the machine that arrives over `first`. `accept` returns the next connection to the same
/// address. It waits briefly at most, then returns [`io::ErrorKind::WouldBlock`].
///
/// Returns when one host owns the guest, or when this host cannot determine the owner; see
/// [`crate::migration`] for the cases. After [`Outcome::Indeterminate`], `machine` holds the guest,
/// complete and stopped. Blocks: use a dedicated thread.
pub fn receive<C: Connection, M: DestinationMachine>(
    machine: &mut M,
    first: C,
    accept: &mut dyn FnMut() -> io::Result<C>,
    options: &ReceiveOptions,
    monitor: &Monitor,
) -> Outcome {
    let halt = Halt::new(&monitor.cancel);
    monitor.progress.phase(Phase::Offer);
    match PendingConnection::ask(first, options, &halt) {
        Ok(pending) => receive_from(machine, pending, accept, options, monitor),
        Err(why) => stays(why),
    }
}

/// Like [`receive`], from a peer that [`greet`] returned.
pub fn receive_from<C: Connection, M: DestinationMachine>(
    machine: &mut M,
    pending: PendingConnection<C>,
    accept: &mut dyn FnMut() -> io::Result<C>,
    options: &ReceiveOptions,
    monitor: &Monitor,
) -> Outcome {
    let restoring = match until_restored(machine, pending, accept, options, monitor) {
        Ok(restoring) => restoring,
        Err(why) => return stays(why),
    };
    if monitor.cancel.is_cancelled() {
        return stays(restoring.give_up(MigrationError::Cancelled));
    }
    // Once the first byte of READY is out, the source may be sending GO.
    let go = restoring.ready().and_then(|awaiting| {
        monitor.progress.phase(Phase::Go);
        awaiting.wait_go(options.timeouts.frame)
    });
    let (go, mut running) = match go {
        Ok(go) => go,
        // The source reports that it has not sent GO and never will.
        Err(why @ (MigrationError::PeerFailed { .. } | MigrationError::PeerCancelled { .. })) => {
            return stays(why);
        }
        Err(why) => return Outcome::Indeterminate { why },
    };
    monitor.progress.phase(Phase::Done);
    match machine.run(go).map_err(MigrationError::machine("run")) {
        Ok(()) => {
            monitor.progress.runs();
            // The guest runs, whether or not DONE reaches the source.
            if let Err(error) = running.done() {
                tracing::warn!(%error, "cannot confirm to the source that the guest runs here");
            }
            Outcome::Destination
        }
        Err(why) => {
            running.failed(&why);
            Outcome::Indeterminate { why }
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
    PendingConnection { listening, asked }: PendingConnection<C>,
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
    let mut early = |state: &[u8]| machine.take_early(state);
    let restoring = accepted.receive(accept, options.timeouts.frame, &room, &mut early)?;
    progress.phase(Phase::Ready);
    progress.stopped();
    let restored = machine.restore(restoring.state());
    match restored.map_err(MigrationError::machine("restore its state")) {
        Ok(()) => Ok(restoring),
        Err(error) => Err(restoring.give_up(error)),
    }
}

/// Answers a source that only asks. Returns the reason why no machine arrives.
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
