//! Guest RAM, mapped for DMA once for all VFIO devices of a machine.
//!
//! Owns the container, whose I/O address space is the guest's physical one. It must not know the
//! devices in it.
//!
//! ```text
//!               first device: in the container, then all RAM pinned and mapped
//!   empty ───────────────────────────────────────────────────────────────────> mapped
//!     ^                                                                          │
//!     +──────────────────────────────────────────────────────────────────────────+
//!               last device: out of the container; the kernel unmaps all
//! ```
//! Devices come and go under one lock, so that none comes between the last one's end and the unmap.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use vfio_ioctls::{VfioContainer, VfioDeviceFd, VfioError};
use vm_memory::{
    Address as _, GuestMemoryBackend as _, GuestMemoryRegion as _, MemoryRegionAddress,
};

use super::uapi;
use crate::Error;
use crate::virtio::backend::SharedMemory;

/// A region of guest RAM: its guest-physical address, its length and its host address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RamRange {
    start: u64,
    len: u64,
    host: *mut u8,
}

/// See the module.
pub struct Dma {
    container: Arc<VfioContainer>,
    /// Keeps the mapped memory.
    memory: SharedMemory,
    devices: Mutex<Devices>,
}

/// The devices in the container.
#[derive(Debug, Default)]
struct Devices {
    /// Their directories in sysfs. The kernel would open one of them twice.
    directories: BTreeSet<PathBuf>,
    /// Whether guest RAM is mapped.
    mapped: bool,
}

vdpa::opaque_debug! {
    Dma, this =>
    devices: *this.devices.lock(),
}

impl Dma {
    /// Opens a container for devices that reach `memory`. `hypervisor` is KVM's device for VFIO.
    ///
    /// # Errors
    /// The host has no VFIO.
    pub fn new(hypervisor: Arc<VfioDeviceFd>, memory: SharedMemory) -> Result<Self, Error> {
        let container = VfioContainer::new(Some(hypervisor)).map_err(|source| {
            let message = match &source {
                VfioError::OpenContainer(error) if error.kind() == io::ErrorKind::NotFound => {
                    "there is no /dev/vfio/vfio: load the module vfio-pci (modprobe vfio-pci)"
                }
                VfioError::OpenContainer(error)
                    if error.kind() == io::ErrorKind::PermissionDenied =>
                {
                    "no permission to open /dev/vfio/vfio: run as root, or give this user access"
                }
                VfioError::VfioExtension => {
                    "the host's VFIO has no type 1 IOMMU: enable the IOMMU in the firmware and on \
                     the kernel's command line (intel_iommu=on), and load vfio_iommu_type1"
                }
                _ => "cannot use /dev/vfio/vfio",
            };
            Error::other(message).because(source)
        })?;
        Ok(Self {
            container: Arc::new(container),
            memory,
            devices: Mutex::default(),
        })
    }

    /// Opens a device in the container with `open`, and maps guest RAM if it is the first one.
    ///
    /// # Errors
    /// The container has it already, or that of `open`, or devices cannot reach a part of RAM, or
    /// RAM cannot be pinned. Nothing has changed then, and `close` was called after `open`.
    pub(super) fn add<T>(
        &self,
        directory: &Path,
        open: impl FnOnce(&Arc<VfioContainer>) -> Result<T, Error>,
        close: impl FnOnce(T),
    ) -> Result<T, Error> {
        let mut devices = self.devices.lock();
        if devices.directories.contains(directory) {
            let name = directory.file_name().unwrap_or(directory.as_os_str());
            return Err(Error::other(format!(
                "the VM has {} already: remove one of its devices",
                name.display()
            )));
        }
        let device = open(&self.container)?;
        if !devices.mapped
            && let Err(error) = self.map()
        {
            close(device);
            return Err(error);
        }
        devices.mapped = true;
        devices.directories.insert(directory.to_owned());
        Ok(device)
    }

    /// Closes a device with `close`, which returns whether it has left the container.
    pub(super) fn remove(&self, directory: &Path, close: impl FnOnce() -> bool) {
        let mut devices = self.devices.lock();
        let left = close();
        devices.directories.remove(directory);
        if left && devices.directories.is_empty() {
            // The kernel discards the address space of a container without a group.
            devices.mapped = false;
        }
    }

    /// The address and length of each region of guest RAM.
    pub(super) fn ram(&self) -> impl Iterator<Item = (u64, u64)> {
        let regions = self.memory.iter();
        regions.map(|region| (region.start_addr().raw_value(), region.len()))
    }

    /// Maps guest RAM. The container has a device.
    fn map(&self) -> Result<(), Error> {
        let mut ram = Vec::new();
        for region in self.memory.iter() {
            let host = region.get_host_address(MemoryRegionAddress(0));
            ram.push(RamRange {
                start: region.start_addr().raw_value(),
                len: region.len(),
                host: host.map_err(Error::context("guest RAM has no host mapping"))?,
            });
        }
        let reachable = uapi::iova_ranges(&*self.container)
            .map_err(Error::context("VFIO_IOMMU_GET_INFO failed"))?;
        if let Some(reachable) = reachable {
            check_reachable(&ram, &reachable)?;
        }
        let map = |range: &RamRange| {
            let len = usize::try_from(range.len).unwrap_or(usize::MAX);
            // SAFETY: needed so that devices reach guest RAM. The range is one mapped region of
            // `self.memory`, which no Rust reference points into. A device keeps the container and
            // this value, so the memory stays mapped until the container is closed.
            unsafe { self.container.vfio_dma_map(range.start, len, range.host) }
        };
        let unmap = |range: &RamRange| {
            let len = usize::try_from(range.len).unwrap_or(usize::MAX);
            if let Err(error) = self.container.vfio_dma_unmap(range.start, len) {
                tracing::error!(address = range.start, %error, "cannot unmap guest RAM from VFIO");
            }
        };
        map_all(&ram, map, unmap).map_err(cannot_map)
    }
}

/// Checks that devices reach all of RAM.
fn check_reachable(ram: &[RamRange], reachable: &[(u64, u64)]) -> Result<(), Error> {
    for RamRange { start, len, .. } in ram {
        let last = start.saturating_add(len.saturating_sub(1));
        let mut ranges = reachable.iter();
        if !ranges.any(|(first, end)| first <= start && last <= *end) {
            let ranges: Vec<String> = reachable
                .iter()
                .map(|(first, last)| format!("{first:#x}-{last:#x}"))
                .collect();
            return Err(Error::other(format!(
                "devices cannot reach guest RAM at {start:#x}-{last:#x}: the host's IOMMU allows \
                 {}. Give the guest less memory",
                ranges.join(", ")
            )));
        }
    }
    Ok(())
}

/// Maps all ranges or none.
fn map_all<E>(
    ram: &[RamRange],
    mut map: impl FnMut(&RamRange) -> Result<(), E>,
    unmap: impl FnMut(&RamRange),
) -> Result<(), (u64, E)> {
    for (count, range) in ram.iter().enumerate() {
        if let Err(error) = map(range) {
            ram.iter().take(count).for_each(unmap);
            return Err((range.start, error));
        }
    }
    Ok(())
}

fn cannot_map((address, source): (u64, VfioError)) -> Error {
    let full = matches!(&source, VfioError::IommuDmaMap(error) if error.errno() == libc::ENOMEM);
    let remedy = if full {
        ": raise the limit of locked memory (ulimit -l, LimitMEMLOCK=) to the guest's memory and \
         as much again for each vDPA device"
    } else {
        ""
    };
    Error::other(format!(
        "cannot pin guest RAM at {address:#x} for VFIO{remedy}"
    ))
    .because(source)
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::errno::Error as SysError;

    use super::*;

    fn ram() -> [RamRange; 3] {
        let range = |start, len| RamRange {
            start,
            len,
            host: std::ptr::null_mut(),
        };
        [
            range(0, 0xa_0000),
            range(0x10_0000, 0xbff0_0000),
            range(1 << 32, 1 << 30),
        ]
    }

    #[test]
    fn all_of_ram_is_mapped_or_nothing() {
        for fails_at in 0..4 {
            let mapped = Mutex::new(Vec::new());
            let map = |range: &RamRange| {
                if mapped.lock().len() == fails_at {
                    return Err(());
                }
                mapped.lock().push(range.start);
                Ok(())
            };
            let unmap = |range: &RamRange| mapped.lock().retain(|start| *start != range.start);
            let result = map_all(&ram(), map, unmap);
            let expected = ram().get(fails_at).map_or(Ok(()), |at| Err((at.start, ())));
            assert_eq!(result, expected);
            let left = if fails_at == 3 { 3 } else { 0 };
            assert_eq!(mapped.lock().len(), left);
        }
    }

    #[test]
    fn a_hole_in_the_reachable_addresses_is_named() {
        check_reachable(&ram(), &[(0, 0xfedf_ffff), (0xfef0_0000, u64::MAX)]).unwrap();
        let error = check_reachable(&ram(), &[(0, 0xfedf_ffff), (0xfef0_0000, 1 << 32)]);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("0x100000000-0x13fffffff"), "{text}");
        assert!(text.contains("less memory"), "{text}");
    }

    #[test]
    fn the_limit_of_locked_memory_is_named() {
        let text =
            |errno| cannot_map((0, VfioError::IommuDmaMap(SysError::new(errno)))).to_string();
        assert!(text(libc::ENOMEM).contains("LimitMEMLOCK="));
        assert!(!text(libc::EFAULT).contains("LimitMEMLOCK="));
    }
}
