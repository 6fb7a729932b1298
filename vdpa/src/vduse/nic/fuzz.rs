//! A queue of the device between any driver, frames, mappings and messages.
//!
//! It is for the fuzz target `vduse`, and for the tests below, which need no fuzzer.
//!
//! The first byte selects the queue, the format and the features. An honest driver gets each frame
//! once and whole, and so does the tap. A hostile driver writes anything into its ring, and maps
//! anything: the device stops at worst, and continues after a reset.

use std::collections::{HashMap, VecDeque};
use std::fs::File;

use serde::{Deserialize, Serialize};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};
use zerocopy::FromBytes as _;

use super::super::Mappings;
use super::super::message::{Message, Request, from_kernel};
use super::receive::{Fault, Receive};
use super::rig::{GUEST, PAGES, RING_PAGES, Rig, SIZE, frame};
use super::transmit::Transmit;
use super::{FRAME_MAX, HEADER};
use crate::device::VringBase;
use crate::iova::PAGE_SIZE;
use crate::memory::DeviceMemory;
use crate::ring::{DeviceQueue, Direction, GuestRing, Piece, RingFeatures};
use crate::uapi::vduse::{REQUEST_SIZE, VDUSE_ACCESS_RW, vduse_iotlb_entry, vduse_vq_state_packed};

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
    features: RingFeatures,
    transmits: bool,
    mergeable: bool,
    /// Whether the device looks for work without kicks before it waits for one.
    polls: bool,
    mappings: Mappings,
    memory: Option<DeviceMemory>,
    /// Where the ring is, or continues.
    ring: Option<DeviceQueue>,
    base: VringBase,
    is_broken: bool,
    receive: Receive,
    transmit: Transmit,
    /// Whether the driver and its mappings have followed the rules so far.
    honest: bool,
    /// The buffers that the device has, by their names.
    buffers: HashMap<u16, Vec<Piece>>,
    next_page: u64,
    /// Frames of the driver that the tap has not got.
    sent: VecDeque<Vec<u8>>,
    /// A frame for the driver, of which so many buffers are to come.
    received: Vec<u8>,
    to_come: u16,
}

/// Runs any steps; see the module.
pub fn serve_anything(input: &[u8]) {
    let Some((&variant, rest)) = input.split_first() else {
        return;
    };
    let mut world = World::new(variant);
    for step in crate::steps::steps(rest) {
        world.step(step);
    }
    world.turn();
    world.collect();
}

impl World {
    fn new(variant: u8) -> Self {
        let has = |bit: u8| variant >> bit & 1 == 1;
        let features = RingFeatures {
            packed: has(0),
            event_idx: has(3),
            indirect: has(4),
            in_order: false,
        };
        let mut world = Self {
            rig: Rig::new(features),
            features,
            transmits: has(1),
            mergeable: has(2),
            polls: has(5),
            mappings: Mappings::default(),
            memory: None,
            ring: None,
            base: VringBase::initial(features.packed),
            is_broken: false,
            receive: Receive::new(),
            transmit: Transmit::new(),
            honest: true,
            buffers: HashMap::new(),
            next_page: 0,
            sent: VecDeque::new(),
            received: Vec::new(),
            to_come: 0,
        };
        world.map(&[Mapping::ALL]);
        world
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Add { pieces, len } => self.add(pieces, len),
            Step::Frame(len) => {
                // A full socket drops it, as a tap does.
                let _ = self.rig.peer.send(&frame(len.into()));
            }
            Step::Turn => {
                self.turn();
                self.collect();
            }
            Step::Scribble { at, bytes } => {
                self.honest = false;
                let bytes = bytes.get(..bytes.len().min(16)).unwrap_or_default();
                let at = u64::from(at) % (RING_PAGES * PAGE_SIZE - 16);
                self.rig.buffer.write(at, bytes).unwrap();
            }
            Step::Map(mappings) if mappings.is_empty() => self.map(&[Mapping::ALL]),
            Step::Map(mappings) => {
                self.honest = false;
                self.map(&mappings);
            }
            Step::Message { kind, word } => self.message(kind, word),
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
        self.buffers.insert(name, pieces);
        if self.transmits && content.len() > HEADER {
            self.sent.push_back(content);
        }
    }

    /// The device serves the queue, as after a kick.
    fn turn(&mut self) {
        let (Some(ring), Some(memory)) = (&mut self.ring, &self.memory) else {
            return;
        };
        let turn = if self.transmits {
            let mut turn = |arms| self.transmit.turn(ring, memory, &mut self.rig.tap, arms);
            let polled = if self.polls {
                turn(false).map(drop)
            } else {
                Ok(())
            };
            polled
                .and_then(|()| turn(true).map(drop))
                .map_err(Fault::Ring)
        } else {
            self.receive.kicked();
            match self.receive.is_in_use(ring) {
                Ok(true) => self.receive.turn(ring, memory, &mut self.rig.tap).map(drop),
                in_use => in_use.map(drop).map_err(Fault::Ring),
            }
        };
        match turn {
            Ok(()) => {}
            Err(Fault::Ring(error)) => {
                assert!(!self.honest, "{error}");
                self.leave();
                self.is_broken = true;
            }
            Err(Fault::Tap(error)) => panic!("{error}"),
        }
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
            assert!(self.to_come == 1 || self.mergeable);
        }
        self.to_come -= 1;
        if self.to_come == 0 {
            let mut received = std::mem::take(&mut self.received);
            received[10..HEADER].fill(0);
            assert!(received == frame(received.len()), "a damaged frame");
        }
    }

    /// The ring leaves its memory, and its position stays.
    fn leave(&mut self) {
        if let Some(ring) = self.ring.take() {
            self.base = ring.base().at_used();
        }
    }

    /// The file of the driver's memory.
    fn file(&self) -> File {
        let memory = self.rig.buffer.as_guest_memory().unwrap();
        let region = memory.iter().next().unwrap();
        region.file_offset().unwrap().file().try_clone().unwrap()
    }

    /// As after a message about mappings.
    fn map(&mut self, mappings: &[Mapping]) {
        self.leave();
        self.memory = None;
        let file = self.file();
        let entries: Vec<vduse_iotlb_entry> = mappings.iter().map(Mapping::entry).collect();
        let found = self.mappings.replace(|from| {
            let found = entries.iter().find(|entry| entry.last >= from);
            Ok(found.map(|entry| (*entry, file.try_clone().unwrap())))
        });
        match found {
            Ok(memory) => self.memory = memory,
            Err(error) => assert!(!self.honest, "{error}"),
        }
        self.place();
    }

    /// The ring continues at its position, if it is mapped.
    fn place(&mut self) {
        let (Some(memory), false) = (&self.memory, self.is_broken) else {
            return;
        };
        let addresses = self.rig.driver.addresses();
        let ring = GuestRing::new(memory.clone(), SIZE, addresses, self.features);
        let ring = ring.and_then(|ring| DeviceQueue::new(ring, self.base, self.features));
        match ring {
            Ok(ring) => {
                self.ring = Some(ring);
                let is_in_use = self.base != VringBase::initial(self.features.packed);
                self.receive.restart(self.mergeable, SIZE, is_in_use);
            }
            Err(error) => assert!(!self.honest, "{error}"),
        }
    }

    /// A message of the kernel, and the answer to it.
    fn message(&mut self, kind: u8, word: u32) {
        let mut bytes = [0x5a; REQUEST_SIZE];
        bytes[..4].copy_from_slice(&u32::from(kind % 5).to_ne_bytes());
        bytes[24..28].copy_from_slice(&word.to_ne_bytes());
        let message = Message::decode(&bytes);
        let base = match message.request {
            Request::QueueState { .. } => {
                self.leave();
                self.place();
                Some(self.base)
            }
            Request::SetStatus(0) => {
                // The driver begins anew, which its model does not.
                self.honest = false;
                self.ring = None;
                self.receive.stop();
                self.is_broken = false;
                self.base = VringBase::initial(self.features.packed);
                self.place();
                None
            }
            Request::UpdateIotlb => {
                self.map(&[Mapping::ALL]);
                None
            }
            Request::SetStatus(_) | Request::Unknown => None,
        };
        let answer = message.answer(true, base);
        assert_eq!(answer[..4], bytes[4..8]);
        assert_eq!(answer[4..8], [0; 4]);
        if let Some(base) = base {
            assert_eq!(answer[24..28], bytes[24..28]);
            let state = vduse_vq_state_packed::read_from_bytes(&answer[28..36]).unwrap();
            assert_eq!(from_kernel(state, self.features.packed), base);
        }
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
