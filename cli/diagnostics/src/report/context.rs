//! The parameters of every source, and the directories of VMs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bellhop_common::client::{Address, Credentials};

use super::bundle::Bundle;
use crate::doctor::Host;

/// The addresses and files that sources may use.
#[derive(Debug)]
pub struct Context {
    /// The host whose files are read.
    pub host: Host,
    /// The daemon that is queried.
    pub node: Address,
    /// The credentials for a daemon on another host.
    pub credentials: Credentials,
    /// The directory of the VMs' logs.
    pub state_dir: PathBuf,
    /// The directory of the VMs' sockets, for a host without a daemon.
    pub runtime_dir: PathBuf,
    /// Whether to include the guests' console output.
    pub console: bool,
}

/// The entries of a directory with one for each VM, by name; a directory that does not exist is not
/// a missing part.
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
