//! Tests of the device's side against a driver that writes anything.

use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::Error;
use crate::causes::in_one_line;
use crate::iova::DeviceAddress;

const RING: VringAddresses = VringAddresses {
    descriptor: DeviceAddress(0x1000),
    driver: DeviceAddress(0x4000),
    device: DeviceAddress(0x5000),
};
const SIZE: u16 = 8;
/// Address of the tests' indirect tables.
const TABLE: u64 = 0x2_0000;
const NEXT: u16 = DESCRIPTOR_F_NEXT;
const WRITE: u16 = DESCRIPTOR_F_WRITE;
const INDIRECT: u16 = DESCRIPTOR_F_INDIRECT;

/// Address, length, id, flags.
type Raw = (u64, u32, u16, u16);

fn queue(ram: &Arc<GuestMemory>, features: RingFeatures) -> DeviceQueue {
    let ring = GuestRing::new(Arc::clone(ram), SIZE, RING, true).unwrap();
    DeviceQueue::new(ring, VringBase::initial(true), features).unwrap()
}

fn put(ram: &GuestMemory, table: u64, index: u16, (address, len, id, flags): Raw) {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&id.to_le_bytes());
    bytes[14..].copy_from_slice(&flags.to_le_bytes());
    let at = table + 16 * u64::from(index);
    ram.write_slice(&bytes, GuestAddress(at)).unwrap();
}

/// Writes an entry, available in the first lap.
fn available(ram: &GuestMemory, index: u16, (address, len, id, flags): Raw) {
    let raw = (address, len, id, flags | DESCRIPTOR_F_AVAIL);
    put(ram, RING.descriptor.0, index, raw);
}

fn fault(result: Result<Option<Chain>, Error>) -> Violation {
    result.unwrap_err().violation().unwrap()
}

/// The error and its causes.
fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    in_one_line(&result.unwrap_err())
}

#[test]
fn rings_must_lie_in_memory_apart_from_each_other() {
    let ram = ram();
    let attempt = |size, addresses| GuestRing::new(Arc::clone(&ram), size, addresses, true);
    for size in [1, 3, 8, 257, 700] {
        attempt(size, RING).unwrap();
    }
    for size in [0, 32769, u16::MAX] {
        assert!(refusal(attempt(size, RING)).contains("is not possible"));
    }
    let end = RAM as u64;
    for (descriptor, driver, device, good) in [
        (end - 128, 0, 4, true),
        (0, end - 4, end - 8, true),
        (end - 112, 0, 4, false),
        (!15, 0, 4, false),
        (0x1000, !3, 4, false),
        (0x1000, 0, !3, false),
    ] {
        let result = attempt(
            8,
            VringAddresses {
                descriptor: DeviceAddress(descriptor),
                driver: DeviceAddress(driver),
                device: DeviceAddress(device),
            },
        );
        assert_eq!(result.is_ok(), good, "{result:?}");
        assert!(good || refusal(result).ends_with("outside the memory for rings"));
    }
    for (descriptor, driver, device) in [(8, 256, 512), (0, 258, 512), (0, 256, 514)] {
        let addresses = VringAddresses {
            descriptor: DeviceAddress(descriptor),
            driver: DeviceAddress(driver),
            device: DeviceAddress(device),
        };
        assert!(refusal(attempt(8, addresses)).contains("is not aligned to"));
    }
    for (descriptor, driver, device) in [(0, 124, 512), (0, 512, 0), (0, 512, 512)] {
        let addresses = VringAddresses {
            descriptor: DeviceAddress(descriptor),
            driver: DeviceAddress(driver),
            device: DeviceAddress(device),
        };
        assert!(refusal(attempt(8, addresses)).ends_with("overlap"));
    }
}

#[test]
fn continues_where_it_stood_but_not_with_chains_in_flight() {
    let ram = ram();
    let mut queue = queue(&ram, features(false, false));
    available(&ram, 0, (0x8000, 4, 5, NEXT));
    available(&ram, 1, (0x9000, 4, 5, 0));
    queue.pop().unwrap().unwrap();
    let again = |base| {
        let ring = GuestRing::new(Arc::clone(&ram), SIZE, RING, true).unwrap();
        DeviceQueue::new(ring, base, features(false, false))
    };
    assert!(refusal(again(queue.base())).contains("cannot resume at"));
    queue.push_used(5, 0).unwrap();
    let mut queue = again(queue.base()).unwrap();
    available(&ram, 2, (0x8000, 4, 5, 0));
    assert_eq!(queue.pop().unwrap().unwrap().pieces, [reads(0x8000, 4)]);
    for base in [
        VringBase::initial(false),
        VringBase::from_kernel(0x8008_8008, true).unwrap(),
        VringBase::from_kernel(0x8000_0000, true).unwrap(),
    ] {
        assert!(refusal(again(base)).contains("cannot resume at"));
    }
}

#[test]
fn returned_chains_must_be_in_flight_and_in_negotiated_order() {
    for in_order in [false, true] {
        let ram = ram();
        let mut queue = queue(&ram, features(false, in_order));
        available(&ram, 0, (0x8000, 4, 1, WRITE));
        available(&ram, 1, (0x8000, 4, 2, WRITE));
        (0..2).for_each(|_| drop(queue.pop().unwrap().unwrap()));
        assert_eq!(
            refusal(queue.push_used(3, 0)),
            "buffer id 3 cannot be used now"
        );
        assert_eq!(queue.push_used(2, 0).is_err(), in_order);
        queue.push_used(1, 4).unwrap();
        assert!(queue.push_used(1, 4).is_err());
        assert_eq!(queue.in_flight(), usize::from(in_order));
        if in_order {
            queue.push_used(2, 0).unwrap();
            let mut bytes = [0; 16];
            let entry = GuestAddress(RING.descriptor.0);
            ram.read_slice(&mut bytes, entry).unwrap();
            assert_eq!(bytes[8..], [4, 0, 0, 0, 1, 0, 0x82, 0x80]);
        }
    }
}

#[test]
fn publishing_marks_the_ring_dirty() {
    let ram = ram();
    let mut queue = queue(&ram, features(true, false));
    available(&ram, 0, (0x8000, 4, 0, WRITE));
    queue.pop().unwrap().unwrap();
    let dirty = |address| {
        let (region, offset) = ram.to_region_addr(GuestAddress(address)).unwrap();
        region.bitmap().dirty_at(offset.0.try_into().unwrap())
    };
    ram.iter().for_each(|region| (**region).bitmap().reset());
    queue.push_used(0, 4).unwrap();
    assert!(dirty(RING.descriptor.0) && !dirty(RING.device.0));
    queue.set_notifications(true).unwrap();
    assert!(dirty(RING.device.0) && !dirty(RING.driver.0));
}

/// Among others CVE-2021-3748 of another VMM: a descriptor outside RAM.
#[test]
fn malformed_chains_are_refused() {
    let ram_end = RAM as u64;
    let cases: &[(&str, &[Raw], &[Raw], Violation)] = &[
        (
            "endless",
            &[(0x8000, 4, 0, NEXT); 8],
            &[],
            Violation::Overrun,
        ),
        (
            "outside memory",
            &[(ram_end - 4, 8, 0, WRITE)],
            &[],
            Violation::Outside {
                address: DeviceAddress(ram_end - 4),
                len: 8,
            },
        ),
        (
            "wrapping",
            &[(u64::MAX - 3, 8, 0, 0)],
            &[],
            Violation::Outside {
                address: DeviceAddress(u64::MAX - 3),
                len: 8,
            },
        ),
        (
            "over 4 GiB",
            &[(0, 0x20_0000, 0, NEXT), (0, u32::MAX, 0, 0)],
            &[],
            Violation::Length,
        ),
        (
            "readable after writable",
            &[(0x8000, 4, 0, WRITE | NEXT), (0x8000, 4, 0, 0)],
            &[],
            Violation::Order,
        ),
        (
            "indirect of length 0",
            &[(TABLE, 0, 0, INDIRECT)],
            &[],
            Violation::Indirect,
        ),
        (
            "indirect of odd length",
            &[(TABLE, 17, 0, INDIRECT)],
            &[],
            Violation::Indirect,
        ),
        (
            "indirect with a successor",
            &[(TABLE, 16, 0, INDIRECT | NEXT)],
            &[],
            Violation::Indirect,
        ),
        (
            "indirect outside memory",
            &[(u64::MAX - 15, 16, 0, INDIRECT)],
            &[],
            Violation::Outside {
                address: DeviceAddress(u64::MAX - 15),
                len: 16,
            },
        ),
        (
            "indirect of 65536",
            &[(0x10_0000, 16 * 65536, 0, INDIRECT)],
            &[],
            Violation::ChainTooLong,
        ),
        (
            "indirect in indirect",
            &[(TABLE, 32, 0, INDIRECT)],
            &[(0x8000, 4, 0, 0), (TABLE, 16, 0, INDIRECT)],
            Violation::Indirect,
        ),
    ];
    for &(name, ring, table, expected) in cases {
        let ram = ram();
        let mut queue = queue(&ram, features(false, false));
        for (index, &raw) in (0..).zip(ring) {
            available(&ram, index, raw);
        }
        for (index, &raw) in (0..).zip(table) {
            put(&ram, TABLE, index, raw);
        }
        assert_eq!(fault(queue.pop()), expected, "{name}");
        assert_eq!(queue.base(), VringBase::initial(true));
        assert_eq!(queue.in_flight(), 0);
    }
}

#[test]
fn ids_and_entries_in_flight_are_not_taken_twice() {
    let ram = ram();
    let mut queue = queue(&ram, features(false, false));
    available(&ram, 0, (0x8000, 4, 7, 0));
    available(&ram, 1, (0x8000, 4, 7, 0));
    queue.pop().unwrap().unwrap();
    assert_eq!(fault(queue.pop()), Violation::DuplicateId { id: 7 });
    // A whole lap is in flight, and the driver claims more.
    for index in 1..8 {
        available(&ram, index, (0x8000, 4, index + 20, 0));
        queue.pop().unwrap().unwrap();
    }
    assert_eq!(queue.pop().unwrap(), None);
    put(
        &ram,
        RING.descriptor.0,
        0,
        (0x8000, 4, 9, DESCRIPTOR_F_USED),
    );
    assert_eq!(fault(queue.pop()), Violation::Overrun);
}

/// A device may be killed at any moment.
#[test]
fn length_id_and_flags_change_at_once() {
    let ram = ram();
    let ring = GuestRing::new(Arc::clone(&ram), SIZE, RING, true).unwrap();
    let at = GuestAddress(ring.entry(1).0 + DESCRIPTOR_LENGTH);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for number in (0..=u16::MAX).cycle().take(1 << 20) {
                ring.write_result(1, number.into(), number, number).unwrap();
            }
        });
        while !writer.is_finished() {
            let result: u64 = ram.load(at, Ordering::Acquire).unwrap();
            let [l0, l1, _, _, i0, i1, f0, f1] = result.to_ne_bytes();
            assert_eq!(([l0, l1], [l0, l1]), ([i0, i1], [f0, f1]));
        }
    });
    assert_eq!(ring.read_entry(1).unwrap().len, 0xffff);
}

#[test]
fn indirect_tables_give_all_their_pieces() {
    for (len, fits) in [(1u16, true), (256, true), (257, false)] {
        let ram = ram();
        let mut queue = queue(&ram, features(false, false));
        for index in 0..len {
            // NEXT and the id have no meaning here.
            put(&ram, TABLE, index, (0x8000, 1, index, NEXT));
        }
        available(&ram, 0, (TABLE, 16 * u32::from(len), 3, INDIRECT | WRITE));
        if fits {
            let chain = queue.pop().unwrap().unwrap();
            assert_eq!(chain.id, 3);
            assert_eq!(chain.pieces, vec![reads(0x8000, 1); usize::from(len)]);
        } else {
            assert_eq!(fault(queue.pop()), Violation::ChainTooLong);
        }
    }
}

#[test]
fn notifications_and_signals() {
    let ram = ram();
    let mut queue = queue(&ram, features(true, false));
    let half = |address| -> u16 { ram.read_obj(GuestAddress(address)).unwrap() };
    assert!(!queue.set_notifications(false).unwrap());
    assert_eq!(half(RING.device.0 + 2), EVENT_FLAGS_DISABLE);
    available(&ram, 0, (0x8000, 4, 0, 0));
    assert!(queue.set_notifications(true).unwrap());
    queue.pop().unwrap().unwrap();
    assert!(!queue.set_notifications(true).unwrap());
    assert_eq!(half(RING.device.0), 1 | OFF_WRAP);
    assert_eq!(half(RING.device.0 + 2), EVENT_FLAGS_DESC);
    // The driver wants an event for the entry after the first.
    ram.write_obj(0x0002_8001u32, GuestAddress(RING.driver.0))
        .unwrap();
    assert!(!queue.publish().unwrap());
    queue.push_used(0, 0).unwrap();
    assert!(!queue.publish().unwrap());
    available(&ram, 1, (0x8000, 4, 0, 0));
    queue.pop().unwrap().unwrap();
    queue.push_used(0, 0).unwrap();
    assert!(queue.publish().unwrap());
    assert!(!queue.publish().unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// For any content of the ring: no panic, bounded work, and only pieces inside guest memory are
    /// returned.
    #[test]
    fn survives_any_driver(
        table in prop::collection::vec(
            (
                prop_oneof![0..RAM as u64, Just(TABLE), any::<u64>()],
                prop_oneof![0..0x100u32, Just(16), Just(64), any::<u32>()],
                prop_oneof![0..SIZE, any::<u16>()],
                prop_oneof![0..8u16, any::<u16>()],
                any::<bool>(),
            ),
            24,
        ),
        event in any::<u32>(),
        (event_idx, in_order) in any::<(bool, bool)>(),
    ) {
        let ram = ram();
        let mut queue = queue(&ram, features(event_idx, in_order));
        for (index, (address, len, id, flags, usual)) in (0..).zip(table) {
            let flags = if usual { flags & 7 | DESCRIPTOR_F_AVAIL } else { flags };
            let at = if index < SIZE { RING.descriptor } else { DeviceAddress(TABLE) };
            put(&ram, at.0, index % SIZE, (address, len, id, flags));
        }
        ram.write_obj(event, GuestAddress(RING.driver.0)).unwrap();
        let mut popped = 0;
        let mut out = Vec::new();
        while let Ok(Some(chain)) = queue.pop() {
            popped += 1;
            prop_assert!(popped <= SIZE);
            prop_assert!(chain.pieces.len() <= CHAIN_LIMIT);
            for piece in &chain.pieces {
                let end = piece.iova.0.checked_add(u64::from(piece.len)).unwrap();
                prop_assert!(piece.len > 0 && end <= RAM as u64);
            }
            out.push(chain.id);
        }
        for id in out {
            queue.push_used(id, 0).unwrap();
        }
        queue.publish().unwrap();
        queue.set_notifications(true).unwrap();
        prop_assert_eq!(queue.in_flight(), 0);
    }
}

/// The limit of small rings.
const CHAIN_LIMIT: usize = 256;

#[test]
fn use_since_a_position_shows_in_its_entry() {
    let ram = ram();
    let ring = GuestRing::new(Arc::clone(&ram), SIZE, RING, true).unwrap();
    let base = VringBase::initial(true);
    let (avail, used) = (DESCRIPTOR_F_AVAIL, DESCRIPTOR_F_USED);
    for (flags, since) in [
        (0, false),
        (avail | WRITE, false),
        (avail | used, true),
        // The driver overwrote it.
        (used | WRITE, true),
    ] {
        put(&ram, RING.descriptor.0, 0, (0x1000, 16, 3, flags));
        assert_eq!(ring.used_since(base).unwrap(), since, "{flags:#x}");
    }
    assert!(!ring.used_since(VringBase::Split { index: 0 }).unwrap());
    let outside = VringBase::Packed {
        available: SIZE,
        available_wrap: true,
        used: SIZE,
        used_wrap: true,
    };
    assert!(!ring.used_since(outside).unwrap());
}
