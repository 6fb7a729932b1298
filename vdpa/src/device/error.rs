//! What can go wrong with a device.

use std::io;
use std::path::PathBuf;

use super::holder::{Holder, sentence};
use crate::iova::IovaRange;

/// Why a path or file descriptor is not a usable vhost-vdpa device.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no such file.
    #[error(
        "{} does not exist: create the device (`vdpa dev add`) and load the vhost_vdpa module",
        path.display()
    )]
    Missing {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// No permission.
    #[error(
        "no permission to open {}: run as its owner or change its mode (a udev rule makes that \
         permanent)",
        path.display()
    )]
    Permission {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The device is open already, and it opens only once.
    #[error("{} is in use by {}", path.display(), sentence(holders))]
    Busy {
        /// The path.
        path: PathBuf,
        /// The processes that have it open, as far as they are visible.
        holders: Vec<Holder>,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The file is not a character device.
    #[error("{} is not a character device, so not a vhost-vdpa device", path.display())]
    NotCharacterDevice {
        /// The path.
        path: PathBuf,
    },
    /// The device doesn't answer the vhost-vdpa ioctls.
    #[error("{} is not a vhost-vdpa device (they are named /dev/vhost-vdpa-N)", path.display())]
    NotVhostVdpa {
        /// The path.
        path: PathBuf,
        /// What the kernel said to VHOST_VDPA_GET_DEVICE_ID.
        #[source]
        source: io::Error,
    },
    /// A descriptor that somebody else opened for one direction only.
    #[error("{} is not open for reading and writing: open it with O_RDWR", path.display())]
    NotReadWrite {
        /// The path.
        path: PathBuf,
    },
    /// The device is behind no IOMMU, or behind one that does not snoop
    /// caches, and its parent cannot translate by itself.
    #[error(
        "{} cannot be isolated, because its hardware is behind no IOMMU that the kernel uses: \
         switch the IOMMU on in the firmware and boot with intel_iommu=on or amd_iommu=on",
        path.display()
    )]
    NoIommu {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The device's IOMMU group has other devices too.
    #[error(
        "{} cannot be isolated, because its hardware shares an IOMMU group with other devices \
         (see /sys/kernel/iommu_groups): use a slot or a function with access control (ACS), \
         such as a virtual function",
        path.display()
    )]
    SharedIommuGroup {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Anything else.
    #[error("cannot open {}", path.display())]
    Other {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The device opened but its first answers make no sense.
    #[error("{} cannot be used", path.display())]
    Device {
        /// The path.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: DeviceError,
    },
}

/// What a device, or a check before it, refused.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// An ioctl failed.
    #[error("the device refused {operation}")]
    Refused {
        /// Name of the ioctl in `linux/vhost.h`.
        operation: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// An ioctl about a queue failed.
    #[error("queue {queue}: the device refused {operation}")]
    QueueRefused {
        /// Index of the queue.
        queue: u16,
        /// Name of the ioctl in `linux/vhost.h`.
        operation: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Another process, or an earlier user of this fd, is its owner.
    #[error("the device's file descriptor has an owner already: open the device afresh")]
    Owned {
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The status did not become what was written.
    #[error("device status {wanted:#04x} was written but it is {shown:#04x}")]
    Status {
        /// Bits that must be set (0: all must be clear).
        wanted: u8,
        /// What the device shows.
        shown: u8,
    },
    /// The device cleared FEATURES_OK.
    #[error("the device does not accept the features {features:#x}")]
    FeaturesRefused {
        /// What the driver accepted.
        features: u64,
    },
    /// Features that the device doesn't offer.
    #[error("the device does not offer the features {missing:#x}")]
    NotOffered {
        /// The bits that are too many.
        missing: u64,
    },
    /// A feature bit without which this crate can't drive the device.
    #[error("the device does not offer {feature}, which is needed")]
    Needed {
        /// Its name.
        feature: &'static str,
    },
    /// An ability that was not acknowledged, or that the device's state does not allow.
    #[error("the device cannot {ability}")]
    Unable {
        /// What it can't do.
        ability: &'static str,
    },
    /// An answer of the device that makes no sense.
    #[error("the device claims {value} {what}")]
    Nonsense {
        /// Of what.
        what: &'static str,
        /// How many.
        value: u64,
    },
    /// No queue with this index.
    #[error("there is no queue {queue}: the device has {count}")]
    NoSuchQueue {
        /// Index asked for.
        queue: u16,
        /// Number of queues.
        count: u16,
    },
    /// No such group, or no such address space.
    #[error(
        "group {group} cannot be in address space {asid}: the device has {groups} groups and {address_spaces} address spaces"
    )]
    NoSuchGroup {
        /// Group asked for.
        group: u32,
        /// Address space asked for.
        asid: u32,
        /// Number of groups.
        groups: u32,
        /// Number of usable address spaces.
        address_spaces: u32,
    },
    /// The ring description breaks a rule.
    #[error("queue {queue} cannot be set up")]
    Vring {
        /// Index of the queue.
        queue: u16,
        /// The rule.
        #[source]
        source: VringError,
    },
    /// An access outside the device configuration.
    #[error("{len} bytes at offset {offset} are outside the configuration of {size} bytes")]
    ConfigBounds {
        /// Offset in bytes.
        offset: u32,
        /// Bytes.
        len: usize,
        /// Size of the configuration in bytes.
        size: u32,
    },
}

/// What is wrong with a ring description (virtio 1.3, 2.7 and 2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VringError {
    /// 0, above the device's maximum, or not a power of two on a split ring.
    #[error("a ring of {size} entries is not possible: the device takes up to {maximum}")]
    Size {
        /// Entries asked for.
        size: u16,
        /// The queue's maximum.
        maximum: u16,
    },
    /// An area at an address that its alignment forbids.
    #[error("the {area} area at {address:#x} is not aligned to {alignment} bytes")]
    Unaligned {
        /// Which area.
        area: &'static str,
        /// Its address.
        address: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },
    /// An area that is not wholly inside memory the ring may lie in.
    #[error("the {area} area of {len} bytes at {address:#x} is outside the memory for rings")]
    Outside {
        /// Which area.
        area: &'static str,
        /// Its address.
        address: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// Two areas that share an address.
    #[error("the ring's areas {first} and {second} overlap")]
    Overlap {
        /// One.
        first: IovaRange,
        /// The other.
        second: IovaRange,
    },
    /// A position for the other kind of ring, or one past the end of it.
    #[error("the position {base:?} does not fit a {format} ring of {size} entries")]
    Base {
        /// The position.
        base: super::VringBase,
        /// `split` or `packed`.
        format: &'static str,
        /// Entries of the ring.
        size: u16,
    },
}
