//! The configuration of one VM.
//!
//! The command line's options, the configuration file and the API share one set of serde types. A
//! value that one accepts is accepted by all, and unknown keys are errors everywhere. The types
//! cannot hold values that cannot work (no vCPU, a memory size that wraps). This module knows no
//! file format and opens nothing.

mod cpu_affinity;
mod cpu_baseline;
mod feature_mask;
mod iommu;
mod key_value;
mod mac;
mod ring_watch;
pub mod schema;
mod size;
mod source;
mod vdpa;
mod vfio;

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use utoipa::ToSchema;

pub use cpu_affinity::{CpuAffinity, CpuAffinityError, HostCpus};
pub use cpu_affinity::{parse_list, show_list};
pub use cpu_baseline::{CpuBaseline, CpuBaselineError};
pub use devices::virtio::vdpa::DoorbellMode;
pub use feature_mask::{FeatureMask, FeatureMaskError};
pub use iommu::{IommuConfig, MappingCount, MappingCountError};
pub use key_value::{KeyValueError, from_key_value, from_key_value_but, from_path_or_key_value};
pub use mac::{MacAddress, MacAddressError};
pub use ring_watch::{RingWatch, RingWatchError};
pub use size::{MemorySize, MemorySizeError};
pub use source::{DescriptorError, DeviceDescriptor, DeviceSource};
pub use vdpa::VdpaConfig;
pub use vfio::VfioConfig;

/// The default kernel command line.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0";

/// The complete configuration of a VM.
///
/// ```toml
/// kernel = "/boot/vmlinuz"
/// cpus = 2
/// memory = "512M"
///
/// [[vdpa]]
/// path = "/dev/vhost-vdpa-0"
///
/// [[disks]]
/// path = "root.img"
/// readonly = true
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Kernel image: an ELF with a PVH entry note (`vmlinux`) or a bzImage (`vmlinuz`).
    #[schema(value_type = String)]
    pub kernel: PathBuf,
    /// Initial RAM file system, as the kernel expects it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub initramfs: Option<PathBuf>,
    /// Kernel command line.
    #[serde(default = "default_cmdline")]
    pub cmdline: String,
    /// Number of vCPUs.
    #[serde(default)]
    #[schema(value_type = u8, minimum = 1, maximum = 32, default = 1)]
    pub cpus: CpuCount,
    /// The guest's CPU model: the host's, or a level of the x86-64 psABI. With a level the guest
    /// can migrate between different hosts of one vendor.
    #[serde(default, skip_serializing_if = "CpuBaseline::is_host")]
    #[schema(default = CpuBaseline::default)]
    pub cpu: CpuBaseline,
    /// The host CPUs of each vCPU: one list per vCPU, in their order (`[[0, 1], [2]]`). By default
    /// vCPUs run on all CPUs.
    #[serde(default, skip_serializing_if = "CpuAffinity::is_empty")]
    #[schema(schema_with = schema::cpu_affinity)]
    pub cpu_affinity: CpuAffinity,
    /// Guest memory.
    #[serde(default)]
    #[schema(schema_with = schema::memory)]
    pub memory: MemoryConfig,
    /// vDPA devices, in the order of their PCI slots.
    #[serde(default)]
    pub vdpa: Vec<VdpaConfig>,
    /// Disks, in the order of their PCI slots, after the vDPA devices.
    #[serde(default)]
    pub disks: Vec<DiskConfig>,
    /// PCI functions of the host, in the order of their PCI slots, after all other devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vfio: Vec<VfioConfig>,
    /// Whether the VMM detects stuck queues, and after how many seconds.
    #[serde(default)]
    #[schema(schema_with = schema::ring_watch)]
    pub ring_watch: RingWatch,
    /// A virtio-iommu, with which the guest decides what its devices reach. Null: only if a device
    /// has `iommu`.
    #[serde(
        default,
        deserialize_with = "iommu::table_or_null",
        skip_serializing_if = "Option::is_none"
    )]
    pub iommu: Option<IommuConfig>,
}

impl VmConfig {
    /// Replaces the device of the same name by `nic`, with its source and settings.
    ///
    /// # Errors
    /// [`NoSuchNic`].
    pub fn replace_nic(&mut self, nic: VdpaConfig) -> Result<(), NoSuchNic> {
        let id = nic.name();
        let Some(old) = self.vdpa.iter_mut().find(|old| old.name() == id) else {
            let has = self.vdpa.iter().map(VdpaConfig::name).collect();
            return Err(NoSuchNic { id, has });
        };
        *old = nic;
        Ok(())
    }

    /// As [`Self::replace_nic`], for a guest that uses the NIC already: a NIC behind the guest's
    /// IOMMU stays there. Its driver has accepted that, and its PCI slot depends on it.
    ///
    /// # Errors
    /// [`NoSuchNic`].
    pub fn restore_nic(&mut self, mut nic: VdpaConfig) -> Result<(), NoSuchNic> {
        let id = nic.name();
        nic.iommu |= self.vdpa.iter().any(|old| old.iommu && old.name() == id);
        self.replace_nic(nic)
    }

    /// Replaces each function by the one of the same name among `ours`. Returns the names that
    /// `ours` does not have.
    pub fn place_functions(&mut self, ours: &[VfioConfig]) -> Vec<String> {
        let mut missing = Vec::new();
        for function in &mut self.vfio {
            let id = function.name();
            match ours.iter().find(|ours| ours.name() == id) {
                Some(ours) => *function = ours.clone(),
                None => missing.push(id),
            }
        }
        missing
    }

    /// Drops the descriptors and keeps the devices' paths. A device is busy while any process holds
    /// it.
    pub fn release_descriptors(&mut self) {
        let nics = self.vdpa.iter_mut().map(|nic| &mut nic.source);
        let functions = self.vfio.iter_mut().map(|function| &mut function.source);
        for source in nics.chain(functions) {
            *source = source.released();
        }
    }

    /// The IOMMU that the VM has: its own, or one for the devices that need it.
    #[must_use]
    pub fn iommu_needed(&self) -> Option<IommuConfig> {
        let needed = self.vdpa.iter().any(|vdpa| vdpa.iommu)
            || self.disks.iter().any(|disk| disk.iommu)
            || self.vfio.iter().any(|function| function.iommu);
        self.iommu.or_else(|| needed.then(IommuConfig::default))
    }

    /// The files that the VM opens: its kernel, its initramfs and its disks.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let disks = self.disks.iter().map(|disk| disk.path.as_path());
        let boot = std::iter::once(self.kernel.as_path()).chain(self.initramfs.as_deref());
        boot.chain(disks)
    }
}

/// The VM has no vDPA device of this name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoSuchNic {
    /// The name.
    pub id: String,
    /// The names that exist.
    pub has: Vec<String>,
}

fn default_cmdline() -> String {
    DEFAULT_CMDLINE.to_owned()
}

/// A number of vCPUs between 1 and [`CpuCount::MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct CpuCount(u8);

/// An invalid number of vCPUs.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CpuCountError {
    /// Not a number.
    #[error("{0:?} is not a number of vCPUs")]
    NotANumber(String),
    /// Zero, or too many.
    #[error("{0} vCPUs: a machine has 1 to {max}", max = CpuCount::MAX)]
    OutOfRange(u64),
}

impl CpuCount {
    /// The most vCPUs of a VM.
    pub const MAX: u8 = 32;

    /// The number.
    #[must_use]
    pub fn get(self) -> u8 {
        self.0
    }
}

impl Default for CpuCount {
    fn default() -> Self {
        Self(1)
    }
}

impl TryFrom<u64> for CpuCount {
    type Error = CpuCountError;

    fn try_from(count: u64) -> Result<Self, Self::Error> {
        match u8::try_from(count) {
            Ok(small @ 1..=Self::MAX) => Ok(Self(small)),
            _ => Err(CpuCountError::OutOfRange(count)),
        }
    }
}

impl From<CpuCount> for u64 {
    fn from(count: CpuCount) -> Self {
        u64::from(count.0)
    }
}

impl FromStr for CpuCount {
    type Err = CpuCountError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse::<u64>()
            .map_err(|_| CpuCountError::NotANumber(text.to_owned()))?
            .try_into()
    }
}

/// Guest memory: a size (`"512M"`), or a table of a size, the pages that back it and its NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
// The derived functions read and write a table; the impls below also accept a size alone.
#[serde(remote = "Self", deny_unknown_fields)]
pub struct MemoryConfig {
    /// The size.
    #[serde(default)]
    pub size: MemorySize,
    /// Back it with the host's huge pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<HugePageSize>,
    /// Allocate it on this NUMA node of the host only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_numa_node: Option<u16>,
}

/// The size of the host's huge pages that back guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HugePageSize {
    /// 2 MiB.
    #[serde(rename = "2M", alias = "2m")]
    Size2M,
    /// 1 GiB.
    #[serde(rename = "1G", alias = "1g")]
    Size1G,
}

impl HugePageSize {
    /// The size in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }
}

/// Not a size of huge pages.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a size of huge pages: give 2M or 1G")]
pub struct HugePageSizeError(String);

impl FromStr for HugePageSize {
    type Err = HugePageSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "2M" | "2m" => Ok(Self::Size2M),
            "1G" | "1g" => Ok(Self::Size1G),
            _ => Err(HugePageSizeError(text.to_owned())),
        }
    }
}

impl Serialize for MemoryConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for MemoryConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeOrFull;

        // A visitor instead of an untagged enum, which would hide the message that names the
        // unknown field.
        impl<'de> Visitor<'de> for SizeOrFull {
            type Value = MemoryConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a size such as \"512M\", or a table with size, hugepages and host_numa_node",
                )
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<MemoryConfig, E> {
                let size = text.parse().map_err(E::custom)?;
                Ok(MemoryConfig {
                    size,
                    ..MemoryConfig::default()
                })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<MemoryConfig, A::Error> {
                MemoryConfig::deserialize(de::value::MapAccessDeserializer::new(map))
            }
        }

        deserializer.deserialize_any(SizeOrFull)
    }
}

impl FromStr for MemoryConfig {
    type Err = KeyValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.contains('=') {
            from_key_value(text)
        } else {
            Ok(Self {
                size: text
                    .parse()
                    .map_err(|error: MemorySizeError| de::Error::custom(error))?,
                ..Self::default()
            })
        }
    }
}

/// A raw image that the guest sees as a virtio-blk disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// The image: a regular file or a block device.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// The disk's name in messages, and its serial number; `disk0`, `disk1`, … by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Reject writes.
    #[serde(default)]
    pub readonly: bool,
    /// As a vDPA device's `iommu`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub iommu: bool,
    /// As a vDPA device's `stall_kick`.
    #[serde(default, alias = "rescue")]
    pub stall_kick: bool,
    /// The most bytes that the guest may read and write in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::bps)]
    pub bps: Option<MemorySize>,
    /// The most requests that the guest may make in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    pub iops: Option<NonZeroU32>,
    /// For how many seconds `bps` and `iops` that were not used are saved up; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u16>, minimum = 1)]
    pub burst: Option<NonZeroU16>,
}

impl DiskConfig {
    /// The name of the disk with this number, from 0.
    #[must_use]
    pub fn name(&self, number: usize) -> String {
        self.id.clone().unwrap_or_else(|| format!("disk{number}"))
    }
}

/// `key=value,key=value`, as on the command line. The path may come first without its key.
macro_rules! from_str_by_key_value {
    ($($type:ty),*) => {$(
        impl FromStr for $type {
            type Err = KeyValueError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                from_path_or_key_value(text)
            }
        }
    )*};
}

from_str_by_key_value!(VdpaConfig, DiskConfig);

#[cfg(test)]
mod tests;
