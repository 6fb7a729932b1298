//! The state directory to which the VMs of a runtime directory belong.
//!
//! ```text
//!   STATE/node.redb   ID          made with the file, stays with it
//!   RUNTIME/owner     ID, STATE   written by each daemon that starts; gone after a reboot
//!   RUNTIME/vms/NAME  the mark of a VM's process
//! ```
//! A record is written before the process starts and deleted after it ended. So a process without
//! one means that the daemon has other records: an empty directory, or an old copy. The file system
//! may not be mounted. Then the daemon must not start, because it would end guests or start them
//! twice.
//!
//! Owns the file `owner`.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use bellhop_common::private_file;

use super::Machines;
use super::host::end;
use super::process::{self, Identity};
use super::spec::VmName;
use crate::error::Error;
use crate::paths::Paths;

/// The maximum size of the file, in bytes: an ID and a path.
const OWNER_MAX: u64 = 8192;
/// How many VMs an error names.
const SHOWN: usize = 8;

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owner {
    id: String,
    state: String,
}

impl Owner {
    /// None if the file does not exist. A damaged one belongs to no state directory.
    fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = match fs::File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut text = Vec::new();
        file.take(OWNER_MAX).read_to_end(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        let (id, state) = text.trim_end().split_once(' ').unwrap_or_default();
        Ok(Some(Self {
            id: id.to_owned(),
            state: state.to_owned(),
        }))
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        private_file::replace(path, format!("{} {}\n", self.id, self.state).as_bytes())
    }
}

impl Machines {
    /// Checks that the VMs that run are those of this daemon's records. With `end_orphans` it ends
    /// the others.
    ///
    /// # Errors
    /// Other VMs run, or cannot be ended; then nothing was changed in the directories.
    pub(crate) fn claim_runtime(&self, end_orphans: bool) -> Result<(), Error> {
        let has = |name: &str| {
            let name = name.parse::<VmName>();
            name.is_ok_and(|name| self.entries().contains_key(&name))
        };
        claim(&self.paths, &self.store.id()?, has, end_orphans)
    }
}

fn claim(
    paths: &Paths,
    id: &str,
    has: impl Fn(&str) -> bool,
    end_orphans: bool,
) -> Result<(), Error> {
    let unusable = || format!("cannot use {}", paths.owner().display());
    let state = std::path::absolute(paths.state()).map_err(Error::context(unusable()))?;
    let ours = Owner {
        id: id.to_owned(),
        state: state.display().to_string(),
    };
    let owner = Owner::read(&paths.owner()).map_err(Error::context(unusable()))?;
    let other = owner.filter(|owner| owner.id != ours.id);
    let runs = processes(paths).map_err(Error::context("cannot look for running VMs"))?;
    let orphans: Vec<(String, Identity)> = runs
        .into_iter()
        .filter(|(name, _)| other.is_some() || !has(name))
        .collect();
    if !orphans.is_empty() && !end_orphans {
        return Err(refused(paths, &ours, other.as_ref(), &orphans));
    }
    for (vm, identity) in orphans {
        tracing::warn!(vm, pid = identity.pid, "ending a VM without a record");
        let cannot = format!("cannot end the VM {vm}, which has no record");
        end(identity).map_err(Error::context(cannot))?;
    }
    ours.write(&paths.owner())
        .map_err(Error::context(unusable()))
}

/// The processes of VMs of this runtime directory, by the VM's name.
fn processes(paths: &Paths) -> io::Result<Vec<(String, Identity)>> {
    let below: PathBuf = paths.runtime().join("vms");
    let marked = process::all_marked()?.into_iter();
    let named = marked.filter_map(|(mark, identity)| {
        // Any process can have any mark. A name of a VM has no `..`.
        let name: VmName = mark.strip_prefix(&below).ok()?.to_str()?.parse().ok()?;
        Some((name.to_string(), identity))
    });
    Ok(named.collect())
}

fn refused(
    paths: &Paths,
    ours: &Owner,
    other: Option<&Owner>,
    orphans: &[(String, Identity)],
) -> Error {
    let named = orphans.iter().take(SHOWN);
    let mut names: Vec<String> = named
        .map(|(name, identity)| format!("{name} (process {})", identity.pid))
        .collect();
    if let Some(more @ 1..) = orphans.len().checked_sub(SHOWN) {
        names.push(format!("{more} more"));
    }
    let remedy = match other.map(|owner| owner.state.as_str()) {
        Some("") => "name their state directory with --state-dir".to_owned(),
        Some(state) if state != ours.state => format!(
            "they belong to the state directory {state}: mount it, or name it with --state-dir"
        ),
        _ => "restore the newest copy of node.redb".to_owned(),
    };
    Error::failed(format!(
        "VMs run in {} without a record in the state directory {}: {}; {remedy}. To end these VMs \
         instead, start the daemon once with --end-orphans",
        paths.runtime().display(),
        ours.state,
        names.join(", "),
    ))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A runtime directory with one process that stands for a VM.
    struct Rig {
        directory: PathBuf,
        child: Child,
    }

    impl Rig {
        fn new(test: &str) -> Self {
            let name = format!("node-ownership-{test}-{}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&directory);
            let paths = Paths::new(&directory.join("a"), &directory.join("run"));
            paths.make().unwrap();
            let mark = paths.runtime_of(&"web".parse().unwrap());
            let mut child = Command::new("sleep");
            let child = child.arg("60").env("BELLHOP_VM", mark).spawn().unwrap();
            // The mark is in its environment from exec on.
            while processes(&paths).unwrap().is_empty() {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            Self { directory, child }
        }

        /// Starts a daemon with this state directory, ID and records.
        fn claim(&self, state: &str, records: &[&str], end_orphans: bool) -> Result<(), Error> {
            let paths = Paths::new(&self.directory.join(state), &self.directory.join("run"));
            claim(&paths, state, |name| records.contains(&name), end_orphans)
        }

        fn lives(&mut self) -> bool {
            self.child.try_wait().unwrap().is_none()
        }

        fn refuses(&mut self, state: &str, records: &[&str], text: &str) {
            let error = self.claim(state, records, false).unwrap_err().to_string();
            let named = format!("web (process {})", self.child.id());
            for text in [text, &named, "--end-orphans"] {
                assert!(error.contains(text), "{text}: {error}");
            }
            assert!(self.lives());
        }
    }

    impl Drop for Rig {
        fn drop(&mut self) {
            // Unless its status was taken: then another process may have its number.
            if let Ok(None) = self.child.try_wait() {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
            let _ = fs::remove_dir_all(&self.directory);
        }
    }

    #[test]
    fn a_daemon_without_the_records_ends_no_vm() {
        let mut rig = Rig::new("records");
        // The first daemon with this file; the runtime directory has no owner yet.
        rig.refuses("a", &[], "restore the newest copy");
        rig.claim("a", &["web"], false).unwrap();
        rig.claim("a", &["web", "other"], false).unwrap();
        // An old copy of the records.
        rig.refuses("a", &["other"], "restore the newest copy");
        assert!(rig.lives());
    }

    #[test]
    fn another_state_directory_has_other_vms_of_the_same_name() {
        let mut rig = Rig::new("other");
        rig.claim("a", &["web"], false).unwrap();
        let owner = rig.directory.join("a").display().to_string();
        rig.refuses("b", &["web"], &owner);
        // The refusal changed nothing.
        rig.claim("a", &["web"], false).unwrap();
        // A damaged file belongs to no directory.
        fs::write(rig.directory.join("run/owner"), [0xff; 20_000]).unwrap();
        rig.refuses("a", &["web"], "--state-dir");
    }

    #[test]
    fn orphans_end_on_request_and_a_directory_without_vms_is_free() {
        let rig = Rig::new("ends");
        rig.claim("a", &["web"], false).unwrap();
        rig.claim("b", &[], true).unwrap();
        let paths = Paths::new(&rig.directory.join("b"), &rig.directory.join("run"));
        assert!(processes(&paths).unwrap().is_empty());
        for state in ["a", "b", "a"] {
            rig.claim(state, &[], false).unwrap();
        }
    }
}
