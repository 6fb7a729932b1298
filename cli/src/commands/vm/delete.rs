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

/// Delete a VM, and take back all that was made for it
///
/// Its NICs go back to where they were made of. Its disks' files stay.
#[derive(Debug, clap::Args)]
#[command(
    visible_aliases = ["rm", "remove"],
    after_long_help = "\
If something cannot be undone the command says what, and can be run again.

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

    /// Also if it runs; its guest is not asked
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    confirmation: Confirmation,
}

impl Arguments {
    /// Requests confirmation from the user.
    pub(super) fn confirm(&self, names: &[String]) -> Result<(), Error> {
        let names = names.join(", ");
        let question = format!("Delete {names} and the NICs made for them?");
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
