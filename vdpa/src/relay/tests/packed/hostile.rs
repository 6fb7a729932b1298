//! Devices and guests that break every rule: errors, never a panic, an endless loop or an access
//! outside the memory.

use std::cell::Cell;
use std::sync::Arc;

use proptest::prelude::*;

use super::model::{SIZE, Shapes, TABLES, WINDOW, World};
use crate::device::VringBase;
use crate::memory::GuestMemory;
use crate::relay::{Dirty, Relay, ShadowQueue, Strategy as How};
use crate::ring::{Direction, GuestRing, PackedLayout, Piece, Violation};

/// A world in which the device has taken four chains.
fn four() -> World {
    let mut world = World::new(false, Shapes::Single, SIZE);
    world.change(How::Shadowed).unwrap();
    for _ in 0..4 {
        world.add();
    }
    world.pass();
    world.fetch(4);
    assert_eq!(world.device.held.len(), 4);
    world
}

fn violation(world: &mut World) -> Violation {
    world.try_pass().unwrap_err().violation().unwrap()
}

#[test]
fn a_device_can_use_nothing_that_it_was_not_given() {
    for id in [4, SIZE, 0x8000, u16::MAX] {
        let mut world = four();
        world.device.put(id, 0);
        let id = u32::from(id);
        assert_eq!(violation(&mut world), Violation::NotOutstanding { id });
        // Broken for good; another call is harmless.
        assert_eq!(violation(&mut world), Violation::NotOutstanding { id });
    }
    let mut world = four();
    let id = world.device.held[0].id;
    world.device.put(id, 0);
    world.device.advance();
    world.device.put(id, 0);
    let id = u32::from(id);
    assert_eq!(violation(&mut world), Violation::NotOutstanding { id });
    let mut world = four();
    world.device.put(world.device.held[0].id, 65);
    let (written, offered) = (65, 64);
    let expected = Violation::TooLong { written, offered };
    assert_eq!(violation(&mut world), expected);
}

#[test]
fn a_guest_names_each_chain_once() {
    let mut world = four();
    // The fifth entry, in the first lap, with the id of the first chain.
    let at = world.guest.ring.addresses().descriptor + 16 * 4;
    world.space.descriptor(at, 0x2_0000, 64, 0, 2 | 1 << 7);
    let error = world.try_pass().unwrap_err();
    assert_eq!(error.violation(), Some(Violation::DuplicateId { id: 0 }));
    assert_eq!(error.to_string(), "the guest broke the ring");
}

/// The window does not belong to the guest.
#[test]
fn a_guest_cannot_name_private_memory() {
    let mut world = four();
    let at = world.guest.ring.addresses().descriptor + 16 * 4;
    world.space.descriptor(at, WINDOW, 64, 7, 2 | 1 << 7);
    let outside = Violation::Outside {
        address: WINDOW,
        len: 64,
    };
    assert_eq!(violation(&mut world), outside);
}

#[test]
fn a_table_longer_than_the_private_ring_is_refused() {
    let mut world = World::new(false, Shapes::Single, SIZE);
    let pieces: Vec<Piece> = (0..=u64::from(SIZE))
        .map(|piece| Piece {
            iova: 0x2_0000 + 16 * piece,
            len: 4,
            direction: Direction::DeviceWrites,
        })
        .collect();
    world.guest.ring.add_indirect(&pieces, TABLES).unwrap();
    // The error comes from the preparation: nothing was changed.
    let error = world.change(How::Shadowed).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a chain of 9 pieces does not fit a private ring of 8 entries"
    );
    assert_eq!(world.strategy(), How::Direct);
}

#[test]
fn rings_and_positions_must_fit() {
    let world = World::new(false, Shapes::Single, SIZE);
    let start = VringBase::initial(true);
    let private = &world.space.private;
    let new = |stands, entries, base| {
        let (ring, private) = (world.ring(), Arc::clone(private));
        ShadowQueue::new(ring, stands, private, entries, 0, false, base)
    };
    let at = |index| VringBase::Packed {
        available: index,
        available_wrap: true,
        used: index,
        used_wrap: true,
    };
    let split = VringBase::initial(false);
    assert!(new(start, SIZE, start).is_ok());
    for (stands, entries, base, says) in [
        (start, SIZE - 1, start, "cannot stand in for"),
        (split, SIZE, start, "cannot resume at"),
        (at(SIZE), SIZE, start, "cannot resume at"),
        (start, SIZE, split, "cannot begin at"),
        (start, SIZE, at(SIZE), "cannot begin at"),
        (start, 1024, start, "of a shared buffer of"),
    ] {
        let error = new(stands, entries, base).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

/// Checks the guest's view of the ring when a range is marked.
#[derive(Debug)]
struct Before {
    memory: Arc<GuestMemory>,
    flags: u64,
    marked: Cell<u32>,
}

impl Before {
    fn visible(&self) -> bool {
        use vm_memory::{Bytes, GuestAddress};
        let flags: u16 = self.memory.read_obj(GuestAddress(self.flags)).unwrap();
        flags & (1 << 15) != 0
    }
}

impl Dirty for Before {
    fn mark(&self, _: u64, len: u32) {
        assert!(!self.visible());
        self.marked.set(self.marked.get() + len);
    }
}

#[test]
fn pages_are_marked_before_the_guest_can_see_the_descriptor() {
    let mut world = four();
    let before = Before {
        memory: Arc::clone(&world.space.guest),
        flags: world.guest.ring.addresses().descriptor + 14,
        marked: Cell::new(0),
    };
    // An indirect chain, of two pieces.
    world.complete(1);
    let pass = world.shadow.as_mut().unwrap().pass(&before).unwrap();
    assert_eq!((pass.used, before.marked.get()), (1, 64));
    assert!(before.visible());
}

/// Writes a few bytes into a ring, as either side might.
fn scribble(world: &World, private: bool, at: u64, bytes: &[u8]) {
    if private {
        let size = PackedLayout::new(2 * SIZE).unwrap().size();
        // Both event structures and all entries, and sometimes any offset.
        let at = if at.is_multiple_of(4) {
            at / 4 % (size - 16)
        } else {
            4096 + at / 4 % (16 * 16 + 4)
        };
        world.space.write(WINDOW + at, bytes);
    } else {
        let ring = world.guest.ring.addresses();
        let area = match at % 6 {
            0 => ring.driver,
            1 => ring.device,
            2 => TABLES,
            _ => ring.descriptor,
        };
        world.space.write(area + (at / 6) % 140, bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// With any write to any ring while chains are in flight, a pass ends. The reported addresses
    /// lie in guest memory, and so do those written back.
    #[test]
    fn nothing_in_memory_breaks_a_shadow(
        event_idx in any::<bool>(),
        mixed in any::<bool>(),
        steps in prop::collection::vec(
            (any::<bool>(), any::<u64>(), prop::collection::vec(
                prop_oneof![0u8..9, Just(0x80), any::<u8>()], 1..16,
            )),
            1..60,
        ),
    ) {
        let shapes = if mixed { Shapes::Mixed } else { Shapes::Single };
        let mut world = World::new(event_idx, shapes, 2 * SIZE);
        world.change(How::Shadowed).unwrap();
        for _ in 0..4 {
            world.add();
        }
        for (private, at, bytes) in steps {
            scribble(&world, private, at, &bytes);
            if world.try_pass().is_err() {
                // Another pass, and giving up, must stay harmless.
                let _ = world.try_pass();
                let shadow = world.shadow.as_mut().unwrap();
                let _ = shadow.finish(&world.log).and_then(|_| shadow.settle());
                break;
            }
        }
        let shadow = world.shadow.as_mut().unwrap();
        if let Ok(position) = shadow.settle() {
            prop_assert!(position.in_flight().len() <= usize::from(SIZE));
        }
        prop_assert!(world.log.0.borrow().iter().all(|byte| *byte < 1 << 20));
    }

    /// For a ring of random bytes the position is found or refused, and a found one can be walked.
    #[test]
    fn a_ring_of_anything_is_reported_or_refused(
        bytes in prop::collection::vec(prop_oneof![Just(0u8), Just(0x80), any::<u8>()], 16 * 8),
    ) {
        let world = World::new(false, Shapes::Single, SIZE);
        world.space.write(world.guest.ring.addresses().descriptor, &bytes);
        let GuestRing::Packed(ring) = world.ring() else {
            panic!("split");
        };
        if let Ok(stands) = ring.standing() {
            let ids = ring.ids(stands).unwrap();
            prop_assert_eq!(u16::try_from(ids.len()).unwrap(), stands.packed_in_flight(SIZE));
        }
    }
}
