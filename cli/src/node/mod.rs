//! The node daemon: what operators and programs steer a host by.
//!
//! Owns the node's NICs and the life of its machines, each of which is a process of its own
//! (`bellhop run`) that outlives the daemon. It must not know rings or KVM: of a running machine
//! it knows what that machine's API says.
//!
//! ```text
//!   clients ── Unix socket ──> vmm::http ──> api/ (one file per endpoint) ──> Node (context.rs)
//!                                                                               │
//!                                                        store, machines, NICs, events
//! ```

mod api;
mod context;
mod events;
mod machines;
mod paths;
mod run;
mod store;

pub(crate) use paths::Paths;
pub(crate) use run::{NodeError, Options, run};
