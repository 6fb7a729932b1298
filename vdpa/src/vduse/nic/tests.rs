//! The queues with a driver of this crate; a socket is the tap.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};

use super::receive::{Fault, Receive};
use super::rig::{GUEST, RING_PAGES, Rig, SIZE, frame};
use super::transmit::Transmit;
use super::*;
use crate::iova::{DeviceAddress, IovaRange, PAGE_SIZE};
use crate::memory::{AddressSpace, DeviceMemory, Mode};
use crate::netdev::{UNFILTERED, VirtioNetConfig};
use crate::ring::{DeviceQueue, Direction, DriverQueue, GuestRing, Piece, RingFeatures};

/// A ring of this format, without other features.
fn rig(packed: bool) -> Rig {
    Rig::new(RingFeatures {
        packed,
        ..RingFeatures::default()
    })
}

impl Rig {
    /// A turn of its ring as the only one.
    fn receive(&mut self, receive: &mut Receive) -> Turn {
        let mut rings = [Some(&mut self.ring)];
        let again = receive.turn(&mut rings, &self.memory, &self.tap).unwrap();
        Turn {
            again,
            interrupt: receive.take_interrupt(0),
        }
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
        let turn = Transmit::new()
            .turn(&mut rig.ring, &rig.memory, &rig.tap)
            .unwrap();
        assert!(!turn.again && turn.interrupt);
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
            let turn = Transmit::new().turn(&mut rig.ring, &rig.memory, &rig.tap);
            turn.unwrap();
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
fn a_frame_takes_as_many_buffers_as_it_needs() {
    for packed in [false, true] {
        let mut rig = rig(packed);
        let mut receive = Receive::new(1);
        receive.restart(0, true, SIZE, false);
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
        let mut receive = Receive::new(1);
        receive.restart(0, mergeable, SIZE, false);
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
    let mut receive = Receive::new(1);
    receive.restart(0, true, SIZE, false);
    let range = IovaRange::new(0, u64::MAX).unwrap();
    let space = Arc::new(AddressSpace::new(range));
    space.change(|space| space.set_mode(Mode::Identity));
    let behind = DeviceMemory::behind(Arc::clone(rig.memory.ram()), Arc::clone(&space));
    let writes = Direction::DeviceWrites;
    rig.driver.add(&[rig.piece(0, 2000, writes)]).unwrap();
    rig.peer.send(&frame(100)).unwrap();
    space.change(|space| space.set_mode(Mode::Blocked));
    let mut rings = [Some(&mut rig.ring)];
    receive.turn(&mut rings, &behind, &rig.tap).unwrap();
    assert!(receive.take_interrupt(0));
    assert_eq!(rig.driver.pop_used().unwrap().unwrap().written, 0);
}

/// Two receive queues, and a driver that fills none.
struct Two {
    rig: Rig,
    driver: DriverQueue,
    ring: DeviceQueue,
    receive: Receive,
}

impl Two {
    fn new(packed: bool) -> Self {
        let features = RingFeatures {
            packed,
            ..RingFeatures::default()
        };
        let rig = Rig::new(features);
        let (driver, ring) = rig.queue(40, features);
        let mut receive = Receive::new(2);
        receive.restart(0, true, SIZE, false);
        receive.restart(1, true, SIZE, false);
        Self {
            rig,
            driver,
            ring,
            receive,
        }
    }

    /// The driver adds buffers to a queue, and kicks it.
    fn fill(&mut self, queue: usize, count: u64) {
        for page in 0..count {
            let piece = self.rig.piece(page, 2000, Direction::DeviceWrites);
            let driver = [&mut self.rig.driver, &mut self.driver];
            driver[queue].add(&[piece]).unwrap();
        }
        self.receive.kicked(queue);
    }

    fn turn(&mut self) -> Result<bool, Fault> {
        let mut rings = [Some(&mut self.rig.ring), Some(&mut self.ring)];
        self.receive
            .turn(&mut rings, &self.rig.memory, &self.rig.tap)
    }

    /// Lengths of the frames that arrived in a queue.
    fn received(&mut self, queue: usize) -> Vec<u32> {
        let driver = [&mut self.rig.driver, &mut self.driver];
        let mut lengths = Vec::new();
        while let Some(used) = driver[queue].pop_used().unwrap() {
            lengths.push(used.written);
        }
        lengths
    }

    /// A frame of this length for a queue that has buffers.
    fn send(&mut self, queue: u64, len: usize) {
        let frame = (0..).map(|port| packet(len, port));
        let mut frame = frame.skip_while(|frame| flow::of(&frame[HEADER..]) % 2 != queue);
        self.rig.peer.send(&frame.next().unwrap()).unwrap();
    }
}

/// A frame with its header and a UDP packet from this port.
fn packet(len: usize, port: u16) -> Vec<u8> {
    let mut frame = frame(len);
    let at = HEADER + 14;
    frame[at - 2..at].copy_from_slice(&[8, 0]);
    frame[at..at + 10].copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17]);
    frame[at + 20..at + 22].copy_from_slice(&port.to_be_bytes());
    frame
}

#[test]
fn frames_arrive_in_the_queues_that_the_driver_fills() {
    for packed in [false, true] {
        let mut two = Two::new(packed);
        two.fill(0, 6);
        for (queue, len) in [(0, 100), (1, 101), (1, 102)] {
            two.send(queue, len);
        }
        assert!(!two.turn().unwrap());
        assert_eq!(two.received(0), [100, 101, 102]);
        assert!(two.receive.take_interrupt(0) && !two.receive.take_interrupt(1));
        two.fill(1, 3);
        for (queue, len) in [(1, 103), (0, 104), (1, 105)] {
            two.send(queue, len);
        }
        assert!(!two.turn().unwrap());
        assert_eq!(
            (two.received(0), two.received(1)),
            (vec![104], vec![103, 105])
        );
        assert!(two.receive.take_interrupt(0) && two.receive.take_interrupt(1));
    }
}

#[test]
fn a_queue_that_was_filled_before_keeps_its_flows() {
    let mut two = Two::new(false);
    two.receive.restart(0, true, SIZE, true);
    two.receive.restart(1, true, SIZE, true);
    two.fill(0, 2);
    two.send(1, 100);
    two.turn().unwrap();
    two.fill(1, 1);
    two.turn().unwrap();
    assert_eq!((two.received(0), two.received(1)), (vec![], vec![100]));
}

#[test]
fn a_queue_without_buffers_delays_the_others_for_a_moment() {
    for packed in [false, true] {
        let mut two = Two::new(packed);
        two.fill(0, 1);
        two.fill(1, 4);
        for (queue, len) in [(0, 100), (0, 101), (1, 102), (0, 103), (1, 104)] {
            two.send(queue, len);
        }
        let mut received = Vec::new();
        while received.len() < 2 {
            two.turn().unwrap();
            received.extend(two.received(1));
        }
        assert_eq!(received, [102, 104]);
        assert!(!two.receive.is_delayed());
        assert_eq!(two.received(0), [100]);
        // With buffers it gets frames again, in their order.
        two.fill(0, 2);
        for (queue, len) in [(0, 105), (1, 106), (0, 107)] {
            two.send(queue, len);
        }
        two.turn().unwrap();
        assert_eq!(
            (two.received(0), two.received(1)),
            (vec![105, 107], vec![106])
        );
    }
}

#[test]
fn a_frame_for_the_only_filled_queue_waits_for_a_buffer() {
    let mut two = Two::new(false);
    two.fill(0, 1);
    for len in [100, 101] {
        two.send(1, len);
    }
    for _ in 0..3 {
        two.turn().unwrap();
        assert!(!two.receive.is_delayed());
        std::thread::sleep(Duration::from_millis(2));
    }
    two.fill(0, 1);
    two.turn().unwrap();
    assert_eq!(two.received(0), [100, 101]);
}

#[test]
fn a_broken_queue_leaves_the_others_their_interrupts_and_frames() {
    let mut two = Two::new(false);
    two.fill(0, 4);
    two.fill(1, 4);
    two.turn().unwrap();
    let index = 2 + two.driver.addresses().driver.0 - GUEST;
    two.rig.buffer.write(index, &[0, 0x70]).unwrap();
    for (queue, len) in [(0, 100), (1, 101), (0, 102)] {
        two.send(queue, len);
    }
    let Err(Fault::Ring(1, _)) = two.turn() else {
        panic!("the second queue is broken");
    };
    assert!(two.receive.take_interrupt(0));
    // Without its ring, its frames go to the other one.
    let mut rings = [Some(&mut two.rig.ring), None];
    let turn = two.receive.turn(&mut rings, &two.rig.memory, &two.rig.tap);
    turn.unwrap();
    assert_eq!(two.received(0), [100, 101, 102]);
}

#[test]
fn a_flow_has_one_number() {
    // From a source port, with a payload.
    let ipv4 = |port: u16, payload: u8| {
        let mut frame = packet(100, port)[HEADER..].to_vec();
        frame[50] = payload;
        frame
    };
    let ipv6 = |port: u16, payload: u8| {
        let mut frame = frame(112)[HEADER..].to_vec();
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        frame[20] = 6;
        frame[54..56].copy_from_slice(&port.to_be_bytes());
        frame[90] = payload;
        frame
    };
    let fragment = |port, more, offset| {
        let mut frame = ipv4(port, 0);
        frame[20..22].copy_from_slice(&[more, offset]);
        flow::of(&frame)
    };
    let tagged = |tags: &[[u8; 4]], frame: &[u8]| {
        let tags = tags.concat();
        flow::of(&[&frame[..12], &tags, &frame[12..]].concat())
    };
    let mut numbers = HashSet::new();
    for port in 0..100 {
        for make in [&ipv4 as &dyn Fn(u16, u8) -> Vec<u8>, &ipv6] {
            let number = flow::of(&make(port, 1));
            assert_eq!(number, flow::of(&make(port, 2)));
            assert!(numbers.insert(number));
            let frame = make(port, 3);
            assert_eq!(number, tagged(&[[0x81, 0, 0, 9]], &frame));
            assert_eq!(
                number,
                tagged(&[[0x88, 0xa8, 0, 9], [0x81, 0, 0, 9]], &frame)
            );
        }
        // The first fragment, and one without ports.
        assert_eq!(fragment(port, 0x20, 0), fragment(0, 0, 5));
    }
    let queues: HashSet<u64> = numbers.iter().map(|number| number % 16).collect();
    assert_eq!(queues.len(), 16);
    // Other protocols have their Ethernet addresses.
    let other = frame(100);
    let [first, second] = [&other[12..], &other[13..]].map(flow::of);
    assert_ne!(first, second);
}

#[test]
fn a_configuration_has_its_pairs_and_a_mark() {
    let configuration = |pairs| Configuration {
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 9000,
        pairs,
        features: u64::MAX,
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

    #[test]
    fn any_bytes_have_a_flow(
        mut bytes in prop::collection::vec(any::<u8>(), 0..100),
        kind in 0..4,
    ) {
        let types = [[0x08, 0], [0x86, 0xdd], [0x81, 0], [0x88, 0xa8]];
        if let Some(place) = bytes.get_mut(12..14) {
            place.copy_from_slice(&types[usize::try_from(kind).unwrap()]);
        }
        prop_assert_eq!(flow::of(&bytes), flow::of(&bytes.clone()));
    }

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
            let mut receive = Receive::new(1);
            receive.restart(0, mergeable, SIZE, false);
            let mut transmit = Transmit::new();
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
                    let turn = transmit.turn(&mut rig.ring, &rig.memory, &rig.tap);
                    turn.map(drop).map_err(|error| Fault::Ring(0, error))
                } else {
                    let mut rings = [Some(&mut rig.ring)];
                    receive.turn(&mut rings, &rig.memory, &rig.tap).map(drop)
                };
                match turn {
                    Ok(()) => while rig.sent().is_some() {},
                    Err(Fault::Ring(..)) => break,
                    Err(Fault::Tap(error)) => panic!("{error}"),
                }
            }
        }
    }
}
