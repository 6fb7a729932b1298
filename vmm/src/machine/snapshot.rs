//! Snapshots: a machine in a directory.
//!
//! Owns the content of a complete snapshot, and what may differ where it is restored. It must not
//! know how a part of the machine is saved, nor how the files are laid out ([`crate::snapshot`]).

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::error::SnapshotError;
use super::saved::{SavedMachine, check_functions};
use crate::config::{DeviceSource, NoSuchNic, VdpaConfig, VfioConfig, VmConfig};
use crate::memory::GuestRam;
use crate::snapshot::directory::{NewSnapshot, STATE_FILE_MAX, Snapshot as Files};
use crate::snapshot::format::Sections;
use crate::snapshot::memory_image::{self, MemoryDigest};

/// A completed snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Bytes of guest memory that occupy disk space.
    pub memory_bytes: u64,
    /// How long the guest was stopped.
    pub paused: Duration,
}

/// A snapshot before the machine is quiesced for it.
pub(super) struct SnapshotWriter(NewSnapshot);

impl SnapshotWriter {
    /// # Errors
    /// [`SnapshotError::Relative`], [`SnapshotError::Create`].
    pub(super) fn new(path: &Path) -> Result<Self, SnapshotError> {
        if !path.is_absolute() {
            return Err(SnapshotError::Relative(path.to_owned()));
        }
        Ok(Self(NewSnapshot::create(path)?))
    }

    /// Writes the whole snapshot and returns the bytes of memory that occupy disk space. A failure
    /// leaves no files.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(super) fn write(
        self,
        machine: &SavedMachine,
        ram: &GuestRam,
    ) -> Result<u64, SnapshotError> {
        let Self(files) = self;
        let digest = memory_image::save(ram, files.memory())?;
        let mut sections = machine.sections()?;
        sections.put(&digest)?;
        sections.write(&mut files.state())?;
        let memory = files.memory().metadata();
        files.commit()?;
        // In blocks of 512 bytes, whatever the file system's block size (stat(3type)).
        Ok(memory.map_or(0, |memory| memory.blocks().saturating_mul(512)))
    }
}

/// A snapshot, read except for the memory.
#[derive(Debug)]
pub struct Snapshot {
    files: Files,
    pub(super) machine: SavedMachine,
    digest: MemoryDigest,
    pub(super) paused: bool,
}

impl Snapshot {
    /// Opens the snapshot in the directory `path` and reads everything but the memory.
    ///
    /// # Errors
    /// [`SnapshotError`]: there is no snapshot, or it is damaged or of an unknown version.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        let files = Files::open(path)?;
        let mut sections = Sections::read(&mut files.state(), STATE_FILE_MAX)?;
        let machine = SavedMachine::take(&mut sections)?;
        let views = machine.views.iter().map(|function| function.id.as_str());
        check_functions(&machine.config.vfio, views)?;
        let digest = sections.take()?;
        sections.finish()?;
        Ok(Self {
            files,
            machine,
            digest,
            paused: false,
        })
    }

    /// Returns the configuration of the machine that will be restored.
    #[must_use]
    pub fn config(&self) -> &VmConfig {
        &self.machine.config
    }

    /// Replaces the configuration of the NICs and functions with these names, including their
    /// devices on this host, but not `iommu=on` of a NIC. Each function must be among `functions`.
    /// All other files and devices that the snapshot names must be `allowed`, or lie below an
    /// allowed directory: anyone may have written the snapshot.
    ///
    /// # Errors
    /// [`SnapshotError::NoNic`], [`SnapshotError::NoFunction`], [`SnapshotError::NotGiven`],
    /// [`SnapshotError::NotAllowed`].
    pub fn adapt(
        &mut self,
        nics: Vec<VdpaConfig>,
        functions: &[VfioConfig],
        allowed: &[PathBuf],
    ) -> Result<(), SnapshotError> {
        let config = &mut self.machine.config;
        place_functions(config, functions)?;
        let mut given: BTreeSet<String> = BTreeSet::new();
        for nic in nics {
            given.insert(nic.name());
            let replaced = config.restore_nic(nic);
            replaced.map_err(|NoSuchNic { id, has }| SnapshotError::NoNic { id, has })?;
        }
        // Of two NICs with one name, only the first was replaced.
        let theirs = config.vdpa.iter().filter(|nic| !given.remove(&nic.name()));
        let devices = theirs.flat_map(|nic| {
            let device = match &nic.source {
                DeviceSource::Path(path) => Some(path.as_path()),
                DeviceSource::Number(_) | DeviceSource::Descriptor(_) => None,
            };
            device.into_iter().chain(nic.backup.as_deref())
        });
        let mut refused: Vec<PathBuf> = Vec::new();
        for path in config.files().chain(devices) {
            if !is_allowed(path, allowed) && !refused.iter().any(|one| one == path) {
                refused.push(path.to_owned());
            }
        }
        if refused.is_empty() {
            Ok(())
        } else {
            Err(SnapshotError::NotAllowed(refused))
        }
    }

    /// Sets whether the vCPUs stay parked.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// # Errors
    /// [`SnapshotError::RestoreMemory`].
    pub(super) fn read_memory(&self, ram: &GuestRam) -> Result<(), SnapshotError> {
        let memory = self.files.memory();
        Ok(memory_image::restore(ram, memory, &self.digest)?)
    }
}

/// Gives each function of a snapshot the one of this host that has its name.
fn place_functions(config: &mut VmConfig, ours: &[VfioConfig]) -> Result<(), SnapshotError> {
    let has: Vec<String> = config.vfio.iter().map(VfioConfig::name).collect();
    if let Some(id) = ours
        .iter()
        .map(VfioConfig::name)
        .find(|id| !has.contains(id))
    {
        return Err(SnapshotError::NoFunction { id, has });
    }
    match config.place_functions(ours) {
        missing if missing.is_empty() => Ok(()),
        missing => Err(SnapshotError::NotGiven(missing)),
    }
}

/// Whether `allowed` has this path, or a directory above it.
fn is_allowed(path: &Path, allowed: &[PathBuf]) -> bool {
    let climbs = path.components().any(|part| part == Component::ParentDir);
    let Ok(absolute) = std::path::absolute(path) else {
        return false;
    };
    allowed.iter().any(|allowed| {
        let below = std::path::absolute(allowed).is_ok_and(|above| absolute.starts_with(above));
        path == allowed || (below && !climbs)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_function_of_a_snapshot_gets_one_of_the_caller() {
        // Anyone may have written it: these paths are never opened.
        let theirs = r#"{"kernel": "k", "vfio": [{"path": "/sys/theirs", "id": "a"},
            {"path": "/sys/theirs", "id": "b", "allow_pf": true}]}"#;
        let config: VmConfig = serde_json::from_str(theirs).unwrap();
        let place = |names: &[&str]| {
            let parse = |id: &&str| format!("path=/sys/ours,id={id}").parse().unwrap();
            let ours: Vec<VfioConfig> = names.iter().map(parse).collect();
            let mut config = config.clone();
            place_functions(&mut config, &ours)
                .map(|()| assert_eq!(config.vfio, ours))
                .map_err(|error| error.to_string())
        };
        place(&["a", "b"]).unwrap();
        let none = place(&[]).unwrap_err();
        assert!(
            none.contains("--vfio host=ADDRESS,id=a --vfio host=ADDRESS,id=b"),
            "{none}"
        );
        let one = place(&["b"]).unwrap_err();
        assert!(one.contains(",id=a") && !one.contains(",id=b"), "{one}");
        let more = place(&["a", "b", "c"]).unwrap_err();
        assert!(more.contains("no VFIO device c; it has a, b"), "{more}");
    }

    #[test]
    fn a_path_is_allowed_by_itself_or_by_a_directory_above_it() {
        let allowed = |path: &str, by: &str| is_allowed(path.as_ref(), &[PathBuf::from(by)]);
        for (path, by) in [
            ("/a/b", "/a/b"),
            ("/a/b", "/a"),
            ("/a/b", "/a/"),
            ("/a//b", "/a/b"),
            ("/a/../b", "/a/../b"),
            ("b", "b"),
            ("./b", "b"),
        ] {
            assert!(allowed(path, by), "{path} by {by}");
        }
        for (path, by) in [
            ("/a/b", "/a/bc"),
            ("/a/bc", "/a/b"),
            ("/a/../etc/shadow", "/a"),
            ("/a/b/..", "/a/b"),
            ("/a/b", ""),
            ("", "/"),
            ("/a", "a"),
        ] {
            assert!(!allowed(path, by), "{path} by {by}");
        }
        assert!(!is_allowed("/a".as_ref(), &[]));
    }
}
