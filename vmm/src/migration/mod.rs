//! Live migration: a running machine moves to another process, on this host or another one.
//!
//! Owns the order, from the first message between two hosts to the moment when the destination owns
//! the guest. It must not know KVM, devices or the API. The machine is behind [`SourceMachine`] and
//! [`DestinationMachine`], connections are behind [`Connection`].
//!
//! ```text
//!  source                                                    destination
//!  Connected     ── HELLO: RAM, CPU, devices ────────────>   Listening
//!      │         <─ REFUSE: what, here, there, remedy ────      │        guest RAM exists,
//!      │         <─ ACCEPT: session, connections ─────────      │        devices are open
//!  Accepted      ── JOIN on each further connection ─────>   Accepted
//!  Copying       ══ PAGES, ZEROS, ROUND_END 1, 2, ... ═══>      │
//!      │ the guest stops
//!      │         ══ the last pages, ROUND_END last ══════>      │
//!  Stopped       ── STATE ..., STATE_END ────────────────>   Restoring
//!      │         <─ READY ────────────────────────────────   AwaitingGo  it could run
//!  Ready                                                        │
//!  - - - | - - - - - - - - - - - - - - - - - - - - - - - - - - -│- - - - no way back from here
//!      │         ── GO ──────────────────────────────────>      │
//!  Committed     <─ DONE ─────────────────────────────────   Go          it runs
//! ```
//!
//! **The rule.** A failure before GO leaves the guest at the source: it resumes, with its devices
//! as they were. Once the first byte of GO may be out, the source never runs again by itself,
//! whatever it receives. The destination runs only after a whole GO with the session's number.
//!
//! So at most one host runs the guest. If the link dies at the wrong moment, neither does, and both
//! return [`Outcome::Indeterminate`]: an operator who can see both hosts has to decide.
//!
//! | link dies | source | destination |
//! |---|---|---|
//! | before READY begins | `Source`, guest runs | `Source` |
//! | in READY, or before GO begins | `Source`, guest runs | `Indeterminate`, guest stopped |
//! | in GO | `Indeterminate`, guest stopped | `Indeterminate`, guest stopped |
//! | after GO, before DONE | `Indeterminate`, guest stopped | `Destination`, guest runs |
//! | after DONE | `Destination` | `Destination`, guest runs |
//!
//! The states above are types ([`source`], [`destination`]): each step consumes one and returns the
//! next. So a GO without a READY, or a guest that runs without a GO, does not compile.

pub mod channel;
pub mod connector;
pub mod convergence;
pub mod destination;
pub mod dirty;
pub mod endpoint;
mod error;
#[cfg(any(test, feature = "fuzz"))]
mod fuzz;
pub mod progress;
pub mod protocol;
pub mod ram;
pub mod source;
pub mod tls;

#[cfg(test)]
mod tests;

pub use channel::{Cancel, Connection, Timeouts};
pub use destination::{DestinationMachine, ReceiveOptions, greet, receive, receive_from};
pub use error::{MachineError, MigrationError, Outcome, Phase};
#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::receive_anything;
pub use progress::Monitor;
pub use ram::RamImage;
pub use source::{SendOptions, SourceMachine, send, try_out};
