//! Which devices the configuration asks for, as virtio backends.
//!
//! Owns their order, which is that of their PCI slots. It must not know how
//! they are shown to the guest.

use devices::virtio::backend::{Backend as _, SharedMemory};
use devices::virtio::block::Block;
use devices::virtio::block::disk::Disk;
use devices::virtio::rng::Rng;
use devices::virtio::vdpa::{VdpaBackend, VdpaOptions};

use super::MachineError;
use super::inventory::Device;
use crate::config::{DiskConfig, VdpaConfig, VmConfig};

/// Virtio device type of a network device (virtio 1.3, section 5).
const VIRTIO_ID_NET: u32 = 1;

/// Opens everything the configuration asks for: vDPA devices, disks, and the
/// random number generator that every machine has.
///
/// `ram_end` is the first guest-physical address above all RAM.
pub(super) fn open(
    config: &VmConfig,
    memory: &SharedMemory,
    ram_end: u64,
) -> Result<Vec<Device>, MachineError> {
    let mut devices = Vec::new();
    for vdpa in &config.vdpa {
        devices.push(open_vdpa(vdpa, memory, ram_end)?);
    }
    for (number, disk) in config.disks.iter().enumerate() {
        devices.push(open_disk(number, disk, memory)?);
    }
    devices.push(Device {
        id: "rng".to_owned(),
        backend: Box::new(Rng::new(memory.clone())),
        nic: None,
        rescue: false,
    });
    Ok(devices)
}

/// Opens one vDPA device, which maps guest RAM; see [`open`].
pub(super) fn open_vdpa(
    config: &VdpaConfig,
    memory: &SharedMemory,
    ram_end: u64,
) -> Result<Device, MachineError> {
    let id = config.name();
    let options = VdpaOptions {
        id: id.clone(),
        path: config.path.clone(),
        mac: config.mac.map(|mac| mac.bytes()),
        num_queues: config.num_queues,
        doorbell: config.doorbell,
    };
    match VdpaBackend::open(&options, memory.clone(), ram_end) {
        Ok(backend) => Ok(Device {
            id,
            nic: (backend.device_type() == VIRTIO_ID_NET).then(|| config.clone()),
            backend: Box::new(backend),
            rescue: config.rescue,
        }),
        Err(source) => Err(MachineError::Vdpa { id, source }),
    }
}

fn open_disk(
    number: usize,
    config: &DiskConfig,
    memory: &SharedMemory,
) -> Result<Device, MachineError> {
    let id = config.name(number);
    let disk = Disk::open(&config.path, config.readonly)?;
    match Block::new(disk, &id, memory.clone()) {
        Ok(block) => Ok(Device {
            id,
            backend: Box::new(block),
            nic: None,
            rescue: config.rescue,
        }),
        Err(source) => Err(MachineError::Block { id, source }),
    }
}
