//! A machine that stands still: for what, and how it was before.
//!
//! Owns the words. It must not know how a machine comes to stand still, nor how it resumes.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::saved::SavedDevice;

/// What a machine stands still for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeldFor {
    /// A snapshot is written, or another program takes the machine over.
    Snapshot,
    /// It is being sent, or has come, and it is not settled yet where its guest is to run.
    Migration,
}

/// A machine between its save and its going on.
pub(super) struct Held {
    pub(super) devices: Vec<SavedDevice>,
    /// Whether its vCPUs ran before.
    pub(super) ran: bool,
    pub(super) held_for: HeldFor,
    /// Whether it comes from another host: its devices have not seen their states yet, or did not take them.
    pub(super) arrived: Option<Arrived>,
}

/// Where devices of a machine are that comes from another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrived {
    /// They have not seen their states.
    AtRest,
    /// One did not take its state: they are at rest again, and some may have worked before.
    Tried,
}

/// A machine that stands still for another program.
#[derive(Debug)]
pub struct HandOver {
    /// The program that is to go on with it.
    pub program: PathBuf,
    /// The sections of the machine's state, at their beginning.
    pub state: File,
    /// Guest RAM.
    pub ram: File,
    /// KVM's side of the machine as it was here. KVM tears it down, which takes long, when the last
    /// descriptor closes: the other program closes this one after the guest runs again.
    pub vm: OwnedFd,
}
