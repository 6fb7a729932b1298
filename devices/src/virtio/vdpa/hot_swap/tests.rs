//! Tests the detection of buffers in flight from the rings, with a model.

use proptest::prelude::*;

use super::*;
use crate::virtio::userspace_queue::driver::memory;

const SIZE: u16 = 8;
const DRIVER: u64 = 0x1000;
const DEVICE: u64 = 0x2000;

const RING: QueueAddresses = QueueAddresses {
    size: SIZE,
    descriptor: DeviceAddress(0),
    driver: DeviceAddress(DRIVER),
    device: DeviceAddress(DEVICE),
};

fn ring(memory: &DeviceMemory) -> Ring<'_> {
    Ring {
        memory,
        index: 5,
        addresses: RING,
    }
}

fn at(index: u16) -> VringBase {
    VringBase::Split { index }
}

/// A guest's split ring, its driver and a device that completes in any order.
struct Model {
    memory: DeviceMemory,
    available: u16,
    used: u16,
    free: Vec<u16>,
    /// Heads that are available and not completed, in order.
    in_flight: Vec<u16>,
    given: Vec<u16>,
    completed: usize,
}

impl Model {
    fn new(begin: u16) -> Self {
        let model = Self {
            memory: memory().into(),
            available: begin,
            used: begin,
            free: (0..SIZE).collect(),
            in_flight: Vec::new(),
            given: Vec::new(),
            completed: 0,
        };
        model.publish();
        model
    }

    fn publish(&self) {
        let write = |address, value: u16| {
            let written = self.memory.write_obj(value.to_le(), GuestAddress(address));
            written.unwrap();
        };
        write(DRIVER + 2, self.available);
        write(DEVICE + 2, self.used);
    }

    fn give(&mut self, pick: usize) {
        if self.free.is_empty() {
            return;
        }
        let head = self.free.remove(pick % self.free.len());
        let entry = u64::from(self.available % SIZE);
        let address = GuestAddress(DRIVER + 4 + 2 * entry);
        self.memory.write_obj(head.to_le(), address).unwrap();
        self.in_flight.push(head);
        self.given.push(head);
        self.available = self.available.wrapping_add(1);
        self.publish();
    }

    fn complete(&mut self, pick: usize) {
        if self.in_flight.is_empty() {
            return;
        }
        let head = self.in_flight.remove(pick % self.in_flight.len());
        let entry = u64::from(self.used % SIZE);
        let address = GuestAddress(DEVICE + 4 + 8 * entry);
        let id = u32::from(head).to_le();
        self.memory.write_obj(id, address).unwrap();
        self.free.push(head);
        self.completed += 1;
        self.used = self.used.wrapping_add(1);
        self.publish();
    }

    /// Returns the heads that a device takes if it begins at the used index.
    fn taken_at_used(&self) -> Vec<u16> {
        self.given[self.completed..].to_vec()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A device that prefetches buffers reports the position of its next one. The device that
    /// continues after a save or a swap takes the prefetched buffers.
    #[test]
    fn the_next_device_takes_the_chains_in_flight(
        begin in any::<u16>(),
        steps in prop::collection::vec((any::<bool>(), any::<u16>()), 0..60),
        taken in any::<u16>(),
    ) {
        let mut model = Model::new(begin);
        for (give, pick) in steps {
            if give {
                model.give(pick.into());
            } else {
                model.complete(0);
            }
        }
        let waiting = model.available.wrapping_sub(model.used);
        let position = model.used.wrapping_add(taken % (waiting + 1));
        for in_order in [false, true] {
            let next = ring(&model.memory).resume_base(at(position), in_order).unwrap();
            prop_assert_eq!(next, at(model.used));
        }
        prop_assert_eq!(model.taken_at_used(), model.in_flight);
    }

    /// The first device does not take buffers again that another device completed before it failed.
    #[test]
    fn a_device_continues_where_the_other_one_failed(
        begin in any::<u16>(),
        given in 0usize..8,
        first in 0usize..8,
        steps in prop::collection::vec((any::<bool>(), any::<u16>()), 0..40),
    ) {
        let mut model = Model::new(begin);
        (0..given).for_each(|_| model.give(0));
        (0..first).for_each(|_| model.complete(0));
        let handed_over = at(model.used);
        for (give, pick) in steps {
            if give {
                model.give(pick.into());
            } else {
                model.complete(0);
            }
        }
        let back = ring(&model.memory).after_another(handed_over, false).unwrap();
        prop_assert_eq!(back, at(model.used));
        prop_assert_eq!(model.taken_at_used(), model.in_flight);
    }

    /// For all contents and addresses of a guest's rings: a result and no panic.
    #[test]
    fn any_ring_is_answered(
        bytes in prop::collection::vec(any::<u8>(), 0x100),
        exponent in 0u32..16,
        driver in prop_oneof![0u64..0x5000, Just(u64::MAX), Just(u64::MAX - 2)],
        device in prop_oneof![0u64..0x5000, Just(u64::MAX), Just(u64::MAX - 2)],
        position in any::<u16>(),
        packed in any::<bool>(),
    ) {
        let memory = DeviceMemory::from(memory());
        for at in [DRIVER, DEVICE] {
            memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        }
        let base = if packed { VringBase::initial(true) } else { at(position) };
        for (driver, device) in [(driver, device), (DRIVER, DEVICE)] {
            let addresses = QueueAddresses {
                size: 1 << exponent,
                descriptor: DeviceAddress(0),
                driver: DeviceAddress(driver),
                device: DeviceAddress(device),
            };
            let hostile = Ring { memory: &memory, index: 5, addresses };
            let _ = hostile.resume_base(base, false);
            let _ = hostile.after_another(base, false);
        }
    }
}

#[test]
fn a_hole_before_the_used_index_is_found() {
    let mut model = Model::new(0);
    for _ in 0..4 {
        model.give(0);
    }
    model.complete(1);
    let refused = ring(&model.memory).resume_base(at(3), false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InFlightUnknown);
    // Rings of a device that failed there give the same result.
    let refused = ring(&model.memory).after_another(at(0), false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InFlightUnknown);
    // With nothing in flight, order does not matter.
    (0..3).for_each(|_| model.complete(0));
    ring(&model.memory).resume_base(at(5), false).unwrap();
    // A device that keeps nothing needs no check of its order.
    model.give(0);
    ring(&model.memory).resume_base(at(4), false).unwrap();
}

#[test]
fn a_ring_that_is_none_is_named() {
    let mut model = Model::new(0);
    model.available = SIZE + 1;
    model.publish();
    let refused = ring(&model.memory).resume_base(at(0), true).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::BrokenRing { queue: 5 });
}

/// A packed ring with chains of several descriptors does not show its position, only that nothing
/// was used since.
#[test]
fn a_packed_ring_is_recovered_as_far_as_its_flags_show() {
    const AVAILABLE: u16 = 1 << 7;
    const USED: u16 = AVAILABLE | 1 << 15;
    const NEXT: u16 = 1;
    let memory = DeviceMemory::from(memory());
    let put = |index: u64, flags: u16| {
        let address = GuestAddress(0x4000 + 16 * index + 14);
        memory.write_obj(flags.to_le(), address).unwrap();
    };
    let back = || {
        let addresses = QueueAddresses {
            descriptor: DeviceAddress(0x4000),
            ..RING
        };
        let ring = Ring {
            memory: &memory,
            index: 5,
            addresses,
        };
        ring.after_another(VringBase::initial(true), false)
    };
    assert_eq!(back().unwrap(), VringBase::initial(true));
    put(0, AVAILABLE | NEXT);
    put(1, AVAILABLE);
    assert_eq!(back().unwrap(), VringBase::initial(true));
    put(0, USED);
    let behind = VringBase::Packed {
        available: 1,
        available_wrap: true,
        used: 1,
        used_wrap: true,
    };
    assert_eq!(back().unwrap(), behind);
    put(1, AVAILABLE | NEXT);
    let refused = back().unwrap_err().to_string();
    assert!(
        refused.starts_with("queue 5: the position of its packed ring"),
        "{refused}"
    );
}
