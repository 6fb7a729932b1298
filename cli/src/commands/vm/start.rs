//! `bellhop vm start`.

use bellhop_api::machine::WantedState;

use super::change_state;
use crate::client::Node;
use crate::error::Error;
use crate::exit::Code;
use crate::listing::Format;

/// Start a VM that is stopped
///
/// From now on it is to run: also after it has crashed, by its restart policy, and after a reboot of the host.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
A VM that runs is left alone; one that is paused goes on. One that may run elsewhere since it was migrated is not started:
`bellhop vm migrate NAME --settle here|there` says first where it is.

Examples:
  bellhop vm start web")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    change_state(node, &arguments.name, WantedState::Running, format)
}
