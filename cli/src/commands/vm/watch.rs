//! Shows on a terminal the progress of a VM's creation.
//!
//! A thread polls on a connection of its own, because the request for the VM is answered only at
//! its end. If standard error is not a terminal, it shows nothing.

use std::io::{self, IsTerminal as _};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bellhop_api::node::Vm;
use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::text::printable;

use super::of_vm;
use crate::progress::ProgressLine;

/// The polling interval.
const PERIOD: Duration = Duration::from_millis(250);
/// The delay of the first line: shorter work needs none.
const AT_ONCE: Duration = Duration::from_millis(500);

/// Shows a VM's progress until it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    /// The thread ends when this is dropped.
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
            // The thread has no result.
            let _ = thread.join();
        }
    }
}

/// The VM's progress, as far as the daemon reports it.
fn line(node: &Node, name: &str, since: Duration) -> String {
    let seconds = since.as_secs();
    let view = node.get::<Vm>(&of_vm(name));
    let phase = view.map_or_else(|_| "waiting".to_owned(), |vm| vm.status.phase.to_string());
    format!("{}: {phase} … {seconds} s", printable(name))
}
