//! Starts a network device, and changes its state afterwards.

use std::sync::Arc;

use super::HEADER_LEN;
use super::config::NetConfig;
use super::features::{Chains, Kick, Options};
use super::queue::{Parts, Virtqueue};
use super::receive::RxQueue;
use super::transmit::TxQueue;
use crate::Error;
use crate::control_queue::queue::ANSWER_TIMEOUT;
use crate::control_queue::{self, Answer, Command, ControlQueue, Placement};
use crate::device::Device;
use crate::doorbell::DoorbellAnswer;
use crate::iotlb::{Access, Iotlb, Mapping};
use crate::iova::IovaRange;
use crate::memory::{GuestMemory, SharedBuffer, not_pages};
use crate::ring::{RingFeatures, RingLayout};
use crate::window::PrivateWindow;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VQ;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

/// Bytes of the largest frame if the device does not report its MTU.
const FRAME: u32 = 1518;
/// Ethernet header and a VLAN tag, which the MTU does not include.
const ETHERNET: u32 = 18;

/// A receive and a transmit queue (virtio 1.3, 5.1.2).
#[derive(Debug)]
pub struct QueuePair {
    /// Frames from the device.
    pub receive: RxQueue,
    /// Frames to the device.
    pub transmit: TxQueue,
}

/// A network device that this process drives: the device, and the driver's state for it. Both parts
/// together keep the device running.
///
/// They are public so that other code may drive the device for a while. A relay that changes the
/// rings of a running device does so.
#[derive(Debug)]
pub struct Netdev {
    /// The device.
    pub device: Device,
    /// The driver.
    pub driver: Driver,
}

/// The driver's side of a [`Netdev`].
#[derive(Debug)]
pub struct Driver {
    /// The device's mappings.
    pub iotlb: Iotlb,
    /// Addresses for more of this process's memory.
    pub window: PrivateWindow,
    /// The control queue; `None` if CTRL_VQ is not negotiated.
    pub control: Option<ControlQueue>,
    /// The queue pairs in use, by index.
    pub pairs: Vec<QueuePair>,
    memory: Arc<SharedBuffer>,
    plan: Plan,
}

/// The decisions of the first start.
#[derive(Debug, Clone)]
struct Plan {
    options: Options,
    features: u64,
    config: NetConfig,
    control_index: Option<u16>,
    /// By queue index.
    parts: Vec<Parts>,
}

impl Netdev {
    /// Starts a device: maps memory, negotiates, fills the receive rings, starts, and sets the
    /// number of queue pairs. Nothing else may be mapped yet.
    ///
    /// # Errors
    /// No network device, an impossible number of queue pairs, or the device refuses: it is closed,
    /// and the kernel resets it.
    pub fn start(mut device: Device, mut iotlb: Iotlb, options: &Options) -> Result<Self, Error> {
        let device_id = device.device_id();
        if device_id != VIRTIO_ID_NET {
            return Err(Error::other(format!(
                "the device has virtio type {device_id}, but a network device has type 1"
            )));
        }
        let features = options.features(device.info().features);
        let config = NetConfig::read(&device, features)?;
        let (wanted, maximum) = (options.pairs, config.max_virtqueue_pairs);
        if wanted == 0 || wanted > maximum {
            return Err(Error::other(format!(
                "cannot use {wanted} queue pairs: the device can have up to {maximum} (`bellhop \
                 dev add … max_vqp N` sets that)"
            )));
        }
        let control_index = control_index(&device, features, maximum)?;

        let parts = layout(&device, options, RingFeatures::of(features), &config)?;
        let mut window = PrivateWindow::new(device.info().iova_range, 0).map_err(no_room)?;
        let memory = memory(&parts, device.info().iova_range, &mut window)?;
        map(&mut iotlb, &memory)?;
        let control = match control_index {
            Some(_) => {
                let size = ControlQueue::memory_size().map_err(control_failed)?;
                let iova = window.allocate(size).map_err(no_room)?;
                let queue = ControlQueue::new(iova, RingFeatures::of(features));
                Some(queue.map_err(control_failed)?)
            }
            None => None,
        };
        let plan = Plan {
            options: *options,
            features,
            config,
            control_index,
            parts,
        };
        let mut driver = Driver {
            iotlb,
            window,
            control,
            pairs: Vec::new(),
            memory,
            plan,
        };
        driver.bring_up(&mut device)?;
        Ok(Self { device, driver })
    }

    /// Resets the device and starts it again with the same settings and empty rings in the same
    /// memory. Frames in flight are lost. `remap` runs in between and restores mappings that the
    /// reset removed ([`Iotlb::remap_after_reset`]).
    ///
    /// # Errors
    /// As [`Netdev::start`].
    pub fn restart(
        &mut self,
        remap: impl FnOnce(&mut Iotlb) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.device.reset()?;
        remap(&mut self.driver.iotlb).map_err(not_mapped)?;
        self.driver.bring_up(&mut self.device)
    }

    /// Suspends the device; the queues' work waits in their rings.
    ///
    /// # Errors
    /// As [`Device::suspend`].
    pub fn suspend(&mut self) -> Result<(), Error> {
        self.device.suspend()
    }

    /// Resumes the suspended device. Each queue is kicked, because it may have work.
    ///
    /// # Errors
    /// As [`Device::resume`].
    pub fn resume(&mut self) -> Result<(), Error> {
        self.device.resume()?;
        self.driver.kick_all();
        Ok(())
    }
}

impl Driver {
    /// The configuration at the start of the device.
    #[must_use]
    pub fn config(&self) -> &NetConfig {
        &self.plan.config
    }

    /// The I/O virtual addresses of rings and buffers; [`Driver::guest_memory`] has the same ones.
    #[must_use]
    pub fn range(&self) -> IovaRange {
        self.memory.range()
    }

    /// The transmit queue of the first pair.
    pub(crate) fn transmit(&mut self) -> Result<&mut TxQueue, Error> {
        let pair = self.pairs.first_mut();
        pair.map(|pair| &mut pair.transmit)
            .ok_or_else(|| Error::other("there is no queue pair"))
    }

    /// Rings and buffers as a guest's memory.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn guest_memory(&self) -> Result<Arc<GuestMemory>, Error> {
        Ok(Arc::new(self.memory.as_guest_memory()?))
    }

    /// First half of a start after a reset, with memory mapped: negotiates the same features and
    /// sets up the control queue, empty. The caller sets up the data queues. [`Driver::set_pairs`]
    /// is the other half, once the device runs.
    ///
    /// # Errors
    /// As [`Netdev::start`].
    pub fn negotiate(&mut self, device: &mut Device) -> Result<(), Error> {
        let features = self.plan.features;
        device.negotiate(features)?;
        if let (Some(index), Some(control)) = (self.plan.control_index, &mut self.control) {
            let restarted = control.restart(RingFeatures::of(features));
            restarted.map_err(control_failed)?;
            set_control(device, index, control, &mut self.iotlb)?;
        }
        Ok(())
    }

    /// Sets the number of queue pairs in use on a running device, if there are several.
    ///
    /// # Errors
    /// The control queue failed, or the device did not accept the number.
    pub fn set_pairs(&mut self) -> Result<(), Error> {
        let pairs = self.plan.options.pairs;
        // Several pairs are negotiated only together with a control queue.
        let Some(control) = self.control.as_mut().filter(|_| pairs > 1) else {
            return Ok(());
        };
        let answer = control.execute(&Command::VqPairsSet(pairs), ANSWER_TIMEOUT);
        match answer.map_err(control_failed)? {
            Answer::Ok => Ok(()),
            answer => Err(Error::other(format!(
                "the device answered {answer:?} to VQ_PAIRS_SET with {pairs} pairs"
            ))),
        }
    }

    /// Kicks every queue: a change of rings or eventfds may have lost a kick.
    pub fn kick_all(&mut self) {
        for pair in &mut self.pairs {
            for queue in [pair.receive.queue_mut(), pair.transmit.queue_mut()] {
                if let Err(error) = queue.force_kick() {
                    tracing::warn!(queue = queue.index(), %error, "cannot kick a queue");
                }
            }
        }
    }

    /// Negotiates, creates new queues, and starts.
    fn bring_up(&mut self, device: &mut Device) -> Result<(), Error> {
        self.negotiate(device)?;
        // Their rings are zeroed when new ones replace them.
        self.pairs.clear();
        self.pairs = queues(device, &self.plan.options, &self.memory, &self.plan.parts)?;
        device.start()?;
        for pair in &mut self.pairs {
            pair.receive.queue_mut().force_kick()?;
        }
        self.set_pairs()
    }
}

/// For `map_err`: there is no room for rings and buffers.
fn no_room(source: Error) -> Error {
    Error::other("the device's address space has no room for rings and buffers").because(source)
}

/// For `map_err`: memory cannot be mapped for the device.
fn not_mapped(source: Error) -> Error {
    Error::other("cannot map rings and buffers for the device").because(source)
}

/// For `map_err`: a queue cannot be created.
fn no_queue(source: Error) -> Error {
    Error::other("cannot create a queue").because(source)
}

/// For `map_err`: the control queue failed.
fn control_failed(source: Error) -> Error {
    Error::other("the control queue does not work").because(source)
}

/// Index of the control queue, checked against the number of queues.
fn control_index(device: &Device, features: u64, pairs: u16) -> Result<Option<u16>, Error> {
    let queues = device.info().queue_count();
    let data = pairs.checked_mul(2).filter(|&data| data <= queues);
    let wrong = || {
        Error::other(format!(
            "the device reports {pairs} queue pairs, but it has only {queues} queues"
        ))
    };
    if data.is_none() {
        return Err(wrong());
    }
    if features & (1 << VIRTIO_NET_F_CTRL_VQ) == 0 {
        return Ok(None);
    }
    match control_queue::queue_index(features, pairs) {
        Some(index) if index < queues => Ok(Some(index)),
        _ => Err(wrong()),
    }
}

/// Places each queue's parts, by queue index.
fn layout(
    device: &Device,
    options: &Options,
    ring: RingFeatures,
    config: &NetConfig,
) -> Result<Vec<Parts>, Error> {
    let frame = config.mtu.map_or(FRAME, |mtu| u32::from(mtu) + ETHERNET);
    // At most 128 KiB, so no overflow.
    let slot_size = (frame.max(FRAME) + HEADER_LEN).next_power_of_two();
    let mut parts = Vec::new();
    let mut end = 0;
    for queue in 0..2 * options.pairs {
        let maximum = device.info().queue(queue)?.max_size;
        let size = options.ring_size.min(maximum).max(1);
        // The kernel accepts only powers of two, for packed rings as well.
        let size = 1 << size.ilog2();
        let layout = RingLayout::new(ring.format(), size).map_err(no_queue)?;
        let one = Parts::new(layout, slot_size, end);
        let one = one.ok_or_else(|| no_queue(not_pages(end, 0)))?;
        end = one.end;
        parts.push(one);
    }
    Ok(parts)
}

/// Allocates one buffer for all parts: at this process's addresses if the device can access them.
fn memory(
    parts: &[Parts],
    reachable: IovaRange,
    window: &mut PrivateWindow,
) -> Result<Arc<SharedBuffer>, Error> {
    let size = parts.last().map_or(0, |last| last.end);
    let elsewhere = window.allocate(size).map_err(no_room)?;
    let private = window.range();
    let fits = |own: &IovaRange| reachable.contains(own) && !private.overlaps(own);
    let memory = SharedBuffer::placed(size, |own| if fits(&own) { own.first() } else { elsewhere })
        .map_err(no_queue)?;
    if memory.range().first() != elsewhere {
        window.release(elsewhere);
    }
    Ok(Arc::new(memory))
}

fn map(iotlb: &mut Iotlb, memory: &Arc<SharedBuffer>) -> Result<(), Error> {
    let range = memory.range();
    let mapping = Mapping {
        region: Arc::clone(memory) as _,
        offset: 0,
        access: Access::ReadWrite,
    };
    let mapped = iotlb.batch(0).and_then(|mut batch| {
        batch.map(range.first(), range.size().unwrap_or(0), mapping)?;
        batch.commit()
    });
    mapped.map_err(not_mapped)
}

fn set_control(
    device: &mut Device,
    index: u16,
    control: &ControlQueue,
    iotlb: &mut Iotlb,
) -> Result<(), Error> {
    // Only now: the queue's group may depend on the features.
    let placement = Placement::choose(device.info(), device.backend_features(), index);
    let mapped = iotlb
        .address_space(placement.asid())
        .is_some_and(|space| space.get(control.range().first()).is_some());
    if !mapped {
        control.map(iotlb, placement.asid()).map_err(not_mapped)?;
    }
    if let Placement::OwnAddressSpace { group, asid } = placement {
        device.set_group_asid(group, asid)?;
    }
    device.set_vring(index, &control.vring_config(), &[control.range()])?;
    device.enable_vring(index)?;
    Ok(())
}

fn queues(
    device: &mut Device,
    options: &Options,
    memory: &Arc<SharedBuffer>,
    parts: &[Parts],
) -> Result<Vec<QueuePair>, Error> {
    let features = device.features();
    let ring = RingFeatures::of(features);
    let indirect = features & (1 << VIRTIO_RING_F_INDIRECT_DESC) != 0;
    let chains = match options.chains {
        Chains::Indirect if !indirect => Chains::Pair,
        chains => chains,
    };
    let mut made = Vec::new();
    for (index, &parts) in (0..=u16::MAX).zip(parts) {
        let queue = Virtqueue::new(index, Arc::clone(memory), parts, ring, chains);
        let mut queue = queue.map_err(no_queue)?;
        device.set_vring(index, &queue.vring_config(), &[memory.range()])?;
        if options.kick == Kick::Doorbell
            && let DoorbellAnswer::Mapped(doorbell) = device.map_doorbell(index)?
        {
            queue.set_doorbell(doorbell);
        }
        device.enable_vring(index)?;
        made.push(queue);
    }
    let mut pairs = Vec::new();
    let mut made = made.into_iter();
    while let (Some(receive), Some(transmit)) = (made.next(), made.next()) {
        pairs.push(QueuePair {
            receive: RxQueue::new(receive).map_err(no_queue)?,
            transmit: TxQueue::new(transmit),
        });
    }
    Ok(pairs)
}
