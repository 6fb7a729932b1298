//! The API of one VM.

mod device;
mod disk;
mod iommu;
pub(crate) mod migration;
mod nic;
mod pairing;
mod snapshot;
mod vfio;
mod vm;

pub use device::{
    AlarmInfo, AlarmKind, DeviceInfo, DirtyTracking, Kick, PlugPhase, QueueInfo, WatchInfo,
    WatchPhase,
};
pub use disk::{DiskChange, DiskInfo, DiskSummary};
pub use iommu::{IommuInfo, IommuRefusal};
pub use migration::{
    CONNECTIONS, CONNECTIONS_MAX, DOWNTIME_MS, Direction, DowntimeParts, Forecast, InFlight,
    MigrationObstacle, MigrationPhase, MigrationRequest, MigrationStatus, MigrationTrial, Place,
    ReceiveConfig, ResolveRequest, SendConfig, TIMEOUT_S, TlsFiles,
};
pub use nic::{FailoverInfo, FailoverPhase, NicChange, NicInfo, NicSummary};
pub use pairing::{BadSecret, MigrationSecret, PairedTls, Pairing};
pub use snapshot::{RestoreRequest, SNAPSHOT_TIME, SnapshotInfo, SnapshotRequest, UpgradeRequest};
pub use vfio::{VfioArea, VfioFunctionInfo, VfioInfo, VfioSummary};
pub use vm::{End, EndReason, Handshake, VmChange, VmState, VmStatus, WantedState, Watch};
