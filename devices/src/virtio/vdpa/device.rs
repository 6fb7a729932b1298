//! The backend as a whole: its parts, its negotiation with the device, and its stop.
//!
//! It must not know how queues are started, saved or relayed.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use vdpa::control_queue::{Command, Limits, queue_index};
use vdpa::device::{ClosedDevice, Device};
use vdpa::memory::DeviceMemory;
use vdpa::netdev::VirtioNetConfig;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_STANDBY};
use vmm_sys_util::eventfd::EventFd;

use super::control::Control;
use super::doorbells::DoorbellMode;
use super::eventfd::{new_eventfd, signal};
use super::identity::read_net_config;
use super::offer::{Negotiation, Offer, Settings};
use super::overlay::NetOverlay;
use super::poller::Poller;
use super::rings::Rings;
use super::write_log::{self, WriteLog};
use crate::Error;
use crate::translation::Translation;

/// Entries of the guest's control queue, at least.
const CONTROL_QUEUE_SIZE: u16 = 256;

/// The device, and how it is presented to the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdpaOptions {
    /// Name for messages.
    pub id: String,
    /// The vhost-vdpa character device.
    pub path: PathBuf,
    /// MAC address for the guest; `None`: the device's own.
    pub mac: Option<[u8; 6]>,
    /// Whether the guest may change neither its MAC address nor the device's filters.
    pub mac_lock: bool,
    /// Whether the guest is offered STANDBY: it uses another device with the same MAC address while
    /// there is one.
    pub standby: bool,
    /// Number of queues that the user expects; checked at the start.
    pub num_queues: Option<u16>,
    /// Whether the guest gets the device's doorbells.
    pub doorbell: DoorbellMode,
    /// Whether the guest's IOMMU decides which memory the device reaches.
    pub iommu: bool,
}

/// A vhost-vdpa device behind a virtio transport; see the module.
#[derive(Debug)]
pub struct VdpaBackend {
    pub(super) rings: Rings,
    pub(super) net: NetOverlay,
    pub(super) log: WriteLog,
    /// `None`: the device reaches all of guest RAM.
    pub(super) translation: Option<Translation>,
    /// The control queue, if the device or the VMM in its place offers one.
    pub(super) control: Option<Control>,
    pub(super) negotiation: Option<Negotiation>,
    /// The largest size of each queue of the guest.
    pub(super) max_sizes: Vec<u16>,
    pub(super) config_changed: EventFd,
    /// The device reported DEVICE_NEEDS_RESET, and its driver has not reset it since.
    pub(super) needs_reset: bool,
    /// The host has removed the device, and it is closed.
    pub(super) closed: bool,
}

impl VdpaBackend {
    /// Opens the device and maps guest RAM for it, once for the VM's life. A device behind the
    /// guest's IOMMU reaches nothing yet. `ram_end` is the first
    /// address above the most RAM that the machine can ever have; the VMM's private window lies
    /// above it.
    ///
    /// # Errors
    /// The device cannot be opened, or cannot be given to a guest with these options.
    pub fn open(
        options: &VdpaOptions,
        memory: impl Into<DeviceMemory>,
        ram_end: u64,
    ) -> Result<Self, Error> {
        let device = Device::open(&options.path).map_err(Error::as_it_is)?;
        Self::new(device, options, memory.into(), ram_end)
    }

    /// As [`VdpaBackend::open`], for a device that the caller opened; the path is ignored.
    ///
    /// # Errors
    /// As [`VdpaBackend::open`].
    pub fn from_fd(
        fd: OwnedFd,
        options: &VdpaOptions,
        memory: impl Into<DeviceMemory>,
        ram_end: u64,
    ) -> Result<Self, Error> {
        let device = Device::from_fd(fd).map_err(Error::as_it_is)?;
        Self::new(device, options, memory.into(), ram_end)
    }

    fn new(
        device: Device,
        options: &VdpaOptions,
        memory: DeviceMemory,
        ram_end: u64,
    ) -> Result<Self, Error> {
        let (device, iotlb) = device.own()?;
        let settings = Settings {
            mac_given: options.mac.is_some(),
            mac_lock: options.mac_lock,
            standby: options.standby,
            translated: options.iommu,
        };
        let net = NetOverlay::new(&device, &options.id, options.mac, settings)?;
        let max_sizes = max_sizes(&device, net.offer);
        let has = u16::try_from(max_sizes.len()).unwrap_or(u16::MAX);
        if let Some(expected) = options.num_queues.filter(|&expected| expected != has) {
            return Err(Error::other(format!(
                "the device has {has} queues and num_queues is {expected}: leave num_queues out, \
                 or create the device with another max_vqp"
            )));
        }
        if options.standby && !net.offer.has(VIRTIO_NET_F_STANDBY) {
            return Err(Error::other(
                "standby=on needs a NIC with a MAC address, by which the guest finds its primary: \
                 create the device with one",
            ));
        }
        let mut rings = Rings::new(device, iotlb, options, memory, ram_end)?;
        let own = rings.memory.space().cloned();
        let control = if net.offer.is_unfiltered() {
            Some(Control::without_device()?)
        } else if rings.is_net() && net.offer.passes(VIRTIO_NET_F_CTRL_VQ) {
            Some(Control::new(&mut rings.window)?)
        } else {
            None
        };
        Ok(Self {
            translation: own.map(|own| Translation::new(own, rings.memory.ram())),
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
            closed: false,
        })
    }

    /// Returns the number of bytes mapped for the device, in all address spaces.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.rings.iotlb.mapped_bytes()
    }

    pub(super) fn negotiate_features(&mut self, features: u64) -> Result<Negotiation, Error> {
        self.net.offer.check(features)?;
        self.unblock()?;
        if self.rings.is_net() {
            self.net.negotiated_config = Some(read_net_config(&self.rings.device)?);
        }
        let limits = self.limits(features, self.net.negotiated_config);
        self.negotiate_device(features)?;
        self.max_sizes = max_sizes(&self.rings.device, self.net.offer);
        let control_queue = if features & (1 << VIRTIO_NET_F_CTRL_VQ) != 0 && self.control.is_some()
        {
            let pairs = limits.max_virtqueue_pairs;
            let has = self.max_sizes.len();
            let index = queue_index(features, pairs).filter(|&index| usize::from(index) < has);
            Some(index.ok_or_else(|| {
                Error::other(format!(
                    "the device reports max_virtqueue_pairs {pairs}, which leaves no room for a \
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

    /// Returns the negotiation. An error before it: a call in the wrong order.
    pub(super) fn negotiated(&self) -> Result<Negotiation, Error> {
        let negotiation = self.negotiation;
        negotiation.ok_or_else(|| Error::other("the features are not negotiated"))
    }

    /// Returns the index of the control queue, if the guest negotiated one.
    pub(super) fn control_queue(&self) -> Option<u16> {
        self.negotiation?.control_queue
    }

    /// Negotiates the guest's `features` with the device, which was reset.
    pub(super) fn negotiate_device(&mut self, features: u64) -> Result<(), Error> {
        let device = &mut self.rings.device;
        device.negotiate(self.net.offer.for_device(features))?;
        // Some parent drivers forget the config call at each reset (ifcvf), others keep it.
        Ok(device.set_config_call(Some(&self.config_changed))?)
    }

    /// Returns the limits on control commands.
    pub(super) fn limits(
        &self,
        features: u64,
        config: Option<[u8; VirtioNetConfig::LEN]>,
    ) -> Limits {
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

    /// Sets or removes the guest's interrupt for a data queue.
    pub(super) fn set_call(&mut self, index: u16, call: Option<Arc<EventFd>>) -> Result<(), Error> {
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

    /// Records commands that were carried out.
    pub(super) fn note(&mut self, done: &[Command]) {
        // The driver sees the answer only after this call, which holds the lock of the transport; a
        // read of the configuration needs that lock.
        if done.contains(&Command::AnnounceAck) {
            tracing::info!(device = %self.rings.id, "the guest has announced itself");
        }
        done.iter().for_each(|command| self.net.note(command));
    }

    /// Whether rings are packed.
    pub(super) fn packed(&self) -> bool {
        let negotiation = self.negotiation;
        negotiation.is_some_and(|negotiation| negotiation.ring().packed)
    }

    /// Runs `work`. After a failure it stops the device and maps its memory again, so that the
    /// device neither works half-started nor starts without memory next time.
    pub(super) fn or_stop<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let result = work(self);
        if result.is_err() {
            self.stop();
        }
        result
    }

    pub(super) fn stop(&mut self) {
        self.halt(true);
        self.negotiation = None;
        self.needs_reset = false;
        self.net.reset();
        self.rings.queues.clear();
        if let Some(control) = &mut self.control {
            control.stop();
        }
    }

    /// Ends the relays, resets the device and marks its untracked writes. With `again`, the device
    /// gets its memory for the next driver.
    fn halt(&mut self, again: bool) {
        // The log continues without the driver, but these queues are not reported any more.
        let mut untracked_writes = self.log.untracked_writes(&self.rings, self.packed());
        // No thread polls from here on.
        let relays = self.log.poller.take().map(Poller::end);
        if self.log.on && matches!(relays, Some(None)) {
            // The relays are lost, and with them their knowledge of the device.
            untracked_writes = self.rings.memory.writable();
        }
        let _ = self.log.failed.read();
        if self.closed {
            // There is no device to reset.
        } else if let Err(error) = self.rings.device.reset() {
            tracing::error!(
                device = %self.rings.id,
                error = &error as &dyn std::error::Error,
                "reset failed"
            );
        } else if again && let Err(error) = self.rings.iotlb.remap_after_reset() {
            tracing::error!(
                device = %self.rings.id,
                error = &error as &dyn std::error::Error,
                "cannot map memory again after a reset"
            );
            self.rings.device.give_up();
        }
        if let Some(relays) = relays.flatten() {
            self.rings.end_relays(relays);
        }
        write_log::mark(self.rings.memory.ram(), &untracked_writes);
    }

    /// Records that the device works again only after a reset. Control commands are answered ERR
    /// until then.
    pub(super) fn fail(&mut self) {
        self.needs_reset = true;
        if let Some(control) = &mut self.control {
            control.give_up_on_device();
        }
    }

    /// See [`Hardware::close`](crate::virtio::backend::Hardware::close). The control queue is still
    /// served, because a driver waits for its answers without a limit.
    pub(super) fn close_device(&mut self) -> ClosedDevice {
        self.halt(false);
        self.rings.queues.clear();
        self.fail();
        self.closed = true;
        if let Some(translation) = &mut self.translation {
            translation.closed = true;
        }
        let Rings {
            device,
            iotlb,
            doorbells,
            ..
        } = &mut self.rings;
        doorbells.unmap();
        device.close(iotlb)
    }
}

/// Returns the largest size of each queue of the guest. The VMM serves the guest's control queue,
/// whether or not the device has one. So its size does not depend on the device.
fn max_sizes(device: &Device, offer: Offer) -> Vec<u16> {
    let queues = device.info().queues.iter();
    let mut sizes: Vec<u16> = queues.map(|queue| queue.max_size).collect();
    if offer.is_unfiltered() {
        sizes.push(CONTROL_QUEUE_SIZE);
    } else if device.device_id() == VIRTIO_ID_NET
        && offer.passes(VIRTIO_NET_F_CTRL_VQ)
        && let Some(last) = sizes.last_mut()
    {
        *last = CONTROL_QUEUE_SIZE.max(*last);
    }
    sizes
}

impl Drop for VdpaBackend {
    /// Stops the device before its memory is unmapped.
    fn drop(&mut self) {
        self.log.poller = None;
        if self.closed {
            return;
        }
        if let Err(error) = self.rings.device.reset() {
            tracing::warn!(
                device = %self.rings.id,
                %error,
                "reset failed; closing the device resets it"
            );
        }
    }
}
