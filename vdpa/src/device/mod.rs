//! A vhost-vdpa device.
//!
//! It has one of the [states](State), and each operation checks in one table (`state.rs`, with a
//! diagram) that the state allows it: an operation in another state is
//! [`DeviceError::Unable`], without a system call. A transition that fails leaves the device in
//! the state that is then true ([`Device::state`]). The IOTLB is a thing of its own
//! ([`Iotlb`](crate::iotlb::Iotlb)), made together with the owned device: it lives through all
//! states. After every return to *Owned* call
//! [`Iotlb::remap_after_reset`](crate::iotlb::Iotlb::remap_after_reset). ASIDs of groups, ring
//! state and enable bits do not survive a reset.

mod error;
pub(crate) mod handle;
pub mod holder;
mod info;
mod negotiate;
mod open;
mod run;
mod state;
#[cfg(test)]
mod tests;
mod vring;

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_RING_PACKED,
    VIRTIO_F_VERSION_1,
};
use vmm_sys_util::eventfd::EventFd;

pub use self::error::{DeviceError, OpenError, VringError};
use self::handle::Handle;
use self::info::refused;
pub use self::info::{DeviceInfo, QueueInfo};
pub use self::open::check_fd;
use self::state::OnFailure;
pub use self::state::{Operation, State};
pub(crate) use self::vring::check_areas;
pub use self::vring::{RING_SIZE_MAX, VringAddresses, VringBase, VringConfig};
use crate::doorbell::{Doorbell, DoorbellAnswer, NoDoorbell};
use crate::uapi::BackendFeatures;

/// A vhost-vdpa device. See the module.
#[derive(Debug)]
pub struct Device {
    handle: Handle,
    state: State,
    info: DeviceInfo,
    /// The acknowledged backend features.
    acked: BackendFeatures,
    /// The negotiated features; 0 before.
    features: u64,
}

/// A status bit as the ioctl takes it.
const fn bit(status: u32) -> u8 {
    // All status bits are below 256 (virtio 1.3, 2.1).
    status.to_le_bytes()[0]
}
const ACKNOWLEDGE: u8 = bit(VIRTIO_CONFIG_S_ACKNOWLEDGE);
const DRIVER: u8 = bit(VIRTIO_CONFIG_S_DRIVER);
const FEATURES_OK: u8 = bit(VIRTIO_CONFIG_S_FEATURES_OK);
const DRIVER_OK: u8 = bit(VIRTIO_CONFIG_S_DRIVER_OK);

const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
const ACCESS_PLATFORM: u64 = 1 << VIRTIO_F_ACCESS_PLATFORM;
const RING_PACKED: u64 = 1 << VIRTIO_F_RING_PACKED;

impl Device {
    /// The state of the device.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Virtio device type (virtio 1.3, section 5): 1 network, 2 block, …
    #[must_use]
    pub fn device_id(&self) -> u32 {
        self.info.device_id
    }

    /// Length of the device configuration in bytes.
    #[must_use]
    pub fn config_size(&self) -> u32 {
        self.info.config_size
    }

    /// What the device is and can do: of one without an owner only its type and the size of its
    /// configuration. Groups are as after the last negotiation.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The acknowledged backend features.
    #[must_use]
    pub fn backend_features(&self) -> BackendFeatures {
        self.acked
    }

    /// The negotiated features, ACCESS_PLATFORM included where it was offered; 0 before.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether rings are packed.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        self.features & RING_PACKED != 0
    }

    /// Whether the state of the device allows an operation.
    ///
    /// # Errors
    /// [`DeviceError::Unable`].
    pub fn check(&self, operation: Operation) -> Result<(), DeviceError> {
        self.state.allow(operation).map(|_| ())
    }

    /// Device status (virtio 1.3, 2.1).
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn status(&self) -> Result<u8, DeviceError> {
        self.check(Operation::Access)?;
        refused("VHOST_VDPA_GET_STATUS", self.handle.status())
    }

    /// Reads device configuration (little-endian). There is no generation
    /// counter in this interface: fields that change together can be torn.
    ///
    /// # Errors
    /// [`DeviceError::ConfigBounds`], or whatever the kernel says.
    pub fn read_config(&self, offset: u32, data: &mut [u8]) -> Result<(), DeviceError> {
        self.check_config(offset, data.len())?;
        if data.is_empty() {
            return Ok(()); // the kernel refuses length 0
        }
        refused("VHOST_VDPA_GET_CONFIG", self.handle.config(offset, data))
    }

    /// Writes device configuration. Most parents ignore most fields.
    ///
    /// # Errors
    /// [`DeviceError::ConfigBounds`], or whatever the kernel says.
    pub fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        self.check_config(offset, data.len())?;
        if data.is_empty() {
            return Ok(());
        }
        refused(
            "VHOST_VDPA_SET_CONFIG",
            self.handle.set_config(offset, data),
        )
    }

    /// Binds the eventfd that is signalled when the configuration changes;
    /// `None` unbinds.
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn set_config_call(&self, call: Option<&EventFd>) -> Result<(), DeviceError> {
        self.check(Operation::Access)?;
        refused(
            "VHOST_VDPA_SET_CONFIG_CALL",
            self.handle.set_config_call(call),
        )
    }

    /// Why a queue has no doorbell; `None`: it has one. Before features are
    /// negotiated the answer counts for queues 0 and 1 of a network device and for all of
    /// any other class: parents take queue 2 for the control queue until then.
    ///
    /// # Errors
    /// As [`Device::map_doorbell`].
    pub fn missing_doorbell(&self, queue: u16) -> Result<Option<NoDoorbell>, DeviceError> {
        Ok(match self.try_doorbell(queue)? {
            DoorbellAnswer::Mapped(_) => None,
            DoorbellAnswer::Absent(why) => Some(why),
        })
    }

    /// Maps the doorbell of a queue, if it has one. One mapping serves for the
    /// device's life, but it is used only while the device runs: see
    /// [`crate::doorbell`].
    ///
    /// # Errors
    /// No such queue, or the kernel failed; a queue without a doorbell is not
    /// an error but an answer.
    pub fn map_doorbell(&self, queue: u16) -> Result<DoorbellAnswer, DeviceError> {
        self.check(Operation::MapDoorbell)?;
        self.try_doorbell(queue)
    }

    fn try_doorbell(&self, queue: u16) -> Result<DoorbellAnswer, DeviceError> {
        self.info.queue(queue)?;
        Doorbell::map(&self.handle.file, queue)
            .map_err(queue_refused(queue, "mmap of its doorbell"))
    }

    /// Resets the device: afterwards it touches no memory. Then call
    /// [`Iotlb::remap_after_reset`](crate::iotlb::Iotlb::remap_after_reset).
    ///
    /// # Errors
    /// If even that fails, nothing is known of the device: it is [`State::Lost`]. Closing it and
    /// its IOTLB resets it.
    pub fn reset(&mut self) -> Result<(), DeviceError> {
        self.perform(Operation::Reset, |device| {
            refused("VHOST_VDPA_SET_STATUS", device.handle.set_status(0))?;
            match device.status()? {
                0 => Ok(()),
                shown => Err(DeviceError::Status { wanted: 0, shown }),
            }
        })?;
        self.features = 0;
        Ok(())
    }

    /// Gives the device up: it cannot be used any more.
    pub fn give_up(&mut self) {
        self.state = State::Lost;
    }

    /// Does an operation, and moves to the state that the table names for its result.
    fn perform(
        &mut self,
        operation: Operation,
        ask: impl FnOnce(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let known = self.state.allow(operation)?;
        let result = ask(self);
        match known.on_failure {
            _ if result.is_ok() => self.state = known.to,
            OnFailure::Keep => {}
            OnFailure::Lose => self.state = State::Lost,
            OnFailure::Reset => {
                if let Err(error) = self.reset() {
                    tracing::error!(%error, "the device cannot be reset either");
                }
            }
        }
        result
    }

    /// The ioctls, whatever the state is, to try what it forbids.
    pub(crate) fn raw(&self) -> &Handle {
        &self.handle
    }

    fn check_config(&self, offset: u32, len: usize) -> Result<(), DeviceError> {
        self.check(Operation::Access)?;
        let size = self.info.config_size;
        let end = u32::try_from(len)
            .ok()
            .and_then(|len| offset.checked_add(len));
        match end {
            Some(end) if end <= size => Ok(()),
            _ => Err(DeviceError::ConfigBounds { offset, len, size }),
        }
    }

    /// Adds bits to the status and makes sure that they stick.
    fn add_status(&self, bits: u8) -> Result<(), DeviceError> {
        let wanted = self.status()? | bits;
        refused("VHOST_VDPA_SET_STATUS", self.handle.set_status(wanted))?;
        let shown = self.status()?;
        if shown & wanted == wanted {
            Ok(())
        } else {
            Err(DeviceError::Status { wanted, shown })
        }
    }
}

fn queue_refused(
    queue: u16,
    operation: &'static str,
) -> impl FnOnce(std::io::Error) -> DeviceError {
    move |source| DeviceError::QueueRefused {
        queue,
        operation,
        source,
    }
}
