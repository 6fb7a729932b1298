//! `bellhop vm reset`, `bellhop vm nmi`: requests without cooperation of the guest.

use bellhop_common::client::{Node, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use hyper::Method;
use serde_json::json;

use super::each;
use super::selection::Selection;
use crate::confirm::Confirmation;

/// Reset VMs: their guests reboot in place at once
///
/// As with a reset button, the guest loses all data that it has not written to a disk. A paused VM
/// stays paused at its first instruction.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm reset web
  bellhop vm reset web db --yes")]
pub(crate) struct Arguments {
    #[command(flatten)]
    selection: Selection,

    #[command(flatten)]
    confirmation: Confirmation,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let names = &arguments.selection.names(node)?;
    let question = format!("Reset {} without asking its guest?", names.join(", "));
    arguments.confirmation.ask(question)?;
    press(names, "reset", node, format)
}

/// Presses a button of each of these VMs.
pub(super) fn press(
    names: &[String],
    button: &str,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    each(names, |name| {
        node.change(Method::POST, &path(["v1", "vms", name, button]))?;
        format.print_done(&json!({ "name": name, button: true }))
    })
}
