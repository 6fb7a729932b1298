//! Devices and guests that break every rule: errors, never a panic, an endless loop or an access
//! outside the memory.

use std::cell::Cell;
use std::sync::Arc;

use proptest::prelude::*;

use super::fuzz::scribble;
use super::model::{RingSim, SIZE, Shapes, TABLES, WINDOW};
use crate::device::VringBase;
use crate::iova::DeviceAddress;
use crate::memory::GuestMemory;
use crate::relay::{Dirty, FullShadow, Strategy as How, Svq};
use crate::ring::{Direction, GuestRing, Piece, Violation};

/// A simulation in which the device has taken four chains.
fn four() -> RingSim {
    let mut sim = RingSim::new(false, Shapes::Single, SIZE);
    sim.change(How::FullShadow).unwrap();
    for _ in 0..4 {
        sim.add();
    }
    sim.pass();
    sim.fetch(4);
    assert_eq!(sim.device.held.len(), 4);
    sim
}

fn violation(sim: &mut RingSim) -> Violation {
    sim.try_pass().unwrap_err().violation().unwrap()
}

#[test]
fn a_device_can_use_nothing_that_it_was_not_given() {
    for id in [4, SIZE, 0x8000, u16::MAX] {
        let mut sim = four();
        sim.device.put(id, 0);
        let id = u32::from(id);
        assert_eq!(violation(&mut sim), Violation::NotOutstanding { id });
        // Broken for good; another call is harmless.
        assert_eq!(violation(&mut sim), Violation::NotOutstanding { id });
    }
    let mut sim = four();
    let id = sim.device.held[0].id;
    sim.device.put(id, 0);
    sim.device.advance();
    sim.device.put(id, 0);
    let id = u32::from(id);
    assert_eq!(violation(&mut sim), Violation::NotOutstanding { id });
    let mut sim = four();
    sim.device.put(sim.device.held[0].id, 65);
    let (written, offered) = (65, 64);
    let expected = Violation::TooLong { written, offered };
    assert_eq!(violation(&mut sim), expected);
}

#[test]
fn a_guest_names_each_chain_once() {
    let mut sim = four();
    // The fifth entry, in the first lap, with the id of the first chain.
    let at = sim.guest.ring.addresses().descriptor + 16 * 4;
    sim.space.descriptor(at.0, 0x2_0000, 64, 0, 2 | 1 << 7);
    let error = sim.try_pass().unwrap_err();
    assert_eq!(error.violation(), Some(Violation::DuplicateId { id: 0 }));
    assert_eq!(error.to_string(), "the guest broke the ring");
}

/// The window does not belong to the guest.
#[test]
fn a_guest_cannot_name_private_memory() {
    let mut sim = four();
    let at = sim.guest.ring.addresses().descriptor + 16 * 4;
    sim.space.descriptor(at.0, WINDOW, 64, 7, 2 | 1 << 7);
    let outside = Violation::Outside {
        address: DeviceAddress(WINDOW),
        len: 64,
    };
    assert_eq!(violation(&mut sim), outside);
}

#[test]
fn a_table_longer_than_the_private_ring_is_refused() {
    let mut sim = RingSim::new(false, Shapes::Single, SIZE);
    let pieces: Vec<Piece> = (0..=u64::from(SIZE))
        .map(|piece| Piece {
            iova: DeviceAddress(0x2_0000 + 16 * piece),
            len: 4,
            direction: Direction::DeviceWrites,
        })
        .collect();
    sim.guest.ring.add_indirect(&pieces, TABLES).unwrap();
    // The error comes from the preparation: nothing was changed.
    let error = sim.change(How::FullShadow).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a chain of 9 pieces does not fit a private ring of 8 entries"
    );
    assert_eq!(sim.strategy(), How::Direct);
}

#[test]
fn rings_and_positions_must_fit() {
    let sim = RingSim::new(false, Shapes::Single, SIZE);
    let start = VringBase::initial(true);
    let private = &sim.space.private;
    let new = |position, entries, base| {
        let (ring, private) = (sim.ring(), Arc::clone(private));
        FullShadow::new(ring, position, private, entries, 0, false, base)
    };
    let at = |index| VringBase::Packed {
        available: index,
        available_wrap: true,
        used: index,
        used_wrap: true,
    };
    let split = VringBase::initial(false);
    assert!(new(start, SIZE, start).is_ok());
    for (position, entries, base, says) in [
        (start, SIZE - 1, start, "cannot stand in for"),
        (split, SIZE, start, "cannot resume at"),
        (at(SIZE), SIZE, start, "cannot resume at"),
        (start, SIZE, split, "cannot begin at"),
        (start, SIZE, at(SIZE), "cannot begin at"),
        (start, 1024, start, "of a shared buffer of"),
    ] {
        let error = new(position, entries, base).unwrap_err().to_string();
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
    fn mark(&self, _: DeviceAddress, len: u32) {
        assert!(!self.visible());
        self.marked.set(self.marked.get() + len);
    }
}

#[test]
fn pages_are_marked_before_the_guest_can_see_the_descriptor() {
    let mut sim = four();
    let before = Before {
        memory: Arc::clone(&sim.space.guest),
        flags: sim.guest.ring.addresses().descriptor.0 + 14,
        marked: Cell::new(0),
    };
    // An indirect chain, of two pieces.
    sim.complete(1);
    let pass = sim.shadow.as_mut().unwrap().pass(&before).unwrap();
    assert_eq!((pass.used, before.marked.get()), (1, 64));
    assert!(before.visible());
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
        let mut sim = RingSim::new(event_idx, shapes, 2 * SIZE);
        sim.change(How::FullShadow).unwrap();
        for _ in 0..4 {
            sim.add();
        }
        for (private, at, bytes) in steps {
            scribble(&sim, private, at, &bytes);
            if sim.try_pass().is_err() {
                // Another pass, and giving up, must stay harmless.
                let _ = sim.try_pass();
                let shadow = sim.shadow.as_mut().unwrap();
                let _ = shadow.finish(&sim.log).and_then(|_| shadow.settle());
                break;
            }
        }
        let shadow = sim.shadow.as_mut().unwrap();
        if let Ok(position) = shadow.settle() {
            prop_assert!(position.in_flight().len() <= usize::from(SIZE));
        }
        prop_assert!(sim.log.0.borrow().iter().all(|byte| *byte < 1 << 20));
    }

    /// For a ring of random bytes the position is found or refused, and a found one can be walked.
    #[test]
    fn a_ring_of_anything_is_reported_or_refused(
        bytes in prop::collection::vec(prop_oneof![Just(0u8), Just(0x80), any::<u8>()], 16 * 8),
    ) {
        let sim = RingSim::new(false, Shapes::Single, SIZE);
        sim.space.write(sim.guest.ring.addresses().descriptor.0, &bytes);
        let GuestRing::Packed(ring) = sim.ring() else {
            panic!("split");
        };
        if let Ok(position) = ring.ring_position() {
            let ids = ring.ids(position).unwrap();
            prop_assert_eq!(u16::try_from(ids.len()).unwrap(), position.packed_in_flight(SIZE));
        }
    }
}
