//! The properties of a device, read when it gets an owner.
//!
//! No answer is trusted: numbers are bounded, so that a broken parent causes an error here and not
//! an overflow elsewhere.

use std::io;

use super::handle::Handle;
use super::vring::RING_SIZE_MAX;
use crate::Error;
use crate::iova::IovaRange;
use crate::uapi::{self, BackendFeatures, Read, vhost_vdpa_iova_range};

/// More configuration than any virtio device has, in bytes.
const CONFIG_SIZE_MAX: u32 = 65536;
/// More groups or address spaces than any device has.
const GROUPS_MAX: u32 = 65536;

/// One queue of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct QueueInfo {
    /// Largest ring, in entries.
    pub max_size: u16,
    /// Its group; `None` if the device has no groups.
    pub group: Option<u32>,
    /// The group of its rings, if it differs (DESC_ASID).
    pub descriptor_group: Option<u32>,
}

/// The properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Virtio device type (virtio 1.3, section 5): 1 network, 2 block, …
    pub device_id: u32,
    /// Virtio features offered.
    pub features: u64,
    /// Backend features offered.
    pub backend_features: BackendFeatures,
    /// The queues.
    pub queues: Vec<QueueInfo>,
    /// Number of queue groups.
    pub groups: u32,
    /// Number of address spaces.
    pub address_spaces: u32,
    /// Length of the device configuration in bytes.
    pub config_size: u32,
    /// The IOVAs that can be mapped.
    pub iova_range: IovaRange,
}

impl DeviceInfo {
    /// Number of queues.
    #[must_use]
    pub fn queue_count(&self) -> u16 {
        // `query` has bounded it.
        u16::try_from(self.queues.len()).unwrap_or(u16::MAX)
    }

    /// The properties of one queue.
    ///
    /// # Errors
    /// There is no such queue.
    pub fn queue(&self, queue: u16) -> Result<&QueueInfo, Error> {
        let count = self.queue_count();
        self.queues.get(usize::from(queue)).ok_or_else(|| {
            Error::other(format!("there is no queue {queue}: the device has {count}"))
        })
    }

    /// The properties of a device without an owner: its type and the size of its configuration.
    pub(super) fn of_opened(handle: &Handle, device_id: u32) -> Result<Self, Error> {
        let size = ask(
            handle,
            "VHOST_VDPA_GET_CONFIG_SIZE",
            uapi::get_config_size(),
            0,
        )?;
        Ok(Self {
            device_id,
            features: 0,
            backend_features: BackendFeatures::empty(),
            queues: Vec::new(),
            groups: 0,
            address_spaces: 0,
            config_size: bounded("bytes of configuration", size, CONFIG_SIZE_MAX)?,
            iova_range: IovaRange::ALL,
        })
    }

    /// All properties, from a device with an owner.
    pub(super) fn query(
        &self,
        handle: &Handle,
        acked: BackendFeatures,
        offered: BackendFeatures,
    ) -> Result<Self, Error> {
        let features = ask(handle, "VHOST_GET_FEATURES", uapi::get_features(), 0)?;
        let count = ask(handle, "VHOST_VDPA_GET_VQS_COUNT", uapi::get_vqs_count(), 0)?;
        let common = ask(handle, "VHOST_VDPA_GET_VRING_NUM", uapi::get_vring_num(), 0)?;
        let groups = bounded(
            "queue groups",
            ask(handle, "VHOST_VDPA_GET_GROUP_NUM", uapi::get_group_num(), 0)?,
            GROUPS_MAX,
        )?;
        let address_spaces = bounded(
            "address spaces",
            ask(handle, "VHOST_VDPA_GET_AS_NUM", uapi::get_as_num(), 0)?,
            GROUPS_MAX,
        )?
        .max(1);
        let count = u16::try_from(count)
            .ok()
            .filter(|count| *count > 0)
            .ok_or_else(|| nonsense(count, "queues"))?;
        let none = vhost_vdpa_iova_range { first: 0, last: 0 };
        let range = ask(
            handle,
            "VHOST_VDPA_GET_IOVA_RANGE",
            uapi::get_iova_range(),
            none,
        )?;
        let iova_range = IovaRange::new(range.first, range.last)
            .ok_or_else(|| nonsense(range.last, "as the last address it reaches"))?;
        let queues = (0..count)
            .map(|queue| query_queue(handle, queue, common, groups, acked))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            device_id: self.device_id,
            features,
            backend_features: offered,
            queues,
            groups,
            address_spaces,
            config_size: self.config_size,
            iova_range,
        })
    }
}

fn query_queue(
    handle: &Handle,
    queue: u16,
    common: u16,
    groups: u32,
    acked: BackendFeatures,
) -> Result<QueueInfo, Error> {
    let max_size = query_max_size(handle, queue, common);
    if max_size == 0 {
        return Err(nonsense(0u32, "entries as the largest ring"));
    }
    let descriptor_group = if acked.contains(BackendFeatures::DESC_ASID) {
        query_group(handle, uapi::get_vring_desc_group(), queue, groups)?
    } else {
        None
    };
    Ok(QueueInfo {
        max_size,
        group: query_group(handle, uapi::get_vring_group(), queue, groups)?,
        descriptor_group,
    })
}

/// The largest ring of a queue if the parent reports it, else `common`.
pub(super) fn query_max_size(handle: &Handle, queue: u16, common: u16) -> u16 {
    let own = handle.vring_state(uapi::get_vring_size(), queue).ok();
    // 0 is no answer.
    let own = own.filter(|size| *size > 0);
    let max_size = own.unwrap_or(u32::from(common));
    u16::try_from(max_size).map_or(RING_SIZE_MAX, |size| size.min(RING_SIZE_MAX))
}

/// The group of a queue, or of its rings; `None` if the parent has none.
pub(super) fn query_group(
    handle: &Handle,
    request: uapi::ReadWrite<uapi::vhost_vring_state>,
    queue: u16,
    groups: u32,
) -> Result<Option<u32>, Error> {
    match handle.vring_state(request, queue) {
        Ok(group) if group < groups => Ok(Some(group)),
        Ok(group) => Err(nonsense(group, "as the group of a queue")),
        Err(error) if unsupported(&error) => Ok(None),
        Err(source) => Err(Error::queue_refused(queue, "VHOST_VDPA_GET_VRING_GROUP")(
            source,
        )),
    }
}

fn unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        // ENOTTY, and the errors that older kernels return for an unknown ioctl number.
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL)
    )
}

fn bounded(what: &'static str, value: u32, maximum: u32) -> Result<u32, Error> {
    if value <= maximum {
        return Ok(value);
    }
    Err(nonsense(value, what))
}

/// An implausible answer of the device.
pub(super) fn nonsense(value: impl Into<u64>, what: &str) -> Error {
    Error::other(format!("the device claims {} {what}", value.into()))
}

/// Reads a property of the whole device. An error names the ioctl.
pub(super) fn ask<T>(
    handle: &Handle,
    operation: &'static str,
    request: Read<T>,
    initial: T,
) -> Result<T, Error> {
    let answer = handle.read(request, initial);
    answer.map_err(Error::refused(operation))
}
