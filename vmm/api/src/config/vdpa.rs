//! A vDPA device in a VM's configuration.

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use devices::virtio::vdpa::DoorbellMode;
use serde::{Deserialize, Serialize};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};
use vdpa::device::check_fd;

use super::source::{DescriptorError, DeviceSource};
use super::{MacAddress, schema};

/// A vDPA device for the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "VdpaFields", into = "VdpaFields")]
pub struct VdpaConfig {
    /// The device.
    pub source: DeviceSource,
    /// A name for messages; the default is the file's name. Required for a descriptor.
    pub id: Option<String>,
    /// The MAC address that the guest sees; the default is the device's own.
    pub mac: Option<MacAddress>,
    /// Whether the guest may change neither its MAC address nor the device's filters. It then gets
    /// none of the features CTRL_MAC_ADDR, CTRL_RX, CTRL_RX_EXTRA and CTRL_VLAN.
    pub mac_lock: bool,
    /// Whether the NIC is the standby of a failover pair (VIRTIO_NET_F_STANDBY). While the guest
    /// has another device with the same MAC address, the primary, it sends through that.
    pub standby: bool,
    /// Number of virtqueues, control virtqueue included. If given, it must match the device.
    pub num_queues: Option<u16>,
    /// Whether the guest kicks by stores in the device's own doorbell pages
    /// (`auto`: where queues have them; `on`: all data queues must; `off`: by eventfds).
    pub doorbell: DoorbellMode,
    /// Whether the guest's IOMMU decides which memory the device reaches.
    pub iommu: bool,
    /// Kick the device and interrupt the driver, once, when a queue hangs (`ring_watch`). This
    /// repairs a lost kick or interrupt.
    pub stall_kick: bool,
    /// The vhost-vdpa character device that replaces this one, once, if this one needs a reset
    /// (DEVICE_NEEDS_RESET) or the host removes it. The guest's driver continues. The device is
    /// opened only then.
    pub backup: Option<PathBuf>,
}

impl VdpaConfig {
    /// The name of the device in the VM.
    #[must_use]
    pub fn name(&self) -> String {
        self.id.clone().unwrap_or_else(|| self.source.name())
    }

    /// The device's path as far as known, for messages.
    #[must_use]
    pub fn shown_path(&self) -> Cow<'_, str> {
        self.source.shown()
    }

    /// Whether this is the device at `path`, as far as paths identify it.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        self.source.path() == Some(path)
    }

    /// A copy without a descriptor. A device opens only once, so it is busy while any process holds
    /// it.
    #[must_use]
    pub fn released(&self) -> Self {
        Self {
            source: self.source.released(),
            ..self.clone()
        }
    }

    /// Replaces a descriptor's number by the result of `take`. The error of `take` is the reason if
    /// there is no such descriptor.
    ///
    /// # Errors
    /// See [`DescriptorError`].
    pub fn take_descriptor(
        &mut self,
        take: impl FnOnce(u32) -> Result<OwnedFd, String>,
    ) -> Result<(), DescriptorError> {
        let Some(number) = self.source.number() else {
            return Ok(());
        };
        let id = self.id.as_ref().ok_or(DescriptorError::NoName(number))?;
        self.source.take(&format!("NIC {id}"), take, check_fd)
    }
}

/// The serialized form: a vDPA device for the guest, by `path` or by `fd`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct VdpaFields {
    /// The vhost-vdpa character device, such as `/dev/vhost-vdpa-0`. Give either `path` or `fd`.
    /// For a device that was passed as a descriptor this is the path at which it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    path: Option<PathBuf>,
    /// The vhost-vdpa device as a descriptor, open for reading and writing. This is the index from
    /// 0 among the descriptors of the request (SCM_RIGHTS, at most 16). It requires `id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fd: Option<u32>,
    /// The NIC's name; the file's name by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// The MAC address that the guest sees; the device's own where none is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::mac)]
    mac: Option<MacAddress>,
    /// Whether the guest may change neither its MAC address nor the device's filters. It then gets
    /// none of the features CTRL_MAC_ADDR, CTRL_RX, CTRL_RX_EXTRA and CTRL_VLAN.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    mac_lock: bool,
    /// Whether the NIC is the standby of a failover pair (VIRTIO_NET_F_STANDBY). While the guest
    /// has another device with the same MAC address, the primary, it sends through that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    standby: bool,
    /// Number of virtqueues, control virtqueue included. If given, it must match the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    num_queues: Option<u16>,
    /// Whether the guest kicks by stores to the device's own doorbell pages. `auto`: on queues that
    /// have them; `on`: required for all data queues; `off`: by eventfds.
    #[serde(default)]
    #[schema(schema_with = schema::doorbell)]
    doorbell: DoorbellMode,
    /// Whether the guest's IOMMU decides which memory the device reaches. The guest's driver must
    /// accept ACCESS_PLATFORM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    iommu: bool,
    /// When a queue is stuck (`ring_watch`), kick the device and interrupt the driver once. This
    /// repairs a lost kick or interrupt.
    #[serde(default, alias = "rescue")]
    stall_kick: bool,
    /// The vhost-vdpa character device that replaces this one, once, if this one needs a reset
    /// (DEVICE_NEEDS_RESET) or the host removes it. The NIC moves as by
    /// `PATCH /v1/vm/nics/{id}`. The device is opened only then.
    #[serde(default, alias = "failover", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    backup: Option<PathBuf>,
}

/// Why fields do not describe a device.
#[derive(Debug, thiserror::Error)]
enum FieldsError {
    #[error("missing field `path`, or `fd` for an open device")]
    Neither,
    #[error("both `path` and `fd` are given: give one of them")]
    Both,
    #[error("`backup` is the device itself: name another device")]
    OwnBackup,
}

impl TryFrom<VdpaFields> for VdpaConfig {
    type Error = FieldsError;

    fn try_from(fields: VdpaFields) -> Result<Self, FieldsError> {
        let reason = if fields.path.is_none() {
            FieldsError::Neither
        } else {
            FieldsError::Both
        };
        let config = Self {
            source: DeviceSource::of(fields.path, fields.fd).ok_or(reason)?,
            id: fields.id,
            mac: fields.mac,
            mac_lock: fields.mac_lock,
            standby: fields.standby,
            num_queues: fields.num_queues,
            doorbell: fields.doorbell,
            iommu: fields.iommu,
            stall_kick: fields.stall_kick,
            backup: fields.backup,
        };
        match &config.backup {
            Some(backup) if config.is_at(backup) => Err(FieldsError::OwnBackup),
            _ => Ok(config),
        }
    }
}

impl From<VdpaConfig> for VdpaFields {
    fn from(config: VdpaConfig) -> Self {
        Self {
            path: config.source.path().map(Path::to_owned),
            fd: config.source.number(),
            id: config.id,
            mac: config.mac,
            mac_lock: config.mac_lock,
            standby: config.standby,
            num_queues: config.num_queues,
            doorbell: config.doorbell,
            iommu: config.iommu,
            stall_kick: config.stall_kick,
            backup: config.backup,
        }
    }
}

impl PartialSchema for VdpaConfig {
    fn schema() -> RefOr<Schema> {
        VdpaFields::schema()
    }
}

impl ToSchema for VdpaConfig {
    fn name() -> Cow<'static, str> {
        "VdpaConfig".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        VdpaFields::schemas(schemas);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_device_has_a_path_or_a_descriptor() {
        let read = |text: &str| text.parse::<VdpaConfig>();
        assert_eq!(read("fd=5,id=a").unwrap().source, DeviceSource::Number(5));
        for (text, words) in [
            ("path=a,fd=5", ["`path`", "`fd`"]),
            ("id=a", ["`path`", "`fd`"]),
            ("fd=-1", ["fd", "-1"]),
            ("fd=4294967296", ["fd", "4294967296"]),
            ("fd=five", ["fd", "five"]),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        let json = serde_json::to_value(read("fd=5,id=a").unwrap()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"fd": 5, "id": "a", "doorbell": "auto", "stall_kick": false})
        );
    }

    #[test]
    fn descriptors_of_other_files_are_refused_and_closed() {
        let mut config: VdpaConfig = "fd=0,id=a".parse().unwrap();
        let error = config.take_descriptor(|_| Err("is not there".to_owned()));
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("fd=0 of NIC a is not there")
        );
        let file = || Ok(File::open("/dev/null").unwrap().into());
        let error = config.take_descriptor(|_| file()).unwrap_err();
        assert!(matches!(error, DescriptorError::Unusable { .. }), "{error}");
        // Unchanged: another attempt may follow.
        assert_eq!(config.source, DeviceSource::Number(0));
        let mut nameless: VdpaConfig = "fd=0".parse().unwrap();
        let error = nameless.take_descriptor(|_| file()).unwrap_err();
        assert!(matches!(error, DescriptorError::NoName(0)));
        let mut path: VdpaConfig = "path=/a".parse().unwrap();
        path.take_descriptor(|_| Err("is not asked for".to_owned()))
            .unwrap();
    }
}
