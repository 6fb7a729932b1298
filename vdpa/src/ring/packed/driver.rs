//! The driver's side of a packed virtqueue.
//!
//! The device writes the descriptor ring, so nothing in it is ever read back
//! but the used descriptor that is due, and that is checked. How many
//! descriptors each chain has and how much it takes is kept in private memory.
//!
//! After a [`Violation`] the queue is broken for good:
//! ```text
//!   working --- violation seen in pop_used ---> broken (every call fails)
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::super::guest::{
    DESCRIPTOR_F_INDIRECT, DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE, DESCRIPTOR_SIZE,
};
use super::super::in_order::InOrder;
use super::super::{
    Direction, PackedLayout, Piece, QueueError, RingFeatures, Used, Violation, check_chain,
    prepare, write_table,
};
use super::{
    DESCRIPTOR_FLAGS, DESCRIPTOR_LENGTH, EVENT_FLAGS, EVENT_FLAGS_DESC, EVENT_FLAGS_DISABLE,
    EVENT_FLAGS_ENABLE, Position, event_wanted,
};
use crate::device::{VringAddresses, VringBase};
use crate::memory::{SharedBuffer, SharedBufferError};

/// A chain that the device has, filed under its buffer id.
#[derive(Debug, Clone, Copy)]
struct Chain {
    /// Entries that it takes.
    descriptors: u16,
    /// Bytes the device may write.
    writable: u32,
}

/// A packed virtqueue driven by this process.
#[derive(Debug)]
pub struct DriverQueue {
    memory: Arc<SharedBuffer>,
    layout: PackedLayout,
    /// Where the ring begins in `memory`.
    offset: u64,
    addresses: VringAddresses,
    event_idx: bool,
    /// With IN_ORDER.
    in_order: Option<InOrder>,
    /// Entries that no chain takes.
    free: u16,
    /// Buffer ids that name no chain.
    ids: VecDeque<u16>,
    /// By buffer id.
    outstanding: Vec<Option<Chain>>,
    outstanding_count: u16,
    /// Next entry to make available.
    next_avail: Position,
    /// Entries made available since the last decision about a kick.
    unkicked: u32,
    /// Where the next used descriptor will be.
    next_used: Position,
    interrupts: bool,
    broken: Option<Violation>,
}

fn memory(source: SharedBufferError) -> QueueError {
    QueueError::Memory { source }
}

impl DriverQueue {
    /// An empty ring at `offset` of `buffer`, in [`PackedLayout::size`] zeroed
    /// bytes of it. `features` as negotiated; this ring is packed whatever they say.
    ///
    /// # Errors
    /// [`QueueError::Memory`] if it does not fit or is not aligned to a page.
    pub fn new(
        buffer: Arc<SharedBuffer>,
        layout: PackedLayout,
        offset: u64,
        features: RingFeatures,
    ) -> Result<Self, QueueError> {
        Self::with_base(buffer, layout, offset, features, VringBase::initial(true))
    }

    /// As [`DriverQueue::new`], but both sides begin at `base`, with nothing in flight:
    /// for a device that is told to go on there.
    ///
    /// # Errors
    /// As [`DriverQueue::new`]; [`QueueError::Base`] for a position of a split ring, outside
    /// this one or with something in flight.
    pub fn with_base(
        buffer: Arc<SharedBuffer>,
        layout: PackedLayout,
        offset: u64,
        features: RingFeatures,
        base: VringBase,
    ) -> Result<Self, QueueError> {
        let start = prepare(&buffer, offset, layout.total)?;
        let size = layout.size;
        let position = match Position::of(base) {
            Some((available, used)) if available == used && used.index < size => used,
            _ => return Err(QueueError::Base { base }),
        };
        let queue = Self {
            addresses: VringAddresses {
                descriptor: start + layout.descriptor_offset,
                driver: start,
                device: start + layout.device_offset,
            },
            memory: buffer,
            layout,
            offset,
            event_idx: features.event_idx,
            in_order: features.in_order.then(InOrder::default),
            free: size,
            ids: (0..size).collect(),
            outstanding: vec![None; usize::from(size)],
            outstanding_count: 0,
            next_avail: position,
            unkicked: 0,
            next_used: position,
            interrupts: true,
            broken: None,
        };
        // All entries as if they had been used: zeroes say so before the first lap only.
        let mut entry = position;
        for _ in 0..size {
            let before = Position {
                wrap: !entry.wrap,
                ..entry
            };
            let flags = before.used_flags();
            if flags != 0 {
                queue.store(queue.descriptor(entry) + DESCRIPTOR_FLAGS, flags)?;
            }
            entry = entry.advance(1, size);
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
        self.free
    }

    /// Where the driver makes the next descriptor available and where it looks for
    /// the next used one, each as `off_wrap` (virtio 1.3, 2.8.10).
    #[must_use]
    pub fn positions(&self) -> (u16, u16) {
        (self.next_avail.off_wrap(), self.next_used.off_wrap())
    }

    /// Chains that the device has.
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        self.outstanding_count
    }

    /// Gives the device a chain; what it gives back, the buffer id, names the
    /// chain in [`Used::head`]. The device may take it at once.
    ///
    /// # Errors
    /// [`QueueError::Chain`] or [`QueueError::Full`], with nothing changed;
    /// [`QueueError::Broken`].
    pub fn add(&mut self, chain: &[Piece]) -> Result<u16, QueueError> {
        self.working()?;
        let writable = check_chain(chain)?;
        self.make_available(chain, writable, 0)
    }

    /// As [`DriverQueue::add`], with the chain in an indirect table (2.8.7) at `table`
    /// of the ring's buffer: 16 bytes for each piece, aligned to 16, which are the
    /// chain's until it comes back. For rings with INDIRECT_DESC negotiated.
    ///
    /// # Errors
    /// As [`DriverQueue::add`]; [`QueueError::Memory`] for a table that does not fit.
    pub fn add_indirect(&mut self, chain: &[Piece], table: u64) -> Result<u16, QueueError> {
        self.working()?;
        let writable = check_chain(chain)?;
        let table = write_table(&self.memory, table, chain, |_, piece, bytes| {
            bytes[..8].copy_from_slice(&piece.iova.to_le_bytes());
            bytes[8..12].copy_from_slice(&piece.len.to_le_bytes());
            if piece.direction == Direction::DeviceWrites {
                bytes[14..].copy_from_slice(&DESCRIPTOR_F_WRITE.to_le_bytes());
            }
        })?;
        self.make_available(&[table], writable, DESCRIPTOR_F_INDIRECT)
    }

    /// Makes checked pieces available; `extra` flags are added to each descriptor.
    fn make_available(
        &mut self,
        chain: &[Piece],
        writable: u32,
        extra: u16,
    ) -> Result<u16, QueueError> {
        let (free, wanted) = (self.free, chain.len());
        let full = QueueError::Full { free, wanted };
        let Ok(descriptors) = u16::try_from(wanted) else {
            return Err(full);
        };
        let Some(left) = free.checked_sub(descriptors) else {
            return Err(full);
        };
        // Never empty: a chain takes at least one entry, and one was free.
        let Some(id) = self.ids.pop_front() else {
            return Err(full);
        };
        let first = self.next_avail;
        let mut first_flags = 0;
        let mut position = first;
        for (number, piece) in (1..).zip(chain) {
            let mut flags = position.available_flags() | extra;
            if piece.direction == Direction::DeviceWrites {
                flags |= DESCRIPTOR_F_WRITE;
            }
            if number < wanted {
                flags |= DESCRIPTOR_F_NEXT;
            }
            self.write_body(position, piece, id)?;
            if position == first {
                first_flags = flags;
            } else {
                self.store(self.descriptor(position) + DESCRIPTOR_FLAGS, flags)?;
            }
            position = position.advance(1, self.layout.size);
        }
        let slot = self.outstanding.get_mut(usize::from(id));
        if let Some(slot) = slot {
            *slot = Some(Chain {
                descriptors,
                writable,
            });
        }
        self.outstanding_count += 1;
        self.free = left;
        if let Some(in_order) = &mut self.in_order {
            in_order.made_available(id);
        }
        self.next_avail = position;
        self.unkicked = self.unkicked.saturating_add(u32::from(descriptors));
        // Release: the whole chain must be there before the flags that make its
        // first descriptor the device's (virtio 1.3, 2.8.21.1).
        self.memory
            .store_u16(
                first_flags,
                self.descriptor(first) + DESCRIPTOR_FLAGS,
                Ordering::Release,
            )
            .map_err(memory)?;
        Ok(id)
    }

    /// Whether the device wants a kick for what was added since the last call.
    ///
    /// # Errors
    /// [`QueueError::Broken`].
    pub fn needs_kick(&mut self) -> Result<bool, QueueError> {
        self.working()?;
        let moved = std::mem::take(&mut self.unkicked);
        if moved == 0 {
            return Ok(false);
        }
        // Full fence: our descriptors must be visible before the device's wish
        // is read, or both sides may go to sleep (virtio 1.3, 2.8.21.3).
        fence(Ordering::SeqCst);
        let event = self
            .memory
            .load_u32(self.offset + self.layout.device_offset, Ordering::Relaxed)
            .map_err(memory)?;
        let size = self.layout.size;
        Ok(event_wanted(
            event,
            self.next_avail,
            moved,
            size,
            self.event_idx,
        ))
    }

    /// Takes back one chain that the device is done with. With IN_ORDER, chains
    /// without a used descriptor of their own count as written completely.
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
        let Some(chain) = slot.and_then(Option::take) else {
            let id = u32::from(head);
            return Err(self.violated(Violation::NotOutstanding { id }));
        };
        self.outstanding_count -= 1;
        self.free += chain.descriptors;
        self.ids.push_back(head);
        self.next_used = self.next_used.advance(chain.descriptors, self.layout.size);
        if self.event_idx && self.interrupts {
            self.store(self.offset, self.next_used.off_wrap())?;
        }
        Ok(Some(Used {
            head,
            written: written.unwrap_or(chain.writable),
        }))
    }

    /// Reads and checks the next used descriptor; with IN_ORDER the oldest chain
    /// that it stands for. The length is that of the descriptor's own chain.
    fn take_element(&mut self) -> Result<Option<(u16, Option<u32>)>, QueueError> {
        if !self.is_used(Ordering::Acquire)? {
            return Ok(None);
        }
        let mut element = [0; 6];
        self.memory
            .read(
                self.descriptor(self.next_used) + DESCRIPTOR_LENGTH,
                &mut element,
            )
            .map_err(memory)?;
        let [l0, l1, l2, l3, i0, i1] = element;
        let written = u32::from_le_bytes([l0, l1, l2, l3]);
        let head = u16::from_le_bytes([i0, i1]);
        let id = u32::from(head);
        let Some(&Some(chain)) = self.outstanding.get(usize::from(head)) else {
            return Err(self.violated(Violation::NotOutstanding { id }));
        };
        let offered = chain.writable;
        if written > offered {
            return Err(self.violated(Violation::TooLong { written, offered }));
        }
        let Some(in_order) = &mut self.in_order else {
            return Ok(Some((head, Some(written))));
        };
        in_order.begin(head, written);
        Ok(in_order.take())
    }

    /// Asks the device to signal used chains, or not to; it may do so anyway.
    /// `true`: chains are waiting already, perhaps without a signal.
    ///
    /// # Errors
    /// [`QueueError::Broken`].
    pub fn set_interrupts(&mut self, enabled: bool) -> Result<bool, QueueError> {
        self.working()?;
        self.interrupts = enabled;
        let flags = match enabled {
            false => EVENT_FLAGS_DISABLE,
            true if self.event_idx => EVENT_FLAGS_DESC,
            true => EVENT_FLAGS_ENABLE,
        };
        if flags == EVENT_FLAGS_DESC {
            self.store(self.offset, self.next_used.off_wrap())?;
        }
        // Release: the flags make the offset valid.
        self.memory
            .store_u16(flags, self.offset + EVENT_FLAGS, Ordering::Release)
            .map_err(memory)?;
        // Full fence: our wish must be visible before the ring is read, or a
        // chain used in between is missed.
        fence(Ordering::SeqCst);
        let of_batch = self.in_order.as_ref().is_some_and(InOrder::is_pending);
        Ok(of_batch || self.is_used(Ordering::Relaxed)?)
    }

    /// Whether the descriptor that is due was used. With `Acquire` the rest of it,
    /// and what the device wrote into the buffers, can be read after this.
    fn is_used(&self, ordering: Ordering) -> Result<bool, QueueError> {
        let flags = self
            .memory
            .load_u16(self.descriptor(self.next_used) + DESCRIPTOR_FLAGS, ordering)
            .map_err(memory)?;
        Ok(self.next_used.is_used(flags))
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

    /// Writes all of a descriptor but its flags.
    fn write_body(&self, position: Position, piece: &Piece, id: u16) -> Result<(), QueueError> {
        let mut bytes = [0; 14];
        bytes[..8].copy_from_slice(&piece.iova.to_le_bytes());
        bytes[8..12].copy_from_slice(&piece.len.to_le_bytes());
        bytes[12..].copy_from_slice(&id.to_le_bytes());
        self.memory
            .write(self.descriptor(position), &bytes)
            .map_err(memory)
    }

    /// Offset in memory of a descriptor.
    fn descriptor(&self, position: Position) -> u64 {
        self.offset + self.layout.descriptor_offset + DESCRIPTOR_SIZE * u64::from(position.index)
    }

    fn store(&self, offset: u64, value: u16) -> Result<(), QueueError> {
        self.memory
            .store_u16(value, offset, Ordering::Relaxed)
            .map_err(memory)
    }
}
