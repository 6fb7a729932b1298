//! `cargo lab run [--rig RIG] [--timeout S] -- CMD…`: runs one command in the lab host and forwards
//! standard streams, signals and the exit status.

use crate::agent::client::{self, Streams};
use crate::error::Result;
use crate::here;
use crate::host::LabHost;
use crate::rig::Rig;
use crate::setup::{Lab, Needs};
use crate::verbs;
use std::time::Duration;

/// Arguments of `cargo lab run`.
#[derive(Debug, clap::Args)]
pub struct RunArguments {
    /// The lab host's equipment
    #[arg(long, value_enum, default_value_t)]
    rig: Rig,
    /// End the command after so many seconds, with exit code 124
    #[arg(long, value_name = "S")]
    timeout: Option<u64>,
    #[command(flatten)]
    here: here::HereArguments,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Runs the command and returns its exit code.
///
/// # Errors
/// Those of [`Lab::prepare`], [`LabHost::boot`] and [`client::run`].
pub fn run(arguments: &RunArguments) -> Result<u8> {
    let timeout = arguments.timeout.map(Duration::from_secs);
    let lab = Lab::prepare(&Needs::HOST_AND_GUEST)?;
    let execute = verbs::command(&lab, arguments.command.clone())?;
    if arguments.here.is_wanted() {
        return here::run(&execute, timeout);
    }
    let mut host = LabHost::boot(&lab, arguments.rig)?;
    let outcome = client::run(&mut host, execute, timeout, Streams::Own)?;
    if outcome == client::Outcome::TimedOut {
        // If the command did not end, the host may not switch off either: dropping it kills it.
        return Ok(outcome.exit_code());
    }
    host.power_off()?;
    Ok(outcome.exit_code())
}
