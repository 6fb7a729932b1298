//! `bellhop vm delete`.

use bellhop_common::client::{MAKING, Node, Refusal};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use hyper::Method;
use serde_json::json;

use super::selection::Selection;
use super::{each, of_vm};
use crate::confirm::Confirmation;

/// Delete a VM, and the devices that were created for it
///
/// Its NICs return to their former state. The files of its disks stay.
#[derive(Debug, clap::Args)]
#[command(
    visible_aliases = ["rm", "remove"],
    after_long_help = "\
If a step cannot be undone, the command names it. You can run it again.

Examples:
  bellhop vm stop web && bellhop vm delete web
  bellhop vm delete web db --force
  bellhop vm delete web --if-exists
  bellhop vm delete -l env=test --force"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) selection: Selection,

    /// Succeed if there is no such VM
    #[arg(long)]
    if_exists: bool,

    /// Delete a running VM too, without asking its guest
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    confirmation: Confirmation,
}

impl Arguments {
    /// Requests confirmation from the user.
    pub(super) fn confirm(&self, names: &[String]) -> Result<(), Error> {
        let names = names.join(", ");
        let question = format!("Delete {names} and the NICs created for them?");
        self.confirmation.ask(question)
    }
}

pub(super) fn execute(
    arguments: &Arguments,
    names: &[String],
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    each(names, |name| {
        let deleted = match delete(arguments, name, node) {
            Err(error)
                if arguments.if_exists && error.refusal().is_some_and(Refusal::is_not_there) =>
            {
                false
            }
            ended => ended.map(|()| true)?,
        };
        format.print_done(&json!({ "name": name, "deleted": deleted }))
    })
}

fn delete(arguments: &Arguments, name: &str, node: &Node) -> Result<(), Error> {
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
    Ok(())
}
