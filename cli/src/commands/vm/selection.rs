//! The VMs that a command acts on: by name, by their labels, or all.

use bellhop_api::Items;
use bellhop_api::node::{Selector, Vm};
use bellhop_common::client::{Node, with_query};
use bellhop_common::error::Error;

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
pub(super) struct Selection {
    /// The VMs
    #[arg(
        value_name = "NAME",
        required_unless_present_any = ["selector", "all"],
        conflicts_with_all = ["selector", "all"]
    )]
    names: Vec<String>,

    /// All VMs with these labels, such as tier=web,env
    ///
    /// KEY=VALUE, or KEY with any value, with commas between.
    #[arg(short = 'l', long, value_name = "LABELS", conflicts_with = "all")]
    selector: Option<Selector>,

    /// All VMs of this node
    #[arg(long)]
    all: bool,
}

impl Selection {
    /// The names of the selected VMs.
    ///
    /// # Errors
    /// The daemon is unreachable, or no VM has the labels.
    pub(super) fn names(&self, node: &Node) -> Result<Vec<String>, Error> {
        if !self.names.is_empty() {
            return Ok(self.names.clone());
        }
        let label = self.selector.as_ref().map(ToString::to_string);
        let found: Items<Vm> = node.get(&with_query("/v1/vms", [("label", label)]))?;
        if let (Some(selector), true) = (&self.selector, found.items.is_empty()) {
            return Err(Error::not_there(format!("no VM has the labels {selector}")));
        }
        Ok(found.items.into_iter().map(|vm| vm.name).collect())
    }
}
