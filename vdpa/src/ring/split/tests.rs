//! Tests of the queue against a model device, honest and hostile.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::super::guest::{DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE};
use super::super::{Direction, DriverQueue, Piece, RingFeatures, SplitLayout, Used, Violation};
use super::*;
use crate::device::VringBase;
use crate::iova::DeviceAddress;
use crate::memory::SharedBuffer;

const BASE: u64 = 0x7000_0000;

/// Address, length and whether the device may write, from a descriptor.
type Descriptor = (u64, u32, bool);

/// A device that reads and writes the ring through its own view of the memory.
struct Model {
    memory: Arc<SharedBuffer>,
    layout: SplitLayout,
    seen: u16,
    used: u16,
}

impl Model {
    fn u16(&self, offset: u64) -> u16 {
        self.memory.load_u16(offset, Ordering::Acquire).unwrap()
    }

    fn avail(&self) -> u16 {
        self.u16(self.layout.avail_offset + 2)
    }

    /// The chain in the next avail entry: head and pieces.
    fn take(&mut self) -> Option<(u16, Vec<Descriptor>)> {
        if self.avail() == self.seen {
            return None;
        }
        let slot = u64::from(self.seen % self.layout.size);
        let head = self.u16(self.layout.avail_offset + 4 + 2 * slot);
        self.seen = self.seen.wrapping_add(1);
        let (mut index, mut pieces) = (head, Vec::new());
        loop {
            let mut bytes = [0; 16];
            self.memory.read(16 * u64::from(index), &mut bytes).unwrap();
            let flags = u16::from_le_bytes([bytes[12], bytes[13]]);
            pieces.push((
                u64::from_le_bytes(bytes[..8].try_into().unwrap()),
                u32::from_le_bytes(bytes[8..12].try_into().unwrap()),
                flags & DESCRIPTOR_F_WRITE != 0,
            ));
            if flags & DESCRIPTOR_F_NEXT == 0 {
                return Some((head, pieces));
            }
            index = u16::from_le_bytes([bytes[14], bytes[15]]);
        }
    }

    fn put_element(&self, id: u32, length: u32) {
        let slot = u64::from(self.used % self.layout.size);
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&id.to_le_bytes());
        bytes[4..].copy_from_slice(&length.to_le_bytes());
        self.memory
            .write(self.layout.used_offset + 4 + 8 * slot, &bytes)
            .unwrap();
    }

    fn set_used_index(&mut self, index: u16) {
        self.used = index;
        self.memory
            .store_u16(index, self.layout.used_offset + 2, Ordering::Release)
            .unwrap();
    }

    fn give_back(&mut self, id: u32, length: u32) {
        self.put_element(id, length);
        self.set_used_index(self.used.wrapping_add(1));
    }
}

fn pair(size: u16, event_idx: bool) -> (DriverQueue, Model) {
    with(
        size,
        RingFeatures {
            event_idx,
            ..RingFeatures::default()
        },
    )
}

fn with(size: u16, features: RingFeatures) -> (DriverQueue, Model) {
    let layout = SplitLayout::new(size).unwrap();
    let memory = Arc::new(SharedBuffer::new(layout.size(), BASE).unwrap());
    let queue = DriverQueue::new(memory.clone(), layout.size, 0, features).unwrap();
    let model = Model {
        memory,
        layout,
        seen: 0,
        used: 0,
    };
    (queue, model)
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

#[test]
fn chains_go_there_and_back_over_the_wrap_of_the_index() {
    let (mut queue, mut model) = pair(4, false);
    for round in 0..70_000u32 {
        let head = queue
            .add(&[
                reads(0x1000, 5),
                reads(0x2000, 6),
                writes(0x3000, round + 1),
            ])
            .unwrap();
        assert_eq!(queue.free(), 1);
        let full = queue.add(&[reads(0, 1), reads(0, 1)]).unwrap_err();
        assert!(
            full.to_string()
                .contains("1 free descriptors and 2 are needed")
        );
        let (seen, pieces) = model.take().unwrap();
        assert_eq!(seen, head);
        assert_eq!(
            pieces,
            [
                (0x1000, 5, false),
                (0x2000, 6, false),
                (0x3000, round + 1, true)
            ]
        );
        assert_eq!(queue.pop_used().unwrap(), None);
        model.give_back(u32::from(head), round);
        let used = queue.pop_used().unwrap().unwrap();
        assert_eq!(
            used,
            Used {
                head,
                written: round
            }
        );
        assert_eq!((queue.free(), queue.outstanding()), (4, 0));
    }
}

#[test]
fn chains_come_back_in_any_order() {
    let (mut queue, mut model) = pair(8, false);
    let heads: Vec<u16> = (0..8)
        .map(|_| queue.add(&[writes(0, 9)]).unwrap())
        .collect();
    for &head in heads.iter().rev() {
        model.give_back(u32::from(head), 9);
    }
    for &head in heads.iter().rev() {
        assert_eq!(queue.pop_used().unwrap().unwrap().head, head);
    }
    assert_eq!(queue.pop_used().unwrap(), None);
}

#[test]
fn invalid_chains_are_refused() {
    let (mut queue, _) = pair(4, false);
    for chain in [
        &[][..],
        &[reads(0, 0)],
        &[writes(0, 1), reads(0, 1)],
        &[reads(u64::MAX, 2)],
        &[reads(0, u32::MAX), reads(0, 1)],
        &[writes(0, u32::MAX), writes(0, u32::MAX)],
    ] {
        let error = queue.add(chain).unwrap_err().to_string();
        assert!(error.ends_with("a valid descriptor chain"), "{chain:?}");
    }
    assert_eq!(queue.free(), 4);
}

#[test]
fn kicks_as_the_device_wishes() {
    let (mut queue, model) = pair(4, false);
    assert!(!queue.needs_kick().unwrap());
    queue.add(&[reads(0, 1)]).unwrap();
    assert!(queue.needs_kick().unwrap());
    assert!(!queue.needs_kick().unwrap());
    let flags = model.layout.used_offset;
    model
        .memory
        .store_u16(USED_F_NO_NOTIFY, flags, Ordering::SeqCst)
        .unwrap();
    queue.add(&[reads(0, 1)]).unwrap();
    assert!(!queue.needs_kick().unwrap());

    let (mut queue, model) = pair(4, true);
    let event = model.layout.used_offset + 4 + 8 * 4;
    model.memory.store_u16(1, event, Ordering::SeqCst).unwrap();
    queue.add(&[reads(0, 1)]).unwrap();
    assert!(!queue.needs_kick().unwrap());
    queue.add(&[reads(0, 1)]).unwrap();
    assert!(queue.needs_kick().unwrap());
    queue.add(&[reads(0, 1)]).unwrap();
    assert!(!queue.needs_kick().unwrap());
}

#[test]
fn interrupts_can_be_switched_without_missing_one() {
    for event_idx in [false, true] {
        let (mut queue, mut model) = pair(4, event_idx);
        assert!(!queue.set_interrupts(false).unwrap());
        let head = queue.add(&[reads(0, 1)]).unwrap();
        model.give_back(u32::from(head), 0);
        assert!(queue.set_interrupts(true).unwrap());
        queue.pop_used().unwrap().unwrap();
        assert!(!queue.set_interrupts(true).unwrap());
        if event_idx {
            assert_eq!(model.u16(model.layout.avail_offset + 4 + 2 * 4), 1);
        }
    }
}

#[test]
fn a_violation_breaks_the_queue_for_good() {
    let broken = |size, id, length, moved| {
        let (mut queue, mut model) = pair(size, false);
        queue.add(&[reads(0, 1), writes(0, 8)]).unwrap();
        model.put_element(id, length);
        model.set_used_index(moved);
        let violation = queue.pop_used().unwrap_err().violation().unwrap();
        assert!(queue.pop_used().is_err() && queue.add(&[reads(0, 1)]).is_err());
        assert!(queue.needs_kick().is_err() && queue.set_interrupts(true).is_err());
        violation
    };
    let jump = |moved| Violation::IndexJump {
        moved,
        outstanding: 1,
    };
    assert_eq!(broken(4, 0, 0, 2), jump(2));
    assert_eq!(broken(4, 0, 0, u16::MAX), jump(u16::MAX));
    for id in [1, 3, 4, 0xffff, 0x1_0000, u32::MAX] {
        assert_eq!(broken(4, id, 0, 1), Violation::NotOutstanding { id });
    }
    for written in [9, u32::MAX] {
        let offered = 8;
        assert_eq!(
            broken(4, 0, written, 1),
            Violation::TooLong { written, offered }
        );
    }
}

#[test]
fn an_element_cannot_come_back_twice() {
    let (mut queue, mut model) = pair(4, false);
    queue.add(&[writes(0, 1)]).unwrap();
    queue.add(&[writes(0, 1)]).unwrap();
    model.give_back(0, 0);
    model.give_back(0, 0);
    queue.pop_used().unwrap().unwrap();
    assert!(queue.pop_used().is_err());
}

const IN_ORDER: RingFeatures = RingFeatures {
    packed: false,
    event_idx: false,
    in_order: true,
    indirect: false,
};

#[test]
fn in_order_one_element_completes_all_before_it() {
    let (mut queue, mut model) = with(8, IN_ORDER);
    for round in 0..40_000u32 {
        // Chains of one and two descriptors, in the table's order.
        let heads = [
            queue.add(&[writes(0x1000, 100)]).unwrap(),
            queue.add(&[reads(0x2000, 1), writes(0x3000, 200)]).unwrap(),
            queue.add(&[writes(0x4000, 300)]).unwrap(),
        ];
        let first = u16::try_from(round * 4 % 8).unwrap();
        assert_eq!(heads, [first, first + 1, first + 3]);
        while model.take().is_some() {}
        // The element of the second chain, in the place of the first; then the third.
        model.put_element(u32::from(heads[1]), 7);
        model.set_used_index(model.used.wrapping_add(2));
        assert_eq!(
            queue.pop_used().unwrap(),
            Some(Used {
                head: heads[0],
                written: 100
            })
        );
        assert!(queue.set_interrupts(true).unwrap());
        assert_eq!(
            queue.pop_used().unwrap(),
            Some(Used {
                head: heads[1],
                written: 7
            })
        );
        assert_eq!(queue.pop_used().unwrap(), None);
        model.give_back(u32::from(heads[2]), 300);
        assert_eq!(queue.pop_used().unwrap().unwrap().head, heads[2]);
        assert_eq!((queue.free(), queue.outstanding()), (8, 0));
    }
}

#[test]
fn in_order_a_batch_is_not_larger_than_the_index() {
    let (mut queue, mut model) = with(8, IN_ORDER);
    (0..3).for_each(|_| {
        queue.add(&[writes(0, 9)]).unwrap();
    });
    model.give_back(2, 9);
    let violation = queue.pop_used().unwrap_err().violation();
    let expected = Violation::Batch {
        id: 2,
        batch: 3,
        moved: 1,
    };
    assert_eq!(violation, Some(expected));
}

proptest! {
    /// A device writes anything anywhere in its ring. The driver never panics, and never returns a
    /// chain that was not outstanding, a chain twice, or more bytes than offered.
    #[test]
    fn survives_any_used_ring(
        (event_idx, in_order) in any::<(bool, bool)>(),
        steps in prop::collection::vec(
            (1usize..4, prop_oneof![0u32..8, any::<u32>()], prop_oneof![0u32..64, any::<u32>()],
             prop_oneof![4 => Just(1u16), 1 => any::<u16>()], any::<bool>()),
            1..40),
        garbage in prop::collection::vec((0u64..4096, any::<u8>()), 0..8),
    ) {
        let features = RingFeatures { event_idx, in_order, ..RingFeatures::default() };
        let (mut queue, mut model) = with(8, features);
        let mut out = std::collections::BTreeSet::new();
        for (pieces, id, length, moved, scribble) in steps {
            if let Ok(head) = queue.add(&vec![writes(0x1000, 16); pieces]) {
                prop_assert!(out.insert(head), "descriptor {} given twice", head);
            }
            let _ = queue.needs_kick();
            model.put_element(id, length);
            model.set_used_index(model.used.wrapping_add(moved));
            if scribble {
                for &(at, byte) in &garbage {
                    // Descriptor table and avail ring too, as without an IOMMU.
                    model.memory.write(at % model.layout.size(), &[byte]).unwrap();
                }
            }
            while let Ok(Some(used)) = queue.pop_used() {
                prop_assert!(out.remove(&used.head));
                prop_assert!(used.written <= 48);
            }
            prop_assert!(queue.free() <= 8 && queue.outstanding() <= 8);
        }
    }
}

#[test]
fn a_ring_begins_where_the_device_is_set_to() {
    for event_idx in [false, true] {
        let base = 65534;
        let layout = SplitLayout::new(4).unwrap();
        let memory = Arc::new(SharedBuffer::new(layout.size(), BASE).unwrap());
        let features = RingFeatures {
            event_idx,
            ..RingFeatures::default()
        };
        let at = VringBase::Split { index: base };
        let mut queue = DriverQueue::with_base(memory.clone(), 4, 0, features, at).unwrap();
        let mut model = Model {
            memory,
            layout,
            seen: base,
            used: base,
        };
        assert_eq!(queue.pop_used().unwrap(), None);
        assert_eq!(model.take(), None);
        for round in 0..6 {
            let head = queue.add(&[writes(0x1000, 10)]).unwrap();
            // Each chain passes the event that the model never moves, or not.
            assert_eq!(queue.needs_kick().unwrap(), !event_idx || round == 0);
            assert_eq!(model.take(), Some((head, vec![(0x1000, 10, true)])));
            model.give_back(u32::from(head), 10);
            assert_eq!(queue.pop_used().unwrap(), Some(Used { head, written: 10 }));
            assert_eq!(queue.positions().1, base.wrapping_add(round + 1));
        }
    }
}

#[test]
fn an_indirect_table_takes_one_descriptor() {
    let layout = SplitLayout::new(4).unwrap();
    let size = layout.size() + 4096;
    let memory = Arc::new(SharedBuffer::new(size, BASE).unwrap());
    let features = RingFeatures::default();
    let mut queue = DriverQueue::new(memory.clone(), layout.size, 0, features).unwrap();
    let table = layout.size();
    let chain = [reads(0x100, 12), reads(0x200, 60), writes(0x300, 4)];
    let head = queue.add_indirect(&chain, table).unwrap();
    assert_eq!((queue.free(), queue.positions()), (3, (1, 0)));
    let mut bytes = [0; 48];
    memory.read(16 * u64::from(head), &mut bytes[..16]).unwrap();
    assert_eq!(bytes[..8], (BASE + table).to_le_bytes());
    assert_eq!(bytes[8..14], [48, 0, 0, 0, 4, 0]);
    memory.read(table, &mut bytes).unwrap();
    assert_eq!(bytes[12..16], [1, 0, 1, 0]);
    assert_eq!(bytes[28..32], [1, 0, 2, 0]);
    assert_eq!(bytes[44..48], [2, 0, 0, 0]);
    // The table's writable bytes are those that the device may write.
    let mut model = Model {
        memory,
        layout,
        seen: 0,
        used: 0,
    };
    model.give_back(u32::from(head), 5);
    let error = queue.pop_used().unwrap_err();
    let violation = error.violation();
    assert!(
        matches!(violation, Some(Violation::TooLong { offered: 4, .. })),
        "{error}"
    );
    assert!(queue.add_indirect(&chain, size - 32).is_err());
}

/// All indices of small rings, with all moves and all events nearby, against a walk from the old
/// index to the new one.
#[test]
fn events_at_all_indices_agree_with_a_walk() {
    for size in [1u16, 2, 4, 8] {
        for old in 0..=u16::MAX {
            for moved in 0..=size {
                let passed = |event: u16| (0..moved).any(|by| old.wrapping_add(by) == event);
                for ahead in 0..=3 * size {
                    let event = old.wrapping_sub(size).wrapping_add(ahead);
                    let wish = Suppression { flags: 0, event };
                    let new = old.wrapping_add(moved);
                    assert_eq!(
                        wish.wants(true, old, new),
                        passed(event),
                        "{old} {new} {event}"
                    );
                }
            }
        }
    }
}
