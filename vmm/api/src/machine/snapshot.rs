//! Snapshots of a VM in a directory, and upgrades to another program.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::{VdpaConfig, VfioConfig};

/// The limit of a snapshot's duration, sufficient for guest memory of a TiB. The node daemon waits
/// this long for a VMM, and a client a little longer for the daemon.
pub const SNAPSHOT_TIME: Duration = Duration::from_secs(3600);

/// Where to write a snapshot.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// A directory that does not exist yet, as an absolute path.
    #[schema(value_type = String)]
    pub path: PathBuf,
}

/// A complete snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// Its directory.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Bytes of guest memory that were written; pages of zeros are left out.
    pub memory_bytes: u64,
    /// Downtime of the guest, in milliseconds.
    pub paused_ms: u64,
}

/// Which snapshot to restore, and the differences on this host.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreRequest {
    /// The snapshot's directory.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// vDPA devices that have other paths or descriptors on this host, each with the NIC's `id`.
    #[serde(default)]
    pub vdpa: Vec<VdpaConfig>,
    /// The functions of this host for those of the snapshot, each with the function's `id`. No
    /// function that only the snapshot names is opened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vfio: Vec<VfioConfig>,
    /// The files that the snapshot may name, or directories above them, as absolute paths. These
    /// are the kernel, the initramfs, disks, and devices of NICs that `vdpa` does not have. Any
    /// other file is refused.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub allow_paths: Vec<PathBuf>,
    /// Leave the vCPUs parked.
    #[serde(default)]
    pub paused: bool,
}

/// The new program.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// The `bellhop` that continues to run the machine, as an absolute path.
    #[schema(value_type = String)]
    pub program: PathBuf,
}
