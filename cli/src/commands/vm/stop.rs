//! `bellhop vm stop`.

use std::time::Duration;

use bellhop_api::machine::WantedState;
use bellhop_api::node::VmPhase;
use bellhop_common::client::{Node, path};
use bellhop_common::error::Error;
use bellhop_common::exit::{Code, Report};
use bellhop_common::listing::Format;
use hyper::Method;

use super::{change_state, each, of_vm, until, vm};
use crate::confirm::Confirmation;

/// Have a VM's guest power off, or with --force end the VM without asking it
///
/// The VM and its NICs stay, and it does not run again until `bellhop vm start`, also after a reboot of the host.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The power button is pressed, and the guest's end waited for. A guest that does not listen to it (no acpid, no
systemd, an early boot) has to be stopped with --force: as if its power was cut.

Examples:
  bellhop vm stop web
  bellhop vm stop web --time-limit 300 || bellhop vm stop web --force")]
pub(crate) struct Arguments {
    /// The VMs, stopped one after the other
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    /// Do not ask the guest
    #[arg(long)]
    force: bool,

    /// How long the guest may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60, conflicts_with = "force", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    time_limit: u64,

    #[command(flatten)]
    confirmation: Confirmation,
}

impl Arguments {
    /// Asks the user if the guest is not asked.
    pub(super) fn confirm(&self) -> Result<(), Error> {
        if !self.force {
            return Ok(());
        }
        let names = self.names.join(", ");
        let question = format!("End {names} without asking its guest, like a power cut?");
        self.confirmation.ask(question)
    }
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    each(&arguments.names, |name| stop(arguments, name, node, format))
}

fn stop(arguments: &Arguments, name: &str, node: &Node, format: Format) -> Result<Code, Error> {
    if !arguments.force {
        let (before, _) = vm(node, name)?;
        if before.phase == VmPhase::Paused {
            return Err(Error::failed(format!(
                "the guest of {name} cannot power off while it is paused: `bellhop vm resume \
                 {name}` lets it go on, and `bellhop vm stop --force {name}` does not ask it"
            )));
        }
        if before.pid.is_some() {
            let button = format!("{}{}", of_vm(name), path(["power-button"]));
            node.change(Method::POST, &button)?;
            let limit = arguments.time_limit;
            let gone = until(Duration::from_secs(limit), || {
                let (now, _) = vm(node, name)?;
                // A process that a restart policy has put in its place is not it.
                let is_gone = now.pid != before.pid || now.phase == VmPhase::Stopped;
                Ok(is_gone.then_some(()))
            })?;
            if gone.is_none() {
                let message = format!("the guest of {name} has not powered off within {limit} s");
                let hint = format!(
                    "it goes on; `bellhop vm console {name}` shows what it does, and `bellhop vm stop --force {name}` ends it"
                );
                Report::from_messages([message]).hint(hint).print();
                return Ok(Code::TimedOut);
            }
        }
    }
    // Also if it has ended by itself: it is not to be started again.
    change_state(node, name, WantedState::Stopped, format)
}
