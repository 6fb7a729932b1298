//! `bellhop vm stop`.

use std::time::Duration;

use bellhop_api::machine::WantedState;
use bellhop_api::node::{GRACE_PERIOD_MAX_S, GRACE_PERIOD_S, StopMode, VmStateChange};
use bellhop_common::client::{MAKING, Node};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use hyper::Method;

use super::selection::Selection;
use super::{each, of_state, say};
use crate::confirm::Confirmation;
use crate::units::seconds;

/// Power off a VM's guest, or with --force end the VM at once
///
/// The command stops several VMs one after the other. Each keeps its NICs and stays stopped until
/// `bellhop vm start`, also after a reboot of the host.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The daemon presses the power button and waits until the guest has powered off. From then on no
restart policy starts the VM, also if this command is interrupted or the guest takes longer. A guest
that ignores the button (no acpid, no systemd, an early boot) needs --force, which is like a power
cut. While the guest still runs, `bellhop vm start` cancels the stop.

Examples:
  bellhop vm stop web
  bellhop vm stop -l tier=web
  bellhop vm stop web --timeout 5m || bellhop vm stop web --force")]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) selection: Selection,

    /// End the VM without asking its guest
    #[arg(long)]
    force: bool,

    /// Time limit for the guest, such as 90s or 10m; without a unit in seconds
    #[arg(
        long,
        alias = "time-limit",
        value_name = "DURATION",
        default_value_t = GRACE_PERIOD_S,
        conflicts_with = "force",
        value_parser = seconds(1..=GRACE_PERIOD_MAX_S)
    )]
    timeout: u32,

    #[command(flatten)]
    confirmation: Confirmation,
}

impl Arguments {
    /// Requests confirmation from the user, if the guest gets no request to power off.
    pub(super) fn confirm(&self, names: &[String]) -> Result<(), Error> {
        if !self.force {
            return Ok(());
        }
        let names = names.join(", ");
        let question = format!("End {names} without asking its guest, like a power cut?");
        self.confirmation.ask(question)
    }
}

pub(super) fn execute(
    arguments: &Arguments,
    names: &[String],
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    each(names, |name| stop(arguments, name, node, format))
}

fn stop(arguments: &Arguments, name: &str, node: &Node, format: Format) -> Result<Code, Error> {
    let (mode, grace) = if arguments.force {
        (StopMode::Hard, None)
    } else {
        (StopMode::Graceful, Some(arguments.timeout))
    };
    let change = VmStateChange {
        mode: Some(mode),
        grace_period_s: grace,
        ..WantedState::Stopped.into()
    };
    let grace = Duration::from_secs(grace.unwrap_or_default().into());
    let asked = node.send(
        Method::PUT,
        &of_state(name),
        &change,
        MAKING.saturating_add(grace),
    );
    let (_, answer) = asked.map_err(|error| {
        let still_runs = format!(
            "the VM keeps running: `bellhop vm console {name}` shows its output, and `bellhop vm \
             stop --force {name}` ends it"
        );
        let paused = format!(
            "`bellhop vm resume {name}` resumes it, and `bellhop vm stop --force {name}` ends it \
             without asking its guest"
        );
        error
            .advise("still_runs", still_runs)
            .advise("paused", paused)
    })?;
    say(&answer, format)
}
