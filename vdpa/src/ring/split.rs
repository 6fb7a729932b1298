//! The driver's side of a split virtqueue (virtio 1.3, section 2.7). The
//! device's side is [`DeviceQueue`].
//!
//! Everything the device can write is hostile, and on a parent without an
//! IOMMU that is all of the ring: so which descriptors are free, how long each
//! chain is and how much it takes is kept in private memory and never read
//! back from the ring. All multi-byte fields are little-endian.
//!
//! ```text
//!   descriptor table      entry i at 16 i:  u64 address, u32 length, u16 flags, u16 next
//!   avail ring            u16 flags, u16 index, u16 ring[size], u16 used_event
//!   used ring             u16 flags, u16 index, {u32 id, u32 length}[size], u16 avail_event
//! ```
//! With IN_ORDER descriptors are taken in the order of the table (2.7.5), and one
//! used element may stand for several chains.
//!
//! After a [`Violation`] the queue is broken for good:
//! ```text
//!   working --- violation seen in pop_used ---> broken (every call fails)
//! ```

mod device;
mod guest;

use std::collections::VecDeque;
use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

pub use self::device::DeviceQueue;
pub use self::guest::{GuestRing, Suppression};
use super::guest::{DESCRIPTOR_F_INDIRECT, DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE};
use super::in_order::InOrder;
use super::{
    Direction, Piece, QueueError, RingFeatures, SplitLayout, Used, Violation, check_chain, prepare,
    write_table,
};
use crate::device::VringAddresses;
use crate::memory::{SharedBuffer, SharedBufferError};

const AVAIL_F_NO_INTERRUPT: u16 = 1;
pub(crate) const USED_F_NO_NOTIFY: u16 = 1;

/// A chain that the device has, filed under its first descriptor.
#[derive(Debug, Clone)]
struct Chain {
    /// All descriptors of the chain.
    descriptors: Vec<u16>,
    /// Bytes the device may write.
    writable: u32,
}

/// A split virtqueue driven by this process.
#[derive(Debug)]
pub struct DriverQueue {
    memory: Arc<SharedBuffer>,
    layout: SplitLayout,
    /// Where the ring begins in `memory`.
    offset: u64,
    addresses: VringAddresses,
    event_idx: bool,
    /// With IN_ORDER.
    in_order: Option<InOrder>,
    /// Descriptors that are not in any chain; the next to take is in front.
    free: VecDeque<u16>,
    /// By first descriptor.
    outstanding: Vec<Option<Chain>>,
    outstanding_count: u16,
    /// Empty lists of earlier chains, so that a queue in use allocates nothing.
    spare: Vec<Vec<u16>>,
    /// Next avail entry to write; what the device is told.
    next_avail: Wrapping<u16>,
    /// `next_avail` at the last decision about a kick.
    kicked: Wrapping<u16>,
    /// Next used entry to read.
    next_used: Wrapping<u16>,
    interrupts: bool,
    broken: Option<Violation>,
}

fn memory(source: SharedBufferError) -> QueueError {
    QueueError::Memory { source }
}

impl DriverQueue {
    /// An empty ring at `offset` of `buffer`, in [`SplitLayout::size`] zeroed
    /// bytes of it. `features` as negotiated; this ring is split whatever they say.
    ///
    /// # Errors
    /// [`QueueError::Memory`] if it does not fit or is not aligned to a page.
    pub fn new(
        buffer: Arc<SharedBuffer>,
        layout: SplitLayout,
        offset: u64,
        features: RingFeatures,
    ) -> Result<Self, QueueError> {
        Self::with_base(buffer, layout, offset, features, 0)
    }

    /// As [`DriverQueue::new`], but both indices begin at `base`: for a device
    /// that is told to go on there.
    ///
    /// # Errors
    /// As [`DriverQueue::new`].
    pub fn with_base(
        buffer: Arc<SharedBuffer>,
        layout: SplitLayout,
        offset: u64,
        features: RingFeatures,
        base: u16,
    ) -> Result<Self, QueueError> {
        let start = prepare(&buffer, offset, layout.total)?;
        let size = layout.size;
        let queue = Self {
            addresses: VringAddresses {
                descriptor: start,
                driver: start + layout.avail_offset,
                device: start + layout.used_offset,
            },
            memory: buffer,
            layout,
            offset,
            event_idx: features.event_idx,
            in_order: features.in_order.then(InOrder::default),
            free: (0..size).collect(),
            outstanding: vec![None; usize::from(size)],
            outstanding_count: 0,
            spare: Vec::with_capacity(usize::from(size)),
            next_avail: Wrapping(base),
            kicked: Wrapping(base),
            next_used: Wrapping(base),
            interrupts: true,
            broken: None,
        };
        if base != 0 {
            queue.store(queue.avail(2), base)?;
            queue.store(queue.used(2), base)?;
            if features.event_idx {
                queue.store(queue.used_event(), base)?;
                queue.store(queue.used(4 + 8 * u64::from(size)), base)?;
            }
        }
        Ok(queue)
    }

    /// The ring's areas as the device sees them.
    #[must_use]
    pub fn addresses(&self) -> VringAddresses {
        self.addresses
    }

    /// Entries of the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// Descriptors that are free.
    #[must_use]
    pub fn free(&self) -> u16 {
        // Never more than the ring's size.
        u16::try_from(self.free.len()).unwrap_or(u16::MAX)
    }

    /// The next entries of the avail ring to write and of the used ring to read,
    /// free-running.
    #[must_use]
    pub fn positions(&self) -> (u16, u16) {
        (self.next_avail.0, self.next_used.0)
    }

    /// Chains that the device has.
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        self.outstanding_count
    }

    /// Gives the device a chain; what it gives back names the chain in
    /// [`Used::head`]. The device may take it at once.
    ///
    /// # Errors
    /// [`QueueError::Chain`] or [`QueueError::Full`], with nothing changed;
    /// [`QueueError::Broken`].
    pub fn add(&mut self, chain: &[Piece]) -> Result<u16, QueueError> {
        self.working()?;
        let writable = check_chain(chain)?;
        self.make_available(chain, writable, 0)
    }

    /// As [`DriverQueue::add`], with the chain in an indirect table (2.7.5.3) at `table`
    /// of the ring's buffer: 16 bytes for each piece, aligned to 16, which are the
    /// chain's until it comes back. For rings with INDIRECT_DESC negotiated.
    ///
    /// # Errors
    /// As [`DriverQueue::add`]; [`QueueError::Memory`] for a table that does not fit.
    pub fn add_indirect(&mut self, chain: &[Piece], table: u64) -> Result<u16, QueueError> {
        self.working()?;
        let writable = check_chain(chain)?;
        let table = write_table(&self.memory, table, chain, |index, piece, bytes| {
            let more = usize::from(index) + 1 < chain.len();
            let next = if more { Some(index + 1) } else { None };
            *bytes = encode(piece, next, 0);
        })?;
        self.make_available(&[table], writable, DESCRIPTOR_F_INDIRECT)
    }

    /// Makes checked pieces available; `flags` are added to each descriptor.
    fn make_available(
        &mut self,
        chain: &[Piece],
        writable: u32,
        flags: u16,
    ) -> Result<u16, QueueError> {
        let wanted = chain.len();
        let free = self.free();
        if wanted > self.free.len() {
            return Err(QueueError::Full { free, wanted });
        }
        let mut descriptors = self.spare.pop().unwrap_or_default();
        descriptors.extend(self.free.drain(..wanted));
        let head = descriptors[0];
        let nexts = descriptors.iter().skip(1).copied().map(Some);
        for ((piece, &index), next) in chain
            .iter()
            .zip(&descriptors)
            .zip(nexts.chain(std::iter::once(None)))
        {
            let bytes = encode(piece, next, flags);
            self.memory
                .write(self.offset + 16 * u64::from(index), &bytes)
                .map_err(memory)?;
        }
        let slot = u64::from(self.next_avail.0 % self.layout.size);
        self.store(self.avail(4 + 2 * slot), head)?;
        self.outstanding[usize::from(head)] = Some(Chain {
            descriptors,
            writable,
        });
        self.outstanding_count += 1;
        if let Some(in_order) = &mut self.in_order {
            in_order.made_available(head);
        }
        self.next_avail += 1;
        // Release: the device must see descriptors and entry before the index
        // that makes them its own (virtio 1.3, 2.7.13.3).
        self.memory
            .store_u16(self.next_avail.0, self.avail(2), Ordering::Release)
            .map_err(memory)?;
        Ok(head)
    }

    /// Whether the device wants a kick for what was added since the last call.
    ///
    /// # Errors
    /// [`QueueError::Broken`].
    pub fn needs_kick(&mut self) -> Result<bool, QueueError> {
        self.working()?;
        let (old, new) = (self.kicked, self.next_avail);
        if old == new {
            return Ok(false);
        }
        self.kicked = new;
        // Full fence: our index must be visible before the device's wish is
        // read, or both sides may go to sleep (virtio 1.3, 2.7.13.4.1).
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = Wrapping(self.load(self.used(4 + 8 * u64::from(self.layout.size)))?);
            // Kick if `event` is among the entries old .. new (2.7.10).
            Ok(new - event - Wrapping(1) < new - old)
        } else {
            Ok(self.load(self.used(0))? & USED_F_NO_NOTIFY == 0)
        }
    }

    /// Takes back one chain that the device is done with. With IN_ORDER, chains
    /// without a used element of their own count as written completely.
    ///
    /// # Errors
    /// [`QueueError::Broken`] if the device broke a rule, now or before.
    pub fn pop_used(&mut self) -> Result<Option<Used>, QueueError> {
        self.working()?;
        let of_batch = self.in_order.as_mut().and_then(InOrder::take);
        let next = match of_batch {
            Some(next) => Some(next),
            None => self.take_element()?,
        };
        let Some((head, written)) = next else {
            return Ok(None);
        };
        let slot = self.outstanding.get_mut(usize::from(head));
        let Some(mut chain) = slot.and_then(Option::take) else {
            let id = u32::from(head);
            return Err(self.violated(Violation::NotOutstanding { id }));
        };
        self.outstanding_count -= 1;
        let written = written.unwrap_or(chain.writable);
        if self.in_order.is_some() {
            // Behind all others: so they stay in the table's order.
            self.free.extend(chain.descriptors.drain(..));
        } else {
            for index in chain.descriptors.drain(..).rev() {
                self.free.push_front(index);
            }
        }
        self.spare.push(chain.descriptors);
        self.next_used += 1;
        if self.event_idx && self.interrupts {
            self.store(self.used_event(), self.next_used.0)?;
        }
        Ok(Some(Used { head, written }))
    }

    /// Reads and checks the next used element; with IN_ORDER the oldest chain
    /// that it stands for. The length is that of the element's own chain.
    fn take_element(&mut self) -> Result<Option<(u16, Option<u32>)>, QueueError> {
        // Acquire: the element, and what the device wrote into the buffers,
        // must not be read before the index (virtio 1.3, 2.7.14).
        let index = self
            .memory
            .load_u16(self.used(2), Ordering::Acquire)
            .map_err(memory)?;
        let moved = (Wrapping(index) - self.next_used).0;
        if moved == 0 {
            return Ok(None);
        }
        let outstanding = self.outstanding_count;
        // There are never more chains than entries, so this bounds the jump by
        // the ring's size too.
        if moved > outstanding {
            return Err(self.violated(Violation::IndexJump { moved, outstanding }));
        }
        let slot = u64::from(self.next_used.0 % self.layout.size);
        let mut element = [0; 8];
        self.memory
            .read(self.used(4 + 8 * slot), &mut element)
            .map_err(memory)?;
        let [i0, i1, i2, i3, l0, l1, l2, l3] = element;
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        let written = u32::from_le_bytes([l0, l1, l2, l3]);
        let known = u16::try_from(id).ok().and_then(|head| {
            let chain = self.outstanding.get(usize::from(head))?.as_ref()?;
            Some((head, chain.writable))
        });
        let Some((head, offered)) = known else {
            return Err(self.violated(Violation::NotOutstanding { id }));
        };
        if written > offered {
            return Err(self.violated(Violation::TooLong { written, offered }));
        }
        let Some(in_order) = &mut self.in_order else {
            return Ok(Some((head, Some(written))));
        };
        match in_order.batch_len(head) {
            Some(batch) if batch <= usize::from(moved) => {
                in_order.begin(head, written);
                Ok(in_order.take())
            }
            Some(batch) => Err(self.violated(Violation::Batch { id, batch, moved })),
            None => Err(self.violated(Violation::NotOutstanding { id })),
        }
    }

    /// Asks the device to signal used chains, or not to; it may do so anyway.
    /// `true`: chains are waiting already, perhaps without a signal.
    ///
    /// # Errors
    /// [`QueueError::Broken`].
    pub fn set_interrupts(&mut self, enabled: bool) -> Result<bool, QueueError> {
        self.working()?;
        self.interrupts = enabled;
        if self.event_idx {
            // An event far behind is as good as none: the index passes it only
            // after another full round.
            let event = if enabled {
                self.next_used
            } else {
                self.next_used - Wrapping(1)
            };
            self.store(self.used_event(), event.0)?;
        } else {
            let flags = if enabled { 0 } else { AVAIL_F_NO_INTERRUPT };
            self.store(self.avail(0), flags)?;
        }
        // Full fence: our wish must be visible before the index is read, or a
        // chain used in between is missed (virtio 1.3, 2.7.7.1).
        fence(Ordering::SeqCst);
        // A batch that is not taken yet lies behind the index, so it counts.
        Ok(self.load(self.used(2))? != self.next_used.0)
    }

    fn working(&self) -> Result<(), QueueError> {
        match self.broken {
            None => Ok(()),
            Some(source) => Err(QueueError::Broken { source }),
        }
    }

    fn violated(&mut self, violation: Violation) -> QueueError {
        self.broken = Some(violation);
        QueueError::Broken { source: violation }
    }

    /// Offset in memory of a byte of the avail ring.
    fn avail(&self, at: u64) -> u64 {
        self.offset + self.layout.avail_offset + at
    }

    /// Offset in memory of a byte of the used ring.
    fn used(&self, at: u64) -> u64 {
        self.offset + self.layout.used_offset + at
    }

    fn used_event(&self) -> u64 {
        self.avail(4 + 2 * u64::from(self.layout.size))
    }

    fn load(&self, offset: u64) -> Result<u16, QueueError> {
        self.memory
            .load_u16(offset, Ordering::Relaxed)
            .map_err(memory)
    }

    fn store(&self, offset: u64, value: u16) -> Result<(), QueueError> {
        self.memory
            .store_u16(value, offset, Ordering::Relaxed)
            .map_err(memory)
    }
}

/// A descriptor's bytes; `flags` in addition to those of the piece.
fn encode(piece: &Piece, next: Option<u16>, flags: u16) -> [u8; 16] {
    let mut flags = flags;
    if piece.direction == Direction::DeviceWrites {
        flags |= DESCRIPTOR_F_WRITE;
    }
    if next.is_some() {
        flags |= DESCRIPTOR_F_NEXT;
    }
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&piece.iova.to_le_bytes());
    bytes[8..12].copy_from_slice(&piece.len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.unwrap_or(0).to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests;
