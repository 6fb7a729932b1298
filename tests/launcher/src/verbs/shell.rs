//! `cargo lab shell [--rig RIG]`: an interactive shell in the lab host, on a terminal of its own.

use crate::agent::client::{self, Streams};
use crate::error::{Error, Result};
use crate::host::LabHost;
use crate::rig::Rig;
use crate::setup::{Lab, Needs};
use crate::verbs;

/// Arguments of `cargo lab shell`.
#[derive(Debug, clap::Args)]
pub struct ShellArguments {
    /// The lab host's equipment
    #[arg(long, value_enum, default_value_t)]
    rig: Rig,
}

/// Runs the shell and returns its exit code.
///
/// # Errors
/// [`Error::Missing`] without a terminal; else as [`verbs::run::run`].
pub fn shell(arguments: &ShellArguments) -> Result<u8> {
    let size = client::terminal_size().ok_or_else(|| {
        Error::missing(
            "an interactive shell needs a terminal",
            "use `cargo lab run -- CMD` in scripts",
        )
    })?;
    let lab = Lab::prepare(&Needs::HOST_AND_GUEST)?;
    let mut execute = verbs::command(&lab, vec!["bash".into(), "-i".into()])?;
    execute.terminal = Some(size);
    // The user of a shell rebuilds Bellhop meanwhile and wants to run the new build.
    execute.held.clear();
    let mut host = LabHost::boot(&lab, arguments.rig)?;
    eprintln!(
        "lab: {} processors, kernel {}; changes outside the repository are lost at the end",
        host.hello().processors,
        host.hello().kernel
    );
    let outcome = client::run(&mut host, execute, None, Streams::Own)?;
    host.power_off()?;
    Ok(outcome.exit_code())
}
