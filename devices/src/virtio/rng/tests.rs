use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use vdpa::iotlb::Access;
use vdpa::iova::{IovaRange, PAGE_SIZE};
use vdpa::memory::{AddressSpace, Change, Mode, Piece};

use super::super::userspace_queue::driver::{BUFFERS, Driver, RAM, memory, readable, writable};
use super::*;

const SIZE: u16 = 16;

fn running() -> (Rng, Driver) {
    running_with(SIZE)
}

fn running_with(size: u16) -> (Rng, Driver) {
    let driver = Driver::new(&memory(), size);
    let mut rng = Rng::new(Arc::clone(&driver.memory));
    let events = rng.events(&[Arc::clone(&driver.kick)]);
    assert_eq!(events.len(), 1);
    rng.negotiate(FEATURES).unwrap();
    rng.activate(driver.activation(FEATURES)).unwrap();
    (rng, driver)
}

#[test]
fn behind_an_iommu_it_reaches_only_its_domain() {
    let ram = memory();
    let mut driver = Driver::new(&ram, SIZE);
    let own = Arc::new(AddressSpace::new(IovaRange::ALL));
    let mut rng = Rng::new(DeviceMemory::behind(Arc::clone(&ram), own));
    rng.events(&[Arc::clone(&driver.kick)]);
    let features = rng.features();
    rng.negotiate(FEATURES).unwrap_err();
    rng.negotiate(features).unwrap();

    let domain = AddressSpace::new(IovaRange::ALL);
    let page = |address| IovaRange::from_size(address, PAGE_SIZE).unwrap();
    domain.change(|domain| {
        domain.set_mode(Mode::Mapped);
        for gpa in (0..BUFFERS).step_by(4096) {
            let access = Access::ReadWrite;
            domain.map(page(gpa), Piece { gpa, access }).unwrap();
        }
    });
    let domain = Arc::new(domain);
    rng.translated().unwrap().enter(&domain).unwrap();
    rng.activate(driver.activation(features)).unwrap();
    let (gpa, access) = (BUFFERS + 0x5000, Access::WriteOnly);
    let piece = Piece { gpa, access };
    let range = page(1 << 40);
    let map = Change::Map { range, piece };
    rng.translated().unwrap().change(&[map]).unwrap();
    // The second page is not mapped: the device fills as much as it can.
    driver.add(&[
        writable((1 << 40) + 0xfe0, 32),
        writable((1 << 40) + 0x1000, 32),
    ]);
    assert_eq!(rng.process(KICK), Outcome::default());
    assert_eq!(driver.take_used(), Some((0, 32)));
    assert_ne!(driver.bytes(gpa + 0xfe0, 32), [0; 32]);
    let unmap = Change::Unmap { range };
    rng.translated().unwrap().change(&[unmap]).unwrap();
    driver.clean();
    driver.add(&[writable(1 << 40, 32)]);
    assert_eq!(rng.process(KICK), Outcome::default());
    assert_eq!(driver.take_used(), Some((2, 0)));
    assert!(!driver.dirty(gpa));

    // A ring that is not mapped is broken, until the driver starts the device.
    rng.translated().unwrap().block();
    rng.translated().unwrap().change(&[map]).unwrap();
    driver.add(&[writable(1 << 40, 32)]);
    assert!(rng.process(KICK).needs_reset);
    rng.reset();
    domain.change(|domain| domain.map(range, piece).unwrap());
    rng.activate(driver.activation(features)).unwrap();
    assert_eq!(rng.process(KICK), Outcome::default());
    // It begins at the start of the ring; this is the third chain.
    assert_eq!(driver.take_used(), Some((3, 32)));
    rng.translated().unwrap().leave().unwrap();
    driver.add(&[writable(1 << 40, 32)]);
    assert!(rng.process(KICK).needs_reset);
    assert!(Rng::new(ram).translated().is_none());
}

#[test]
fn fills_buffers_and_marks_them_dirty() {
    let (mut rng, mut driver) = running();
    let next_page = BUFFERS + 0x1000;
    let head = driver.add(&[writable(BUFFERS, 32), writable(next_page, 32)]);
    driver.clean();
    assert_eq!(rng.process(KICK), Outcome::default());
    assert_eq!(driver.take_used(), Some((u32::from(head), 64)));
    assert!(driver.interrupted());
    assert_ne!(driver.bytes(BUFFERS, 32), [0; 32]);
    assert_ne!(driver.bytes(BUFFERS, 32), driver.bytes(next_page, 32));
    assert_eq!(driver.bytes(BUFFERS + 32, 32), [0; 32]);
    assert!(driver.dirty(BUFFERS) && driver.dirty(next_page));
    assert!(!driver.dirty(next_page + 0x1000));
    // A spurious wake-up does not block, although the driver's eventfd is blocking.
    assert_eq!(rng.process(KICK), Outcome::default());
}

#[test]
fn bounds_the_bytes_and_the_requests() {
    let (mut rng, mut driver) = running();
    driver.add(&[readable(BUFFERS, 8), writable(BUFFERS, 0x40000)]);
    driver.add(&[readable(BUFFERS, 8)]);
    rng.process(KICK);
    assert_eq!(driver.take_used(), Some((0, 4096)));
    assert_eq!(driver.take_used(), Some((2, 0)));

    // More requests than one turn serves: the device kicks itself.
    let (mut rng, mut driver) = running_with(256);
    for _ in 0..100 {
        driver.add(&[writable(BUFFERS, 1)]);
    }
    rng.process(KICK);
    let mut served = 0;
    while driver.take_used().is_some() {
        served += 1;
    }
    assert_eq!(served, REQUESTS_PER_TURN);
    assert!(driver.kick.read().is_ok());
    rng.process(KICK);
    while driver.take_used().is_some() {
        served += 1;
    }
    assert_eq!(served, 100);
    assert!(driver.kick.read().is_err());
}

#[test]
fn a_broken_ring_needs_a_reset_once() {
    let (mut rng, mut driver) = running();
    driver.set_avail_index(SIZE + 1);
    assert!(rng.process(KICK).needs_reset);
    assert!(!rng.process(KICK).needs_reset);
    // It does not kick itself for ever.
    assert!(driver.kick.read().is_err());
    rng.reset();
    driver.set_avail_index(0);
    rng.activate(driver.activation(FEATURES)).unwrap();
    driver.add(&[writable(BUFFERS, 8)]);
    assert!(!rng.process(KICK).needs_reset);
    assert_eq!(driver.take_used(), Some((0, 8)));
}

#[test]
fn nothing_happens_after_a_reset() {
    let (mut rng, mut driver) = running();
    driver.add(&[writable(BUFFERS, 8)]);
    rng.reset();
    assert_eq!(rng.process(KICK), Outcome::default());
    assert_eq!(driver.take_used(), None);
}

#[test]
fn refuses_wrong_features_and_queues() {
    let (mut rng, driver) = running();
    assert!(rng.negotiate(1 << VIRTIO_F_VERSION_1 | 1).is_err());
    assert!(rng.negotiate(0).is_err());
    assert!(rng.change(QueueChange::Enable(driver.queue())).is_err());
    assert!(
        rng.change(QueueChange::Call {
            index: 1,
            call: None
        })
        .is_err()
    );
    assert!(rng.activate(driver.activation(FEATURES)).is_err());
    rng.reset();
    let mut twice = driver.activation(FEATURES);
    twice.queues.push(driver.queue());
    assert!(rng.activate(twice).is_err());
    let mut other = driver.activation(FEATURES);
    other.queues[0].index = 7;
    assert!(rng.activate(other).is_err());
}

#[test]
fn late_enable_and_new_vectors() {
    let mut driver = Driver::new(&memory(), SIZE);
    let mut rng = Rng::new(Arc::clone(&driver.memory));
    rng.events(&[Arc::clone(&driver.kick)]);
    rng.activate(Activation {
        features: FEATURES,
        queues: Vec::new(),
    })
    .unwrap();
    driver.add(&[writable(BUFFERS, 8)]);
    rng.process(KICK);
    assert_eq!(driver.take_used(), None);
    rng.change(QueueChange::Enable(driver.queue())).unwrap();
    rng.process(KICK);
    assert_eq!(driver.take_used(), Some((0, 8)));
    let other = Arc::new(vdpa::eventfd::new().unwrap());
    rng.change(QueueChange::Call {
        index: 0,
        call: Some(Arc::clone(&other)),
    })
    .unwrap();
    assert_eq!(other.read().unwrap(), 1);
}

#[test]
fn saves_and_restores() {
    let (mut rng, mut driver) = running();
    driver.add(&[writable(BUFFERS, 8)]);
    rng.process(KICK);
    driver.take_used().unwrap();
    let head = driver.add(&[writable(BUFFERS, 8)]);
    let state = rng.save().unwrap();
    // Stopped: the pending kick has no effect.
    rng.process(KICK);
    assert_eq!(driver.take_used(), None);

    let mut other = Rng::new(Arc::clone(&driver.memory));
    other.events(&[Arc::clone(&driver.kick)]);
    other.restore(&state, driver.activation(FEATURES)).unwrap();
    other.process(KICK);
    assert_eq!(driver.take_used(), Some((u32::from(head), 8)));

    // Other features, or no queue: the state does not match this transport.
    other.reset();
    let plain = driver.activation(1 << VIRTIO_F_VERSION_1);
    assert!(other.restore(&state, plain).is_err());
    let mut none = driver.activation(FEATURES);
    none.queues.clear();
    assert!(other.restore(&state, none).is_err());

    // An inactive device.
    let state = Rng::new(memory()).save().unwrap();
    other.restore(&state, driver.activation(FEATURES)).unwrap();
    assert!(other.active.is_none());
}

proptest! {
    #[test]
    fn hostile_states_are_refused(
        payload in proptest::collection::vec(any::<u8>(), 0..40),
        version in 0..3u32,
    ) {
        let driver = Driver::new(&memory(), SIZE);
        let mut rng = Rng::new(Arc::clone(&driver.memory));
        let state = SavedState { name: STATE_NAME.to_owned(), version, payload };
        // For all input: no panic; and if it is accepted, the indices are consistent.
        if rng.restore(&state, driver.activation(FEATURES)).is_ok() {
            prop_assert_eq!(version, STATE_VERSION);
        }
    }

    #[test]
    fn arbitrary_ring_memory_is_harmless(
        image in proptest::collection::vec(any::<u8>(), 0x3000),
        avail in 0..=SIZE,
    ) {
        let (mut rng, mut driver) = running();
        // The rings hold random bytes; then the avail index is plausible.
        driver.fill(0x1000, &image);
        driver.fill(0x4000, &image);
        driver.fill(0x6000, &image);
        driver.set_avail_index(avail);
        for _ in 0..4 {
            rng.process(KICK);
        }
        prop_assert!(driver.bytes(RAM as u64 - 8, 8).len() == 8);
    }
}
