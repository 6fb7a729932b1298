//! VFIO of the kernel (`linux/vfio.h`): a group with one PCI function, in a container of its own.
//!
//! This module has the requests and their order, not the use of the device.

use super::access::address;
use lab::error::{Error, Result};
use std::ffi::c_ulong;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::path::{Path, PathBuf};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref, ioctl_with_val};

/// `_IO(VFIO_TYPE, VFIO_BASE + n)`.
const fn number(n: c_ulong) -> c_ulong {
    (0x3b << 8) | (100 + n)
}
const SET_IOMMU: c_ulong = number(2);
const GROUP_SET_CONTAINER: c_ulong = number(4);
const GROUP_GET_DEVICE_FD: c_ulong = number(6);
const DEVICE_GET_REGION_INFO: c_ulong = number(8);
const IOMMU_MAP_DMA: c_ulong = number(13);
const IOMMU_UNMAP_DMA: c_ulong = number(14);

/// `VFIO_TYPE1v2_IOMMU`.
const TYPE1_V2: c_ulong = 3;

/// `VFIO_DMA_MAP_FLAG_READ` and `_WRITE`.
const READ_WRITE: u32 = 3;

/// `struct vfio_iommu_type1_dma_map`.
#[repr(C)]
struct Map {
    size: u32,
    flags: u32,
    host: u64,
    iova: u64,
    len: u64,
}

/// `struct vfio_iommu_type1_dma_unmap`.
#[repr(C)]
struct Unmap {
    size: u32,
    flags: u32,
    iova: u64,
    len: u64,
}

/// `struct vfio_region_info`.
#[repr(C)]
#[derive(Default)]
struct Region {
    size: u32,
    flags: u32,
    index: u32,
    capabilities: u32,
    len: u64,
    offset: u64,
}

/// Bytes of a request's structure, for its first field.
fn size_of_request<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or_default()
}

fn check(result: i32, action: &'static str) -> Result<i32> {
    if result < 0 {
        return Err(Error::system(action)(io::Error::last_os_error()));
    }
    Ok(result)
}

/// A function that this process owns. Dropping it gives the function back and undoes all mappings.
pub(super) struct Group {
    function: PathBuf,
    device: File,
    // Closed after the device.
    _group: File,
    container: File,
}

impl Group {
    /// Opens a function that is bound to vfio-pci.
    pub(super) fn open(function: &Path) -> Result<Self> {
        let open = |path: &Path| {
            let file = File::options().read(true).write(true).open(path);
            file.map_err(Error::file("open", path))
        };
        let link = function.join("iommu_group");
        let target = std::fs::read_link(&link).map_err(Error::file("read", &link))?;
        let container = open(Path::new("/dev/vfio/vfio"))?;
        let group = open(&Path::new("/dev/vfio").join(target.file_name().unwrap_or_default()))?;
        let descriptor = container.as_raw_fd();
        // SAFETY: needed because VFIO's interface is ioctls. This one reads one integer, which
        // lives across the call.
        let set = unsafe { ioctl_with_ref(&group, GROUP_SET_CONTAINER, &descriptor) };
        check(set, "add the group to the container")?;
        // SAFETY: as above; the argument is a number.
        let set = unsafe { ioctl_with_val(&container, SET_IOMMU, TYPE1_V2) };
        check(set, "set the container's IOMMU")?;
        let name = std::ffi::CString::new(address(function)?)
            .map_err(|_| Error::invalid("the function's address", "it has a zero byte"))?;
        // SAFETY: as above; this one reads a terminated string, which lives across the call.
        let device = unsafe { ioctl_with_ptr(&group, GROUP_GET_DEVICE_FD, name.as_ptr()) };
        let device = check(device, "open the function")?;
        // SAFETY: needed to have the descriptor closed. It was just created and has no other owner.
        let device = unsafe { File::from_raw_fd(device) };
        Ok(Self {
            function: function.to_path_buf(),
            device,
            _group: group,
            container,
        })
    }

    /// The function's directory in sysfs.
    pub(super) fn function(&self) -> &Path {
        &self.function
    }

    /// The file with a region, a BAR or the configuration space, and its offset there.
    pub(super) fn region(&self, index: u32) -> Result<(File, u64)> {
        let mut region = Region {
            size: size_of_request::<Region>(),
            index,
            ..Region::default()
        };
        // SAFETY: as in `open`; the kernel writes no more bytes than `size`, and the structure
        // lives across the call.
        let asked =
            unsafe { ioctl_with_mut_ref(&self.device, DEVICE_GET_REGION_INFO, &mut region) };
        check(asked, "find a region of the function")?;
        let file = self.device.try_clone();
        let file = file.map_err(Error::system("duplicate the function's descriptor"))?;
        Ok((file, region.offset))
    }

    /// Lets the function reach `len` bytes of this process at the address `iova`. Both are whole
    /// pages. The kernel pins the pages, so they outlive this process's own mapping.
    ///
    /// # Safety
    /// The caller accesses the memory as volatile, since the function writes there.
    pub(super) unsafe fn map(&self, host: u64, len: u64, iova: u64) -> Result<()> {
        let map = Map {
            size: size_of_request::<Map>(),
            flags: READ_WRITE,
            host,
            iova,
            len,
        };
        // SAFETY: as in `open`; the kernel reads one whole `Map`. The caller allows the writes.
        let mapped = unsafe { ioctl_with_ref(&self.container, IOMMU_MAP_DMA, &map) };
        check(mapped, "map memory for the function").map(drop)
    }

    /// Undoes one [`Group::map`].
    pub(super) fn unmap(&self, iova: u64, len: u64) -> Result<()> {
        let mut unmap = Unmap {
            size: size_of_request::<Unmap>(),
            flags: 0,
            iova,
            len,
        };
        // SAFETY: as in `open`; the kernel reads and writes one whole `Unmap`.
        let asked = unsafe { ioctl_with_mut_ref(&self.container, IOMMU_UNMAP_DMA, &mut unmap) };
        check(asked, "unmap memory of the function")?;
        if unmap.len != len {
            let why = format!("only {} of {len} bytes were mapped", unmap.len);
            return Err(Error::invalid("an unmapped range", why));
        }
        Ok(())
    }
}
