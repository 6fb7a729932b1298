//! Tests of both sides against each other over one memory, and of each against a hostile peer.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use vm_memory::{Bytes, FileOffset, GuestAddress};

use super::super::guest::{DESCRIPTOR_F_INDIRECT, DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE};
use super::super::{
    Chain, Direction, DriverQueue, PackedLayout, Piece, RingFeatures, Used, Violation,
};
use super::*;
use crate::device::VringAddresses;
use crate::iova::DeviceAddress;
use crate::memory::{GuestMemory, SharedBuffer};

mod arrange;
mod driver;
mod guest;
mod ring_position;

/// The driver's ring lies at the start of guest memory, so that pieces may lie anywhere below
/// [`RAM`].
const RAM: usize = 4 << 20;

fn features(event_idx: bool, in_order: bool) -> RingFeatures {
    RingFeatures {
        packed: true,
        event_idx,
        in_order,
        indirect: true,
    }
}

fn reads(iova: u64, len: u32) -> Piece {
    Piece {
        iova: DeviceAddress(iova),
        len,
        direction: Direction::DeviceReads,
    }
}

fn writes(iova: u64, len: u32) -> Piece {
    Piece {
        iova: DeviceAddress(iova),
        len,
        direction: Direction::DeviceWrites,
    }
}

fn ram() -> Arc<GuestMemory> {
    let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(RAM as u64).unwrap();
    let file = Some(FileOffset::new(file, 0));
    Arc::new(GuestMemory::from_ranges_with_files([(GuestAddress(0), RAM, file)]).unwrap())
}

/// A driver and a device whose memories are copied to each other in turns.
struct Pair {
    driver: DriverQueue,
    device: DeviceQueue,
    buffer: Arc<SharedBuffer>,
    ram: Arc<GuestMemory>,
    layout: PackedLayout,
}

impl Pair {
    fn new(size: u16, features: RingFeatures) -> Self {
        let layout = PackedLayout::new(size).unwrap();
        let buffer = Arc::new(SharedBuffer::new(layout.size(), 0).unwrap());
        let driver = DriverQueue::new(Arc::clone(&buffer), size, 0, features).unwrap();
        let ram = ram();
        let base = VringBase::initial(true);
        let ring = GuestRing::new(Arc::clone(&ram), size, driver.addresses(), true).unwrap();
        let device = DeviceQueue::new(ring, base, features).unwrap();
        Self {
            driver,
            device,
            buffer,
            ram,
            layout,
        }
    }

    fn copy(&self, to_device: bool) {
        let mut bytes = vec![0; usize::try_from(self.layout.size()).unwrap()];
        if to_device {
            self.buffer.read(0, &mut bytes).unwrap();
            self.ram.write_slice(&bytes, GuestAddress(0)).unwrap();
        } else {
            self.ram.read_slice(&mut bytes, GuestAddress(0)).unwrap();
            self.buffer.write(0, &bytes).unwrap();
        }
    }

    fn driver<T>(&mut self, act: impl FnOnce(&mut DriverQueue) -> T) -> T {
        let result = act(&mut self.driver);
        self.copy(true);
        result
    }

    fn device<T>(&mut self, act: impl FnOnce(&mut DeviceQueue) -> T) -> T {
        let result = act(&mut self.device);
        self.copy(false);
        result
    }
}

#[test]
fn positions_lap() {
    for size in [1u16, 2, 3, 7, 32768] {
        let mut position = Position::START;
        let mut place = 0u64;
        for step in 0..200u16 {
            let by = (step * 7) % size + 1;
            position = position.advance(by, size);
            place += u64::from(by);
            let lap = place / u64::from(size);
            assert_eq!(u64::from(position.index), place % u64::from(size));
            assert_eq!(position.wrap, lap.is_multiple_of(2));
            assert!(position.is_available(position.available_flags()));
            assert!(position.is_used(position.used_flags()));
            assert!(!position.is_available(position.used_flags()));
            assert!(!position.is_used(position.available_flags()));
            let next_lap = position.advance(size, size);
            assert!(!next_lap.is_available(position.available_flags()));
            assert!(!next_lap.is_used(position.used_flags()));
        }
    }
}

/// All positions of small rings, with all moves and all events within a lap, against places that
/// are counted without laps.
#[test]
fn all_positions_of_small_rings_agree_with_counted_places() {
    for size in 1..=12u16 {
        let lap = u32::from(size);
        let position = |place: u32| Position {
            index: u16::try_from(place % lap).unwrap(),
            wrap: (place / lap).is_multiple_of(2),
        };
        for now in lap..3 * lap {
            for by in 0..=size {
                let moved = position(now).advance(by, size);
                assert_eq!(moved, position(now + u32::from(by)));
                let base = base_of(moved, position(now));
                assert_eq!(base.packed_in_flight(size), by);
            }
            for moved in 1..=lap {
                for event in now - lap + 1..now + lap {
                    let word = u32::from(EVENT_FLAGS_DESC) << 16;
                    let word = word | u32::from(position(event).off_wrap());
                    let expected = event < now && event >= now - moved;
                    let wanted = event_wanted(word, position(now), moved, size, true);
                    assert_eq!(wanted, expected, "size {size}: {now} {moved} {event}");
                }
            }
        }
    }
}

#[test]
fn events_by_flags() {
    let wanted = |flags: u32, event_idx| {
        event_wanted(flags << 16, Position::START.advance(1, 8), 1, 8, event_idx)
    };
    for event_idx in [false, true] {
        assert!(wanted(0, event_idx));
        assert!(!wanted(1, event_idx));
        assert!(wanted(3, event_idx));
        // Reserved bits do not count.
        assert!(!wanted(0xfff1, event_idx));
    }
    // off_wrap 0 is of another lap than the first entry, but that counts only with EVENT_IDX.
    assert!(wanted(2, false));
    assert!(!wanted(2, true));
}

proptest! {
    /// Compares `off_wrap` with positions that are counted without laps.
    #[test]
    fn events_are_where_they_were_put(
        size in prop_oneof![1u16..20, Just(255), Just(32768)],
        now in 0u64..200_000,
        moved in 1u64..40_000,
        ahead in -40_000i64..40_000,
    ) {
        let lap = u64::from(size);
        let (now, moved) = (now + lap, (moved - 1) % lap + 1);
        // The event is within a lap before or after.
        let event = now.checked_add_signed(ahead % i64::from(size)).unwrap();
        let position = |place: u64| Position {
            index: u16::try_from(place % lap).unwrap(),
            wrap: (place / lap).is_multiple_of(2),
        };
        let word = u32::from(position(event).off_wrap()) | u32::from(EVENT_FLAGS_DESC) << 16;
        let expected = event < now && event >= now - moved;
        prop_assert_eq!(
            event_wanted(word, position(now), u32::try_from(moved).unwrap(), size, true),
            expected
        );
        prop_assert!(event_wanted(word, position(now), u32::from(size) + 1, size, true));
    }

    /// Chains of any length pass through rings of any size. The chains that arrive are those that
    /// were sent, in order, over many laps. Interrupts and kicks that a side wants do arrive.
    #[test]
    fn both_sides_agree(
        size in 1u16..20,
        event_idx in any::<bool>(),
        in_order in any::<bool>(),
        steps in prop::collection::vec((0usize..6, 0usize..8, any::<usize>()), 1..60),
    ) {
        let mut pair = Pair::new(size, features(event_idx, in_order));
        let mut sent = std::collections::VecDeque::new();
        let mut taken: Vec<(u16, u32)> = Vec::new();
        let mut expected = std::collections::BTreeMap::new();
        let mut number = 0u64;
        for (len, completions, choice) in steps {
            let pieces: Vec<Piece> = (0..len).map(|piece| {
                number += 1;
                let (iova, len) = (number * 16, u32::try_from(number).unwrap());
                if piece * 2 < len as usize && piece < 2 {
                    reads(iova, 9)
                } else {
                    writes(iova, len)
                }
            }).collect();
            let sleeping = !pair.device(|device| device.set_notifications(true)).unwrap();
            match pair.driver(|driver| driver.add(&pieces)) {
                Ok(id) => sent.push_back((id, pieces)),
                Err(error) if error.to_string().contains("are needed") => {
                    prop_assert!(len > usize::from(pair.driver.free()));
                }
                Err(error) => prop_assert_eq!(len, 0, "{}", error),
            }
            let added = pair.driver(DriverQueue::needs_kick).unwrap();
            prop_assert!(!sleeping || added != sent.is_empty());
            while let Some(chain) = pair.device(DeviceQueue::pop).unwrap() {
                let (id, pieces) = sent.pop_front().unwrap();
                prop_assert_eq!(chain.id, id);
                prop_assert_eq!(&chain.pieces, &pieces);
                let room = pieces.iter()
                    .filter(|piece| piece.direction == Direction::DeviceWrites)
                    .map(|piece| piece.len).sum();
                taken.push((id, room));
            }
            prop_assert!(sent.is_empty());
            let waits = !pair.driver(|driver| driver.set_interrupts(true)).unwrap();
            prop_assert!(waits);
            let mut used = 0;
            for _ in 0..completions.min(taken.len()) {
                let at = if in_order { 0 } else { choice % taken.len() };
                let (id, room) = taken.remove(at);
                let written = room / 2;
                pair.device(|device| device.push_used(id, written)).unwrap();
                prop_assert!(expected.insert(id, written).is_none());
                used += 1;
            }
            let signal = pair.device(DeviceQueue::publish).unwrap();
            prop_assert_eq!(signal, used > 0);
            while let Some(Used { head, written }) = pair.driver(DriverQueue::pop_used).unwrap() {
                prop_assert_eq!(expected.remove(&head), Some(written));
            }
            prop_assert!(expected.is_empty());
            prop_assert_eq!(usize::from(pair.driver.outstanding()), taken.len());
            prop_assert_eq!(pair.device.in_flight(), taken.len());
        }
    }
}

/// Every size, each crossed several times by chains that do not divide it.
#[test]
fn all_small_sizes_wrap() {
    for size in (1..=64).chain([255, 256, 257, 1000]) {
        for in_order in [false, true] {
            let mut pair = Pair::new(size, features(true, in_order));
            let len = usize::from(size.min(3));
            for round in 0..u32::from(size) + 20 {
                let chain = vec![writes(0x1000, round + 1); len];
                let id = pair.driver(|driver| driver.add(&chain)).unwrap();
                let popped = pair.device(DeviceQueue::pop).unwrap().unwrap();
                assert_eq!((popped.id, popped.pieces), (id, chain));
                assert_eq!(pair.device(DeviceQueue::pop).unwrap(), None);
                pair.device(|device| device.push_used(id, round)).unwrap();
                let used = pair.driver(DriverQueue::pop_used).unwrap();
                assert_eq!(
                    used,
                    Some(Used {
                        head: id,
                        written: round
                    })
                );
                assert_eq!(pair.driver(DriverQueue::pop_used).unwrap(), None);
                assert_eq!(pair.driver.free(), size);
            }
        }
    }
}

/// The largest ring filled to the last entry, twice.
#[test]
fn the_largest_ring_fills() {
    let size = 32768;
    let mut pair = Pair::new(size, features(true, false));
    for _ in 0..2 {
        for _ in 0..size {
            pair.driver.add(&[reads(0, 1)]).unwrap();
        }
        pair.driver.add(&[reads(0, 1)]).unwrap_err();
        pair.copy(true);
        let mut ids = BTreeSet::new();
        while let Some(chain) = pair.device.pop().unwrap() {
            assert!(ids.insert(chain.id));
        }
        assert_eq!(ids.len(), usize::from(size));
        for id in ids {
            pair.device.push_used(id, 0).unwrap();
        }
        pair.copy(false);
        for _ in 0..size {
            pair.driver.pop_used().unwrap().unwrap();
        }
        assert_eq!((pair.driver.free(), pair.driver.outstanding()), (size, 0));
    }
}
