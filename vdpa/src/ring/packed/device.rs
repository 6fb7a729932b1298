//! The device's side of a packed virtqueue that lies in guest memory.
//!
//! ```text
//!   guest's ring --pop--> Chain (copied once, checked) --push_used--> guest's ring
//! ```
//! Everything the driver writes is hostile. A chain is copied out once and
//! checked whole: its pieces are guest memory, readable ones come first, it has
//! an end, and its buffer id names no chain that is out. Owns positions and what
//! is in flight; must not know what the buffers are for, nor who is signalled.
//! A fault changes nothing here: that the queue is served no longer is up to
//! the caller.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress};

use super::super::{Direction, Piece, RingFeatures};
use super::error::{ChainFault, DeviceQueueError};
use super::guest::{Descriptor, GuestRing, inside};
use super::{
    DESCRIPTOR_F_AVAIL, DESCRIPTOR_F_INDIRECT, DESCRIPTOR_F_NEXT, DESCRIPTOR_F_USED,
    DESCRIPTOR_F_WRITE, DESCRIPTOR_FLAGS, DESCRIPTOR_SIZE, EVENT_FLAGS, EVENT_FLAGS_DESC,
    EVENT_FLAGS_DISABLE, EVENT_FLAGS_ENABLE, Position, base_of, event_wanted,
};
use crate::device::{VringAddresses, VringBase};
use crate::memory::GuestMemory;

/// Descriptors that a chain may have even if the ring is smaller: virtio limits
/// it to the ring's size, but drivers with indirect tables go further.
const CHAIN_MIN_LIMIT: usize = 256;

/// A chain, copied once out of guest memory: what the driver changes there
/// afterwards has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Buffer id, to be given back by [`DeviceQueue::push_used`].
    pub id: u16,
    /// The pieces, guest-physical addresses, those that the device reads first;
    /// empty pieces are left out. Each was inside guest memory when checked.
    pub pieces: Vec<Piece>,
}

/// What is known of a chain in flight.
#[derive(Debug, Clone)]
struct InFlight {
    /// Its descriptors as the driver wrote them. Most chains have one.
    first: Descriptor,
    rest: Vec<Descriptor>,
    /// Entries that it takes.
    descriptors: u16,
    /// Which one it was of those that were popped, from 0.
    sequence: u64,
}

/// The pieces of a chain while it is read.
#[derive(Debug)]
struct Pieces<'a> {
    memory: &'a GuestMemory,
    limit: usize,
    taken: usize,
    total: u32,
    pieces: Vec<Piece>,
}

impl Pieces<'_> {
    fn take(&mut self, descriptor: &Descriptor) -> Result<(), ChainFault> {
        if self.taken == self.limit {
            return Err(ChainFault::TooLong);
        }
        self.taken += 1;
        let direction = if descriptor.has(DESCRIPTOR_F_WRITE) {
            Direction::DeviceWrites
        } else {
            Direction::DeviceReads
        };
        let last = self.pieces.last().map(|piece| piece.direction);
        if (last, direction) == (Some(Direction::DeviceWrites), Direction::DeviceReads) {
            return Err(ChainFault::Order);
        }
        let total = self.total.checked_add(descriptor.len);
        self.total = total.ok_or(ChainFault::TooLarge)?;
        if descriptor.len == 0 {
            return Ok(());
        }
        if !inside(self.memory, descriptor.address, u64::from(descriptor.len)) {
            return Err(ChainFault::OutsideMemory);
        }
        self.pieces.push(Piece {
            iova: descriptor.address,
            len: descriptor.len,
            direction,
        });
        Ok(())
    }
}

/// The device's side of a packed virtqueue in guest memory.
#[derive(Debug)]
pub struct DeviceQueue {
    ring: GuestRing,
    size: u16,
    event_idx: bool,
    in_order: bool,
    /// Where the next chain will be.
    next_avail: Position,
    /// Where the next used descriptor goes.
    next_used: Position,
    /// By buffer id.
    in_flight: BTreeMap<u16, InFlight>,
    /// Entries of all of them.
    entries_in_flight: u16,
    popped: u64,
    pushed: u64,
    /// Entries used since the last decision about a signal.
    unsignalled: u32,
}

impl DeviceQueue {
    /// Takes over a ring of `size` entries, 1 to 32768, at guest-physical
    /// `addresses`, with nothing in flight. `base` is [`VringBase::initial`] or
    /// what [`DeviceQueue::base`] said. `features` as negotiated.
    ///
    /// # Errors
    /// The size, alignment or place of the ring, or the position, is not acceptable.
    pub fn new(
        memory: Arc<GuestMemory>,
        size: u16,
        addresses: VringAddresses,
        base: VringBase,
        features: RingFeatures,
    ) -> Result<Self, DeviceQueueError> {
        Self::of(GuestRing::new(memory, size, addresses)?, base, features)
    }

    /// As [`DeviceQueue::new`], for a ring whose place was checked. To take
    /// chains once more that another device had taken, `base` names its used position twice.
    ///
    /// # Errors
    /// [`DeviceQueueError::Base`].
    pub fn of(
        ring: GuestRing,
        base: VringBase,
        features: RingFeatures,
    ) -> Result<Self, DeviceQueueError> {
        let size = ring.size();
        let position = match Position::of(base) {
            Some((available, used)) if available == used && used.index < size => used,
            _ => return Err(DeviceQueueError::Base { base, size }),
        };
        Ok(Self {
            ring,
            size,
            event_idx: features.event_idx,
            in_order: features.in_order,
            next_avail: position,
            next_used: position,
            in_flight: BTreeMap::new(),
            entries_in_flight: 0,
            popped: 0,
            pushed: 0,
            unsignalled: 0,
        })
    }

    /// Entries of the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Where the device stands now.
    #[must_use]
    pub fn base(&self) -> VringBase {
        base_of(self.next_avail, self.next_used)
    }

    /// Chains that were popped and not given back.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Takes the next available chain, if there is one.
    ///
    /// # Errors
    /// [`DeviceQueueError::Chain`]: the driver wrote something malformed;
    /// nothing was taken.
    pub fn pop(&mut self) -> Result<Option<Chain>, DeviceQueueError> {
        let index = self.next_avail.index;
        let fault = |fault| DeviceQueueError::Chain { index, fault };
        // Acquire: the chain must not be read before the flags that make it ours.
        if !self.is_available(Ordering::Acquire)? {
            return Ok(None);
        }
        let room = self.size - self.entries_in_flight;
        let mut pieces = Pieces {
            memory: self.ring.memory(),
            limit: CHAIN_MIN_LIMIT.max(usize::from(self.size)),
            taken: 0,
            total: 0,
            pieces: Vec::new(),
        };
        let mut position = self.next_avail;
        let mut descriptors = 0;
        let (mut first, mut rest) = (None, Vec::new());
        let (first, id) = loop {
            if descriptors == room {
                return Err(fault(ChainFault::Overrun));
            }
            descriptors += 1;
            let descriptor = self.ring.read_entry(position.index);
            let descriptor = descriptor.map_err(DeviceQueueError::Memory)?;
            position = position.advance(1, self.size);
            let more = descriptor.has(DESCRIPTOR_F_NEXT);
            if descriptor.has(DESCRIPTOR_F_INDIRECT) {
                if more {
                    return Err(fault(ChainFault::Indirect));
                }
                self.take_table(&descriptor, &mut pieces, index)?;
            } else {
                pieces.take(&descriptor).map_err(fault)?;
            }
            let first = match first {
                None => *first.insert(descriptor),
                Some(first) => {
                    rest.push(descriptor);
                    first
                }
            };
            if !more {
                // Only the last one's id counts (virtio 1.3, 2.8.6).
                break (first, descriptor.id);
            }
        };
        let pieces = pieces.pieces;
        if self.in_flight.contains_key(&id) {
            return Err(fault(ChainFault::DuplicateId));
        }
        let sequence = self.popped;
        self.popped += 1;
        self.in_flight.insert(
            id,
            InFlight {
                first,
                rest,
                descriptors,
                sequence,
            },
        );
        self.entries_in_flight += descriptors;
        self.next_avail = position;
        Ok(Some(Chain { id, pieces }))
    }

    /// The descriptors of an indirect table: one behind the other, and of their
    /// flags only WRITE counts (virtio 1.3, 2.8.7).
    fn take_table(
        &self,
        table: &Descriptor,
        pieces: &mut Pieces<'_>,
        index: u16,
    ) -> Result<(), DeviceQueueError> {
        let fault = |fault| DeviceQueueError::Chain { index, fault };
        let len = u64::from(table.len);
        if len == 0 || !len.is_multiple_of(DESCRIPTOR_SIZE) {
            return Err(fault(ChainFault::Indirect));
        }
        if !inside(self.ring.memory(), table.address, len) {
            return Err(fault(ChainFault::OutsideMemory));
        }
        for number in 0..len / DESCRIPTOR_SIZE {
            // Inside memory, so no wrap.
            let descriptor = self.ring.read(table.address + DESCRIPTOR_SIZE * number);
            let descriptor = descriptor.map_err(DeviceQueueError::Memory)?;
            if descriptor.has(DESCRIPTOR_F_INDIRECT) {
                return Err(fault(ChainFault::Indirect));
            }
            pieces.take(&descriptor).map_err(fault)?;
        }
        Ok(())
    }

    /// Gives a chain back, by its buffer id; `written` is how many bytes were
    /// written into it. The caller has made every write to its buffers before.
    ///
    /// # Errors
    /// [`DeviceQueueError::NotInFlight`], or guest memory cannot be written.
    pub fn push_used(&mut self, id: u16, written: u32) -> Result<(), DeviceQueueError> {
        let not_in_flight = DeviceQueueError::NotInFlight { id };
        let descriptors = match self.in_flight.get(&id) {
            Some(chain) if !self.in_order || chain.sequence == self.pushed => chain.descriptors,
            _ => return Err(not_in_flight),
        };
        let mut flags = self.next_used.used_flags();
        if written > 0 {
            // Says that the length is valid (virtio 1.3, 2.8.4).
            flags |= DESCRIPTOR_F_WRITE;
        }
        self.ring
            .write_result(self.next_used.index, written, id, flags)
            .map_err(DeviceQueueError::Memory)?;
        self.in_flight.remove(&id);
        self.entries_in_flight -= descriptors;
        self.pushed += 1;
        self.next_used = self.next_used.advance(descriptors, self.size);
        let moved = u32::from(descriptors);
        self.unsignalled = self.unsignalled.saturating_add(moved);
        Ok(())
    }

    /// Whether the driver wants an interrupt for what was given back since the
    /// last call.
    ///
    /// # Errors
    /// Guest memory cannot be read.
    pub fn needs_signal(&mut self) -> Result<bool, DeviceQueueError> {
        let moved = std::mem::take(&mut self.unsignalled);
        if moved == 0 {
            return Ok(false);
        }
        // Full fence: the used descriptors must be visible before the driver's
        // wish is read, or a driver that asks for interrupts in between waits for ever.
        fence(Ordering::SeqCst);
        self.is_wanted(self.next_used, moved)
    }

    /// Whether the driver, as it wishes just now, is to be interrupted for any of the chains
    /// that were popped and not given back. It may change its wish at any time.
    ///
    /// # Errors
    /// Guest memory cannot be read.
    pub fn wants_signal(&self) -> Result<bool, DeviceQueueError> {
        let in_flight = self.entries_in_flight;
        if in_flight == 0 {
            return Ok(false);
        }
        let end = self.next_used.advance(in_flight, self.size);
        self.is_wanted(end, u32::from(in_flight))
    }

    /// Whether the driver wants to hear of the last `moved` entries before `now`.
    fn is_wanted(&self, now: Position, moved: u32) -> Result<bool, DeviceQueueError> {
        let event: u32 = self
            .ring
            .memory()
            .load(
                GuestAddress(self.ring.addresses().driver),
                Ordering::Relaxed,
            )
            .map(u32::from_le)
            .map_err(DeviceQueueError::Memory)?;
        Ok(event_wanted(event, now, moved, self.size, self.event_idx))
    }

    /// Asks the driver to kick, or not to; it may do so anyway. `true`: a chain
    /// is available already, which perhaps no kick will announce.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn set_notifications(&mut self, enabled: bool) -> Result<bool, DeviceQueueError> {
        let area = self.ring.addresses().device;
        let flags = match enabled {
            false => EVENT_FLAGS_DISABLE,
            true if self.event_idx => EVENT_FLAGS_DESC,
            true => EVENT_FLAGS_ENABLE,
        };
        if flags == EVENT_FLAGS_DESC {
            let off_wrap = self.next_avail.off_wrap();
            self.store(area, off_wrap, Ordering::Relaxed)?;
        }
        // Release: the flags make the offset valid.
        self.store(area + EVENT_FLAGS, flags, Ordering::Release)?;
        // Full fence: our wish must be visible before the ring is read, or a
        // chain made available in between is missed.
        fence(Ordering::SeqCst);
        self.is_available(Ordering::Relaxed)
    }

    /// Writes the chains in flight into the entries from the used position on, in the
    /// order in which they were popped and as the driver wrote them, available; gives their
    /// ids in that order. Without it a device that is to begin at the used position would
    /// find used descriptors of chains that were completed out of order.
    ///
    /// The driver does not see it: those entries are the device's until they are used, it
    /// looks at the flags of the next one only, and by the id alone it knows what comes
    /// back. No device may work on the ring meanwhile. The queue itself may go on afterwards.
    ///
    /// # Errors
    /// Guest memory cannot be written.
    pub fn arrange(&self) -> Result<Vec<u16>, DeviceQueueError> {
        let mut chains: Vec<(&u16, &InFlight)> = self.in_flight.iter().collect();
        chains.sort_unstable_by_key(|(_, chain)| chain.sequence);
        let mut position = self.next_used;
        let mut entries = Vec::with_capacity(usize::from(self.entries_in_flight));
        for (_, chain) in &chains {
            for descriptor in std::iter::once(&chain.first).chain(&chain.rest) {
                entries.push((position, *descriptor));
                position = position.advance(1, self.size);
            }
        }
        // From the last to the first, so that no chain is there before all of it is.
        for (position, mut descriptor) in entries.into_iter().rev() {
            descriptor.flags &= !(DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED);
            descriptor.flags |= position.available_flags();
            self.ring
                .write_entry(position.index, &descriptor)
                .map_err(DeviceQueueError::Memory)?;
        }
        Ok(chains.into_iter().map(|(&id, _)| id).collect())
    }

    fn is_available(&self, ordering: Ordering) -> Result<bool, DeviceQueueError> {
        let address = self.ring.entry(self.next_avail.index) + DESCRIPTOR_FLAGS;
        self.ring
            .load(address, ordering)
            .map(|flags| self.next_avail.is_available(flags))
            .map_err(DeviceQueueError::Memory)
    }

    fn store(&self, address: u64, value: u16, ordering: Ordering) -> Result<(), DeviceQueueError> {
        self.ring
            .store(address, value, ordering)
            .map_err(DeviceQueueError::Memory)
    }
}
