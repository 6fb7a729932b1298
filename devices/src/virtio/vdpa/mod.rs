//! A vhost-vdpa device as a virtio [`Backend`](crate::virtio::backend::Backend): what the guest programs is
//! handed to the device, and then the device works alone.
//!
//! ```text
//!   transport (what the guest programmed)
//!       |  negotiate, activate, change, reset
//!       v
//!   VdpaBackend --+--> Rings       the device, what it reaches (guest RAM at IOVA = guest-physical
//!                 |                address, for the VM's life), its queues and doorbells
//!                 +--> NetOverlay  the features the guest gets, the VMM's own among them; what the
//!                 |                VMM lays over the configuration: MAC address, announcement
//!                 +--> WriteLog    the record of what the device writes; the thread of relayed
//!                 |                queues, while there are any
//!                 +--> Control     the control queue, which belongs to the VMM
//!
//!   data queues: kick eventfd -> vhost worker -> device -> call eventfd -> guest
//!            or: the device's own doorbell ---> device
//! ```
//! Any device class works: only the control queue and the MAC address are
//! known to be a network device's. Owns the device; must not know PCI, KVM or
//! who polls its descriptors.

mod announce;
mod backend;
mod control;
mod doorbells;
mod mac;
mod offer;
mod overlay;
mod poller;
mod relays;
mod reset_queue;
mod restore;
mod rings;
mod saved;
mod start;
mod succession;
mod write_log;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use vdpa::control_queue::{Command, Limits, queue_index};
use vdpa::device::Device;
use vdpa::netdev::VirtioNetConfig;
use vdpa::ring::RingFeatures;
use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VQ;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

pub use self::doorbells::DoorbellMode;

use self::control::Control;
use self::overlay::NetOverlay;
use self::poller::Poller;
use self::rings::Rings;
pub(super) use self::succession::{IDENTITY_NAME, IDENTITY_VERSION};
use self::write_log::WriteLog;
use super::backend::SharedMemory;
use crate::Error;

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
    rings: Rings,
    net: NetOverlay,
    log: WriteLog,
    /// The device's control queue, if it offers one.
    control: Option<Control>,
    negotiation: Option<Negotiation>,
    max_sizes: Vec<u16>,
    config_changed: EventFd,
    /// The device said that it needs a reset, and its driver has made none since.
    needs_reset: bool,
}

impl VdpaBackend {
    /// Opens the device and maps guest RAM for it, once and for the VM's life.
    /// `ram_end`: the first address above the most RAM that the machine can
    /// ever have; the VMM's private window lies above it.
    ///
    /// # Errors
    /// The device cannot be opened, or not be given to a guest with these options.
    pub fn open(options: &VdpaOptions, memory: SharedMemory, ram_end: u64) -> Result<Self, Error> {
        let device = Device::open(&options.path).map_err(Error::transparent)?;
        Self::new(device, options, memory, ram_end)
    }

    /// As [`VdpaBackend::open`] for a device that somebody else opened; the path is not looked at.
    ///
    /// # Errors
    /// As [`VdpaBackend::open`].
    pub fn from_fd(
        fd: OwnedFd,
        options: &VdpaOptions,
        memory: SharedMemory,
        ram_end: u64,
    ) -> Result<Self, Error> {
        let device = Device::from_fd(fd).map_err(Error::transparent)?;
        Self::new(device, options, memory, ram_end)
    }

    fn new(
        device: Device,
        options: &VdpaOptions,
        memory: SharedMemory,
        ram_end: u64,
    ) -> Result<Self, Error> {
        let (device, iotlb) = device.own()?;
        let has = device.info().queue_count();
        if let Some(expected) = options.num_queues.filter(|&expected| expected != has) {
            return Err(Error::other(format!(
                "the device has {has} queues and num_queues is {expected}: leave num_queues out, \
                 or create the device with another max_vqp"
            )));
        }
        let max_sizes = device.info().queues.iter().map(|queue| queue.max_size);
        let max_sizes = max_sizes.collect();
        let net = NetOverlay::new(&device, &options.id, options.mac)?;
        let mut rings = Rings::new(device, iotlb, options, memory, ram_end)?;
        let control = (rings.is_net() && net.offer.passes(VIRTIO_NET_F_CTRL_VQ))
            .then(|| Control::new(&mut rings.window))
            .transpose()?;
        Ok(Self {
            rings,
            net,
            log: WriteLog {
                on: false,
                poller: None,
                failed: Arc::new(new_eventfd()?),
            },
            control,
            negotiation: None,
            max_sizes,
            config_changed: new_eventfd()?,
            needs_reset: false,
        })
    }

    /// Bytes that are mapped for the device now, in all address spaces.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.rings.iotlb.mapped_bytes()
    }

    fn negotiate_features(&mut self, features: u64) -> Result<Negotiation, Error> {
        if self.rings.is_net() {
            self.net.told = Some(succession::tells(&self.rings.device)?);
        }
        let limits = self.limits(features, self.net.told);
        self.rings
            .device
            .negotiate(self.net.offer.for_device(features))?;
        // Some parents forget it at each reset (ifcvf), others keep it.
        self.rings
            .device
            .set_config_call(Some(&self.config_changed))?;
        let control_queue = if features & (1 << VIRTIO_NET_F_CTRL_VQ) != 0 && self.control.is_some()
        {
            let (pairs, has) = (
                limits.max_virtqueue_pairs,
                self.rings.device.info().queue_count(),
            );
            let index = queue_index(features, pairs).filter(|&index| index < has);
            Some(index.ok_or_else(|| {
                Error::other(format!(
                    "the device says max_virtqueue_pairs {pairs}, which leaves no room for a \
                     control queue among its {has} queues"
                ))
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

    /// What control commands may ask for.
    fn limits(&self, features: u64, config: Option<[u8; VirtioNetConfig::LEN]>) -> Limits {
        let config = config.filter(|_| self.control.is_some());
        let config = VirtioNetConfig::of(config.unwrap_or_default());
        let several = queue_index(features, 2) != queue_index(0, 2);
        Limits {
            features,
            max_virtqueue_pairs: if several {
                config.max_virtqueue_pairs.get()
            } else {
                1
            },
            rss_max_key_size: config.rss_max_key_size,
            rss_max_indirection_table_length: config.rss_max_indirection_table_length.get(),
            supported_hash_types: config.supported_hash_types.get(),
        }
    }

    /// The guest has another interrupt for a data queue, or none.
    fn set_call(&mut self, index: u16, call: Option<Arc<EventFd>>) -> Result<(), Error> {
        let mut known = self.rings.queues.iter_mut();
        if let Some(queue) = known.find(|queue| queue.index == index) {
            queue.call.clone_from(&call);
        }
        if !self.set_relayed_call(index, call.as_ref())? {
            self.rings.device.set_call(index, call.as_deref())?;
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
            tracing::info!(device = %self.rings.id, "the guest has announced itself");
        }
        done.iter().for_each(|command| self.net.note(command));
    }

    /// Whether rings are packed.
    fn packed(&self) -> bool {
        self.negotiation
            .is_some_and(|negotiation| negotiation.ring().packed)
    }

    /// After a failure the device is stopped and its memory mapped again, so
    /// that it neither works half-started nor starts without memory next time.
    fn or_stop<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if result.is_err() {
            self.stop();
        }
        result
    }

    fn stop(&mut self) {
        // A record goes on when the driver does not, and nobody is told of these queues any more.
        let mut unseen = self.log.unseen(&self.rings, self.packed());
        self.negotiation = None;
        self.needs_reset = false;
        self.net.reset();
        self.rings.queues.clear();
        // Nobody polls from here on.
        let relays = self.log.poller.take().map(Poller::end);
        if self.log.on && matches!(relays, Some(None)) {
            // Lost, and with them what they knew of the device.
            unseen = write_log::all(&self.rings.ram);
        }
        let _ = self.log.failed.read();
        if let Some(control) = &mut self.control {
            control.stop();
        }
        if let Err(error) = self.rings.device.reset() {
            tracing::error!(device = %self.rings.id, error = &error as &dyn std::error::Error, "reset failed");
        } else if let Err(error) = self.rings.iotlb.remap_after_reset() {
            tracing::error!(device = %self.rings.id, error = &error as &dyn std::error::Error, "memory cannot be mapped again after a reset");
            self.rings.device.give_up();
        }
        if let Some(relays) = relays.flatten() {
            self.rings.end_relays(relays);
        }
        write_log::mark(&self.rings.memory, &unseen);
    }
}

/// The only way to fail is a counter at its maximum, which is signalled too.
fn signal(event: &EventFd) {
    let _ = event.write(1);
}

fn new_eventfd() -> Result<EventFd, Error> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(Error::context(EVENTFD))
}

const EVENTFD: &str =
    "cannot make or use an eventfd; the limit of open files (ulimit -n) may be too low";
const WINDOW: &str = "the device reaches too few addresses";

/// A call in the wrong order.
fn not_negotiated() -> Error {
    Error::other("the features are not negotiated")
}

/// The relays are lost, or have no device.
fn relays_lost() -> Error {
    Error::other("relayed queues cannot go on: the guest's driver must reset the device")
}

/// A device of another class than a network device is to be replaced.
#[must_use]
pub fn not_replaceable() -> Error {
    Error::other("only network devices can be replaced while the machine runs")
}

impl Drop for VdpaBackend {
    /// Stops the device before its memory goes.
    fn drop(&mut self) {
        self.log.poller = None;
        if let Err(error) = self.rings.device.reset() {
            tracing::warn!(device = %self.rings.id, %error, "reset failed; closing the device resets it");
        }
    }
}
