//! Live migration: a running machine moves to another process, on this host or another one.
//!
//! Owns the order of things, from the first word between two hosts to the moment at which the other one is
//! in charge. Must not know KVM, devices or the API: the machine is behind [`SourceMachine`] and
//! [`DestinationMachine`], connections are behind [`Connection`].
//!
//! ```text
//!  source                                                    destination
//!  Connected     ── HELLO: RAM, CPU, devices ────────────>   Listening
//!      │         <─ REFUSE: what, here, there, remedy ────      │        guest RAM is made,
//!      │         <─ ACCEPT: session, connections ─────────      │        devices are opened
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
//! **The rule.** Before GO every failure leaves the source in charge: it resumes, with its devices as they
//! were. Once the first byte of GO may have been sent, the source never runs again by itself, whatever it
//! hears or does not hear. The destination runs after a whole GO with the session's number, and only then. So at most one of
//! them runs; if the link dies at the wrong moment, neither does, and both say [`Outcome::Unsettled`]: somebody who
//! can see both hosts has to decide.
//!
//! | link dies | source | destination |
//! |---|---|---|
//! | before READY is begun | `Source`, guest runs | `Source` |
//! | in READY, or before GO is begun | `Source`, guest runs | `Unsettled`, guest stands |
//! | in GO | `Unsettled`, guest stands | `Unsettled`, guest stands |
//! | after GO, before DONE | `Unsettled`, guest stands | `Destination`, guest runs |
//! | after DONE | `Destination` | `Destination`, guest runs |
//!
//! The states above are types ([`source`], [`destination`]): each step takes one and gives the next, so a
//! GO without a READY, or a guest that runs without a GO, does not compile.

pub mod channel;
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
