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
                self.0.fail_in.set(None);
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
                table.retain(|&(other, first), length| {
                    other != asid || first >= iova + size || iova >= first + *length
                })
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
