//! The observer of creating or removing a NIC: stores the record, shows progress, may interrupt.

use std::io;

use super::phase::Phase;
use super::record::MadeNic;

/// A current activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity<'a> {
    /// A phase begins, on the named object.
    Begin(Phase, &'a str),
    /// A phase is finished.
    End(Phase),
    /// Waits for the kernel.
    Wait(&'a str),
    /// Undoes a step.
    Undo(&'a str),
    /// Leaves a setting unchanged, because others have changed it or use it; with the reason.
    Leave(&'a str),
}

/// The activity on a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The NIC's name.
    pub name: &'a str,
    /// The activity.
    pub activity: Activity<'a>,
}

/// An observer.
pub trait Observer {
    /// Stores the record. It must be in a safe place when this returns: the next step is done only
    /// afterwards. A record without steps need not be kept.
    ///
    /// # Errors
    /// The record could not be stored; nothing more is done then, and earlier steps are undone.
    fn keep(&mut self, nic: &MadeNic) -> io::Result<()>;

    /// Receives the progress.
    fn progress(&mut self, _progress: &Progress<'_>) {}

    /// Whether to stop and undo the steps. It is called when a phase begins, when it is finished,
    /// and during waits; not during undoing.
    fn interrupted(&mut self) -> bool {
        false
    }
}

/// Stores no record and shows nothing: for NICs that live no longer than their process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn keep(&mut self, _: &MadeNic) -> io::Result<()> {
        Ok(())
    }
}
