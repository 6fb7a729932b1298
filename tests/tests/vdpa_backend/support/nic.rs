//! A network driver on the `vdpa` library alone: rings and buffers in memory of this process, no
//! guest.
//!
//! ```text
//!   memory of one Nic, from its IOVA:
//!   | receive ring | transmit ring | 2nd receive ring | 2nd transmit ring | buffers |
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lab::sim::SimDevice;
use vdpa::control_queue::{ControlQueue, Placement};
use vdpa::device::{Device, VringBase, VringConfig};
use vdpa::features::{Policy, pass_through};
use vdpa::iotlb::{Access, Iotlb, Mapping};
use vdpa::memory::SharedBuffer;
use vdpa::ring::{Direction, DriverQueue, Piece, RingFeatures, SplitLayout};
use vdpa::uapi::BackendFeatures;
use vdpa::window::PrivateWindow;
use vmm_sys_util::eventfd::EventFd;

use super::frames::Loopback;
use super::guest::wait;

/// How long a frame may take on an emulated processor under load.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) const RECEIVE: u16 = 0;
pub(crate) const TRANSMIT: u16 = 1;
pub(crate) const CONTROL: u16 = 2;

const SIZE: u16 = 32;
const BUFFER: u64 = 4096;
/// Receive buffers posted to the device; as many more are for sending.
const BUFFERS: u16 = 16;
const IOVA: u64 = 0x1000_0000;

fn layout() -> SplitLayout {
    SplitLayout::new(SIZE).unwrap()
}

/// One ring and its eventfds.
pub(crate) struct Queue {
    pub(crate) ring: DriverQueue,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    /// Buffer of each chain that the device has, by the chain's head.
    buffers: BTreeMap<u16, u64>,
}

impl Queue {
    fn new(memory: &Arc<SharedBuffer>, number: u64) -> Self {
        Self {
            ring: ring(memory, number),
            kick: vdpa::eventfd::new().unwrap(),
            call: vdpa::eventfd::new().unwrap(),
            buffers: BTreeMap::new(),
        }
    }

    pub(crate) fn config(&self) -> VringConfig<'_> {
        VringConfig {
            size: SIZE,
            addresses: self.ring.addresses(),
            base: VringBase::initial(false),
            kick: Some(&self.kick),
            call: Some(&self.call),
        }
    }

    fn add(&mut self, memory: &SharedBuffer, buffer: u64, len: u32, direction: Direction) {
        let iova = memory.iova(buffer, u64::from(len)).unwrap();
        let piece = Piece {
            iova,
            len,
            direction,
        };
        let head = self.ring.add(&[piece]).unwrap();
        self.buffers.insert(head, buffer);
        if self.ring.needs_kick().unwrap() {
            self.kick.write(1).unwrap();
        }
    }

    /// Buffer and length of the next completed chain.
    fn take(&mut self) -> Option<(u64, u32)> {
        let used = self.ring.pop_used().unwrap()?;
        Some((self.buffers.remove(&used.head).unwrap(), used.written))
    }
}

fn ring(memory: &Arc<SharedBuffer>, number: u64) -> DriverQueue {
    let offset = number * layout().size();
    // The simulator has none of the features that a ring can have.
    let features = RingFeatures::default();
    DriverQueue::new(Arc::clone(memory), SIZE, offset, features).unwrap()
}

/// The driver's memory and queues; they outlive the device's states.
pub(crate) struct Nic {
    pub(crate) memory: Arc<SharedBuffer>,
    pub(crate) receive: Queue,
    pub(crate) transmit: Queue,
    /// Buffers for sending that the device does not have.
    idle: Vec<u64>,
}

impl Nic {
    pub(crate) fn new() -> Self {
        let rings = 4 * layout().size();
        let size = rings + 2 * u64::from(BUFFERS) * BUFFER;
        let memory = Arc::new(SharedBuffer::new(size, IOVA).unwrap());
        let mut nic = Self {
            receive: Queue::new(&memory, 0),
            transmit: Queue::new(&memory, 1),
            memory,
            idle: Vec::new(),
        };
        nic.fill();
        nic
    }

    /// Posts all receive buffers to the device.
    fn fill(&mut self) {
        let buffer = |index: u16| 4 * layout().size() + u64::from(index) * BUFFER;
        for index in 0..BUFFERS {
            let len = u32::try_from(BUFFER).unwrap();
            self.receive
                .add(&self.memory, buffer(index), len, Direction::DeviceWrites);
        }
        self.idle = (BUFFERS..2 * BUFFERS).map(buffer).collect();
    }

    /// Restarts as after a reset of the device: empty rings, all buffers posted again.
    pub(crate) fn restart(&mut self) {
        self.receive = Queue::new(&self.memory, 0);
        self.transmit = Queue::new(&self.memory, 1);
        self.fill();
    }

    pub(crate) fn map(&self, iotlb: &mut Iotlb) {
        let mapping = Mapping {
            region: Arc::clone(&self.memory) as _,
            offset: 0,
            access: Access::ReadWrite,
        };
        let range = self.memory.range();
        iotlb
            .map(0, range.first(), range.size().unwrap(), mapping)
            .unwrap();
    }

    pub(crate) fn set_up(&self, device: &mut Device) {
        let allowed = [self.memory.range()];
        for (index, queue) in [(RECEIVE, &self.receive), (TRANSMIT, &self.transmit)] {
            device.set_vring(index, &queue.config(), &allowed).unwrap();
        }
    }

    /// Moves both queues of a suspended device to the second pair of rings, including the buffers
    /// that the device has.
    pub(crate) fn switch(&mut self, device: &mut Device) {
        let allowed = [self.memory.range()];
        self.receive.ring = ring(&self.memory, 2);
        self.transmit.ring = ring(&self.memory, 3);
        let len = u32::try_from(BUFFER).unwrap();
        for buffer in std::mem::take(&mut self.receive.buffers).into_values() {
            self.receive
                .add(&self.memory, buffer, len, Direction::DeviceWrites);
        }
        for (index, queue) in [(RECEIVE, &self.receive), (TRANSMIT, &self.transmit)] {
            device
                .switch_vring(index, &queue.config(), &allowed)
                .unwrap();
        }
    }

    /// Takes back the sent buffers.
    pub(crate) fn reap(&mut self) {
        while let Some((buffer, written)) = self.transmit.take() {
            assert_eq!(written, 0, "the device wrote into a frame that it sends");
            self.idle.push(buffer);
        }
    }
}

impl Loopback for Nic {
    fn send(&mut self, packet: &[u8]) {
        self.reap();
        while self.idle.is_empty() {
            assert!(wait(&self.transmit.call, PATIENCE), "nothing is sent");
            self.reap();
        }
        let buffer = self.idle.pop().unwrap();
        self.memory.write(buffer, packet).unwrap();
        let len = u32::try_from(packet.len()).unwrap();
        self.transmit
            .add(&self.memory, buffer, len, Direction::DeviceReads);
    }

    fn receive(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some((buffer, written)) = self.receive.take() {
                let mut packet = vec![0; usize::try_from(written).unwrap()];
                self.memory.read(buffer, &mut packet).unwrap();
                let len = u32::try_from(BUFFER).unwrap();
                self.receive
                    .add(&self.memory, buffer, len, Direction::DeviceWrites);
                return Some(packet);
            }
            if !wait(&self.receive.call, PATIENCE) {
                return None;
            }
        }
    }
}

/// The backend features of an old parent: no address spaces, no batches, maps
/// lost at a reset.
pub(crate) fn reduced() -> BackendFeatures {
    BackendFeatures::all()
        - BackendFeatures::IOTLB_ASID
        - BackendFeatures::IOTLB_BATCH
        - BackendFeatures::IOTLB_PERSIST
}

/// Opens a device and becomes its owner.
pub(crate) fn own(path: &Path, wanted: BackendFeatures) -> (Device, Iotlb) {
    Device::open(path).unwrap().own_with(wanted).unwrap()
}

/// The features that a guest would be offered.
pub(crate) fn features(device: &Device) -> u64 {
    let info = device.info();
    pass_through(info.features, info.device_id, Policy::default()).features
}

/// A running device with its driver.
pub(crate) struct Rig {
    pub(crate) device: Device,
    pub(crate) iotlb: Iotlb,
    pub(crate) nic: Nic,
    pub(crate) control: ControlQueue,
    pub(crate) placement: Placement,
}

impl Rig {
    pub(crate) fn start(net: &SimDevice, wanted: BackendFeatures) -> Self {
        let (mut device, mut iotlb) = own(net.path(), wanted);
        let nic = Nic::new();
        nic.map(&mut iotlb);
        let mut window = PrivateWindow::new(device.info().iova_range, 1 << 40).unwrap();
        let iova = window
            .allocate(ControlQueue::memory_size().unwrap())
            .unwrap();
        let control = ControlQueue::new(iova, RingFeatures::default()).unwrap();
        let placement = Placement::choose(device.info(), device.backend_features(), CONTROL);
        control.map(&mut iotlb, placement.asid()).unwrap();
        start(&mut device, &nic, &control, placement);
        Self {
            device,
            iotlb,
            nic,
            control,
            placement,
        }
    }

    /// Resets the device and restarts it with empty rings.
    pub(crate) fn reset(&mut self) {
        self.device.reset().unwrap();
        assert_eq!(self.device.status().unwrap(), 0);
        self.iotlb.remap_after_reset().unwrap();
        self.nic.restart();
        self.control.restart(RingFeatures::default()).unwrap();
        start(&mut self.device, &self.nic, &self.control, self.placement);
    }
}

fn start(device: &mut Device, nic: &Nic, control: &ControlQueue, placement: Placement) {
    let features = features(device);
    device.negotiate(features).unwrap();
    if let Placement::OwnAddressSpace { group, asid } = placement {
        device.set_group_asid(group, asid).unwrap();
    }
    nic.set_up(device);
    let allowed = [control.range()];
    device
        .set_vring(CONTROL, &control.vring_config(), &allowed)
        .unwrap();
    for queue in [RECEIVE, TRANSMIT, CONTROL] {
        device.enable_vring(queue).unwrap();
    }
    device.start().unwrap();
}
