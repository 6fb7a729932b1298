//! Opens the devices of the configuration as virtio backends.
//!
//! Owns their order, which is that of their PCI slots. It must not know how they are presented to
//! the guest.

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use devices::virtio::backend::{Backend, SharedMemory};
use devices::virtio::block::Block;
use devices::virtio::block::disk::Disk;
use devices::virtio::block::limit::RateLimits;
use devices::virtio::rng::Rng;
use devices::virtio::vdpa::{VdpaBackend, VdpaOptions, not_replaceable};
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, DeviceMemory};

use super::pluggable::DeviceConfig;
use crate::config::{DeviceSource, DiskConfig, VdpaConfig, VmConfig};
use crate::host::Host;
use crate::{Error, ErrorKind};

/// Virtio device type of a network device (virtio 1.3, section 5).
pub(super) const VIRTIO_ID_NET: u32 = 1;

/// A backend with a name, before it is attached.
pub(super) struct Device {
    /// Name in messages and requests; unique in the machine.
    pub(super) id: String,
    pub(super) backend: Box<dyn Backend>,
    /// The requested configuration of a device that can be unplugged. It holds no descriptor; the
    /// backend has it.
    pub(super) config: Option<DeviceConfig>,
    /// Whether a hung queue is kicked and its driver interrupted.
    pub(super) stall_kick: bool,
    /// The NUMA node of the host to which it is attached, if the host reports one.
    pub(super) numa_node: Option<u16>,
}

/// Opens everything in the configuration: vDPA devices, disks, and the random number generator that
/// every machine has.
///
/// `ram_end` is the first guest-physical address above all RAM.
pub(super) fn open(
    config: &VmConfig,
    memory: &SharedMemory,
    ram_end: u64,
) -> Result<Vec<Device>, Error> {
    let mut devices = Vec::new();
    for vdpa in &config.vdpa {
        devices.push(open_vdpa(vdpa, memory, ram_end)?);
    }
    for (number, disk) in config.disks.iter().enumerate() {
        devices.push(open_disk(&disk.name(number), disk, memory)?);
    }
    devices.push(Device {
        id: "rng".to_owned(),
        backend: Box::new(Rng::new(device_memory(
            memory,
            config.iommu.is_some_and(|iommu| iommu.rng),
        ))),
        config: None,
        stall_kick: false,
        numa_node: None,
    });
    Ok(devices)
}

/// Returns guest RAM as an emulated device reaches it: `iommu` if it is behind the guest's IOMMU.
fn device_memory(ram: &SharedMemory, iommu: bool) -> DeviceMemory {
    if !iommu {
        return ram.clone().into();
    }
    DeviceMemory::behind(ram.clone(), Arc::new(AddressSpace::new(IovaRange::ALL)))
}

/// Opens one vDPA device, which maps guest RAM; see [`open`].
pub(super) fn open_vdpa(
    config: &VdpaConfig,
    memory: &SharedMemory,
    ram_end: u64,
) -> Result<Device, Error> {
    let id = config.name();
    let (path, fd) = match &config.source {
        DeviceSource::Path(path) => (path.clone(), None),
        DeviceSource::Descriptor(descriptor) => {
            let fd = descriptor.duplicate();
            let fd = fd.map_err(Error::failed("duplicating a descriptor"))?;
            (descriptor.path().to_owned(), Some(fd))
        }
        DeviceSource::Number(number) => {
            return Err(Error::no_descriptor(&format!("vDPA device {id}"), *number));
        }
    };
    let options = VdpaOptions {
        id: id.clone(),
        path,
        mac: config.mac.map(|mac| mac.bytes()),
        mac_lock: config.mac_lock,
        standby: config.standby,
        num_queues: config.num_queues,
        doorbell: config.doorbell,
        iommu: config.iommu,
    };
    let opened = match fd {
        Some(fd) => VdpaBackend::from_fd(fd, &options, memory.clone(), ram_end),
        None => VdpaBackend::open(&options, memory.clone(), ram_end),
    };
    if config.iommu && opened.is_ok() && is_rebuilt(&options.path) {
        tracing::warn!(
            device = %id,
            "each MAP or UNMAP of the guest stops the NIC {id}, because mlx5 rebuilds its memory \
             key: iommu=on suits guests that map once, such as DPDK"
        );
    }
    match opened {
        Ok(backend) if config.backup.is_some() && backend.device_type() != VIRTIO_ID_NET => {
            Err(cannot_be_used(&id, not_replaceable()))
        }
        Ok(backend) => Ok(Device {
            config: (backend.device_type() == VIRTIO_ID_NET).then(|| {
                DeviceConfig::Nic(VdpaConfig {
                    id: Some(id.clone()),
                    ..config.released()
                })
            }),
            id,
            backend: Box::new(backend),
            numa_node: node_of(&options.path),
            stall_kick: config.stall_kick,
        }),
        Err(source) => Err(cannot_be_used(&id, source)),
    }
}

fn cannot_be_used(id: &str, source: devices::Error) -> Error {
    Error::unusable(format!("cannot use vDPA device {id}")).because(source)
}

/// Whether the driver of the device at `path` rebuilds all mappings at each change.
fn is_rebuilt(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| Host::new().is_bound_to(&file, "mlx5_core"))
}

/// Returns the NUMA node to which the device file at `path` is attached, if it is one.
fn node_of(path: &Path) -> Option<u16> {
    Host::new().node_of(&std::fs::metadata(path).ok()?)
}

/// Returns the limits of a disk, if it has any.
fn limits(config: &DiskConfig) -> Result<Option<RateLimits>, Error> {
    if config.bps.is_none() && config.iops.is_none() {
        return Ok(None);
    }
    let bytes = config.bps.map(|bps| {
        let nothing = "bps is 0, so no request could begin: give at least 1K, or leave it out";
        NonZeroU64::new(bps.bytes()).ok_or_else(|| Error::unusable(nothing))
    });
    Ok(Some(RateLimits {
        bytes: bytes.transpose()?,
        requests: config.iops.map(NonZeroU64::from),
        burst: Duration::from_secs(config.burst.map_or(1, |burst| burst.get().into())),
    }))
}

/// Opens and locks the image of the disk `id`.
pub(super) fn open_disk(
    id: &str,
    config: &DiskConfig,
    memory: &SharedMemory,
) -> Result<Device, Error> {
    let id = id.to_owned();
    let limits = limits(config)?;
    let disk = Disk::open(&config.path, config.readonly);
    let disk = disk.map_err(|source| Error::transparent(ErrorKind::Unusable, source))?;
    let block = Block::new(disk, &id, device_memory(memory, config.iommu)).and_then(|mut block| {
        if let Some(limits) = limits {
            block.limit(limits)?;
        }
        Ok(block)
    });
    match block {
        Ok(block) => Ok(Device {
            config: Some(DeviceConfig::Disk(DiskConfig {
                id: Some(id.clone()),
                ..config.clone()
            })),
            id,
            backend: Box::new(block),
            numa_node: node_of(&config.path),
            stall_kick: config.stall_kick,
        }),
        Err(source) => Err(Error::unusable(format!("disk {id}")).because(source)),
    }
}
