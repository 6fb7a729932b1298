//! The identity and the features that a device reports.

use std::path::{Path, PathBuf};

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use super::sysfs::Place;
use crate::Error;
use crate::device::{Device, QueueInfo};
use crate::features::{Policy, name, pass_through};
use crate::netdev::NetConfig;
use crate::uapi::BackendFeatures;

/// One virtio feature that the device offers.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Feature {
    /// Its bit.
    pub bit: u32,
    /// Its name, without prefix; `None` if unknown.
    pub name: Option<&'static str>,
    /// Why a guest does not get it; `None` if it does.
    pub withheld: Option<String>,
}

/// The identity and the features of a device.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Identity {
    /// The character device.
    pub path: PathBuf,
    /// Its name, parent and driver, from sysfs.
    pub place: Place,
    /// Virtio device type (virtio 1.3, section 5).
    pub device_id: u32,
    /// A network device's configuration.
    pub network: Option<NetConfig>,
    /// Virtio features offered.
    pub features: Vec<Feature>,
    /// Names of the backend features offered.
    pub backend_features: Vec<&'static str>,
    /// Queues, by index.
    pub queues: Vec<QueueInfo>,
    /// Number of queue groups.
    pub groups: u32,
    /// Number of address spaces.
    pub address_spaces: u32,
    /// First and last I/O virtual address that can be mapped.
    pub iova_range: (u64, u64),
    /// Bytes of configuration.
    pub config_size: u32,
}

impl Identity {
    pub(super) fn of(path: &Path, device: &Device) -> Result<Self, Error> {
        let info = device.info();
        let network = match info.device_id {
            VIRTIO_ID_NET => Some(NetConfig::read(device, info.features)?),
            _ => None,
        };
        let passed = pass_through(info.features, info.device_id, Policy::default());
        let features = (0..u64::BITS)
            .filter(|bit| info.features & (1 << bit) != 0)
            .map(|bit| Feature {
                bit,
                name: name(bit, info.device_id),
                withheld: passed
                    .withheld
                    .iter()
                    .find(|(withheld, _)| *withheld == bit)
                    .map(|(_, reason)| reason.to_string()),
            })
            .collect();
        Ok(Self {
            path: path.to_owned(),
            place: Place::of(path),
            device_id: info.device_id,
            network,
            features,
            backend_features: backend_names(info.backend_features),
            queues: info.queues.clone(),
            groups: info.groups,
            address_spaces: info.address_spaces,
            iova_range: (info.iova_range.first(), info.iova_range.last()),
            config_size: info.config_size,
        })
    }
}

fn backend_names(features: BackendFeatures) -> Vec<&'static str> {
    features.iter_names().map(|(name, _)| name).collect()
}
