//! The seam between the virtio transport and what does the device's work.
//!
//! The *transport* (virtio-pci) owns what the guest programs:
//! features, status, ring addresses and sizes, enable bits, vectors. A
//! *backend* (rng, block, vhost-vdpa) owns what happens behind it. A backend
//! gets a read-only description of the guest's choices at activation and at
//! every later change; it must not know PCI, nor who runs the event loop.
//!
//! ```text
//!             negotiate            activate
//!   inactive ----------> negotiated ----------> active --+
//!      ^   (FEATURES_OK)     |      (DRIVER_OK)   |  ^   | change, process
//!      |                     |                    |  +---+
//!      +---------------------+--------------------+
//!                  reset (status 0, at any moment)
//! ```

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::memory::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

use crate::Error;
use crate::hypervisor::DoorbellPage;

/// One virtqueue as the guest programmed it (virtio 1.3, 4.1.4.3). Addresses
/// are guest-physical and *not yet checked* against guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QueueAddresses {
    /// Entries: a power of two for split rings, never above the offered maximum.
    pub size: u16,
    /// Descriptor Area.
    pub descriptor: u64,
    /// Driver Area (avail ring, or driver event suppression).
    pub driver: u64,
    /// Device Area (used ring, or device event suppression).
    pub device: u64,
}

/// An enabled virtqueue at activation.
#[derive(Debug)]
pub struct Queue {
    /// Index of the queue.
    pub index: u16,
    /// What the guest programmed.
    pub addresses: QueueAddresses,
    /// Signalled when the guest kicks. The same fd for the life of the device.
    pub kick: Arc<EventFd>,
    /// To be signalled when buffers were used; `None` while the guest has no
    /// vector for this queue.
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

/// A change the guest made to a running device.
#[derive(Debug)]
pub enum QueueChange {
    /// The queue's interrupt vector was re-routed: signal this one from now
    /// on. The backend follows it with one spurious interrupt, so that none is lost.
    Call {
        /// Index of the queue.
        index: u16,
        /// The new eventfd; `None`: no vector.
        call: Option<Arc<EventFd>>,
    },
    /// The queue was enabled after DRIVER_OK: one that was reset before.
    Enable(Queue),
    /// The queue was reset (virtio 1.3, 2.6.1); only where the backend offers
    /// RING_RESET. When the backend returns, nothing touches the queue's rings and
    /// buffers any more, until it is enabled again.
    Reset {
        /// Index of the queue.
        index: u16,
    },
}

/// What a queue is for, as far as it tells what its indices mean to somebody who watches
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueRole {
    /// Buffers wait in it until something arrives from outside (a network device's receiveq):
    /// an old buffer is no sign of trouble, an empty queue may be one.
    Receive,
    /// The device is to work on each buffer at once: transmitq, requests, control commands.
    Request,
    /// Not known.
    Other,
}

/// A file descriptor that a backend wants to be polled for reading, for the
/// whole life of the device (also while it is inactive).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The descriptor; the backend keeps it open.
    pub fd: RawFd,
    /// Given back to [`Backend::process`].
    pub token: u16,
}

/// What the transport must do after a backend processed an event.
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
    /// Which kind of backend wrote it, such as `virtio-rng`.
    pub name: String,
    /// Version of the payload's layout.
    pub version: u32,
    /// postcard-encoded, backend-specific.
    pub payload: Vec<u8>,
}

/// The device whose place a backend is to take behind the same virtio transport, so that the
/// guest's driver goes on with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Predecessor {
    /// What [`Hardware::identity`] of the predecessor gave.
    pub identity: SavedState,
    /// What the guest's driver relies on: the features that it negotiated, or all that it is
    /// offered while it makes its choice. 0: no driver is there.
    pub features: u64,
    /// The driver works on its rings: they have to go on in their middle.
    pub running: bool,
}

/// What does a virtio device's work. See the module's diagram for who calls
/// what in which order; the transport upholds it.
///
/// No method may block on the guest, and none may panic on what the guest wrote.
pub trait Backend: Send + fmt::Debug {
    /// Virtio device type (virtio 1.3, section 5): 1 network, 2 block, …
    fn device_type(&self) -> u32;

    /// Largest size of each queue; its length is the number of queues.
    fn queue_max_sizes(&self) -> &[u16];

    /// Feature bits to offer. VERSION_1 is always among them.
    fn features(&self) -> u64;

    /// What `queue` of the active device is for, by its type and the features that were
    /// negotiated.
    fn queue_role(&self, _queue: u16) -> QueueRole {
        QueueRole::Other
    }

    /// Length of the device configuration in bytes.
    fn config_len(&self) -> u32;

    /// Reads device configuration. The transport has checked that
    /// `offset + data.len()` lies inside [`Backend::config_len`].
    fn read_config(&mut self, offset: u32, data: &mut [u8]);

    /// Writes device configuration; bounds as in [`Backend::read_config`].
    fn write_config(&mut self, offset: u32, data: &[u8]);

    /// Descriptors for the event loop; asked once, before the device is used.
    /// `kicks[i]` is the kick eventfd of queue *i*, for the queues whose kicks
    /// this backend serves in userspace.
    fn events(&mut self, kicks: &[Arc<EventFd>]) -> Vec<Event>;

    /// The driver wrote FEATURES_OK with `features`, a subset of the offer.
    ///
    /// # Errors
    /// The device refuses: the transport leaves FEATURES_OK clear.
    fn negotiate(&mut self, features: u64) -> Result<(), Error>;

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

    /// Stops everything and forgets what the guest programmed. When it
    /// returns, nothing touches guest memory any more.
    fn reset(&mut self);

    /// One of the descriptors of [`Backend::events`] became readable.
    fn process(&mut self, token: u16) -> Outcome;

    /// Stops the device and gives its state, rings included. The device
    /// stays stopped until [`Backend::restore`] or [`Backend::reset`].
    ///
    /// # Errors
    /// Says why this device cannot be saved now, with the device as before. The kind is
    /// [`ErrorKind::BrokenRing`] if only a reset would help: the device as it is cannot be saved,
    /// but need not be either.
    ///
    /// [`ErrorKind::BrokenRing`]: crate::ErrorKind::BrokenRing
    fn save(&mut self) -> Result<SavedState, Error>;

    /// Starts an inactive device, or one that is stopped by [`Backend::save`] or
    /// [`Hardware::hand_over`], from a saved state. `activation` is what the restored transport
    /// holds; its features may have been negotiated just before.
    ///
    /// # Errors
    /// The state is of another kind or version, malformed, or the device refuses it.
    fn restore(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error>;

    /// Whether this state can be read at all, its kind and version, and that it is whole; and, as far as that can be told
    /// without starting anything, whether the device can do what it says.
    ///
    /// # Errors
    /// As [`Backend::restore`] for such.
    fn check_state(&self, state: &SavedState) -> Result<(), Error>;

    /// What a backend can do besides that has a device of the host behind it. `None`: the VMM is
    /// the device itself. Its every write goes through guest memory, which marks by itself.
    fn hardware(&mut self) -> Option<&mut dyn Hardware> {
        None
    }
}

/// A backend behind which a device of the host works on the guest's rings: it kicks by doorbells,
/// fails, is replaced by another one, and writes unseen. The transport asks for it by
/// [`Backend::hardware`].
pub trait Hardware {
    /// The device's own doorbell for `queue`, an enabled queue of the active
    /// device, if the guest may store there instead of signalling the kick
    /// eventfd. Asked after each activation and restore, and let go before
    /// [`Backend::reset`]. The kick eventfd must work all the same: the guest may
    /// be sent back to it at any time.
    ///
    /// None for queues that are served in userspace.
    fn doorbell(&self, queue: u16) -> Option<Arc<dyn DoorbellPage>>;

    /// Asks the guest to announce itself on its network, because it came to
    /// another place there (virtio 1.3, 5.1.6.5.4, GUEST_ANNOUNCE). The outcome says
    /// `config_changed` if it can be asked: a network device, started by a driver
    /// that understands it. Asking again before the driver answered changes nothing.
    fn announce(&mut self) -> Outcome;

    /// Whether the device itself, and no ring of its driver's, is why [`Outcome::needs_reset`] was said: another
    /// device in its place would work. Until it is reset.
    fn has_failed(&self) -> bool;

    /// `on`: from when this returns until it is called again with `false`, or [`Backend::save`], every page that the
    /// device writes is marked in the bitmap of guest memory, save those of [`Hardware::always_dirty`]; what it wrote
    /// before is not. Resets and starts by the driver in between change nothing about that. The guest keeps its device
    /// meanwhile. [`Hardware::doorbell`] is to be asked again afterwards, and is let go before. `false` without a
    /// record does nothing.
    ///
    /// # Errors
    /// Says why it can't be done, with the device as before. The kind is [`ErrorKind::BrokenRing`]
    /// if only a reset would help. If that could not be kept either, the device asks for a reset by
    /// its driver ([`Outcome::needs_reset`]). At the end of a record: the device could not be
    /// brought back to its former state; nothing is recorded any more.
    ///
    /// [`ErrorKind::BrokenRing`]: crate::ErrorKind::BrokenRing
    fn log_writes(&mut self, on: bool) -> Result<(), Error>;

    /// While pages are recorded: guest-physical address and length in bytes of what the device may write at any
    /// moment without a mark, to be copied once more when it has stopped. Asked again after each
    /// change by the driver, and before [`Backend::save`].
    fn always_dirty(&self) -> Vec<(u64, u64)>;

    /// What the guest was told of this device, whatever its driver negotiated, and takes for
    /// unchanging: for [`Hardware::succeed`] of the device that takes its place.
    ///
    /// # Errors
    /// Devices of this kind are not replaced.
    fn identity(&mut self) -> Result<SavedState, Error>;

    /// Makes this device, which is unused yet, look like its predecessor, or says why
    /// it cannot. The predecessor goes on meanwhile.
    ///
    /// # Errors
    /// What the guest would lose.
    fn succeed(&mut self, predecessor: &Predecessor) -> Result<(), Error>;

    /// Whether a driver that relies on `features` by now (as [`Predecessor::features`]) can go on with this device: it may have
    /// relied on less when this one [took its predecessor's place](Hardware::succeed). A device that has taken none has nothing
    /// to say.
    ///
    /// # Errors
    /// As [`Hardware::succeed`]: what the guest would lose.
    fn check_succession(&self, features: u64) -> Result<(), Error>;

    /// As [`Backend::save`], but for a device that takes this one's place: in the state no
    /// chain is left with this device, and a device that cannot be suspended may be reset for it. One that
    /// [has failed](Hardware::has_failed) is reset, and asked nothing.
    ///
    /// # Errors
    /// Says why the place cannot be handed over now; the device continues, or is as broken as before.
    fn hand_over(&mut self) -> Result<SavedState, Error>;

    /// As [`Backend::restore`], after a device that was to go on from this state failed, this one or another. It is reset,
    /// but may have worked on the rings before: where they stand is looked up again.
    ///
    /// # Errors
    /// As [`Backend::restore`], or it is not known what that one has done.
    fn take_back(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error>;
}

/// How the backends that touch guest memory hold it.
pub type SharedMemory = Arc<GuestMemory>;
