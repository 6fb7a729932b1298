//! Snapshots: a machine in a directory, and where a machine comes from.
//!
//! Owns what belongs to a whole snapshot, and what may be different where it is restored. It must not know how a
//! part of the machine is saved, nor how the files are laid out ([`crate::snapshot`]).

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::hand_over::HandedOver;
use super::migration::{Arriving, Migration};
use super::saved::SavedMachine;
use crate::config::{NoSuchNic, VdpaConfig, VmConfig};
use crate::memory::GuestRam;
use crate::snapshot::directory::{
    CreateError, NewSnapshot, OpenError, STATE_FILE_MAX, Snapshot as Files,
};
use crate::snapshot::format::{ReadError, Sections, WriteError};
use crate::snapshot::memory_image::{self, MemoryDigest};
use crate::{Error, ErrorKind};

/// Why a snapshot cannot be written, or a machine not be restored from one.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The process that serves may have another working directory than who asks.
    #[error("{} is no absolute path", .0.display())]
    Relative(PathBuf),
    /// The directory cannot be made.
    #[error("the snapshot cannot be made")]
    Create(#[from] CreateError),
    /// The directory is no snapshot.
    #[error("there is no snapshot to restore")]
    Open(#[from] OpenError),
    /// The state cannot be written.
    #[error("the snapshot's state cannot be written")]
    Write(#[from] WriteError),
    /// The state is damaged, or of another version.
    #[error("the snapshot's state cannot be used")]
    Read(#[from] ReadError),
    /// A descriptor for the state cannot be made or read.
    #[error("cannot hand over the machine's state")]
    Descriptor(#[source] io::Error),
    /// Guest memory cannot be written.
    #[error("the guest's memory cannot be saved")]
    SaveMemory(#[from] memory_image::SaveError),
    /// Guest memory is damaged, or that of another guest.
    #[error("the guest's memory cannot be restored")]
    RestoreMemory(#[from] memory_image::RestoreError),
    /// The configuration in it is none.
    #[error("the snapshot's configuration cannot be used")]
    Config(#[source] serde_json::Error),
    /// Not as many vCPUs as the configuration says.
    #[error("the snapshot has {saved} vCPUs and its configuration {configured}")]
    Vcpus {
        /// States of vCPUs.
        saved: usize,
        /// What the configuration says.
        configured: usize,
    },
    /// A slot that there is not, or one for two.
    #[error(
        "the snapshot has its device {id} in PCI slot {slot}: there is no such slot, or another device has it or its name"
    )]
    Slot {
        /// The device's name.
        id: String,
        /// The slot's number.
        slot: u8,
    },
    /// No NIC of the snapshot has this name.
    #[error("the snapshot has no NIC {id}{}", known(.has))]
    NoNic {
        /// The name.
        id: String,
        /// Those that there are.
        has: Vec<String>,
    },
    /// A device was saved that the configuration does not have.
    #[error("the snapshot has a device {0} that its configuration does not have")]
    NoDevice(String),
    /// The configuration has a device that was not saved.
    #[error("the snapshot has no state of the device {0}")]
    DeviceNotSaved(String),
    /// A device of the board does not take its state.
    #[error("a device of the board cannot be restored")]
    Platform(#[from] devices::Error),
    /// The host bridge does not take its state.
    #[error("the host bridge cannot be restored")]
    HostBridge(#[source] devices::Error),
    /// A device does not take its state.
    #[error("device {id} cannot be restored")]
    Device {
        /// Its name.
        id: String,
        /// Why.
        #[source]
        source: devices::Error,
    },
}

impl SnapshotError {
    /// What a snapshot cannot be for; the rest is the host's fault.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::SaveMemory(_) | Self::Write(_) => ErrorKind::Host,
            Self::Create(CreateError::Io { source, .. })
                if !matches!(
                    source.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::NotADirectory
                        | io::ErrorKind::PermissionDenied
                        | io::ErrorKind::ReadOnlyFilesystem
                ) =>
            {
                ErrorKind::Host
            }
            _ => ErrorKind::Unusable,
        }
    }
}

impl From<SnapshotError> for Error {
    fn from(source: SnapshotError) -> Self {
        Self::transparent(source.kind(), source)
    }
}

fn known(names: &[String]) -> String {
    if names.is_empty() {
        return ", nor any other".to_owned();
    }
    format!("; it has {}", names.join(", "))
}

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
    machine: SavedMachine,
    digest: MemoryDigest,
    paused: bool,
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

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    pub(super) fn machine(&self) -> &SavedMachine {
        &self.machine
    }

    /// # Errors
    /// [`SnapshotError::RestoreMemory`].
    pub(super) fn read_memory(&self, ram: &GuestRam) -> Result<(), SnapshotError> {
        let memory = self.files.memory();
        Ok(memory_image::restore(ram, memory, &self.digest)?)
    }
}

/// Where a machine comes from.
#[derive(Debug)]
pub enum Origin {
    /// It boots.
    Boot(VmConfig),
    /// It goes on where a snapshot of it was taken.
    Snapshot(Box<Snapshot>),
    /// It goes on from another program.
    HandedOver(Box<HandedOver>),
    /// It comes from another process, on this host or another one.
    Migration(Box<Arriving>),
}

impl Origin {
    /// What the machine is like; `None` as long as only its source knows it.
    #[must_use]
    pub fn config(&self) -> Option<&VmConfig> {
        match self {
            Self::Boot(config) => Some(config),
            Self::Snapshot(snapshot) => Some(snapshot.config()),
            Self::HandedOver(handed_over) => Some(handed_over.config()),
            Self::Migration(_) => None,
        }
    }

    /// How it comes, if it does.
    #[must_use]
    pub fn migration(&self) -> Option<&Migration> {
        match self {
            Self::Migration(arriving) => Some(arriving.migration()),
            Self::Boot(_) | Self::Snapshot(_) | Self::HandedOver(_) => None,
        }
    }

    pub(crate) fn into_config(self) -> Option<VmConfig> {
        match self {
            Self::Boot(config) => Some(config),
            Self::Snapshot(snapshot) => Some(snapshot.machine.config),
            Self::HandedOver(handed_over) => Some(handed_over.into_config()),
            Self::Migration(_) => None,
        }
    }
}
