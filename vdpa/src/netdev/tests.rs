//! Tests of queues against a model of the device's side of the ring.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::queue::{Parts, Virtqueue};
use super::*;
use crate::memory::SharedBuffer;
use crate::ring::{RingFeatures, RingFormat, RingLayout};

const SIZE: u16 = 8;
const SLOT: u32 = 256;

/// A queue that is alone in its memory.
fn queue(chains: Chains) -> (Virtqueue, Arc<SharedBuffer>) {
    let layout = RingLayout::new(RingFormat::Split, SIZE).unwrap();
    let parts = Parts::new(layout, SLOT, 0).unwrap();
    let memory = Arc::new(SharedBuffer::placed(parts.end, |own| own.first()).unwrap());
    let features = RingFeatures::default();
    let queue = Virtqueue::new(0, Arc::clone(&memory), parts, features, chains).unwrap();
    (queue, memory)
}

/// Writes one used element and the index into a split ring of 8 entries, as a device does.
fn give_back(memory: &SharedBuffer, position: u16, id: u32, len: u32) {
    let used = 4096;
    let element = [id.to_le_bytes(), len.to_le_bytes()].concat();
    let place = used + 4 + 8 * u64::from(position % SIZE);
    memory.write(place, &element).unwrap();
    memory
        .store_u16(position.wrapping_add(1), used + 2, Ordering::Release)
        .unwrap();
}

/// The first descriptor of the chain at a position in the avail ring.
fn available(memory: &SharedBuffer, position: u16) -> (u16, u64) {
    let entry = 16 * u64::from(SIZE) + 4 + 2 * u64::from(position % SIZE);
    let head = memory.load_u16(entry, Ordering::Acquire).unwrap();
    let mut address = [0; 8];
    memory.read(16 * u64::from(head), &mut address).unwrap();
    (head, u64::from_le_bytes(address) - memory.range().first())
}

#[test]
fn frames_pass_in_both_directions() {
    for chains in [Chains::Single, Chains::Pair, Chains::Indirect] {
        let (rx, rx_memory) = queue(chains);
        let (tx, tx_memory) = queue(chains);
        let (mut rx, mut tx) = (RxQueue::new(rx).unwrap(), TxQueue::new(tx));
        let per_ring = if chains == Chains::Pair { 4 } else { 8 };
        assert_eq!(rx.queue().outstanding(), per_ring);
        for number in 0..40u16 {
            let text = [&[7; 20][..], &number.to_le_bytes()].concat();
            assert!(tx.send(&text).unwrap());
            tx.flush().unwrap();
            // The device copies header and frame over.
            let locate = |memory: &SharedBuffer| {
                let (head, first) = available(memory, number);
                if chains != Chains::Indirect {
                    return (head, first);
                }
                let mut address = [0; 8];
                memory.read(first, &mut address).unwrap();
                (head, u64::from_le_bytes(address) - memory.range().first())
            };
            let ((sent, from), (received, to)) = (locate(&tx_memory), locate(&rx_memory));
            let mut bytes = [0; 34];
            tx_memory.read(from, &mut bytes).unwrap();
            assert_eq!(bytes[..12], [0; 12]);
            rx_memory.write(to, &bytes).unwrap();
            give_back(&tx_memory, number, u32::from(sent), 0);
            give_back(&rx_memory, number, u32::from(received), 34);
            let mut seen = Vec::new();
            let count = rx.poll(9, |frame| {
                let mut copy = [0; 64];
                seen.push(frame.copy_to(&mut copy).unwrap().to_vec());
            });
            assert_eq!((count.unwrap(), seen), (1, vec![text]));
            assert_eq!(tx.reap().unwrap(), 1);
        }
        let counters = rx.queue().counters();
        assert_eq!((counters.packets, counters.bytes), (40, 40 * 22));
        assert_eq!(tx.queue().counters().packets, 40);
        assert_eq!(tx.queue().positions(), (40, 40));
    }
}

#[test]
fn a_full_ring_and_wrong_frames_are_refused() {
    let (tx, _memory) = queue(Chains::Single);
    let mut tx = TxQueue::new(tx);
    assert_eq!(tx.frame_max(), SLOT - HEADER_LEN);
    for wrong in [0, 245] {
        let frame = vec![0; wrong];
        let error = tx.send(&frame).unwrap_err();
        assert!(error.to_string().contains("cannot send"), "{error}");
    }
    let frames = [&[1; 60][..]; 10];
    assert_eq!(tx.send_burst(frames).unwrap(), 8);
    assert!(!tx.send(&[1]).unwrap());
    // Without a doorbell the eventfd stays in use.
    assert_eq!(tx.queue_mut().set_kick_by(Kick::Doorbell), Kick::Eventfd);
    assert_eq!(tx.queue().counters().kicks, 1);
    assert!(!tx.queue_mut().clear_call().unwrap());
    tx.queue().call_event().write(1).unwrap();
    assert!(tx.queue_mut().clear_call().unwrap());
}

proptest! {
    /// Whatever a device writes, each buffer keeps its place or the ring is broken for good.
    #[test]
    fn a_hostile_device_gets_no_buffer_twice(
        steps in prop::collection::vec(
            (0u32..12, 0u32..300, any::<u16>(), any::<bool>()),
            1..40,
        ),
    ) {
        let (rx, memory) = queue(Chains::Single);
        let mut rx = RxQueue::new(rx).unwrap();
        let mut position = 0u16;
        for (id, len, index, jump) in steps {
            give_back(&memory, if jump { index } else { position }, id, len);
            position = position.wrapping_add(1);
            let mut lengths = Vec::new();
            match rx.poll(64, |frame| lengths.push(frame.len())) {
                Ok(_) => {
                    prop_assert!(lengths.iter().all(|&len| len <= 244));
                    prop_assert_eq!(rx.queue().outstanding(), SIZE);
                }
                Err(_) => {
                    prop_assert!(rx.poll(1, |_| ()).is_err());
                    prop_assert!(rx.queue_mut().enable_interrupts().is_err());
                    return Ok(());
                }
            }
        }
    }
}
