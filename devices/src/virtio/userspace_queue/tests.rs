use proptest::prelude::{Just, ProptestConfig, any, prop_assert, prop_oneof, proptest};
use vdpa::causes::in_one_line;
use vdpa::iova::DeviceAddress;
use vdpa::ring::{Direction, Piece};

use super::driver::{BUFFERS, Driver, INDIRECT, NEXT, RAM, memory, readable, writable};
use super::*;

mod packed;

const SIZE: u16 = 8;
const SPLIT: RingFeatures = RingFeatures {
    packed: false,
    event_idx: false,
    in_order: false,
    indirect: true,
};

fn queue(driver: &Driver, event_idx: bool) -> UserspaceQueue {
    let features = RingFeatures { event_idx, ..SPLIT };
    UserspaceQueue::new(driver.queue(), 256, features, Arc::clone(&driver.memory)).unwrap()
}

/// Returns the error and its causes.
fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    in_one_line(&result.unwrap_err())
}

fn piece(iova: u64, len: u32, direction: Direction) -> Piece {
    Piece {
        iova: DeviceAddress(iova),
        len,
        direction,
    }
}

#[test]
fn refuses_unacceptable_rings() {
    let driver = Driver::new(&memory(), SIZE);
    let attempt = |change: &dyn Fn(&mut QueueAddresses)| {
        let mut queue = driver.queue();
        change(&mut queue.addresses);
        UserspaceQueue::new(queue, 256, SPLIT, Arc::clone(&driver.memory)).map(drop)
    };
    for size in [0, 3, 512, u16::MAX] {
        assert!(refusal(attempt(&|a| a.size = size)).contains("cannot use queue size"));
    }
    for change in [
        (|a| a.descriptor.0 += 8) as fn(&mut QueueAddresses),
        |a| a.driver.0 += 1,
        |a| a.device.0 += 2,
    ] {
        assert!(refusal(attempt(&change)).contains("is not aligned to"));
    }
    let end = RAM as u64;
    for change in [
        (|a| a.descriptor = DeviceAddress(!15)) as fn(&mut QueueAddresses),
        |a| a.driver = DeviceAddress(!1),
        |a| a.device = DeviceAddress(!3),
    ] {
        assert!(refusal(attempt(&change)).contains("outside the memory for rings"));
    }
    let outside = refusal(attempt(&|a| a.device = DeviceAddress(end - 64)));
    assert!(outside.contains("outside the memory for rings"));
    attempt(&|a| a.device = DeviceAddress(end - 72)).unwrap();
    for change in [
        (|a| a.device = a.descriptor + (16 * 8 - 4)) as fn(&mut QueueAddresses),
        |a| a.device = a.driver,
        |a| a.driver = a.descriptor,
    ] {
        assert!(refusal(attempt(&change)).ends_with("overlap"));
    }
}

#[test]
fn returns_chains_and_accepts_them_again() {
    let mut driver = Driver::new(&memory(), SIZE);
    let mut queue = queue(&driver, false);
    assert_eq!(queue.pop().unwrap(), None);
    // Twice around the ring, so that both indices wrap at the size.
    for round in 0..u64::from(SIZE) * 2 {
        let at = BUFFERS + round * 0x100;
        let head = driver.add(&[readable(at, 16), readable(at, 0), writable(at + 16, 5)]);
        let chain = queue.pop().unwrap().unwrap();
        assert_eq!(chain.id, head);
        let expected = [
            piece(at, 16, Direction::DeviceReads),
            piece(at + 16, 5, Direction::DeviceWrites),
        ];
        assert_eq!(chain.pieces, expected);
        queue.push_used(head, 5).unwrap();
        queue.signal_used().unwrap();
        assert_eq!(driver.take_used(), Some((u32::from(head), 5)));
        assert!(driver.interrupted());
    }
    assert_eq!(queue.pop().unwrap(), None);
}

#[test]
fn publishing_marks_the_used_ring_dirty() {
    let mut driver = Driver::new(&memory(), SIZE);
    let mut queue = queue(&driver, false);
    driver.add(&[writable(BUFFERS, 4)]);
    driver.clean();
    let chain = queue.pop().unwrap().unwrap();
    assert!(!driver.dirty(driver.addresses.device.0));
    queue.push_used(chain.id, 0).unwrap();
    assert!(driver.dirty(driver.addresses.device.0));
}

#[test]
fn honours_interrupt_suppression() {
    // Without EVENT_IDX: VIRTQ_AVAIL_F_NO_INTERRUPT.
    let mut driver = Driver::new(&memory(), SIZE);
    let mut flagged = queue(&driver, false);
    driver.write(driver.addresses.driver.0, 1u16);
    let head = driver.add(&[writable(BUFFERS, 4)]);
    flagged.pop().unwrap().unwrap();
    flagged.push_used(head, 0).unwrap();
    flagged.signal_used().unwrap();
    assert!(!driver.interrupted());

    // With EVENT_IDX: used_event names the element.
    let mut driver = Driver::new(&memory(), SIZE);
    let mut indexed = queue(&driver, true);
    let used_event = driver.addresses.driver + 4 + 2 * u64::from(SIZE);
    driver.write(used_event.0, 1u16);
    for interrupt in [false, true, false] {
        let head = driver.add(&[writable(BUFFERS, 4)]);
        indexed.pop().unwrap().unwrap();
        indexed.push_used(head, 0).unwrap();
        indexed.signal_used().unwrap();
        assert_eq!(driver.interrupted(), interrupt);
    }
    // avail_event tells the driver after which element to kick.
    assert!(!indexed.arm().unwrap());
    let avail_event: u16 = driver.read((driver.addresses.device + 4 + 8 * u64::from(SIZE)).0);
    assert_eq!(avail_event, 3);
    driver.add(&[writable(BUFFERS, 4)]);
    assert!(indexed.arm().unwrap());
}

#[test]
fn a_broken_queue_stays_silent() {
    let mut driver = Driver::new(&memory(), SIZE);
    let mut queue = queue(&driver, false);
    driver.set_avail_index(SIZE + 1);
    assert!(refusal(queue.pop()).ends_with("the avail index is 9 ahead in a ring of 8"));
    driver.set_avail_index(1);
    assert_eq!(queue.pop().unwrap(), None);
    // Otherwise the backend would never stop polling.
    assert!(!queue.arm().unwrap());
}

/// `vdpa` tests which chains are malformed; this tests the effect of one.
#[test]
fn a_malformed_chain_breaks_the_queue() {
    let mut driver = Driver::new(&memory(), SIZE);
    let mut queue = queue(&driver, false);
    let table = driver.addresses.descriptor;
    driver.descriptor(table.0, 0, (BUFFERS, 4, NEXT, SIZE));
    driver.publish(0);
    assert!(refusal(queue.pop()).ends_with("descriptor 8 does not exist in a table of 8"));
    driver.descriptor(table.0, 0, (BUFFERS, 4, 0, 0));
    assert_eq!(queue.pop().unwrap(), None);
}

#[test]
fn chains_in_tables_may_be_longer_than_the_ring() {
    let mut driver = Driver::new(&memory(), SIZE);
    let mut queue = queue(&driver, false);
    let (table, len) = (0x20000, 256u16);
    for index in 0..len {
        let flags = if index + 1 < len { NEXT } else { 0 };
        driver.descriptor(table, index, (BUFFERS, 1, flags, index + 1));
    }
    let indirect = (table, 16 * u32::from(len), INDIRECT, 0);
    driver.descriptor(driver.addresses.descriptor.0, 0, indirect);
    driver.publish(0);
    let chain = queue.pop().unwrap().unwrap();
    assert_eq!(chain.pieces.len(), usize::from(len));
}

#[test]
fn restores_where_it_was_saved() {
    let mut driver = Driver::new(&memory(), SIZE);
    let mut before = queue(&driver, false);
    for _ in 0..3 {
        let head = driver.add(&[writable(BUFFERS, 4)]);
        before.pop().unwrap().unwrap();
        before.push_used(head, 1).unwrap();
        before.signal_used().unwrap();
        driver.take_used().unwrap();
    }
    let waiting = driver.add(&[writable(BUFFERS, 4)]);
    before.kick().drain();
    let saved = before.save();
    drop(before);

    let memory = Arc::clone(&driver.memory);
    let mut after = UserspaceQueue::restore(driver.queue(), saved, 256, SPLIT, memory).unwrap();
    // One spurious kick and one spurious interrupt.
    assert_eq!(driver.kick.read().unwrap(), 1);
    assert!(driver.interrupted());
    assert_eq!(after.pop().unwrap().unwrap().id, waiting);
    after.push_used(waiting, 2).unwrap();
    after.signal_used().unwrap();
    assert_eq!(driver.take_used(), Some((u32::from(waiting), 2)));

    let hostile = SavedQueue {
        position: SavedPosition::Split {
            next_avail: 4,
            next_used: 3,
        },
        broken: false,
    };
    let memory = Arc::clone(&driver.memory);
    let restored = UserspaceQueue::restore(driver.queue(), hostile, 256, SPLIT, memory);
    assert!(refusal(restored).contains("nothing in flight"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    // For all contents of the rings: no panic, bounded work, and only pieces inside guest memory
    // are returned.
    #[test]
    fn arbitrary_rings_are_harmless(
        table in proptest::collection::vec(
            (
                prop_oneof![0..RAM as u64, any::<u64>()],
                prop_oneof![0..0x100u32, Just(16), Just(64), any::<u32>()],
                0..8u16,
                prop_oneof![0..SIZE, any::<u16>()],
            ),
            32,
        ),
        heads in proptest::collection::vec(prop_oneof![0..SIZE, any::<u16>()], usize::from(SIZE)),
        avail in prop_oneof![0..=SIZE, any::<u16>()],
        event_idx in any::<bool>(),
    ) {
        let mut driver = Driver::new(&memory(), SIZE);
        let mut queue = queue(&driver, event_idx);
        for (index, raw) in (0..).zip(table) {
            driver.descriptor(driver.addresses.descriptor.0, index, raw);
        }
        for (slot, head) in (0..).zip(heads) {
            driver.write((driver.addresses.driver + 4 + 2 * slot).0, head);
        }
        driver.set_avail_index(avail);
        let mut popped = 0;
        while let Ok(Some(chain)) = queue.pop() {
            popped += 1;
            prop_assert!(popped <= usize::from(SIZE));
            prop_assert!(chain.pieces.len() <= 256);
            for piece in &chain.pieces {
                let end = piece.iova.checked_add(u64::from(piece.len)).unwrap();
                prop_assert!(end <= DeviceAddress(RAM as u64));
            }
            queue.push_used(chain.id, 0).unwrap();
        }
        queue.signal_used().unwrap();
        queue.arm().unwrap();
    }
}
