//! Watches the creation or removal of a NIC. It stores the NIC's record and reports the steps on a
//! terminal and in the log. A signal interrupts the creation.

use std::io::{self, IsTerminal as _, Write as _};

use bellhop_common::error::Error;
use vdpa_mgmt::nic::{Activity, LockedStore, MadeNic, Observer, Progress};

use crate::signals::StopSignals;

/// The observer of the steps for the user.
#[derive(Debug)]
pub(crate) struct Watch {
    store: LockedStore,
    terminal: bool,
    signals: StopSignals,
}

impl Watch {
    /// From now on signals do not end the process, so a rollback runs to its end.
    pub(crate) fn start(store: LockedStore) -> Result<Self, Error> {
        Ok(Self {
            store,
            terminal: io::stderr().is_terminal(),
            signals: StopSignals::note().map_err(Error::context("cannot catch signals"))?,
        })
    }

    pub(crate) fn store(&self) -> &LockedStore {
        &self.store
    }

    /// Releases the lock of the store. The signals still do not end the process.
    pub(crate) fn release(self) -> StopSignals {
        self.signals
    }

    /// The number of the received signal.
    pub(crate) fn signal(&self) -> Option<u8> {
        self.signals.received()
    }
}

impl Observer for Watch {
    fn keep(&mut self, nic: &MadeNic) -> io::Result<()> {
        self.store.keep(nic)
    }

    fn progress(&mut self, progress: &Progress<'_>) {
        let name = progress.name;
        let said = match progress.activity {
            Activity::Begin(phase, what) => format!("{name}: {phase} ({what})"),
            Activity::Wait(what) => format!("{name}: waiting for {what}"),
            Activity::Undo(what) => format!("{name}: undoing {what}"),
            Activity::Leave(why) => format!("{name}: leaving {why}"),
            Activity::End(_) => return,
        };
        tracing::info!("{said}");
        if self.terminal {
            // A closed terminal must not end the running work.
            let _ = writeln!(io::stderr(), "{said}");
        }
    }

    fn interrupted(&mut self) -> bool {
        self.signal().is_some()
    }
}
