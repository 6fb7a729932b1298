//! Opens a PCI function of the host that is bound to a VFIO driver.
//!
//! Owns the checks before and after, each with its remedy, and the open device. It must not know
//! the guest.
//!
//! `vfio-ioctls` opens group and device, and lists regions. `docs/design/decisions.md` lists its
//! faults, which are avoided here.

use std::fs::{self, File};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use rustix::fs::{OFlags, major, minor};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_INFO_NORESIZE,
    VFIO_PCI_MSIX_IRQ_INDEX, VFIO_REGION_INFO_FLAG_MMAP, vfio_region_info,
};
use vfio_ioctls::{VfioDevice, VfioError, VfioOps, VfioRegionInfoCap};

use super::dma::Dma;
use super::host::{BARS, CONFIG, Description, Host, Region};
use super::uapi;
use crate::Error;
use crate::hypervisor::DevicePages;

/// Regions that are used: BARs, the ROM and configuration space.
const REGIONS: u8 = CONFIG + 1;

/// Which function to give to a guest.
#[derive(Debug)]
pub struct VfioOptions {
    /// Name in messages.
    pub id: String,
    /// Its directory in sysfs, such as `/sys/bus/pci/devices/0000:03:10.1`.
    pub path: PathBuf,
    /// Its own file, if another process opened it: see [`check_cdev`].
    pub fd: Option<OwnedFd>,
    /// Whether it may be a function that is not virtual. Its guest controls the whole device.
    pub allow_pf: bool,
}

impl VfioOptions {
    /// Checks the function in sysfs, and opens nothing.
    ///
    /// # Errors
    /// The function cannot be given to a guest; the text has the remedy.
    pub fn check(&self) -> Result<(), Error> {
        check_function(&self.path, self.allow_pf).map(drop)
    }
}

/// An open function.
pub(super) struct HostDevice {
    /// Taken when it is dropped.
    device: ManuallyDrop<OpenDevice>,
    /// Offsets in the file, by region.
    offsets: [u64; REGIONS as usize],
    directory: PathBuf,
    /// Keeps guest RAM mapped.
    dma: Arc<Dma>,
}

/// The crate's device, which is closed by [`OpenDevice::close`] only.
struct OpenDevice {
    device: ManuallyDrop<VfioDevice>,
    /// The same open device.
    file: File,
    /// Whether it is the device's own file, bound to iommufd.
    by_iommufd: bool,
}

impl OpenDevice {
    fn new(device: VfioDevice, by_iommufd: bool) -> Result<Self, Error> {
        let fd = device.as_raw_fd();
        // SAFETY: needed because the crate lends no `BorrowedFd`. The device is open.
        let file = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        let file = file.map_err(Error::context("cannot duplicate the device's descriptor"))?;
        Ok(Self {
            device: ManuallyDrop::new(device),
            file: file.into(),
            by_iommufd,
        })
    }

    /// Closes the device, and takes its group out of the container.
    ///
    /// The kernel keeps a group there while its device is open. So both descriptors are closed
    /// before the crate's `drop`, which returns the group. It panics if sysfs does not show the
    /// function any more, and the host may remove a function that is closed. sysfs loses the driver
    /// of a function long before the function itself: without it the crate's value is leaked.
    fn close(self, directory: &Path) {
        let Self {
            device,
            file,
            by_iommufd,
        } = self;
        if by_iommufd {
            drop(ManuallyDrop::into_inner(device));
            return;
        }
        let fd = device.as_raw_fd();
        let closed = vdpa::eventfd::new().and_then(|other| {
            // SAFETY: needed to close the device, whose descriptor becomes another file. The crate
            // owns it, and only closes it from here on.
            match unsafe { libc::dup3(other.as_raw_fd(), fd, libc::O_CLOEXEC) } {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
        if let Err(error) = closed {
            // The crate's `drop` closes it all the same, but later.
            tracing::warn!(device = %directory.display(), %error, "cannot close the device first");
        }
        drop(file);
        if link_name(&directory.join("driver")).is_some() {
            drop(ManuallyDrop::into_inner(device));
            return;
        }
        tracing::warn!(
            device = %directory.display(),
            "/sys does not show the function's driver: its IOMMU group leaves the container when \
             the host has unbound it"
        );
        // SAFETY: needed to close the descriptor, which `drop` would have done. The value is
        // leaked, so its descriptor is closed once.
        unsafe { libc::close(fd) };
    }
}

vdpa::opaque_debug! {
    HostDevice, this =>
    directory: this.directory,
}

/// Checks that `fd` is a function's own file (`/dev/vfio/devices/vfioN`), open for reading and
/// writing, without changing anything. Returns the function's directory in sysfs.
///
/// # Errors
/// It is no such file, or not open for both.
pub fn check_cdev(fd: BorrowedFd<'_>) -> Result<PathBuf, Error> {
    let number = fd.as_raw_fd();
    let path = fs::read_link(format!("/proc/self/fd/{number}"))
        .unwrap_or_else(|_| PathBuf::from(format!("file descriptor {number}")));
    let other = Error::context::<io::Error>(format!("cannot query {}", path.display()));
    let queried = fd.try_clone_to_owned().and_then(|copy| {
        let metadata = File::from(copy).metadata()?;
        Ok((metadata, rustix::fs::fcntl_getfl(fd)?))
    });
    let (metadata, flags) = queried.map_err(other)?;
    let device = metadata
        .file_type()
        .is_char_device()
        .then(|| metadata.rdev());
    let function = device.and_then(|device| function_of(Path::new("/sys"), device));
    let Some(function) = function else {
        return Err(Error::other(format!(
            "{} is not a device file of VFIO: open the /dev/vfio/devices/vfioN that \
             /sys/bus/pci/devices/ADDRESS/vfio-dev lists",
            path.display()
        )));
    };
    if flags & OFlags::RWMODE != OFlags::RDWR {
        return Err(Error::other(format!(
            "{} is not open for reading and writing: open it with O_RDWR",
            path.display()
        )));
    }
    Ok(function)
}

/// Returns the directory of the function whose own file is this character device.
fn function_of(sysfs: &Path, device: u64) -> Option<PathBuf> {
    let link = format!("dev/char/{}:{}", major(device), minor(device));
    // Ends with ADDRESS/vfio-dev/vfioN.
    let device = fs::canonicalize(sysfs.join(link)).ok()?;
    let class = device
        .parent()
        .filter(|class| class.ends_with("vfio-dev"))?;
    let address = class.parent()?.file_name()?;
    let function = sysfs.join("bus/pci/devices").join(address);
    function.exists().then_some(function)
}

/// Opens a function, and maps guest RAM for it.
///
/// # Errors
/// The function cannot be given to a guest; the text has the remedy.
pub(super) fn open(
    options: VfioOptions,
    dma: &Arc<Dma>,
) -> Result<(HostDevice, Description), Error> {
    let (directory, address, driver) = check_function(&options.path, options.allow_pf)?;
    let open = |space: Arc<dyn VfioOps>| {
        // Attached to the IOAS, if the address space is one of iommufd.
        let device = match (options.fd, dma.iommufd()) {
            (None, _) => VfioDevice::new(&directory, space, true),
            (Some(fd), Some(iommufd)) => VfioDevice::new_from_fd(fd.into(), iommufd, true),
            (Some(_), None) => {
                return Err(Error::other(
                    "a function's own file needs /dev/iommu: load the module iommufd (modprobe \
                     iommufd), or name the function by its address",
                ));
            }
        };
        OpenDevice::new(device.map_err(cannot_open)?, dma.iommufd().is_some())
    };
    let device = dma.add(&directory, open, |device| device.close(&directory))?;
    let mut host = HostDevice {
        device: ManuallyDrop::new(device),
        offsets: [0; REGIONS as usize],
        directory,
        dma: Arc::clone(dma),
    };
    let description = host.describe(&address, driver)?;
    Ok((host, description))
}

/// Checks what sysfs shows of a function. Returns its directory, its address and its driver.
fn check_function(path: &Path, allow_pf: bool) -> Result<(PathBuf, String, String), Error> {
    let directory = fs::canonicalize(path).map_err(|source| {
        Error::other(format!(
            "there is no PCI function {}: list them with lspci -D",
            path.display()
        ))
        .because(source)
    })?;
    let name = directory.file_name().and_then(|name| name.to_str());
    let address = name.unwrap_or_default().to_owned();
    if !directory.join("resource").exists() {
        return Err(Error::other(format!(
            "{} is not a PCI function: give its directory in /sys/bus/pci/devices",
            path.display()
        )));
    }
    if !allow_pf && link_name(&directory.join("physfn")).is_none() {
        return Err(Error::other(format!(
            "{address} is not a virtual function: its guest would control the whole device, with \
             the functions of other guests. Create virtual functions (sriov_numvfs), or allow it \
             with allow_pf=on"
        )));
    }
    let Some(group) = link_name(&directory.join("iommu_group")) else {
        return Err(Error::other(format!(
            "{address} has no IOMMU group: enable the IOMMU in the firmware and on the host \
             kernel's command line (intel_iommu=on; AMD: in the firmware only)"
        )));
    };
    let driver = link_name(&directory.join("driver"));
    let driver = match driver {
        Some(driver) if is_vfio(&driver) => driver,
        other => {
            let driver = other.map_or("no driver".to_owned(), |driver| format!("driver {driver}"));
            return Err(Error::other(format!(
                "{address} is bound to {driver}, not to vfio-pci: bellhop bind pci/{address} \
                 vfio-pci"
            )));
        }
    };
    let mut others = Vec::new();
    for entry in fs::read_dir(directory.join("iommu_group/devices"))
        .into_iter()
        .flatten()
    {
        let Ok(entry) = entry else { continue };
        let driver = link_name(&entry.path().join("driver"));
        let viable = driver
            .as_deref()
            .is_none_or(|driver| is_vfio(driver) || matches!(driver, "pci-stub" | "pcieport"));
        if !viable {
            others.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    if !others.is_empty() {
        others.sort();
        return Err(Error::other(format!(
            "the IOMMU group {group} of {address} also has {}, which the host uses, and all \
             functions of a group belong together: bellhop bind pci/{} vfio-pci",
            others.join(", "),
            others.join(" vfio-pci; bellhop bind pci/")
        )));
    }
    Ok((directory, address, driver))
}

fn link_name(link: &Path) -> Option<String> {
    let target = fs::read_link(link).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// Whether a driver is vfio-pci or a variant for one type of device.
fn is_vfio(driver: &str) -> bool {
    driver.contains("vfio")
}

fn cannot_open(source: VfioError) -> Error {
    let message = match &source {
        VfioError::OpenGroup(error, group) => match error.raw_os_error() {
            Some(libc::EBUSY) => format!(
                "the device is in use: find the process with fuser -v /dev/vfio/{group}, and stop \
                 its VM"
            ),
            Some(libc::EACCES | libc::EPERM) => format!(
                "no permission to open /dev/vfio/{group}: run as root, or give this user access"
            ),
            _ => format!(
                "cannot open /dev/vfio/{group}: load vfio-pci (modprobe vfio-pci), and bind the \
                 function again"
            ),
        },
        VfioError::OpenDeviceCdev(error)
            if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM)) =>
        {
            "no permission to open the device's file in /dev/vfio/devices: run as root, or give \
             this user access"
                .to_owned()
        }
        VfioError::VfioDeviceBindIommufd(error)
            if matches!(error.errno(), libc::EBUSY | libc::EINVAL) =>
        {
            "the device is in use, or the host uses a function of its IOMMU group: find the \
             process with fuser -v /dev/vfio/* /dev/vfio/devices/*, and stop its VM"
                .to_owned()
        }
        VfioError::VfioDeviceAttachIommufdPt(error) if error.errno() == libc::EPERM => {
            "the host's IOMMU cannot remap interrupts: enable interrupt remapping in the firmware. \
             (The parameter allow_unsafe_interrupts of iommufd lets a guest send any interrupt to \
             the host.)"
                .to_owned()
        }
        VfioError::GroupViable => "the kernel finds that the host uses a function of the device's \
                                   IOMMU group: bind all of them to vfio-pci"
            .to_owned(),
        VfioError::ContainerSetIOMMU(error) if error.errno() == libc::EPERM => {
            "the host's IOMMU cannot remap interrupts: enable interrupt remapping in the firmware. \
             (The parameter allow_unsafe_interrupts of vfio_iommu_type1 lets a guest send any \
             interrupt to the host.)"
                .to_owned()
        }
        _ => "cannot open the device with VFIO: look into the host's kernel log (dmesg), and use \
              another function or host"
            .to_owned(),
    };
    Error::other(message).because(source)
}

fn no_pci_device(address: &str) -> Error {
    Error::other(format!(
        "{address} is not a PCI device of VFIO: bind it to vfio-pci or a variant of it (bellhop \
         bind pci/{address} vfio-pci)"
    ))
}

fn two_descriptions(address: &str, region: u8) -> Error {
    Error::other(format!(
        "the kernel describes region {region} of {address} in two ways: use another function or \
         host, and report it with the output of `bellhop report`"
    ))
}

impl HostDevice {
    pub(super) fn device(&self) -> &VfioDevice {
        &self.device.device
    }

    /// The guest RAM that the function reaches: address and length.
    pub(super) fn ram(&self) -> impl Iterator<Item = (u64, u64)> {
        self.dma.ram()
    }

    /// The function's own file, if it was opened by that one.
    pub(super) fn find_own_file(&self) -> Option<PathBuf> {
        let listed = self.directory.join("vfio-dev");
        let listed = self.device.by_iommufd.then(|| fs::read_dir(listed))?;
        let name = listed.ok()?.next()?.ok()?.file_name();
        Some(Path::new("/dev/vfio/devices").join(name))
    }

    /// Checks the open device, and returns its properties.
    fn describe(&mut self, address: &str, driver: String) -> Result<Description, Error> {
        let failed = |call: &str| Error::context(format!("{call} failed"));
        let info = uapi::device_info(&self.device.file).map_err(failed("VFIO_DEVICE_GET_INFO"))?;
        if info.flags & VFIO_DEVICE_FLAGS_PCI == 0 {
            return Err(no_pci_device(address));
        }
        if info.flags & VFIO_DEVICE_FLAGS_RESET == 0 {
            return Err(Error::other(format!(
                "the host cannot reset {address} alone, so one guest would get what another one \
                 left in it: use a function with FLR (lspci -vv shows FLReset+)"
            )));
        }
        let mut regions: [Region; BARS] = Default::default();
        for index in 0..REGIONS {
            let info = uapi::region_info(&self.device.file, index.into())
                .map_err(failed("VFIO_DEVICE_GET_REGION_INFO"))?;
            if !self.agrees(&info) {
                return Err(two_descriptions(address, index));
            }
            if let Some(offset) = self.offsets.get_mut(usize::from(index)) {
                *offset = info.offset;
            }
            if let Some(region) = regions.get_mut(usize::from(index)) {
                region.size = info.size;
                if info.flags & VFIO_REGION_INFO_FLAG_MMAP != 0 {
                    region.areas = self.areas(&info);
                }
            }
        }
        let msix = self.device.device.get_irq_info(VFIO_PCI_MSIX_IRQ_INDEX);
        Ok(Description {
            driver,
            regions,
            vectors: msix.map_or(0, |msix| msix.count),
            resizable: msix.is_some_and(|msix| msix.flags & VFIO_IRQ_INFO_NORESIZE == 0),
        })
    }

    /// Whether `vfio-ioctls` has this region at this index. It leaves out regions whose request
    /// fails, and then the later ones have wrong indices.
    fn agrees(&self, info: &vfio_region_info) -> bool {
        self.device.device.get_region_offset(info.index) == info.offset
            && self.device.device.get_region_size(info.index) == info.size
            && self.device.device.get_region_flags(info.index) == info.flags
    }

    /// Returns the parts of a region that can be mapped.
    fn areas(&self, info: &vfio_region_info) -> Vec<(u64, u64)> {
        let caps = self.device.device.get_region_caps(info.index);
        let sparse = caps.into_iter().find_map(|cap| match cap {
            VfioRegionInfoCap::SparseMmap(sparse) => Some(sparse.areas),
            _ => None,
        });
        match sparse {
            Some(areas) => areas.iter().map(|area| (area.offset, area.size)).collect(),
            None => vec![(0, info.size)],
        }
    }

    fn position(&self, region: u8, offset: u64) -> io::Result<u64> {
        let start = self.offsets.get(usize::from(region));
        let position = start.and_then(|start| start.checked_add(offset));
        position.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

impl Host for HostDevice {
    fn read(&self, region: u8, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.device
            .file
            .read_exact_at(data, self.position(region, offset)?)
    }

    fn write(&self, region: u8, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device
            .file
            .write_all_at(data, self.position(region, offset)?)
    }

    fn map(&self, bar: u8, offset: u64, size: u64) -> io::Result<Arc<dyn DevicePages>> {
        let pages = BarPages::map(&self.device.file, self.position(bar, offset)?, size)?;
        Ok(Arc::new(pages))
    }

    fn set_vectors(&self, first: u32, eventfds: &[RawFd]) -> io::Result<()> {
        uapi::set_vectors(&self.device.file, first, eventfds)
    }

    fn disable_vectors(&self) -> io::Result<()> {
        uapi::disable_vectors(&self.device.file)
    }

    fn set_request(&self, eventfd: RawFd) -> io::Result<()> {
        uapi::set_request(&self.device.file, eventfd)
    }

    fn set_error(&self, eventfd: RawFd) -> io::Result<()> {
        uapi::set_error(&self.device.file, eventfd)
    }

    fn reset(&self) -> io::Result<()> {
        uapi::reset(&self.device.file)
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        // SAFETY: needed to close the device, which takes it. The value is not used again.
        let device = unsafe { ManuallyDrop::take(&mut self.device) };
        let directory = &self.directory;
        self.dma.remove(directory, || device.close(directory));
    }
}

/// Pages of a BAR, mapped into this process, which never accesses them.
#[derive(Debug)]
struct BarPages {
    address: u64,
    size: usize,
}

impl BarPages {
    fn map(file: &File, offset: u64, size: u64) -> io::Result<Self> {
        let size = usize::try_from(size).map_err(io::Error::other)?;
        // SAFETY: needed to reach the device's pages. A new mapping at an address of the kernel's
        // choice replaces nothing that Rust knows.
        let mapped = unsafe {
            mmap(
                ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )
        }?;
        let address = u64::try_from(mapped.addr()).map_err(io::Error::other)?;
        Ok(Self { address, size })
    }
}

// SAFETY: needed to map the pages into a guest. The value owns one mapping of this size, at an
// address that never changes, and unmaps it when it is dropped. Nothing in this process accesses
// it.
unsafe impl DevicePages for BarPages {
    fn host_address(&self) -> u64 {
        self.address
    }

    fn size(&self) -> u64 {
        u64::try_from(self.size).unwrap_or(u64::MAX)
    }
}

impl Drop for BarPages {
    fn drop(&mut self) {
        let address = usize::try_from(self.address).unwrap_or(0);
        // SAFETY: needed to undo the mapping, which this value owns. No reference points into it.
        let unmapped = unsafe { munmap(ptr::without_provenance_mut(address), self.size) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "cannot unmap a BAR");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::symlink;

    use super::super::config::DeviceConfig;
    use super::super::model::{Rig, virtio_config};
    use super::*;

    /// A directory as sysfs shows a function.
    struct Sysfs(PathBuf);

    impl Sysfs {
        fn new(name: &str) -> Self {
            let unique = format!("bellhop-vfio-{name}-{}", std::process::id());
            let root = std::env::temp_dir().join(unique);
            let sysfs = Self(root);
            fs::create_dir_all(sysfs.function()).unwrap();
            fs::write(sysfs.function().join("resource"), "").unwrap();
            fs::create_dir_all(sysfs.0.join("groups/7/devices")).unwrap();
            sysfs
        }

        fn function(&self) -> PathBuf {
            self.0.join("0000:03:10.1")
        }

        fn link(&self, name: &str, target: &str) {
            symlink(target, self.function().join(name)).unwrap();
        }

        fn refusal(&self, allow_pf: bool) -> String {
            check_function(&self.function(), allow_pf)
                .unwrap_err()
                .to_string()
        }
    }

    impl Drop for Sysfs {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn each_refusal_names_its_remedy() {
        let sysfs = Sysfs::new("refusals");
        let missing = check_function(Path::new("/nowhere/0000:00:00.0"), true).unwrap_err();
        assert!(missing.to_string().contains("lspci -D"), "{missing}");
        let text = sysfs.refusal(false);
        assert!(
            text.contains("allow_pf=on") && text.contains("sriov_numvfs"),
            "{text}"
        );
        assert!(sysfs.refusal(true).contains("intel_iommu=on"));
        sysfs.link("physfn", "../0000:03:00.0");
        sysfs.link("iommu_group", "../groups/7");
        let text = sysfs.refusal(false);
        assert!(text.contains("no driver"), "{text}");
        sysfs.link("driver", "../drivers/igbvf");
        let text = sysfs.refusal(false);
        let command = "bellhop bind pci/0000:03:10.1 vfio-pci";
        assert!(
            text.contains("driver igbvf") && text.contains(command),
            "{text}"
        );
        fs::remove_file(sysfs.function().join("driver")).unwrap();
        sysfs.link("driver", "../drivers/vfio-pci");
        let (directory, address, driver) = check_function(&sysfs.function(), false).unwrap();
        assert_eq!(
            (address.as_str(), driver.as_str()),
            ("0000:03:10.1", "vfio-pci")
        );
        assert!(directory.ends_with(&address));

        // A second function of the group that the host uses.
        let other = sysfs.0.join("groups/7/devices/0000:03:10.3");
        fs::create_dir(&other).unwrap();
        check_function(&sysfs.function(), false).unwrap();
        symlink("../drivers/igb", other.join("driver")).unwrap();
        let text = sysfs.refusal(false);
        assert!(
            text.contains("bind pci/0000:03:10.3 vfio-pci") && text.contains("group 7"),
            "{text}"
        );

        // Of the kernel, and of the device.
        let opened = |errno| {
            let error = io::Error::from_raw_os_error(errno);
            cannot_open(VfioError::OpenGroup(error, "7".to_owned()))
        };
        let msix = |bytes: &[(usize, u8)], vectors| {
            let mut config = virtio_config();
            for (offset, value) in bytes {
                config[*offset] = *value;
            }
            let description = Description {
                vectors,
                ..Rig::virtio().description
            };
            let config = DeviceConfig::new(&config);
            config
                .and_then(|config| config.msix(&description).map(drop))
                .unwrap_err()
        };
        for (error, words) in [
            (opened(libc::EBUSY), "fuser -v /dev/vfio/7"),
            (opened(libc::EACCES), "run as root"),
            (opened(libc::ENODEV), "modprobe vfio-pci"),
            (cannot_open(VfioError::VfioApiVersion), "dmesg"),
            (no_pci_device("0000:03:10.1"), command),
            (two_descriptions("0000:03:10.1", 2), "bellhop report"),
            (msix(&[(0, 0xff), (1, 0xff)], 3), "power-cycle the host"),
            (msix(&[(0x60, 0xaa)], 3), "lspci -vv"),
            (msix(&[], 2), "another function or host"),
            (msix(&[(0x64, 2)], 3), "another function or host"),
        ] {
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn a_function_is_found_by_its_own_file() {
        let sysfs = Sysfs::new("cdev");
        let device = rustix::fs::makedev(511, 7);
        let found = || function_of(&sysfs.0, device);
        assert_eq!(found(), None);
        let own = sysfs.function().join("vfio-dev/vfio7");
        fs::create_dir_all(&own).unwrap();
        for directory in ["dev/char", "bus/pci/devices"] {
            fs::create_dir_all(sysfs.0.join(directory)).unwrap();
        }
        symlink(&own, sysfs.0.join("dev/char/511:7")).unwrap();
        // Not of the PCI bus.
        assert_eq!(found(), None);
        let function = sysfs.0.join("bus/pci/devices/0000:03:10.1");
        symlink(sysfs.function(), &function).unwrap();
        assert_eq!(found(), Some(function));
        // The file of a group, or of another class.
        fs::remove_file(sysfs.0.join("dev/char/511:7")).unwrap();
        symlink(sysfs.function(), sysfs.0.join("dev/char/511:7")).unwrap();
        assert_eq!(found(), None);

        let null = File::options().read(true).write(true).open("/dev/null");
        let regular = File::open("/proc/self/status");
        for file in [null, regular] {
            let error = check_cdev(file.unwrap().as_fd()).unwrap_err().to_string();
            assert!(
                error.contains("open the /dev/vfio/devices/vfioN"),
                "{error}"
            );
        }
    }

    #[test]
    fn pages_are_mapped_and_unmapped() {
        let path = std::env::temp_dir().join(format!("bellhop-vfio-pages-{}", std::process::id()));
        fs::write(&path, vec![0; 0x3000]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let pages = BarPages::map(&file, 0x1000, 0x2000).unwrap();
        assert_eq!((pages.size(), pages.host_address() % 4096), (0x2000, 0));
        let maps = || fs::read_to_string("/proc/self/maps").unwrap();
        let range = format!("{:x}-{:x} rw-s", pages.address, pages.address + 0x2000);
        assert!(maps().contains(&range));
        drop(pages);
        assert!(!maps().contains(&range));
        BarPages::map(&file, 0x10, 0x1000).unwrap_err();
    }
}
