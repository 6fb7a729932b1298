//! A PCI function of the host in a VM's configuration, passed through by VFIO.

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use devices::vfio::check_cdev;
use serde::{Deserialize, Serialize};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::source::{DescriptorError, DeviceSource};
use super::{KeyValueError, from_key_value};

/// Where sysfs lists PCI functions by their address.
const DEVICES: &str = "/sys/bus/pci/devices";

/// A PCI function of the host for the guest. The VM can be saved and migrate if the function's
/// driver moves its state. With a standby it also migrates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "VfioFields", into = "VfioFields")]
pub struct VfioConfig {
    /// Its directory in sysfs, or its open device file.
    pub source: DeviceSource,
    /// A name for messages; the default is the directory's name.
    pub id: Option<String>,
    /// Whether it may be a function that is not virtual.
    pub allow_pf: bool,
    /// Whether it is opened through iommufd on a host that has it.
    pub iommufd: bool,
    /// Whether the guest's IOMMU decides which memory it reaches.
    pub iommu: bool,
    /// The NIC that the guest uses while it does not have the function, by its name.
    pub standby: Option<String>,
}

impl VfioConfig {
    /// The name of the device in the VM.
    #[must_use]
    pub fn name(&self) -> String {
        self.id.clone().unwrap_or_else(|| self.source.name())
    }

    /// The address of the function, if the path is the one that `host` stands for.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        let address = self.source.path()?.strip_prefix(DEVICES).ok()?.to_str();
        address.filter(|text| is_address(text))
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
        let user = format!("VFIO device {}", self.name());
        self.source.take(&user, take, check_cdev)
    }

    /// A copy without a descriptor, as which the function is opened again.
    #[must_use]
    pub fn released(&self) -> Self {
        Self {
            source: self.source.released(),
            ..self.clone()
        }
    }
}

impl FromStr for VfioConfig {
    type Err = KeyValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        from_key_value(text)
    }
}

/// A PCI function of the host for the guest, by `host`, by `path` or by `fd`. It is bound to
/// vfio-pci or a variant of it. The VM can be saved and migrate if the function's driver moves its
/// state. With a standby it also migrates.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct VfioFields {
    /// The address of the function, such as `0000:03:10.1`. Give one of `host`, `path` and `fd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]$")]
    host: Option<String>,
    /// The function's directory in sysfs, such as `/sys/bus/pci/devices/0000:03:10.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    path: Option<PathBuf>,
    /// The function's own file (`/dev/vfio/devices/vfioN`) as a descriptor, open for reading and
    /// writing. It is for iommufd. This is the index from 0 among the descriptors of the request
    /// (SCM_RIGHTS, at most 16). The API then shows the function as `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fd: Option<u32>,
    /// The device's name; the function's address by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// Whether it may be a function that is not virtual. Its guest controls the whole device, with
    /// the virtual functions of other guests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    allow_pf: bool,
    /// Whether the function is opened through iommufd (`/dev/iommu`) if the host has it; otherwise
    /// through a container of VFIO. Functions of both kinds pin the guest's memory twice.
    #[serde(default = "on", skip_serializing_if = "is_on")]
    #[schema(default = true)]
    iommufd: bool,
    /// Whether the guest's IOMMU decides which memory it reaches. Such a function cannot move with
    /// its state.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    iommu: bool,
    /// A vDPA NIC of the VM, by its `id`, that has `standby=on` and the function's MAC address. A
    /// migration has the guest eject the function first, and the NIC carries its traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    standby: Option<String>,
}

fn on() -> bool {
    true
}

fn is_on(value: &bool) -> bool {
    *value
}

/// Why fields do not describe a function.
#[derive(Debug, thiserror::Error)]
enum FieldsError {
    #[error("missing field `host`, `path` for a directory in sysfs, or `fd` for an open file")]
    None,
    #[error("both `host` and `path` are given, or one of them and `fd`: give one of them")]
    Several,
    #[error("`fd` is a file for iommufd: leave out iommufd=off")]
    NoIommufd,
    #[error("{0:?} is not the address of a PCI function such as 0000:03:10.1 (lspci -D)")]
    NoAddress(String),
}

/// Whether this is a domain, a bus, a device and a function, as sysfs writes them.
fn is_address(text: &str) -> bool {
    let hex = |part: &str, lengths: std::ops::RangeInclusive<usize>| {
        let digits = part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        digits && lengths.contains(&part.len())
    };
    let mut parts = text.split([':', '.']);
    let [domain, bus, device, function] = std::array::from_fn(|_| parts.next().unwrap_or(""));
    let separators = format!("{domain}:{bus}:{device}.{function}") == text;
    separators
        && hex(domain, 4..=8)
        && hex(bus, 2..=2)
        && hex(device, 2..=2)
        && device < "20"
        && hex(function, 1..=1)
        && function < "8"
}

impl TryFrom<VfioFields> for VfioConfig {
    type Error = FieldsError;

    fn try_from(fields: VfioFields) -> Result<Self, FieldsError> {
        let given = [
            fields.host.is_some(),
            fields.path.is_some(),
            fields.fd.is_some(),
        ];
        if given.into_iter().filter(|given| *given).count() > 1 {
            return Err(FieldsError::Several);
        }
        if fields.fd.is_some() && !fields.iommufd {
            return Err(FieldsError::NoIommufd);
        }
        let path = match fields.host {
            Some(host) if is_address(&host) => Some(Path::new(DEVICES).join(host)),
            Some(host) => return Err(FieldsError::NoAddress(host)),
            None => fields.path,
        };
        Ok(Self {
            source: DeviceSource::of(path, fields.fd).ok_or(FieldsError::None)?,
            id: fields.id,
            allow_pf: fields.allow_pf,
            iommufd: fields.iommufd,
            iommu: fields.iommu,
            standby: fields.standby,
        })
    }
}

impl From<VfioConfig> for VfioFields {
    fn from(config: VfioConfig) -> Self {
        let host = config.host().map(str::to_owned);
        Self {
            path: match host {
                Some(_) => None,
                None => config.source.path().map(Path::to_owned),
            },
            fd: config.source.number(),
            host,
            id: config.id,
            allow_pf: config.allow_pf,
            iommufd: config.iommufd,
            iommu: config.iommu,
            standby: config.standby,
        }
    }
}

impl PartialSchema for VfioConfig {
    fn schema() -> RefOr<Schema> {
        VfioFields::schema()
    }
}

impl ToSchema for VfioConfig {
    fn name() -> Cow<'static, str> {
        "VfioConfig".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        VfioFields::schemas(schemas);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_function_has_an_address_or_a_directory() {
        let read = |text: &str| text.parse::<VfioConfig>();
        let by_host = read("host=0000:03:10.1").unwrap();
        let path = Path::new(DEVICES).join("0000:03:10.1");
        assert_eq!(by_host.source, DeviceSource::Path(path));
        assert_eq!(by_host.name(), "0000:03:10.1");
        let json = serde_json::to_value(&by_host).unwrap();
        assert_eq!(json, serde_json::json!({"host": "0000:03:10.1"}));
        assert_eq!(serde_json::from_value::<VfioConfig>(json).unwrap(), by_host);
        let by_path = read("path=/sys/a,id=net0,allow_pf=on").unwrap();
        assert_eq!((by_path.name().as_str(), by_path.allow_pf), ("net0", true));
        let json = serde_json::to_value(by_path).unwrap();
        let expected = serde_json::json!({"path": "/sys/a", "id": "net0", "allow_pf": true});
        assert_eq!(json, expected);
        let container = read("host=0000:03:10.1,iommufd=off,iommu=on").unwrap();
        assert!(!container.iommufd && container.iommu);
        let json = serde_json::to_value(container).unwrap();
        let expected = serde_json::json!({"host": "0000:03:10.1", "iommufd": false, "iommu": true});
        assert_eq!(json, expected);
        for (text, word) in [
            ("id=a", "`host`"),
            ("host=0000:03:10.1,path=/a", "both"),
            ("host=0000:03:10.1,fd=5", "`fd`: give one"),
            ("path=/a,fd=5", "`fd`: give one"),
            ("fd=5,iommufd=off", "leave out iommufd=off"),
            ("fd=-1", "fd"),
            ("host=../0000:03:10.1", "lspci -D"),
            ("host=03:10.1", "lspci -D"),
            ("host=0000:03:20.1", "lspci -D"),
            ("host=0000:03:1f.8", "lspci -D"),
            ("host=0000.03:10:1", "lspci -D"),
            ("host=0000:03:10.1.1", "lspci -D"),
            ("host=0000:03:1F.0", "lspci -D"),
            ("host=0000:03:10.1,pci_segment=1", "pci_segment"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn a_function_may_come_as_a_descriptor_of_its_own_file() {
        let mut config: VfioConfig = "fd=5".parse().unwrap();
        assert_eq!((config.name().as_str(), config.host()), ("fd5", None));
        let json = serde_json::to_value(&config).unwrap();
        assert_eq!(json, serde_json::json!({"fd": 5}));
        let error = config.take_descriptor(|_| Err("is not there".to_owned()));
        let text = error.unwrap_err().to_string();
        assert_eq!(text, "fd=5 of VFIO device fd5 is not there");
        let null = File::options().read(true).write(true).open("/dev/null");
        let error = config.take_descriptor(|_| Ok(null.unwrap().into()));
        let error = error.unwrap_err();
        assert_eq!(error.to_string(), "fd=5 of VFIO device fd5 cannot be used");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("/dev/vfio/devices/vfioN"), "{cause}");
        // Unchanged: another attempt may follow.
        assert_eq!(config.source, DeviceSource::Number(5));
    }
}
