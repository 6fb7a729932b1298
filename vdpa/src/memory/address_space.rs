//! The memory that one group of devices reaches behind an IOMMU of the guest.
//!
//! ```text
//!                     change: waits until no Reader is left
//!   IOMMU's driver  -----------------------------------------+
//!                                                            v
//!      device address --- Reader::translate ---> AddressSpace ---> guest-physical address
//! ```
//! A translation holds only as long as its [`Reader`]. So once [`AddressSpace::change`] has
//! returned, no reader of this process accesses a page that was unmapped. The type depends neither
//! on the virtio-iommu device nor on a kernel's table: [`crate::iotlb`] gives a device the same
//! [`Change`]s.

use parking_lot::{RwLock, RwLockReadGuard};

use crate::Error;
use crate::iotlb::{Access, IovaMap};
use crate::iova::{IovaRange, PAGE_SIZE};

/// The target of a mapping; its size is that of the range of device addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Guest-physical address of the first byte.
    pub gpa: u64,
    /// The devices' access.
    pub access: Access,
}

/// One change of the mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Adds a mapping. Nothing is mapped in the range before.
    Map {
        /// Device addresses.
        range: IovaRange,
        /// Their target.
        piece: Piece,
    },
    /// Removes all mappings inside the range. None is partly inside.
    Unmap {
        /// Device addresses.
        range: IovaRange,
    },
}

/// How device addresses are translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Every access fails.
    Blocked,
    /// Device addresses are guest-physical addresses.
    Identity,
    /// By the mappings; an access outside them fails.
    Mapped,
}

/// The addresses of one device, or of one domain of the IOMMU.
///
/// A device keeps its space as long as it exists, because its rings hold it. Attaching the device
/// to another domain changes the contents ([`Writer::copy_from`]).
pub struct AddressSpace {
    range: IovaRange,
    inner: RwLock<Inner>,
}

crate::opaque_debug! {
    AddressSpace, this =>
    range: this.range,
}

#[derive(Debug, Clone)]
struct Inner {
    mode: Mode,
    /// Empty unless the mode is [`Mode::Mapped`].
    map: IovaMap<Piece>,
}

impl AddressSpace {
    /// A blocked address space. Mappings can be in `range`.
    #[must_use]
    pub fn new(range: IovaRange) -> Self {
        Self {
            range,
            inner: RwLock::new(Inner {
                mode: Mode::Blocked,
                map: IovaMap::new(range),
            }),
        }
    }

    /// The device addresses that can be mapped.
    #[must_use]
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// Checks that a device with this space reaches all that `domain` can map.
    ///
    /// # Errors
    /// It does not.
    pub fn check_reach(&self, domain: &Self) -> Result<(), Error> {
        let (reach, wanted) = (self.range, domain.range);
        if reach.contains(&wanted) {
            return Ok(());
        }
        Err(Error::other(format!(
            "the device reaches the addresses {reach}, and the guest's IOMMU has {wanted}: use a \
             device that reaches them"
        )))
    }

    /// Holds all translations as they are. A thread that holds a reader must not get another one:
    /// a waiting [`AddressSpace::change`] would block both.
    #[must_use]
    pub fn read(&self) -> Reader<'_> {
        Reader(self.inner.read())
    }

    /// Changes mode and mappings once no [`Reader`] is left. `f` must not read by this space.
    pub fn change<R>(&self, f: impl FnOnce(&mut Writer<'_>) -> R) -> R {
        f(&mut Writer(&mut self.inner.write()))
    }
}

/// The translations, which do not change while it lives.
#[derive(Debug)]
pub struct Reader<'a>(RwLockReadGuard<'a, Inner>);

impl Reader<'_> {
    /// How addresses are translated.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// The mappings; empty unless the mode is [`Mode::Mapped`].
    #[must_use]
    pub fn mappings(&self) -> &IovaMap<Piece> {
        &self.0.map
    }

    /// The guest-physical address for the device address `iova`, and how many of the `len` bytes
    /// from there on are contiguous. `None`: the device has no such access there.
    #[must_use]
    pub fn translate(&self, iova: u64, len: u64, access: Access) -> Option<(u64, u64)> {
        match self.0.mode {
            Mode::Blocked => None,
            Mode::Identity => Some((iova, len)),
            Mode::Mapped => {
                let (range, piece) = self.0.map.find(iova)?;
                let contiguous = (range.last() - iova).saturating_add(1);
                // No wrap: `Writer::map` checked the end of the piece.
                let gpa = piece.gpa + (iova - range.first());
                let allowed = piece.access.allows(access);
                allowed.then_some((gpa, len.min(contiguous)))
            }
        }
    }

    /// The parts of `range` that devices reach, by ascending device address, with their targets.
    pub fn parts(&self, range: IovaRange) -> impl Iterator<Item = (IovaRange, Piece)> {
        let all = (self.mode() == Mode::Identity).then_some(Piece {
            gpa: range.first(),
            access: Access::ReadWrite,
        });
        let mapped = self.mappings().overlapping(&range);
        let mapped = mapped.filter_map(move |(entry, piece)| {
            let first = entry.first().max(range.first());
            let part = IovaRange::new(first, entry.last().min(range.last()))?;
            let gpa = piece.gpa + (first - entry.first());
            Some((part, Piece { gpa, ..*piece }))
        });
        all.map(|piece| (range, piece)).into_iter().chain(mapped)
    }
}

/// Changes an address space that has no readers.
#[derive(Debug)]
pub struct Writer<'a>(&'a mut Inner);

impl Writer<'_> {
    /// How addresses are translated.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// The mappings; empty unless the mode is [`Mode::Mapped`].
    #[must_use]
    pub fn mappings(&self) -> &IovaMap<Piece> {
        &self.0.map
    }

    /// Changes the mode, and removes all mappings.
    pub fn set_mode(&mut self, mode: Mode) {
        self.0.mode = mode;
        self.0.map.clear();
    }

    /// Takes over mode and mappings of another space.
    pub fn copy_from(&mut self, other: &Reader<'_>) {
        self.0.clone_from(&other.0);
    }

    /// Makes changes that another space has made.
    ///
    /// # Errors
    /// As [`Writer::map`] and [`Writer::unmap`]: the other space was not the same. The changes
    /// before the cause are made.
    pub fn apply(&mut self, changes: &[Change]) -> Result<(), Error> {
        changes.iter().try_for_each(|change| match *change {
            Change::Map { range, piece } => self.map(range, piece),
            Change::Unmap { range } => self.unmap(range).map(drop),
        })
    }

    /// Adds a mapping.
    ///
    /// # Errors
    /// The mode is not [`Mode::Mapped`], the range breaks a rule ([`IovaMap::check`]), or the piece
    /// does not consist of whole pages below 2^64. Nothing has changed then.
    pub fn map(&mut self, range: IovaRange, piece: Piece) -> Result<(), Error> {
        let size = range.size().unwrap_or(0);
        let fits = IovaRange::from_size(piece.gpa, size).is_some();
        if self.0.mode != Mode::Mapped || !fits || !piece.gpa.is_multiple_of(PAGE_SIZE) {
            let gpa = piece.gpa;
            return Err(Error::other(format!(
                "cannot map {range} to guest-physical {gpa:#x}: not whole pages of guest memory, \
                 or the domain has no mappings"
            )));
        }
        self.0.map.insert(range.first(), size, piece).map(drop)
    }

    /// Removes all mappings inside `range` and returns them, by ascending address. Parts of the
    /// range without a mapping are allowed.
    ///
    /// # Errors
    /// A mapping is partly outside the range (`S_RANGE` of virtio 1.3, 5.13.6.6.2). Nothing has
    /// changed then.
    pub fn unmap(&mut self, range: IovaRange) -> Result<Vec<(IovaRange, Piece)>, Error> {
        let removed: Vec<(IovaRange, Piece)> = self
            .0
            .map
            .overlapping(&range)
            .map(|(entry, &piece)| (entry, piece))
            .collect();
        if let Some((entry, _)) = removed.iter().find(|(entry, _)| !range.contains(entry)) {
            return Err(Error::other(format!(
                "cannot unmap {range}: the mapping {entry} is only partly inside"
            )));
        }
        for (entry, _) in &removed {
            self.0.map.remove(entry.first())?;
        }
        Ok(removed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 12;

    fn pages(first: u64, count: u64) -> IovaRange {
        IovaRange::from_size(first * PAGE_SIZE, count * PAGE_SIZE).unwrap()
    }

    fn piece(page: u64, access: Access) -> Piece {
        let gpa = page * PAGE_SIZE;
        Piece { gpa, access }
    }

    fn mapped() -> AddressSpace {
        let space = AddressSpace::new(IovaRange::ALL);
        space.change(|space| space.set_mode(Mode::Mapped));
        space
    }

    #[test]
    fn modes_decide_the_translation() {
        let space = AddressSpace::new(IovaRange::ALL);
        let translate = || space.read().translate(0x1234, 8, Access::ReadWrite);
        assert_eq!(translate(), None);
        space.change(|space| space.set_mode(Mode::Identity));
        assert_eq!(translate(), Some((0x1234, 8)));
        space.change(|space| {
            let page = (pages(1, 1), piece(7, Access::ReadWrite));
            space.map(page.0, page.1).unwrap_err();
            space.set_mode(Mode::Mapped);
            space.map(page.0, page.1).unwrap();
        });
        assert_eq!(translate(), Some((0x7234, 8)));
        space.change(|space| space.set_mode(Mode::Mapped));
        assert_eq!(translate(), None);
    }

    #[test]
    fn a_mapping_ends_a_translation_and_limits_the_access() {
        let space = mapped();
        space.change(|space| {
            space.map(pages(1, 2), piece(8, Access::ReadOnly)).unwrap();
            space.map(pages(3, 1), piece(4, Access::WriteOnly)).unwrap();
        });
        let space = space.read();
        let read = |at, len| space.translate(at, len, Access::ReadOnly);
        assert_eq!(read(0x1ff8, 0x10), Some((0x8ff8, 0x10)));
        assert_eq!(read(0x2ff8, 0x10), Some((0x9ff8, 8)));
        assert_eq!(read(0x1000, 1 << 63), Some((0x8000, 0x2000)));
        assert_eq!(read(0x3000, 1), None);
        assert_eq!(read(0xfff, 2), None);
        assert_eq!(space.translate(0x1000, 1, Access::WriteOnly), None);
        assert_eq!(space.translate(0x1000, 1, Access::ReadWrite), None);
        assert_eq!(
            space.translate(0x3000, 1, Access::WriteOnly),
            Some((0x4000, 1))
        );
    }

    #[test]
    fn parts_are_clipped_and_a_copy_has_them_too() {
        let space = mapped();
        space.change(|space| {
            space.map(pages(1, 2), piece(8, Access::ReadOnly)).unwrap();
            space.map(pages(4, 1), piece(4, Access::ReadWrite)).unwrap();
        });
        let copy = AddressSpace::new(IovaRange::ALL);
        copy.change(|copy| copy.copy_from(&space.read()));
        let parts: Vec<_> = copy
            .read()
            .parts(IovaRange::new(0x1800, 0x4000).unwrap())
            .map(|(part, piece)| (part.first(), part.last(), piece.gpa))
            .collect();
        assert_eq!(parts, [(0x1800, 0x2fff, 0x8800), (0x4000, 0x4000, 0x4000)]);
        copy.change(|copy| copy.set_mode(Mode::Identity));
        let all = copy.read().parts(IovaRange::ALL).next();
        assert_eq!(all, Some((IovaRange::ALL, piece(0, Access::ReadWrite))));
        copy.change(|copy| copy.set_mode(Mode::Blocked));
        assert_eq!(copy.read().parts(IovaRange::ALL).count(), 0);
    }

    #[test]
    fn both_ends_of_the_space_can_be_mapped() {
        let half = 1 << 63;
        let (low, high) = (
            IovaRange::from_size(0, half).unwrap(),
            IovaRange::from_size(half, half).unwrap(),
        );
        let space = mapped();
        space.change(|space| {
            // 2^64 bytes have no size, and the other pieces end beyond 2^64 or inside a page.
            for (range, gpa) in [(IovaRange::ALL, 0), (low, half + PAGE_SIZE), (low, 0x800)] {
                let access = Access::ReadWrite;
                space.map(range, Piece { gpa, access }).unwrap_err();
            }
            space
                .map(low, piece(half / PAGE_SIZE, Access::ReadWrite))
                .unwrap();
            space.map(high, piece(0, Access::ReadWrite)).unwrap();
        });
        let last = space.read().translate(u64::MAX, 4, Access::ReadOnly);
        assert_eq!(last, Some((half - 1, 1)));
        space.change(|space| {
            space
                .unmap(IovaRange::new(1, u64::MAX).unwrap())
                .unwrap_err();
            assert_eq!(space.unmap(high).unwrap().len(), 1);
            assert_eq!(space.unmap(IovaRange::ALL).unwrap().len(), 1);
        });
        assert!(space.read().mappings().is_empty());
    }

    #[test]
    fn a_change_waits_for_readers() {
        let space = mapped();
        space.change(|space| space.map(pages(0, 1), piece(0, Access::ReadWrite)).unwrap());
        let reader = space.read();
        std::thread::scope(|scope| {
            let change = scope.spawn(|| space.change(|space| space.unmap(pages(0, 1)).unwrap()));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!change.is_finished());
            assert!(reader.translate(0, 1, Access::ReadOnly).is_some());
            drop(reader);
            assert_eq!(change.join().unwrap().len(), 1);
        });
        assert_eq!(space.read().translate(0, 1, Access::ReadOnly), None);
    }

    fn operation() -> impl Strategy<Value = (bool, u64, u64, u64, Access)> {
        let access = prop_oneof![
            Just(Access::ReadOnly),
            Just(Access::WriteOnly),
            Just(Access::ReadWrite)
        ];
        (any::<bool>(), 0..PAGES, 1..4u64, 0..100u64, access)
    }

    proptest! {
        /// Against one target per page, with the number of the mapping that it belongs to.
        #[test]
        fn behaves_as_one_target_per_page(
            operations in prop::collection::vec(operation(), 0..60),
        ) {
            let space = mapped();
            let index = |page| usize::try_from(page).unwrap();
            let mut model = vec![None::<(usize, u64, Access)>; index(PAGES + 3)];
            for (number, operation) in operations.into_iter().enumerate() {
                let (map, first, count, target, access) = operation;
                let range = pages(first, count);
                let at = index(first)..index(first + count);
                let before = model.clone();
                let touched = before[at.clone()].iter().flatten();
                let touched: Vec<usize> = touched.map(|m| m.0).collect();
                if map {
                    let done = space.change(|space| space.map(range, piece(target, access)));
                    prop_assert_eq!(done.is_ok(), touched.is_empty());
                    if done.is_ok() {
                        for (page, target) in at.zip(target..) {
                            model[page] = Some((number, target, access));
                        }
                    }
                } else {
                    let whole = before.iter().enumerate().all(|(page, mapping)| {
                        at.contains(&page) || mapping.is_none_or(|m| !touched.contains(&m.0))
                    });
                    let done = space.change(|space| space.unmap(range));
                    prop_assert_eq!(done.is_ok(), whole);
                    if let Ok(removed) = done {
                        let mut mappings = touched;
                        mappings.dedup();
                        prop_assert_eq!(removed.len(), mappings.len());
                        model[at].fill(None);
                    }
                }
                let space = space.read();
                for (page, mapping) in model.iter().enumerate() {
                    let iova = page as u64 * PAGE_SIZE + 0xff0;
                    for wanted in [Access::ReadOnly, Access::WriteOnly, Access::ReadWrite] {
                        let found = space.translate(iova, 0x20, wanted);
                        let allowed = mapping.filter(|m| m.2 == wanted || m.2 == Access::ReadWrite);
                        let next = model.get(page + 1).copied().flatten();
                        let goes_past = mapping.map(|m| m.0) == next.map(|m| m.0);
                        let len = if goes_past { 0x20 } else { 0x10 };
                        let expected = allowed.map(|m| (m.1 * PAGE_SIZE + 0xff0, len));
                        prop_assert_eq!(found, expected);
                    }
                }
            }
        }
    }
}
