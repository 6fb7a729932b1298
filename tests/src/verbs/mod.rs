//! The verbs of `cargo lab`, one file each, and the command line.

pub mod bench;
pub mod demo;
pub mod moves;
pub mod run;
pub mod setup;
pub mod shell;
pub mod test;

use crate::agent::protocol::Execute;
use crate::error::{Error, Result};
use crate::setup::Lab;
use clap::{Parser, Subcommand};
use std::collections::BTreeMap;
use std::process::ExitCode;

/// Bellhop's lab: a disposable host with real KVM and real vDPA drivers.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab", version)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// What the lab can do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Measure in the lab host
    Bench(bench::BenchArguments),
    /// The main job, end to end: a guest with a vDPA NIC
    Demo(demo::DemoArguments),
    /// Move guests to and fro at random moments, 200 times each
    Moves(moves::MovesArguments),
    /// Prepare the lab: packages, root, kernel modules, guest kernel, ramdisks
    Setup(setup::SetupArguments),
    /// Run a command as root in the lab host
    Run(run::RunArguments),
    /// An interactive shell in the lab host
    Shell(shell::ShellArguments),
    /// Run the project's tests, those that need a kernel in the lab host
    Test(test::TestArguments),
}

/// Parses the command line and does what it says.
pub fn main() -> ExitCode {
    let result = match Arguments::parse().verb {
        Verb::Bench(arguments) => bench::bench(&arguments),
        Verb::Demo(arguments) => demo::demo(&arguments),
        Verb::Moves(arguments) => moves::moves(&arguments),
        Verb::Setup(arguments) => setup::setup(&arguments),
        Verb::Run(arguments) => run::run(&arguments),
        Verb::Shell(arguments) => shell::shell(&arguments),
        Verb::Test(arguments) => test::test(&arguments),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("lab: {}", crate::error::report(&error));
            // Not 1, which a command or a failing test gives.
            ExitCode::from(125)
        }
    }
}

/// A command for the lab host: in this process's directory, with the lab's
/// environment.
///
/// # Errors
/// [`Error::Missing`] when the current directory is not shared with the host.
pub(crate) fn command(lab: &Lab, arguments: Vec<String>) -> Result<Execute> {
    let directory = std::env::current_dir().map_err(Error::system("find the current directory"))?;
    // Elsewhere the host has other files than this machine.
    let directory = if directory.starts_with(&lab.repository) {
        directory
    } else {
        lab.repository.clone()
    };
    let mut environment: BTreeMap<String, String> = std::env::vars()
        .filter(|(name, _)| {
            ["TERM", "COLORTERM"].contains(&name.as_str())
                || ["RUST_", "BELLHOP_", "LAB_"]
                    .iter()
                    .any(|prefix| name.starts_with(prefix))
        })
        .collect();
    environment.extend(lab.environment()?);
    environment.insert("BELLHOP_LAB".into(), "host".into());
    Ok(Execute {
        arguments,
        environment,
        directory: directory.to_string_lossy().into_owned(),
        held: vec![lab.bellhop.to_string_lossy().into_owned()],
        terminal: None,
    })
}
