//! The states of the conversation as the destination sees them.
//!
//! ```text
//!   Listening ─hello─> Listening ─accept─> Accepted ─receive─> Restoring
//!       │                  │ refuse            │                   │ ready
//!       └──────────────────┴── error: the source keeps the guest ──┤   (a TRY ends here)
//!                                              ════════════════════v══ the source may send GO now
//!                                                              AwaitingGo ─wait_go─> Go
//! ```
//!
//! Each step consumes the state. An error up to [`Restoring`] leaves the guest at the source, which
//! has been notified if possible. After that the guest stays there only if the source itself
//! reports so.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::acceptor::Acceptor;
use crate::migration::channel::{Channel, Connection, Halt, Wait};
use crate::migration::error::{MachineError, MigrationError, Phase};
use crate::migration::progress::Progress;
use crate::migration::protocol::{
    CONNECTION_UNKNOWN, Hello, Message, MigrationSecret, Refusal, Session,
};
use crate::migration::ram::{Budget, RamImage, receive_rounds};
use crate::sandbox::seccomp;

/// How long an accepted connection may take to send HELLO, TLS included. A source inspects its
/// machine meanwhile.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// How long a peer with a wrong secret keeps its place among those that are asked at once. So 128
/// guesses per second are possible.
const GUESS_DELAY: Duration = Duration::from_millis(250);
/// Early states that wait for the machine, each of at most 1 MiB.
const EARLY_QUEUE: usize = 4;
/// How long a further connection may take to send JOIN.
const JOIN_PATIENCE: Duration = Duration::from_secs(2);

fn end<C: Connection>(
    mut control: Channel<C>,
    phase: Phase,
    error: MigrationError,
) -> MigrationError {
    let error = control.receive_reason(phase, error);
    control.send_reason(phase, &error);
    error
}

/// A source's request.
#[derive(Debug, Clone, PartialEq)]
pub enum Asked {
    /// Receive its machine.
    Take(Hello),
    /// Answer whether it could come.
    Try(Hello),
}

/// A peer has connected.
#[derive(Debug)]
pub struct Listening<C> {
    control: Channel<C>,
}

impl<C: Connection> Listening<C> {
    pub(super) fn new(control: Channel<C>) -> Self {
        Self { control }
    }

    /// Makes `halt` end all later waits.
    pub(super) fn set_halt(&mut self, halt: &Halt) {
        self.control.set_halt(halt);
    }

    /// Waits for the first message. It must have `secret`, if that is given.
    ///
    /// # Errors
    /// [`MigrationError`]; the source owns the guest.
    pub fn hello(
        mut self,
        secret: Option<&MigrationSecret>,
    ) -> Result<(Self, Asked), MigrationError> {
        let phase = Phase::Offer;
        let wait = Wait::AtMost(HELLO_PATIENCE.min(self.control.frame_patience()));
        let asked = |message: Message<'_>| match message {
            Message::Hello(hello) => Ok(Asked::Take(hello)),
            Message::Try(hello) => Ok(Asked::Try(hello)),
            other => Err(other.name()),
        };
        let asked = match self.control.receive_expected(phase, wait, asked) {
            Ok(asked) => asked,
            Err(error) => return Err(end(self.control, phase, error)),
        };
        let (Asked::Take(hello) | Asked::Try(hello)) = &asked;
        if secret.is_some_and(|secret| *secret != hello.secret) {
            thread::sleep(GUESS_DELAY);
            return Err(end(self.control, phase, MigrationError::WrongSecret));
        }
        Ok((self, asked))
    }

    /// Sends the reasons why the machine cannot come. Returns the error for this side.
    pub fn refuse(mut self, mut reasons: Vec<Refusal>) -> MigrationError {
        if reasons.is_empty() {
            reasons.push(Refusal {
                what: "this machine".to_owned(),
                source: "running".to_owned(),
                destination: "not possible".to_owned(),
                remedy: String::new(),
            });
        }
        let message = Message::Refuse(reasons.clone());
        match self.control.send(Phase::Offer, &message) {
            Ok(_) => MigrationError::Refused { reasons },
            Err(error) => error,
        }
    }

    /// Accepts the machine, with this number of connections.
    ///
    /// # Errors
    /// [`MigrationError`]; the source owns the guest.
    pub fn accept(mut self, connections: u16) -> Result<Accepted<C>, MigrationError> {
        let result = random_session().and_then(|session| {
            let accept = Message::Accept {
                session,
                connections,
            };
            self.control.send(Phase::Offer, &accept).map(|_| session)
        });
        match result {
            Ok(session) => Ok(Accepted {
                control: self.control,
                session,
                connections,
            }),
            Err(error) => Err(end(self.control, Phase::Offer, error)),
        }
    }
}

/// Over TCP without TLS, this number keeps other connections out.
fn random_session() -> Result<Session, MigrationError> {
    let mut session = [0; 16];
    let random = rustls::crypto::ring::default_provider().secure_random;
    match random.fill(&mut session) {
        Ok(()) => Ok(Session(session)),
        Err(_) => Err(MigrationError::machine("get random numbers")(
            "the kernel returns none",
        )),
    }
}

/// The memory and limits for a source.
#[derive(Debug)]
pub struct Room<'a> {
    /// Guest RAM, all zeros.
    pub ram: &'a RamImage,
    /// Limit of the page bytes that all rounds together may write.
    pub memory_max: u64,
    /// Limit of the machine's state in bytes.
    pub state_max: u64,
    /// The migration's progress.
    pub progress: &'a Progress,
}

/// The machine was accepted; connections open and memory arrives.
#[derive(Debug)]
pub struct Accepted<C> {
    control: Channel<C>,
    session: Session,
    connections: u16,
}

impl<C: Connection> Accepted<C> {
    /// Waits up to `wait` for the further connections, and receives all rounds and then the state.
    /// `accept` returns [`WouldBlock`](std::io::ErrorKind::WouldBlock) now and then. `early` takes
    /// early states, on this thread.
    ///
    /// # Errors
    /// [`MigrationError`]; the source owns the guest, and the content of guest RAM is undefined.
    pub fn receive(
        mut self,
        accept: &mut dyn FnMut() -> io::Result<C>,
        wait: Duration,
        room: &Room<'_>,
        early: &mut dyn FnMut(&[u8]) -> Result<(), MachineError>,
    ) -> Result<Restoring<C>, MigrationError> {
        let result = self
            .memory(accept, wait, room, early)
            .and_then(|()| self.state(room.state_max));
        match result {
            Ok(state) => Ok(Restoring {
                control: self.control,
                session: self.session,
                state,
            }),
            Err(error) => Err(end(self.control, Phase::Copy, error)),
        }
    }

    /// Runs one thread per connection. When this returns without an error, the last fence of each
    /// has arrived.
    fn memory(
        &mut self,
        accept: &mut dyn FnMut() -> io::Result<C>,
        wait: Duration,
        room: &Room<'_>,
        early: &mut dyn FnMut(&[u8]) -> Result<(), MachineError>,
    ) -> Result<(), MigrationError> {
        let budget = Budget::new(room.memory_max);
        let (session, connections) = (self.session, self.connections);
        let patience = self.control.frame_patience();
        let closes = Instant::now() + wait;
        let halt = self.control.halt().clone();
        let first_error = Mutex::new(None);
        let failed = |error| {
            // The others fail at their next wait; their errors are not the cause.
            first_error.lock().get_or_insert(error);
            halt.fail();
        };
        let part = |channel: &mut Channel<C>, early: Option<SyncSender<Vec<u8>>>| {
            seccomp::enter(seccomp::Thread::Migrate);
            let (budget, early) = (&budget, early.as_ref());
            let rounds =
                receive_rounds(room.ram, connections, channel, budget, room.progress, early);
            if let Err(error) = rounds {
                failed(error);
            }
        };
        let (part, failed) = (&part, &failed);
        let (sender, early_states) = sync_channel::<Vec<u8>>(EARLY_QUEUE);
        let thread = |index: u16| thread::Builder::new().name(format!("migrate{index}"));
        thread::scope(|scope| {
            // The first connection is read meanwhile: it may bring a CANCEL.
            let control = &mut self.control;
            if let Err(source) = thread(0).spawn_scoped(scope, move || part(control, Some(sender)))
            {
                failed(MigrationError::no_thread(source));
            }
            let mut acceptor = Acceptor::new(&halt, Phase::Join);
            // Numbers of the open connections.
            let mut joined = vec![0];
            let mut all_join = || {
                while joined.len() < usize::from(connections) {
                    let missing = (1..connections).find(|index| !joined.contains(index));
                    let missing = missing.unwrap_or(0);
                    halt.check()?;
                    if Instant::now() >= closes {
                        return Err(MigrationError::Silent {
                            phase: Phase::Join,
                            connection: missing,
                            waited: wait,
                        });
                    }
                    let asked = move |stream, halt: &Halt| {
                        join(stream, halt, session, connections, patience)
                    };
                    let next = acceptor.next(scope, accept, missing, asked)?;
                    // Of two connections with one number, the first wins.
                    let next = next.filter(|channel| !joined.contains(&channel.index()));
                    let Some(mut channel) = next else {
                        continue;
                    };
                    joined.push(channel.index());
                    channel.set_halt(&halt);
                    thread(channel.index())
                        .spawn_scoped(scope, move || part(&mut channel, None))
                        .map_err(MigrationError::no_thread)?;
                }
                Ok(())
            };
            // Until the first connection has its last fence.
            let taken = all_join().and_then(|()| {
                let mut states = early_states.iter();
                states
                    .try_for_each(|state| early(&state))
                    .map_err(MigrationError::machine("take early states"))
            });
            if let Err(error) = taken {
                failed(error);
            }
            // A thread that waits for room ends.
            drop(early_states);
        });
        first_error.into_inner().map_or(Ok(()), Err)
    }

    fn state(&mut self, max: u64) -> Result<Vec<u8>, MigrationError> {
        let phase = Phase::Stop;
        let wait = Wait::WhileAlive(self.control.frame_patience());
        let mut state = Vec::new();
        loop {
            let name = match self.control.receive(phase, wait)? {
                Message::State(chunk) => {
                    // The buffer grows with the received bytes, not with an announced length.
                    let len = state.len().saturating_add(chunk.len());
                    if u64::try_from(len).unwrap_or(u64::MAX) > max {
                        return Err(MigrationError::TooMuch {
                            what: "state",
                            limit: max,
                        });
                    }
                    state.extend_from_slice(chunk);
                    continue;
                }
                Message::StateEnd { len } if usize::try_from(len) == Ok(state.len()) => {
                    return Ok(state);
                }
                Message::StateEnd { .. } => "STATE_END after another number of bytes",
                other => other.name(),
            };
            return Err(self.control.out_of_order(phase, name));
        }
    }
}

/// Returns the channel if its first frame is a JOIN of this migration.
fn join<C: Connection>(
    stream: C,
    halt: &Halt,
    session: Session,
    connections: u16,
    patience: Duration,
) -> Option<Channel<C>> {
    let mut channel = Channel::new(stream, CONNECTION_UNKNOWN, patience, halt).ok()?;
    let wait = Wait::AtMost(JOIN_PATIENCE.min(patience));
    let index = match channel.receive(Phase::Join, wait) {
        Ok(Message::Join {
            session: theirs,
            connection,
        }) if theirs == session && connection < connections => connection,
        _ => {
            tracing::warn!("closed a connection that is not the source's");
            return None;
        }
    };
    channel.set_index(index);
    Some(channel)
}

/// All memory and the state have arrived.
#[derive(Debug)]
pub struct Restoring<C> {
    control: Channel<C>,
    session: Session,
    state: Vec<u8>,
}

impl<C: Connection> Restoring<C> {
    /// The machine's state, as the source wrote it.
    #[must_use]
    pub fn state(&self) -> &[u8] {
        &self.state
    }

    /// Ends the conversation; the guest does not resume here.
    pub fn give_up(self, error: MigrationError) -> MigrationError {
        end(self.control, Phase::Ready, error)
    }

    /// Sends READY.
    ///
    /// # Errors
    /// [`MigrationError`]; READY may or may not have arrived, so the owner of the guest is unknown.
    pub fn ready(mut self) -> Result<AwaitingGo<C>, MigrationError> {
        self.control.send_anyway(Phase::Ready, &Message::Ready)?;
        Ok(AwaitingGo {
            control: self.control,
            session: self.session,
        })
    }
}

/// The machine could run.
#[derive(Debug)]
pub struct AwaitingGo<C> {
    control: Channel<C>,
    session: Session,
}

impl<C: Connection> AwaitingGo<C> {
    /// Waits for GO. This wait cannot be cancelled: the source may have sent GO.
    ///
    /// # Errors
    /// [`MigrationError::PeerCancelled`] or [`MigrationError::PeerFailed`]: the source owns the
    /// guest. With any other error, the owner is unknown.
    pub fn wait_go(mut self, wait: Duration) -> Result<(Go, Running<C>), MigrationError> {
        let (session, wait) = (self.session, Wait::AtMost(wait));
        self.control.ignore_halt();
        let go = self
            .control
            .receive_expected(Phase::Go, wait, |message| match message {
                Message::Go(theirs) if theirs == session => Ok(Go(())),
                Message::Go(_) => Err("GO for another migration"),
                other => Err(other.name()),
            })?;
        let running = Running {
            control: self.control,
        };
        Ok((go, running))
    }
}

/// The right to run the guest, which the source has given up. Only a whole GO creates it.
#[derive(Debug)]
pub struct Go(());

/// This host owns the guest; the source waits for DONE.
#[derive(Debug)]
pub struct Running<C> {
    control: Channel<C>,
}

impl<C: Connection> Running<C> {
    /// Sends DONE.
    ///
    /// # Errors
    /// [`MigrationError`]; the guest runs nevertheless.
    pub fn done(&mut self) -> Result<(), MigrationError> {
        self.control
            .send_anyway(Phase::Done, &Message::Done)
            .map(drop)
    }

    /// Reports that the guest does not run.
    pub fn failed(&mut self, why: &MigrationError) {
        self.control.send_reason(Phase::Done, why);
    }
}
