//! What becomes of a machine while it is made, on a terminal.
//!
//! A thread of its own looks, with a connection of its own: the one that asked for the machine has its answer
//! at the end only. Nothing is shown where standard error is no terminal.

use std::io::{self, IsTerminal as _};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bellhop_api::node::VmInfo;
use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::text::printable;

use super::of_vm;
use crate::progress::ProgressLine;

/// Between two looks.
const PERIOD: Duration = Duration::from_millis(250);
/// What takes no longer than this is not worth a line.
const AT_ONCE: Duration = Duration::from_millis(500);

/// Shows how far a machine is, until it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    /// The thread ends when this is gone.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(which: &NodeArguments, name: &str) -> Self {
        let (end, ended) = mpsc::channel();
        let thread = io::stderr().is_terminal().then(|| {
            let (which, name) = (which.clone(), name.to_owned());
            std::thread::spawn(move || {
                let Ok(node) = which.connect() else { return };
                let start = Instant::now();
                let mut progress = ProgressLine::new();
                while ended.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                    if start.elapsed() >= AT_ONCE {
                        progress.show(line(&node, &name, start.elapsed()));
                    }
                }
            })
        });
        Self {
            end: Some(end),
            thread,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // It has nothing to tell.
            let _ = thread.join();
        }
    }
}

/// How far it is, as far as the daemon can say.
fn line(node: &Node, name: &str, since: Duration) -> String {
    let seconds = since.as_secs();
    let view = node.get::<VmInfo>(&of_vm(name));
    let phase = view.map_or_else(|_| "waiting".to_owned(), |vm| vm.phase.to_string());
    format!("{}: {phase} … {seconds} s", printable(name))
}
