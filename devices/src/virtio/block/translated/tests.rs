use std::fs::File;
use std::io::Write as _;
use std::thread;
use std::time::Instant;

use proptest::prelude::*;
use vdpa::iotlb::Access;
use vdpa::iova::PAGE_SIZE;
use vdpa::memory::{DeviceMemory, Mode, Piece};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtio_bindings::virtio_config::VIRTIO_F_ACCESS_PLATFORM;

use super::super::disk::Disk;
use super::super::tests::{COMPLETION, HEADER, KICK, SECTORS, SIZE, STATUS, completes, stuck_over};
use super::*;
use crate::ErrorKind;
use crate::virtio::backend::Outcome;
use crate::virtio::userspace_queue::driver::{
    BUFFERS, Buffer, Driver, RAM, memory, readable, writable,
};

/// Device addresses of the tests' data, which are no guest-physical ones.
const DEVICE: u64 = 1 << 40;
/// Their target.
const TARGET: u64 = BUFFERS + 0x1_0000;

fn page(number: u64) -> IovaRange {
    IovaRange::from_size(DEVICE + number * PAGE_SIZE, PAGE_SIZE).unwrap()
}

fn map(number: u64, target: u64, access: Access) -> Change {
    let gpa = TARGET + target * PAGE_SIZE;
    let (range, piece) = (page(number), Piece { gpa, access });
    Change::Map { range, piece }
}

fn unmap(number: u64) -> Change {
    let range = page(number);
    Change::Unmap { range }
}

/// A domain with the pages of rings, headers and status bytes at their guest-physical addresses,
/// and one page of data.
fn domain() -> Arc<AddressSpace> {
    let space = AddressSpace::new(IovaRange::ALL);
    space.change(|space| {
        space.set_mode(Mode::Mapped);
        for gpa in (0..BUFFERS + PAGE_SIZE).step_by(4096) {
            let (range, access) = (IovaRange::from_size(gpa, PAGE_SIZE), Access::ReadWrite);
            space.map(range.unwrap(), Piece { gpa, access }).unwrap();
        }
        space.apply(&[map(0, 0, Access::ReadWrite)]).unwrap();
    });
    Arc::new(space)
}

/// Changes the domain, then the disk, as the IOMMU does.
fn change(block: &mut Block, domain: &AddressSpace, changes: &[Change]) -> Result<(), Error> {
    domain.change(|domain| domain.apply(changes)).unwrap();
    Translated::change(block, changes)
}

struct Rig {
    block: Block,
    driver: Driver,
    storage: File,
    domain: Arc<AddressSpace>,
}

/// A disk with one request in flight, which reads a sector into the page 0. Its storage answers
/// when the test writes to `storage`.
fn in_flight() -> Rig {
    let ram = memory();
    let own = Arc::new(AddressSpace::new(IovaRange::ALL));
    let (mut block, driver, storage) =
        stuck_over(DeviceMemory::behind(Arc::clone(&ram), own), &ram);
    let domain = domain();
    block.enter(&domain).unwrap();
    let mut rig = Rig {
        block,
        driver,
        storage,
        domain,
    };
    rig.add(VIRTIO_BLK_T_IN, &[writable(DEVICE, 512)]);
    rig.driver.clean();
    rig.block.process(KICK);
    assert_eq!(rig.block.engine.in_flight(), 1);
    rig
}

impl Rig {
    fn add(&mut self, kind: u32, data: &[Buffer]) {
        self.driver.write(HEADER, kind);
        self.driver.write(STATUS, 0xffu8);
        let header = [readable(HEADER, 16)];
        let status = [writable(STATUS, 1)];
        self.driver.add(&[&header, data, &status].concat());
    }

    fn change(&mut self, changes: &[Change]) -> Result<(), Error> {
        change(&mut self.block, &self.domain, changes)
    }
}

#[test]
fn a_driver_must_accept_access_platform() {
    let mut rig = in_flight();
    rig.block.reset();
    let features = rig.block.features();
    let platform = 1 << VIRTIO_F_ACCESS_PLATFORM;
    assert_ne!(features & platform, 0);
    rig.block.negotiate(features & !platform).unwrap_err();
    rig.block.negotiate(features).unwrap();
    let (mut plain, ..) = stuck_over(Arc::clone(&rig.driver.memory).into(), &rig.driver.memory);
    assert_eq!(plain.features() & platform, 0);
    assert!(plain.translated().is_none());
}

#[test]
fn an_unmap_waits_for_the_request_that_uses_the_page() {
    let mut rig = in_flight();
    // Other pages are none of its business.
    rig.change(&[map(1, 1, Access::ReadWrite), unmap(1)])
        .unwrap();
    assert_eq!(rig.block.engine.in_flight(), 1);
    assert_eq!(rig.driver.take_used(), None);

    let begin = Instant::now();
    let mut storage = rig.storage.try_clone().unwrap();
    let answers = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        storage.write_all(&[0x5a; 512]).unwrap();
    });
    rig.change(&[unmap(0)]).unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(50));
    answers.join().unwrap();
    // The request has ended as any other.
    assert_eq!(rig.block.engine.in_flight(), 0);
    assert_eq!(rig.driver.take_used(), Some((0, 513)));
    assert_eq!(rig.driver.read::<u8>(STATUS), 0);
    assert!(rig.driver.interrupted());
    assert_eq!(rig.driver.bytes(TARGET, 512), [0x5a; 512]);
    assert!(rig.driver.dirty(TARGET));
    // The disk continues. The page is not there any more.
    rig.add(VIRTIO_BLK_T_IN, &[writable(DEVICE, 512)]);
    assert!(!rig.block.process(KICK).needs_reset);
    assert_eq!(rig.driver.read::<u8>(STATUS), 1);
    rig.block.save().unwrap();
}

#[test]
fn another_domain_waits_for_all_requests() {
    for leaves in [false, true] {
        let mut rig = in_flight();
        rig.storage.write_all(&[0x5a; 512]).unwrap();
        if leaves {
            rig.block.leave().unwrap();
        } else {
            rig.block.enter(&domain()).unwrap();
        }
        assert_eq!(rig.driver.take_used(), Some((0, 513)));
        // The ring is gone with the domain.
        rig.add(VIRTIO_BLK_T_IN, &[writable(DEVICE, 512)]);
        assert_eq!(rig.block.process(KICK).needs_reset, leaves);
    }
}

#[test]
fn requests_that_can_be_cancelled_end_with_their_mapping() {
    let mut rig = in_flight();
    rig.change(&[unmap(0)]).unwrap();
    assert_eq!(rig.block.engine.in_flight(), 0);
    assert_eq!(
        rig.block.save().unwrap_err().kind(),
        ErrorKind::BrokenRing { queue: 0 }
    );
    assert!(rig.block.process(KICK).needs_reset);
    assert!(!rig.block.process(KICK).needs_reset);
    rig.storage.write_all(&[0x5a; 512]).unwrap();
    thread::sleep(Duration::from_millis(20));
    rig.block.process(COMPLETION);
    assert_eq!(rig.driver.bytes(TARGET, 512), [0; 512]);
    assert_eq!(rig.driver.take_used(), None);
    // The next driver finds the domain as it is now.
    rig.change(&[map(5, 3, Access::ReadWrite)]).unwrap();
    rig.block.reset();
    let features = rig.block.features();
    let mut driver = Driver::new(&rig.driver.memory, SIZE);
    driver.write((driver.addresses.device + 2).0, 0u16);
    rig.block.activate(driver.activation(features)).unwrap();
    std::mem::swap(&mut rig.driver, &mut driver);
    for (number, status) in [(0, 1), (5, 0)] {
        rig.add(VIRTIO_BLK_T_IN, &[writable(page(number).first(), 512)]);
        rig.block.process(KICK);
        while rig.driver.take_used().is_none() {
            assert!(completes(&rig.block), "the request never completes");
            rig.block.process(COMPLETION);
        }
        assert_eq!(rig.driver.read::<u8>(STATUS), status);
    }
    assert_eq!(rig.driver.bytes(TARGET + 3 * PAGE_SIZE, 512), [0x5a; 512]);
}

#[test]
fn no_call_succeeds_while_hung_storage_may_write() {
    let mut rig = in_flight();
    rig.block.engine.is_hung = true;
    let begin = Instant::now();
    let error = rig.change(&[unmap(0)]).unwrap_err().to_string();
    assert!(error.contains("may still write there"), "{error}");
    assert!(begin.elapsed() >= UNMAP_TIME);
    assert!(rig.block.is_resetting());
    // It is waited for once only.
    let begin = Instant::now();
    for _ in 0..100 {
        Translated::change(&mut rig.block, &[unmap(0)]).unwrap_err();
        rig.block.enter(&domain()).unwrap_err();
        rig.block.leave().unwrap_err();
        rig.block.block();
    }
    Translated::change(&mut rig.block, &[map(1, 1, Access::ReadWrite), unmap(1)]).unwrap();
    assert!(begin.elapsed() < UNMAP_TIME);
    // The driver is notified, and its ring is not served.
    assert!(rig.driver.kick.read().is_ok());
    assert!(rig.block.process(KICK).needs_reset);
    assert_eq!(rig.block.process(KICK), Outcome::default());
    let features = rig.block.features();
    rig.block
        .activate(rig.driver.activation(features))
        .unwrap_err();

    assert!(!rig.driver.dirty(TARGET));
    rig.storage.write_all(&[0x5a; 512]).unwrap();
    while rig.block.is_resetting() {
        assert!(completes(&rig.block), "the reset never ends");
        assert!(!rig.block.process(COMPLETION).needs_reset);
    }
    // A migration finds what the kernel wrote in the end.
    assert_eq!(rig.driver.bytes(TARGET, 512), [0x5a; 512]);
    assert!(rig.driver.dirty(TARGET));
    assert_eq!(rig.driver.take_used(), None);
    Translated::change(&mut rig.block, &[unmap(0)]).unwrap();
    rig.block.leave().unwrap();
    rig.block.reset();
    rig.block.activate(rig.driver.activation(features)).unwrap();
}

#[derive(Debug, Clone)]
enum Step {
    Map(u64, u64, Access),
    Unmap(u64),
    Request {
        writes: bool,
        page: u64,
        at: u64,
        len: u32,
    },
    Kick,
    Complete,
    Leave,
    Enter,
}

fn step() -> impl Strategy<Value = Step> {
    let access = prop_oneof![
        Just(Access::ReadOnly),
        Just(Access::WriteOnly),
        Just(Access::ReadWrite)
    ];
    let request = (any::<bool>(), 0..5u64, 0..4096u64, 1..0x3000u32);
    prop_oneof![
        4 => (0..4u64, 0..8u64, access).prop_map(|(at, to, access)| Step::Map(at, to, access)),
        4 => (0..4u64).prop_map(Step::Unmap),
        4 => request.prop_map(|(writes, page, at, len)| Step::Request {
            writes,
            page,
            at: at & !511,
            len: len.next_multiple_of(512),
        }),
        4 => Just(Step::Kick),
        2 => Just(Step::Complete),
        1 => Just(Step::Leave),
        1 => Just(Step::Enter),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Pages that the guest never lets the disk write keep their contents. Those that are unmapped
    /// keep them from then on.
    #[test]
    fn only_mapped_pages_are_written(steps in prop::collection::vec(step(), 1..40)) {
        let ram = memory();
        let own = Arc::new(AddressSpace::new(IovaRange::ALL));
        let name = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = File::from(name);
        file.write_all(&vec![0xff; usize::try_from(SECTORS * 512).unwrap()]).unwrap();
        let disk = Disk::for_test(file, SECTORS);
        let memory = DeviceMemory::behind(Arc::clone(&ram), own);
        let mut block = Block::new(disk, "disk0", memory).unwrap();
        let mut driver = Driver::new(&ram, SIZE);
        block.events(&[Arc::clone(&driver.kick)]);
        let domain = domain();
        block.enter(&domain).unwrap();
        let features = block.features();
        block.activate(driver.activation(features)).unwrap();
        let mut mapped = [Some((0, Access::ReadWrite)), None, None, None];
        let targets = 8 * usize::try_from(PAGE_SIZE).unwrap();
        for step in steps {
            let before = driver.bytes(TARGET, targets);
            let is_in = block.space().is_some();
            let mut may_write: Vec<u64> = Vec::new();
            let writable_now = |mapped: &[Option<(u64, Access)>]| -> Vec<u64> {
                let mapped = mapped.iter().flatten();
                let mapped = mapped.filter(|mapped| mapped.1.allows(Access::WriteOnly));
                mapped.map(|mapped| mapped.0).collect()
            };
            if is_in {
                may_write = writable_now(&mapped);
            }
            let slot = |number: u64| usize::try_from(number).unwrap();
            match step {
                Step::Map(at, to, access) if mapped[slot(at)].is_none() => {
                    let set = [map(at, to, access)];
                    domain.change(|domain| domain.apply(&set)).unwrap();
                    if is_in {
                        Translated::change(&mut block, &set).unwrap();
                    }
                    mapped[slot(at)] = Some((to, access));
                }
                Step::Unmap(at) if mapped[slot(at)].take().is_some() => {
                    let set = [unmap(at)];
                    domain.change(|domain| domain.apply(&set)).unwrap();
                    if is_in {
                        Translated::change(&mut block, &set).unwrap();
                    }
                }
                Step::Map(..) | Step::Unmap(_) => {}
                Step::Request { writes, page: number, at, len } => {
                    driver.write(HEADER, if writes { VIRTIO_BLK_T_OUT } else { VIRTIO_BLK_T_IN });
                    let address = page(number).first() + at;
                    driver.add(&[
                        readable(HEADER, 16),
                        Buffer { address, len, writable: !writes },
                        writable(STATUS, 1),
                    ]);
                }
                Step::Kick => drop(block.process(KICK)),
                Step::Complete => drop(block.process(COMPLETION)),
                Step::Leave => block.leave().unwrap(),
                Step::Enter => block.enter(&domain).unwrap(),
            }
            let after = driver.bytes(TARGET, targets);
            let pages = before.chunks(4096).zip(after.chunks(4096));
            for (number, (before, after)) in (0..).zip(pages) {
                prop_assert!(before == after || may_write.contains(&number), "{number}");
            }
        }
        block.reset();
        prop_assert_eq!(block.engine.in_flight(), 0);
        prop_assert!(driver.bytes(RAM as u64 / 2, RAM / 2).iter().all(|&byte| byte == 0));
    }
}
