//! The queues with a driver of this crate; a socket is the tap.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use proptest::prelude::*;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};

use super::in_flight::InFlight;
use super::receive::{Fault, Receive};
use super::rig::{GUEST, RING_PAGES, Rig, SIZE, frame, in_flight, in_flight_file};
use super::transmit::Transmit;
use super::*;
use crate::iova::{DeviceAddress, IovaRange, PAGE_SIZE};
use crate::memory::{AddressSpace, DeviceMemory, Mode};
use crate::netdev::{UNFILTERED, VirtioNetConfig};
use crate::ring::{DeviceQueue, Direction, GuestRing, Piece, RingFeatures};

/// A ring of this format, without other features.
fn rig(packed: bool) -> Rig {
    Rig::new(RingFeatures {
        packed,
        ..RingFeatures::default()
    })
}

impl Rig {
    fn receive(&mut self, receive: &mut Receive) -> Turn {
        let turn = receive.turn(&mut self.ring, &self.memory, &mut self.tap);
        turn.unwrap()
    }

    /// Turns of a transmit queue until the driver has no more frames. Each of these drivers wants
    /// an interrupt for each frame, so a turn passes one.
    fn transmit(&mut self, transmit: &mut Transmit, arms: bool) -> usize {
        let turns = std::iter::from_fn(|| {
            let turn = transmit.turn(&mut self.ring, &self.memory, &mut self.tap, arms);
            let turn = turn.unwrap();
            assert_eq!((turn.found, turn.again), (turn.interrupt, turn.interrupt));
            turn.again.then_some(())
        });
        turns.count()
    }
}

#[test]
fn a_frame_of_several_pieces_is_sent_and_unusable_ones_are_returned() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        let content = frame(6000);
        rig.buffer.write(RING_PAGES * PAGE_SIZE, &content).unwrap();
        let reads = Direction::DeviceReads;
        let next = Piece {
            iova: DeviceAddress(GUEST + RING_PAGES * PAGE_SIZE + 12),
            len: 5988,
            direction: reads,
        };
        let header = rig.piece(0, 12, reads);
        for chain in [
            &[header, next][..],
            // A header alone, a buffer for the device, and more than any frame.
            &[header],
            &[rig.piece(0, 100, Direction::DeviceWrites)],
            &[rig.piece(0, 40_000, reads), rig.piece(20, 40_000, reads)],
            &[rig.piece(0, 60, reads)],
        ] {
            rig.driver.add(chain).unwrap();
        }
        assert_eq!(rig.transmit(&mut Transmit::new(in_flight()), true), 5);
        assert_eq!(rig.sent().unwrap(), content);
        assert_eq!(rig.sent().unwrap(), content[..60]);
        assert_eq!(rig.sent(), None);
        for _ in 0..5 {
            assert_eq!(rig.driver.pop_used().unwrap().unwrap().written, 0);
        }
    }
}

#[test]
fn a_successor_begins_where_the_ring_is() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        let reads = Direction::DeviceReads;
        let mut seen = Vec::new();
        // The ring wraps more than once. Each round ends like a killed process: it passes nothing
        // on.
        for round in 0..5_u32 {
            for number in 0..6 {
                let len = 60 + round * 10 + number;
                rig.driver.add(&[rig.piece(0, len, reads)]).unwrap();
                seen.push(len as usize);
            }
            let features = RingFeatures {
                packed,
                ..RingFeatures::default()
            };
            let addresses = rig.driver.addresses();
            let ring = GuestRing::new(rig.memory.clone(), SIZE, addresses, features).unwrap();
            let base = ring.used_position().unwrap();
            rig.ring = DeviceQueue::new(ring, base, features).unwrap();
            assert_eq!(
                rig.transmit(&mut Transmit::new(in_flight()), true),
                seen.len()
            );
            for len in seen.drain(..) {
                assert_eq!(rig.sent().unwrap().len(), len);
                rig.driver.pop_used().unwrap().unwrap();
            }
            assert_eq!(rig.sent(), None);
            assert_eq!(rig.driver.pop_used().unwrap(), None);
        }
    }
}

#[test]
fn a_successor_does_not_send_a_frame_again() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        let file = in_flight_file();
        // The ring wraps several times. Each process is killed after it has sent its third frame,
        // whose chain it has not returned.
        for _ in 0..9 {
            let record = || InFlight::new(file.as_fd(), 0).unwrap();
            let mut transmit = Transmit::new(record());
            for number in 0..5 {
                let piece = rig.piece(0, 60 + number, Direction::DeviceReads);
                rig.driver.add(&[piece]).unwrap();
            }
            for _ in 0..2 {
                let turn = transmit.turn(&mut rig.ring, &rig.memory, &mut rig.tap, true);
                assert!(turn.unwrap().found);
                rig.sent().unwrap();
            }
            record().set(rig.ring.positions().1);

            let mut successor = Transmit::new(record());
            successor.resume();
            assert_eq!(rig.transmit(&mut successor, true), 3);
            assert_eq!(rig.sent().unwrap().len(), 63);
            assert_eq!(rig.sent().unwrap().len(), 64);
            assert_eq!(rig.sent(), None);
            for _ in 0..5 {
                assert_eq!(rig.driver.pop_used().unwrap().unwrap().written, 0);
            }
            // The next one of a process that was not in the middle of a frame sends all.
            let mut successor = Transmit::new(record());
            successor.resume();
            let piece = rig.piece(0, 60, Direction::DeviceReads);
            rig.driver.add(&[piece]).unwrap();
            assert_eq!(rig.transmit(&mut successor, true), 1);
            assert_eq!(rig.sent().unwrap().len(), 60);
            rig.driver.pop_used().unwrap().unwrap();
            // A reset ends the record.
            successor.stop();
            assert_eq!(record().position(), None);
        }
    }
}

#[test]
fn a_frame_takes_as_many_buffers_as_it_needs() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        let mut receive = Receive::new();
        receive.restart(true, SIZE, false);
        rig.peer.send(&frame(5000)).unwrap();
        rig.peer.send(&frame(100)).unwrap();
        let writes = Direction::DeviceWrites;
        for page in 0..2 {
            rig.driver.add(&[rig.piece(page, 2000, writes)]).unwrap();
        }
        let turn = rig.receive(&mut receive);
        assert!(!turn.again && !turn.interrupt);
        // Nothing is shown until there is room for all, even if the ring moves meanwhile.
        assert_eq!(rig.driver.pop_used().unwrap(), None);
        assert!(rig.driver.needs_kick().unwrap());
        for page in 2..4 {
            rig.driver.add(&[rig.piece(page, 2000, writes)]).unwrap();
        }
        let turn = rig.receive(&mut receive);
        assert!(!turn.again && turn.interrupt);
        let mut expected = frame(5000);
        expected[10] = 3;
        let received: Vec<u8> = (0..3)
            .flat_map(|page| {
                let used = rig.driver.pop_used().unwrap().unwrap();
                rig.bytes(page, used.written as usize)
            })
            .collect();
        assert!(received == expected);
        assert_eq!(rig.driver.pop_used().unwrap().unwrap().written, 100);
        let mut expected = frame(100);
        expected[10] = 1;
        assert_eq!(rig.bytes(3, 100), expected);
        assert_eq!(rig.driver.pop_used().unwrap(), None);
    }
}

#[test]
fn a_frame_that_never_fits_is_dropped_and_the_next_one_arrives() {
    for (packed, mergeable) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut rig = rig(packed);
        let mut receive = Receive::new();
        receive.restart(mergeable, SIZE, false);
        // Chains of two pieces, which fill the ring.
        for page in (0..u64::from(SIZE)).step_by(2) {
            let pieces = [page, page + 1];
            let pieces = pieces.map(|page| rig.piece(page, 100, Direction::DeviceWrites));
            rig.driver.add(&pieces).unwrap();
        }
        for len in [1800, 5, 12, 150] {
            rig.peer.send(&frame(len)).unwrap();
        }
        assert!(!rig.receive(&mut receive).again);
        assert_eq!(rig.driver.pop_used().unwrap().unwrap().written, 150);
        assert_eq!(rig.driver.pop_used().unwrap(), None);
    }
}

#[test]
fn buffers_that_the_driver_unmaps_are_returned_empty() {
    let mut rig = rig(false);
    let mut receive = Receive::new();
    receive.restart(true, SIZE, false);
    let range = IovaRange::new(0, u64::MAX).unwrap();
    let space = Arc::new(AddressSpace::new(range));
    space.change(|space| space.set_mode(Mode::Identity));
    let behind = DeviceMemory::behind(Arc::clone(rig.memory.ram()), Arc::clone(&space));
    let writes = Direction::DeviceWrites;
    rig.driver.add(&[rig.piece(0, 2000, writes)]).unwrap();
    rig.peer.send(&frame(100)).unwrap();
    space.change(|space| space.set_mode(Mode::Blocked));
    let turn = receive.turn(&mut rig.ring, &behind, &mut rig.tap).unwrap();
    assert!(turn.interrupt);
    assert_eq!(rig.driver.pop_used().unwrap().unwrap().written, 0);
}

#[test]
fn a_queue_is_in_use_from_its_first_buffer_to_a_reset() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        let mut receive = Receive::new();
        receive.restart(true, SIZE, false);
        assert!(!receive.is_in_use(&mut rig.ring).unwrap());
        let piece = rig.piece(0, 2000, Direction::DeviceWrites);
        rig.driver.add(&[piece]).unwrap();
        assert!(rig.driver.needs_kick().unwrap());
        receive.kicked();
        assert!(receive.is_in_use(&mut rig.ring).unwrap());
        // Also when its buffers are used up, in other memory, and after another process.
        rig.peer.send(&frame(100)).unwrap();
        assert!(rig.receive(&mut receive).found);
        receive.restart(true, SIZE, false);
        assert!(receive.is_in_use(&mut rig.ring).unwrap());
        receive.stop();
        assert!(!receive.is_in_use(&mut rig.ring).unwrap());
        receive.restart(true, SIZE, true);
        assert!(receive.is_in_use(&mut rig.ring).unwrap());
    }
}

#[test]
fn a_frame_waits_for_a_buffer() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        let mut receive = Receive::new();
        receive.restart(true, SIZE, false);
        for len in [100, 101] {
            rig.peer.send(&frame(len)).unwrap();
        }
        for len in [100, 101] {
            let turn = rig.receive(&mut receive);
            assert!(!turn.found && !turn.again);
            let piece = rig.piece(0, 2000, Direction::DeviceWrites);
            rig.driver.add(&[piece]).unwrap();
            assert!(rig.driver.needs_kick().unwrap());
            assert!(rig.receive(&mut receive).found);
            assert_eq!(rig.driver.pop_used().unwrap().unwrap().written, len);
        }
    }
}

#[test]
fn the_driver_kicks_no_thread_that_polls() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        let mut transmit = Transmit::new(in_flight());
        for arms in [false, true, false] {
            let piece = rig.piece(0, 60, Direction::DeviceReads);
            rig.driver.add(&[piece]).unwrap();
            assert_eq!(rig.transmit(&mut transmit, arms), 1);
            assert!(rig.sent().is_some());
            rig.driver.pop_used().unwrap().unwrap();
            assert_eq!(rig.transmit(&mut transmit, arms), 0);
            let piece = rig.piece(0, 60, Direction::DeviceReads);
            rig.driver.add(&[piece]).unwrap();
            assert_eq!(rig.driver.needs_kick().unwrap(), arms);
            assert_eq!(rig.transmit(&mut transmit, arms), 1);
            assert!(rig.sent().is_some());
            rig.driver.pop_used().unwrap().unwrap();
        }
    }
}

#[test]
fn a_turn_ends_after_long_frames() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        rig.driver.set_interrupts(false).unwrap();
        for _ in 0..4 {
            let piece = rig.piece(0, 30_000, Direction::DeviceReads);
            rig.driver.add(&[piece]).unwrap();
        }
        let mut transmit = Transmit::new(in_flight());
        for (frames, again) in [(3, true), (1, false)] {
            let turn = transmit.turn(&mut rig.ring, &rig.memory, &mut rig.tap, true);
            let turn = turn.unwrap();
            assert_eq!((turn.again, turn.interrupt), (again, false));
            let sent = std::iter::from_fn(|| rig.sent());
            assert_eq!(sent.count(), frames);
        }
    }
}

#[test]
fn a_configuration_has_its_pairs_and_a_mark() {
    let configuration = |pairs| Configuration {
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 9000,
        pairs,
        features: u64::MAX,
        poll_percent: 0,
    };
    for pairs in [1, 3, PAIRS_MAX] {
        let description = configuration(pairs).description().unwrap();
        assert_eq!(description.queues, vec![256; 2 * usize::from(pairs)]);
        let (config, mark) = description.config.split_first_chunk().unwrap();
        let config = VirtioNetConfig::of(*config);
        assert_eq!(config.max_virtqueue_pairs.get(), pairs);
        assert_eq!(config.mtu.get(), 9000);
        assert_eq!(mark, UNFILTERED);
        let control = 1 << VIRTIO_NET_F_MQ | 1 << VIRTIO_NET_F_CTRL_VQ;
        assert_eq!(description.features & control, 0);
    }
    for pairs in [0, PAIRS_MAX + 1] {
        configuration(pairs).description().unwrap_err();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The driver writes anything into its ring: the queue is served or stops.
    #[test]
    fn a_hostile_ring_stops_at_worst(
        packed: bool,
        mergeable: bool,
        words in prop::collection::vec((0..RING_PAGES * PAGE_SIZE / 2, any::<u16>()), 1..200),
        lens in prop::collection::vec(1..3000_usize, 4),
    ) {
        for transmits in [false, true] {
            let mut rig = rig(packed);
            let mut receive = Receive::new();
            receive.restart(mergeable, SIZE, false);
            let mut transmit = Transmit::new(in_flight());
            for part in words.chunks(40) {
                for len in &lens {
                    let _ = rig.peer.send(&vec![1; *len]);
                }
                for (at, word) in part {
                    // Some of them are likely: small numbers, and the addresses of buffers.
                    rig.buffer.write(at * 2 % (8 * PAGE_SIZE), &word.to_le_bytes()).unwrap();
                    let index = 2 + rig.driver.addresses().driver.0 - GUEST;
                    rig.buffer.write(index, &(word % 9).to_le_bytes()).unwrap();
                }
                let turn = if transmits {
                    let turn = transmit.turn(&mut rig.ring, &rig.memory, &mut rig.tap, true);
                    turn.map_err(Fault::Ring)
                } else {
                    receive.turn(&mut rig.ring, &rig.memory, &mut rig.tap)
                };
                match turn {
                    Ok(_) => while rig.sent().is_some() {},
                    Err(Fault::Ring(_)) => break,
                    Err(Fault::Tap(error)) => panic!("{error}"),
                }
            }
        }
    }
}
