//! A queue of the device between any driver, frames, mappings and messages.
//!
//! It is for the fuzz target `vduse`, and for the tests below, which need no fuzzer.
//!
//! The first byte selects the queue, the format and the features. The device's process is the real
//! one, from the messages to the turns of a pair. A socket has the messages, and a model of the
//! kernel answers the ioctls. An honest driver kicks only when the device asks for it. The tap gets
//! each of its frames once and whole, also from another process after a kill. The driver gets whole
//! frames. A hostile driver writes anything into its ring, and maps anything: the device stops at
//! worst, and continues after a reset.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use parking_lot::MutexGuard;
use rustix::event::epoll::{self, Event};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};
use zerocopy::FromBytes as _;

use super::super::fake::Fake;
use super::super::message::from_kernel;
use super::super::{Device, QueueInfo};
use super::control::Control;
use super::in_flight::InFlight;
use super::pair::{NOW, Pair};
use super::port::Port;
use super::rig::{GUEST, PAGES, RING_PAGES, Rig, SIZE, frame, in_flight_file};
use super::shared::Shared;
use super::tap::Tap;
use super::{FRAME_MAX, HEADER, OFFERED, OFFLOADS};
use crate::device::VringBase;
use crate::iova::PAGE_SIZE;
use crate::ring::{Direction, DriverQueue, GuestRing, Piece, RingFeatures};
use crate::uapi::vduse::{
    REQUEST_SIZE, VDUSE_ACCESS_RW, VDUSE_GET_VQ_STATE, VDUSE_SET_STATUS, VDUSE_UPDATE_IOTLB,
    vduse_iotlb_entry, vduse_vq_state_packed,
};

/// The status of a driver that has started the device.
const STARTED: u32 = 15;
/// More turns than the device needs for all buffers, also when it polls.
const TURNS_MAX: usize = 1_000_000;

/// One action of the driver, the process that maps its memory, the kernel or the tap.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Step {
    /// The driver adds a buffer of this many pieces, each of this length.
    Add {
        pieces: u8,
        len: u16,
    },
    /// A frame of this length arrives at the tap.
    Frame(u16),
    Turn,
    /// The driver writes into its ring.
    Scribble {
        at: u16,
        bytes: Vec<u8>,
    },
    /// The mappings change. Without one, all memory is mapped.
    Map(Vec<Mapping>),
    /// A message of the kernel: its type and its first word.
    Message {
        kind: u8,
        word: u32,
    },
    /// The device's process is killed between two turns, and another one follows.
    Restart,
}

/// A mapping, in pages.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Mapping {
    start: u8,
    pages: u8,
    offset: u8,
    access: u8,
}

impl Mapping {
    const ALL: Self = Self {
        start: 0,
        // As many as `PAGES`.
        pages: 64,
        offset: 0,
        access: VDUSE_ACCESS_RW,
    };

    fn entry(&self) -> vduse_iotlb_entry {
        let start = GUEST + u64::from(self.start) * PAGE_SIZE;
        let size = u64::from(self.pages) * PAGE_SIZE;
        vduse_iotlb_entry {
            offset: u64::from(self.offset) * PAGE_SIZE,
            start,
            last: (start + size).wrapping_sub(1),
            perm: self.access,
        }
    }
}

struct World {
    rig: Rig,
    tap: OwnedFd,
    in_flight: OwnedFd,
    device: Arc<Device>,
    /// The kernel's end of the messages.
    kernel: UnixDatagram,
    features: u64,
    transmits: bool,
    /// Whether the device looks for work without kicks before it waits for one.
    polls: bool,
    /// Whether the driver and its mappings have followed the rules so far.
    honest: bool,
    /// Whether a buffer had several pieces, by which a packed ring may not show its position.
    has_chains: bool,
    /// The buffers that the device has, by their names.
    buffers: HashMap<u16, Vec<Piece>>,
    next_page: u64,
    /// Frames of the driver that the tap has not got.
    sent: VecDeque<Vec<u8>>,
    /// A frame for the driver, of which so many buffers are to come.
    received: Vec<u8>,
    to_come: u16,
}

/// The device's process.
struct Process<'a> {
    device: &'a Device,
    control: Control<'a>,
    shared: &'a Shared,
}

/// Runs any steps; see the module.
pub fn serve_anything(input: &[u8]) {
    let Some((&variant, rest)) = input.split_first() else {
        return;
    };
    let mut world = World::new(variant);
    let mut steps = crate::steps::steps(rest);
    while world.process(&mut steps) {}
}

impl World {
    fn new(variant: u8) -> Self {
        let has = |bit: u8| variant >> bit & 1 == 1;
        let mut features = OFFERED & !OFFLOADS;
        for (bit, feature) in [
            (0, VIRTIO_F_RING_PACKED),
            (2, VIRTIO_NET_F_MRG_RXBUF),
            (3, VIRTIO_RING_F_EVENT_IDX),
            (4, VIRTIO_RING_F_INDIRECT_DESC),
        ] {
            if !has(bit) {
                features &= !(1 << feature);
            }
        }
        let rig = Rig::new(RingFeatures::of(features));
        let memory = rig.buffer.as_guest_memory().unwrap();
        let region = memory.iter().next().unwrap();
        let queue = QueueInfo {
            size: SIZE.into(),
            addresses: rig.driver.addresses(),
            base: VringBase::initial(RingFeatures::of(features).packed),
            ready: false,
        };
        let (messages, kernel) = UnixDatagram::pair().unwrap();
        messages.set_nonblocking(true).unwrap();
        kernel.set_nonblocking(true).unwrap();
        let mut device = Device::from(File::from(OwnedFd::from(messages)));
        device.set_fake(Fake {
            features,
            queues: [queue; 2],
            mappings: vec![Mapping::ALL.entry()],
            file: region.file_offset().unwrap().file().try_clone().unwrap(),
            kicks: [None, None],
            kicked: [false; 2],
        });
        Self {
            tap: rig.tap.as_fd().try_clone_to_owned().unwrap(),
            in_flight: in_flight_file(),
            rig,
            device: Arc::new(device),
            kernel,
            features,
            transmits: has(1),
            polls: has(5),
            honest: true,
            has_chains: false,
            buffers: HashMap::new(),
            next_page: 0,
            sent: VecDeque::new(),
            received: Vec::new(),
            to_come: 0,
        }
    }

    /// Runs a process of the device, until it is killed or no step is left. Returns whether it was
    /// killed.
    fn process(&mut self, steps: &mut impl Iterator<Item = Step>) -> bool {
        let device = Arc::clone(&self.device);
        let tap = self.tap.try_clone().unwrap();
        let port = Port::Tap(Tap::of(tap.into()));
        let in_flight = InFlight::new(self.in_flight.as_fd(), 0).unwrap();
        let pair = Pair::new(0, port, in_flight, if self.polls { 20 } else { 0 }).unwrap();
        let epoll = pair.epoll().unwrap();
        let pairs = [Shared::new(pair, epoll)];
        let mut process = Process {
            device: &device,
            control: Control::new(&device, &pairs, OFFERED),
            shared: &pairs[0],
        };
        let is_first = !self.fake().queues[self.index()].ready;
        if let Err(error) = process.control.resume() {
            assert!(!self.honest, "{error}");
            process.control.stop();
        }
        if is_first {
            self.start(&mut process);
        }
        for step in steps {
            if matches!(step, Step::Restart) {
                self.honest &= !(self.ring_features().packed && self.has_chains);
                return true;
            }
            self.step(step, &mut process);
        }
        self.turn(&process);
        self.collect();
        assert!(!self.honest || self.sent.is_empty(), "the device waits");
        false
    }

    fn ring_features(&self) -> RingFeatures {
        RingFeatures::of(self.features)
    }

    /// The queue's number.
    fn index(&self) -> usize {
        usize::from(self.transmits)
    }

    fn fake(&self) -> MutexGuard<'_, Fake> {
        self.device.fake().unwrap()
    }

    fn step(&mut self, step: Step, process: &mut Process<'_>) {
        match step {
            Step::Add { pieces, len } => self.add(pieces, len),
            Step::Frame(len) => {
                // A full socket drops it, as a tap does.
                let _ = self.rig.peer.send(&frame(len.into()));
            }
            Step::Turn => {
                self.turn(process);
                self.collect();
            }
            Step::Scribble { at, bytes } => {
                self.honest = false;
                let bytes = bytes.get(..bytes.len().min(16)).unwrap_or_default();
                let at = u64::from(at) % (RING_PAGES * PAGE_SIZE - 16);
                self.rig.buffer.write(at, bytes).unwrap();
            }
            Step::Map(mappings) if mappings.is_empty() => self.map(&[Mapping::ALL], process),
            Step::Map(mappings) => {
                self.honest = false;
                self.map(&mappings, process);
            }
            Step::Message { kind, word } => self.message(u32::from(kind % 5), word, process),
            Step::Restart => {}
        }
    }

    /// The driver adds a buffer, if there is room for it.
    fn add(&mut self, pieces: u8, len: u16) {
        let direction = if self.transmits {
            Direction::DeviceReads
        } else {
            Direction::DeviceWrites
        };
        // At least a header, as virtio 1.3, 5.1.6.3.1, demands; at most a page.
        let len = u32::from(len) % 4085 + 12;
        let count = pieces % 3 + 1;
        if self.rig.driver.free() < u16::from(count) {
            return;
        }
        let pieces = (0..count).map(|_| {
            // More pages than the ring has entries: no buffer in use gets another content.
            self.next_page = (self.next_page + 1) % (PAGES - RING_PAGES);
            self.rig.piece(self.next_page, len, direction)
        });
        let pieces: Vec<Piece> = pieces.collect();
        let content = frame(pieces.len() * len as usize);
        for (piece, bytes) in pieces.iter().zip(content.chunks(len as usize)) {
            let at = piece.iova.0 - GUEST;
            self.rig.buffer.write(at, bytes).unwrap();
        }
        // A driver that sees a broken ring adds no more.
        let Ok(name) = self.rig.driver.add(&pieces) else {
            assert!(!self.honest, "the driver sees a broken ring");
            return;
        };
        self.has_chains |= pieces.len() > 1;
        self.buffers.insert(name, pieces);
        if self.transmits && content.len() > HEADER {
            self.sent.push_back(content);
        }
        if self.rig.driver.needs_kick().unwrap_or(true) {
            self.fake().kick(self.index());
        }
    }

    /// The pair's thread runs until it would wait.
    fn turn(&mut self, process: &Process<'_>) {
        if !self.honest {
            self.fake().kick(self.index());
        }
        let epoll = &process.shared.epoll;
        let mut turns = 0;
        loop {
            let mut events: Vec<Event> = Vec::with_capacity(4);
            let spare = rustix::buffer::spare_capacity(&mut events);
            epoll::wait(epoll, spare, Some(&NOW)).unwrap();
            let mut pair = process.shared.turn();
            for event in &events {
                pair.event(event.data.u64());
            }
            let wait = pair.turn(process.device, epoll).unwrap();
            assert!(!self.honest || !pair.is_broken(), "an honest driver's ring");
            drop(pair);
            self.frames();
            if events.is_empty() && wait.is_none_or(|wait| wait.tv_nsec > 0) {
                break;
            }
            turns += 1;
            assert!(turns < TURNS_MAX, "the device turns without end");
        }
    }

    /// The tap gets the driver's frames.
    fn frames(&mut self) {
        while self.transmits
            && let Some(sent) = self.rig.sent()
        {
            assert!(sent.len() > HEADER && sent.len() <= FRAME_MAX);
            if self.honest {
                assert!(self.sent.pop_front().is_some_and(|frame| frame == sent));
            }
        }
    }

    /// The driver takes its buffers back.
    fn collect(&mut self) {
        loop {
            let used = match self.rig.driver.pop_used() {
                Ok(Some(used)) => used,
                Ok(None) => return,
                Err(error) => {
                    assert!(!self.honest, "{error}");
                    return;
                }
            };
            let pieces = self.buffers.remove(&used.head);
            if !self.honest {
                continue;
            }
            let pieces = pieces.expect("a buffer of the driver");
            if self.transmits {
                assert_eq!(used.written, 0);
                continue;
            }
            let mut rest = used.written as usize;
            let mut bytes = Vec::new();
            for piece in pieces {
                let len = rest.min(piece.len as usize);
                let page = (piece.iova.0 - GUEST) / PAGE_SIZE - RING_PAGES;
                bytes.extend(self.rig.bytes(page, len));
                rest -= len;
            }
            assert_eq!(rest, 0, "more is written than there is room for");
            self.received(&bytes);
        }
    }

    /// The driver got a part of a frame.
    fn received(&mut self, part: &[u8]) {
        self.received.extend(part);
        if self.to_come == 0 {
            // A device without MRG_RXBUF sets it to one, too (virtio 1.3, 5.1.6.4.1).
            let Some(number) = self.received.get(10..HEADER) else {
                panic!("a frame without a whole header in its first buffer");
            };
            self.to_come = u16::from_le_bytes([number[0], number[1]]);
            assert!(self.to_come == 1 || self.features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0);
        }
        self.to_come -= 1;
        if self.to_come == 0 {
            let mut received = std::mem::take(&mut self.received);
            received[10..HEADER].fill(0);
            assert!(received == frame(received.len()), "a damaged frame");
        }
    }

    /// The driver starts the device.
    fn start(&mut self, process: &mut Process<'_>) {
        let index = self.index();
        self.fake().queues[index].ready = true;
        self.message(VDUSE_SET_STATUS, STARTED, process);
    }

    /// The driver forgets its buffers, and begins with an empty ring.
    fn reset(&mut self) {
        self.fake().reset();
        let zeroes = vec![0; usize::try_from(RING_PAGES * PAGE_SIZE).unwrap()];
        self.rig.buffer.write(0, &zeroes).unwrap();
        let buffer = Arc::clone(&self.rig.buffer);
        self.rig.driver = DriverQueue::new(buffer, SIZE, 0, self.ring_features()).unwrap();
        self.has_chains = false;
        self.buffers.clear();
        self.sent.clear();
        self.received.clear();
        self.to_come = 0;
    }

    /// The mappings change.
    fn map(&mut self, mappings: &[Mapping], process: &mut Process<'_>) {
        self.fake().mappings = mappings.iter().map(Mapping::entry).collect();
        self.message(VDUSE_UPDATE_IOTLB, 0, process);
    }

    /// A message of the kernel, and the answer to it.
    fn message(&mut self, kind: u32, word: u32, process: &mut Process<'_>) {
        let is_reset = kind == VDUSE_SET_STATUS && word.to_ne_bytes()[0] == 0;
        if is_reset {
            self.reset();
        }
        let mut bytes = [0x5a; REQUEST_SIZE];
        bytes[..4].copy_from_slice(&kind.to_ne_bytes());
        bytes[24..28].copy_from_slice(&word.to_ne_bytes());
        self.kernel.send(&bytes).unwrap();
        process.control.messages().unwrap();
        let mut answer = [0; REQUEST_SIZE];
        assert_eq!(self.kernel.recv(&mut answer).unwrap(), REQUEST_SIZE);
        assert_eq!(answer[..4], bytes[4..8]);
        let done = answer[4..8] == [0; 4];
        match kind {
            VDUSE_GET_VQ_STATE => {
                assert_eq!(done, word < 2);
                assert_eq!(answer[24..28], bytes[24..28]);
                if self.honest && usize::try_from(word) == Ok(self.index()) {
                    self.is_position(&answer[28..36]);
                }
            }
            VDUSE_SET_STATUS | VDUSE_UPDATE_IOTLB => assert!(done || !self.honest),
            _ => assert!(!done),
        }
        if is_reset {
            assert!(done);
            self.start(process);
        }
    }

    /// The kernel gets the position that an honest driver's ring shows.
    fn is_position(&self, state: &[u8]) {
        let features = self.ring_features();
        if features.packed && self.has_chains {
            return;
        }
        let addresses = self.rig.driver.addresses();
        let ring = GuestRing::new(self.rig.memory.clone(), SIZE, addresses, features).unwrap();
        let state = vduse_vq_state_packed::read_from_bytes(state).unwrap();
        let position = from_kernel(state, features.packed);
        assert_eq!(position, ring.used_position().unwrap());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::steps::{encoded, generated};

    fn step() -> impl Strategy<Value = Step> + Clone {
        // Small numbers are indices and lengths.
        let byte = prop_oneof![0u8..9, Just(0x80), any::<u8>()];
        let scribble = (0..0x400_u16, prop::collection::vec(byte, 1..16));
        let mapping = (0..8_u8, 0..65_u8, 0..4_u8, 0..5_u8);
        let mapping = mapping.prop_map(|(start, pages, offset, access)| Mapping {
            start,
            pages,
            offset,
            access,
        });
        prop_oneof![
            6 => (any::<u8>(), any::<u16>()).prop_map(|(pieces, len)| Step::Add { pieces, len }),
            4 => (0..9000_u16).prop_map(Step::Frame),
            6 => Just(Step::Turn),
            1 => scribble.prop_map(|(at, bytes)| Step::Scribble { at, bytes }),
            1 => prop::collection::vec(mapping, 0..4).prop_map(Step::Map),
            1 => (0..5_u8, 0..3_u32).prop_map(|(kind, word)| Step::Message { kind, word }),
            1 => Just(Step::Restart),
        ]
    }

    /// Frames of each size through all of the ring; its position is asked, and its memory changes.
    fn valid() -> Vec<Step> {
        let mut steps = Vec::new();
        for round in 0..12_u16 {
            steps.extend([
                Step::Frame(60 + 400 * round),
                Step::Add {
                    pieces: 1,
                    len: 100 * round,
                },
                Step::Turn,
                Step::Add {
                    pieces: 2,
                    len: 2000,
                },
                Step::Turn,
            ]);
            match round % 4 {
                1 => steps.push(Step::Message { kind: 0, word: 1 }),
                2 => steps.push(Step::Message { kind: 2, word: 0 }),
                3 => steps.push(Step::Map(Vec::new())),
                _ => {}
            }
        }
        steps
    }

    /// Frames pass before and after another process follows, and after a reset.
    fn restarted() -> Vec<Step> {
        let mut steps = Vec::new();
        for round in 0..12_u16 {
            let add = |len| Step::Add { pieces: 0, len };
            steps.extend([Step::Frame(60 + round), add(1000), add(100), Step::Turn]);
            match round % 4 {
                1 => steps.extend([add(2000), Step::Restart, Step::Message { kind: 0, word: 1 }]),
                2 => steps.extend([Step::Restart, Step::Map(Vec::new()), Step::Turn]),
                3 if round > 6 => steps.push(Step::Message { kind: 1, word: 0 }),
                _ => {}
            }
        }
        steps
    }

    /// A frame finds no room in all of the ring, and the next ones get its buffers.
    fn scarce() -> Vec<Step> {
        let mut steps = Vec::new();
        for _ in 0..3 {
            let smallest = Step::Add { pieces: 0, len: 0 };
            steps.resize(steps.len() + usize::from(SIZE), smallest);
            for len in [2000, 30, 40, 20] {
                steps.extend([Step::Frame(len), Step::Turn]);
            }
        }
        steps
    }

    /// A driver writes into its ring, its memory is mapped in part and read-only, and it resets.
    fn hostile() -> Vec<Step> {
        let mut steps = valid();
        for access in [1, 3, 2] {
            let part = Mapping {
                access,
                ..Mapping::ALL
            };
            steps.push(Step::Map(vec![part]));
            steps.extend(valid().into_iter().take(12));
            let bytes = vec![access, 0, 8, 0];
            steps.push(Step::Scribble { at: 130, bytes });
            steps.extend([Step::Turn, Step::Message { kind: 1, word: 0 }]);
        }
        steps
    }

    #[test]
    fn the_corpus_of_the_software_nic_loses_nothing() {
        let seeds = || {
            let first = (0..16).map(|variant| encoded(variant, &valid()));
            let mut seeds: Vec<_> = first.collect();
            seeds.extend((0..8).map(|variant| encoded(variant, &hostile())));
            seeds.extend((0..8).map(|variant| encoded(variant, &scarce())));
            seeds.extend(generated(32, step()));
            for steps in [valid(), hostile(), scarce()] {
                seeds.extend([32, 33, 36, 37].map(|variant| encoded(variant, &steps)));
            }
            seeds.extend((0..16).map(|variant| encoded(variant, &restarted())));
            seeds
        };
        crate::corpus::replay("vduse", seeds, serve_anything);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn any_steps_lose_nothing(
            variant in any::<u8>(),
            steps in prop::collection::vec(step(), 1..80),
        ) {
            serve_anything(&encoded(variant, &steps));
        }
    }
}
