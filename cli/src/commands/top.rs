//! `bellhop top`: a live picture of a node: its VMs, their NICs and rings, operations and events.
//!
//! Owns the two threads. [`source`] fetches, [`picture`] draws, [`screen`] is the terminal.
//!
//! ```text
//!   thread `top`: source ── Snapshot, every 2 s or at an event ──> Shared ──> main thread: picture
//!                 <── the VM whose details are open ──────────────   └── keys <── screen
//! ```

mod picture;
mod screen;
mod source;

use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing;
use parking_lot::Mutex;

use crate::signals::StopSignals;
use picture::{Done, View};
use screen::Screen;
use source::{Snapshot, Source};

/// The interval of snapshots.
const PERIOD: Duration = Duration::from_secs(2);
/// The longest wait for a key, after which a new snapshot or size of the terminal is shown.
const TICK: Duration = Duration::from_millis(200);
const NO_TERMINAL: &str = "cannot use the terminal";

/// Watch the VMs of a node, their NICs, operations and events
///
/// The arrows select a VM, Enter shows its queues, Esc returns, q ends.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
DRIVER is ok once the guest's driver uses the NIC. COMPLETED/S counts the buffers that the device
has used. FINDINGS lists queues without progress, and NICs on their backup device.

Examples:
  bellhop top
  bellhop top --once
  bellhop top --node https://node1:8443")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    /// Print the state once as text
    #[arg(long)]
    once: bool,
}

/// The state that both threads use.
#[derive(Debug, Default)]
struct Shared {
    snapshot: Snapshot,
    /// Why the snapshot is old.
    error: Option<String>,
    /// Grows with each snapshot and error.
    version: u64,
    /// The VM whose details are open.
    open: Option<String>,
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let node = arguments.node.connect()?;
    if arguments.once {
        return listing::print(once(&node)?.as_bytes());
    }
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        let message = "top needs a terminal; --once prints the state as text";
        return Err(Error::wrong(message));
    }
    let shared = Arc::new(Mutex::new(Shared {
        // Before the terminal changes its mode, so that an error is an ordinary one.
        snapshot: Source::new(&node).snapshot(None)?,
        ..Shared::default()
    }));
    let fetching = Arc::clone(&shared);
    let thread = thread::Builder::new().name("top".to_owned());
    // It ends with the process, because a request may take long.
    let fetch = thread.spawn(move || fetch(&node, &fetching));
    fetch.map_err(Error::context("cannot start a thread"))?;
    watch(&shared).map_err(Error::context(NO_TERMINAL))?;
    Ok(Code::Success)
}

/// The picture as text.
fn once(node: &Node) -> Result<String, Error> {
    let mut snapshot = Source::new(node).snapshot(None)?;
    snapshot.read_past_events(node)?;
    Ok(picture::text(&picture::lines(&snapshot, &View::default())))
}

/// Takes snapshots until the process ends.
fn fetch(node: &Node, shared: &Mutex<Shared>) {
    let mut source = Source::new(node);
    loop {
        let waited = source.wait(PERIOD);
        let open = shared.lock().open.clone();
        let snapshot = waited.and_then(|()| source.snapshot(open.as_deref()));
        let failed = snapshot.is_err();
        {
            let mut shared = shared.lock();
            shared.error = match snapshot {
                Ok(snapshot) => {
                    shared.snapshot = snapshot;
                    None
                }
                Err(error) => Some(error.to_string()),
            };
            shared.version = shared.version.wrapping_add(1);
        }
        if failed {
            thread::sleep(PERIOD);
        }
    }
}

/// Shows snapshots until the user ends.
fn watch(shared: &Mutex<Shared>) -> io::Result<()> {
    let signals = StopSignals::note()?;
    let mut screen = Screen::enter()?;
    let mut view = View::default();
    let mut shown = None;
    while signals.received().is_none() {
        let size = screen::size()?;
        let now = (shared.lock().version, size, view.clone());
        if shown.as_ref() != Some(&now) {
            let lines = {
                let shared = shared.lock();
                let lines = picture::lines(&shared.snapshot, &view);
                let error = shared.error.as_deref().map(picture::alarm);
                error.into_iter().chain(lines).collect()
            };
            screen.draw(&picture::fitted(lines, size))?;
            shown = Some(now);
        }
        if let Some(key) = screen.key(TICK)? {
            let mut shared = shared.lock();
            if view.press(key, &shared.snapshot) == Done::Yes {
                break;
            }
            shared.open.clone_from(&view.open);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
