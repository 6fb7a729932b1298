//! A bundle for a support ticket: what is known about this host, its devices and its machines, in one
//! `.tar.gz`.
//!
//! Each source is one file with a function that adds to the [`Bundle`]; `SOURCES` is the list of them.
//! A part that cannot be had is said in `errors.txt` with the reason, and the others come all the same:
//! a bundle is asked for when something does not work. Sources change nothing, open no vDPA device, and
//! wait for a limited time. Secrets are not in what they read: tokens and keys are in files that no source
//! opens.

mod bundle;
mod devices;
mod host;
mod logs;
mod machines;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use bellhop_common::client::{Address, Credentials};

use crate::doctor::Host;

pub use bundle::Bundle;

/// What is asked, and what may be read.
#[derive(Debug)]
pub struct Context {
    /// The host whose files are read.
    pub host: Host,
    /// The daemon that is asked.
    pub node: Address,
    /// With what, if it is on another host.
    pub credentials: Credentials,
    /// Where the daemon keeps its machines' logs.
    pub state_dir: PathBuf,
    /// Where the sockets of machines are, for when there is no daemon.
    pub runtime_dir: PathBuf,
    /// With what guests have said on their consoles.
    pub console: bool,
}

type Source = fn(&Context, &mut Bundle);

/// Where parts come from, in their order.
const SOURCES: [Source; 4] = [host::add, devices::add, machines::add, logs::add];

/// Everything that can be had, as it is now.
#[must_use]
pub fn collect(context: &Context, now: SystemTime) -> Bundle {
    let time = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut bundle = Bundle::new(time);
    for source in SOURCES {
        source(context, &mut bundle);
    }
    bundle
}

/// The entries of a directory with one for each machine, by name; nothing is missing if it is not
/// there.
fn of_each_machine(directory: &Path, what: &str, bundle: &mut Bundle) -> Vec<(String, PathBuf)> {
    match fs::read_dir(directory) {
        Ok(entries) => entries
            .flatten()
            .map(|entry| {
                (
                    entry.file_name().to_string_lossy().into_owned(),
                    entry.path(),
                )
            })
            .collect(),
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                bundle.miss(what, &format!("{}: {error}", directory.display()));
            }
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests;
