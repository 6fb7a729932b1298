//! A vhost-vdpa device as a virtio [`Backend`](crate::virtio::backend::Backend): what the guest programs is
//! handed to the device, and then the device works alone.
//!
//! ```text
//!   transport (what the guest programmed)
//!       |  negotiate, activate, change, reset
//!       v
//!   VdpaBackend --+--> Link      the device's typestate: status, rings, eventfds
//!                 +--> Iotlb     guest RAM at IOVA = guest-physical address, for the VM's life
//!                 +--> Control   the control queue, which belongs to the VMM
//!                 +--> Offer     the features the guest gets, the VMM's own among them
//!                 +--> MacOverlay, Announcement  what the VMM lays over the configuration
//!                 +--> DeviceDoorbells  pages in which the guest's store is a kick
//!                 +--> Poller    the thread of relayed queues, while there are any
//!
//!   data queues: kick eventfd -> vhost worker -> device -> call eventfd -> guest
//!            or: the device's own doorbell ---> device
//! ```
//! Any device class works: only the control queue and the MAC address are
//! known to be a network device's. Owns the device; must not know PCI, KVM or
//! who polls its descriptors.

mod announce;
mod backend;
mod bring_up;
mod control;
mod doorbells;
mod error;
mod link;
mod mac;
mod offer;
mod poller;
mod relays;
mod reset_queue;
mod restore;
mod saved;
mod start;
mod succession;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use vdpa::control_queue::{Command, Limits, queue_index};
use vdpa::device::{Device, DeviceInfo, Opened, VringAddresses};
use vdpa::iotlb::Iotlb;
use vdpa::iova::IovaRange;
use vdpa::memory::GuestRegion;
use vdpa::ring::RingFeatures;
use vdpa::uapi::BackendFeatures;
use vdpa::window::PrivateWindow;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MAC,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

pub use self::doorbells::DoorbellMode;
pub use self::error::VdpaError;

use self::announce::Announcement;
use self::control::Control;
use self::doorbells::DeviceDoorbells;
use self::link::Link;
use self::mac::MacOverlay;
use self::offer::Offer;
use self::poller::Poller;
use self::succession::Identity;
pub(super) use self::succession::{IDENTITY_NAME, IDENTITY_VERSION};
use super::backend::{QueueAddresses, SharedMemory};

/// Name and version of the saved state.
pub(super) const STATE_NAME: &str = "virtio-vdpa";
pub(super) const STATE_VERSION: u32 = 2;

/// Which device is wanted, and how the guest is to see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdpaOptions {
    /// Name for messages.
    pub id: String,
    /// The vhost-vdpa character device.
    pub path: PathBuf,
    /// MAC address for the guest; `None`: the device's own.
    pub mac: Option<[u8; 6]>,
    /// Number of queues that the user expects.
    pub num_queues: Option<u16>,
    /// Whether the guest gets the device's doorbells.
    pub doorbell: DoorbellMode,
}

/// What the guest negotiated, as far as it is needed later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Negotiation {
    features: u64,
    /// Index of the control queue, if the guest negotiated one.
    control_queue: Option<u16>,
    limits: Limits,
}

/// A data queue of a started device.
#[derive(Debug)]
struct DataQueue {
    index: u16,
    addresses: QueueAddresses,
    kick: Arc<EventFd>,
    call: Option<Arc<EventFd>>,
}

impl Negotiation {
    fn has(&self, bit: u32) -> bool {
        self.features & (1 << bit) != 0
    }

    /// What all rings of the device, the guest's and ours, have in common.
    fn ring(&self) -> RingFeatures {
        RingFeatures::of(self.features)
    }
}

/// A vhost-vdpa device behind a virtio transport. See the module.
#[derive(Debug)]
pub struct VdpaBackend {
    id: String,
    link: Link,
    /// Behind `link`, so that the device is closed only after its mappings are gone.
    iotlb: Iotlb,
    /// Addresses for the rings of relayed queues.
    window: PrivateWindow,
    memory: SharedMemory,
    /// Where a guest's rings may lie: guest RAM, and nothing of ours.
    ram: Vec<IovaRange>,
    info: DeviceInfo,
    /// The acknowledged ones.
    backend_features: BackendFeatures,
    /// The device begins and stops anywhere in a ring.
    keeps_positions: bool,
    max_sizes: Vec<u16>,
    /// They hold the device open: see [`vdpa::doorbell`].
    doorbells: DeviceDoorbells,
    offer: Offer,
    config_changed: EventFd,
    /// The call of queues for which the guest has no vector at DRIVER_OK:
    /// nobody reads it, but vp_vdpa gives a queue an interrupt only if it has a
    /// call then, and the guest may route the queue later.
    unrouted: Arc<EventFd>,
    /// The device's control queue, if it offers one.
    control: Option<Control>,
    mac: Option<MacOverlay>,
    announcement: Announcement,
    /// The device said that it needs a reset, and its driver has made none since.
    needs_reset: bool,
    /// What the guest was told by the device that it has negotiated with: one that has failed may say anything.
    told: Option<[u8; succession::CONFIG_LEN]>,
    /// What the guest was told by the device whose place this one has taken, until its driver goes on or begins here.
    predecessor: Option<Identity>,
    negotiation: Option<Negotiation>,
    /// The queues that were enabled at the last start.
    data_queues: Vec<DataQueue>,
    /// What the device writes is to be known.
    dirty_log: bool,
    /// While queues are relayed.
    poller: Option<Poller>,
    /// A relayed queue is broken, or the device could not be brought up again.
    relay_failed: Arc<EventFd>,
}

impl VdpaBackend {
    /// Opens the device and maps guest RAM for it, once and for the VM's life.
    /// `ram_end`: the first address above the most RAM that the machine can
    /// ever have; the VMM's private window lies above it.
    ///
    /// # Errors
    /// See [`VdpaError`].
    pub fn open(
        options: &VdpaOptions,
        memory: SharedMemory,
        ram_end: u64,
    ) -> Result<Self, VdpaError> {
        let device = Device::open(&options.path)?;
        Self::new(device, options, memory, ram_end)
    }

    /// As [`VdpaBackend::open`] for a device that somebody else opened; the path is not looked at.
    ///
    /// # Errors
    /// See [`VdpaError`].
    pub fn from_fd(
        fd: OwnedFd,
        options: &VdpaOptions,
        memory: SharedMemory,
        ram_end: u64,
    ) -> Result<Self, VdpaError> {
        Self::new(Device::from_fd(fd)?, options, memory, ram_end)
    }

    fn new(
        device: Device<Opened>,
        options: &VdpaOptions,
        memory: SharedMemory,
        ram_end: u64,
    ) -> Result<Self, VdpaError> {
        let (device, mut iotlb) = device.own().map_err(|failed| failed.error)?;
        let info = device.info().clone();
        let has = info.queue_count();
        if let Some(expected) = options.num_queues.filter(|&expected| expected != has) {
            return Err(VdpaError::QueueCount { expected, has });
        }
        let id = options.id.clone();
        let offer = Offer::new(&device, &id, options.mac.is_some());
        let backend_features = device.backend_features();
        let keeps_positions = device.keeps_ring_positions();
        let mac = configured_mac(&device, &info, offer, options.mac)?;

        let mut window =
            PrivateWindow::new(info.iova_range, ram_end).map_err(VdpaError::PrivateWindow)?;
        iotlb
            .map_guest_memory(0, &memory)
            .map_err(VdpaError::MapMemory)?;
        let is_net = info.device_id == VIRTIO_ID_NET;
        let control = (is_net && offer.passes(VIRTIO_NET_F_CTRL_VQ))
            .then(|| Control::new(&mut window))
            .transpose()?;

        let doorbells = DeviceDoorbells::new(&device, options.doorbell)?;
        let eventfd = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(VdpaError::EventFd);
        let config_changed = eventfd()?;
        let ram = GuestRegion::all(&memory)
            .iter()
            .filter_map(|region| {
                use vdpa::memory::DmaRegion;
                IovaRange::from_size(region.base(), region.size())
            })
            .collect();
        Ok(Self {
            id,
            link: Link::Owned(device),
            iotlb,
            memory,
            ram,
            max_sizes: info.queues.iter().map(|queue| queue.max_size).collect(),
            doorbells,
            offer,
            info,
            backend_features,
            keeps_positions,
            window,
            config_changed,
            unrouted: Arc::new(eventfd()?),
            relay_failed: Arc::new(eventfd()?),
            dirty_log: false,
            poller: None,
            control,
            mac,
            announcement: Announcement::default(),
            needs_reset: false,
            told: None,
            predecessor: None,
            negotiation: None,
            data_queues: Vec::new(),
        })
    }

    /// Bytes that are mapped for the device now, in all address spaces.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.iotlb.mapped_bytes()
    }

    fn negotiate_features(&mut self, features: u64) -> Result<Negotiation, VdpaError> {
        if self.info.device_id == VIRTIO_ID_NET {
            self.told = Some(self.tells()?);
        }
        let limits = self.limits(features, self.told);
        self.link.negotiate(self.offer.for_device(features))?;
        // Some parents forget it at each reset (ifcvf), others keep it.
        self.link.set_config_call(&self.config_changed)?;
        let control_queue = if features & (1 << VIRTIO_NET_F_CTRL_VQ) != 0 && self.control.is_some()
        {
            let index = queue_index(features, limits.max_virtqueue_pairs);
            let known = index.filter(|&index| index < self.info.queue_count());
            Some(known.ok_or(VdpaError::ControlQueueIndex {
                max_virtqueue_pairs: limits.max_virtqueue_pairs,
                has: self.info.queue_count(),
            })?)
        } else {
            None
        };
        Ok(Negotiation {
            features,
            control_queue,
            limits,
        })
    }

    /// What control commands may ask for (`struct virtio_net_config`, virtio 1.3, 5.1.4).
    fn limits(&self, features: u64, config: Option<[u8; succession::CONFIG_LEN]>) -> Limits {
        let config = config.filter(|_| self.control.is_some());
        let config = config.unwrap_or_default();
        let several = queue_index(features, 2) != queue_index(0, 2);
        Limits {
            features,
            max_virtqueue_pairs: if several {
                u16::from_le_bytes([config[8], config[9]])
            } else {
                1
            },
            rss_max_key_size: config[17],
            rss_max_indirection_table_length: u16::from_le_bytes([config[18], config[19]]),
            supported_hash_types: u32::from_le_bytes([
                config[20], config[21], config[22], config[23],
            ]),
        }
    }

    /// The guest has another interrupt for a data queue, or none.
    fn set_call(&mut self, index: u16, call: Option<Arc<EventFd>>) -> Result<(), VdpaError> {
        let mut known = self.data_queues.iter_mut();
        if let Some(queue) = known.find(|queue| queue.index == index) {
            queue.call.clone_from(&call);
        }
        if !self.set_relayed_call(index, call.as_ref())? {
            self.link.running()?.set_call(index, call.as_deref())?;
        }
        if let Some(call) = &call {
            signal(call);
        }
        Ok(())
    }

    /// Takes note of commands that were carried out.
    fn note(&mut self, done: &[Command]) {
        // The driver sees it answered only after this call: it holds the lock of the
        // transport, which a read of the configuration needs.
        if done.contains(&Command::AnnounceAck) {
            tracing::info!(device = %self.id, "the guest has announced itself");
            self.announcement.set(false);
        }
        if let Some(mac) = &mut self.mac {
            done.iter().for_each(|command| mac.note(command));
        }
    }

    /// After a failure the device is stopped and its memory mapped again, so
    /// that it neither works half-started nor starts without memory next time.
    fn or_stop<T>(&mut self, result: Result<T, VdpaError>) -> Result<T, VdpaError> {
        if result.is_err() {
            self.stop();
        }
        result
    }

    fn stop(&mut self) {
        // A record goes on when the driver does not, and nobody is told of these queues any more.
        let mut unseen = self.unseen();
        self.negotiation = None;
        self.needs_reset = false;
        self.announcement.set(false);
        self.data_queues.clear();
        // Nobody polls from here on.
        let relays = self.poller.take().map(Poller::end);
        if self.dirty_log && matches!(relays, Some(None)) {
            // Lost, and with them what they knew of the device.
            unseen = self.all_memory();
        }
        let _ = self.relay_failed.read();
        if let Some(control) = &mut self.control {
            control.stop();
        }
        if let Some(mac) = &mut self.mac {
            mac.reset();
        }
        if let Err(error) = self.link.reset() {
            tracing::error!(device = %self.id, error = &error as &dyn std::error::Error, "reset failed");
        } else if let Err(error) = self.iotlb.remap_after_reset() {
            tracing::error!(device = %self.id, error = &error as &dyn std::error::Error, "memory cannot be mapped again after a reset");
            self.link = Link::Lost;
        }
        if let Some(relays) = relays.flatten() {
            self.end_relays(relays);
        }
        self.mark(&unseen);
    }
}

/// The only way to fail is a counter at its maximum, which is signalled too.
fn signal(event: &EventFd) {
    let _ = event.write(1);
}

fn vring_addresses(addresses: &QueueAddresses) -> VringAddresses {
    VringAddresses {
        descriptor: addresses.descriptor,
        driver: addresses.driver,
        device: addresses.device,
    }
}

/// The address for the guest, if this is a network device with one.
fn configured_mac<S>(
    device: &Device<S>,
    info: &DeviceInfo,
    offer: Offer,
    wanted: Option<[u8; 6]>,
) -> Result<Option<MacOverlay>, VdpaError> {
    if info.device_id != VIRTIO_ID_NET || !offer.has(VIRTIO_NET_F_MAC) {
        return match wanted {
            Some(_) => Err(VdpaError::NoMac),
            None => Ok(None),
        };
    }
    let mut own = [0u8; 6];
    device.read_config(0, &mut own)?;
    match wanted {
        Some(wanted) if wanted != own && !offer.passes(VIRTIO_NET_F_CTRL_MAC_ADDR) => {
            Err(VdpaError::FixedMac)
        }
        wanted => Ok(Some(MacOverlay::new(wanted.unwrap_or(own)))),
    }
}

impl Drop for VdpaBackend {
    /// Stops the device before its memory goes.
    fn drop(&mut self) {
        self.poller = None;
        if let Err(error) = self.link.reset() {
            tracing::warn!(device = %self.id, %error, "reset failed; closing the device resets it");
        }
    }
}
