//! Watches a NIC being made or removed: its record goes into the store, what goes on to a terminal and the
//! log, and signals interrupt the making.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use vdpa_mgmt::nic::{Activity, LockedStore, MadeNic, Observer, Progress};

use crate::error::Error;

/// Who watches for the user.
#[derive(Debug)]
pub(super) struct Watch {
    store: LockedStore,
    terminal: bool,
    /// The last signal that came; 0 if none did.
    signal: Arc<AtomicUsize>,
}

impl Watch {
    /// From now on signals do not end the process: undoing goes on to its end.
    pub(super) fn start(store: LockedStore) -> Result<Self, Error> {
        let signal = Arc::new(AtomicUsize::new(0));
        for number in [SIGINT, SIGTERM, SIGHUP] {
            let value = usize::try_from(number).map_err(io::Error::other);
            value
                .and_then(|value| {
                    signal_hook::flag::register_usize(number, Arc::clone(&signal), value)
                })
                .map_err(Error::context("cannot catch signals"))?;
        }
        Ok(Self {
            store,
            terminal: io::stderr().is_terminal(),
            signal,
        })
    }

    pub(super) fn store(&self) -> &LockedStore {
        &self.store
    }

    /// The number of the signal that came.
    pub(super) fn signal(&self) -> Option<u8> {
        let number = u8::try_from(self.signal.load(Ordering::SeqCst)).ok();
        number.filter(|&number| number != 0)
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
            // A terminal that went away must not end what is under way.
            let _ = writeln!(io::stderr(), "{said}");
        }
    }

    fn interrupted(&mut self) -> bool {
        self.signal().is_some()
    }
}
