//! The verbs of `cargo lab`, one file each, and the command line.

pub mod bench;
pub mod clean;
pub mod demo;
pub mod package;
pub mod run;
pub mod schemathesis;
pub mod setup;
pub mod shell;
pub mod soak;
pub mod test;

use crate::agent::protocol::Execute;
use crate::error::{Error, Result};
use crate::setup::{Lab, binaries};
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
    /// Remove the lab's cache
    Clean(clean::CleanArguments),
    /// The main job, end to end: a guest with a vDPA NIC
    Demo(demo::DemoArguments),
    /// Package bellhop: deb, tarball, debug information, SBOM, checksums
    Package(package::PackageArguments),
    /// Prepare the lab: packages, root, kernel modules, guest kernel, ramdisks, programs
    Setup(setup::SetupArguments),
    /// Run a command as root in the lab host
    Run(run::RunArguments),
    /// Test the node's API with schemathesis, which you install
    Schemathesis(schemathesis::SchemathesisArguments),
    /// An interactive shell in the lab host
    Shell(shell::ShellArguments),
    /// Run every test in full, the long proofs included
    Soak(soak::SoakArguments),
    /// Run the gate of the project's tests, those that need a kernel in the lab host
    Test(test::TestArguments),
}

/// Parses the command line and runs the verb.
pub fn main() -> ExitCode {
    if let Some(error) = binaries::rustc_with_counters() {
        eprintln!("lab: cannot start the compiler: {error}");
        return ExitCode::FAILURE;
    }
    let result = match Arguments::parse().verb {
        Verb::Bench(arguments) => bench::bench(&arguments),
        Verb::Clean(arguments) => clean::clean(&arguments),
        Verb::Demo(arguments) => demo::demo(&arguments),
        Verb::Package(arguments) => package::package(&arguments),
        Verb::Setup(arguments) => setup::setup(&arguments),
        Verb::Run(arguments) => run::run(&arguments),
        Verb::Schemathesis(arguments) => schemathesis::schemathesis(&arguments),
        Verb::Shell(arguments) => shell::shell(&arguments),
        Verb::Soak(arguments) => soak::soak(&arguments),
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

/// A program of the project that reads this process's command line again, after the verb.
///
/// # Errors
/// Those of [`command`] and [`Lab::program`].
pub(crate) fn own_command(lab: &Lab, program: &str) -> Result<Execute> {
    let mut words = vec![lab.program(program)?];
    words.extend(std::env::args().skip(2));
    command(lab, words)
}

/// A command for the lab host, in this process's directory and with the lab's environment.
///
/// # Errors
/// [`Error::Missing`] when the current directory is not shared with the host.
pub(crate) fn command(lab: &Lab, arguments: Vec<String>) -> Result<Execute> {
    let directory = std::env::current_dir().map_err(Error::system("find the current directory"))?;
    // Elsewhere the host's files differ from this machine's.
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
    // Each `bellhop run` of a test confines itself. One without a sandbox still has its filters.
    for variable in ["BELLHOP_SANDBOX", "BELLHOP_SECCOMP"] {
        environment
            .entry(variable.into())
            .or_insert_with(|| "on".into());
    }
    Ok(Execute {
        arguments,
        environment,
        directory: directory.to_string_lossy().into_owned(),
        held: vec![lab.bellhop.to_string_lossy().into_owned()],
        terminal: None,
    })
}
