//! Records the device's writes: whether recording is on, the relays that record, and the writes
//! that escape them.
//!
//! ```text
//!   how a queue reaches the device      untracked: to be copied once more
//!   relayed                             nothing: its relay marks before the guest can see it
//!   directly, the device only reads     its used elements
//!   directly, else                      all memory that the device can write
//! ```
//! A device behind the guest's IOMMU can write only where a writable mapping is. If these are few,
//! its queues stay direct, and it keeps its full speed ([`maps_little`]). Otherwise the queues that
//! receive are relayed. A device that cannot be relayed when it starts stays direct.
//!
//! The copier of memory asks for the untracked areas at each look, so they are not marked at each
//! write. But bytes written **since the last look** must be marked when a queue is removed: they
//! are not asked for afterwards. Buffers that the device has written and never returned need no
//! tracking: the driver must not rely on them.
//!
//! It must not know when memory is copied.

use std::sync::Arc;

use vdpa::iotlb::Access;
use vdpa::iova::DeviceAddress;
use vdpa::memory::{DeviceMemory, GuestMemory, Mode};
use vdpa::relay::{RelayedQueue, Strategy, mark_ram};
use vmm_sys_util::eventfd::EventFd;

use super::poller::{Poller, relays_lost};
use super::rings::Rings;
use crate::Error;
use crate::virtio::backend::QueueAddresses;

/// The record of writes; see the module.
#[derive(Debug)]
pub(super) struct WriteLog {
    /// The device's writes are to be recorded.
    pub(super) on: bool,
    /// Present while queues are relayed.
    pub(super) poller: Option<Poller>,
    /// A relayed queue is broken, or the device could not be brought up again.
    pub(super) failed: Arc<EventFd>,
}

/// How a queue reaches the device, which determines its untracked writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Relayed,
    /// Directly, and the device reads its buffers.
    Sends,
    /// Directly, and the device may write its buffers.
    Receives,
}

/// The most memory, in bytes, that a device may write through mappings of the guest's IOMMU while
/// its queues are direct. All of it is copied once more while the guest is paused.
const DIRECT_MAX: u64 = 64 << 20;

/// Whether a device with this memory is behind the guest's IOMMU and can write so little that its
/// queues stay direct.
pub(super) fn maps_little(memory: &DeviceMemory) -> bool {
    memory.space().is_some_and(|space| {
        let space = space.read();
        let pieces = space.mappings().iter();
        let writable = pieces.filter(|(_, piece)| piece.access.allows(Access::WriteOnly));
        let sizes = writable.map(|(range, _)| range.size().unwrap_or(u64::MAX));
        space.mode() == Mode::Mapped && sizes.fold(0, u64::saturating_add) <= DIRECT_MAX
    })
}

impl WriteLog {
    /// Returns how a queue reaches the device; `None` if it is not relayed.
    pub(super) fn strategy(&self, queue: u16) -> Option<Strategy> {
        self.poller.as_ref()?.strategy(queue)
    }

    /// Stops polling the relays until [`WriteLog::go`].
    pub(super) fn park(&mut self) -> Result<(), Error> {
        let poller = self.poller.as_mut();
        poller.map_or(Ok(()), |poller| poller.park().map(drop))
    }

    pub(super) fn go(&mut self) -> Result<(), Error> {
        self.poller.as_mut().map_or(Ok(()), Poller::go)
    }

    /// Removes a queue from the suspended device, and from the relays if there are any.
    pub(super) fn park_queue(&mut self, rings: &mut Rings, index: u16) -> Result<(), Error> {
        let Some(poller) = &mut self.poller else {
            return Ok(rings.device.park_vring(index)?);
        };
        let set = poller.park()?;
        let Rings {
            device,
            iotlb,
            window,
            memory,
            ..
        } = rings;
        set.remove(index, device, &*memory, iotlb, window)
            .map_err(Error::relay)
    }

    /// Adds a queue that was reset to the suspended device, with its relay.
    pub(super) fn add_queue(
        &mut self,
        rings: &mut Rings,
        queue: RelayedQueue,
        strategy: Strategy,
    ) -> Result<(), Error> {
        let poller = self.poller.as_mut().ok_or_else(relays_lost)?;
        let (device, iotlb, window) = (&mut rings.device, &mut rings.iotlb, &mut rings.window);
        let set = poller.park()?;
        set.add(queue, strategy, device, iotlb, window)
            .map_err(Error::relay)
    }

    /// Returns the areas that the device may write at any moment without a mark: guest-physical
    /// addresses and lengths in bytes. `packed` gives the format of its rings.
    pub(super) fn untracked_writes(&self, rings: &Rings, packed: bool) -> Vec<(u64, u64)> {
        self.untracked_writes_where(rings, packed, |_| true)
    }

    /// As [`WriteLog::untracked_writes`], for one queue.
    pub(super) fn untracked_writes_of(
        &self,
        rings: &Rings,
        packed: bool,
        queue: u16,
    ) -> Vec<(u64, u64)> {
        self.untracked_writes_where(rings, packed, |index| index == queue)
    }

    fn untracked_writes_where(
        &self,
        rings: &Rings,
        packed: bool,
        wanted: impl Fn(u16) -> bool,
    ) -> Vec<(u64, u64)> {
        if !self.on {
            return Vec::new();
        }
        let queues = rings.queues.iter();
        let queues = queues
            .filter(|queue| wanted(queue.index))
            .map(|queue| (queue.addresses, self.reach(rings, queue.index)));
        let Some(areas) = areas(queues, packed) else {
            return rings.memory.writable();
        };
        let mut written = Vec::new();
        for (address, len) in areas {
            rings
                .memory
                .for_each_written(address, len, |gpa, len| written.push((gpa, len)));
        }
        written
    }

    fn reach(&self, rings: &Rings, queue: u16) -> Reach {
        match self.strategy(queue) {
            Some(Strategy::UsedShadow | Strategy::FullShadow) => Reach::Relayed,
            Some(Strategy::Direct) if rings.transmits(queue) => Reach::Sends,
            // Without a relay: it could not be relayed when its driver started it.
            Some(Strategy::Direct) | None => Reach::Receives,
        }
    }
}

/// Returns device addresses and lengths in bytes of untracked areas; `None`: all that the device
/// can write.
fn areas(
    queues: impl Iterator<Item = (QueueAddresses, Reach)>,
    packed: bool,
) -> Option<Vec<(DeviceAddress, u64)>> {
    let mut areas = Vec::new();
    for (addresses, reach) in queues {
        let entries = u64::from(addresses.size);
        match reach {
            Reach::Relayed => {}
            Reach::Receives => return None,
            Reach::Sends if packed => {
                areas.push((addresses.descriptor, 16 * entries));
                areas.push((addresses.device, 4));
            }
            Reach::Sends => areas.push((addresses.device, 6 + 8 * entries)),
        }
    }
    Some(areas)
}

/// Marks untracked areas of queues that the device no longer has.
pub(super) fn mark(memory: &GuestMemory, areas: &[(u64, u64)]) {
    for &(gpa, len) in areas {
        mark_ram(memory, gpa, len);
    }
}

#[cfg(test)]
mod tests {
    use vdpa::iova::IovaRange;
    use vdpa::memory::{AddressSpace, Piece};
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

    use super::*;

    const RING: QueueAddresses = QueueAddresses {
        size: 256,
        descriptor: DeviceAddress(0x1000),
        driver: DeviceAddress(0x2000),
        device: DeviceAddress(0x3ffe),
    };

    /// Stands for all memory that the device can write.
    const EVERYTHING: (u64, u64) = (0, u64::MAX);

    fn of(reaches: &[Reach], packed: bool) -> Vec<(u64, u64)> {
        match areas(reaches.iter().map(|&reach| (RING, reach)), packed) {
            Some(areas) => areas.iter().map(|&(at, len)| (at.0, len)).collect(),
            None => vec![EVERYTHING],
        }
    }

    #[test]
    fn a_queue_is_seen_as_far_as_it_is_relayed() {
        use Reach::{Receives, Relayed, Sends};
        for packed in [false, true] {
            assert_eq!(of(&[], packed), []);
            assert_eq!(of(&[Relayed, Relayed], packed), []);
            assert_eq!(of(&[Relayed, Sends, Receives], packed), [EVERYTHING]);
        }
        assert_eq!(of(&[Relayed, Sends], false), [(0x3ffe, 6 + 8 * 256)]);
        assert_eq!(
            of(&[Sends, Relayed], true),
            [(0x1000, 16 * 256), (0x3ffe, 4)]
        );
    }

    #[test]
    fn only_a_device_with_few_mappings_needs_no_relay() {
        let ram = GuestMemory::from_ranges(&[(GuestAddress(0), 0x8000)]).unwrap();
        let space = Arc::new(AddressSpace::new(IovaRange::ALL));
        let memory = DeviceMemory::behind(Arc::new(ram), Arc::clone(&space));
        assert!(!maps_little(&memory));
        space.change(|space| space.set_mode(Mode::Identity));
        assert!(!maps_little(&memory));
        space.change(|space| space.set_mode(Mode::Mapped));
        assert!(maps_little(&memory));
        let map = |iova, access| {
            let range = IovaRange::from_size(iova, DIRECT_MAX).unwrap();
            let piece = Piece { gpa: 0, access };
            space.change(|space| space.map(range, piece)).unwrap();
        };
        map(1 << 32, Access::ReadWrite);
        map(2 << 32, Access::ReadOnly);
        assert!(maps_little(&memory));
        map(3 << 32, Access::WriteOnly);
        assert!(!maps_little(&memory));
        assert!(!maps_little(&DeviceMemory::from(Arc::clone(memory.ram()))));
    }

    #[test]
    fn each_page_of_an_area_is_marked() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x8000)]).unwrap();
        let dirty = || -> Vec<bool> {
            let region = memory.iter().next().unwrap();
            let pages = (0..8).map(|page| region.bitmap().dirty_at(page * 0x1000));
            pages.collect()
        };
        mark(&memory, &of(&[Reach::Sends], false));
        let (no, yes) = (false, true);
        assert_eq!(dirty(), [no, no, no, yes, yes, no, no, no]);
        // More than one mark can cover, and memory that does not exist.
        mark(
            &memory,
            &[(0x6000, 1 << 40), (u64::MAX - 1, u64::MAX), (0, 0)],
        );
        assert_eq!(dirty(), [no, no, no, yes, yes, no, yes, yes]);
    }
}
