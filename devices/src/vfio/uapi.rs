//! System calls on an open VFIO device and container, each with its own error.
//!
//! `vfio-ioctls` has them too, but loses errors there: see the module `vfio`. Owns the layout of
//! the requests. It must not know the state of the device.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use iommufd_bindings::iommufd::{
    IOMMUFD_CMD_IOAS_IOVA_RANGES, iommu_ioas_iova_ranges, iommu_iova_range,
};
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DEVICE_FEATURE_DMA_LOGGING_START, VFIO_DEVICE_FEATURE_PROBE,
    VFIO_DEVICE_FEATURE_SET, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_IOMMU_INFO_CAPS,
    VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
    VFIO_PCI_REQ_IRQ_INDEX, VFIO_TYPE, vfio_device_info, vfio_iommu_type1_dma_map,
    vfio_iommu_type1_dma_unmap, vfio_iommu_type1_info, vfio_region_info,
};

const DEVICE_GET_INFO: u32 = VFIO_BASE + 7;
const DEVICE_GET_REGION_INFO: u32 = VFIO_BASE + 8;
const DEVICE_SET_IRQS: u32 = VFIO_BASE + 10;
const DEVICE_RESET: u32 = VFIO_BASE + 11;
const IOMMU_GET_INFO: u32 = VFIO_BASE + 12;
const IOMMU_MAP_DMA: u32 = VFIO_BASE + 13;
const IOMMU_UNMAP_DMA: u32 = VFIO_BASE + 14;
const DEVICE_FEATURE: u32 = VFIO_BASE + 17;
/// `IOMMU_IOAS_IOVA_RANGES` of `linux/iommufd.h`, whose requests have the letter of VFIO's.
const IOAS_IOVA_RANGES: u32 = IOMMUFD_CMD_IOAS_IOVA_RANGES;
/// The most ranges that an IOAS may have.
const IOVA_RANGES_MAX: usize = 4096;

/// Bytes of `struct vfio_irq_set` without its data: five 32-bit fields.
const IRQ_SET_LEN: usize = 20;
/// The most bytes that the description of a container may have.
const IOMMU_INFO_MAX: usize = 1 << 16;

/// # Safety
/// `argument` must be what the request expects, for as many bytes as it says.
unsafe fn ioctl(file: &impl AsRawFd, number: u32, argument: *mut c_void) -> io::Result<c_int> {
    // All requests of VFIO are `_IO`: no direction and no size.
    let request = libc::Ioctl::from(VFIO_TYPE) << 8 | libc::Ioctl::from(number);
    // SAFETY: needed because there is no other way to issue the request. The caller vouches for the
    // argument, and the descriptor is open.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Returns the length of a structure for its field `argsz`.
pub(super) fn argsz<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

/// Returns flags and numbers of regions and interrupts.
pub(super) fn device_info(device: &File) -> io::Result<vfio_device_info> {
    let mut info = vfio_device_info {
        argsz: argsz::<vfio_device_info>(),
        ..Default::default()
    };
    // SAFETY: needed for the request. It fills this structure, whose length it has.
    unsafe { ioctl(device, DEVICE_GET_INFO, ptr::from_mut(&mut info).cast()) }?;
    Ok(info)
}

/// Returns size, flags and place of a region.
pub(super) fn region_info(device: &File, index: u32) -> io::Result<vfio_region_info> {
    let mut info = vfio_region_info {
        argsz: argsz::<vfio_region_info>(),
        index,
        ..Default::default()
    };
    let argument = ptr::from_mut(&mut info).cast();
    // SAFETY: needed for the request. It fills this structure, whose length it has.
    unsafe { ioctl(device, DEVICE_GET_REGION_INFO, argument) }?;
    Ok(info)
}

/// Connects MSI-X vectors from `first` on to `eventfds`. The device's other vectors stay.
pub(super) fn set_vectors(device: &File, first: u32, eventfds: &[RawFd]) -> io::Result<()> {
    let count = u32::try_from(eventfds.len()).unwrap_or(u32::MAX);
    let data = eventfds.iter().map(|fd| fd.cast_unsigned());
    let header = [
        VFIO_IRQ_SET_DATA_EVENTFD,
        VFIO_PCI_MSIX_IRQ_INDEX,
        first,
        count,
    ];
    set_irqs(device, header, data)
}

/// Has the kernel signal `eventfd` when the host wants the device back.
pub(super) fn set_request(device: &File, eventfd: RawFd) -> io::Result<()> {
    set_signal(device, VFIO_PCI_REQ_IRQ_INDEX, eventfd)
}

/// Has the kernel signal `eventfd` when the device reports an uncorrectable error.
pub(super) fn set_error(device: &File, eventfd: RawFd) -> io::Result<()> {
    set_signal(device, VFIO_PCI_ERR_IRQ_INDEX, eventfd)
}

fn set_signal(device: &File, index: u32, eventfd: RawFd) -> io::Result<()> {
    let header = [VFIO_IRQ_SET_DATA_EVENTFD, index, 0, 1];
    set_irqs(device, header, [eventfd.cast_unsigned()])
}

/// Disables MSI-X.
pub(super) fn disable_vectors(device: &File) -> io::Result<()> {
    let header = [VFIO_IRQ_SET_DATA_NONE, VFIO_PCI_MSIX_IRQ_INDEX, 0, 0];
    set_irqs(device, header, [])
}

/// The header is the type of the data, the index of the interrupts, the first one and their number.
fn set_irqs(
    device: &File,
    [data_type, index, start, count]: [u32; 4],
    data: impl IntoIterator<Item = u32>,
) -> io::Result<()> {
    let flags = data_type | VFIO_IRQ_SET_ACTION_TRIGGER;
    let mut request = vec![0, flags, index, start, count];
    request.extend(data);
    let len = IRQ_SET_LEN.max(request.len().saturating_mul(4));
    if let Some(argsz) = request.first_mut() {
        *argsz = u32::try_from(len).unwrap_or(u32::MAX);
    }
    // SAFETY: needed for the request. It reads `argsz` bytes, the length of the vector.
    let done = unsafe { ioctl(device, DEVICE_SET_IRQS, request.as_mut_ptr().cast()) }?;
    all_connected(done)
}

/// A positive result is how many vectors the host has left: fewer than asked for, and none of them
/// is connected.
fn all_connected(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        left => Err(io::Error::other(format!(
            "the host has {left} MSI-X vectors left"
        ))),
    }
}

/// Resets the function alone.
pub(super) fn reset(device: &File) -> io::Result<()> {
    // SAFETY: needed for the request, which has no argument.
    unsafe { ioctl(device, DEVICE_RESET, ptr::null_mut()) }?;
    Ok(())
}

/// Returns the first and last address of each range that devices of the container can reach.
/// `None`: the kernel does not tell (before Linux 5.4).
pub(super) fn iova_ranges(container: &impl AsRawFd) -> io::Result<Option<Vec<(u64, u64)>>> {
    let fixed = size_of::<vfio_iommu_type1_info>();
    let mut info = vec![0u64; fixed.div_ceil(8)];
    loop {
        let len = info.len() * 8;
        if let Some(first) = info.first_mut() {
            // The fields `argsz` and `flags`.
            *first = u64::try_from(len).unwrap_or(u64::MAX) & 0xffff_ffff;
        }
        // SAFETY: needed for the request. It fills at most `argsz` bytes, the length of the vector.
        unsafe { ioctl(container, IOMMU_GET_INFO, info.as_mut_ptr().cast()) }?;
        let bytes: Vec<u8> = info.iter().flat_map(|word| word.to_le_bytes()).collect();
        let needed = usize::try_from(read_u32(&bytes, 0).unwrap_or(0)).unwrap_or(usize::MAX);
        if needed > len && needed <= IOMMU_INFO_MAX {
            info = vec![0; needed.div_ceil(8)];
            continue;
        }
        return Ok(ranges_in(&bytes));
    }
}

/// Maps memory of this process in a container. `range` is address and length, and `access` whether
/// devices may read and write it.
///
/// # Safety
/// The memory must be guest RAM, which devices may change at any time, and stay while it is mapped.
pub(super) unsafe fn map_dma(
    container: &impl AsRawFd,
    (iova, size): (u64, u64),
    vaddr: u64,
    (read, write): (bool, bool),
) -> io::Result<()> {
    let mut flags = if read { VFIO_DMA_MAP_FLAG_READ } else { 0 };
    flags |= if write { VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
    let mut request = vfio_iommu_type1_dma_map {
        argsz: argsz::<vfio_iommu_type1_dma_map>(),
        flags,
        vaddr,
        iova,
        size,
    };
    // SAFETY: needed for the request. It reads this structure, whose length it has. The caller
    // vouches for the memory.
    unsafe { ioctl(container, IOMMU_MAP_DMA, ptr::from_mut(&mut request).cast()) }?;
    Ok(())
}

/// Removes the mappings in a range of a container, each as a whole.
pub(super) fn unmap_dma(container: &impl AsRawFd, (iova, size): (u64, u64)) -> io::Result<()> {
    // Without the array at its end, which these flags do not use.
    let mut request = vfio_iommu_type1_dma_unmap {
        argsz: argsz::<vfio_iommu_type1_dma_unmap>(),
        flags: 0,
        iova,
        size,
        ..Default::default()
    };
    let argument = ptr::from_mut(&mut request).cast();
    // SAFETY: needed for the request. It reads and fills this structure, whose length it has.
    unsafe { ioctl(container, IOMMU_UNMAP_DMA, argument) }?;
    Ok(())
}

/// Returns the first and last address of each range that devices of an IOAS can reach.
pub(super) fn ioas_ranges(iommufd: &impl AsRawFd, ioas: u32) -> io::Result<Vec<(u64, u64)>> {
    let mut ranges: Vec<iommu_iova_range> = Vec::new();
    loop {
        let address = ranges.as_mut_ptr().expose_provenance();
        let mut request = iommu_ioas_iova_ranges {
            size: argsz::<iommu_ioas_iova_ranges>(),
            ioas_id: ioas,
            num_iovas: u32::try_from(ranges.len()).unwrap_or(u32::MAX),
            __reserved: 0,
            allowed_iovas: u64::try_from(address).map_err(io::Error::other)?,
            out_iova_alignment: 0,
        };
        let argument = ptr::from_mut(&mut request).cast();
        // SAFETY: needed for the request. It fills this structure, and at most `num_iovas` ranges,
        // the length of the vector.
        let done = unsafe { ioctl(iommufd, IOAS_IOVA_RANGES, argument) };
        let needed = usize::try_from(request.num_iovas).unwrap_or(usize::MAX);
        match done {
            Ok(_) => {
                ranges.truncate(needed);
                return Ok(ranges
                    .iter()
                    .map(|range| (range.start, range.last))
                    .collect());
            }
            Err(error)
                if error.raw_os_error() == Some(libc::EMSGSIZE)
                    && needed > ranges.len()
                    && needed <= IOVA_RANGES_MAX =>
            {
                ranges.resize(needed, iommu_iova_range::default());
            }
            Err(error) => return Err(error),
        }
    }
}

fn read_u32(bytes: &[u8], offset: usize) -> Option<u32> {
    let field = bytes.get(offset..offset.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

fn read_u64(bytes: &[u8], offset: usize) -> Option<u64> {
    let field = bytes.get(offset..offset.checked_add(8)?)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}

/// Finds the ranges in a `struct vfio_iommu_type1_info` with its capabilities.
fn ranges_in(bytes: &[u8]) -> Option<Vec<(u64, u64)>> {
    if read_u32(bytes, 4)? & VFIO_IOMMU_INFO_CAPS == 0 {
        return None;
    }
    let mut next = read_u32(bytes, 16)?;
    // Each capability has 8 bytes or more, so a longer list has a cycle.
    for _ in 0..bytes.len() / 8 {
        let at = usize::try_from(next).ok().filter(|at| *at != 0)?;
        let id = read_u32(bytes, at)? & 0xffff;
        if id != VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE {
            next = read_u32(bytes, at.checked_add(4)?)?;
            continue;
        }
        let count = usize::try_from(read_u32(bytes, at.checked_add(8)?)?).ok()?;
        let range = |index: usize| {
            let start = at.checked_add(16)?.checked_add(index.checked_mul(16)?)?;
            Some((read_u64(bytes, start)?, read_u64(bytes, start + 8)?))
        };
        return (0..count).map(range).collect();
    }
    None
}

/// Whether the driver can log the pages that the device writes.
pub(super) fn has_log(device: &impl AsRawFd) -> io::Result<bool> {
    let feature =
        VFIO_DEVICE_FEATURE_PROBE | VFIO_DEVICE_FEATURE_SET | VFIO_DEVICE_FEATURE_DMA_LOGGING_START;
    // The length and the flags of `struct vfio_device_feature`, without data.
    let mut request = [8, feature];
    // SAFETY: needed for the request. It reads this structure, whose length it has.
    match unsafe { ioctl(device, DEVICE_FEATURE, request.as_mut_ptr().cast()) } {
        Ok(_) => Ok(true),
        // An older kernel, or a driver without a log.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn info(caps: &[(u16, u32)], body: &[u64]) -> Vec<u8> {
        let mut bytes = vec![0; 24];
        bytes[4] = 2;
        bytes[16] = 24;
        for (id, next) in caps {
            bytes.extend(u32::from(*id).to_le_bytes());
            bytes.extend(next.to_le_bytes());
        }
        bytes.extend(body.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    #[test]
    fn ranges_are_found_behind_another_capability() {
        let ranges = [0, 0xfedf_ffff, 0xfef0_0000, u64::MAX];
        let bytes = info(&[(3, 32), (1, 0)], &[&[2], &ranges[..]].concat());
        let expected = vec![(0, 0xfedf_ffff), (0xfef0_0000, u64::MAX)];
        assert_eq!(ranges_in(&bytes), Some(expected));
        // Cut, without the flag, in a cycle.
        assert_eq!(ranges_in(&bytes[..bytes.len() - 1]), None);
        assert_eq!(ranges_in(&info(&[(3, 24)], &[])), None);
        let mut none = bytes;
        none[4] = 0;
        assert_eq!(ranges_in(&none), None);
    }

    #[test]
    fn fewer_vectors_than_asked_for_are_an_error() {
        all_connected(0).unwrap();
        let error = all_connected(5).unwrap_err().to_string();
        assert!(error.contains("5 MSI-X vectors"), "{error}");
    }

    #[test]
    fn errors_are_those_of_the_kernel() {
        let file = File::open("/dev/null").unwrap();
        for error in [
            device_info(&file).unwrap_err(),
            region_info(&file, 7).unwrap_err(),
            set_vectors(&file, 0, &[0, 1]).unwrap_err(),
            disable_vectors(&file).unwrap_err(),
            set_request(&file, 0).unwrap_err(),
            set_error(&file, 0).unwrap_err(),
            reset(&file).unwrap_err(),
            iova_ranges(&file).unwrap_err(),
        ] {
            assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
        }
        assert!(!has_log(&file).unwrap());
    }

    proptest! {
        #[test]
        fn any_answer_is_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = ranges_in(&bytes);
        }
    }
}
