//! What the device writes without a mark, while a record is on.
//!
//! ```text
//!   how a queue reaches the device      unseen until it is copied once more
//!   relayed                             nothing: its relay marks before the guest can know
//!   directly, the device only reads     its used elements
//!   directly, else                      all memory: the guest could not be kept from starting it so
//! ```
//! Whoever copies memory asks for it at each look, so it need not be marked at each write. But what was
//! written **since the last look** has to be marked when a queue goes: nobody is told of it afterwards. What
//! a device has written into buffers that it did not use is nobody's: a driver finds in them what it may not rely
//! on.
//!
//! It must not know when anybody looks.

use vdpa::iova::IovaRange;
use vdpa::memory::GuestMemory;
use vdpa::relay::{Dirty, Strategy};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use super::super::VdpaBackend;
use crate::virtio::backend::QueueAddresses;

/// How a queue reaches the device, as far as it says what is unseen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Relayed,
    /// Directly, and the device reads its buffers.
    Sends,
    /// Directly, and the device may write its buffers.
    Receives,
}

impl VdpaBackend {
    /// What the device may write at any moment without a mark: guest-physical address and length
    /// in bytes.
    pub(in crate::virtio::vdpa) fn unseen(&self) -> Vec<(u64, u64)> {
        self.unseen_where(|_| true)
    }

    /// As [`VdpaBackend::unseen`], of one queue.
    pub(in crate::virtio::vdpa) fn unseen_of(&self, queue: u16) -> Vec<(u64, u64)> {
        self.unseen_where(|index| index == queue)
    }

    fn unseen_where(&self, wanted: impl Fn(u16) -> bool) -> Vec<(u64, u64)> {
        if !self.dirty_log {
            return Vec::new();
        }
        let packed = self
            .negotiation
            .is_some_and(|negotiation| negotiation.ring().packed);
        let queues = self.data_queues.iter();
        let queues = queues
            .filter(|queue| wanted(queue.index))
            .map(|queue| (queue.addresses, self.reach(queue.index)));
        areas(queues, packed, &self.ram)
    }

    fn reach(&self, queue: u16) -> Reach {
        let Some(poller) = &self.poller else {
            // It could not be relayed when its driver started it.
            return Reach::Receives;
        };
        match poller.strategy(queue) {
            Some(Strategy::Mediated | Strategy::Shadowed) => Reach::Relayed,
            Some(Strategy::Direct) if self.transmits(queue) => Reach::Sends,
            Some(Strategy::Direct) | None => Reach::Receives,
        }
    }

    /// Whether the device only reads a queue's buffers.
    pub(super) fn transmits(&self, queue: u16) -> bool {
        // receiveq1, transmitq1, receiveq2, … (virtio 1.3, 5.1.2).
        self.info.device_id == VIRTIO_ID_NET && !queue.is_multiple_of(2)
    }

    /// All that a device can write to.
    pub(in crate::virtio::vdpa) fn all_memory(&self) -> Vec<(u64, u64)> {
        all(&self.ram)
    }

    /// Marks what was unseen, of queues on which nobody works any more.
    pub(in crate::virtio::vdpa) fn mark(&self, areas: &[(u64, u64)]) {
        mark(&self.memory, areas);
    }
}

fn all(ram: &[IovaRange]) -> Vec<(u64, u64)> {
    let ranges = ram.iter();
    ranges
        .filter_map(|range| Some((range.first(), range.size()?)))
        .collect()
}

fn areas(
    queues: impl Iterator<Item = (QueueAddresses, Reach)>,
    packed: bool,
    ram: &[IovaRange],
) -> Vec<(u64, u64)> {
    let mut areas = Vec::new();
    for (addresses, reach) in queues {
        let entries = u64::from(addresses.size);
        match reach {
            Reach::Relayed => {}
            Reach::Receives => return all(ram),
            Reach::Sends if packed => {
                areas.push((addresses.descriptor, 16 * entries));
                areas.push((addresses.device, 4));
            }
            Reach::Sends => areas.push((addresses.device, 6 + 8 * entries)),
        }
    }
    areas
}

fn mark(memory: &GuestMemory, areas: &[(u64, u64)]) {
    for &(address, len) in areas {
        let end = address.saturating_add(len);
        let mut at = address;
        // A mark is of less than 4 GiB.
        while let Some(left) = end.checked_sub(at).filter(|&left| left > 0) {
            let part = u32::try_from(left).unwrap_or(u32::MAX);
            memory.mark(at, part);
            at = at.saturating_add(u64::from(part));
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

    use super::*;

    const RING: QueueAddresses = QueueAddresses {
        size: 256,
        descriptor: 0x1000,
        driver: 0x2000,
        device: 0x3ffe,
    };

    fn of(reaches: &[Reach], packed: bool) -> Vec<(u64, u64)> {
        let ram = [
            IovaRange::from_size(0, 0x8000).unwrap(),
            IovaRange::from_size(1 << 32, 0x4000).unwrap(),
        ];
        areas(reaches.iter().map(|&reach| (RING, reach)), packed, &ram)
    }

    #[test]
    fn a_queue_is_seen_as_far_as_it_is_relayed() {
        use Reach::{Receives, Relayed, Sends};
        let everything = [(0, 0x8000), (1 << 32, 0x4000)];
        for packed in [false, true] {
            assert_eq!(of(&[], packed), []);
            assert_eq!(of(&[Relayed, Relayed], packed), []);
            assert_eq!(of(&[Relayed, Sends, Receives], packed), everything);
        }
        assert_eq!(of(&[Relayed, Sends], false), [(0x3ffe, 6 + 8 * 256)]);
        assert_eq!(
            of(&[Sends, Relayed], true),
            [(0x1000, 16 * 256), (0x3ffe, 4)]
        );
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
        // More than a mark can be of, and what is not there.
        mark(
            &memory,
            &[(0x6000, 1 << 40), (u64::MAX - 1, u64::MAX), (0, 0)],
        );
        assert_eq!(dirty(), [no, no, no, yes, yes, no, yes, yes]);
    }
}
