//! The same tests over a packed ring. `vdpa::ring::packed` tests the ring itself; these tests cover
//! its use by this module.

use super::super::driver::{BUFFERS, Driver, WRITE, memory};
use super::*;

const PACKED: RingFeatures = RingFeatures {
    packed: true,
    event_idx: false,
    in_order: true,
    indirect: true,
};
/// VIRTQ_DESC_F_AVAIL and VIRTQ_DESC_F_USED.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
const SIZE: u16 = 6;

/// The size is not a power of two, which only a packed ring allows.
fn driver() -> Driver {
    Driver::new(&memory(), SIZE)
}

fn queue(driver: &Driver) -> UserspaceQueue {
    UserspaceQueue::new(driver.queue(), 256, PACKED, Arc::clone(&driver.memory)).unwrap()
}

/// Makes one buffer available: the one of lap and entry `number`.
fn offer(driver: &Driver, number: u16, id: u16, flags: u16) {
    let lap = if (number / SIZE).is_multiple_of(2) {
        AVAIL
    } else {
        USED
    };
    let at = driver.addresses.descriptor + 16 * u64::from(number % SIZE);
    driver.write(at.0, BUFFERS + 0x100 * u64::from(number));
    driver.write((at + 8).0, 8u32);
    driver.write((at + 12).0, id);
    driver.write((at + 14).0, flags | lap);
}

#[test]
fn returns_chains_and_accepts_them_again_over_laps() {
    let driver = driver();
    let mut queue = queue(&driver);
    for number in 0..5 * SIZE {
        assert_eq!(queue.pop().unwrap(), None);
        assert!(!queue.arm().unwrap());
        offer(&driver, number, 3, WRITE);
        assert!(queue.arm().unwrap());
        let chain = queue.pop().unwrap().unwrap();
        let at = BUFFERS + 0x100 * u64::from(number);
        assert_eq!(chain.id, 3);
        assert_eq!(chain.pieces, [piece(at, 8, Direction::DeviceWrites)]);
        queue.push_used(chain.id, 5).unwrap();
        queue.signal_used().unwrap();
        assert!(driver.interrupted());
        let at = driver.addresses.descriptor + 16 * u64::from(number % SIZE);
        assert_eq!(
            (
                driver.read::<u32>((at + 8).0),
                driver.read::<u16>((at + 12).0)
            ),
            (5, 3)
        );
        let lap = if (number / SIZE).is_multiple_of(2) {
            AVAIL | USED
        } else {
            0
        };
        assert_eq!(driver.read::<u16>((at + 14).0), lap | WRITE);
    }
    // The driver sets RING_EVENT_FLAGS_DISABLE.
    driver.write((driver.addresses.driver + 2).0, 1u16);
    offer(&driver, 5 * SIZE, 3, 0);
    queue.pop().unwrap().unwrap();
    queue.push_used(3, 0).unwrap();
    queue.signal_used().unwrap();
    assert!(!driver.interrupted());
}

#[test]
fn a_fault_breaks_the_queue() {
    let driver = driver();
    let mut broken = queue(&driver);
    offer(&driver, 0, 0, INDIRECT | NEXT);
    assert!(refusal(broken.pop()).ends_with("an indirect descriptor is malformed"));
    offer(&driver, 0, 0, WRITE);
    assert_eq!(broken.pop().unwrap(), None);
    assert!(!broken.arm().unwrap());

    let driver = self::driver();
    let mut broken = queue(&driver);
    broken.push_used(9, 0).unwrap_err();
    offer(&driver, 0, 0, WRITE);
    assert_eq!(broken.pop().unwrap(), None);
}

#[test]
fn sizes_above_the_offer_are_refused() {
    let driver = driver();
    let attempt = |max| {
        let memory = Arc::clone(&driver.memory);
        UserspaceQueue::new(driver.queue(), max, PACKED, memory).map(drop)
    };
    attempt(SIZE).unwrap();
    assert!(refusal(attempt(SIZE - 1)).contains("cannot use queue size"));
}

#[test]
fn restores_where_it_was_saved() {
    let driver = driver();
    let mut before = queue(&driver);
    for number in 0..SIZE + 2 {
        offer(&driver, number, number % 4, WRITE);
        let chain = before.pop().unwrap().unwrap();
        before.push_used(chain.id, 1).unwrap();
    }
    let saved = before.save();
    let bytes = postcard::to_stdvec(&saved).unwrap();
    let saved: SavedQueue = postcard::from_bytes(&bytes).unwrap();
    let restore = |saved, features: RingFeatures| {
        let mut queue = driver.queue();
        if !features.packed {
            queue.addresses.size = 8;
        }
        UserspaceQueue::restore(queue, saved, 256, features, Arc::clone(&driver.memory))
    };
    let mut after = restore(saved, PACKED).unwrap();
    assert!(driver.interrupted());
    offer(&driver, SIZE + 2, 1, WRITE);
    assert_eq!(after.pop().unwrap().unwrap().id, 1);

    // Neither format accepts the other's position, nor an invalid one.
    assert!(refusal(restore(saved, SPLIT)).contains("cannot resume at"));
    let split = SavedQueue {
        position: SavedPosition::Split {
            next_avail: 2,
            next_used: 2,
        },
        broken: false,
    };
    assert!(refusal(restore(split, PACKED)).contains("cannot resume at"));
    for number in [0x8006_8006, 0x8001_8002, 0x0001_8001] {
        let base = VringBase::from_kernel(number, true).unwrap();
        let hostile = SavedQueue {
            position: SavedPosition::Packed { base },
            broken: false,
        };
        assert!(refusal(restore(hostile, PACKED)).contains("cannot resume at"));
        // A broken queue stays broken, at any position.
        let broken = SavedQueue {
            broken: true,
            ..hostile
        };
        assert_eq!(restore(broken, PACKED).unwrap().pop().unwrap(), None);
    }
}
