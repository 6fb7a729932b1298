//! The interface between the virtio transport and a device's backend.
//!
//! The *transport* (virtio-pci) owns the state that the guest programs: features, status, ring
//! addresses and sizes, enable bits, vectors. A *backend* (rng, block, vhost-vdpa) owns the device
//! behind it. A backend receives a read-only description of the guest's settings at activation and
//! at each later change. It must not know PCI, nor who runs the event loop.
//!
//! ```text
//!             negotiate            activate
//!   inactive ----------> negotiated ----------> active --+
//!      ^   (FEATURES_OK)     |      (DRIVER_OK)   |  ^   | change, process
//!      |                     |                    |  +---+
//!      +---------------------+--------------------+
//!                  reset (status 0, at any moment)
//! ```
//! A reset may outlast the call, because storage does not answer. Then `is_resetting` holds until
//! an event ends it.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vdpa::iova::{DeviceAddress, IovaRange};
use vdpa::memory::{AddressSpace, Change, DeviceMemory, GuestMemory};
use vmm_sys_util::eventfd::EventFd;

use crate::Error;
use crate::hypervisor::DevicePages;

/// One virtqueue as the guest programmed it (virtio 1.3, 4.1.4.3). Addresses are device addresses:
/// guest-physical without an IOMMU. They are *not yet checked* against guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QueueAddresses {
    /// Entries: a power of two for split rings, never above the offered maximum.
    pub size: u16,
    /// Descriptor Area.
    pub descriptor: DeviceAddress,
    /// Driver Area (avail ring, or driver event suppression).
    pub driver: DeviceAddress,
    /// Device Area (used ring, or device event suppression).
    pub device: DeviceAddress,
}

/// An enabled virtqueue at activation.
#[derive(Debug)]
pub struct Queue {
    /// Index of the queue.
    pub index: u16,
    /// The guest's settings.
    pub addresses: QueueAddresses,
    /// Signalled when the guest kicks. The same eventfd for the life of the device.
    pub kick: Arc<EventFd>,
    /// To be signalled when buffers were used; `None` while the guest has set no vector for this
    /// queue.
    pub call: Option<Arc<EventFd>>,
}

/// Everything that a backend needs to start.
#[derive(Debug)]
pub struct Activation {
    /// The negotiated features.
    pub features: u64,
    /// The enabled queues, ascending by index.
    pub queues: Vec<Queue>,
}

/// A change that the guest made to a running device.
#[derive(Debug)]
pub enum QueueChange {
    /// The queue's interrupt vector was re-routed: signal this eventfd from now on. The backend
    /// then sends one spurious interrupt, so that none is lost.
    Call {
        /// Index of the queue.
        index: u16,
        /// The new eventfd; `None`: no vector.
        call: Option<Arc<EventFd>>,
    },
    /// The queue was enabled after DRIVER_OK, following its reset.
    Enable(Queue),
    /// The queue was reset (virtio 1.3, 2.6.1); only if the backend offers RING_RESET. Once the
    /// backend returns, nothing accesses the queue's rings and buffers until it is enabled again.
    Reset {
        /// Index of the queue.
        index: u16,
    },
}

/// The purpose of a queue, which determines the meaning of its indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueRole {
    /// Buffers wait until data arrives from outside (a network device's receiveq). An old buffer is
    /// normal; an empty queue may be a fault.
    Receive,
    /// The device works on each buffer at once: transmitq, requests, control commands.
    Request,
    /// Unknown.
    Other,
}

/// A file descriptor that must be polled for reading during the whole life of the device, even
/// while it is inactive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The descriptor; the backend keeps it open.
    pub fd: RawFd,
    /// Passed back to [`Backend::process`].
    pub token: u16,
}

/// How the pages that a device of the host writes are found during a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirtyTracking {
    /// The pages of all writable mappings of the guest's IOMMU count as written. The queues stay
    /// direct.
    Mappings,
    /// The queues are relayed, and the VMM sees which buffers the device has used.
    ShadowQueues,
    /// All memory counts as written: the queues cannot be relayed.
    AllMemory,
}

/// The reaction that the transport owes to an event that a backend processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcome {
    /// The device configuration changed: new generation and a configuration
    /// change interrupt.
    pub config_changed: bool,
    /// The device is broken: set DEVICE_NEEDS_RESET (virtio 1.3, 2.1).
    pub needs_reset: bool,
}

/// A backend's state in a snapshot or a migration stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
    /// The kind of backend that wrote it, such as `virtio-rng`.
    pub name: String,
    /// Version of the payload's layout.
    pub version: u32,
    /// postcard-encoded, backend-specific.
    pub payload: Vec<u8>,
}

/// The device that a backend replaces behind the same virtio transport, while the guest's driver
/// keeps running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplacedDevice {
    /// The result of [`Hardware::identity`] of that device.
    pub identity: SavedState,
    /// The features on which the guest's driver relies: those it negotiated, or all offered
    /// features while it negotiates. 0: there is no driver.
    pub features: u64,
    /// The driver works on its rings, which continue in the middle.
    pub running: bool,
}

/// The implementation of a virtio device. The module's diagram shows the order of calls, which the
/// transport keeps.
///
/// No method may block on the guest, and none may panic on guest input.
pub trait Backend: Send + fmt::Debug {
    /// Virtio device type (virtio 1.3, section 5): 1 network, 2 block, …
    fn device_type(&self) -> u32;

    /// Largest size of each queue; its length is the number of queues.
    fn queue_max_sizes(&self) -> &[u16];

    /// Feature bits to offer. VERSION_1 is always among them.
    fn features(&self) -> u64;

    /// Returns the features to offer to a driver that negotiated `chosen` with another device. They
    /// are at least those of [`Backend::features`].
    fn features_for(&self, _chosen: u64) -> u64 {
        self.features()
    }

    /// Returns the purpose of `queue` of the active device, by its type and the negotiated
    /// features.
    fn queue_role(&self, _queue: u16) -> QueueRole {
        QueueRole::Other
    }

    /// Length of the device configuration in bytes.
    fn config_len(&self) -> u32;

    /// Reads device configuration. The transport has checked that
    /// `offset + data.len()` lies inside [`Backend::config_len`].
    fn read_config(&mut self, offset: u32, data: &mut [u8]);

    /// Whether the device changes its configuration by itself. Linux's driver of virtio-iommu warns
    /// of each interrupt for a change.
    fn changes_config(&self) -> bool {
        true
    }

    /// Writes device configuration; bounds as in [`Backend::read_config`].
    fn write_config(&mut self, offset: u32, data: &[u8]);

    /// Returns descriptors for the event loop; called once, before the device is used. `kicks[i]`
    /// is the kick eventfd of queue *i*, for the queues whose kicks this backend serves in
    /// userspace.
    fn events(&mut self, kicks: &[Arc<EventFd>]) -> Vec<Event>;

    /// The driver wrote FEATURES_OK with `features`, a subset of the offer.
    ///
    /// # Errors
    /// The device refuses: the transport leaves FEATURES_OK clear.
    fn negotiate(&mut self, features: u64) -> Result<(), Error>;

    /// Returns the memory in which the driver's rings are; `None` if observers shall not read them.
    fn memory(&self) -> Option<&DeviceMemory> {
        None
    }

    /// The driver wrote DRIVER_OK.
    ///
    /// # Errors
    /// The device cannot start: the transport sets DEVICE_NEEDS_RESET.
    fn activate(&mut self, activation: Activation) -> Result<(), Error>;

    /// The guest changed a queue of the running device.
    ///
    /// # Errors
    /// As [`Backend::activate`].
    fn change(&mut self, change: QueueChange) -> Result<(), Error>;

    /// Stops everything and clears the guest's settings. Once it returns, nothing accesses guest
    /// memory, unless [`Backend::is_resetting`].
    fn reset(&mut self);

    /// Whether the reset has not ended: the host still works on requests that it could not cancel,
    /// and may access guest memory. [`Backend::process`] of an event ends it. Until then there are
    /// only calls of that, of `reset` and of [`Backend::await_reset`].
    fn is_resetting(&self) -> bool {
        false
    }

    /// Waits for the end of the reset, at most for `limit`. Returns whether it has ended.
    fn await_reset(&mut self, _limit: Duration) -> bool {
        true
    }

    /// Handles one of the descriptors of [`Backend::events`], which became readable.
    fn process(&mut self, token: u16) -> Outcome;

    /// Stops the device and returns its state, including its rings. The device stays stopped until
    /// [`Backend::restore`] or [`Backend::reset`].
    ///
    /// # Errors
    /// The reason for which this device cannot be saved now, with the device as before. The kind is
    /// [`ErrorKind::BrokenRing`] if only a reset would help: such a device cannot be saved, but
    /// does not need to be.
    ///
    /// [`ErrorKind::BrokenRing`]: crate::ErrorKind::BrokenRing
    fn save(&mut self) -> Result<SavedState, Error>;

    /// Starts an inactive device, or one that [`Backend::save`] or [`Hardware::hand_over`] stopped,
    /// from a saved state. `activation` is the state of the restored transport; its features may
    /// have been negotiated just before.
    ///
    /// # Errors
    /// The state is of another kind or version, malformed, or the device refuses it.
    fn restore(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error>;

    /// Checks that this state can be read: its kind, its version and its integrity. Checks also
    /// that the device supports the state, as far as possible without starting anything.
    ///
    /// # Errors
    /// As [`Backend::restore`].
    fn check_state(&self, state: &SavedState) -> Result<(), Error>;

    /// How many requests failed because of the host's storage. None for other devices.
    fn io_errors(&self) -> Option<u64> {
        None
    }

    /// Returns how the pages that the device writes are found. `None`: they are not recorded, or
    /// the device does not run.
    fn dirty_tracking(&self) -> Option<DirtyTracking> {
        None
    }

    /// Returns the additional operations of a backend with a device of the host. `None`: the VMM is
    /// the device itself. All its writes go through guest memory, which marks the pages.
    fn hardware(&mut self) -> Option<&mut dyn Hardware> {
        None
    }

    /// Returns the additional operations of a backend behind an IOMMU of the guest. Such a backend
    /// offers ACCESS_PLATFORM, and refuses a negotiation without it. `None`: device addresses are
    /// guest-physical.
    fn translated(&mut self) -> Option<&mut dyn Translated> {
        None
    }

    /// Whether the kicks of `queue` are served by [`Backend::kicked`], in the thread of the vCPU.
    /// That is for a driver which waits for the answer without letting its vCPU do anything else.
    fn serves_inline(&self, _queue: u16) -> bool {
        false
    }

    /// The driver kicked `queue` of the active device, one that [`Backend::serves_inline`]. The
    /// vCPU waits for this call.
    fn kicked(&mut self, _queue: u16) -> Outcome {
        Outcome::default()
    }
}

/// A backend behind an IOMMU of the guest: it reaches only what its address space has. It begins
/// without one, and then reaches nothing.
///
/// The space survives resets of the device by its driver.
pub trait Translated {
    /// Returns the device addresses that a guest may map. The VMM's own lie outside.
    fn reach(&self) -> IovaRange;

    /// Returns the space that the device entered.
    fn space(&self) -> Option<Arc<AddressSpace>>;

    /// Makes the device reach `space`, and nothing else of the guest, from the return of this call.
    ///
    /// # Errors
    /// The space has addresses outside [`Translated::reach`], or the kernel refuses it. The device
    /// is as before, or it is blocked as by [`Translated::block`].
    fn enter(&mut self, space: &Arc<AddressSpace>) -> Result<(), Error>;

    /// Makes the device reach nothing until it enters a space. A device that cannot do that is
    /// stopped.
    ///
    /// # Errors
    /// The host still works on requests of the device, which is blocked as by
    /// [`Translated::block`].
    fn leave(&mut self) -> Result<(), Error>;

    /// Follows changes of the space, which has them already. Once this returns without an error,
    /// the device does not access unmapped memory any more.
    ///
    /// # Errors
    /// As [`Translated::enter`].
    fn change(&mut self, changes: &[Change]) -> Result<(), Error>;

    /// Stops the device, which then reaches nothing, and has it ask its driver for a reset
    /// ([`Outcome::needs_reset`]). The next start by the driver makes it reach its space again.
    fn block(&mut self);
}

/// A backend behind which a device of the host works on the guest's rings. Such a device has
/// doorbells, can fail, can be replaced, and writes without being seen. The transport gets it from
/// [`Backend::hardware`].
pub trait Hardware {
    /// Returns the device's own doorbell for `queue`, an enabled queue of the active device, if it
    /// has one. The guest may store there instead of signalling the kick eventfd. The transport
    /// asks after each activation and restore, and releases the doorbell before [`Backend::reset`].
    /// The kick eventfd must work all the same: the guest may be switched back to it at any time.
    ///
    /// None for queues that are served in userspace.
    fn doorbell(&self, queue: u16) -> Option<Arc<dyn DevicePages>>;

    /// Asks the guest to announce itself on its network, because its location there changed (virtio
    /// 1.3, 5.1.6.5.4, GUEST_ANNOUNCE). The outcome has `config_changed` set if the guest can be
    /// asked: the device is a network device, started by a driver that supports it. Asking again
    /// before the driver answered has no effect.
    fn announce(&mut self) -> Outcome;

    /// Whether the device itself, and not a ring of its driver, caused [`Outcome::needs_reset`]:
    /// another device in its place would work. Holds until the reset.
    fn has_failed(&self) -> bool;

    /// Whether the host is removing the device, and waits until this process closes it. If the
    /// device cannot [hand over](Hardware::hand_over) without a failure, or does not answer any
    /// more, the outcome has `needs_reset` set, and the device [has failed](Hardware::has_failed).
    ///
    /// Also notices that the host has reset a running device, which then fails by its events.
    fn removal(&mut self) -> Option<Outcome>;

    /// Closes the device, which the host removes. Its driver, if any, has to reset it. Until then
    /// the backend answers requests of the driver with an error. It never works again.
    ///
    /// Dropping the result may take long. The transport has released all doorbells before.
    fn close(&mut self) -> Box<dyn Send>;

    /// With `on`, every page that the device writes is marked in the bitmap of guest memory, except
    /// those of [`Hardware::untracked_writes`]. This holds from the return of this call until a
    /// call with `false` or [`Backend::save`]; earlier writes are not marked. Resets and starts by
    /// the driver do not end it. The guest keeps its device meanwhile. [`Hardware::doorbell`] is
    /// released before and must be asked again afterwards. `false` without logging has no effect.
    ///
    /// # Errors
    /// The reason, with the device as before. The kind is [`ErrorKind::BrokenRing`] if only a reset
    /// would help. If the device could not be kept as before, it asks its driver for a reset
    /// ([`Outcome::needs_reset`]). When logging ends: the device could not return to its former
    /// state; nothing is logged any more.
    ///
    /// [`ErrorKind::BrokenRing`]: crate::ErrorKind::BrokenRing
    fn log_writes(&mut self, on: bool) -> Result<(), Error>;

    /// While writes are logged: the guest-physical address and length in bytes of areas that the
    /// device may write at any moment without a mark. They must be copied once more after it has
    /// stopped. Asked again after each change by the driver, and before [`Backend::save`].
    fn untracked_writes(&self) -> Vec<(u64, u64)>;

    /// Returns the properties of this device that the guest has seen and takes as constant,
    /// whatever its driver negotiated. Input for [`Hardware::adopt`] of the device that replaces
    /// it.
    ///
    /// # Errors
    /// Devices of this kind cannot be replaced.
    fn identity(&mut self) -> Result<SavedState, Error>;

    /// Makes this device, which is still unused, look like the device that it replaces, or gives
    /// the reason why it cannot. That device keeps running meanwhile.
    ///
    /// # Errors
    /// The property that the guest would lose.
    fn adopt(&mut self, replaced: &ReplacedDevice) -> Result<(), Error>;

    /// Checks that a driver that now relies on `features` (as [`ReplacedDevice::features`]) can
    /// continue with this device. It may have relied on less when this device [adopted
    /// the identity of the replaced one](Hardware::adopt). A device that replaces none does not
    /// object.
    ///
    /// # Errors
    /// As [`Hardware::adopt`]: the property that the guest would lose.
    fn check_adopted(&self, features: u64) -> Result<(), Error>;

    /// As [`Backend::save`], but for a device that replaces this one: the state leaves no chain
    /// with this device. A device that cannot be suspended may be reset for it. A device that [has
    /// failed](Hardware::has_failed) is reset, without any other request to it.
    ///
    /// # Errors
    /// The reason why it cannot be handed over now; the device continues, or is as broken as
    /// before.
    fn hand_over(&mut self) -> Result<SavedState, Error>;

    /// As [`Backend::restore`], after a device that was to continue from this state failed, this
    /// one or another. That device is reset, but may have worked on the rings before: their
    /// positions are read again.
    ///
    /// # Errors
    /// As [`Backend::restore`], or the progress of the failed device is unknown.
    fn roll_back(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error>;
}

/// Guest RAM, which backends share.
pub type SharedMemory = Arc<GuestMemory>;
