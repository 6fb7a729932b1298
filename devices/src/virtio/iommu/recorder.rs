//! A model of a device behind the IOMMU, for tests: it records its mappings, and refuses on
//! request.

use std::sync::Arc;

use parking_lot::Mutex;
use vdpa::iotlb::IovaMap;
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Change, Mode, Piece};

use super::domains::Domains;
use crate::Error;
use crate::virtio::backend::Translated;
use crate::virtio::userspace_queue::driver::memory;

/// The last device address that the guest may map.
pub(crate) const INPUT: u64 = (1 << 40) - 1;

/// A device that follows its space as a kernel's table does: no mapping twice, and each removal
/// covers whole mappings.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) reach: IovaRange,
    pub(crate) space: Option<Arc<AddressSpace>>,
    pub(crate) mode: Mode,
    map: IovaMap<Piece>,
    /// Guest-physical addresses that it never maps.
    pub(crate) refused: Vec<u64>,
    /// It refuses the change after so many others.
    pub(crate) refuse_after: Option<usize>,
    /// It refuses every change.
    pub(crate) broken: bool,
    /// It has requests in flight whenever it leaves.
    pub(crate) busy: bool,
    pub(crate) blocked: usize,
    /// It is blocked, and its driver has not started it since.
    stopped: bool,
    /// Change sets.
    pub(crate) sets: usize,
}

impl Recorder {
    pub(crate) fn new() -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            reach: IovaRange::ALL,
            space: None,
            mode: Mode::Blocked,
            map: IovaMap::new(IovaRange::ALL),
            refused: Vec::new(),
            refuse_after: None,
            broken: false,
            busy: false,
            blocked: 0,
            stopped: false,
            sets: 0,
        }))
    }

    /// The driver starts it.
    pub(crate) fn restart(&mut self) {
        self.stopped = false;
        self.replay();
    }

    fn replay(&mut self) {
        self.map = IovaMap::new(IovaRange::ALL);
        let Some(space) = self.space.clone().filter(|_| !self.stopped) else {
            self.mode = Mode::Blocked;
            return;
        };
        let space = space.read();
        self.mode = space.mode();
        for (range, piece) in space.mappings().iter() {
            self.map
                .insert(range.first(), range.size().unwrap(), *piece)
                .unwrap();
        }
    }

    fn apply(&mut self, change: &Change) -> Result<(), Error> {
        if self.broken || self.refuse_after == Some(0) {
            self.refuse_after = None;
            return Err(Error::other("refused"));
        }
        self.refuse_after = self.refuse_after.map(|after| after - 1);
        match *change {
            Change::Map { range, piece } => {
                if self.refused.contains(&piece.gpa) {
                    return Err(Error::other("refused"));
                }
                let size = range.size().unwrap();
                self.map.insert(range.first(), size, piece).unwrap();
            }
            Change::Unmap { range } => {
                let inside = |entry: &IovaRange| {
                    assert!(range.contains(entry) || !range.overlaps(entry));
                    range.contains(entry)
                };
                let entries = self.map.iter().map(|(entry, _)| entry);
                let entries: Vec<IovaRange> = entries.filter(inside).collect();
                assert!(!entries.is_empty(), "{range} has no mapping");
                for entry in entries {
                    self.map.remove(entry.first()).unwrap();
                }
            }
        }
        Ok(())
    }

    /// Returns its mappings.
    pub(crate) fn entries(&self) -> Vec<(IovaRange, Piece)> {
        self.map
            .iter()
            .map(|(range, piece)| (range, *piece))
            .collect()
    }

    /// Whether it reaches exactly what its space has.
    pub(crate) fn follows(&self) -> bool {
        let Some(space) = self.space.as_ref().filter(|_| !self.stopped) else {
            return self.mode == Mode::Blocked && self.map.is_empty();
        };
        let space = space.read();
        let entries = space.mappings().iter();
        self.mode == space.mode()
            && self.entries()
                == entries
                    .map(|(range, piece)| (range, *piece))
                    .collect::<Vec<_>>()
    }
}

impl Translated for Recorder {
    fn reach(&self) -> IovaRange {
        self.reach
    }

    fn space(&self) -> Option<Arc<AddressSpace>> {
        self.space.clone()
    }

    fn enter(&mut self, space: &Arc<AddressSpace>) -> Result<(), Error> {
        if self.broken {
            return Err(Error::other("refused"));
        }
        self.space = Some(Arc::clone(space));
        self.replay();
        Ok(())
    }

    fn leave(&mut self) -> Result<(), Error> {
        self.space = None;
        self.replay();
        if self.busy {
            return Err(Error::other("busy"));
        }
        Ok(())
    }

    fn change(&mut self, changes: &[Change]) -> Result<(), Error> {
        self.sets += 1;
        if self.mode == Mode::Blocked {
            return Ok(());
        }
        let before = self.map.clone();
        let changed = changes.iter().try_for_each(|change| self.apply(change));
        changed.inspect_err(|_| self.map = before)
    }

    fn block(&mut self) {
        self.blocked += 1;
        self.stopped = true;
        self.replay();
    }
}

/// A recorder that the test keeps.
impl Translated for Arc<Mutex<Recorder>> {
    fn reach(&self) -> IovaRange {
        self.lock().reach()
    }

    fn space(&self) -> Option<Arc<AddressSpace>> {
        self.lock().space()
    }

    fn enter(&mut self, space: &Arc<AddressSpace>) -> Result<(), Error> {
        self.lock().enter(space)
    }

    fn leave(&mut self) -> Result<(), Error> {
        self.lock().leave()
    }

    fn change(&mut self, changes: &[Change]) -> Result<(), Error> {
        self.lock().change(changes)
    }

    fn block(&mut self) {
        self.lock().block();
    }
}

/// Domains in the memory of the tests' driver.
pub(crate) fn domains(bypass: bool, mappings: u32) -> Domains {
    let input = IovaRange::new(0, INPUT).unwrap();
    Domains::new(&memory(), input, mappings, bypass)
}
