//! A network driver in this process: rings, buffers, frames, no VM.
//!
//! ```text
//!   IOVA 1 MiB   ring of queue 0, queue 1, …       2 pages each
//!        2 MiB   buffers of queue 0, queue 1, …    2 KiB per ring entry
//!       16 MiB   the control queue
//! ```
//! Receive queues are kept full unless a test requests otherwise.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lab::sim::SimDevice;
use vdpa::control_queue::{self, Answer, Command, ControlQueue, Placement};
use vdpa::device::{Device, VringAddresses, VringBase, VringConfig};
use vdpa::iotlb::{Access, Iotlb, Mapping};
use vdpa::iova::IovaRange;
use vdpa::memory::SharedBuffer;
use vdpa::ring::{Direction, DriverQueue, Piece, RingFeatures, SplitLayout, Used};
use vmm_sys_util::eventfd::EventFd;

pub(crate) const RING_SIZE: u16 = 64;
const RINGS: u64 = 1 << 20;
const BUFFERS: u64 = 2 << 20;
const CONTROL: u64 = 16 << 20;
const BUFFER: u64 = 2048;
/// `struct virtio_net_hdr_v1`.
pub(crate) const HEADER: usize = 12;
/// Long enough for a busy emulated processor.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) const MRG_RXBUF: u64 = 1 << 15;
const CTRL_VQ: u64 = 1 << 17;
pub(crate) const EVENT_IDX: u64 = 1 << 29;
pub(crate) const IN_ORDER: u64 = 1 << 35;
pub(crate) const NOTIFICATION_DATA: u64 = 1 << 38;
/// Features that are negotiated only on request: most tests look at used elements, which IN_ORDER
/// may reduce, and no [`DriverQueue`] sends data with a kick.
const UNUSUAL: u64 = IN_ORDER | NOTIFICATION_DATA;

/// Deviations that a test requests.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Features not to negotiate.
    pub(crate) without: u64,
    /// Receive buffers to post at first.
    pub(crate) buffers: u16,
    /// Address space of the data queues' rings, if it is a separate one.
    pub(crate) rings_asid: u32,
    /// Do not enable this queue.
    pub(crate) disabled: Option<u16>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            without: UNUSUAL,
            buffers: RING_SIZE,
            rings_asid: 0,
            disabled: None,
        }
    }
}

impl Setup {
    pub(crate) fn without(features: u64) -> Self {
        Self {
            without: features | UNUSUAL,
            ..Self::default()
        }
    }
}

#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) ring: DriverQueue,
    pub(crate) ring_memory: Arc<SharedBuffer>,
    buffers: Arc<SharedBuffer>,
    kick: EventFd,
    pub(crate) call: EventFd,
    /// The buffer (its number) of each chain that the device has.
    chains: BTreeMap<u16, u64>,
    free: Vec<u64>,
}

fn eventfd() -> EventFd {
    vdpa::eventfd::new().unwrap()
}

impl Queue {
    fn new(index: u16, features: RingFeatures) -> Self {
        let layout = SplitLayout::new(RING_SIZE).unwrap();
        let ring_memory =
            SharedBuffer::new(layout.size(), RINGS + u64::from(index) * layout.size());
        let ring_memory = Arc::new(ring_memory.unwrap());
        let size = BUFFER * u64::from(RING_SIZE);
        let buffers = SharedBuffer::new(size, BUFFERS + u64::from(index) * size).unwrap();
        Self {
            ring: DriverQueue::new(Arc::clone(&ring_memory), RING_SIZE, 0, features).unwrap(),
            ring_memory,
            buffers: Arc::new(buffers),
            kick: eventfd(),
            call: eventfd(),
            chains: BTreeMap::new(),
            free: (0..u64::from(RING_SIZE)).rev().collect(),
        }
    }

    pub(crate) fn config(&self, base: VringBase) -> VringConfig<'_> {
        self.config_at(self.ring.addresses(), base)
    }

    pub(crate) fn config_at(&self, addresses: VringAddresses, base: VringBase) -> VringConfig<'_> {
        VringConfig {
            size: RING_SIZE,
            addresses,
            base,
            kick: Some(&self.kick),
            call: Some(&self.call),
        }
    }

    /// The used index, as the device last wrote it.
    pub(crate) fn used_index(&self) -> u16 {
        let offset = self.ring.addresses().device.0 - self.ring_memory.range().first();
        let ordering = std::sync::atomic::Ordering::Acquire;
        self.ring_memory.load_u16(offset + 2, ordering).unwrap()
    }

    /// Posts a receive buffer. Kick afterwards.
    pub(crate) fn post(&mut self) {
        let number = self.free.pop().unwrap();
        let piece = self.piece(
            number,
            u32::try_from(BUFFER).unwrap(),
            Direction::DeviceWrites,
        );
        let head = self.ring.add(&[piece]).unwrap();
        self.chains.insert(head, number);
    }

    fn piece(&self, number: u64, len: u32, direction: Direction) -> Piece {
        Piece {
            iova: self.buffers.iova(number * BUFFER, u64::from(len)).unwrap(),
            len,
            direction,
        }
    }

    /// Makes a frame available without a kick.
    pub(crate) fn offer(&mut self, frame: &[u8]) -> u16 {
        let number = self.free.pop().unwrap();
        let bytes = [&[0; HEADER], frame].concat();
        self.buffers.write(number * BUFFER, &bytes).unwrap();
        let len = u32::try_from(bytes.len()).unwrap();
        let piece = self.piece(number, len, Direction::DeviceReads);
        let head = self.ring.add(&[piece]).unwrap();
        self.chains.insert(head, number);
        head
    }

    /// Makes a frame of any length available, in a chain of several pieces. The pieces lie in all
    /// of the queue's buffers, so no other chain may be outstanding.
    pub(crate) fn offer_large(&mut self, frame: &[u8]) {
        let bytes = [&[0; HEADER], frame].concat();
        self.buffers.write(0, &bytes).unwrap();
        let chain: Vec<Piece> = (0..)
            .zip(bytes.chunks(1000))
            .map(|(number, part)| Piece {
                iova: self.buffers.iova(1000 * number, 1).unwrap(),
                len: u32::try_from(part.len()).unwrap(),
                direction: Direction::DeviceReads,
            })
            .collect();
        self.ring.add(&chain).unwrap();
    }

    /// Takes the next used buffer as it is and does not post it again.
    pub(crate) fn take_raw(&mut self) -> Option<Vec<u8>> {
        let (used, number) = self.pop()?;
        let mut bytes = vec![0; usize::try_from(used.written).unwrap()];
        self.buffers.read(number * BUFFER, &mut bytes).unwrap();
        Some(bytes)
    }

    /// An element of the used ring: id and length.
    pub(crate) fn used_element(&self, entry: u64) -> (u32, u32) {
        let offset = self.ring.addresses().device.0 - self.ring_memory.range().first();
        let mut element = [0; 8];
        let place = offset + 4 + 8 * entry;
        self.ring_memory.read(place, &mut element).unwrap();
        let [i0, i1, i2, i3, l0, l1, l2, l3] = element;
        let word = u32::from_le_bytes;
        (word([i0, i1, i2, i3]), word([l0, l1, l2, l3]))
    }

    /// Kicks by eventfd if the device wants a kick.
    pub(crate) fn kick(&mut self) {
        if self.ring.needs_kick().unwrap() {
            self.kick.write(1).unwrap();
        }
    }

    pub(crate) fn force_kick(&self) {
        self.kick.write(1).unwrap();
    }

    fn pop(&mut self) -> Option<(Used, u64)> {
        let used = self.ring.pop_used().unwrap()?;
        let number = self.chains.remove(&used.head).unwrap();
        self.free.push(number);
        Some((used, number))
    }

    /// Takes a transmitted chain back; returns its head.
    pub(crate) fn completed(&mut self) -> Option<u16> {
        self.pop().map(|(used, _)| used.head)
    }

    /// Takes a received frame, without its header, and does not post the buffer again.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let mut bytes = self.take_raw()?;
        assert!(bytes.len() >= HEADER, "{} bytes received", bytes.len());
        assert_eq!(bytes[10..12], [1, 0], "num_buffers");
        Some(bytes.split_off(HEADER))
    }

    pub(crate) fn receive(&mut self) -> Option<Vec<u8>> {
        let frame = self.take()?;
        self.post();
        self.kick();
        Some(frame)
    }
}

/// Polls until there is a result, or fails after too long.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begin.elapsed() < PATIENCE, "no {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[derive(Debug)]
pub(crate) struct Client {
    device: Device,
    pub(crate) iotlb: Iotlb,
    pub(crate) queues: Vec<Queue>,
    pub(crate) control: Option<ControlQueue>,
    pub(crate) file: File,
}

impl Client {
    pub(crate) fn start(device: &SimDevice) -> Self {
        Self::with(device, &Setup::default())
    }

    pub(crate) fn with(device: &SimDevice, setup: &Setup) -> Self {
        let (file, device, iotlb) = open(device.path());
        Self::run(file, device, iotlb, setup, None)
    }

    /// Negotiates, maps (unless `queues` from before a reset are still mapped) and starts.
    fn run(
        file: File,
        mut device: Device,
        mut iotlb: Iotlb,
        setup: &Setup,
        mapped: Option<Vec<Queue>>,
    ) -> Self {
        let features = device.info().features & !setup.without;
        let ring = RingFeatures::of(features);
        let max_pairs = max_pairs(&device);
        if setup.rings_asid != 0 {
            let group = device.info().queue(0).unwrap().descriptor_group.unwrap();
            device.set_group_asid(group, setup.rings_asid).unwrap();
        }
        device.negotiate(features).unwrap();
        let again = mapped.is_some();
        let mut queues: Vec<Queue> =
            mapped.unwrap_or_else(|| (0..2 * max_pairs).map(|i| Queue::new(i, ring)).collect());
        if !again {
            for queue in &queues {
                map(&mut iotlb, setup.rings_asid, &queue.ring_memory);
                map(&mut iotlb, 0, &queue.buffers);
            }
        }
        for (index, queue) in (0..).zip(&mut queues) {
            let range = queue.ring_memory.range();
            let config = queue.config(VringBase::initial(false));
            device.set_vring(index, &config, &[range]).unwrap();
            if setup.disabled != Some(index) {
                device.enable_vring(index).unwrap();
            }
            if index % 2 == 0 {
                (0..setup.buffers).for_each(|_| queue.post());
            }
        }
        let index = control_queue::queue_index(features, max_pairs);
        let has_control = !again && features & CTRL_VQ != 0;
        let control = index.filter(|_| has_control).map(|index| {
            let control = ControlQueue::new(CONTROL, ring).unwrap();
            let placement = Placement::choose(device.info(), device.backend_features(), index);
            if let Placement::OwnAddressSpace { group, asid } = placement {
                device.set_group_asid(group, asid).unwrap();
            }
            control.map(&mut iotlb, placement.asid()).unwrap();
            let range = control.range();
            device
                .set_vring(index, &control.vring_config(), &[range])
                .unwrap();
            device.enable_vring(index).unwrap();
            control
        });
        device.start().unwrap();
        for queue in queues.iter_mut().step_by(2) {
            queue.kick();
        }
        Self {
            device,
            iotlb,
            queues,
            control,
            file,
        }
    }

    /// Resets the device and restarts it, with new rings in the mapped memory and without a control
    /// queue; maps nothing.
    pub(crate) fn restart_without_mapping(mut self) -> Self {
        self.device.reset().unwrap();
        let features = RingFeatures {
            event_idx: true,
            ..RingFeatures::default()
        };
        for queue in &mut self.queues {
            let memory = Arc::clone(&queue.ring_memory);
            queue.ring = DriverQueue::new(memory, RING_SIZE, 0, features).unwrap();
            queue.chains.clear();
            queue.free = (0..u64::from(RING_SIZE)).rev().collect();
        }
        let setup = Setup::default();
        let queues = Some(self.queues);
        Self::run(self.file, self.device, self.iotlb, &setup, queues)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Enables a queue by the plain ioctl, without a check of the acknowledged features.
    pub(crate) fn enable_anyway(&self, queue: u32) {
        // _IOW(0xAF, 0x75, struct vhost_vring_state)
        const SET_VRING_ENABLE: u64 = 0x4008_af75;
        let state = [queue, 1];
        // SAFETY: there is no safe interface to ioctls. This one reads a struct of two 32-bit
        // numbers, and `state` has its layout.
        let result =
            unsafe { vmm_sys_util::ioctl::ioctl_with_ref(&self.file, SET_VRING_ENABLE, &state) };
        assert_eq!(result, 0);
    }

    /// Suspends the device, lets the caller work on it, resumes it.
    pub(crate) fn suspended<T>(&mut self, work: impl FnOnce(&mut Device, &mut [Queue]) -> T) -> T {
        self.device.suspend().unwrap();
        let result = work(&mut self.device, &mut self.queues);
        self.device.resume().unwrap();
        result
    }

    pub(crate) fn suspend(mut self) -> (Device, Vec<Queue>) {
        self.device.suspend().unwrap();
        (self.device, self.queues)
    }

    pub(crate) fn send(&mut self, pair: usize, frame: &[u8]) {
        let queue = &mut self.queues[2 * pair + 1];
        while queue.completed().is_some() {}
        if queue.free.is_empty() {
            wait_for("room in the transmit queue", || queue.completed());
        }
        queue.offer(frame);
        queue.kick();
    }

    pub(crate) fn receive(&mut self, pair: usize) -> Vec<u8> {
        let queue = &mut self.queues[2 * pair];
        wait_for("frame", || queue.receive())
    }

    /// Checks that no frame arrives for a tenth of a second.
    pub(crate) fn receives_nothing(&mut self) {
        std::thread::sleep(Duration::from_millis(100));
        for queue in self.queues.iter_mut().step_by(2) {
            assert_eq!(queue.receive(), None);
        }
    }

    pub(crate) fn command(&mut self, command: &Command) -> Answer {
        let control = self.control.as_mut().unwrap();
        control.execute(command, PATIENCE).unwrap()
    }

    pub(crate) fn obey(&mut self, command: &Command) {
        assert_eq!(self.command(command), Answer::Ok, "{command:?}");
    }

    pub(crate) fn refuse(&mut self, command: &Command) {
        assert_eq!(self.command(command), Answer::Err, "{command:?}");
    }

    pub(crate) fn mac(&self) -> [u8; 6] {
        let mut mac = [0; 6];
        self.device().read_config(0, &mut mac).unwrap();
        mac
    }

    pub(crate) fn link_is_up(&self) -> bool {
        let mut status = [0; 2];
        self.device().read_config(6, &mut status).unwrap();
        u16::from_le_bytes(status) & 1 != 0
    }
}

/// Opens a device; the file is a second descriptor of the same description.
pub(crate) fn open(path: &Path) -> (File, Device, Iotlb) {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let second = file.try_clone().unwrap();
    let (device, iotlb) = Device::from_fd(file.into()).unwrap().own().unwrap();
    (second, device, iotlb)
}

fn max_pairs(device: &Device) -> u16 {
    let mut pairs = [0; 2];
    device.read_config(8, &mut pairs).unwrap();
    u16::from_le_bytes(pairs).max(1)
}

fn map(iotlb: &mut Iotlb, asid: u32, memory: &Arc<SharedBuffer>) {
    let range: IovaRange = memory.range();
    let mapping = Mapping {
        region: Arc::clone(memory) as _,
        offset: 0,
        access: Access::ReadWrite,
    };
    iotlb
        .map(asid, range.first(), range.size().unwrap(), mapping)
        .unwrap();
}

/// A frame whose content can be checked: numbered, with a pattern of `len` bytes after its number.
pub(crate) fn frame(to: [u8; 6], from: [u8; 6], number: u32, len: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(18 + len);
    frame.extend_from_slice(&to);
    frame.extend_from_slice(&from);
    frame.extend_from_slice(&0x88b5_u16.to_be_bytes());
    frame.extend_from_slice(&number.to_be_bytes());
    let mut state = number;
    frame.extend((0..len).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_le_bytes()[3]
    }));
    frame
}

/// Like [`frame`], with a VLAN tag.
pub(crate) fn tagged(to: [u8; 6], from: [u8; 6], vlan: u16, number: u32) -> Vec<u8> {
    let mut bytes = frame(to, from, number, 64);
    let tag = [0x8100_u16.to_be_bytes(), vlan.to_be_bytes()].concat();
    bytes.splice(12..12, tag);
    bytes
}
