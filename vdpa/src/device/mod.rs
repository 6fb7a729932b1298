//! A vhost-vdpa device as a typestate: illegal orders do not compile.
//!
//! ```text
//!            own            negotiate              start
//!   Opened ------> Owned -------------> Negotiated ------> Running
//!    (status 0)     ^ ^    FEATURES_OK   | set_vring        |  ^ |
//!                   | |                  | enable_vring     |  | | set_call, set_kick
//!                   | +----- reset ------+         suspend  |  | resume
//!                   |                                       v  |
//!                   +---------------- reset ------------ Suspended
//!                                    (from Running too)    vring_base, switch_vring
//! ```
//! A transition takes the device and gives it back in the new state; one that
//! fails gives it back, with the error, in the state that is then true
//! ([`Failed`]). The IOTLB is a thing of its own ([`Iotlb`](crate::iotlb::Iotlb)), made together
//! with the owned device: it lives through all states. After every return to
//! *Owned* call [`Iotlb::remap_after_reset`](crate::iotlb::Iotlb::remap_after_reset). ASIDs of groups, ring state and
//! enable bits do not survive a reset.
//!
//! Queues cannot be started before features are negotiated:
//!
//! ```compile_fail,E0599
//! # use vdpa::device::Device;
//! let (device, iotlb) = Device::open("/dev/vhost-vdpa-0").unwrap().own().unwrap();
//! let device = device.start();
//! ```
//!
//! A device without an owner has no rings:
//!
//! ```compile_fail,E0599
//! # use vdpa::device::Device;
//! let device = Device::open("/dev/vhost-vdpa-0").unwrap();
//! device.negotiate(0);
//! ```
//!
//! A running device cannot be suspended twice, for it has moved:
//!
//! ```compile_fail,E0382
//! # use vdpa::device::{Device, Running};
//! # fn example(device: Device<Running>) {
//! let suspended = device.suspend();
//! let again = device.suspend();
//! # }
//! ```
//!
//! The ring position of a running device is not known:
//!
//! ```compile_fail,E0599
//! # use vdpa::device::{Device, Running};
//! # fn example(device: Device<Running>) {
//! device.vring_base(0);
//! # }
//! ```
//!
//! A running device's rings cannot be set up anew:
//!
//! ```compile_fail,E0599
//! # use vdpa::device::{Device, Running, VringConfig};
//! # fn example(mut device: Device<Running>, config: VringConfig<'_>) {
//! device.set_vring(0, &config, &[]);
//! # }
//! ```

mod error;
pub(crate) mod handle;
pub mod holder;
mod info;
mod negotiate;
mod open;
mod run;
mod vring;

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_RING_PACKED,
    VIRTIO_F_VERSION_1,
};
use vmm_sys_util::eventfd::EventFd;

pub use self::error::{DeviceError, Failed, OpenError, VringError};
use self::handle::Handle;
pub use self::info::{DeviceInfo, QueueInfo};
use self::info::{Identity, refused};
pub use self::open::check_fd;
pub(crate) use self::vring::check_areas;
pub use self::vring::{RING_SIZE_MAX, VringAddresses, VringBase, VringConfig};
use crate::doorbell::{Doorbell, DoorbellAnswer, NoDoorbell};
use crate::iova::IovaRange;
use crate::uapi::{self, BackendFeatures, vhost_vring_addr};

/// Open, reset, without an owner.
#[derive(Debug)]
pub struct Opened(());

/// Owned by this process and reset; what it can do is known.
#[derive(Debug)]
pub struct Owned {
    info: Box<DeviceInfo>,
    acked: BackendFeatures,
}

/// FEATURES_OK: features are fixed, rings can be set up.
#[derive(Debug)]
pub struct Negotiated {
    owned: Owned,
    features: u64,
}

/// DRIVER_OK: the device works on its enabled queues.
#[derive(Debug)]
pub struct Running(Negotiated);

/// Stopped with its ring state kept.
#[derive(Debug)]
pub struct Suspended(Negotiated);

/// A vhost-vdpa device in the state `S`. See the module's diagram.
#[derive(Debug)]
pub struct Device<S> {
    handle: Handle,
    identity: Identity,
    state: S,
}

mod sealed {
    /// The states in which a device has an owner.
    pub trait HasOwner {
        fn owned(&self) -> &super::Owned;
        fn into_owned(self) -> super::Owned;
    }
    /// The states in which features are fixed.
    pub trait HasFeatures: HasOwner {
        fn negotiated(&self) -> &super::Negotiated;
    }
}
use sealed::{HasFeatures, HasOwner};

impl HasOwner for Owned {
    fn owned(&self) -> &Owned {
        self
    }
    fn into_owned(self) -> Owned {
        self
    }
}

impl HasOwner for Negotiated {
    fn owned(&self) -> &Owned {
        &self.owned
    }
    fn into_owned(self) -> Owned {
        self.owned
    }
}

impl HasFeatures for Negotiated {
    fn negotiated(&self) -> &Negotiated {
        self
    }
}

macro_rules! started {
    ($($state:ident),+) => {$(
        impl HasOwner for $state {
            fn owned(&self) -> &Owned {
                &self.0.owned
            }
            fn into_owned(self) -> Owned {
                self.0.owned
            }
        }
        impl HasFeatures for $state {
            fn negotiated(&self) -> &Negotiated {
                &self.0
            }
        }
    )+};
}
started!(Running, Suspended);

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

/// What can be done in every state.
impl<S> Device<S> {
    /// Virtio device type (virtio 1.3, section 5): 1 network, 2 block, …
    #[must_use]
    pub fn device_id(&self) -> u32 {
        self.identity.device_id
    }

    /// Length of the device configuration in bytes.
    #[must_use]
    pub fn config_size(&self) -> u32 {
        self.identity.config_size
    }

    /// Device status (virtio 1.3, 2.1).
    ///
    /// # Errors
    /// Whatever the kernel says.
    pub fn status(&self) -> Result<u8, DeviceError> {
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
        refused(
            "VHOST_VDPA_SET_CONFIG_CALL",
            self.handle.set_config_call(call),
        )
    }

    /// The ioctls without any state, for who tries what the states forbid.
    pub(crate) fn raw(&self) -> &Handle {
        &self.handle
    }

    fn check_config(&self, offset: u32, len: usize) -> Result<(), DeviceError> {
        let size = self.identity.config_size;
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

    fn reset_to_zero(&self) -> Result<(), DeviceError> {
        refused("VHOST_VDPA_SET_STATUS", self.handle.set_status(0))?;
        match self.status()? {
            0 => Ok(()),
            shown => Err(DeviceError::Status { wanted: 0, shown }),
        }
    }

    fn with_state<T>(self, change: impl FnOnce(S) -> T) -> Device<T> {
        Device {
            handle: self.handle,
            identity: self.identity,
            state: change(self.state),
        }
    }

    /// The device unchanged, with an error.
    fn failed(self, error: DeviceError) -> Failed<S> {
        Failed {
            device: Some(self),
            error,
        }
    }
}

impl<S: HasOwner> Device<S> {
    /// What the device is and can do. Groups are as after the last negotiation.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.state.owned().info
    }

    /// The acknowledged backend features.
    #[must_use]
    pub fn backend_features(&self) -> BackendFeatures {
        self.state.owned().acked
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

    fn try_doorbell(&self, queue: u16) -> Result<DoorbellAnswer, DeviceError> {
        self.info().queue(queue)?;
        Doorbell::map(&self.handle.file, queue)
            .map_err(queue_refused(queue, "mmap of its doorbell"))
    }

    /// Resets the device: afterwards it touches no memory. Then call
    /// [`Iotlb::remap_after_reset`](crate::iotlb::Iotlb::remap_after_reset).
    ///
    /// # Errors
    /// If even that fails nothing is known of the device, so it is closed.
    pub fn reset(self) -> Result<Device<Owned>, Failed<Owned>> {
        match self.reset_to_zero() {
            Ok(()) => Ok(self.with_state(S::into_owned)),
            Err(error) => Err(Failed {
                device: None,
                error,
            }),
        }
    }

    /// Resets after a transition that failed half-way.
    fn fall_back(self, error: DeviceError) -> Failed<Owned> {
        match self.reset() {
            Ok(device) => device.failed(error),
            Err(second) => {
                tracing::error!(error = %second, "the device cannot be reset either");
                Failed {
                    device: None,
                    error,
                }
            }
        }
    }

    fn group_asid(&self, group: u32, asid: u32) -> Result<(), DeviceError> {
        let Owned { info, acked } = self.state.owned();
        let address_spaces = if acked.contains(BackendFeatures::IOTLB_ASID) {
            info.address_spaces
        } else {
            1
        };
        if group >= info.groups || asid >= address_spaces {
            return Err(DeviceError::NoSuchGroup {
                group,
                asid,
                groups: info.groups,
                address_spaces,
            });
        }
        let set = self
            .handle
            .set_vring_state(uapi::set_group_asid(), group, asid);
        refused("VHOST_VDPA_SET_GROUP_ASID", set)
    }

    fn vring_enable(&self, queue: u16, enable: bool) -> Result<(), DeviceError> {
        self.info().queue(queue)?;
        let (index, num) = (u32::from(queue), u32::from(enable));
        self.handle
            .set_vring_state(uapi::set_vring_enable(), index, num)
            .map_err(queue_refused(queue, "VHOST_VDPA_SET_VRING_ENABLE"))
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

impl<S: HasFeatures> Device<S> {
    /// The negotiated features, ACCESS_PLATFORM included where it was offered.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.state.negotiated().features
    }

    /// Whether rings are packed.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        self.features() & RING_PACKED != 0
    }

    /// Maps the doorbell of a queue, if it has one. One mapping serves for the
    /// device's life, but it is used only while the device runs: see
    /// [`crate::doorbell`].
    ///
    /// # Errors
    /// No such queue, or the kernel failed; a queue without a doorbell is not
    /// an error but an answer.
    pub fn map_doorbell(&self, queue: u16) -> Result<DoorbellAnswer, DeviceError> {
        self.try_doorbell(queue)
    }

    fn write_vring(
        &self,
        queue: u16,
        config: &VringConfig<'_>,
        allowed: &[IovaRange],
    ) -> Result<(), DeviceError> {
        self.check_vring(queue, config, allowed)?;
        let handle = &self.handle;
        let index = u32::from(queue);
        handle
            .set_vring_state(uapi::set_vring_num(), index, u32::from(config.size))
            .map_err(queue_refused(queue, "VHOST_SET_VRING_NUM"))?;
        handle
            .set_vring_state(uapi::set_vring_base(), index, config.base.to_kernel())
            .map_err(queue_refused(queue, "VHOST_SET_VRING_BASE"))?;
        let addresses = vhost_vring_addr {
            index,
            flags: 0,
            desc_user_addr: config.addresses.descriptor,
            used_user_addr: config.addresses.device,
            avail_user_addr: config.addresses.driver,
            log_guest_addr: 0,
        };
        handle
            .write(uapi::set_vring_addr(), &addresses)
            .map_err(queue_refused(queue, "VHOST_SET_VRING_ADDR"))?;
        self.bind_kick(queue, config.kick)?;
        self.bind_call(queue, config.call)
    }

    fn check_vring(
        &self,
        queue: u16,
        config: &VringConfig<'_>,
        allowed: &[IovaRange],
    ) -> Result<(), DeviceError> {
        let maximum = self.info().queue(queue)?.max_size;
        config
            .check(maximum, self.is_packed(), allowed)
            .map_err(|source| DeviceError::Vring { queue, source })
    }

    fn bind_kick(&self, queue: u16, kick: Option<&EventFd>) -> Result<(), DeviceError> {
        self.info().queue(queue)?;
        self.handle
            .set_vring_file(uapi::set_vring_kick(), queue, kick)
            .map_err(queue_refused(queue, "VHOST_SET_VRING_KICK"))
    }

    fn bind_call(&self, queue: u16, call: Option<&EventFd>) -> Result<(), DeviceError> {
        self.info().queue(queue)?;
        self.handle
            .set_vring_file(uapi::set_vring_call(), queue, call)
            .map_err(queue_refused(queue, "VHOST_SET_VRING_CALL"))
    }
}
