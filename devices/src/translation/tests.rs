//! The mappings of a device against a model of the kernel's table.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use proptest::prelude::*;
use vdpa::ErrorKind;
use vdpa::iotlb::{IotlbLimits, IotlbMessage, Mapping};
use vdpa::iova::PAGE_SIZE;
use vdpa::memory::SharedBuffer;
use vdpa::uapi::BackendFeatures;

use super::*;
use crate::virtio::userspace_queue::driver::{RAM, memory};

/// The kernel's mappings: first address, size and access. An overlap is an error, and removals are
/// exact.
#[derive(Debug, Default)]
struct Kernel {
    mapped: BTreeMap<u64, (u64, Access)>,
    /// Refuses the message after so many others.
    refuse_after: Option<usize>,
    /// Refuses all messages from then on.
    stays: bool,
    messages: usize,
}

#[derive(Debug, Clone, Default)]
struct Sink(Rc<RefCell<Kernel>>);

impl IotlbSink for Sink {
    fn send(&self, message: &IotlbMessage) -> io::Result<()> {
        let kernel = &mut *self.0.borrow_mut();
        if kernel.refuse_after == Some(0) {
            kernel.refuse_after = kernel.stays.then_some(0);
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        kernel.refuse_after = kernel.refuse_after.map(|after| after - 1);
        kernel.messages += 1;
        match *message {
            IotlbMessage::Update {
                iova, size, access, ..
            } => {
                let end = iova + size;
                let overlaps =
                    |(&at, &(len, _)): (&u64, &(u64, Access))| at < end && iova < at + len;
                assert!(!kernel.mapped.iter().any(overlaps));
                kernel.mapped.insert(iova, (size, access));
            }
            IotlbMessage::Invalidate { iova, size, .. } => {
                let end = iova + size;
                kernel.mapped.retain(|&at, &mut (len, _)| {
                    let inside = iova <= at && at + len <= end;
                    assert!(inside || at >= end || at + len <= iova);
                    !inside
                });
            }
            IotlbMessage::BatchBegin { .. } | IotlbMessage::BatchEnd { .. } => {}
        }
        Ok(())
    }

    fn stop(&self) -> io::Result<()> {
        Ok(())
    }
}

const REACH: u64 = (1 << 40) - 1;
/// A page of the VMM in the private window.
const WINDOW: u64 = 1 << 40;

struct Rig {
    kernel: Rc<RefCell<Kernel>>,
    iotlb: Iotlb<Sink>,
    translation: Translation,
}

impl Rig {
    fn new() -> Self {
        let sink = Sink::default();
        let kernel = Rc::clone(&sink.0);
        let limits = IotlbLimits {
            range: IovaRange::new(0, (1 << 47) - 1).unwrap(),
            address_spaces: 1,
            features: BackendFeatures::IOTLB_BATCH,
        };
        let mut iotlb = Iotlb::new(sink, limits);
        let region = Arc::new(SharedBuffer::new(PAGE_SIZE, WINDOW).unwrap());
        let own = Mapping {
            region,
            offset: 0,
            access: Access::ReadWrite,
        };
        iotlb.map(0, WINDOW, PAGE_SIZE, own).unwrap();
        let own = Arc::new(AddressSpace::new(IovaRange::new(0, REACH).unwrap()));
        Self {
            kernel,
            iotlb,
            translation: Translation::new(own, &memory()),
        }
    }

    fn enter(&mut self, domain: &Arc<AddressSpace>) -> Result<(), Error> {
        self.translation.enter(&mut self.iotlb, domain)
    }

    /// Checks that kernel and own space have the mappings of the domain, and the VMM its page.
    fn check(&self) {
        let kernel = self.kernel.borrow();
        let mut mapped = kernel.mapped.clone();
        let page = (PAGE_SIZE, Access::ReadWrite);
        assert_eq!(mapped.remove(&WINDOW), Some(page));
        let own = self.translation.own.read();
        let domain = self.translation.domain.as_ref();
        let domain = domain.filter(|_| !self.translation.blocked);
        let Some(domain) = domain.map(|domain| domain.read()) else {
            assert!(mapped.is_empty() && own.mode() == Mode::Blocked);
            return;
        };
        assert_eq!(own.mode(), domain.mode());
        assert!(own.mappings().iter().eq(domain.mappings().iter()));
        if domain.mode() == Mode::Identity {
            let half = (RAM as u64 / 2, Access::ReadWrite);
            assert_eq!(mapped, BTreeMap::from([(0, half), (half.0, half)]));
        } else {
            let expected = domain
                .mappings()
                .iter()
                .map(|(range, piece)| (range.first(), (range.size().unwrap(), piece.access)));
            assert_eq!(mapped, expected.collect());
        }
    }
}

fn space(mode: Mode) -> Arc<AddressSpace> {
    space_to(REACH, mode)
}

fn space_to(last: u64, mode: Mode) -> Arc<AddressSpace> {
    let space = AddressSpace::new(IovaRange::new(0, last).unwrap());
    space.change(|space| space.set_mode(mode));
    Arc::new(space)
}

fn page(at: u64, target: u64) -> Change {
    Change::Map {
        range: IovaRange::from_size(at * PAGE_SIZE, PAGE_SIZE).unwrap(),
        piece: Piece {
            gpa: target * PAGE_SIZE,
            access: Access::ReadOnly,
        },
    }
}

/// A domain with mappings from page 1000 on.
fn domain(pages: u64) -> Arc<AddressSpace> {
    let domain = space(Mode::Mapped);
    domain.change(|domain| {
        for number in 0..pages {
            if let Change::Map { range, piece } = page(1000 + 2 * number, number) {
                domain.map(range, piece).unwrap();
            }
        }
    });
    domain
}

#[test]
fn nothing_is_mapped_before_the_device_enters_a_space() {
    let mut rig = Rig::new();
    rig.check();
    let messages = rig.kernel.borrow().messages;
    rig.translation.clear(&mut rig.iotlb).unwrap();
    assert_eq!(rig.kernel.borrow().messages, messages);
    rig.enter(&space(Mode::Identity)).unwrap();
    rig.check();
    // From one bypass domain to another one: RAM stays mapped.
    let messages = rig.kernel.borrow().messages;
    rig.enter(&space(Mode::Identity)).unwrap();
    assert_eq!(rig.kernel.borrow().messages, messages);
    rig.enter(&domain(3)).unwrap();
    rig.check();
    rig.enter(&domain(0)).unwrap();
    rig.check();
    rig.translation.clear(&mut rig.iotlb).unwrap();
    rig.translation.domain = None;
    rig.check();
}

#[test]
fn a_space_beyond_the_reach_of_the_device_is_refused() {
    for mode in [Mode::Mapped, Mode::Identity] {
        let mut rig = Rig::new();
        rig.enter(&domain(2)).unwrap();
        let messages = rig.kernel.borrow().messages;
        let error = rig.enter(&space_to(WINDOW, mode)).unwrap_err();
        assert_ne!(error.kind(), ErrorKind::NotRolledBack);
        assert!(error.to_string().contains("0xffffffffff"), "{error}");
        assert_eq!(rig.kernel.borrow().messages, messages);
        rig.check();
        rig.enter(&space_to(REACH >> 1, mode)).unwrap();
        rig.check();
        // A blocked device does not promise it for later either.
        rig.translation.blocked = true;
        rig.enter(&space_to(WINDOW, mode)).unwrap_err();
    }
}

#[test]
fn a_refused_space_leaves_the_device_where_it_was_at_each_position() {
    for from in [space(Mode::Identity), domain(4), domain(0)] {
        for to in [space(Mode::Identity), domain(5)] {
            for position in 0.. {
                let mut rig = Rig::new();
                rig.enter(&from).unwrap();
                rig.kernel.borrow_mut().refuse_after = Some(position);
                let entered = rig.enter(&to);
                if rig.kernel.borrow().refuse_after.is_some() {
                    // The last message was before this position.
                    entered.unwrap();
                    rig.check();
                    break;
                }
                let error = entered.unwrap_err();
                assert_ne!(error.kind(), ErrorKind::NotRolledBack);
                assert!(Arc::ptr_eq(rig.translation.domain.as_ref().unwrap(), &from));
                rig.check();
            }
        }
    }
}

#[test]
fn unknown_mappings_are_reported_and_a_blocked_device_follows_its_next_start() {
    let mut rig = Rig::new();
    rig.enter(&domain(4)).unwrap();
    {
        let mut kernel = rig.kernel.borrow_mut();
        kernel.refuse_after = Some(3);
        kernel.stays = true;
    }
    let error = rig.enter(&domain(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotRolledBack);
    {
        let mut kernel = rig.kernel.borrow_mut();
        (kernel.refuse_after, kernel.stays) = (None, false);
    }
    // What the backend does then.
    rig.translation.blocked = true;
    rig.translation.clear(&mut rig.iotlb).unwrap();
    rig.check();
    // Meanwhile the guest changes its domains.
    let next = domain(2);
    rig.enter(&next).unwrap();
    rig.translation
        .change(&mut rig.iotlb, &[page(1, 1)])
        .unwrap();
    rig.check();
    rig.translation.unblock(&mut rig.iotlb).unwrap();
    assert!(Arc::ptr_eq(rig.translation.domain.as_ref().unwrap(), &next));
    rig.check();
}

proptest! {
    #[test]
    fn the_device_follows_any_changes(
        steps in prop::collection::vec((0..20u64, 0..8u64, any::<bool>(), 0..12usize), 1..40),
    ) {
        let mut rig = Rig::new();
        let domain = domain(0);
        rig.enter(&domain).unwrap();
        for (at, target, unmaps, refuse) in steps {
            let change = if unmaps {
                let range = IovaRange::from_size(at * PAGE_SIZE, 3 * PAGE_SIZE).unwrap();
                Change::Unmap { range }
            } else {
                page(at, target)
            };
            let done = domain.change(|domain| match change {
                Change::Map { range, piece } => domain.map(range, piece).map(|()| true),
                Change::Unmap { range } => domain.unmap(range).map(|removed| !removed.is_empty()),
            });
            if !done.unwrap_or(false) {
                continue;
            }
            rig.kernel.borrow_mut().refuse_after = (refuse == 0).then_some(0);
            let changed = rig.translation.change(&mut rig.iotlb, &[change]);
            prop_assert_eq!(changed.is_err(), refuse == 0);
            if changed.is_err() {
                // The domain goes back, too; here the device follows once more.
                rig.translation.change(&mut rig.iotlb, &[change]).unwrap();
            }
            rig.check();
        }
    }
}
