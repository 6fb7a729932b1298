//! Helpers for tests, the demo and the benches inside the lab host: a disposable virtual host with
//! real KVM and real vDPA drivers.
//!
//! | layer | what | here |
//! |---|---|---|
//! | L1 | this machine | crate `launcher` |
//! | L2 | the lab host | [`agent`], [`sim`], [`sriov`], [`labnic`] and the tests |
//! | L3 | a guest that Bellhop runs in L2 | [`guest`] |
//!
//! This crate knows Bellhop only as a program on a path.

pub mod api;
pub mod bench;
pub mod demo;
pub mod emulator;
pub mod endurance;
pub mod evidence;
pub mod guest;
pub mod igb;
pub mod kvm_events;
pub mod kvm_statistics;
pub mod kvm_trace;
pub mod labnic;
#[cfg(test)]
mod language;
#[cfg(test)]
mod manual;
pub mod messages;
pub mod netdevsim;
pub mod netlink_tap;
pub mod node;
pub mod openapi;
pub mod restored;
pub mod sim;
pub mod small_file_system;
pub mod sriov;
pub mod swnic;
pub mod temp_path;
pub mod threads;
pub mod tiny;
pub mod traffic;
pub mod vmm_process;

// Shared by both sides. The launcher owns it, because it is built first.
pub use launcher::{
    Error, Result, agent, error, figures, files, libtest, notice, process, qmp, rig, schedstat,
    soak_run,
};
