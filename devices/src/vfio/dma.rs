//! Guest RAM, mapped for DMA once for all VFIO devices of a machine.
//!
//! Owns the I/O address space, which is the guest's physical one. It is a container of VFIO, or an
//! IOAS of iommufd. It must not know the devices in it.
//!
//! ```text
//!               first device: in the address space, then all RAM pinned and mapped
//!   empty ───────────────────────────────────────────────────────────────────> mapped
//!     ^                                                                          │
//!     +──────────────────────────────────────────────────────────────────────────+
//!               last device: RAM unmapped, then out of the address space
//! ```
//! Devices come and go under one lock, so that none comes between the last one's end and the unmap.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iommufd_bindings::iommufd::{
    iommu_ioas_map, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as IOMMU_IOAS_MAP_FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as IOMMU_IOAS_MAP_READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as IOMMU_IOAS_MAP_WRITEABLE,
};
use iommufd_ioctls::{IommuFd, IommufdError};
use parking_lot::Mutex;
use vdpa::iotlb::Access;
use vfio_ioctls::{VfioContainer, VfioDeviceFd, VfioError, VfioIommufd, VfioOps};
use vm_memory::{
    Address as _, GuestMemoryBackend as _, GuestMemoryRegion as _, MemoryRegionAddress,
};

use super::translated::TranslatedDma;
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

/// The kernel's object with the address space.
#[derive(Clone)]
pub(super) enum Space {
    /// It has no mappings before its first group, and after its last one.
    Container(Arc<VfioContainer>),
    /// Mappings stay until they are unmapped.
    Iommufd(Arc<VfioIommufd>),
}

vdpa::opaque_debug! {
    Space, this =>
    iommufd: matches!(this, Self::Iommufd(_)),
}

impl Space {
    fn open(hypervisor: Arc<VfioDeviceFd>, iommufd: bool) -> Result<Self, Error> {
        if iommufd {
            let file = IommuFd::new().map_err(|error| cannot_use_iommufd().because(error))?;
            let space = VfioIommufd::new(Arc::new(file), None, Some(hypervisor));
            let space = space.map_err(|error| cannot_use_iommufd().because(error))?;
            return Ok(Self::Iommufd(Arc::new(space)));
        }
        let container = VfioContainer::new(Some(hypervisor)).map_err(cannot_use_container)?;
        Ok(Self::Container(Arc::new(container)))
    }

    fn operations(&self) -> Arc<dyn VfioOps> {
        match self {
            Self::Container(container) => container.clone(),
            Self::Iommufd(iommufd) => iommufd.clone(),
        }
    }

    /// The first and last address of each range that the devices reach, if the kernel reports them.
    fn reachable(&self) -> Result<Option<Vec<(u64, u64)>>, Error> {
        match self {
            Self::Container(container) => uapi::iova_ranges(&**container)
                .map_err(Error::context("VFIO_IOMMU_GET_INFO failed")),
            Self::Iommufd(iommufd) => uapi::ioas_ranges(&**iommufd.iommufd(), iommufd.ioas().id())
                .map(Some)
                .map_err(Error::context("IOMMU_IOAS_IOVA_RANGES failed")),
        }
    }
}

/// Mappings, by requests of Bellhop's: `vfio-ioctls` maps all memory writable.
impl Space {
    /// Maps `len` bytes at the address `host` of this process.
    ///
    /// # Safety
    /// The memory must be guest RAM, which devices may change at any time. It must stay until the
    /// mapping is removed, or until all devices have left the address space.
    pub(super) unsafe fn map(
        &self,
        iova: u64,
        len: u64,
        host: u64,
        access: Access,
    ) -> io::Result<()> {
        let (read, write) = (
            access.allows(Access::ReadOnly),
            access.allows(Access::WriteOnly),
        );
        match self {
            // SAFETY: needed for the request. The caller vouches for the memory.
            Self::Container(container) => unsafe {
                uapi::map_dma(&**container, (iova, len), host, (read, write))
            },
            Self::Iommufd(iommufd) => {
                let mut flags = IOMMU_IOAS_MAP_FIXED_IOVA;
                flags |= if read { IOMMU_IOAS_MAP_READABLE } else { 0 };
                flags |= if write { IOMMU_IOAS_MAP_WRITEABLE } else { 0 };
                let request = iommu_ioas_map {
                    size: uapi::argsz::<iommu_ioas_map>(),
                    flags,
                    ioas_id: iommufd.ioas().id(),
                    __reserved: 0,
                    user_va: host,
                    length: len,
                    iova,
                };
                let mapped = iommufd.iommufd().map_iommu_ioas(&request);
                mapped.map_err(errno)
            }
        }
    }

    /// Removes the mappings in a range, each as a whole.
    pub(super) fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        match self {
            Self::Container(container) => uapi::unmap_dma(&**container, (iova, len)),
            Self::Iommufd(iommufd) => match iommufd.ioas().unmap(iova, len).map_err(errno) {
                // Nothing is mapped.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
                unmapped => unmapped,
            },
        }
    }
}

/// The kernel's error of a request of iommufd.
fn errno(error: IommufdError) -> io::Error {
    match error {
        IommufdError::IommuIoasMap(error) | IommufdError::IommuIoasUnmap(error) => {
            io::Error::from_raw_os_error(error.errno())
        }
        error => io::Error::other(error),
    }
}

/// The device file of iommufd.
const IOMMUFD: &str = "/dev/iommu";

/// Whether the host has iommufd, and a device file for this function.
#[must_use]
pub fn has_iommufd(function: &Path) -> bool {
    Path::new(IOMMUFD).exists() && function.join("vfio-dev").exists()
}

/// See the module.
pub struct Dma {
    space: Space,
    /// The one device is behind the guest's IOMMU, which decides what it reaches.
    translated: bool,
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
    /// Opens an address space for devices that reach `memory`: of `iommufd`, or a container.
    /// `hypervisor` is KVM's device for VFIO. `translated`: it is for one device behind the guest's
    /// IOMMU.
    ///
    /// # Errors
    /// The host has no VFIO, or no iommufd.
    pub fn new(
        hypervisor: Arc<VfioDeviceFd>,
        memory: SharedMemory,
        iommufd: bool,
        translated: bool,
    ) -> Result<Self, Error> {
        Ok(Self {
            space: Space::open(hypervisor, iommufd)?,
            translated,
            memory,
            devices: Mutex::default(),
        })
    }

    /// The address space, if it is one of iommufd.
    pub(super) fn iommufd(&self) -> Option<Arc<VfioIommufd>> {
        match &self.space {
            Space::Iommufd(iommufd) => Some(iommufd.clone()),
            Space::Container(_) => None,
        }
    }

    /// Opens a device in the address space with `open`, and maps guest RAM if it is the first one.
    ///
    /// # Errors
    /// The address space has it already, or that of `open`, or devices cannot reach a part of RAM,
    /// or RAM cannot be pinned. Nothing has changed then, and `close` was called after `open`.
    pub(super) fn add<T>(
        &self,
        directory: &Path,
        open: impl FnOnce(Arc<dyn VfioOps>) -> Result<T, Error>,
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
        let device = open(self.space.operations())?;
        if !devices.mapped
            && !self.translated
            && let Err(error) = self.map()
        {
            close(device);
            return Err(error);
        }
        devices.mapped = true;
        devices.directories.insert(directory.to_owned());
        Ok(device)
    }

    /// Closes a device with `close`. Guest RAM is unmapped before, if it is the last one.
    pub(super) fn remove(&self, directory: &Path, close: impl FnOnce()) {
        let mut devices = self.devices.lock();
        devices.directories.remove(directory);
        if devices.directories.is_empty() {
            // A container discards its mappings with its last group, but that may leave later.
            // Behind the guest's IOMMU its mappings are not those of RAM.
            if !self.translated || self.iommufd().is_some() {
                self.ram_ranges()
                    .iter()
                    .flatten()
                    .for_each(|range| self.unmap(range));
            }
            devices.mapped = false;
        }
        close();
    }

    /// The address and length of each region of guest RAM.
    pub(super) fn ram(&self) -> impl Iterator<Item = (u64, u64)> {
        let regions = self.memory.iter();
        regions.map(|region| (region.start_addr().raw_value(), region.len()))
    }

    /// What the open device reaches, if it is behind the guest's IOMMU. It begins with nothing.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub(super) fn translation(&self) -> Result<Option<TranslatedDma>, Error> {
        if !self.translated {
            return Ok(None);
        }
        let reachable = self.space.reachable()?.unwrap_or_default();
        // Reserved ranges in between belong to interrupts, and drivers leave them out.
        let last = reachable.iter().map(|(_, last)| *last).max();
        let space = self.space.clone();
        Ok(Some(TranslatedDma::new(
            space,
            last.unwrap_or(u64::MAX),
            &self.memory,
        )))
    }

    /// The regions of guest RAM with their host addresses.
    fn ram_ranges(&self) -> Result<Vec<RamRange>, Error> {
        let mut ram = Vec::new();
        for region in self.memory.iter() {
            let host = region.get_host_address(MemoryRegionAddress(0));
            ram.push(RamRange {
                start: region.start_addr().raw_value(),
                len: region.len(),
                host: host.map_err(Error::context("guest RAM has no host mapping"))?,
            });
        }
        Ok(ram)
    }

    /// Maps guest RAM. The address space has a device.
    fn map(&self) -> Result<(), Error> {
        let ram = self.ram_ranges()?;
        if let Some(reachable) = self.space.reachable()? {
            check_reachable(&ram, &reachable)?;
        }
        let map = |range: &RamRange| {
            let host = u64::try_from(range.host.expose_provenance()).map_err(io::Error::other)?;
            // SAFETY: needed so that devices reach guest RAM. The range is one mapped region of
            // `self.memory`, which no Rust reference points into. A device keeps the address space
            // and this value, so the memory stays mapped until the devices are closed.
            unsafe {
                self.space
                    .map(range.start, range.len, host, Access::ReadWrite)
            }
        };
        map_all(&ram, map, |range| self.unmap(range)).map_err(cannot_map)
    }

    fn unmap(&self, range: &RamRange) {
        if let Err(error) = self.space.unmap(range.start, range.len) {
            tracing::error!(address = range.start, %error, "cannot unmap guest RAM from VFIO");
        }
    }
}

fn cannot_use_iommufd() -> Error {
    Error::other(format!(
        "cannot use {IOMMUFD}: load the module (modprobe iommufd), run as root or give this user \
         access, or use a container of VFIO (iommufd=off)"
    ))
}

fn cannot_use_container(source: VfioError) -> Error {
    let message = match &source {
        VfioError::OpenContainer(error) if error.kind() == io::ErrorKind::NotFound => {
            "there is no /dev/vfio/vfio: load the module vfio-pci (modprobe vfio-pci)"
        }
        VfioError::OpenContainer(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            "no permission to open /dev/vfio/vfio: run as root, or give this user access"
        }
        VfioError::VfioExtension => {
            "the host's VFIO has no type 1 IOMMU: enable the IOMMU in the firmware and on the \
             kernel's command line (intel_iommu=on), and load vfio_iommu_type1"
        }
        _ => {
            "cannot use /dev/vfio/vfio: load the modules (modprobe -a vfio-pci vfio_iommu_type1), \
             or use iommufd where the host has it"
        }
    };
    Error::other(message).because(source)
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

fn cannot_map((address, source): (u64, io::Error)) -> Error {
    let remedy = match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            ": raise the limit of locked memory (ulimit -l, LimitMEMLOCK=) to the guest's memory \
             and as much again for each vDPA device"
        }
        // A reserved address, or one that is too high.
        Some(libc::EINVAL | libc::EADDRINUSE) => {
            ": the host's IOMMU does not translate this address; give the guest less memory"
        }
        _ => "",
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
    fn the_remedies_of_an_address_space_are_named() {
        assert!(cannot_use_iommufd().to_string().contains("iommufd=off"));
        let other = cannot_use_container(VfioError::VfioApiVersion).to_string();
        assert!(other.contains("modprobe -a vfio-pci"), "{other}");
        let text = |error: io::Error| cannot_map((0, error)).to_string();
        let errno_of = io::Error::from_raw_os_error;
        assert!(text(errno_of(libc::ENOMEM)).contains("LimitMEMLOCK="));
        assert!(!text(errno_of(libc::EFAULT)).contains("LimitMEMLOCK="));
        assert!(text(errno_of(libc::EINVAL)).contains("less memory"));
        let by_iommufd = IommufdError::IommuIoasMap(SysError::new(libc::ENOMEM));
        assert!(text(errno(by_iommufd)).contains("LimitMEMLOCK="));
    }
}
