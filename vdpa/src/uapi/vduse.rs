//! The kernel's interface to devices in userspace: VDUSE, API version 0.
//!
//! Source: `linux/vduse.h` of Linux 6.12. Structures have the kernel's names, so that
//! [`layout`](super::layout) can compare them with the header. Messages are read and written as
//! [`REQUEST_SIZE`] bytes; `crate::vduse` decodes them.

#![allow(non_camel_case_types, reason = "the names of the header")]

use std::marker::PhantomData;
use std::os::raw::{c_int, c_uint};

use vmm_sys_util::ioctl::{_IOC_READ, _IOC_WRITE, ioctl_expr};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::{Read, ReadWrite, Write};

const VDUSE_BASE: c_uint = 0x81;
/// The version of this interface.
pub const VDUSE_API_VERSION: u64 = 0;
/// Bytes of a name, with its NUL.
pub const VDUSE_NAME_MAX: usize = 256;
/// Messages from the kernel.
pub const VDUSE_GET_VQ_STATE: u32 = 0;
/// The driver changes the status; 0 resets.
pub const VDUSE_SET_STATUS: u32 = 1;
/// Mappings in a range have changed.
pub const VDUSE_UPDATE_IOTLB: u32 = 2;
/// Results of a message.
pub const VDUSE_REQ_RESULT_OK: u32 = 0;
/// The device cannot.
pub const VDUSE_REQ_RESULT_FAILED: u32 = 1;
/// Access of the device to a mapping.
pub const VDUSE_ACCESS_RO: u8 = 1;
/// The device writes only.
pub const VDUSE_ACCESS_WO: u8 = 2;
/// Both.
pub const VDUSE_ACCESS_RW: u8 = 3;

/// The description of a new device, followed by its configuration space.
#[derive(Debug, Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
pub struct vduse_dev_config {
    /// NUL-terminated.
    pub name: [u8; VDUSE_NAME_MAX],
    /// Virtio vendor.
    pub vendor_id: u32,
    /// Virtio device type.
    pub device_id: u32,
    /// Offered features.
    pub features: u64,
    /// Queues.
    pub vq_num: u32,
    /// Alignment of the rings' areas.
    pub vq_align: u32,
    /// Zero.
    pub reserved: [u32; 13],
    /// Bytes of the configuration space.
    pub config_size: u32,
}

/// A mapping of I/O virtual addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct vduse_iotlb_entry {
    /// Where the mapping begins in its file.
    pub offset: u64,
    /// First address.
    pub start: u64,
    /// Last address.
    pub last: u64,
    /// `VDUSE_ACCESS_*`.
    pub perm: u8,
}

/// The largest size of a queue.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct vduse_vq_config {
    /// The queue.
    pub index: u32,
    /// Entries.
    pub max_size: u16,
    /// Zero.
    pub reserved: [u16; 13],
}

/// The position of a ring: a split ring's avail index is the first field.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct vduse_vq_state_packed {
    /// The driver's wrap counter.
    pub last_avail_counter: u16,
    /// Position of the next available entry.
    pub last_avail_idx: u16,
    /// The device's wrap counter.
    pub last_used_counter: u16,
    /// Position of the next used entry.
    pub last_used_idx: u16,
}

/// What the driver set for a queue.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct vduse_vq_info {
    /// The queue.
    pub index: u32,
    /// Entries.
    pub num: u32,
    /// Descriptors.
    pub desc_addr: u64,
    /// The driver's area.
    pub driver_addr: u64,
    /// The device's area.
    pub device_addr: u64,
    /// The position.
    pub packed: vduse_vq_state_packed,
    /// Whether the driver enabled the queue.
    pub ready: u8,
}

/// The eventfd for a queue's kicks.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct vduse_vq_eventfd {
    /// The queue.
    pub index: u32,
    /// The eventfd, or -1.
    pub fd: c_int,
}

/// A message from the kernel.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct vduse_dev_request {
    /// `VDUSE_GET_VQ_STATE`, `VDUSE_SET_STATUS` or `VDUSE_UPDATE_IOTLB`.
    pub type_: u32,
    /// For the answer.
    pub request_id: u32,
    /// Unused.
    pub reserved: [u32; 4],
    /// The queue, the status in the first byte, or the first and the last address.
    pub padding: [u32; 32],
}

/// The answer to a message.
#[derive(Debug, Clone, Copy, FromZeros, IntoBytes, Immutable)]
#[repr(C)]
pub struct vduse_dev_response {
    /// The message's.
    pub request_id: u32,
    /// `VDUSE_REQ_RESULT_*`.
    pub result: u32,
    /// Zero.
    pub reserved: [u32; 4],
    /// The queue of a position.
    pub index: u32,
    /// The position.
    pub packed: vduse_vq_state_packed,
    /// Unused.
    pub padding: [u32; 29],
}

/// Bytes of a message and of its answer.
pub const REQUEST_SIZE: usize = 152;

const _: () = {
    assert!(size_of::<vduse_dev_config>() == 336);
    assert!(size_of::<vduse_iotlb_entry>() == 32);
    assert!(size_of::<vduse_vq_config>() == 32);
    assert!(size_of::<vduse_vq_state_packed>() == 8);
    assert!(size_of::<vduse_vq_info>() == 48);
    assert!(size_of::<vduse_vq_eventfd>() == 8);
    assert!(size_of::<vduse_dev_request>() == REQUEST_SIZE);
    assert!(size_of::<vduse_dev_response>() == REQUEST_SIZE);
};

/// An ioctl's number; its size is that of `T`, which fits in the 14 bits.
#[expect(clippy::cast_possible_truncation, reason = "at most 336 bytes")]
const fn number<T>(direction: c_uint, number: c_uint) -> std::os::raw::c_ulong {
    ioctl_expr(direction, VDUSE_BASE, number, size_of::<T>() as c_uint)
}

macro_rules! ioctls {
    ($(
        $name:ident: $kind:ident<$argument:ty> = $number:literal, $c_name:literal, $doc:literal;
    )+) => {
        $(
            #[doc = $doc]
            #[must_use]
            pub const fn $name() -> $kind<$argument> {
                ioctls!(@make $kind<$argument>, $number)
            }
        )+

        /// Name in the header and number of every ioctl of this module.
        #[must_use]
        pub fn ioctl_numbers() -> Vec<(&'static str, std::os::raw::c_ulong)> {
            vec![$(($c_name, $name().number())),+]
        }
    };
    (@make Read<$argument:ty>, $number:literal) => {
        Read(number::<$argument>(_IOC_READ, $number), PhantomData)
    };
    (@make Write<$argument:ty>, $number:literal) => {
        Write(number::<$argument>(_IOC_WRITE, $number), PhantomData)
    };
    (@make ReadWrite<$argument:ty>, $number:literal) => {
        ReadWrite(number::<$argument>(_IOC_READ | _IOC_WRITE, $number), PhantomData)
    };
}

ioctls! {
    get_api_version: Read<u64> = 0x00, "VDUSE_GET_API_VERSION",
        "Control: the kernel's version.";
    set_api_version: Write<u64> = 0x01, "VDUSE_SET_API_VERSION",
        "Control: this program's version.";
    create_dev: Write<vduse_dev_config> = 0x02, "VDUSE_CREATE_DEV",
        "Control: creates `/dev/vduse/NAME`. CAP_NET_ADMIN for a network device.";
    destroy_dev: Write<[u8; VDUSE_NAME_MAX]> = 0x03, "VDUSE_DESTROY_DEV",
        "Control: deletes it. EBUSY while the file is open or the vDPA device exists.";
    iotlb_get_fd: ReadWrite<vduse_iotlb_entry> = 0x10, "VDUSE_IOTLB_GET_FD",
        "The first mapping that overlaps a range; the result is its file. EINVAL: none.";
    dev_get_features: Read<u64> = 0x11, "VDUSE_DEV_GET_FEATURES",
        "Features that the driver accepted.";
    vq_setup: Write<vduse_vq_config> = 0x14, "VDUSE_VQ_SETUP",
        "Largest size of a queue; for each queue before the vDPA device is added.";
    vq_get_info: ReadWrite<vduse_vq_info> = 0x15, "VDUSE_VQ_GET_INFO",
        "What the driver set for a queue.";
    vq_setup_kickfd: Write<vduse_vq_eventfd> = 0x16, "VDUSE_VQ_SETUP_KICKFD",
        "The eventfd for a queue's kicks, until the next reset.";
    vq_inject_irq: Write<u32> = 0x17, "VDUSE_VQ_INJECT_IRQ",
        "Interrupts the driver. EINVAL before DRIVER_OK, if the queue has no call eventfd.";
}
