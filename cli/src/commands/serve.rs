//! `bellhop serve`: the node daemon in the foreground.

use std::path::PathBuf;

use crate::exit::Code;
use crate::logging::Level;
use crate::node::{self, NodeError, Options, Paths};

/// Serve this node: its NICs and its virtual machines, by an API
///
/// Machines outlive the daemon: it may be stopped, killed and replaced, and the next one
/// takes over what runs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop serve
  curl --unix-socket /run/bellhop/node.socket http://node/v1/version

SIGTERM and SIGINT end the daemon; its machines go on.")]
pub(crate) struct Arguments {
    /// What is to outlive a reboot of the host
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/bellhop")]
    state_dir: PathBuf,

    /// Sockets, and what a reboot of the host may take away
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/bellhop")]
    runtime_dir: PathBuf,

    /// How much the machines' processes log, each to STATE-DIR/vms/NAME/vmm.log
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    machine_log_level: Level,

    /// Show each step to whoever listens on this Unix socket, and wait until that one lets it go on: for tests
    #[arg(long, value_name = "SOCKET", hide = true)]
    step_observer: Option<PathBuf>,
}

/// Serves until a signal comes.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, NodeError> {
    node::run(&Options {
        paths: Paths::new(&arguments.state_dir, &arguments.runtime_dir),
        log_level: arguments.machine_log_level.to_string(),
        step_observer: arguments.step_observer.clone(),
    })
}
