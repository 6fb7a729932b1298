//! What every source gets, and the directories of machines.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bellhop_common::client::{Address, Credentials};

use super::bundle::Bundle;
use crate::doctor::Host;

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

/// The entries of a directory with one for each machine, by name; nothing is missing if it is not
/// there.
pub(super) fn of_each_machine(
    directory: &Path,
    what: &str,
    bundle: &mut Bundle,
) -> Vec<(String, PathBuf)> {
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
