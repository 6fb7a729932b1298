//! `bellhop vm delete`.

use bellhop_common::client::{MAKING, Node};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use hyper::Method;

use super::of_vm;

/// Delete a VM, and take back all that was made for it
///
/// Its NICs go back to where they were made of. Its disks' files stay.
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "remove",
    after_long_help = "\
If something cannot be undone the command says what, and can be run again.

Examples:
  bellhop vm stop web && bellhop vm delete web
  bellhop vm delete web --force"
)]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// Also if it runs; its guest is not asked
    #[arg(long)]
    force: bool,
}

pub(super) fn execute(arguments: &Arguments, node: &Node) -> Result<Code, Error> {
    let name = &arguments.name;
    let force = if arguments.force { "?force=true" } else { "" };
    let at = format!("{}{force}", of_vm(name));
    let deleted = node.change_within(Method::DELETE, &at, MAKING);
    deleted.map_err(|error| {
        let hint = format!(
            "`bellhop vm stop {name}` has its guest power off first, and \
             `bellhop vm delete --force {name}` does not ask it"
        );
        error.advise("vm_runs", hint)
    })?;
    Ok(Code::Success)
}
