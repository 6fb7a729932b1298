//! Disks.

use std::num::{NonZeroU16, NonZeroU32};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{DeviceInfo, PlugPhase};
use crate::config::{DiskConfig, MemorySize, schema};

/// Settings of a disk that can change before the machine starts. Absent members keep their value.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskChange {
    /// The image: a regular file or a block device.
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// Whether writes are rejected.
    pub readonly: Option<bool>,
    /// Whether the guest's IOMMU decides which memory the disk reaches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iommu: Option<bool>,
}

/// A disk in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskSummary {
    /// Its name.
    pub id: String,
    /// Whether the guest has it.
    pub state: PlugPhase,
    /// Its image.
    pub path: String,
    /// Whether writes are rejected.
    pub readonly: bool,
    /// Whether the guest's IOMMU decides which memory the disk reaches.
    #[serde(default)]
    #[schema(required)]
    pub iommu: bool,
    /// Whether a stuck queue is kicked and its driver interrupted.
    #[serde(default, alias = "rescue")]
    #[schema(required)]
    pub stall_kick: bool,
    /// Its PCI address in the guest; null before the machine is built.
    #[schema(required)]
    pub address: Option<String>,
    /// The most bytes per second, if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::bps)]
    pub bps: Option<MemorySize>,
    /// The most requests per second, if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>)]
    pub iops: Option<NonZeroU32>,
    /// For how many seconds both are saved up, if not 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u16>)]
    pub burst: Option<NonZeroU16>,
}

impl DiskSummary {
    /// A disk that is added when the VM starts.
    #[must_use]
    pub fn configured(id: String, config: &DiskConfig) -> Self {
        Self {
            id,
            state: PlugPhase::Configured,
            path: config.path.to_string_lossy().into_owned(),
            readonly: config.readonly,
            iommu: config.iommu,
            stall_kick: config.stall_kick,
            address: None,
            bps: config.bps,
            iops: config.iops,
            burst: config.burst,
        }
    }
}

/// A disk in detail.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DiskInfo {
    /// As in a list.
    #[serde(flatten)]
    pub summary: DiskSummary,
    /// The device as the guest set it up; null before the machine is built.
    #[schema(required)]
    pub device: Option<DeviceInfo>,
}
