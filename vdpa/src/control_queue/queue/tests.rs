//! Tests of the queue against a model of the device's side.

use std::sync::atomic::Ordering;

use super::*;
use crate::device::QueueInfo;
use crate::iotlb::{IotlbLimits, IotlbMessage};

const IOVA: u64 = 0x7fff_c000_1000;

/// The device's side: one command, as bytes, and its answer.
struct Model {
    memory: Arc<SharedBuffer>,
    parts: Parts,
    used: u16,
}

impl Model {
    fn new(queue: &ControlQueue) -> Self {
        Self {
            memory: Arc::clone(&queue.memory),
            parts: queue.parts,
            used: 0,
        }
    }

    /// Joins the pieces that the device reads, following the ring from its addresses.
    fn command(&self, queue: &ControlQueue) -> Vec<u8> {
        let addresses = queue.vring_config().addresses;
        let at = |iova: u64| iova - IOVA;
        let slot = u64::from(self.used % RING_SIZE);
        let driver = at(addresses.driver.0);
        let load = |offset| self.memory.load_u16(offset, Ordering::Acquire).unwrap();
        assert_eq!(load(driver + 2), self.used.wrapping_add(1));
        let mut index = load(driver + 4 + 2 * slot);
        let mut bytes = Vec::new();
        loop {
            let mut descriptor = [0; 16];
            let offset = at(addresses.descriptor.0) + 16 * u64::from(index);
            self.memory.read(offset, &mut descriptor).unwrap();
            let iova = u64::from_le_bytes(descriptor[..8].try_into().unwrap());
            let len = u32::from_le_bytes(descriptor[8..12].try_into().unwrap());
            let flags = u16::from_le_bytes([descriptor[12], descriptor[13]]);
            if flags & 2 != 0 {
                assert_eq!((at(iova), len, flags & 1), (self.parts.ack, 1, 0));
                return bytes;
            }
            let mut piece = vec![0; usize::try_from(len).unwrap()];
            self.memory.read(at(iova), &mut piece).unwrap();
            bytes.extend(piece);
            index = u16::from_le_bytes([descriptor[14], descriptor[15]]);
        }
    }

    fn answer(&mut self, ack: Option<u8>, id: u32, written: u32) {
        if let Some(ack) = ack {
            self.memory.write(self.parts.ack, &[ack]).unwrap();
        }
        let used = self.parts.ring_writable;
        let slot = u64::from(self.used % RING_SIZE);
        let element = [id.to_le_bytes(), written.to_le_bytes()].concat();
        self.memory.write(used + 4 + 8 * slot, &element).unwrap();
        self.used = self.used.wrapping_add(1);
        self.memory
            .store_u16(self.used, used + 2, Ordering::Release)
            .unwrap();
    }
}

fn pair() -> (ControlQueue, Model) {
    let queue = ControlQueue::new(IOVA, RingFeatures::default()).unwrap();
    let model = Model::new(&queue);
    (queue, model)
}

const COMMAND: Command = Command::MacAddrSet([2, 0, 0, 0, 0, 9]);

#[test]
fn a_command_reaches_the_device_and_its_answer_comes_back() {
    let (mut queue, mut model) = pair();
    for round in 0..100u32 {
        queue.submit(&COMMAND).unwrap();
        assert_eq!(queue.kick.read().unwrap(), 1);
        let busy = queue.submit(&COMMAND).unwrap_err();
        assert!(busy.to_string().contains("still waits for its answer"));
        assert_eq!(model.command(&queue), COMMAND.encode().unwrap());
        assert_eq!(queue.poll().unwrap(), None);
        let id = u32::from(queue.in_flight.unwrap());
        let (ack, answer) = if round % 2 == 0 {
            (0, Answer::Ok)
        } else {
            (1, Answer::Err)
        };
        model.answer(Some(ack), id, round % 2);
        assert_eq!(queue.poll().unwrap(), Some(answer));
        assert!(!queue.is_busy());
    }
    queue.submit(&Command::AnnounceAck).unwrap();
    assert_eq!(model.command(&queue), [3, 0]);
}

#[test]
fn a_packed_ring_has_the_same_pages() {
    let [split, packed] = [RingFormat::Split, RingFormat::Packed]
        .map(|format| RingLayout::new(format, RING_SIZE).unwrap());
    assert_eq!(split.size(), packed.size());
    assert_eq!(split.writable_offset(), packed.writable_offset());
}

/// The device's side of a packed ring: answers the command in it.
fn answer_packed(queue: &ControlQueue, entry: u64, descriptors: u64, ack: u8) -> Vec<u8> {
    let place = queue.vring_config().addresses.descriptor.0 - IOVA;
    let mut command = Vec::new();
    for number in 0..descriptors {
        let mut descriptor = [0; 16];
        let at = place + 16 * ((entry + number) % u64::from(RING_SIZE));
        queue.memory.read(at, &mut descriptor).unwrap();
        let iova = u64::from_le_bytes(descriptor[..8].try_into().unwrap());
        let len = u32::from_le_bytes(descriptor[8..12].try_into().unwrap());
        let flags = u16::from_le_bytes([descriptor[14], descriptor[15]]);
        assert_eq!(flags & 1 != 0, number + 1 < descriptors);
        if flags & 2 != 0 {
            queue.memory.write(iova - IOVA, &[ack]).unwrap();
        } else {
            let mut piece = vec![0; usize::try_from(len).unwrap()];
            queue.memory.read(iova - IOVA, &mut piece).unwrap();
            command.extend(piece);
        }
    }
    // The flags that the driver wrote show which lap it is on.
    let at = place + 16 * entry;
    let flags = queue.memory.load_u16(at + 14, Ordering::Acquire).unwrap();
    let used = if flags & 1 << 7 != 0 { 0x8082 } else { 0x0002 };
    queue.memory.write(at + 8, &1u32.to_le_bytes()).unwrap();
    queue
        .memory
        .store_u16(used, at + 14, Ordering::Release)
        .unwrap();
    command
}

#[test]
fn commands_go_through_a_packed_ring_after_a_restart() {
    let (mut queue, _) = pair();
    for (event_idx, in_order) in [(false, false), (true, false), (true, true)] {
        let features = RingFeatures {
            packed: true,
            event_idx,
            in_order,
            indirect: false,
        };
        queue.restart(features).unwrap();
        let config = queue.vring_config();
        assert_eq!(config.base.to_kernel(), 0x8000_8000);
        config.check(16, true, &[queue.range()]).unwrap();
        for round in 0..50 {
            queue.submit(&COMMAND).unwrap();
            assert_eq!(queue.kick.read().unwrap(), 1);
            assert_eq!(queue.poll().unwrap(), None);
            // Three descriptors each: header, address, ack.
            let entry = 3 * round % u64::from(RING_SIZE);
            let seen = answer_packed(&queue, entry, 3, 0);
            assert_eq!(seen, COMMAND.encode().unwrap());
            assert_eq!(queue.poll().unwrap(), Some(Answer::Ok));
        }
    }
    // Back to a split ring.
    queue.restart(RingFeatures::default()).unwrap();
    assert_eq!(queue.vring_config().base.to_kernel(), 0);
    let mut model = Model::new(&queue);
    queue.submit(&COMMAND).unwrap();
    model.answer(Some(0), 0, 1);
    assert_eq!(queue.poll().unwrap(), Some(Answer::Ok));
}

#[test]
fn a_device_that_lies_is_found_out() {
    for (ack, id, written) in [
        (None, 0, 1),
        (Some(2), 0, 1),
        (Some(0xff), 0, 1),
        (Some(0), 1, 1),
        (Some(0), u32::MAX, 1),
        (Some(0), 0, 2),
    ] {
        let (mut queue, mut model) = pair();
        queue.submit(&COMMAND).unwrap();
        model.answer(ack, id, written);
        queue.poll().unwrap_err();
    }
    let (mut queue, mut model) = pair();
    model.answer(Some(0), 0, 1);
    assert!(queue.poll().is_err());
    assert!(queue.submit(&COMMAND).is_err());
}

#[test]
fn execute_waits_for_the_call_and_not_for_ever() {
    let (mut queue, mut model) = pair();
    let timeout = Duration::from_millis(20);
    let error = queue.execute(&COMMAND, timeout).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("did not answer a control command")
    );
    assert!(queue.is_busy());
    model.answer(Some(0), 0, 1);
    assert_eq!(queue.poll().unwrap(), Some(Answer::Ok));

    let call = queue.call().try_clone().unwrap();
    let device = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        model.answer(Some(1), 0, 1);
        call.write(1).unwrap();
    });
    let answer = queue.execute(&COMMAND, Duration::from_secs(60)).unwrap();
    assert_eq!(answer, Answer::Err);
    device.join().unwrap();
}

#[derive(Debug, Default)]
struct Recorder(std::cell::RefCell<Vec<IotlbMessage>>);

impl IotlbSink for &Recorder {
    fn stop(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn send(&self, message: &IotlbMessage) -> std::io::Result<()> {
        self.0.borrow_mut().push(*message);
        Ok(())
    }
}

#[test]
fn only_the_used_ring_and_the_ack_can_be_written_by_the_device() {
    let (queue, _) = pair();
    let recorder = Recorder::default();
    let limits = IotlbLimits {
        range: IovaRange::new(0, u64::MAX).unwrap(),
        address_spaces: 2,
        features: BackendFeatures::all(),
    };
    let mut iotlb = Iotlb::new(&recorder, limits);
    queue.map(&mut iotlb, 1).unwrap();
    let mut bytes = 0;
    for message in recorder.0.borrow().iter() {
        if let IotlbMessage::Update {
            iova,
            size,
            access,
            asid,
            ..
        } = *message
        {
            assert_eq!(asid, 1);
            bytes += size;
            let used = IOVA + queue.parts.ring_writable;
            let ack = IOVA + queue.parts.ack;
            let writable = access != Access::ReadOnly;
            assert_eq!(writable, iova == used || iova == ack, "{iova:#x}");
            if writable {
                assert_eq!(size, PAGE_SIZE);
            }
        }
    }
    assert_eq!(bytes, ControlQueue::memory_size().unwrap());
    let config = queue.vring_config();
    config.check(16, false, &[queue.range()]).unwrap();
    queue.unmap(&mut iotlb, 1).unwrap();
    assert_eq!(iotlb.mapped_bytes(), 0);
}

#[test]
fn isolated_only_where_the_device_can() {
    let info = |groups: [Option<u32>; 3], address_spaces| DeviceInfo {
        device_id: 1,
        features: 0,
        backend_features: BackendFeatures::all(),
        queues: groups
            .map(|group| QueueInfo {
                max_size: 256,
                group,
                descriptor_group: None,
            })
            .to_vec(),
        groups: 2,
        address_spaces,
        config_size: 0,
        iova_range: IovaRange::new(0, u64::MAX).unwrap(),
    };
    let asid = BackendFeatures::IOTLB_ASID;
    let (a, b) = (Some(0), Some(1));
    let own = Placement::OwnAddressSpace { group: 1, asid: 1 };
    let choose = |groups, spaces, acked| Placement::choose(&info(groups, spaces), acked, 2);
    assert_eq!(choose([a, a, b], 2, asid), own);
    assert_eq!(choose([a, a, b], 1, asid), Placement::Shared);
    assert_eq!(
        choose([a, a, b], 2, BackendFeatures::empty()),
        Placement::Shared
    );
    assert_eq!(choose([a, a, a], 2, asid), Placement::Shared);
    assert_eq!(choose([None; 3], 2, asid), Placement::Shared);
    assert_eq!(
        Placement::choose(&info([a, a, b], 2), asid, 3),
        Placement::Shared
    );
    // Rings that stay in another group.
    let mut split = info([a, a, b], 2);
    split.queues[2].descriptor_group = Some(0);
    assert_eq!(Placement::choose(&split, asid, 2), Placement::Shared);
    assert_eq!((own.asid(), Placement::Shared.asid()), (1, 0));
}
