//! Snapshots: a machine in a directory.
//!
//! Owns what belongs to a whole snapshot, and what may be different where it is restored. It must not know how a
//! part of the machine is saved, nor how the files are laid out ([`crate::snapshot`]).

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use super::error::SnapshotError;
use super::saved::SavedMachine;
use crate::config::{NoSuchNic, VdpaConfig, VmConfig};
use crate::memory::GuestRam;
use crate::snapshot::directory::{NewSnapshot, STATE_FILE_MAX, Snapshot as Files};
use crate::snapshot::format::Sections;
use crate::snapshot::memory_image::{self, MemoryDigest};

/// A snapshot that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Bytes of guest memory that take room on the disk.
    pub memory_bytes: u64,
    /// How long the guest stood still.
    pub paused: Duration,
}

/// A snapshot before the machine stands still for it.
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

    /// Writes all of it; returns the bytes of memory that take room. Nothing is left if it fails.
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
        // In blocks of 512 bytes, whatever the file system's are (stat(3type)).
        Ok(memory.map_or(0, |memory| memory.blocks().saturating_mul(512)))
    }
}

/// A snapshot that was read but for the memory.
#[derive(Debug)]
pub struct Snapshot {
    files: Files,
    pub(super) machine: SavedMachine,
    digest: MemoryDigest,
    pub(super) paused: bool,
}

impl Snapshot {
    /// Opens the snapshot in the directory `path` and reads all but the memory.
    ///
    /// # Errors
    /// [`SnapshotError`]: it is none, is damaged, or of a version that is not understood.
    pub fn open(path: &Path) -> Result<Self, SnapshotError> {
        let files = Files::open(path)?;
        let mut sections = Sections::read(&mut files.state(), STATE_FILE_MAX)?;
        let machine = SavedMachine::take(&mut sections)?;
        let digest = sections.take()?;
        sections.finish()?;
        Ok(Self {
            files,
            machine,
            digest,
            paused: false,
        })
    }

    /// The configuration of the machine that will be restored.
    #[must_use]
    pub fn config(&self) -> &VmConfig {
        &self.machine.config
    }

    /// Says where a NIC is here. What else `nic` says counts too; its `id` is that of the NIC.
    ///
    /// # Errors
    /// [`SnapshotError::NoNic`].
    pub fn replace_nic(&mut self, nic: VdpaConfig) -> Result<(), SnapshotError> {
        let replaced = self.machine.config.replace_nic(nic);
        replaced.map_err(|NoSuchNic { id, has }| SnapshotError::NoNic { id, has })
    }

    /// Whether the vCPUs are to stay parked.
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
