//! Who watches a NIC being made or removed: keeps the record, shows progress, may interrupt.

use std::io;

use super::phase::Phase;
use super::record::MadeNic;

/// What goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity<'a> {
    /// A phase begins: this is done, to or with the named thing.
    Begin(Phase, &'a str),
    /// A phase is done.
    End(Phase),
    /// The kernel is waited for.
    Wait(&'a str),
    /// A step is undone.
    Undo(&'a str),
    /// Something is left as others have changed it, or because they use it, and why.
    Leave(&'a str),
}

/// What goes on with which NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The NIC's name.
    pub name: &'a str,
    /// What goes on.
    pub activity: Activity<'a>,
}

/// Who watches.
pub trait Observer {
    /// Keeps the record. It must be in a safe place when this returns: what comes next is not done
    /// before. A record without steps need not be kept.
    ///
    /// # Errors
    /// What the place says; nothing more is done then, and what was done is undone.
    fn keep(&mut self, nic: &MadeNic) -> io::Result<()>;

    /// Hears what goes on.
    fn progress(&mut self, _progress: &Progress<'_>) {}

    /// Whether to stop and undo what was done. It is asked when a phase begins, when it is done, and
    /// while something is waited for; not while steps are undone.
    fn interrupted(&mut self) -> bool {
        false
    }
}

/// Keeps no record and shows nothing: for NICs that live no longer than their process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn keep(&mut self, _: &MadeNic) -> io::Result<()> {
        Ok(())
    }
}
