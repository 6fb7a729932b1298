//! NICs.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::{DeviceInfo, PlugPhase};
use crate::config::{DoorbellMode, MacAddress, VdpaConfig, schema};

/// A NIC in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicSummary {
    /// Its name.
    pub id: String,
    /// Whether the guest has it.
    pub state: PlugPhase,
    /// Its vhost-vdpa character device.
    #[serde(default)]
    #[schema(required)]
    pub path: String,
    /// Its PCI address in the guest; null before the machine is built.
    #[schema(required)]
    pub address: Option<String>,
}

impl From<&VdpaConfig> for NicSummary {
    fn from(config: &VdpaConfig) -> Self {
        Self {
            id: config.name(),
            state: PlugPhase::Configured,
            path: config.shown_path().into_owned(),
            address: None,
        }
    }
}

/// A NIC in detail.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NicInfo {
    /// As in a list.
    #[serde(flatten)]
    pub summary: NicSummary,
    /// The configured MAC address; null for the device's own.
    #[schema(required, pattern = "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$")]
    pub mac: Option<String>,
    /// Whether the guest may change neither its MAC address nor the device's filters.
    #[serde(default)]
    #[schema(required)]
    pub mac_lock: bool,
    /// Whether the NIC is the standby of a failover pair.
    #[serde(default)]
    #[schema(required)]
    pub standby: bool,
    /// The configured number of queues, control queue included; null for the device's own.
    #[schema(required)]
    pub num_queues: Option<u16>,
    /// The configured mode of doorbells.
    #[schema(schema_with = schema::doorbell)]
    pub doorbell: DoorbellMode,
    /// Whether the guest's IOMMU decides which memory the device reaches.
    #[serde(default)]
    #[schema(required)]
    pub iommu: bool,
    /// Whether a stuck queue is kicked and its driver interrupted.
    #[serde(default, alias = "rescue")]
    #[schema(required)]
    pub stall_kick: bool,
    /// The vhost-vdpa character device that is its backup; null without one.
    #[serde(alias = "failover")]
    #[schema(required)]
    pub backup: Option<String>,
    /// Its last failover; null without one, and after a move.
    #[schema(required)]
    pub last_failover: Option<FailoverInfo>,
    /// The NUMA node of its device on the host; null if unknown.
    #[schema(required)]
    pub numa_node: Option<u16>,
    /// A warning if guest memory is bound to another NUMA node.
    #[schema(required)]
    pub numa_warning: Option<String>,
    /// The device as the guest set it up; null before the machine is built.
    #[schema(required)]
    pub device: Option<DeviceInfo>,
}

described! {
    /// State of a failover.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum FailoverPhase {
        /// The backup device is being opened; the driver does not see the failure yet.
        UnderWay,
        /// The NIC is on the backup device.
        Done,
        /// The NIC is on the failed device; the guest's driver has to reset it.
        Failed,
        /// A word of a later version.
        #[serde(other, skip_serializing)]
        Unknown,
    }
}

/// A failover of a NIC.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FailoverInfo {
    /// State of the failover.
    pub state: FailoverPhase,
    /// The device that has failed.
    pub from: String,
    /// The device that was to replace it.
    pub to: String,
    /// Time in which neither device worked, in microseconds, from the open of the backup. Null if
    /// no driver used the NIC.
    #[schema(required)]
    pub gap_us: Option<u64>,
    /// Why it failed.
    #[schema(required)]
    pub error: Option<String>,
}

/// Settings of a NIC that can change; absent members keep their value. While the machine runs, only
/// `path`, `fd` and `backup` can change.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NicChange {
    /// The vhost-vdpa character device. Give either `path` or `fd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// The vhost-vdpa device as a descriptor, open for reading and writing. This is the index from
    /// 0 among the descriptors of the request (SCM_RIGHTS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fd: Option<u32>,
    /// The MAC address that the guest sees.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::mac)]
    pub mac: Option<MacAddress>,
    /// Whether the guest may change neither its MAC address nor the device's filters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac_lock: Option<bool>,
    /// Whether the NIC is the standby of a failover pair (VIRTIO_NET_F_STANDBY).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standby: Option<bool>,
    /// Number of virtqueues, control virtqueue included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_queues: Option<u16>,
    /// Whether the guest gets the device's doorbells.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::doorbell_change)]
    pub doorbell: Option<DoorbellMode>,
    /// Whether the guest's IOMMU decides which memory the device reaches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iommu: Option<bool>,
    /// Whether a stuck queue is kicked and its driver interrupted.
    #[serde(alias = "rescue", skip_serializing_if = "Option::is_none")]
    pub stall_kick: Option<bool>,
    /// The backup: the vhost-vdpa character device to which the NIC moves, once, if its own needs a
    /// reset or the host removes it. Null removes the backup.
    #[serde(
        default,
        alias = "failover",
        deserialize_with = "given",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>)]
    pub backup: Option<Option<PathBuf>>,
}

/// Deserializes a field that is present, even if it is null.
fn given<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Option<PathBuf>>, D::Error> {
    Option::deserialize(field).map(Some)
}
