//! The API of one machine: HTTP/1.1 and JSON on a Unix socket.
//!
//! Owns the socket, the thread that serves it, and what may be asked in which state. What is
//! asked of a running machine goes through its [`Handle`](crate::machine::Handle); this
//! module must not know how the machine does it, nor the terminal.
//!
//! ```text
//!   thread "api"                                      the caller's thread ("vmm")
//!   socket ─> server ─> endpoints ─> Controller ── StartRequest ──> Starts::wait
//!                                     │     ^                         │ Machine::new, power_on
//!                                     │     └── started, failed ──────┘
//!                                     └────── Handle (requests) ────> Machine::run
//! ```
//! **Two phases.** What can be asked before the machine is built needs `BeforeBoot`, what can be
//! asked after it `Running` (`controller.rs`): one enum behind one lock. An action in a state that
//! does not have it is answered with 409, the state, and the remedy.
//!
//! ```text
//!               PATCH Running                  powered on           PATCH Paused
//!   NotStarted ---------------> Starting ----------------> Running -------------> Paused
//!     ^  PUT                       │                        │  ^ <------------------ │
//!     +--+                         │ cannot be built,       │ reset   PATCH Running  │
//!     ^                            │ or booted              │                        │
//!     +----------------------------+                        v                        │
//!                             PATCH Stopped, power-off   Stopped <-------------------+
//!                             (in every state)           the process ends
//! ```
//! **One file per endpoint** under `endpoints/`, with its schema; its line in
//! `endpoints/mod.rs` registers the route and its description at once. A test generates
//! `vmm/openapi.json` from them, which `GET /v1/openapi.json` serves.
//!
//! **Nothing a client sends is trusted**: sizes and times are limited ([`crate::http`]),
//! unknown fields are errors that name the field. Who may connect is a matter of the socket's
//! mode, 0600: a client can do what the process' user can, such as reading a file
//! into a guest as its kernel.

mod controller;
mod endpoints;
mod error;
mod server;
mod start;

use std::time::Duration;

/// The level of this API, in `GET /v1/vm`'s `api`.
///
/// It grows by one when something changes that a client has to know of: a field that goes or means
/// something else, a request that is no longer understood. What is only added (a field of an answer, an
/// endpoint, an optional field of a request) leaves it. Clients ignore fields that they do not know. A node daemon
/// adopts machines of its own level and of the one before, so it can be updated under machines that run.
///
/// | level | since | what changed |
/// |---|---|---|
/// | 1 | 0.1.0 | the first |
pub const API_LEVEL: u32 = 1;

/// Clients that may wait for changes at a time: others must be able to ask meanwhile.
const WATCHERS_MAX: usize = 32;

/// In milliseconds, with their fraction.
fn exactly(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// The description of this API as utoipa derives it: for the node's, which has its operations.
#[cfg(any(test, feature = "testing"))]
#[must_use]
pub fn described() -> utoipa::openapi::OpenApi {
    endpoints::described()
}

pub use server::{Server, ServerError};
pub use start::{StartRequest, Starts};

#[cfg(test)]
mod tests;
