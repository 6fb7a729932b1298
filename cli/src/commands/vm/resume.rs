//! `bellhop vm resume`.

use bellhop_api::machine::WantedState;

use super::{change_state, vm};
use crate::client::Node;
use crate::error::Error;
use crate::exit::Code;
use crate::listing::Format;

/// Let a VM that is paused go on
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
A VM that is stopped is not started: that is `bellhop vm start`.

Examples:
  bellhop vm resume web")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let name = &arguments.name;
    let (view, _) = vm(node, name)?;
    if view.pid.is_none() {
        let phase = view.phase;
        return Err(Error::failed(format!(
            "the VM {name} is not paused, it is {phase}: `bellhop vm start {name}` starts it"
        )));
    }
    change_state(node, name, WantedState::Running, format)
}
