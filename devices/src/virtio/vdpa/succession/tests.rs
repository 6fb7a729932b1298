//! What the rings tell of buffers in flight, by a model; what a guest was told.

use proptest::prelude::*;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;

use super::*;
use crate::virtio::userspace_queue::driver::memory;

const SIZE: u16 = 8;
const DRIVER: u64 = 0x1000;
const DEVICE: u64 = 0x2000;

const RING: QueueAddresses = QueueAddresses {
    size: SIZE,
    descriptor: 0,
    driver: DRIVER,
    device: DEVICE,
};

fn ring(base: VringBase) -> Ring {
    Ring {
        index: 5,
        addresses: RING,
        base,
    }
}

fn at(index: u16) -> VringBase {
    VringBase::Split { index }
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
    completed: usize,
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

    /// The heads that a device takes which begins at the used index.
    fn taken_at_used(&self) -> Vec<u16> {
        self.given[self.completed..].to_vec()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A device that takes buffers in advance says where it takes the next one. The one that goes on, be it after a
    /// save or a swap, takes those that it keeps.
    #[test]
    fn the_next_device_takes_what_is_in_flight(
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
            let next = ring(at(position)).taken_again(&model.memory, in_order).unwrap();
            prop_assert_eq!(next, at(model.used));
        }
        prop_assert_eq!(model.taken_at_used(), model.in_flight);
    }

    /// What another device has completed, before it failed, the first one does not take again.
    #[test]
    fn a_device_goes_on_where_the_other_one_failed(
        begin in any::<u16>(),
        given in 0usize..8,
        first in 0usize..8,
        steps in prop::collection::vec((any::<bool>(), any::<u16>()), 0..40),
    ) {
        let mut model = Model::new(begin);
        (0..given).for_each(|_| model.give(0));
        (0..first).for_each(|_| model.complete(0));
        let handed_over = ring(at(model.used));
        for (give, pick) in steps {
            if give {
                model.give(pick.into());
            } else {
                model.complete(0);
            }
        }
        let back = handed_over.after_another(&model.memory, false).unwrap();
        prop_assert_eq!(back, at(model.used));
        prop_assert_eq!(model.taken_at_used(), model.in_flight);
    }

    /// Whatever a guest has in its memory and for addresses: an answer, no panic.
    #[test]
    fn any_ring_is_answered(
        bytes in prop::collection::vec(any::<u8>(), 0x100),
        exponent in 0u32..16,
        driver in prop_oneof![0u64..0x5000, Just(u64::MAX), Just(u64::MAX - 2)],
        device in prop_oneof![0u64..0x5000, Just(u64::MAX), Just(u64::MAX - 2)],
        position in any::<u16>(),
        packed in any::<bool>(),
    ) {
        let memory = memory();
        for at in [DRIVER, DEVICE] {
            memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        }
        let base = if packed { VringBase::initial(true) } else { at(position) };
        for (driver, device) in [(driver, device), (DRIVER, DEVICE)] {
            let addresses = QueueAddresses { size: 1 << exponent, descriptor: 0, driver, device };
            let hostile = Ring { index: 5, addresses, base };
            let _ = hostile.taken_again(&memory, false);
            let _ = hostile.after_another(&memory, false);
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
    let taken = ring(at(3));
    let refused = taken.taken_again(&model.memory, false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InFlightUnknown);
    // As do rings of a device that failed there.
    let refused = ring(at(0)).after_another(&model.memory, false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InFlightUnknown);
    // With nothing in flight there is nothing to mistake.
    (0..3).for_each(|_| model.complete(0));
    ring(at(5)).taken_again(&model.memory, false).unwrap();
    // A device that keeps nothing needs no proof of its order.
    model.give(0);
    ring(at(4)).taken_again(&model.memory, false).unwrap();
}

#[test]
fn a_ring_that_is_none_is_named() {
    let mut model = Model::new(0);
    model.available = SIZE + 1;
    model.publish();
    let refused = ring(at(0)).taken_again(&model.memory, true).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::BrokenRing { queue: 5 });
}

/// A packed ring whose chains are of several descriptors does not tell where it stands, but that nothing was used since.
#[test]
fn a_packed_ring_is_taken_back_as_far_as_it_tells() {
    const AVAILABLE: u16 = 1 << 7;
    const USED: u16 = AVAILABLE | 1 << 15;
    const NEXT: u16 = 1;
    let memory = memory();
    let put = |index: u64, flags: u16| {
        let address = GuestAddress(0x4000 + 16 * index + 14);
        memory.write_obj(flags.to_le(), address).unwrap();
    };
    let back = || {
        let addresses = QueueAddresses {
            descriptor: 0x4000,
            ..RING
        };
        let base = VringBase::initial(true);
        let index = 5;
        let ring = Ring {
            index,
            addresses,
            base,
        };
        ring.after_another(&memory, false)
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
        refused.starts_with("queue 5: where its packed ring stands"),
        "{refused}"
    );
}

fn told(queue_pairs: u16, mtu: u16) -> VirtioNetConfig {
    let mut config = VirtioNetConfig::of([0; VirtioNetConfig::LEN]);
    config.max_virtqueue_pairs = queue_pairs.into();
    config.mtu = mtu.into();
    config.rss_max_key_size = 40;
    config.rss_max_indirection_table_length = 128_u16.into();
    config.supported_hash_types = 0b11_u32.into();
    config
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
            check_config(&old, &new, features).is_ok(),
            fits,
            "{new:?} {features:#x}"
        );
    }
    let changes: [fn(&mut VirtioNetConfig); 3] = [
        |new| new.rss_max_key_size = 39,
        |new| new.rss_max_indirection_table_length = 64_u16.into(),
        |new| new.supported_hash_types = 0b101_u32.into(),
    ];
    for change in changes {
        let mut new = old;
        change(&mut new);
        let error = check_config(&old, &new, RSS).unwrap_err();
        assert!(error.to_string().contains("hashes less"), "{error}");
        check_config(&old, &new, MQ).unwrap();
    }
}

#[test]
fn what_a_driver_comes_to_rely_on_later_counts_then() {
    const MTU: u64 = 1 << VIRTIO_NET_F_MTU;
    const SETTABLE: u64 = 1 << VIRTIO_NET_F_CTRL_VQ | 1 << VIRTIO_NET_F_CTRL_MAC_ADDR;
    let mac = [2, 0, 0, 0, 0, 1];
    let config = |mac: [u8; 6], mtu: u16| {
        let mut config = [0; VirtioNetConfig::LEN];
        config[..6].copy_from_slice(&mac);
        config[10..12].copy_from_slice(&mtu.to_le_bytes());
        config
    };
    let identity = Identity {
        mac: Some(mac),
        config: config(mac, 9000),
    };
    let smaller = config(mac, 1500);
    // No driver yet; then one that does not care; then one that does.
    identity.check(smaller, true, 0).unwrap();
    identity.check(smaller, true, 1).unwrap();
    let error = identity.check(smaller, true, MTU).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("an MTU of 9000, the device has 1500"),
        "{text}"
    );
    for (new, addressed) in [([2, 0, 0, 0, 0, 2], true), (mac, false)] {
        let new = config(new, 9000);
        identity.check(new, addressed, 0).unwrap();
        identity.check(new, addressed, SETTABLE).unwrap();
        let error = identity.check(new, addressed, MTU).unwrap_err();
        assert!(error.to_string().contains("another MAC address"), "{error}");
    }
}

#[test]
fn an_identity_of_another_kind_is_refused() {
    let identity = Identity {
        mac: Some([2, 0, 0, 0, 0, 1]),
        config: [7; VirtioNetConfig::LEN],
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
