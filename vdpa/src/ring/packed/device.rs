//! The device's side of a packed virtqueue in guest memory.
//!
//! It tracks positions and the chains in flight. A new chain's buffer id must not be that of a
//! chain in flight.

use std::collections::BTreeMap;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress};

use super::super::guest::{
    ChainReader, DESCRIPTOR_F_INDIRECT, DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE, DESCRIPTOR_SIZE,
    access,
};
use super::super::{Chain, Piece, RingFeatures, Violation};
use super::guest::{Descriptor, GuestRing};
use super::{
    DESCRIPTOR_F_AVAIL, DESCRIPTOR_F_USED, DESCRIPTOR_FLAGS, EVENT_FLAGS, EVENT_FLAGS_DESC,
    Position, base_of, event_flags, event_wanted,
};
use crate::Error;
use crate::device::VringBase;

/// A chain in flight.
#[derive(Debug, Clone)]
struct InFlight {
    /// Its descriptors as the driver wrote them. Most chains have one.
    first: Descriptor,
    rest: Vec<Descriptor>,
    /// Number of entries that it takes.
    descriptors: u16,
    /// Its number among the popped chains, from 0.
    sequence: u64,
}

/// The device's side of a packed virtqueue in guest memory. Methods without a description here are
/// described at [`DeviceQueue`](super::super::DeviceQueue).
#[derive(Debug)]
pub struct DeviceQueue {
    ring: GuestRing,
    size: u16,
    event_idx: bool,
    in_order: bool,
    /// Position of the next chain.
    next_avail: Position,
    /// Position of the next used descriptor.
    next_used: Position,
    /// By buffer id.
    in_flight: BTreeMap<u16, InFlight>,
    /// Entries of all chains in flight.
    entries_in_flight: u16,
    popped: u64,
    pushed: u64,
    /// Entries used since the last decision about a signal.
    unsignalled: u32,
}

impl DeviceQueue {
    /// Takes over a ring at `base`, with nothing in flight. `features` are the negotiated ones.
    ///
    /// # Errors
    /// Such a ring cannot begin at `base`.
    pub(crate) fn new(
        ring: GuestRing,
        base: VringBase,
        features: RingFeatures,
    ) -> Result<Self, Error> {
        let size = ring.size();
        let position = match Position::of(base) {
            Some((available, used)) if available == used && used.index < size => used,
            _ => return Err(ring.cannot_begin(base)),
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

    /// The device's current position.
    pub(crate) fn base(&self) -> VringBase {
        base_of(self.next_avail, self.next_used)
    }

    pub(crate) fn positions(&self) -> (u16, u16) {
        (self.next_avail.off_wrap(), self.next_used.off_wrap())
    }

    /// Chains that were popped and not returned.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    pub(crate) fn pop(&mut self) -> Result<Option<Chain>, Error> {
        let mut pieces = Vec::new();
        let popped = self.pop_into(&mut pieces)?;
        Ok(popped.map(|id| Chain { id, pieces }))
    }

    pub(crate) fn pop_into(&mut self, pieces: &mut Vec<Piece>) -> Result<Option<u16>, Error> {
        // Acquire: the chain must not be read before the flags that hand it to the device.
        if !self.is_available(Ordering::Acquire)? {
            return Ok(None);
        }
        let room = self.size - self.entries_in_flight;
        let mut reader = ChainReader::new(&self.ring, pieces);
        let mut position = self.next_avail;
        let mut descriptors = 0;
        let (mut first, mut rest) = (None, Vec::new());
        let (first, id) = loop {
            if descriptors == room {
                return Err(Violation::Overrun.into());
            }
            descriptors += 1;
            let descriptor = self.ring.read_entry(position.index)?;
            position = position.advance(1, self.size);
            if descriptor.has(DESCRIPTOR_F_INDIRECT) {
                self.take_table(&descriptor, &mut reader)?;
            } else {
                reader.take(descriptor.address, descriptor.len, descriptor.flags)?;
            }
            let first = match first {
                None => *first.insert(descriptor),
                Some(first) => {
                    rest.push(descriptor);
                    first
                }
            };
            if !descriptor.has(DESCRIPTOR_F_NEXT) {
                // Only the last descriptor's id counts (virtio 1.3, 2.8.6).
                break (first, descriptor.id);
            }
        };
        reader.finish()?;
        if self.in_flight.contains_key(&id) {
            return Err(Violation::DuplicateId { id }.into());
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
        Ok(Some(id))
    }

    /// Reads the descriptors of an indirect table. They are consecutive, and only WRITE counts
    /// among their flags (virtio 1.3, 2.8.7).
    fn take_table(&self, table: &Descriptor, reader: &mut ChainReader<'_>) -> Result<(), Error> {
        let entries = reader.table(table.address, table.len, table.flags)?;
        for number in 0..u64::from(entries) {
            // Inside memory, so no wrap.
            let at = table.address + DESCRIPTOR_SIZE * number;
            let (address, len, _, flags) = self.ring.descriptor(at)?;
            if flags & DESCRIPTOR_F_INDIRECT != 0 {
                return Err(Violation::Indirect.into());
            }
            reader.take(address, len, flags)?;
        }
        Ok(())
    }

    pub(crate) fn push_used(&mut self, id: u16, written: u32) -> Result<(), Error> {
        self.push_used_together(&[(id, written)])
    }

    /// The driver reads the flags of the next entry only. So the first descriptor is written last,
    /// and shows all of them.
    pub(crate) fn push_used_together(&mut self, chains: &[(u16, u32)]) -> Result<(), Error> {
        let mut total = 0_u16;
        for (&(id, _), sequence) in chains.iter().zip(self.pushed..) {
            let chain = self.in_flight.get(&id);
            let chain = chain.filter(|chain| !self.in_order || chain.sequence == sequence);
            let entries = chain.and_then(|chain| total.checked_add(chain.descriptors));
            total = entries
                .filter(|&total| total <= self.entries_in_flight)
                .ok_or_else(|| Error::other(format!("buffer id {id} cannot be used now")))?;
        }
        let mut left = total;
        for &(id, written) in chains.iter().rev() {
            left -= self.in_flight.get(&id).map_or(0, |chain| chain.descriptors);
            let position = self.next_used.advance(left, self.size);
            let mut flags = position.used_flags();
            if written > 0 {
                // Marks the length as valid (virtio 1.3, 2.8.4).
                flags |= DESCRIPTOR_F_WRITE;
            }
            self.ring.write_result(position.index, written, id, flags)?;
        }
        for (id, _) in chains {
            self.in_flight.remove(id);
            self.pushed += 1;
        }
        self.entries_in_flight -= total;
        self.next_used = self.next_used.advance(total, self.size);
        self.unsignalled = self.unsignalled.saturating_add(u32::from(total));
        Ok(())
    }

    pub(crate) fn publish(&mut self) -> Result<bool, Error> {
        let moved = std::mem::take(&mut self.unsignalled);
        if moved == 0 {
            return Ok(false);
        }
        // Full fence: the used descriptors must be visible before the driver's event suppression is
        // read. Otherwise a driver that enables interrupts in between waits forever.
        fence(Ordering::SeqCst);
        self.is_wanted(self.next_used, moved)
    }

    pub(crate) fn wants_interrupt(&self) -> Result<bool, Error> {
        let in_flight = self.entries_in_flight;
        if in_flight == 0 {
            return Ok(false);
        }
        let end = self.next_used.advance(in_flight, self.size);
        self.is_wanted(end, u32::from(in_flight))
    }

    /// Whether the driver wants an event for the last `moved` entries before `now`.
    fn is_wanted(&self, now: Position, moved: u32) -> Result<bool, Error> {
        let at = self.ring.addresses().driver;
        let event: u32 = self
            .ring
            .memory()
            .load(GuestAddress(at.0), Ordering::Relaxed)
            .map(u32::from_le)
            .map_err(access(at))?;
        Ok(event_wanted(event, now, moved, self.size, self.event_idx))
    }

    pub(crate) fn set_notifications(&mut self, enabled: bool) -> Result<bool, Error> {
        let area = self.ring.addresses().device;
        let flags = event_flags(enabled, self.event_idx);
        if flags == EVENT_FLAGS_DESC {
            let off_wrap = self.next_avail.off_wrap();
            self.ring.store(area, off_wrap, Ordering::Relaxed)?;
        }
        // Release: the flags make the offset valid.
        self.ring
            .store(area + EVENT_FLAGS, flags, Ordering::Release)?;
        // Full fence: the new event suppression must be visible before the ring is read, or a chain
        // made available in between is missed.
        fence(Ordering::SeqCst);
        self.is_available(Ordering::Relaxed)
    }

    /// Writes the chains in flight into the entries from the used position on, available. They have
    /// the order in which they were popped and the driver's content. Returns their ids in that
    /// order. Otherwise a device that begins at the used position would find used descriptors of
    /// chains that were completed out of order.
    ///
    /// The driver does not notice. The entries belong to the device until they are used. The driver
    /// reads only the flags of the next one, and it identifies returned chains by id. No device may
    /// work on the ring meanwhile. The queue itself may continue afterwards.
    ///
    /// # Errors
    /// Guest memory cannot be written.
    pub(crate) fn arrange(&self) -> Result<Vec<u16>, Error> {
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
        // From the last to the first, so that no chain is visible before all of it is written.
        for (position, mut descriptor) in entries.into_iter().rev() {
            descriptor.flags &= !(DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED);
            descriptor.flags |= position.available_flags();
            self.ring.write_entry(position.index, &descriptor)?;
        }
        Ok(chains.into_iter().map(|(&id, _)| id).collect())
    }

    fn is_available(&self, ordering: Ordering) -> Result<bool, Error> {
        let address = self.ring.entry(self.next_avail.index) + DESCRIPTOR_FLAGS;
        let flags = self.ring.load(address, ordering)?;
        Ok(self.next_avail.is_available(flags))
    }
}
