//! Tests of the driver's side against a device that writes anything.

use super::*;
use crate::iova::DeviceAddress;

/// A queue of 8 entries, and the memory that a device may write.
fn queue(features: RingFeatures) -> (DriverQueue, Arc<SharedBuffer>, PackedLayout) {
    let layout = PackedLayout::new(8).unwrap();
    let buffer = Arc::new(SharedBuffer::new(layout.size(), 0x7000_0000).unwrap());
    let queue = DriverQueue::new(Arc::clone(&buffer), 8, 0, features).unwrap();
    (queue, buffer, layout)
}

/// Writes a used descriptor at an entry, in the first lap.
fn use_at(buffer: &SharedBuffer, entry: u64, id: u16, written: u32) {
    let place = 4096 + 16 * entry;
    buffer.write(place + 8, &written.to_le_bytes()).unwrap();
    buffer.write(place + 12, &id.to_le_bytes()).unwrap();
    let flags = DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED;
    buffer
        .store_u16(flags, place + 14, Ordering::Release)
        .unwrap();
}

#[test]
fn addresses_are_those_of_the_layout() {
    let (queue, _, layout) = queue(features(false, false));
    let expected = VringAddresses {
        descriptor: DeviceAddress(0x7000_1000),
        driver: DeviceAddress(0x7000_0000),
        device: DeviceAddress(0x7000_1000 + 16 * 8),
    };
    assert_eq!(queue.addresses(), expected);
    assert_eq!((queue.size(), layout.size()), (8, 8192));
    let small = Arc::new(SharedBuffer::new(4096, 0).unwrap());
    assert!(DriverQueue::new(small, 8, 0, features(false, false)).is_err());
}

#[test]
fn descriptors_are_as_the_specification_has_them() {
    let (mut queue, buffer, _) = queue(features(false, false));
    let id = queue
        .add(&[reads(0x1111_2222_3333, 5), writes(0x4000, 6)])
        .unwrap();
    let mut bytes = [0; 32];
    buffer.read(4096, &mut bytes).unwrap();
    assert_eq!(bytes[..8], 0x1111_2222_3333u64.to_le_bytes());
    assert_eq!(bytes[8..12], 5u32.to_le_bytes());
    assert_eq!(bytes[12..14], id.to_le_bytes());
    assert_eq!(bytes[14..16], (1u16 | 1 << 7).to_le_bytes());
    assert_eq!(bytes[28..30], id.to_le_bytes());
    assert_eq!(bytes[30..32], (2u16 | 1 << 7).to_le_bytes());
}

#[test]
fn invalid_chains_are_refused() {
    let (mut queue, _, _) = queue(features(false, false));
    for chain in [
        &[][..],
        &[reads(0, 0)],
        &[writes(0, 1), reads(0, 1)],
        &[reads(u64::MAX, 2)],
        &[reads(0, u32::MAX), reads(0, 1)],
    ] {
        let error = queue.add(chain).unwrap_err().to_string();
        assert!(error.ends_with("a valid descriptor chain"), "{error}");
    }
    let full = queue.add(&[reads(0, 1); 9]).unwrap_err();
    assert!(
        full.to_string()
            .contains("8 free descriptors and 9 are needed")
    );
    queue.add(&[reads(0, 1); 8]).unwrap();
    assert_eq!(queue.free(), 0);
}

#[test]
fn in_order_one_descriptor_completes_all_before_it() {
    let (mut queue, buffer, _) = queue(features(false, true));
    let ids = [
        queue.add(&[writes(0, 100)]).unwrap(),
        queue.add(&[reads(0, 1), writes(0, 200)]).unwrap(),
        queue.add(&[writes(0, 300)]).unwrap(),
    ];
    // The element of the second chain, where the first begins.
    use_at(&buffer, 0, ids[1], 7);
    let used = |head, written| Some(Used { head, written });
    assert_eq!(queue.pop_used().unwrap(), used(ids[0], 100));
    assert!(queue.set_interrupts(true).unwrap());
    assert_eq!(queue.pop_used().unwrap(), used(ids[1], 7));
    assert_eq!(queue.pop_used().unwrap(), None);
    assert!(!queue.set_interrupts(true).unwrap());
    // The next one where the third begins: after three entries.
    use_at(&buffer, 3, ids[2], 300);
    assert_eq!(queue.pop_used().unwrap(), used(ids[2], 300));
    assert_eq!((queue.free(), queue.outstanding()), (8, 0));
}

#[test]
fn interrupts_as_they_are_asked_for() {
    for event_idx in [false, true] {
        let (mut queue, buffer, _) = queue(features(event_idx, false));
        let event = |part| buffer.load_u16(part, Ordering::Acquire).unwrap();
        assert_eq!(event(2), EVENT_FLAGS_ENABLE);
        assert!(!queue.set_interrupts(false).unwrap());
        assert_eq!(event(2), EVENT_FLAGS_DISABLE);
        let id = queue.add(&[reads(0, 1), reads(0, 1)]).unwrap();
        use_at(&buffer, 0, id, 0);
        assert!(queue.set_interrupts(true).unwrap());
        queue.pop_used().unwrap().unwrap();
        assert!(!queue.set_interrupts(true).unwrap());
        if event_idx {
            assert_eq!((event(0), event(2)), (2 | OFF_WRAP, EVENT_FLAGS_DESC));
        } else {
            assert_eq!(event(2), EVENT_FLAGS_ENABLE);
        }
    }
}

#[test]
fn kicks_as_the_device_wishes() {
    let (mut queue, buffer, layout) = queue(features(true, false));
    let ask = |off_wrap: u16, flags: u16| {
        let at = layout.device_offset;
        buffer.store_u16(off_wrap, at, Ordering::SeqCst).unwrap();
        buffer.store_u16(flags, at + 2, Ordering::SeqCst).unwrap();
    };
    assert!(!queue.needs_kick().unwrap());
    ask(1 | OFF_WRAP, EVENT_FLAGS_DESC);
    for expected in [false, true, false] {
        queue.add(&[reads(0, 1)]).unwrap();
        assert_eq!(queue.needs_kick().unwrap(), expected);
    }
    assert!(!queue.needs_kick().unwrap());
    // Past the end: the event is in the next lap.
    ask(0, EVENT_FLAGS_DESC);
    queue.add(&[reads(0, 1); 5]).unwrap();
    assert!(!queue.needs_kick().unwrap());
    ask(0, EVENT_FLAGS_DISABLE);
    assert_eq!(queue.free(), 0);
}

#[test]
fn a_violation_breaks_the_queue_for_good() {
    let broken = |in_order, id, written| {
        let (mut queue, buffer, _) = queue(features(false, in_order));
        queue.add(&[reads(0, 1), writes(0, 8)]).unwrap();
        use_at(&buffer, 0, id, written);
        let violation = queue.pop_used().unwrap_err().violation().unwrap();
        assert!(queue.pop_used().is_err() && queue.add(&[reads(0, 1)]).is_err());
        assert!(queue.needs_kick().is_err() && queue.set_interrupts(true).is_err());
        violation
    };
    for in_order in [false, true] {
        for id in [1, 7, 8, u16::MAX] {
            assert_eq!(
                broken(in_order, id, 0),
                Violation::NotOutstanding { id: u32::from(id) }
            );
        }
        for written in [9, u32::MAX] {
            let offered = 8;
            assert_eq!(
                broken(in_order, 0, written),
                Violation::TooLong { written, offered }
            );
        }
    }
    // The same chain twice.
    let (mut queue, buffer, _) = queue(features(false, false));
    (0..2).for_each(|_| {
        queue.add(&[writes(0, 1)]).unwrap();
    });
    use_at(&buffer, 0, 0, 0);
    use_at(&buffer, 1, 0, 0);
    queue.pop_used().unwrap().unwrap();
    assert!(queue.pop_used().is_err());
}

proptest! {
    /// A device that writes anything anywhere: no panic, no return of a chain that was not
    /// outstanding, none twice, never more bytes than offered.
    #[test]
    fn survives_any_device(
        (event_idx, in_order) in any::<(bool, bool)>(),
        steps in prop::collection::vec(
            (1usize..4, 0u64..8, prop_oneof![0u16..8, any::<u16>()],
             prop_oneof![0u32..64, any::<u32>()], any::<bool>(), any::<bool>()),
            1..40),
        garbage in prop::collection::vec((0u64..8192, any::<u8>()), 0..8),
    ) {
        let (mut queue, buffer, _) = queue(features(event_idx, in_order));
        let mut out = BTreeSet::new();
        for (pieces, entry, id, written, lap, scribble) in steps {
            if let Ok(id) = queue.add(&vec![writes(0x1000, 16); pieces]) {
                prop_assert!(out.insert(id), "id {} given twice", id);
            }
            let _ = queue.needs_kick();
            use_at(&buffer, entry, id, written);
            if lap {
                buffer.store_u16(0, 4096 + 16 * entry + 14, Ordering::Release).unwrap();
            }
            if scribble {
                for &(at, byte) in &garbage {
                    buffer.write(at, &[byte]).unwrap();
                }
            }
            while let Ok(Some(used)) = queue.pop_used() {
                prop_assert!(out.remove(&used.head));
                prop_assert!(used.written <= 48);
            }
            let _ = queue.set_interrupts(entry % 2 == 0);
            prop_assert!(queue.free() <= 8);
            prop_assert_eq!(usize::from(queue.outstanding()), out.len());
        }
    }
}

#[test]
fn an_indirect_table_takes_one_descriptor() {
    let layout = PackedLayout::new(8).unwrap();
    let size = layout.size() + 4096;
    let buffer = Arc::new(SharedBuffer::new(size, 0x7000_0000).unwrap());
    let features = features(false, false);
    let mut queue = DriverQueue::new(Arc::clone(&buffer), 8, 0, features).unwrap();
    let chain = [reads(0x100, 12), writes(0x300, 4)];
    queue.add_indirect(&chain, layout.size()).unwrap();
    assert_eq!(
        (queue.free(), queue.positions()),
        (7, (1 | OFF_WRAP, OFF_WRAP))
    );
    let mut bytes = [0; 32];
    buffer.read(4096, &mut bytes[..16]).unwrap();
    assert_eq!(bytes[..8], (0x7000_0000 + layout.size()).to_le_bytes());
    assert_eq!(bytes[8..12], 32u32.to_le_bytes());
    assert_eq!(bytes[14..16], (4u16 | 1 << 7).to_le_bytes());
    buffer.read(layout.size(), &mut bytes).unwrap();
    assert_eq!(
        (&bytes[12..16], &bytes[28..32]),
        (&[0; 4][..], &[0, 0, 2, 0][..])
    );
    assert!(queue.add_indirect(&chain, size).is_err());
}
