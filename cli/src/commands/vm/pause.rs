//! `bellhop vm pause`.

use bellhop_api::machine::WantedState;

use super::change_state;
use crate::client::Node;
use crate::error::Error;
use crate::exit::Code;
use crate::listing::Format;

/// Park a VM's vCPUs
///
/// Devices go on with what they have to do; their interrupts wait.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm pause web
  bellhop vm resume web")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    change_state(node, &arguments.name, WantedState::Paused, format)
}
