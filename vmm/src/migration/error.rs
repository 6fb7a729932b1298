//! How a migration ended, why, and in which phase.
//!
//! Owns the words that the API shows. The peer's text has been sanitized for terminals before it
//! gets here.

use std::io;
use std::time::Duration;

pub use bellhop_api::machine::MigrationPhase as Phase;

use super::protocol::{FrameError, Refusal};

/// The error of a machine that cannot do its part; the message is for the user.
pub type MachineError = Box<dyn std::error::Error + Send + Sync>;

/// Why a migration failed.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// A connection broke.
    #[error("connection {connection} to the other host broke in the phase `{phase}`")]
    Broken {
        /// The phase.
        phase: Phase,
        /// The connection, from 0.
        connection: u16,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The peer closed a connection.
    #[error("the other host closed connection {connection} in the phase `{phase}`")]
    Closed {
        /// The phase.
        phase: Phase,
        /// The connection, from 0.
        connection: u16,
    },
    /// Nothing arrived, or nothing could be sent, for too long.
    #[error(
        "the other host was silent for {:.1} s on connection {connection} in the phase `{phase}`",
        waited.as_secs_f32()
    )]
    Silent {
        /// The phase.
        phase: Phase,
        /// The connection, from 0.
        connection: u16,
        /// How long.
        waited: Duration,
    },
    /// The guest was stopped, and the frames due in that time did not pass in time.
    #[error(
        "the other host did not take or answer messages on connection {connection} in the phase \
         `{phase}` while the guest was stopped. Its limit is {:.1} s (four times downtime_ms, at \
         least 2 s)",
        limit.as_secs_f32()
    )]
    StoodStill {
        /// The phase.
        phase: Phase,
        /// The connection, from 0.
        connection: u16,
        /// Time that the peer has for all of it.
        limit: Duration,
    },
    /// The received bytes are no message of the protocol.
    #[error("the data on connection {connection} in the phase `{phase}` is not Bellhop's protocol")]
    Malformed {
        /// The phase.
        phase: Phase,
        /// The connection, from 0.
        connection: u16,
        /// The defect.
        #[source]
        source: FrameError,
    },
    /// A message arrived at the wrong time.
    #[error("the other host sent {found} on connection {connection} in the phase `{phase}`")]
    OutOfOrder {
        /// The phase.
        phase: Phase,
        /// The connection, from 0.
        connection: u16,
        /// The message's name.
        found: &'static str,
    },
    /// The source does not know the secret of this migration.
    #[error(
        "the source has not sent the secret of this migration: start the migration at the node \
         that has the machine"
    )]
    WrongSecret,
    /// The peer sent ALIVE for days.
    #[error("the other host reported for too long that it is busy")]
    TooManyAlives,
    /// The peer exceeded a limit.
    #[error("the other host sent more than {limit} bytes of {what}")]
    TooMuch {
        /// The kind of data.
        what: &'static str,
        /// The limit in bytes.
        limit: u64,
    },
    /// A page that the other host sent is not guest RAM.
    #[error("the other host sent memory at {offset:#x}+{len:#x}, which is {problem}")]
    Page {
        /// Offset in the file behind guest RAM.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The defect.
        problem: &'static str,
    },
    /// The destination can't take this machine.
    #[error("the destination cannot take this machine: {}", show(reasons))]
    Refused {
        /// All the reasons.
        reasons: Vec<Refusal>,
    },
    /// The peer gave up and sent its reason.
    #[error("the other host gave up in the phase `{phase}`: {text}")]
    PeerFailed {
        /// The phase in which the message arrived.
        phase: Phase,
        /// The peer's text.
        text: String,
    },
    /// The migration was cancelled at the peer.
    #[error("the migration was cancelled at the other host in the phase `{phase}`")]
    PeerCancelled {
        /// The phase in which the message arrived.
        phase: Phase,
    },
    /// The source only asked whether its machine could come: it stays.
    #[error("the source only made a trial")]
    OnlyTried,
    /// The migration was cancelled here.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The guest writes faster than memory can be sent.
    #[error(
        "after {} s the expected downtime is still {} ms; allow a longer downtime_ms or timeout_s, \
         more connections, or a faster link",
        elapsed.as_secs(),
        downtime.as_millis()
    )]
    TooSlow {
        /// How long the migration had run.
        elapsed: Duration,
        /// How long the guest would have been stopped.
        downtime: Duration,
    },
    /// Guest RAM can't be read or written here.
    #[error("guest memory at {offset:#x} cannot be {access} on this host")]
    Memory {
        /// Offset in the file behind guest RAM.
        offset: u64,
        /// `read` or `written`.
        access: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The machine failed at its part.
    #[error("the machine could not {step}")]
    Machine {
        /// The step of the machine.
        step: &'static str,
        /// Its error.
        #[source]
        source: MachineError,
    },
}

impl MigrationError {
    /// For `map_err`: the machine failed at `step`.
    pub(super) fn machine<E: Into<MachineError>>(step: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Machine {
            step,
            source: source.into(),
        }
    }

    /// For `map_err`: the host has no thread for a connection.
    pub(super) fn no_thread(source: io::Error) -> Self {
        Self::machine("start a thread for a connection")(source)
    }
}

/// The owner of the guest after a migration, as far as this host can know.
#[derive(Debug)]
pub enum Outcome {
    /// The source. At the source the guest runs (again); at the destination it never does.
    Source {
        /// Why the guest did not move.
        why: MigrationError,
        /// At the source: why the guest could not be resumed. It is stopped, and no other host owns
        /// it.
        not_resumed: Option<MachineError>,
    },
    /// The destination, where the guest runs. At the source it never does again.
    Destination,
    /// Either host, and neither may run the guest by itself. At this host it stays stopped until an
    /// operator who knows the state of the other host decides.
    Indeterminate {
        /// The failure.
        why: MigrationError,
    },
}

fn show(reasons: &[Refusal]) -> String {
    reasons
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}
