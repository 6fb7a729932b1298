//! The node daemon: manages the VMs and NICs of a host.
//!
//! Owns the node's NICs and the life of its VMs. Each VM is a process of its own (`bellhop run`)
//! that outlives the daemon. It must not know rings or KVM: it reaches a running VM only through
//! that VM's API.
//!
//! ```text
//!   clients ── Unix socket ──> vmm::http ──> api/ (one file per endpoint) ──> Node (context.rs)
//!                                                                               │
//!           ── TCP, TLS ────> access/ (access control) ──^       store, machines, NICs, events
//! ```

#![cfg_attr(
    feature = "fuzz",
    allow(
        dead_code,
        clippy::unwrap_used,
        clippy::expect_used,
        reason = "models of the tests"
    )
)]

mod access;
mod api;
mod consoles;
mod context;
#[cfg(test)]
#[path = "../../../tests/fuzz/shared/corpus.rs"]
mod corpus;
mod error;
mod events;
mod logs;
mod machines;
mod paths;
mod peers;
mod remove;
mod run;
mod snapshots;
mod store;
mod systemd;
mod watcher;

pub use access::{AccessFiles, CertificateFiles, Token, Tokens};
pub use api::API_LEVEL;
#[cfg(any(test, feature = "fuzz"))]
pub use api::request_anything;
pub use error::Error;
pub use machines::sandbox::{BadUsers, VmUsers};
pub use machines::spec::file as vm_file;
pub use paths::Paths;
pub use peers::{check, is_node};
pub use run::{Options, run};
