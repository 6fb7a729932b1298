//! `cargo lab schemathesis [--minutes N]`: the property-based tester of OpenAPI descriptions,
//! against a node daemon in the lab host whose VMs have vDPA NICs.
//!
//! ```text
//!   this machine                                  lab host
//!   schemathesis ──TCP, loopback──▶ QEMU ──▶ socat ──▶ bellhop serve ──▶ VMs
//!   its end ──────── file `ended` ─────────▶ lab-node: keeps the VMs, checks the daemon
//! ```
//! The tester runs on this machine, because Python is slow on emulated processors. It comes from
//! Python's registry. So no other verb needs it, and this one fails at once without it.

use crate::agent::client::{self, Outcome, Streams};
use crate::error::{Error, Result};
use crate::files;
use crate::host::LabHost;
use crate::process::{die_with_parent, exit_code, output};
use crate::rig::Rig;
use crate::setup::{Lab, Needs};
use crate::verbs;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

/// The tester, which the user installs. Its settings are `tests/schemathesis.toml`.
const PROGRAM: &str = "schemathesis";

/// The version that the settings and hooks are for.
const VERSION: &str = "4.32.";

/// The port of the node in the lab host.
pub const PORT: u16 = 8077;

/// The file that ends the program in the lab host.
pub const ENDED: &str = "ended";

/// The line of the program in the lab host when the node serves and its VMs run.
pub const READY: &str = "lab-node: ready";

/// How long the program in the lab host may run before and after the test.
const AROUND: Duration = Duration::from_secs(600);

/// Arguments of `cargo lab schemathesis`.
#[derive(Debug, clap::Args)]
pub struct SchemathesisArguments {
    /// How long to test
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20,
        value_parser = clap::value_parser!(u64).range(1..=1440)
    )]
    minutes: u64,
    /// Options for `schemathesis run`, such as `--seed N`
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// Runs the tester; the exit code is 1 if it found something or the daemon did not survive.
///
/// # Errors
/// [`Error::Missing`] without the tester; those of [`Lab::prepare`], [`LabHost::boot`] and
/// [`client::run`].
pub fn schemathesis(arguments: &SchemathesisArguments) -> Result<u8> {
    let version = match output(Command::new(PROGRAM).arg("--version")) {
        Ok(version) => String::from_utf8_lossy(&version).trim().to_owned(),
        Err(Error::Start { source, .. }) => return Err(missing(&source.to_string())),
        Err(error) => return Err(error),
    };
    if !is_supported(&version) {
        return Err(missing(&version));
    }
    let lab = Lab::prepare(&Needs::HOST_AND_GUEST)?;
    // Beside the programs, so that the lab host can write there.
    let directory = lab.bellhop.with_file_name(PROGRAM);
    files::create_directory(&directory)?;
    let ended = directory.join(ENDED);
    let _ = std::fs::remove_file(&ended);
    let words = vec![
        lab.program("lab-node")?,
        directory.to_string_lossy().into_owned(),
    ];
    let execute = verbs::command(&lab, words)?;
    let mut host = LabHost::boot(&lab, Rig::Sim)?;
    let port = host.forward(PORT)?;
    let time = Duration::from_secs(60 * arguments.minutes);
    let (tested, node) = std::thread::scope(|scope| {
        let (ready, served) = mpsc::channel();
        let (lab, ended) = (&lab, &ended);
        let tester = scope.spawn(move || -> Result<u8> {
            // Without a sender the node has ended before it served.
            if served.recv().is_err() {
                return Ok(1);
            }
            let tested = test(&lab.repository, port, time, &arguments.options);
            files::write(ended, "")?;
            tested
        });
        let mut line = |_, line: &str| {
            if line == READY {
                let _ = ready.send(());
            } else {
                eprintln!("{line}");
            }
        };
        let streams = Streams::Lines(&mut line);
        let node = client::run(&mut host, execute, Some(time + AROUND), streams);
        drop(ready);
        let tested = tester
            .join()
            .unwrap_or_else(|_| Err(Error::invalid("a thread of the test", "it panicked")));
        (tested, node)
    });
    let node = node?;
    if node != Outcome::TimedOut {
        host.power_off()?;
    }
    eprintln!("lab: the daemon's log is in {}", directory.display());
    Ok(u8::from(tested? != 0 || node.exit_code() != 0))
}

/// Runs the tester against a port of this machine and returns its exit code.
fn test(repository: &Path, port: u16, time: Duration, options: &[String]) -> Result<u8> {
    let mut command = Command::new(PROGRAM);
    command
        .args(["--config-file", "tests/schemathesis.toml", "run"])
        .args(["--url", &format!("http://127.0.0.1:{port}")])
        .args(["--max-time", &time.as_secs().to_string()])
        .args(options)
        .arg("cli/node/openapi.json")
        .current_dir(repository);
    let status = die_with_parent(&mut command)
        .status()
        .map_err(|source| Error::Start {
            program: PROGRAM.into(),
            source,
        })?;
    Ok(exit_code(status))
}

/// True for a version that the settings are for, as `--version` prints it.
fn is_supported(version: &str) -> bool {
    let number = version.rsplit(' ').next().unwrap_or_default();
    number.starts_with(VERSION)
}

fn missing(found: &str) -> Error {
    Error::missing(
        format!("this test needs {PROGRAM} {VERSION}* in PATH ({found})"),
        "python3 -m venv target/venv && target/venv/bin/pip install 'schemathesis==4.32.*' && \
         PATH=$PWD/target/venv/bin:$PATH cargo lab schemathesis",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_an_error_with_the_remedy() {
        assert!(is_supported("schemathesis, version 4.32.5"));
        for other in ["schemathesis, version 4.3.2", "schemathesis", ""] {
            assert!(!is_supported(other), "{other}");
        }
        let error = missing("not found").to_string();
        assert!(error.contains("remedy: python3 -m venv"), "{error}");
        assert!(error.contains(VERSION), "{error}");
    }
}
