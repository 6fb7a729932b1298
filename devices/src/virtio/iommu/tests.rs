use std::sync::Arc;

use parking_lot::Mutex;
use vdpa::memory::Mode;

use super::recorder::{Recorder, domains};
use super::request::{Status, encode};
use super::*;
use crate::pci::PciFunction as _;
use crate::testing::{FakeDeviceMappings, FakeVectors};
use crate::virtio::pci::{KickPath, VirtioPciDevice};
use crate::virtio::userspace_queue::driver::{BUFFERS, Driver, memory, readable, writable};

const SIZE: u16 = 16;
/// Where the tests' driver wants its answers.
const ANSWERS: u64 = BUFFERS + 0x8000;
const NIC: u32 = 0x80;
const OK: u8 = 0;
const UNSUPPORTED: u8 = 2;
const INVALID: u8 = 4;
const NO_ENTRY: u8 = 6;

struct Rig {
    iommu: Iommu,
    driver: Driver,
    nic: Arc<Mutex<Recorder>>,
    next: u64,
}

impl Rig {
    fn new(size: u16) -> Self {
        let driver = Driver::new(&memory(), size);
        let mut domains = domains(true, MAPPINGS_MAX);
        let nic = Recorder::new();
        domains.add(NIC, nic.clone()).unwrap();
        let domains = Arc::new(Mutex::new(domains));
        let mut iommu = Iommu::new(Arc::clone(&driver.memory), domains);
        assert_eq!(iommu.events(&[Arc::clone(&driver.kick)]).len(), 1);
        iommu.negotiate(FEATURES).unwrap();
        iommu.activate(driver.activation(FEATURES)).unwrap();
        // The device has looked at the queue when it began.
        assert!(driver.kick.read().is_ok());
        Self {
            iommu,
            driver,
            nic,
            next: 0,
        }
    }

    /// Adds a request with `room` writable bytes; returns the address of those.
    fn add(&mut self, request: &[u8], room: u32) -> u64 {
        let (at, answer) = (BUFFERS + 128 * self.next, ANSWERS + 1024 * self.next);
        self.next += 1;
        self.driver.fill(at, request);
        self.driver.fill(answer, &[0xa5; 1024]);
        let len = u32::try_from(request.len()).unwrap();
        self.driver
            .add(&[readable(at, len), writable(answer, room)]);
        answer
    }

    fn status(&self, answer: u64) -> [u8; 4] {
        self.driver.bytes(answer, 4).try_into().unwrap()
    }

    /// Has a request served; returns its status.
    fn ask(&mut self, request: &[u8]) -> u8 {
        let answer = self.add(request, 4);
        assert_eq!(self.iommu.kicked(0), Outcome::default());
        assert_eq!(self.driver.take_used().map(|used| used.1), Some(4));
        let [status, reserved @ ..] = self.status(answer);
        assert_eq!(reserved, [0; 3]);
        status
    }
}

#[test]
fn the_requests_of_a_kick_are_answered_when_it_returns() {
    let mut rig = Rig::new(SIZE);
    let map = |first: u64| encode::map(1, [first, first + 0xfff, 0x1000], 3);
    let requests = [
        encode::attach(1, NIC, 0),
        map(0x4000),
        map(0x5000),
        encode::unmap(1, [0x4000, 0x4fff]),
    ];
    let answers = requests.map(|request| rig.add(&request, 4));
    assert_eq!(rig.iommu.kicked(0), Outcome::default());
    for (chain, answer) in (0..).zip(answers) {
        assert_eq!(rig.driver.take_used(), Some((2 * chain, 4)));
        assert_eq!(rig.status(answer), [OK, 0, 0, 0]);
    }
    let nic = rig.nic.lock();
    assert!(nic.follows() && nic.mode == Mode::Mapped);
    assert_eq!(
        (nic.sets, rig.iommu.domains.lock().counters().mappings),
        (1, 1)
    );
}

#[test]
fn each_type_has_its_answer() {
    let mut rig = Rig::new(256);
    for (request, status) in [
        (encode::map(1, [0, 0xfff, 0], 3), NO_ENTRY),
        (encode::attach(1, 0x18, 0), NO_ENTRY),
        (encode::attach(1, NIC, 0), OK),
        (encode::map(1, [0, 0xfff, 0], 4), INVALID),
        (encode::map(1, [0, 0xfff, 0], 1), OK),
        (encode::detach(2, NIC), NO_ENTRY),
        (encode::detach(1, NIC), OK),
        (vec![9, 0, 0, 0], UNSUPPORTED),
        (vec![1, 0, 0], INVALID),
        (vec![1; 100], INVALID),
        // The properties of a PROBE have no room.
        (encode::probe(NIC), INVALID),
    ] {
        assert_eq!(rig.ask(&request), status, "{request:?}");
    }
    assert_eq!(rig.nic.lock().mode, Mode::Identity);
}

#[test]
fn a_probe_fills_its_room_whatever_the_pieces() {
    let mut rig = Rig::new(SIZE);
    rig.driver.fill(BUFFERS, &encode::probe(NIC));
    rig.driver.fill(ANSWERS, &[0xa5; 1024]);
    let pieces = [
        readable(BUFFERS, 7),
        readable(BUFFERS + 7, 65),
        writable(ANSWERS, 13),
        writable(ANSWERS + 13, 501),
        writable(ANSWERS + 514, 2),
    ];
    rig.driver.add(&pieces);
    rig.iommu.kicked(0);
    assert_eq!(rig.driver.take_used(), Some((0, 516)));
    let answer = rig.driver.bytes(ANSWERS, 517);
    assert_eq!((answer[0], answer[2], answer[516]), (1, 20, 0xa5));
    assert_eq!(answer[512..516], [OK, 0, 0, 0]);
    assert!(answer[24..512].iter().all(|byte| *byte == 0));

    let answer = rig.add(&encode::probe(NIC + 1), 516);
    rig.iommu.kicked(0);
    assert_eq!(rig.driver.take_used().unwrap().1, 516);
    assert_eq!(rig.status(answer + 512), [NO_ENTRY, 0, 0, 0]);
    assert_eq!(rig.driver.bytes(answer, 512), [0; 512]);
}

#[test]
fn a_chain_without_room_for_a_status_breaks_the_queue() {
    let mut rig = Rig::new(SIZE);
    let before = rig.add(&encode::attach(1, NIC, 0), 4);
    rig.add(&encode::detach(1, NIC), 3);
    let after = rig.add(&encode::detach(1, NIC), 4);
    assert!(rig.iommu.kicked(0).needs_reset);
    // What came before is served, and nothing after it.
    assert_eq!(rig.status(before), [OK, 0, 0, 0]);
    assert_eq!(rig.status(after), [0xa5; 4]);
    assert_eq!(rig.iommu.kicked(0), Outcome::default());
    assert_eq!(rig.nic.lock().mode, Mode::Mapped);
    rig.iommu.reset();
    assert_eq!(rig.nic.lock().mode, Mode::Identity);
}

#[test]
fn the_vcpu_serves_only_so_many_requests() {
    let mut rig = Rig::new(256);
    rig.driver.fill(BUFFERS, &encode::detach(1, NIC));
    for _ in 0..REQUESTS_PER_KICK + 36 {
        rig.driver
            .add(&[readable(BUFFERS, 20), writable(ANSWERS, 4)]);
    }
    rig.driver.kick.read().unwrap();
    let served = |rig: &mut Rig| std::iter::from_fn(|| rig.driver.take_used()).count();
    assert_eq!(rig.iommu.kicked(0), Outcome::default());
    assert_eq!(served(&mut rig), REQUESTS_PER_KICK);
    // The vmm thread is woken and serves the rest.
    assert!(rig.driver.kick.read().is_ok());
    rig.iommu.process(KICK);
    assert_eq!(served(&mut rig), 36);
}

#[test]
fn a_pass_has_one_attach_as_its_last_request() {
    let mut rig = Rig::new(SIZE);
    let map = encode::map(1, [0x4000, 0x4fff, 0x1000], 3);
    let requests = [
        encode::attach(1, NIC, 0),
        map,
        encode::attach(2, NIC, 1),
        encode::attach(3, NIC, 0),
        encode::probe(NIC),
    ];
    let answers = requests.map(|request| rig.add(&request, 4));
    let queue = rig.iommu.active.as_mut().unwrap().queue().unwrap();
    let attach = |domain, bypass| Request::Attach {
        domain,
        endpoint: NIC,
        bypass,
    };
    for (count, last) in [(1, attach(1, false)), (2, attach(2, true))] {
        let (replies, requests, failure) = take(queue, &rig.driver.memory, 64);
        assert!(failure.is_none());
        assert_eq!((requests.len(), requests.last()), (count, Some(&last)));
        let statuses = rig.iommu.domains.lock().serve(&requests);
        for ((reply, request), status) in replies.iter().zip(&requests).zip(statuses) {
            reply.write(&rig.driver.memory, request, status).unwrap();
            queue.push_used(reply.chain, 4).unwrap();
        }
    }
    // One kick serves all passes.
    assert_eq!(rig.status(answers[2]), [OK, 0, 0, 0]);
    assert_eq!(rig.status(answers[3]), [0xa5; 4]);
    assert_eq!(rig.iommu.kicked(0), Outcome::default());
    assert_eq!(rig.status(answers[3]), [OK, 0, 0, 0]);
    assert_eq!(rig.status(answers[4]), [INVALID, 0, 0, 0]);
}

#[test]
fn configuration_shows_the_ranges_and_takes_bypass() {
    let mut rig = Rig::new(SIZE);
    let mut config = [0xa5; 40];
    rig.iommu.read_config(0, &mut config);
    let expected = [
        0, 0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, // page sizes
        0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, // input range
        0, 0, 0, 0, 0xff, 0xff, 0, 0, // domains
        0, 2, 0, 0, 1, 0, 0, 0, // properties, bypass
    ];
    assert_eq!(config, expected);
    for (offset, data) in [(36, &[2][..]), (37, &[0]), (36, &[0, 0]), (0, &[0])] {
        rig.iommu.write_config(offset, data);
        assert_eq!(rig.nic.lock().mode, Mode::Identity);
    }
    rig.iommu.write_config(36, &[0]);
    assert_eq!(rig.nic.lock().mode, Mode::Blocked);
    rig.iommu.reset();
    let mut bypass = [9; 2];
    rig.iommu.read_config(36, &mut bypass);
    assert_eq!((bypass, rig.nic.lock().mode), ([0, 0], Mode::Blocked));
}

#[test]
fn saves_and_restores_its_queue() {
    let mut rig = Rig::new(SIZE);
    assert_eq!(rig.ask(&encode::attach(1, NIC, 0)), OK);
    let state = rig.iommu.save().unwrap();
    let answer = rig.add(&encode::map(1, [0, 0xfff, 0], 1), 4);
    rig.iommu.kicked(0);
    assert_eq!(rig.status(answer), [0xa5; 4]);
    rig.iommu.check_state(&state).unwrap();
    let mut activation = rig.driver.activation(FEATURES);
    let mut events = rig.driver.queue();
    events.index = 1;
    activation.queues.push(events);
    rig.iommu.restore(&state, activation).unwrap();
    assert!(rig.driver.kick.read().is_ok());
    rig.iommu.process(KICK);
    assert_eq!(rig.status(answer), [OK, 0, 0, 0]);
    // The queue for events has no state.
    let call = None;
    rig.iommu
        .change(QueueChange::Call { index: 1, call })
        .unwrap();
}

/// Registers of BAR 0.
const FEATURES_SELECT: u64 = 8;
const DRIVER_FEATURES: u64 = 0xc;
const STATUS: u64 = 0x14;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_ADDRESSES: u64 = 0x20;
const NOTIFY: u64 = 0x1_0000;

#[test]
fn the_vcpu_that_kicks_finds_the_answer_when_its_store_returns() {
    let mut driver = Driver::new(&memory(), SIZE);
    let domains = Arc::new(Mutex::new(domains(true, MAPPINGS_MAX)));
    let iommu = Iommu::new(Arc::clone(&driver.memory), domains);
    let doorbells = Arc::new(FakeDeviceMappings::default());
    let vectors = FakeVectors::new(3);
    let device = VirtioPciDevice::new(Box::new(iommu), &vectors, doorbells.clone()).unwrap();
    device.bar_moved(0, Some(0xe000_0000));
    // Only the queue for events has an eventfd.
    assert_eq!(doorbells.addresses(), [0xe001_1000]);
    assert_eq!(device.describe().queues[0].kick, KickPath::Exit);

    driver.fill(BUFFERS, &encode::detach(1, NIC));
    driver.add(&[readable(BUFFERS, 20), writable(ANSWERS, 4)]);
    let write = |offset, data: &[u8]| device.write_bar(0, offset, data);
    let kick = || write(NOTIFY, &[0, 0]);
    for status in [1, 3] {
        write(STATUS, &[status]);
    }
    for half in [0u32, 1] {
        write(FEATURES_SELECT, &half.to_le_bytes());
        let features = (FEATURES >> (32 * half)) & 0xffff_ffff;
        write(DRIVER_FEATURES, &features.to_le_bytes()[..4]);
    }
    write(STATUS, &[11]);
    write(QUEUE_SIZE, &SIZE.to_le_bytes());
    let addresses = driver.addresses;
    let areas = [addresses.descriptor, addresses.driver, addresses.device];
    for (number, area) in (0..).zip(areas) {
        write(QUEUE_ADDRESSES + 8 * number, &area.0.to_le_bytes()[..4]);
    }
    write(QUEUE_ENABLE, &[1, 0]);
    // Before DRIVER_OK nothing is served.
    kick();
    assert_eq!(driver.take_used(), None);
    write(STATUS, &[15]);
    kick();
    assert_eq!(driver.take_used(), Some((0, 4)));
    assert_eq!(driver.bytes(ANSWERS, 1), [NO_ENTRY]);
    write(STATUS, &[0]);
    driver.add(&[readable(BUFFERS, 20), writable(ANSWERS, 4)]);
    kick();
    assert_eq!(driver.take_used(), None);
}

#[test]
fn a_device_that_is_not_behind_an_iommu_does_not_enter() {
    let iommu = Iommu::new(memory(), Arc::new(Mutex::new(domains(true, 1))));
    let doorbells = Arc::new(FakeDeviceMappings::default());
    let device = VirtioPciDevice::new(Box::new(iommu), &FakeVectors::new(3), doorbells);
    let device = Arc::new(device.unwrap());
    // Its own IOMMU, for instance.
    let mut domains = domains(true, 1);
    let error = domains.add(0x18, device).unwrap_err();
    assert!(error.to_string().contains("iommu=on"), "{error}");
    assert_eq!(
        domains.serve(&[Request::Probe { endpoint: 0x18 }]),
        [Status::NoEntry]
    );
}
