//! The API of one VM: HTTP/1.1 and JSON on a Unix socket.
//!
//! Owns the socket, the thread that serves it, and the requests that are possible in each state.
//! Requests to a running VM go through its [`Handle`](crate::machine::Handle). This module must not
//! know how the VM carries them out, nor the terminal.
//!
//! ```text
//!   thread "api"                                      the caller's thread ("vmm")
//!   socket ─> server ─> endpoints ─> Controller ── StartRequest ──> Starts::wait
//!                                     │     ^                         │ Machine::new, power_on
//!                                     │     └── started, failed ──────┘
//!                                     └────── Handle (requests) ────> Machine::run
//! ```
//! **Two phases.** Requests that precede the building of the VM need `BeforeBoot`, later ones need
//! `Running` (`controller.rs`): one enum behind one lock. An action that its state does not permit
//! is answered with 409, the state, and the remedy.
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
//! **One file per object** under `endpoints/`, and `actions.rs`; its line in `endpoints/mod.rs`
//! registers the route and its description at once. A test generates `vmm/openapi.json` from them,
//! which `GET /v1/openapi.json` serves.
//!
//! **No client input is trusted**: sizes and times are limited ([`crate::http`]), and unknown
//! fields are errors that name the field. The socket's mode, 0600, controls who may connect. A
//! client has the permissions of the process's user; for example, it can load a file into a guest
//! as its kernel.

mod controller;
mod endpoints;
mod error;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod fuzz;
mod server;
mod start;

use std::time::Duration;

/// The level of this API, in `GET /v1/vm`'s `api`.
///
/// It is incremented for changes that clients must know about. Such a change removes a field, gives
/// it another meaning, or ends support for a request. Additions do not change it: a field of a
/// response, an endpoint, an optional field of a request. Clients ignore unknown fields. A node
/// daemon adopts VMs of its own level and of the one before, so it can be updated while VMs run.
///
/// | level | since | change |
/// |---|---|---|
/// | 1 | 0.1.0 | the first |
pub const API_LEVEL: u32 = 1;

/// The number of clients that may wait for changes at a time: other clients need connections, too.
const WATCHERS_MAX: usize = 32;

/// A duration in milliseconds, with the fraction.
fn exactly(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// The description of this API as utoipa derives it; the node's description includes its
/// operations.
#[cfg(any(test, feature = "testing"))]
#[must_use]
pub fn described() -> utoipa::openapi::OpenApi {
    endpoints::described()
}

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::request_anything;
pub use server::{Server, ServerError};
pub use start::{StartRequest, Starts};

#[cfg(test)]
mod tests;
