//! The states of the conversation as the destination sees them.
//!
//! ```text
//!   Listening ─hello─> Listening ─accept─> Accepted ─receive─> Restoring
//!       │                  │ refuse            │                   │ ready
//!       └──────────────────┴── error: the source is in charge ─────┤     (of a TRY the answer is the end)
//!                                              ════════════════════v══ it may send GO now
//!                                                              AwaitingGo ─wait_go─> Go
//! ```
//!
//! Each step takes the state. An error up to [`Restoring`] leaves the source in charge, and it has been told
//! if it could be. After that it does so only if the source itself says that it goes on.

use std::fs::File;
use std::io::{self, Read as _};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::door::Door;
use super::{HELLO_PATIENCE, JOIN_PATIENCE};
use crate::migration::channel::{Channel, Connection, Halt, Wait};
use crate::migration::error::{MigrationError, Phase};
use crate::migration::progress::Progress;
use crate::migration::protocol::{CONNECTION_UNKNOWN, Hello, Message, Refusal, Session};
use crate::migration::ram::{Budget, RamImage, receive_rounds};

fn end<C: Connection>(
    mut control: Channel<C>,
    phase: Phase,
    error: MigrationError,
) -> MigrationError {
    let error = control.ask_why(phase, error);
    control.say_why(phase, &error);
    error
}

/// What a source wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Asked {
    /// Its machine is to come.
    Take(Hello),
    /// To know whether it could.
    Try(Hello),
}

/// Somebody has connected.
#[derive(Debug)]
pub struct Listening<C> {
    control: Channel<C>,
}

impl<C: Connection> Listening<C> {
    pub(super) fn new(control: Channel<C>) -> Self {
        Self { control }
    }

    /// What ends its waits from now on.
    pub(super) fn set_halt(&mut self, halt: &Halt) {
        self.control.set_halt(halt);
    }

    /// Waits for the first words.
    ///
    /// # Errors
    /// [`MigrationError`]; the source is in charge.
    pub fn hello(mut self) -> Result<(Self, Asked), MigrationError> {
        let phase = Phase::Offer;
        let wait = Wait::AtMost(HELLO_PATIENCE.min(self.control.frame_patience()));
        let asked = |message: Message<'_>| match message {
            Message::Hello(hello) => Ok(Asked::Take(hello)),
            Message::Try(hello) => Ok(Asked::Try(hello)),
            other => Err(other.name()),
        };
        match self.control.receive_expected(phase, wait, asked) {
            Ok(asked) => Ok((self, asked)),
            Err(error) => Err(end(self.control, phase, error)),
        }
    }

    /// Says why the machine cannot come. Gives the error for this side.
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

    /// Says that there is room for it, and for how many connections.
    ///
    /// # Errors
    /// [`MigrationError`]; the source is in charge.
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

/// Over TCP without TLS, this is what keeps other connections out.
fn random_session() -> Result<Session, MigrationError> {
    let mut session = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut session))
        .map_err(MigrationError::machine("read /dev/urandom"))?;
    Ok(Session(session))
}

/// What a source may fill.
#[derive(Debug)]
pub struct Room<'a> {
    /// Guest RAM, all zeros.
    pub ram: &'a RamImage,
    /// Most bytes of pages that all rounds together may write.
    pub memory_max: u64,
    /// Most bytes of the machine's state.
    pub state_max: u64,
    /// How far it is.
    pub progress: &'a Progress,
}

/// There is room; connections are made and memory comes.
#[derive(Debug)]
pub struct Accepted<C> {
    control: Channel<C>,
    session: Session,
    connections: u16,
}

impl<C: Connection> Accepted<C> {
    /// Waits for the further connections, for `wait` at most, and takes all rounds and then the state.
    /// `accept` returns [`WouldBlock`](std::io::ErrorKind::WouldBlock) now and then.
    ///
    /// # Errors
    /// [`MigrationError`]; the source is in charge, and guest RAM holds anything.
    pub fn receive(
        mut self,
        accept: &mut dyn FnMut() -> io::Result<C>,
        wait: Duration,
        room: &Room<'_>,
    ) -> Result<Restoring<C>, MigrationError> {
        let result = self
            .memory(accept, wait, room)
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

    /// One thread per connection. When this returns without an error, the last fence of each has come.
    fn memory(
        &mut self,
        accept: &mut dyn FnMut() -> io::Result<C>,
        wait: Duration,
        room: &Room<'_>,
    ) -> Result<(), MigrationError> {
        let budget = Budget::new(room.memory_max);
        let (session, connections) = (self.session, self.connections);
        let patience = self.control.frame_patience();
        let closes = Instant::now() + wait;
        let halt = self.control.halt().clone();
        let first_error = Mutex::new(None);
        let failed = |error| {
            // The others end at their next wait; what they then say is not the cause.
            first_error.lock().get_or_insert(error);
            halt.fail();
        };
        let part = |channel: &mut Channel<C>| {
            let rounds = receive_rounds(room.ram, connections, channel, &budget, room.progress);
            if let Err(error) = rounds {
                failed(error);
            }
        };
        let (part, failed) = (&part, &failed);
        let thread = |index: u16| thread::Builder::new().name(format!("migrate{index}"));
        thread::scope(|scope| {
            // The first connection is listened to meanwhile: it may bring a CANCEL.
            let control = &mut self.control;
            if let Err(source) = thread(0).spawn_scoped(scope, move || part(control)) {
                failed(MigrationError::no_thread(source));
            }
            let mut door = Door::new(&halt, Phase::Join);
            // Numbers of the connections that are there.
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
                    let next = door.next(scope, accept, missing, asked)?;
                    // Of two with one number the first is there already.
                    let next = next.filter(|channel| !joined.contains(&channel.index()));
                    let Some(mut channel) = next else {
                        continue;
                    };
                    joined.push(channel.index());
                    channel.set_halt(&halt);
                    thread(channel.index())
                        .spawn_scoped(scope, move || part(&mut channel))
                        .map_err(MigrationError::no_thread)?;
                }
                Ok(())
            };
            if let Err(error) = all_join() {
                failed(error);
            }
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
                    // It grows with what has come, never with what was announced.
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

/// The channel, if its first frame is a JOIN of this migration.
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
            tracing::warn!("a connection that is not the source's was closed");
            return None;
        }
    };
    channel.set_index(index);
    Some(channel)
}

/// All of the guest is here.
#[derive(Debug)]
pub struct Restoring<C> {
    control: Channel<C>,
    session: Session,
    state: Vec<u8>,
}

impl<C: Connection> Restoring<C> {
    /// The machine's state, as the source has written it.
    #[must_use]
    pub fn state(&self) -> &[u8] {
        &self.state
    }

    /// It does not go on here.
    pub fn give_up(self, error: MigrationError) -> MigrationError {
        end(self.control, Phase::Ready, error)
    }

    /// Says READY.
    ///
    /// # Errors
    /// [`MigrationError`]; it is not known whether READY has arrived, nor who is in charge.
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
    /// Waits for GO. It cannot be cancelled from here: the source may have sent it.
    ///
    /// # Errors
    /// [`MigrationError::PeerCancelled`] or [`MigrationError::PeerFailed`]: the source is in charge. With any other, nobody knows.
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

/// The right to run the guest: the source has given it up. Made of a whole GO and of nothing else.
#[derive(Debug)]
pub struct Go(());

/// The guest is this host's; the source would like to hear that it runs.
#[derive(Debug)]
pub struct Running<C> {
    control: Channel<C>,
}

impl<C: Connection> Running<C> {
    /// Says DONE.
    ///
    /// # Errors
    /// [`MigrationError`]; the guest runs nevertheless.
    pub fn done(&mut self) -> Result<(), MigrationError> {
        self.control
            .send_anyway(Phase::Done, &Message::Done)
            .map(drop)
    }

    /// Says that it does not run.
    pub fn failed(&mut self, why: &MigrationError) {
        self.control.say_why(Phase::Done, why);
    }
}
