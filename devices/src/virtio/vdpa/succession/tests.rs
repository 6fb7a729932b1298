//! What the rings tell of buffers in flight, by a model; what a guest was told.

use std::sync::Arc;

use proptest::prelude::*;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::virtio::backend::SharedMemory;
use crate::virtio::userspace_queue::driver::memory;

const SIZE: u16 = 8;
const DRIVER: u64 = 0x1000;
const DEVICE: u64 = 0x2000;

fn queue(addresses: QueueAddresses) -> DataQueue {
    DataQueue {
        index: 5,
        addresses,
        kick: Arc::new(EventFd::new(0).unwrap()),
        call: None,
    }
}

fn ring(size: u16) -> DataQueue {
    queue(QueueAddresses {
        size,
        descriptor: 0,
        driver: DRIVER,
        device: DEVICE,
    })
}

/// A guest's split ring, its driver and a device that completes in any order.
struct Model {
    memory: SharedMemory,
    available: u16,
    used: u16,
    free: Vec<u16>,
    /// Heads that were given and not completed, in order.
    in_flight: Vec<u16>,
    given: Vec<u16>,
    completed: Vec<u16>,
}

impl Model {
    fn new(begin: u16) -> Self {
        let model = Self {
            memory: memory(),
            available: begin,
            used: begin,
            free: (0..SIZE).collect(),
            in_flight: Vec::new(),
            given: Vec::new(),
            completed: Vec::new(),
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
        self.completed.push(head);
        self.used = self.used.wrapping_add(1);
        self.publish();
    }

    /// Whether all that both rings still have was completed in the order in which it was given.
    fn shows_order(&self) -> bool {
        let overwritten = self.given.len().saturating_sub(SIZE.into());
        let completed = self.completed.iter().zip(&self.given).skip(overwritten);
        self.in_flight.is_empty() || completed.into_iter().all(|(done, given)| done == given)
    }

    /// The heads that a device takes which begins at the used index.
    fn taken_at_used(&self) -> Vec<u16> {
        self.given[self.completed.len()..].to_vec()
    }
}

proptest! {
    /// A device that works in order always passes, and the next one takes exactly what is in
    /// flight. One that does not is refused as long as the rings show it.
    #[test]
    fn the_next_device_takes_what_is_in_flight(
        begin in any::<u16>(),
        in_order in any::<bool>(),
        steps in prop::collection::vec((any::<bool>(), any::<u16>()), 0..60),
    ) {
        let mut model = Model::new(begin);
        for (give, pick) in steps {
            let pick = usize::from(pick);
            if give {
                model.give(pick);
            } else {
                model.complete(if in_order { 0 } else { pick });
            }
            let passed = check_order(&model.memory, &ring(SIZE)).is_ok();
            prop_assert_eq!(passed, model.shows_order());
            if in_order {
                prop_assert!(passed);
                prop_assert_eq!(model.taken_at_used(), model.in_flight.clone());
            }
        }
    }

    /// Whatever a guest has in its memory and for addresses: an answer, no panic.
    #[test]
    fn any_ring_is_answered(
        bytes in prop::collection::vec(any::<u8>(), 0x100),
        exponent in 0u32..16,
        driver in prop_oneof![0u64..0x5000, Just(u64::MAX), Just(u64::MAX - 2)],
        device in prop_oneof![0u64..0x5000, Just(u64::MAX), Just(u64::MAX - 2)],
    ) {
        let memory = memory();
        for at in [DRIVER, DEVICE] {
            memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        }
        let hostile = queue(QueueAddresses { size: 1 << exponent, descriptor: 0, driver, device });
        let _ = check_order(&memory, &hostile);
        let _ = check_order(&memory, &ring(1 << exponent));
    }
}

#[test]
fn a_hole_before_the_used_index_is_found() {
    let mut model = Model::new(0);
    for _ in 0..3 {
        model.give(0);
    }
    model.complete(1);
    let refused = check_order(&model.memory, &ring(SIZE)).unwrap_err();
    assert!(matches!(refused, VdpaError::InFlightUnknown { queue: 5 }));
    // With nothing in flight there is nothing to mistake.
    model.complete(0);
    model.complete(0);
    check_order(&model.memory, &ring(SIZE)).unwrap();
}

fn told(queue_pairs: u16, mtu: u16) -> Told {
    Told {
        queue_pairs,
        mtu,
        rss_key: 40,
        rss_table: 128,
        hash_types: 0b11,
    }
}

#[test]
fn what_the_guest_was_told_holds_where_it_relies_on_it() {
    const MQ: u64 = 1 << VIRTIO_NET_F_MQ;
    const MTU: u64 = 1 << VIRTIO_NET_F_MTU;
    const RSS: u64 = 1 << VIRTIO_NET_F_RSS;
    let old = told(4, 9000);
    for (new, features, fits) in [
        (told(4, 9000), MQ | MTU | RSS, true),
        (told(2, 9000), MQ, false),
        // The control queue would be another one.
        (told(8, 9000), MQ, false),
        (told(8, 9000), RSS, false),
        (told(8, 1500), 0, true),
        (told(4, 1500), MQ, true),
        (told(4, 1500), MTU, false),
        (told(4, 9216), MTU, true),
    ] {
        assert_eq!(
            old.check(new, features).is_ok(),
            fits,
            "{new:?} {features:#x}"
        );
    }
    for new in [
        Told { rss_key: 39, ..old },
        Told {
            rss_table: 64,
            ..old
        },
        Told {
            hash_types: 0b101,
            ..old
        },
    ] {
        assert!(matches!(old.check(new, RSS), Err(VdpaError::SmallerHash)));
        old.check(new, MQ).unwrap();
    }
}

#[test]
fn fields_are_where_virtio_has_them() {
    let config: [u8; CONFIG_LEN] = std::array::from_fn(|at| u8::try_from(at).unwrap());
    let expected = Told {
        queue_pairs: 0x0908,
        mtu: 0x0b0a,
        rss_key: 17,
        rss_table: 0x1312,
        hash_types: 0x1716_1514,
    };
    assert_eq!(Told::of(&config), expected);
}

#[test]
fn an_identity_of_another_kind_is_refused() {
    let identity = Identity {
        mac: Some([2, 0, 0, 0, 0, 1]),
        config: [7; CONFIG_LEN],
    };
    let state = encode(&identity).unwrap();
    assert_eq!(decode(&state).unwrap(), identity);
    let mut foreign = state.clone();
    foreign.name = "virtio-vdpa".to_owned();
    decode(&foreign).unwrap_err();
    for len in 0..state.payload.len() {
        let mut cut = state.clone();
        cut.payload.truncate(len);
        decode(&cut).unwrap_err();
    }
}
