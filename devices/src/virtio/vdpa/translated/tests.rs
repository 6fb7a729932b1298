//! A device whose kernel neither makes a change nor undoes it: the backend is the product's, and
//! the kernel is [`fake_kernel`].

use vdpa::device::State;
use vdpa::iotlb::Access;
use vdpa::iova::PAGE_SIZE;
use vdpa::memory::{Mode, Piece};

use super::*;
use crate::virtio::backend::{Activation, Backend as _, Hardware as _};
use crate::virtio::userspace_queue::driver::{Driver, memory};
use crate::virtio::vdpa::fake_kernel::{self, FEATURES, Kernel};

/// As the backend's token.
const TOKEN_RELAY: u16 = 2;
const DRIVER_OK: u8 = 4;

struct Rig {
    kernel: Arc<parking_lot::Mutex<Kernel>>,
    backend: VdpaBackend,
    domain: Arc<AddressSpace>,
    driver: Driver,
}

fn pages(first: u64, count: u64) -> IovaRange {
    IovaRange::from_size(first * PAGE_SIZE, count * PAGE_SIZE).unwrap()
}

fn map(first: u64, count: u64) -> Change {
    let piece = Piece {
        gpa: first * PAGE_SIZE,
        access: Access::ReadWrite,
    };
    let range = pages(first, count);
    Change::Map { range, piece }
}

fn unmap(first: u64, count: u64) -> Change {
    let range = pages(first, count);
    Change::Unmap { range }
}

impl Rig {
    /// A running device in a domain with pages 0, 2, 4 and 6.
    fn new() -> Self {
        let kernel = Arc::default();
        fake_kernel::enter(&kernel);
        let driver = Driver::new(&memory(), 16);
        let mut backend = fake_kernel::open(&driver.memory);
        let domain = Arc::new(AddressSpace::new(backend.reach()));
        domain.change(|domain| {
            domain.set_mode(Mode::Mapped);
            let pages = [0, 2, 4, 6].map(|page| map(page, 1));
            domain.apply(&pages).unwrap();
        });
        backend.enter(&domain).unwrap();
        backend.negotiate(FEATURES).unwrap();
        backend.activate(driver.activation(FEATURES)).unwrap();
        let rig = Self {
            kernel,
            backend,
            domain,
            driver,
        };
        rig.check(false);
        rig
    }

    /// The kernel refuses `count` messages after `after` others.
    fn refuse(&self, after: usize, count: usize) {
        let mut kernel = self.kernel.lock();
        let first = kernel.messages + after;
        kernel.refused = first..first.saturating_add(count);
    }

    /// Whether the kernel has refused what it should.
    fn has_refused(&self) -> bool {
        let kernel = self.kernel.lock();
        kernel.messages > kernel.refused.start
    }

    /// Checks that the device has the mappings of its own space, which are those of its domain. If
    /// it is blocked, it is stopped and has none.
    fn check(&self, blocked: bool) {
        let kernel = self.kernel.lock();
        let own = self.backend.rings.memory.space().unwrap().read();
        let entries = |space: &vdpa::memory::Reader<'_>| -> Vec<_> {
            let mapped = space.mappings().iter();
            mapped
                .map(|(range, _)| (range.first(), range.size().unwrap()))
                .collect()
        };
        let mapped: Vec<_> = kernel.mapped.iter().map(|(&at, &len)| (at, len)).collect();
        assert_eq!(mapped, entries(&own));
        assert_eq!(self.backend.has_failed(), blocked);
        if blocked {
            assert_eq!((own.mode(), kernel.status), (Mode::Blocked, 0));
            assert!(mapped.is_empty());
        } else {
            assert_eq!(entries(&own), entries(&self.domain.read()));
            assert_eq!(kernel.status & DRIVER_OK, DRIVER_OK);
        }
    }

    fn restart(&mut self) {
        self.backend.reset();
        self.backend.negotiate(FEATURES).unwrap();
        let Activation { queues, .. } = self.driver.activation(FEATURES);
        let features = FEATURES;
        self.backend
            .activate(Activation { features, queues })
            .unwrap();
    }
}

#[test]
fn a_change_that_cannot_be_undone_stops_the_device_until_its_reset() {
    let changes = [unmap(0, 3), map(8, 2), map(1, 1)];
    let (mut undone, mut blocked, mut lost) = (0, 0, 0);
    for after in 0.. {
        for count in 1..5 {
            let mut rig = Rig::new();
            rig.refuse(after, count);
            let done = Translated::change(&mut rig.backend, &changes);
            if !rig.has_refused() {
                done.unwrap();
                println!("{undone} undone, {blocked} blocked, {lost} lost");
                assert!(undone > 3 && blocked > 3 && lost > 0);
                return;
            }
            done.unwrap_err();
            let needs_reset = rig.backend.process(TOKEN_RELAY).needs_reset;
            assert_eq!(needs_reset, rig.backend.has_failed());
            if rig.backend.rings.device.state() == State::Lost {
                // Its mappings could not be removed either.
                assert!(needs_reset && rig.kernel.lock().status == 0);
                lost += 1;
                continue;
            }
            rig.check(needs_reset);
            if !needs_reset {
                // One refusal at most: undoing succeeded.
                undone += 1;
                continue;
            }
            blocked += 1;
            // The domain changes, which the device follows after its reset only.
            let messages = rig.kernel.lock().messages;
            let later = [unmap(4, 1), map(12, 3)];
            rig.domain.change(|domain| domain.apply(&later).unwrap());
            Translated::change(&mut rig.backend, &later).unwrap();
            assert_eq!(rig.kernel.lock().messages, messages);
            rig.check(true);
            rig.restart();
            rig.check(false);
        }
    }
}

#[test]
fn a_device_that_keeps_a_mapping_leaves_stopped() {
    // The first INVALIDATE, or all of them: then the device is given up.
    for count in [1, usize::MAX / 2] {
        let mut rig = Rig::new();
        rig.refuse(0, count);
        rig.backend.leave().unwrap();
        assert!(rig.has_refused());
        assert!(rig.backend.process(TOKEN_RELAY).needs_reset && rig.backend.has_failed());
        assert_eq!(rig.kernel.lock().status, 0);
        let own = rig.backend.rings.memory.space().unwrap().read().mode();
        assert_eq!(own, Mode::Blocked);
        rig.kernel.lock().refused = 0..0;
        rig.backend.reset();
        let negotiated = rig.backend.negotiate(FEATURES);
        assert_eq!(negotiated.is_ok(), count == 1, "{negotiated:?}");
        // Without a domain it reaches nothing; a lost device keeps what the kernel did not remove.
        assert_eq!(rig.kernel.lock().mapped.is_empty(), count == 1);
    }
}
