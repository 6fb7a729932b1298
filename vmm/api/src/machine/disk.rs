//! Disks.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{DeviceInfo, PlugPhase};
use crate::config::DiskConfig;

/// What of a disk can be changed before the machine starts; what is absent stays.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskChange {
    /// The image: a regular file or a block device.
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// Whether writes are refused.
    pub readonly: Option<bool>,
}

/// A disk in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskSummary {
    /// Its name.
    pub id: String,
    /// Where it is in its life.
    pub state: PlugPhase,
    /// Its image.
    pub path: String,
    /// Whether writes are refused.
    pub readonly: bool,
    /// Whether a queue that hangs is kicked and its driver interrupted.
    #[serde(default)]
    #[schema(required)]
    pub rescue: bool,
    /// Its PCI address in the guest; null before the machine is built.
    #[schema(required)]
    pub address: Option<String>,
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
            rescue: config.rescue,
            address: None,
        }
    }
}

/// A disk with all there is to say about it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DiskInfo {
    /// In short.
    #[serde(flatten)]
    pub summary: DiskSummary,
    /// What the guest made of it, once the machine is built.
    #[schema(required)]
    pub device: Option<DeviceInfo>,
}
