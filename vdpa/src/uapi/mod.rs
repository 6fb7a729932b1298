//! The kernel's vhost-vdpa interface: every ioctl, message and bit.
//!
//! Source: `linux/vhost.h` and `linux/vhost_types.h`. Correct definitions of the `vhost` crate are
//! reused. Those that it lacks are defined here: RESUME, descriptor groups, per-queue sizes, the
//! ASID of an IOTLB message, the newer backend features. An ioctl is a typed value, so a number can
//! only be used with its own argument type.
//!
//! This module has numbers and layouts, not the order of their use. [`layout`] compares all of them
//! with the kernel's own headers.

pub mod layout;
pub mod message;
pub mod vduse;

use std::marker::PhantomData;
use std::os::raw::{c_int, c_uint, c_ulong};

use vhost::vhost_kern::vhost_binding as binding;
pub use vhost::vhost_kern::vhost_binding::{
    VHOST_ACCESS_RO, VHOST_ACCESS_RW, VHOST_ACCESS_WO, VHOST_IOTLB_BATCH_BEGIN,
    VHOST_IOTLB_BATCH_END, VHOST_IOTLB_INVALIDATE, VHOST_IOTLB_MSG_V2, VHOST_IOTLB_UPDATE,
    VHOST_VIRTIO, vhost_iotlb_msg, vhost_vdpa_config, vhost_vdpa_iova_range, vhost_vring_addr,
    vhost_vring_file, vhost_vring_state,
};
use vmm_sys_util::ioctl::{_IOC_NONE, _IOC_READ, _IOC_WRITE, ioctl_expr};

/// Unbinds an eventfd when passed instead of a file descriptor (`VHOST_FILE_UNBIND`).
pub const VHOST_FILE_UNBIND: c_int = -1;

/// Size of `struct vhost_vring_state` as an ioctl number encodes it, in bytes.
const VRING_STATE_SIZE: c_uint = 8;
const _: () = assert!(size_of::<vhost_vring_state>() == 8);

bitflags::bitflags! {
    /// Backend features (`VHOST_BACKEND_F_*`), as a mask. The header defines *bit numbers*; each
    /// constant here is `1 << number`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct BackendFeatures: u64 {
        /// Messages in the form `struct vhost_msg_v2`.
        const IOTLB_MSG_V2 = 1 << 1;
        /// BATCH_BEGIN and BATCH_END are understood.
        const IOTLB_BATCH = 1 << 2;
        /// The ASID field of a message is honoured. Offered even by devices
        /// with a single address space.
        const IOTLB_ASID = 1 << 3;
        /// The device can be suspended.
        const SUSPEND = 1 << 4;
        /// A suspended device can be resumed.
        const RESUME = 1 << 5;
        /// Queues may be enabled after DRIVER_OK.
        const ENABLE_AFTER_DRIVER_OK = 1 << 6;
        /// Rings can be in another address space than the buffers; needs `IOTLB_ASID`.
        const DESC_ASID = 1 << 7;
        /// The device keeps its mappings across a reset.
        const IOTLB_PERSIST = 1 << 8;
    }
}

impl BackendFeatures {
    /// The device stops and continues in the middle of its rings.
    pub const SUSPEND_AND_RESUME: Self = Self::SUSPEND.union(Self::RESUME);
}

/// An ioctl without an argument.
#[derive(Debug, Clone, Copy)]
pub struct Plain(c_ulong);

/// An ioctl whose argument the kernel fills in.
#[derive(Debug, Clone, Copy)]
pub struct Read<T>(c_ulong, PhantomData<T>);

/// An ioctl whose argument the kernel reads.
#[derive(Debug, Clone, Copy)]
pub struct Write<T>(c_ulong, PhantomData<T>);

/// An ioctl whose argument the kernel reads and changes.
#[derive(Debug, Clone, Copy)]
pub struct ReadWrite<T>(c_ulong, PhantomData<T>);

impl Plain {
    /// The ioctl number.
    #[must_use]
    pub const fn number(self) -> c_ulong {
        self.0
    }
}

macro_rules! number {
    ($($kind:ident),+) => {$(
        impl<T> $kind<T> {
            /// The ioctl number.
            #[must_use]
            pub const fn number(&self) -> c_ulong {
                self.0
            }
        }
    )+};
}
number!(Read, Write, ReadWrite);

/// Lists the ioctls: `name: kind = number, "C name", "documentation"`. The
/// same list feeds the comparison with the kernel's headers.
macro_rules! ioctls {
    ($(
        $name:ident: $kind:ident $(<$argument:ty>)? = $number:expr, $c_name:literal, $doc:literal;
    )+) => {
        $(
            #[doc = $doc]
            #[must_use]
            pub fn $name() -> $kind $(<$argument>)? {
                ioctls!(@make $kind $(<$argument>)?, $number)
            }
        )+

        /// Name in the header and number of every ioctl of this module.
        #[must_use]
        pub fn ioctl_numbers() -> Vec<(&'static str, c_ulong)> {
            vec![$(($c_name, $name().number())),+]
        }
    };
    (@make Plain, $number:expr) => { Plain($number) };
    (@make $kind:ident <$argument:ty>, $number:expr) => {
        $kind::<$argument>($number, PhantomData)
    };
}

ioctls! {
    get_features: Read<u64> = binding::VHOST_GET_FEATURES(), "VHOST_GET_FEATURES",
        "Virtio features the device offers.";
    set_features: Write<u64> = binding::VHOST_SET_FEATURES(), "VHOST_SET_FEATURES",
        "Virtio features the driver accepts. EBUSY once FEATURES_OK is set.";
    set_owner: Plain = binding::VHOST_SET_OWNER(), "VHOST_SET_OWNER",
        "Binds the device to this process. Needed once, before every ring and group ioctl (EPERM \
         without it).";
    set_vring_num: Write<vhost_vring_state> = binding::VHOST_SET_VRING_NUM(), "VHOST_SET_VRING_NUM",
        "Ring size. The kernel checks for a power of two only, not the device's maximum.";
    set_vring_addr: Write<vhost_vring_addr> =
        binding::VHOST_SET_VRING_ADDR(), "VHOST_SET_VRING_ADDR",
        "Ring addresses, which are IOVAs. EINVAL while the device runs.";
    set_vring_base: Write<vhost_vring_state> =
        binding::VHOST_SET_VRING_BASE(), "VHOST_SET_VRING_BASE",
        "Ring position (split: avail index; packed: 32 bits).";
    get_vring_base: ReadWrite<vhost_vring_state> =
        binding::VHOST_GET_VRING_BASE(), "VHOST_GET_VRING_BASE",
        "Ring position, as for `set_vring_base`.";
    set_vring_kick: Write<vhost_vring_file> =
        binding::VHOST_SET_VRING_KICK(), "VHOST_SET_VRING_KICK",
        "Eventfd by which the driver kicks.";
    set_vring_call: Write<vhost_vring_file> =
        binding::VHOST_SET_VRING_CALL(), "VHOST_SET_VRING_CALL",
        "Eventfd that the device signals; also the hook for interrupt bypass.";
    set_backend_features: Write<u64> =
        binding::VHOST_SET_BACKEND_FEATURES(), "VHOST_SET_BACKEND_FEATURES",
        "Backend features the driver uses. EOPNOTSUPP for an unknown one.";
    get_backend_features: Read<u64> =
        binding::VHOST_GET_BACKEND_FEATURES(), "VHOST_GET_BACKEND_FEATURES",
        "Backend features the kernel and the device offer.";
    get_device_id: Read<u32> = binding::VHOST_VDPA_GET_DEVICE_ID(), "VHOST_VDPA_GET_DEVICE_ID",
        "Virtio device type (virtio 1.3, section 5).";
    get_status: Read<u8> = binding::VHOST_VDPA_GET_STATUS(), "VHOST_VDPA_GET_STATUS",
        "Device status (virtio 1.3, 2.1).";
    set_status: Write<u8> = binding::VHOST_VDPA_SET_STATUS(), "VHOST_VDPA_SET_STATUS",
        "Device status. 0 resets; otherwise no bit may be cleared.";
    get_config: Read<vhost_vdpa_config> = binding::VHOST_VDPA_GET_CONFIG(), "VHOST_VDPA_GET_CONFIG",
        "Device configuration: a `vhost_vdpa_config` followed by `len` bytes.";
    set_config: Write<vhost_vdpa_config> =
        binding::VHOST_VDPA_SET_CONFIG(), "VHOST_VDPA_SET_CONFIG",
        "Device configuration, as for `get_config`.";
    set_vring_enable: Write<vhost_vring_state> =
        binding::VHOST_VDPA_SET_VRING_ENABLE(), "VHOST_VDPA_SET_VRING_ENABLE",
        "Enables (1) or disables (0) a queue.";
    get_vring_num: Read<u16> = binding::VHOST_VDPA_GET_VRING_NUM(), "VHOST_VDPA_GET_VRING_NUM",
        "Largest ring size, over all queues.";
    set_config_call: Write<c_int> =
        binding::VHOST_VDPA_SET_CONFIG_CALL(), "VHOST_VDPA_SET_CONFIG_CALL",
        "Eventfd that is signalled when the configuration changes.";
    get_iova_range: Read<vhost_vdpa_iova_range> =
        binding::VHOST_VDPA_GET_IOVA_RANGE(), "VHOST_VDPA_GET_IOVA_RANGE",
        "The IOVAs that can be mapped.";
    get_config_size: Read<u32> =
        binding::VHOST_VDPA_GET_CONFIG_SIZE(), "VHOST_VDPA_GET_CONFIG_SIZE",
        "Length of the device configuration in bytes.";
    get_as_num: Read<c_uint> = binding::VHOST_VDPA_GET_AS_NUM(), "VHOST_VDPA_GET_AS_NUM",
        "Number of address spaces.";
    get_vring_group: ReadWrite<vhost_vring_state> =
        binding::VHOST_VDPA_GET_VRING_GROUP(), "VHOST_VDPA_GET_VRING_GROUP",
        "Group of a queue.";
    set_group_asid: Write<vhost_vring_state> =
        binding::VHOST_VDPA_SET_GROUP_ASID(), "VHOST_VDPA_SET_GROUP_ASID",
        "Address space of a group. EBUSY on newer kernels once DRIVER_OK is set.";
    suspend: Plain = binding::VHOST_VDPA_SUSPEND(), "VHOST_VDPA_SUSPEND",
        "Stops the device with its ring state kept. Before DRIVER_OK it returns 0 and does \
         nothing.";
    resume: Plain = ioctl_expr(_IOC_NONE, VHOST_VIRTIO, 0x7e, 0), "VHOST_VDPA_RESUME",
        "Resumes a suspended device.";
    get_vring_desc_group: ReadWrite<vhost_vring_state> =
        ioctl_expr(_IOC_READ | _IOC_WRITE, VHOST_VIRTIO, 0x7f, VRING_STATE_SIZE),
        "VHOST_VDPA_GET_VRING_DESC_GROUP",
        "Group of a queue's rings, where it differs from that of its buffers.";
    get_vqs_count: Read<u32> = binding::VHOST_VDPA_GET_VQS_COUNT(), "VHOST_VDPA_GET_VQS_COUNT",
        "Number of queues.";
    get_group_num: Read<u32> = binding::VHOST_VDPA_GET_GROUP_NUM(), "VHOST_VDPA_GET_GROUP_NUM",
        "Number of queue groups.";
    get_vring_size: ReadWrite<vhost_vring_state> =
        ioctl_expr(_IOC_READ | _IOC_WRITE, VHOST_VIRTIO, 0x82, VRING_STATE_SIZE),
        "VHOST_VDPA_GET_VRING_SIZE",
        "Ring size of one queue. EOPNOTSUPP on vdpa_sim and mlx5.";
}
