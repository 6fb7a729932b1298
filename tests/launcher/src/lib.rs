//! Builds the parts of the lab host, boots it and runs commands in it.
//!
//! | layer | what | here |
//! |---|---|---|
//! | L1 | this machine | [`setup`], [`host`], [`verbs`] |
//! | L2 | the lab host | crate `lab`, which speaks [`agent`]'s protocol |
//!
//! This crate must not depend on Bellhop's crates or on TLS: `cargo lab` builds it alone before it
//! shows its first line. Recipes are in `images/`.

pub mod accelerator;
pub mod agent;
pub mod areas;
pub mod cache;
pub mod cpio;
mod emulator;
pub mod endurance;
pub mod error;
pub mod figures;
pub mod files;
pub mod here;
pub mod host;
pub mod libtest;
pub mod link_backend;
pub mod module_tree;
pub mod notice;
pub mod process;
pub mod progress;
pub mod qmp;
pub mod rig;
pub mod schedstat;
pub mod setup;
pub mod soak_run;
pub mod verbs;

pub use error::{Error, Result};
