//! Bellhop's lab: a disposable virtual host with real KVM and real vDPA
//! drivers, and what tests need inside of it.
//!
//! | layer | what | here |
//! |---|---|---|
//! | L1 | this machine | [`setup`], [`host`], [`verbs`] |
//! | L2 | the lab host | [`agent`], [`sim`], [`sriov`], [`labnic`] and the tests |
//! | L3 | a guest that Bellhop runs in L2 | [`guest`] |
//!
//! Knows Bellhop only as a program on a path. Recipes are in `images/`.

pub mod accelerator;
pub mod agent;
pub mod api;
pub mod areas;
pub mod cable;
pub mod cache;
pub mod cpio;
pub mod endurance;
pub mod error;
pub mod evidence;
pub mod files;
pub mod guest;
pub mod here;
pub mod host;
pub mod journey;
pub mod kvm_events;
pub mod kvm_glimpse;
pub mod kvm_statistics;
pub mod labnic;
pub mod libtest;
pub mod messages;
pub mod module_tree;
pub mod netdevsim;
pub mod netlink_tap;
pub mod node;
pub mod notice;
pub mod openapi;
pub mod place;
pub mod process;
pub mod progress;
pub mod qmp;
pub mod restored;
pub mod rig;
pub mod setup;
pub mod sim;
pub mod sriov;
pub mod threads;
pub mod tiny;
pub mod traffic;
pub mod verbs;
pub mod vmm_process;

pub use error::{Error, Result};
