//! The IOMMU that a guest's driver controls.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{KeyValueError, from_key_value};

/// A virtio-iommu for the guest, in front of vDPA devices and disks with `iommu`. A VM with such a
/// device has one anyway; a device can be plugged in behind it only if it was there at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IommuConfig {
    /// Whether devices behind it reach all of guest memory until the guest's driver takes over.
    #[serde(default = "on")]
    #[schema(default = true)]
    pub boot_bypass: bool,
    /// The most mappings of a domain: of a device, or of devices that share one.
    #[serde(default)]
    #[schema(value_type = u32, minimum = 1, maximum = 65_536, default = 65_536)]
    pub mappings: MappingCount,
    /// Whether the random number generator is behind it, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rng: bool,
}

impl Default for IommuConfig {
    fn default() -> Self {
        Self {
            boot_bypass: on(),
            mappings: MappingCount::default(),
            rng: false,
        }
    }
}

fn on() -> bool {
    true
}

/// Reads a table or null. The derived function also accepts a list: all fields have defaults.
pub(super) fn table_or_null<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<IommuConfig>, D::Error> {
    struct TableOrNull;

    impl<'de> Visitor<'de> for TableOrNull {
        type Value = Option<IommuConfig>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table with boot_bypass and mappings")
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            IommuConfig::deserialize(de::value::MapAccessDeserializer::new(map)).map(Some)
        }
    }

    deserializer.deserialize_any(TableOrNull)
}

impl FromStr for IommuConfig {
    type Err = KeyValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        from_key_value(text)
    }
}

/// A number of mappings between 1 and [`MappingCount::MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct MappingCount(u32);

/// An invalid number of mappings.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0} mappings: a domain has 1 to {max}", max = MappingCount::MAX)]
pub struct MappingCountError(u64);

impl MappingCount {
    /// The most mappings of a domain.
    pub const MAX: u32 = devices::virtio::iommu::MAPPINGS_MAX;

    /// The number.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }
}

impl Default for MappingCount {
    fn default() -> Self {
        Self(Self::MAX)
    }
}

impl TryFrom<u64> for MappingCount {
    type Error = MappingCountError;

    fn try_from(count: u64) -> Result<Self, Self::Error> {
        match u32::try_from(count) {
            Ok(fit @ 1..=Self::MAX) => Ok(Self(fit)),
            _ => Err(MappingCountError(count)),
        }
    }
}

impl From<MappingCount> for u64 {
    fn from(count: MappingCount) -> Self {
        u64::from(count.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{VdpaConfig, VmConfig};
    use super::*;

    #[test]
    fn command_line_and_file_have_the_same_words() {
        for (text, json) in [
            ("boot_bypass=on", "{}"),
            (
                "boot_bypass=off,mappings=1",
                r#"{"boot_bypass": false, "mappings": 1}"#,
            ),
            ("mappings=65536", r#"{"boot_bypass": true}"#),
            ("rng=on", r#"{"rng": true}"#),
        ] {
            let config: IommuConfig = text.parse().unwrap();
            assert_eq!(serde_json::from_str::<IommuConfig>(json).unwrap(), config);
            let again = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::from_str::<IommuConfig>(&again).unwrap(), config);
        }
        for (text, says) in [
            ("", "key=value"),
            ("bypass=on", "unknown field `bypass`"),
            ("boot_bypass=yes", "expected on or off"),
            ("mappings=0", "0 mappings: a domain has 1 to 65536"),
            ("mappings=65537", "a domain has 1 to 65536"),
            ("mappings=-1", "number"),
        ] {
            let error = text.parse::<IommuConfig>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_restored_nic_stays_behind_the_iommu() {
        let nics = r#"{"kernel": "k", "vdpa": [{"path": "/a", "id": "a", "iommu": true},
            {"path": "/b", "id": "b"}]}"#;
        let mut vm: VmConfig = serde_json::from_str(nics).unwrap();
        for (nic, expected) in [
            ("path=/c,id=a", true),
            ("path=/c,id=a,iommu=on", true),
            ("path=/c,id=b", false),
            // Refused later: the guest's driver did not accept it.
            ("path=/c,id=b,iommu=on", true),
        ] {
            vm.restore_nic(nic.parse().unwrap()).unwrap();
            let id = nic.parse::<VdpaConfig>().unwrap().name();
            let restored = vm.vdpa.iter().find(|one| one.name() == id).unwrap();
            assert_eq!(restored.iommu, expected, "{nic}");
        }
        assert!(vm.restore_nic("path=/c,id=x".parse().unwrap()).is_err());
    }

    #[test]
    fn a_device_behind_an_iommu_brings_one() {
        let vm = |more: &str| {
            let text = format!(r#"{{"kernel": "k", {more}}}"#);
            serde_json::from_str::<VmConfig>(&text).unwrap()
        };
        let behind = r#""vdpa": [{"path": "/a"}, {"path": "/b", "iommu": true}]"#;
        assert_eq!(vm(behind).iommu_needed(), Some(IommuConfig::default()));
        assert_eq!(vm(r#""vdpa": [{"path": "/a"}]"#).iommu_needed(), None);
        let disk = r#""disks": [{"path": "/a"}, {"path": "/b", "iommu": true}]"#;
        assert_eq!(vm(disk).iommu_needed(), Some(IommuConfig::default()));
        assert_eq!(vm(r#""disks": [{"path": "/a"}]"#).iommu_needed(), None);
        let given = vm(&format!(r#"{behind}, "iommu": {{"boot_bypass": false}}"#));
        assert!(!given.iommu_needed().unwrap().boot_bypass);
        let alone = vm(r#""iommu": {}"#);
        assert_eq!(alone.iommu_needed(), Some(IommuConfig::default()));
        // Not part of a configuration without it.
        let json = serde_json::to_value(vm(r#""vdpa": [{"path": "/a"}]"#)).unwrap();
        assert!(json.get("iommu").is_none() && json["vdpa"][0].get("iommu").is_none());
        let json = serde_json::to_value(vm(r#""disks": [{"path": "/a"}], "iommu": {}"#)).unwrap();
        assert!(json["disks"][0].get("iommu").is_none() && json["iommu"].get("rng").is_none());
    }
}
