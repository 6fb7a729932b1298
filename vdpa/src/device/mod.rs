//! A vhost-vdpa device.
//!
//! The device has one of the [states](State). Each operation checks in one table (`state.rs`, with
//! a diagram) that the state allows it. An operation in another state is an error ("the device
//! cannot …"), without a system call. A failed transition leaves the device in the state that is
//! then true ([`Device::state`]).
//!
//! The IOTLB is a separate object ([`Iotlb`](crate::iotlb::Iotlb)), created together with the owned
//! device: it lives through all states. After every return to *Owned* call
//! [`Iotlb::remap_after_reset`](crate::iotlb::Iotlb::remap_after_reset). ASIDs of groups, ring
//! state and enable bits do not survive a reset.

pub(crate) mod handle;
pub mod holder;
mod info;
mod negotiate;
mod open;
mod removal;
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

use self::handle::Handle;
pub use self::info::{DeviceInfo, QueueInfo};
pub use self::open::check_fd;
pub use self::removal::ClosedDevice;
use self::state::OnFailure;
pub use self::state::{Operation, State};
pub use self::vring::{RING_SIZE_MAX, VringAddresses, VringBase, VringConfig};
pub(crate) use self::vring::{check_areas, size_not_possible};
use crate::Error;
use crate::doorbell::{Doorbell, DoorbellAnswer};
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

    /// The properties of the device. Without an owner, only its type and the size of its
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

    /// Checks that the state of the device allows an operation.
    ///
    /// # Errors
    /// The state does not allow it.
    pub fn check(&self, operation: Operation) -> Result<(), Error> {
        self.state.allow(operation).map(|_| ())
    }

    /// Device status (virtio 1.3, 2.1).
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn status(&self) -> Result<u8, Error> {
        self.check(Operation::Access)?;
        self.handle
            .status()
            .map_err(Error::refused("VHOST_VDPA_GET_STATUS"))
    }

    /// Reads device configuration (little-endian). This interface has no generation counter: fields
    /// that change together can be torn.
    ///
    /// # Errors
    /// The bytes are outside the configuration, or the kernel refuses.
    pub fn read_config(&self, offset: u32, data: &mut [u8]) -> Result<(), Error> {
        self.check_config(offset, data.len())?;
        if data.is_empty() {
            return Ok(()); // the kernel refuses length 0
        }
        self.handle
            .config(offset, data)
            .map_err(Error::refused("VHOST_VDPA_GET_CONFIG"))
    }

    /// Writes device configuration. Most parents ignore most fields.
    ///
    /// # Errors
    /// The bytes are outside the configuration, or the kernel refuses.
    pub fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), Error> {
        self.check_config(offset, data.len())?;
        if data.is_empty() {
            return Ok(());
        }
        self.handle
            .set_config(offset, data)
            .map_err(Error::refused("VHOST_VDPA_SET_CONFIG"))
    }

    /// Binds the eventfd that is signalled when the configuration changes; `None` unbinds.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_config_call(&self, call: Option<&EventFd>) -> Result<(), Error> {
        self.check(Operation::Access)?;
        self.handle
            .set_config_call(call)
            .map_err(Error::refused("VHOST_VDPA_SET_CONFIG_CALL"))
    }

    /// Why a queue has no doorbell; `None` if it has one. Before negotiation the answer holds for
    /// queues 0 and 1 of a network device, and for all queues of another class. Until then parents
    /// take queue 2 for the control queue.
    ///
    /// # Errors
    /// As [`Device::map_doorbell`].
    pub fn missing_doorbell(&self, queue: u16) -> Result<Option<&'static str>, Error> {
        Ok(match self.try_doorbell(queue)? {
            DoorbellAnswer::Mapped(_) => None,
            DoorbellAnswer::Absent(why) => Some(why),
        })
    }

    /// Maps the doorbell of a queue, if it has one. One mapping serves for the device's life, but
    /// is used only while the device runs: see [`crate::doorbell`].
    ///
    /// # Errors
    /// No such queue, or the kernel failed. A queue without a doorbell is an answer, not an error.
    pub fn map_doorbell(&self, queue: u16) -> Result<DoorbellAnswer, Error> {
        self.check(Operation::MapDoorbell)?;
        self.try_doorbell(queue)
    }

    fn try_doorbell(&self, queue: u16) -> Result<DoorbellAnswer, Error> {
        self.info.queue(queue)?;
        let mapped = self.handle.file();
        mapped
            .and_then(|file| Doorbell::map(file, queue))
            .map_err(Error::queue_refused(queue, "mmap of its doorbell"))
    }

    /// Resets the device: afterwards it accesses no memory. Then call
    /// [`Iotlb::remap_after_reset`](crate::iotlb::Iotlb::remap_after_reset).
    ///
    /// # Errors
    /// If the reset fails, the state of the device is unknown: it is [`State::Lost`]. Closing it
    /// and its IOTLB resets it.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.perform(Operation::Reset, |device| {
            let written = device.handle.set_status(0);
            written.map_err(Error::refused("VHOST_VDPA_SET_STATUS"))?;
            match device.status()? {
                // A PCI function that was pulled out reads all ones, and accesses no memory.
                0 | u8::MAX => Ok(()),
                shown => Err(other_status(0, shown)),
            }
        })?;
        self.features = 0;
        Ok(())
    }

    /// Gives the device up: every later operation fails.
    pub fn give_up(&mut self) {
        self.state = State::Lost;
    }

    /// Runs an operation, and moves to the state that the table names for its result.
    fn perform(
        &mut self,
        operation: Operation,
        ask: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let known = self.state.allow(operation)?;
        let result = ask(self);
        match known.on_failure {
            _ if result.is_ok() => self.state = known.to,
            OnFailure::Keep => {}
            OnFailure::Lose => self.state = State::Lost,
            OnFailure::Reset => {
                if let Err(error) = self.reset() {
                    tracing::error!(%error, "cannot reset the device either");
                }
            }
        }
        result
    }

    /// The ioctls, whatever the state is, for checks that try forbidden operations.
    pub(crate) fn raw(&self) -> &Handle {
        &self.handle
    }

    fn check_config(&self, offset: u32, len: usize) -> Result<(), Error> {
        self.check(Operation::Access)?;
        let size = self.info.config_size;
        let end = u32::try_from(len)
            .ok()
            .and_then(|len| offset.checked_add(len));
        match end {
            Some(end) if end <= size => Ok(()),
            _ => Err(Error::other(format!(
                "{len} bytes at offset {offset} are outside the configuration of {size} bytes"
            ))),
        }
    }

    /// Adds bits to the status and checks that the device shows them.
    fn add_status(&self, bits: u8) -> Result<(), Error> {
        let (wanted, shown) = self.try_status(bits)?;
        if shown & wanted == wanted {
            return Ok(());
        }
        Err(other_status(wanted, shown))
    }

    /// Adds bits to the status. Returns the status as written and as the device shows it then.
    fn try_status(&self, bits: u8) -> Result<(u8, u8), Error> {
        let wanted = self.status()? | bits;
        let written = self.handle.set_status(wanted);
        written.map_err(Error::refused("VHOST_VDPA_SET_STATUS"))?;
        Ok((wanted, self.status()?))
    }
}

fn other_status(wanted: u8, shown: u8) -> Error {
    Error::other(format!(
        "device status {wanted:#04x} was written but it is {shown:#04x}"
    ))
}
