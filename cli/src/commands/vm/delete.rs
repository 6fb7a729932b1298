//! `bellhop vm delete`.

use bellhop_api::node::VmPhase;
use bellhop_common::client::{MAKING, Node};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use hyper::Method;

use super::{of_vm, vm};
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
  bellhop vm delete web --force"
)]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// Also if it runs; its guest is not asked
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    confirmation: Confirmation,
}

impl Arguments {
    /// Asks the user.
    pub(super) fn confirm(&self) -> Result<(), Error> {
        let name = &self.name;
        let question = format!("Delete the VM {name} and the NICs made for it?");
        self.confirmation.ask(question)
    }
}

pub(super) fn execute(arguments: &Arguments, node: &Node) -> Result<Code, Error> {
    let name = &arguments.name;
    if !arguments.force {
        let (view, _) = vm(node, name)?;
        // One that is half made, or half taken away, is to go without more questions.
        if view.pid.is_some()
            && matches!(
                view.phase,
                VmPhase::Running | VmPhase::Paused | VmPhase::Unknown
            )
        {
            return Err(Error::failed(format!(
                "the VM {name} runs: `bellhop vm stop {name}` has its guest power off first, and \
                 `bellhop vm delete --force {name}` does not ask it"
            )));
        }
    }
    node.change_within(Method::DELETE, &of_vm(name), MAKING)?;
    Ok(Code::Success)
}
