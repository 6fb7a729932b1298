//! Tests of the IOTLB against a model of the kernel's table with injected failures.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::memory::SharedBuffer;

/// The kernel's table, (asid, first iova) → size, and the messages sent to it.
#[derive(Debug, Clone, Default)]
struct Kernel(Rc<KernelState>);

#[derive(Debug, Default)]
struct KernelState {
    table: RefCell<BTreeMap<(u32, u64), u64>>,
    log: RefCell<Vec<IotlbMessage>>,
    batch: Cell<Option<u32>>,
    stopped: Cell<bool>,
    /// Counts down to the message that fails.
    fail_in: Cell<Option<usize>>,
    /// Whether the message after that one fails too.
    fails_again: Cell<bool>,
}

impl IotlbSink for Kernel {
    fn stop(&self) -> io::Result<()> {
        self.0.stopped.set(true);
        Ok(())
    }

    fn send(&self, message: &IotlbMessage) -> io::Result<()> {
        let fault = || Err(io::Error::from_raw_os_error(libc::EFAULT));
        match self.0.fail_in.get() {
            Some(0) => {
                self.0.fail_in.set(self.0.fails_again.take().then_some(0));
                return fault();
            }
            Some(left) => self.0.fail_in.set(Some(left - 1)),
            None => {}
        }
        self.0.log.borrow_mut().push(*message);
        let (IotlbMessage::Update { asid, .. }
        | IotlbMessage::Invalidate { asid, .. }
        | IotlbMessage::BatchBegin { asid }
        | IotlbMessage::BatchEnd { asid }) = *message;
        if self.0.batch.get().is_some_and(|batch| batch != asid) {
            return fault();
        }
        let mut table = self.0.table.borrow_mut();
        match *message {
            IotlbMessage::Update { iova, size, .. } => {
                let taken = table.iter().any(|(&(other, first), &length)| {
                    other == asid && first < iova + size && iova < first + length
                });
                if taken {
                    return fault();
                }
                table.insert((asid, iova), size);
            }
            IotlbMessage::Invalidate { iova, size, .. } => {
                let touched = |(other, first): (u32, u64), length: u64| {
                    other == asid && first < iova + size && iova < first + length
                };
                let exact = table.iter().filter(|&(&at, &length)| touched(at, length));
                let exact = exact.fold(None, |ends, (&(_, first), length)| {
                    Some((ends.map_or(first, |(first, _)| first), first + length))
                });
                // No test sends one that removes nothing, or more than it names.
                if exact != Some((iova, iova + size)) {
                    return fault();
                }
                table.retain(|&at, &mut length| !touched(at, length));
            }
            IotlbMessage::BatchBegin { .. } => self.0.batch.set(Some(asid)),
            IotlbMessage::BatchEnd { .. } => self.0.batch.set(None),
        }
        Ok(())
    }
}

fn iotlb(features: BackendFeatures) -> (Kernel, Iotlb<Kernel>) {
    let kernel = Kernel::default();
    let limits = IotlbLimits {
        range: IovaRange::new(0, 0xffff_ffff).unwrap(),
        address_spaces: 2,
        features,
    };
    (kernel.clone(), Iotlb::new(kernel, limits))
}

fn mapping(buffer: &Arc<SharedBuffer>, offset: u64) -> Mapping {
    Mapping {
        region: Arc::clone(buffer) as _,
        offset,
        access: Access::ReadWrite,
    }
}

fn buffer() -> Arc<SharedBuffer> {
    Arc::new(SharedBuffer::new(0x8000, 0).unwrap())
}

fn mirror(iotlb: &Iotlb<Kernel>) -> BTreeMap<(u32, u64), u64> {
    iotlb
        .spaces
        .iter()
        .flat_map(|(&asid, space)| {
            space
                .iter()
                .map(move |(range, _)| ((asid, range.first()), range.size().unwrap()))
        })
        .collect()
}

const BATCH: BackendFeatures = BackendFeatures::IOTLB_BATCH.union(BackendFeatures::IOTLB_ASID);

#[test]
fn without_asid_only_address_space_zero_exists() {
    let (kernel, mut iotlb) = iotlb(BackendFeatures::empty());
    let buffer = buffer();
    let error = iotlb.map(1, 0, 0x1000, mapping(&buffer, 0)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("no address space 1: the device has 1")
    );
    assert!(iotlb.batch(1).is_err());
    assert!(kernel.0.log.borrow().is_empty());
    iotlb.map(0, 0, 0x1000, mapping(&buffer, 0)).unwrap();
    // No bracket messages without IOTLB_BATCH.
    let mut batch = iotlb.batch(0).unwrap();
    batch.map(0x1000, 0x1000, mapping(&buffer, 0x1000)).unwrap();
    batch.commit().unwrap();
    assert_eq!(kernel.0.log.borrow().len(), 2);
}

#[test]
fn nothing_bad_is_ever_written() {
    let (kernel, mut iotlb) = iotlb(BATCH);
    let buffer = buffer();
    iotlb.map(0, 0x1000, 0x1000, mapping(&buffer, 0)).unwrap();
    let sent = kernel.0.log.borrow().len();
    for (asid, iova, size, offset) in [
        (2, 0, 0x1000, 0),
        (0, 0, 0, 0),
        (0, 0x1000, 0x1000, 0),
        (0, 0, 0x2000, 0),
        (0, u64::MAX - 0xfff, 0x1000, 0),
        (0, 0x8000, u64::MAX, 0),
        (0, 0x8000, 0x9000, 0),
        (0, 0x8000, 0x1000, 0x8000),
        (0, 0x8000, 0x1000, 0x10),
        (0, 0x8000, 0x1000, u64::MAX - 0xfff),
    ] {
        iotlb
            .map(asid, iova, size, mapping(&buffer, offset))
            .unwrap_err();
    }
    iotlb.unmap(0, 0x2000).unwrap_err();
    iotlb.unmap(1, 0x1000).unwrap_err();
    assert_eq!(kernel.0.log.borrow().len(), sent);
    // The same address in another space is a different address.
    iotlb.map(1, 0x1000, 0x1000, mapping(&buffer, 0)).unwrap();
}

#[test]
fn memory_lives_while_it_is_mapped() {
    let (_, mut iotlb) = iotlb(BATCH);
    let buffer = buffer();
    iotlb.map(0, 0, 0x1000, mapping(&buffer, 0)).unwrap();
    assert_eq!(Arc::strong_count(&buffer), 2);
    iotlb.unmap(0, 0).unwrap();
    assert_eq!(Arc::strong_count(&buffer), 1);
    iotlb.map(0, 0, 0x1000, mapping(&buffer, 0)).unwrap();
    drop(iotlb);
    assert_eq!(Arc::strong_count(&buffer), 1);
}

#[test]
fn memory_that_cannot_be_unmapped_is_never_released() {
    let (kernel, mut iotlb) = iotlb(BATCH);
    let buffer = buffer();
    iotlb.map(0, 0, 0x1000, mapping(&buffer, 0)).unwrap();
    kernel.0.fail_in.set(Some(0));
    drop(iotlb);
    assert!(kernel.0.stopped.get());
    assert_eq!(Arc::strong_count(&buffer), 2);
}

#[test]
fn a_dropped_batch_leaves_nothing() {
    let (kernel, mut iotlb) = iotlb(BATCH);
    let buffer = buffer();
    iotlb.map(0, 0x4000, 0x1000, mapping(&buffer, 0)).unwrap();
    let before = mirror(&iotlb);
    let mut batch = iotlb.batch(0).unwrap();
    batch.unmap(0x4000).unwrap();
    batch.map(0x4000, 0x2000, mapping(&buffer, 0)).unwrap();
    drop(batch);
    assert_eq!(mirror(&iotlb), before);
    assert_eq!(*kernel.0.table.borrow(), before);
    assert_eq!(kernel.0.batch.get(), None);
}

#[test]
fn a_fault_is_explained_with_the_needs_of_the_whole_batch() {
    let (kernel, mut iotlb) = iotlb(BATCH);
    let buffer = buffer();
    let mut batch = iotlb.batch(0).unwrap();
    batch.announce(1 << 40);
    kernel.0.fail_in.set(Some(0));
    let error = batch.map(0, 0x1000, mapping(&buffer, 0)).unwrap_err();
    let known = Memlock::now(1 << 40).to_string();
    assert!(error.to_string().ends_with(&known), "{error}");
}

#[test]
fn after_a_reset_everything_is_mapped_again_unless_it_persists() {
    let buffer = buffer();
    for features in [
        BATCH,
        BackendFeatures::IOTLB_ASID,
        BATCH | BackendFeatures::IOTLB_PERSIST,
    ] {
        let (kernel, mut iotlb) = iotlb(features);
        iotlb.map(0, 0, 0x1000, mapping(&buffer, 0)).unwrap();
        iotlb.map(0, 0x1000, 0x1000, mapping(&buffer, 0)).unwrap();
        iotlb.map(1, 0, 0x2000, mapping(&buffer, 0)).unwrap();
        let before = mirror(&iotlb);
        kernel.0.log.borrow_mut().clear();
        iotlb.remap_after_reset().unwrap();
        assert_eq!(mirror(&iotlb), before);
        assert_eq!(*kernel.0.table.borrow(), before);
        let updates = kernel
            .0
            .log
            .borrow()
            .iter()
            .filter(|message| matches!(message, IotlbMessage::Update { .. }))
            .count();
        let persists = features.contains(BackendFeatures::IOTLB_PERSIST);
        assert_eq!(updates, if persists { 0 } else { 3 });
        assert_eq!(kernel.0.batch.get(), None);
    }
}

proptest! {
    /// After a failure of any message the mirror agrees with the kernel, and a batch happened
    /// completely or not at all. A roll-back that fails would be an exception. One failure is
    /// injected, so none does.
    #[test]
    fn a_batch_is_all_or_nothing(
        batched in any::<bool>(),
        before in prop::collection::btree_set(0u64..16, 0..8),
        changes in prop::collection::vec((0u64..16, any::<bool>()), 0..12),
        fail_in in prop::option::of(0usize..16),
    ) {
        let features = if batched { BATCH } else { BackendFeatures::IOTLB_ASID };
        let (kernel, mut iotlb) = iotlb(features);
        let buffer = buffer();
        for page in &before {
            iotlb.map(1, page * 0x1000, 0x1000, mapping(&buffer, 0)).unwrap();
        }
        let old = mirror(&iotlb);
        kernel.0.fail_in.set(fail_in);
        let apply = |iotlb: &mut Iotlb<Kernel>| -> Result<(), Error> {
            let mut batch = iotlb.batch(1)?;
            for &(page, insert) in &changes {
                if insert {
                    batch.map(page * 0x1000, 0x1000, mapping(&buffer, 0))?;
                } else {
                    batch.unmap(page * 0x1000)?;
                }
            }
            batch.commit()
        };
        let result = apply(&mut iotlb);
        let injected = fail_in.is_some() && kernel.0.fail_in.get().is_none();
        prop_assert_eq!(&*kernel.0.table.borrow(), &mirror(&iotlb));
        let refused = |error: &Error| error.kind() == ErrorKind::Refused;
        if result.as_ref().is_err_and(|error| !injected || refused(error)) {
            prop_assert_eq!(mirror(&iotlb), old);
        }
        kernel.0.fail_in.set(None);
    }
}

mod apply {
    use std::ops::Range;

    use vm_memory::GuestAddress;

    use super::*;
    use crate::memory::{AddressSpace, Change, GuestMemory, GuestRegion, Mode, Piece};

    const PAGES: u64 = 12;

    /// Two regions that are adjacent for the guest, and one apart.
    fn ram() -> Vec<Arc<GuestRegion>> {
        let regions = [(0, 0x4000), (0x4000, 0x4000), (0x10_0000, 0x4000)];
        let regions = regions.map(|(base, size)| (GuestAddress(base), size));
        GuestRegion::all(&GuestMemory::from_ranges(&regions).unwrap())
    }

    fn pages(pages: Range<u64>) -> IovaRange {
        let size = (pages.end - pages.start) * PAGE_SIZE;
        IovaRange::from_size(pages.start * PAGE_SIZE, size).unwrap()
    }

    fn map(range: Range<u64>, page: u64) -> Change {
        let (gpa, access) = (page * PAGE_SIZE, Access::ReadOnly);
        let piece = Piece { gpa, access };
        let range = pages(range);
        Change::Map { range, piece }
    }

    fn unmap(range: Range<u64>) -> Change {
        let range = pages(range);
        Change::Unmap { range }
    }

    fn log(kernel: &Kernel) -> Vec<IotlbMessage> {
        std::mem::take(&mut *kernel.0.log.borrow_mut())
    }

    fn invalidate(range: Range<u64>) -> IotlbMessage {
        let range = pages(range);
        IotlbMessage::Invalidate {
            asid: 0,
            iova: range.first(),
            size: range.size().unwrap(),
        }
    }

    #[test]
    fn one_message_has_no_bracket() {
        let ram = ram();
        let (kernel, mut iotlb) = iotlb(BATCH);
        iotlb.apply(0, &[], &ram).unwrap();
        assert_eq!(log(&kernel), []);
        iotlb.apply(0, &[map(4..6, 1)], &ram).unwrap();
        let update = IotlbMessage::Update {
            asid: 0,
            iova: 0x4000,
            size: 0x2000,
            host_address: ram[0].host_address() + 0x1000,
            access: Access::ReadOnly,
        };
        assert_eq!(log(&kernel), [update]);
        iotlb.apply(0, &[unmap(4..6)], &ram).unwrap();
        assert_eq!(log(&kernel), [invalidate(4..6)]);
        // Nothing is mapped there.
        iotlb.apply(0, &[unmap(4..6)], &ram).unwrap();
        assert_eq!(log(&kernel), []);
    }

    #[test]
    fn adjacent_unmaps_are_one_message_and_others_are_exact() {
        let ram = ram();
        let (kernel, mut iotlb) = iotlb(BATCH);
        let all = [
            map(0..1, 0),
            map(1..3, 0),
            map(3..4, 0),
            map(6..7, 0),
            map(8..9, 0),
        ];
        iotlb.apply(0, &all, &ram).unwrap();
        log(&kernel);
        // Downwards, with a hole in the last range and a mapping between.
        let changes = [
            unmap(3..4),
            unmap(1..3),
            unmap(6..8),
            map(3..4, 2),
            unmap(8..9),
        ];
        iotlb.apply(0, &changes, &ram).unwrap();
        let sent = log(&kernel);
        assert_eq!(sent.len(), 6);
        assert_eq!(sent[0], IotlbMessage::BatchBegin { asid: 0 });
        assert_eq!(sent[1..3], [invalidate(1..4), invalidate(6..7)]);
        assert_eq!(
            sent[4..],
            [invalidate(8..9), IotlbMessage::BatchEnd { asid: 0 }]
        );
        assert_eq!(mirror(&iotlb).len(), 2);
    }

    #[test]
    fn a_piece_that_spans_regions_is_one_mapping_each_and_is_unmapped_whole() {
        let ram = ram();
        let (kernel, mut iotlb) = iotlb(BATCH);
        iotlb.apply(0, &[map(2..8, 1)], &ram).unwrap();
        let sizes: Vec<u64> = mirror(&iotlb).into_values().collect();
        assert_eq!(sizes, [0x3000, 0x3000]);
        log(&kernel);
        iotlb.apply(0, &[unmap(2..8)], &ram).unwrap();
        assert_eq!(log(&kernel), [invalidate(2..8)]);
    }

    #[test]
    fn what_breaks_a_rule_is_never_written() {
        let ram = ram();
        let (kernel, mut iotlb) = iotlb(BATCH);
        iotlb.apply(0, &[map(0..2, 0)], &ram).unwrap();
        let before = mirror(&iotlb);
        log(&kernel);
        let high = |gpa| Change::Map {
            range: IovaRange::new(0x8000, (1 << 63) - 1).unwrap(),
            piece: Piece {
                gpa,
                access: Access::ReadWrite,
            },
        };
        let bad = [
            (0, map(1..3, 0)),
            (0, map(4..7, 6)),
            (0, map(4..5, 0x80)),
            (0, map(4..5, u64::MAX / PAGE_SIZE)),
            (0, high(0)),
            (0, high(u64::MAX - 0xfff)),
            (0, unmap(0..1)),
            (0, unmap(1..4)),
            (2, map(4..5, 0)),
        ];
        for (asid, change) in bad {
            let error = iotlb.apply(asid, &[change], &ram).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Other, "{error}");
            assert_eq!(log(&kernel), [], "{change:?}");
        }
        let change = Change::Unmap {
            range: IovaRange::ALL,
        };
        assert_eq!(mirror(&iotlb), before);
        iotlb.apply(0, &[change], &ram).unwrap();
        assert_eq!(log(&kernel), [invalidate(0..2)]);
    }

    #[test]
    fn an_undo_that_fails_has_its_own_kind() {
        let ram = ram();
        let (kernel, mut iotlb) = iotlb(BackendFeatures::empty());
        iotlb.apply(0, &[map(0..1, 0)], &ram).unwrap();
        kernel.0.fail_in.set(Some(1));
        kernel.0.fails_again.set(true);
        let error = iotlb
            .apply(0, &[unmap(0..1), map(0..2, 0)], &ram)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotRolledBack);
        assert_eq!(*kernel.0.table.borrow(), mirror(&iotlb));
        assert!(mirror(&iotlb).is_empty());
    }

    proptest! {
        /// A refusal at each message in turn leaves the kernel's table as it was. Without one, the
        /// table is that of the address space. The kernel of the tests refuses an overlap and an
        /// INVALIDATE that is not exact.
        #[test]
        fn a_refusal_at_each_position_is_undone(
            batched in any::<bool>(),
            rounds in prop::collection::vec(
                prop::collection::vec((any::<bool>(), 0..PAGES, 1..4u64, 0..7u64), 0..8),
                1..4,
            ),
        ) {
            let ram = ram();
            let features = if batched { BATCH } else { BackendFeatures::IOTLB_ASID };
            let (kernel, mut iotlb) = iotlb(features);
            let space = AddressSpace::new(iotlb.limits().range);
            space.change(|space| space.set_mode(Mode::Mapped));
            for round in rounds {
                let mut changes = Vec::new();
                space.change(|space| for (insert, first, count, page) in round {
                    let change = map(first..first + count, page.min(8 - count));
                    if insert {
                        if let Change::Map { range, piece } = change
                            && space.map(range, piece).is_ok()
                        {
                            changes.push(change);
                        }
                    } else {
                        let removed = space.unmap(pages(first..first + count));
                        let removed = removed.unwrap_or_default().into_iter();
                        changes.extend(removed.map(|(range, _)| Change::Unmap { range }));
                    }
                });
                let before = mirror(&iotlb);
                for fail_in in 0.. {
                    kernel.0.fail_in.set(Some(fail_in));
                    let result = iotlb.apply(0, &changes, &ram);
                    prop_assert_eq!(&*kernel.0.table.borrow(), &mirror(&iotlb));
                    prop_assert_eq!(kernel.0.batch.get(), None);
                    if kernel.0.fail_in.take().is_some() {
                        result.unwrap();
                        break;
                    }
                    prop_assert_eq!(result.unwrap_err().kind(), ErrorKind::Refused);
                    prop_assert_eq!(mirror(&iotlb), before.clone());
                }
                let covered = |at: u64| {
                    let table = kernel.0.table.borrow();
                    table.iter().any(|(&(_, first), &size)| first <= at && at < first + size)
                };
                let space = space.read();
                for page in 0..PAGES + 3 {
                    let mapped = space.mappings().find(page * PAGE_SIZE).is_some();
                    prop_assert_eq!(covered(page * PAGE_SIZE), mapped);
                }
            }
        }
    }
}
