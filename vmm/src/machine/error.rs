//! Errors of requests, of snapshots and restores, and of migrations.
//!
//! Owns the texts. The API chooses the HTTP status for them.

use std::io;
use std::path::PathBuf;

use super::end::End;
use super::pluggable::{DeviceKind, OtherKind};
use crate::snapshot::directory::{CreateError, OpenError};
use crate::snapshot::format::{ReadError, WriteError};
use crate::snapshot::memory_image;
use crate::vcpu::VcpuReport;
use crate::{Error, ErrorKind};

/// Maximum number of waiting requests.
pub(super) const WAITING_MAX: usize = 16;

/// Why a request failed. The machine is as before.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The machine is gone.
    #[error("the machine has ended")]
    Ended,
    /// The machine is gone, and the reason is known.
    #[error("the machine has ended: {}", .0.detail)]
    EndedBy(End),
    /// Too many requests wait.
    #[error("the machine has {WAITING_MAX} requests waiting; try again later")]
    Busy,
    /// A device of the machine has this name.
    #[error("the machine has a device {0} already; choose another id")]
    IdInUse(String),
    /// No device of the machine has this name.
    #[error("the machine has no device {0}")]
    NoSuchDevice(String),
    /// The device exists, but is not of the requested kind.
    #[error("device {id} is not a {wanted}")]
    OtherKind {
        /// Its name.
        id: String,
        /// The requested kind.
        wanted: DeviceKind,
    },
    /// The NIC is already on the device that was named as its replacement.
    #[error("the NIC {0} already uses that device: name another one to replace it")]
    OwnBackup(String),
    /// The NIC's driver does not run, or did not negotiate GUEST_ANNOUNCE.
    #[error(
        "the guest's driver of {0} cannot announce it: it does not run, or lacks GUEST_ANNOUNCE"
    )]
    NoAnnouncement(String),
    /// The pages that a device writes cannot be recorded, or the device cannot be restored
    /// afterwards.
    #[error("cannot record the memory that device {id} writes")]
    DirtyLog {
        /// Its name.
        id: String,
        /// The cause.
        source: devices::Error,
    },
    /// A NIC's device was not replaced.
    #[error("cannot move network device {id}")]
    Swap {
        /// The NIC's name.
        id: String,
        /// The cause, and the state of the device.
        source: devices::Error,
    },
    /// The machine cannot do it: the device cannot be opened or plugged, or KVM refuses.
    #[error(transparent)]
    Device(#[from] Error),
    /// A snapshot is being written: changes to guest memory have to wait.
    #[error("a snapshot of the machine is being written; try again when it is done")]
    Saving,
    /// The machine is being sent: devices cannot be added or removed, and no other operation may
    /// save it.
    #[error(
        "the machine is migrating to another host; try again when the migration is over (DELETE \
         /v1/vm/migration cancels it)"
    )]
    Migrating,
    /// It is quiesced for a migration.
    #[error(
        "the machine is stopped for a migration. If GET /v1/vm/migration reports that the guest's \
         location is unknown, resolve it: PATCH /v1/vm/migration {{\"resolve\": \"Here\"}} or \
         {{\"resolve\": \"There\"}}"
    )]
    Quiesced,
    /// There is nothing to resolve.
    #[error("the machine is not stopped for a migration: its guest's location is known")]
    Resolved,
    /// It cannot leave this host.
    #[error("cannot migrate the machine to another host")]
    NotMovable(#[from] NotMovable),
    /// A device cannot be saved. The machine continues.
    #[error("cannot save device {id}")]
    Save {
        /// Its name.
        id: String,
        /// The cause.
        source: devices::Error,
    },
    /// The machine has a function of the host whose state cannot be saved, or which another program
    /// cannot open.
    #[error(
        "the machine cannot be saved or upgraded in place with VFIO device {id}: {why}; unplug it \
         first (DELETE /v1/vm/vfio/{id}), or use a vDPA device"
    )]
    NotSavable {
        /// Its name.
        id: String,
        /// The reason.
        why: String,
    },
    /// The storage of a removed disk does not answer, so guest memory may still change.
    #[error("the storage of a removed disk does not answer: try again when it does")]
    HungDisk,
    /// The snapshot cannot be written. The machine continues.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The host removes a device, which the machine still has.
    #[error(
        "the host has removed the device of {0}; try again when the guest has ejected {0} or it is \
         on its backup device, or reset the machine"
    )]
    Removed(String),
    /// A vCPU cannot continue, so there is nothing to save: the machine ends.
    #[error("the guest crashed: {0}")]
    Crashed(VcpuReport),
    /// The machine cannot be woken.
    #[error("cannot reach the machine's thread")]
    Wake(#[source] io::Error),
}

impl From<OtherKind> for RequestError {
    fn from(OtherKind { id, wanted }: OtherKind) -> Self {
        Self::OtherKind { id, wanted }
    }
}

/// Why a snapshot cannot be written, or a machine cannot be restored from one.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The path is relative, and the serving process may have another working directory than the
    /// client.
    #[error("{} is not an absolute path", .0.display())]
    Relative(PathBuf),
    /// The directory cannot be created.
    #[error("cannot create the snapshot")]
    Create(#[from] CreateError),
    /// The directory is no snapshot.
    #[error("there is no snapshot to restore")]
    Open(#[from] OpenError),
    /// The state cannot be written.
    #[error("cannot write the snapshot's state")]
    Write(#[from] WriteError),
    /// The state is damaged, or of another version.
    #[error("cannot use the snapshot's state")]
    Read(#[from] ReadError),
    /// A part of a function's state is malformed.
    #[error("cannot use the early state of a function")]
    Early(#[source] postcard::Error),
    /// A descriptor for the state cannot be created or read.
    #[error("cannot hand over the machine's state")]
    Descriptor(#[source] io::Error),
    /// Guest memory cannot be written.
    #[error("cannot save the guest's memory")]
    SaveMemory(#[from] memory_image::SaveError),
    /// Guest memory is damaged, or that of another guest.
    #[error("cannot restore the guest's memory")]
    RestoreMemory(#[from] memory_image::RestoreError),
    /// The configuration in it is invalid.
    #[error("cannot use the snapshot's configuration")]
    Config(#[source] serde_json::Error),
    /// The number of vCPUs differs from that of the configuration.
    #[error("the snapshot has {saved} vCPUs, but its configuration has {configured}")]
    Vcpus {
        /// Saved vCPU states.
        saved: usize,
        /// vCPUs in the configuration.
        configured: usize,
    },
    /// A slot does not exist, or two devices have it.
    #[error(
        "the snapshot puts its device {id} in PCI slot {slot}: there is no such slot, or another \
         device has it or its name"
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
        /// The NICs of the snapshot.
        has: Vec<String>,
    },
    /// No function of the snapshot has this name.
    #[error("the snapshot has no VFIO device {id}{}", known(.has))]
    NoFunction {
        /// The name.
        id: String,
        /// The functions of the snapshot.
        has: Vec<String>,
    },
    /// The caller did not name functions of this host for those of the snapshot.
    #[error(
        "the snapshot has VFIO devices without a function of this host; name one for each: {} (in \
         the API `vfio`)",
        .0.iter().map(|id| format!("--vfio host=ADDRESS,id={id}")).collect::<Vec<_>>().join(" ")
    )]
    NotGiven(Vec<String>),
    /// A function of this host is not like the one of the snapshot.
    #[error(
        "VFIO device {id} cannot continue from the snapshot: {why}; name a function of the same \
         model and driver: --vfio host=ADDRESS,id={id} (in the API `vfio`)"
    )]
    OtherFunction {
        /// Its name.
        id: String,
        /// The difference.
        why: String,
    },
    /// The snapshot names files that the caller did not allow.
    #[error(
        "the snapshot names files of this host that are not allowed: {}; if the guest may use \
         them, allow each with --allow-path PATH (in the API `allow_paths`)",
        .0.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NotAllowed(Vec<PathBuf>),
    /// A device was saved that the configuration does not have.
    #[error("the snapshot has a device {0} that its configuration does not have")]
    NoDevice(String),
    /// The configuration has a device that was not saved.
    #[error("the snapshot has no state of the device {0}")]
    DeviceNotSaved(String),
    /// A device of the board rejects its state.
    #[error("cannot restore a device of the board")]
    Platform(#[from] devices::Error),
    /// The host bridge rejects its state.
    #[error("cannot restore the host bridge")]
    HostBridge(#[source] devices::Error),
    /// A device rejects its state.
    #[error("cannot restore device {id}")]
    Device {
        /// Its name.
        id: String,
        /// The cause.
        #[source]
        source: devices::Error,
    },
}

impl SnapshotError {
    /// Distinguishes an unusable snapshot from a failure of the host.
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

vdpa::error_from!(SnapshotError as error => error.kind());

fn known(names: &[String]) -> String {
    if names.is_empty() {
        return ", nor any other".to_owned();
    }
    format!("; it has {}", names.join(", "))
}

/// Why a machine cannot move at all.
#[derive(Debug, thiserror::Error)]
pub enum NotMovable {
    /// Two hosts would have to hand over the lock of its image.
    #[error(
        "disk {0} cannot move: two hosts cannot hand over its image; unplug it first (DELETE \
         /v1/vm/disks/{0})"
    )]
    Disk(String),
    /// Its state is in the device, whose driver cannot move it.
    #[error(
        "VFIO device {id} cannot move: {why}; unplug it first (DELETE /v1/vm/vfio/{id}), or give \
         it a NIC as its standby"
    )]
    PassedThrough {
        /// Its name.
        id: String,
        /// What its driver cannot do.
        why: String,
    },
    /// The destination would be built with it, and the guest is about to release it.
    #[error("the guest has not ejected {0} yet; try again when it has")]
    Unplugging(String),
}

impl NotMovable {
    /// Returns the remedy.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Disk(id) => format!("unplug it first: DELETE /v1/vm/disks/{id}"),
            Self::PassedThrough { id, .. } => format!(
                "unplug it first (DELETE /v1/vm/vfio/{id}), or give it a NIC as its standby"
            ),
            Self::Unplugging(_) => "try again when the guest has ejected it".to_owned(),
        }
    }
}
