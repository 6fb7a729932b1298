//! Devices and guests that break every rule: errors, never a panic, an endless loop or an access
//! outside the memory.

use std::sync::Arc;

use proptest::prelude::*;

use super::fuzz::scribble;
use super::model::{ADDRESSES, RingSim, SIZE, buffer, layout};
use crate::device::VringBase;
use crate::iova::DeviceAddress;
use crate::memory::SharedBuffer;
use crate::relay::{FullShadow, Position, Strategy as How, Svq, UsedShadow};
use crate::ring::Violation;
use crate::ring::split::{DeviceQueue, GuestRing};
use crate::{Error, ErrorKind};

/// A simulation in which the device has taken four chains.
fn four(how: How) -> RingSim {
    let mut sim = RingSim::new(false, false, 0);
    sim.change(how).unwrap();
    for _ in 0..4 {
        sim.add();
    }
    sim.pass();
    sim.fetch(4);
    assert_eq!(sim.device.held.len(), 4);
    sim
}

fn violation(error: Error) -> Violation {
    assert_eq!(error.kind(), ErrorKind::BrokenByDevice);
    error.violation().unwrap()
}

fn pass(sim: &mut RingSim) -> Result<(), Error> {
    let relay = sim.relay.as_mut().unwrap();
    relay.pass(&sim.log).map(drop)
}

#[test]
fn a_device_can_use_nothing_that_it_was_not_given() {
    for how in [How::UsedShadow, How::FullShadow] {
        // Each of its four chains may come back once; no other, and none twice.
        for id in [u32::from(SIZE), 0x1_0000, u32::MAX] {
            let mut sim = four(how);
            sim.device.put(id, 0);
            sim.device.publish(1);
            assert_eq!(
                violation(pass(&mut sim).unwrap_err()),
                Violation::NotOutstanding { id }
            );
        }
        let mut sim = four(how);
        let id = u32::from(sim.device.held[0]);
        for index in 1..=2 {
            sim.device.put(id, 0);
            sim.device.publish(index);
        }
        assert_eq!(
            violation(pass(&mut sim).unwrap_err()),
            Violation::NotOutstanding { id }
        );
        for jump in [5, 9, 0x8000, u16::MAX] {
            let mut sim = four(how);
            sim.device.publish(jump);
            assert!(matches!(
                violation(pass(&mut sim).unwrap_err()),
                Violation::IndexJump { moved, .. } if moved == jump
            ));
        }
        let mut sim = four(how);
        sim.device.put(u32::from(sim.device.held[0]), 65);
        sim.device.publish(1);
        assert_eq!(
            violation(pass(&mut sim).unwrap_err()),
            Violation::TooLong {
                written: 65,
                offered: 64
            }
        );
    }
}

/// A device may write more than it reports: all of the chain is marked.
#[test]
fn all_that_the_device_may_write_is_marked() {
    for how in [How::UsedShadow, How::FullShadow] {
        for written in [0, 1, 63] {
            let mut sim = four(how);
            let head = u32::from(sim.device.held[0]);
            sim.device.put(head, written);
            sim.device.publish(1);
            pass(&mut sim).unwrap();
            let at = ADDRESSES.device + 4;
            let mut id = [0; 2];
            sim.space.read(at.0, &mut id);
            let start = buffer(u16::from_le_bytes(id));
            let marked = sim.log.0.borrow().iter().copied().collect::<Vec<u64>>();
            assert!(
                marked.into_iter().eq(start..start + 64),
                "{how:?} {written}"
            );
        }
    }
}

/// A ring with one chain made available by hand.
fn ring_with(descriptors: &[(u64, u32, u16, u16)], table: &[(u64, u32, u16, u16)]) -> GuestRing {
    let sim = RingSim::new(false, false, 0);
    for (base, entries) in [
        (ADDRESSES.descriptor, descriptors),
        (DeviceAddress(0x8000), table),
    ] {
        for (at, &(address, len, flags, next)) in (0..).zip(entries) {
            sim.space
                .descriptor((base + 16 * at).0, address, len, flags, next);
        }
    }
    sim.space.set_u16(ADDRESSES.driver.0 + 2, 1);
    sim.ring()
}

/// Among others CVE-2021-3748 of another VMM: a descriptor outside RAM.
#[test]
fn chains_that_break_a_rule_are_refused() {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    let wrong = |descriptors: &[_], table: &[_], expected: Violation| {
        let mut queue = DeviceQueue::new(ring_with(descriptors, table), false, 0);
        let error = queue.pop().unwrap_err();
        assert_eq!(error.violation(), Some(expected));
        assert_eq!(queue.positions(), (0, 0));
    };
    let table = (0x8000, 32, INDIRECT, 0);
    wrong(&[(0, 1, NEXT, 0)], &[], Violation::ChainTooLong);
    wrong(&[(0, 0, NEXT, 0)], &[], Violation::ChainTooLong);
    wrong(
        &[(0, 1, NEXT, SIZE)],
        &[],
        Violation::NoDescriptor {
            index: SIZE,
            size: 8,
        },
    );
    wrong(
        &[(0, 1, WRITE | NEXT, 1), (0, 1, 0, 0)],
        &[],
        Violation::Order,
    );
    wrong(&[(0, 0, 0, 0)], &[], Violation::Length);
    let (all, half) = (0xf_ffff, 0x8000_0000);
    wrong(
        &[(all, 2, 0, 0)],
        &[],
        Violation::Outside {
            address: DeviceAddress(all),
            len: 2,
        },
    );
    wrong(
        &[(u64::MAX, 2, 0, 0)],
        &[],
        Violation::Outside {
            address: DeviceAddress(u64::MAX),
            len: 2,
        },
    );
    // The private window does not belong to the guest.
    wrong(
        &[(1 << 40, 1, WRITE, 0)],
        &[],
        Violation::Outside {
            address: DeviceAddress(1 << 40),
            len: 1,
        },
    );
    wrong(
        &[(0, half, 0, 0)],
        &[],
        Violation::Outside {
            address: DeviceAddress(0),
            len: half,
        },
    );
    for len in [0, 15, 17] {
        wrong(&[(0x8000, len, INDIRECT, 0)], &[], Violation::Indirect);
    }
    wrong(
        &[(0x8000, 16, INDIRECT | NEXT, 1)],
        &[],
        Violation::Indirect,
    );
    wrong(&[table], &[(0x8000, 16, INDIRECT, 0)], Violation::Indirect);
    wrong(&[table], &[(0, 1, NEXT, 0)], Violation::ChainTooLong);
    wrong(
        &[table],
        &[(0, 1, NEXT, 2)],
        Violation::NoDescriptor { index: 2, size: 2 },
    );
    let address = 0xf_fff0;
    wrong(
        &[(address, 32, INDIRECT, 0)],
        &[],
        Violation::Outside {
            address: DeviceAddress(address),
            len: 32,
        },
    );
    // 256 descriptors and no more, including the buffers before the table.
    let long: Vec<_> = (1..=256).map(|next| (0, 1, NEXT, next)).collect();
    let (before, big) = ((0, 1, NEXT, 1), (0x8000, 16 * 256, INDIRECT, 0));
    wrong(&[before, big], &long, Violation::ChainTooLong);
    let mut fits = long.clone();
    fits[254] = (0, 1, 0, 0);
    let mut queue = DeviceQueue::new(ring_with(&[before, big], &fits), false, 0);
    assert_eq!(queue.pop().unwrap().unwrap().pieces.len(), 256);
}

#[test]
fn rings_must_lie_in_guest_memory() {
    let sim = RingSim::new(false, false, 0);
    for (size, offset) in [(3, 0), (0, 0), (SIZE, 1), (SIZE, 1 << 40), (SIZE, 0xf_f000)] {
        let mut addresses = ADDRESSES;
        addresses.descriptor.0 += offset;
        let memory = Arc::clone(&sim.space.guest);
        assert!(GuestRing::new(memory, size, addresses, true).is_err());
    }
    let small = Arc::new(SharedBuffer::new(4096, 1 << 41).unwrap());
    let queue = UsedShadow::new(sim.ring(), Arc::clone(&small), 4096, false, false, 0);
    assert!(
        queue
            .unwrap_err()
            .to_string()
            .contains("of a shared buffer of")
    );
    let base = VringBase::initial(false);
    let queue = FullShadow::new(sim.ring().into(), base, small, SIZE, 0, false, base);
    assert!(
        queue
            .unwrap_err()
            .to_string()
            .contains("of a shared buffer of")
    );
}

/// With IN_ORDER one element completes all chains before it, and all are reported.
#[test]
fn one_element_completes_a_batch() {
    let mut sim = RingSim::new(false, false, 65534);
    let ring = sim.ring();
    let private = Arc::clone(&sim.space.private);
    let queue = UsedShadow::new(ring, private, layout().size(), false, true, 65534).unwrap();
    sim.device.ring = queue.addresses();
    sim.relay = Some(Box::new(queue));
    for _ in 0..5 {
        sim.add();
    }
    sim.fetch(5);
    let heads = sim.device.held.clone();
    // Two batches, three chains and two, shown at once.
    sim.device.put(u32::from(heads[2]), 64);
    sim.device.publish(1);
    sim.device.put(u32::from(heads[4]), 64);
    sim.device.publish(3);
    pass(&mut sim).unwrap();
    assert_eq!(sim.ring().used_index().unwrap(), 3);
    for head in heads {
        assert!(sim.log.0.borrow().contains(&buffer(head)), "{head}");
    }
    // An element for a chain beyond the index.
    sim.add();
    sim.add();
    sim.fetch(8);
    let last = u32::from(sim.device.held[6]);
    sim.device.put(last, 64);
    sim.device.publish(4);
    assert_eq!(
        violation(pass(&mut sim).unwrap_err()),
        Violation::NotOutstanding { id: last }
    );
}

/// With IN_ORDER a pass returns chains by the avail ring and counts none: a driver with few buffers
/// makes one head available without limit.
#[test]
fn in_order_uses_of_one_head_are_unlimited() {
    let mut sim = RingSim::new(false, false, 0);
    let private = Arc::clone(&sim.space.private);
    let queue = UsedShadow::new(sim.ring(), private, layout().size(), false, true, 0).unwrap();
    sim.device.ring = queue.addresses();
    sim.relay = Some(Box::new(queue));
    sim.space
        .descriptor(ADDRESSES.descriptor.0, buffer(0), 1, 2, 0);
    for slot in 0..u64::from(SIZE) {
        sim.space.set_u16(ADDRESSES.driver.0 + 4 + 2 * slot, 0);
    }
    for _ in 0..=u16::MAX {
        let next = sim.device.used.wrapping_add(1);
        sim.space.set_u16(ADDRESSES.driver.0 + 2, next);
        sim.device.put(0, 1);
        sim.device.publish(next);
        pass(&mut sim).unwrap();
    }
    sim.space.set_u16(ADDRESSES.driver.0 + 2, 2);
    let position = sim.relay.as_mut().unwrap().settle().unwrap();
    let expected = Position::Split {
        used: 0,
        available: 2,
        in_flight: vec![0, 0],
    };
    assert_eq!(position, expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// With any write to any ring while chains are in flight, a pass ends, and the reported
    /// addresses lie in guest memory.
    #[test]
    fn nothing_in_memory_breaks_a_relay(
        used_shadow in any::<bool>(),
        event_idx in any::<bool>(),
        steps in prop::collection::vec(
            (
                any::<bool>(),
                any::<u64>(),
                prop::collection::vec(prop_oneof![0u8..9, any::<u8>()], 1..16),
            ),
            1..60,
        ),
    ) {
        let how = if used_shadow { How::UsedShadow } else { How::FullShadow };
        let mut sim = RingSim::new(event_idx, true, 0);
        sim.change(how).unwrap();
        for _ in 0..5 {
            sim.add();
        }
        for (private, at, bytes) in steps {
            scribble(&sim.space, private, at, &bytes);
            if pass(&mut sim).is_err() {
                // Another pass, and giving up, must stay harmless.
                let _ = pass(&mut sim);
                let relay = sim.relay.as_mut().unwrap();
                let _ = relay.finish(&sim.log).and_then(|_| relay.settle());
                break;
            }
        }
        prop_assert!(sim.log.0.borrow().iter().all(|byte| *byte < 1 << 20));
    }
}
