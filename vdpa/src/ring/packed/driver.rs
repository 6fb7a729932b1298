//! The driver's reads and writes of a packed ring.
//!
//! The driver reads only the next used descriptor back from the ring.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use super::super::guest::{DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE, DESCRIPTOR_SIZE};
use super::super::ring_memory::{Element, RingMemory};
use super::super::{Direction, PackedLayout, Piece, cannot_begin, no_chain};
use super::{
    DESCRIPTOR_FLAGS, DESCRIPTOR_LENGTH, EVENT_FLAGS, EVENT_FLAGS_DESC, Position, event_flags,
    event_wanted,
};
use crate::Error;
use crate::device::VringBase;

/// A packed ring and its driver's position.
#[derive(Debug)]
pub(crate) struct Driver {
    layout: PackedLayout,
    /// Number of free entries.
    free: u16,
    /// Free buffer ids.
    ids: VecDeque<u16>,
    /// Next entry to make available.
    next_avail: Position,
    /// Entries made available since the last decision about a kick.
    unkicked: u32,
    /// Position of the next used descriptor.
    next_used: Position,
}

impl Driver {
    /// An empty ring in zeroed memory, in which both sides begin at `base`.
    pub(crate) fn new(
        memory: &RingMemory,
        layout: PackedLayout,
        base: VringBase,
    ) -> Result<Self, Error> {
        let size = layout.size;
        let position = match Position::of(base) {
            Some((available, used)) if available == used && used.index < size => used,
            _ => return Err(cannot_begin(base)),
        };
        let ring = Self {
            layout,
            free: size,
            ids: (0..size).collect(),
            next_avail: position,
            unkicked: 0,
            next_used: position,
        };
        // All entries as if they had been used: zeroes mean that before the first lap only.
        let mut entry = position;
        for _ in 0..size {
            let before = Position {
                wrap: !entry.wrap,
                ..entry
            };
            let flags = before.used_flags();
            if flags != 0 {
                memory.store(ring.flags(entry), flags, Ordering::Relaxed)?;
            }
            entry = entry.advance(1, size);
        }
        Ok(ring)
    }

    pub(crate) fn free(&self) -> u16 {
        self.free
    }

    pub(crate) fn positions(&self) -> (u16, u16) {
        (self.next_avail.off_wrap(), self.next_used.off_wrap())
    }

    /// Makes a chain available; the caller has checked that there is room.
    pub(crate) fn make_available(
        &mut self,
        memory: &RingMemory,
        chain: &[Piece],
        extra: u16,
    ) -> Result<u16, Error> {
        // A chain takes at least one entry, and there are as many ids.
        let id = self.ids.pop_front().ok_or_else(no_chain)?;
        let first = self.next_avail;
        let mut first_flags = 0;
        let mut position = first;
        for (number, piece) in (1..).zip(chain) {
            let mut flags = position.available_flags() | extra;
            if piece.direction == Direction::DeviceWrites {
                flags |= DESCRIPTOR_F_WRITE;
            }
            if number < chain.len() {
                flags |= DESCRIPTOR_F_NEXT;
            }
            let bytes = encode(piece, id, 0);
            // All of it except the flags.
            memory.write(self.descriptor(position), &bytes[..14])?;
            if position == first {
                first_flags = flags;
            } else {
                memory.store(self.flags(position), flags, Ordering::Relaxed)?;
            }
            position = position.advance(1, self.layout.size);
            self.free -= 1;
            self.unkicked = self.unkicked.saturating_add(1);
        }
        self.next_avail = position;
        // Release: the whole chain must be visible before the flags that hand its first descriptor
        // to the device (virtio 1.3, 2.8.21.1).
        memory.store(self.flags(first), first_flags, Ordering::Release)?;
        Ok(id)
    }

    pub(crate) fn needs_kick(&mut self, memory: &RingMemory) -> Result<bool, Error> {
        let moved = std::mem::take(&mut self.unkicked);
        if moved == 0 {
            return Ok(false);
        }
        // Full fence: the descriptors must be visible before the device's event suppression is
        // read, or both sides may sleep (virtio 1.3, 2.8.21.3).
        fence(Ordering::SeqCst);
        let event = memory.load_u32(self.layout.device_offset, Ordering::Relaxed)?;
        let (size, now) = (self.layout.size, self.next_avail);
        Ok(event_wanted(event, now, moved, size, memory.event_idx))
    }

    /// The next used descriptor. It may complete all `outstanding` chains.
    pub(crate) fn element(
        &self,
        memory: &RingMemory,
        outstanding: u16,
    ) -> Result<Option<Element>, Error> {
        // Acquire: the rest of the descriptor, and the buffers that the device wrote, are read
        // after this.
        if !self.is_used_by(memory, Ordering::Acquire)? {
            return Ok(None);
        }
        let mut element = [0; 6];
        let at = self.descriptor(self.next_used) + DESCRIPTOR_LENGTH;
        memory.read(at, &mut element)?;
        let [l0, l1, l2, l3, i0, i1] = element;
        Ok(Some(Element {
            id: u32::from(u16::from_le_bytes([i0, i1])),
            written: u32::from_le_bytes([l0, l1, l2, l3]),
            moved: outstanding,
        }))
    }

    /// Frees the entries of the returned chain with buffer id `id`.
    pub(crate) fn reclaim(&mut self, id: u16, descriptors: u16) {
        self.free += descriptors;
        self.ids.push_back(id);
        self.next_used = self.next_used.advance(descriptors, self.layout.size);
    }

    pub(crate) fn ask_for_next(&self, memory: &RingMemory) -> Result<(), Error> {
        memory.store(0, self.next_used.off_wrap(), Ordering::Relaxed)
    }

    pub(crate) fn set_interrupts(&self, memory: &RingMemory, enabled: bool) -> Result<(), Error> {
        let flags = event_flags(enabled, memory.event_idx);
        if flags == EVENT_FLAGS_DESC {
            self.ask_for_next(memory)?;
        }
        // Release: the flags make the offset valid.
        memory.store(EVENT_FLAGS, flags, Ordering::Release)
    }

    /// Whether the next descriptor was used.
    pub(crate) fn is_used(&self, memory: &RingMemory) -> Result<bool, Error> {
        self.is_used_by(memory, Ordering::Relaxed)
    }

    fn is_used_by(&self, memory: &RingMemory, ordering: Ordering) -> Result<bool, Error> {
        let flags = memory.load(self.flags(self.next_used), ordering)?;
        Ok(self.next_used.is_used(flags))
    }

    /// Offset of a descriptor.
    fn descriptor(&self, position: Position) -> u64 {
        self.layout.descriptor_offset + DESCRIPTOR_SIZE * u64::from(position.index)
    }

    /// Offset of a descriptor's flags.
    fn flags(&self, position: Position) -> u64 {
        self.descriptor(position) + DESCRIPTOR_FLAGS
    }
}

/// A descriptor's bytes.
fn encode(piece: &Piece, id: u16, flags: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&piece.iova.0.to_le_bytes());
    bytes[8..12].copy_from_slice(&piece.len.to_le_bytes());
    bytes[12..14].copy_from_slice(&id.to_le_bytes());
    bytes[14..].copy_from_slice(&flags.to_le_bytes());
    bytes
}

/// An entry of an indirect table, in which only WRITE counts (virtio 1.3, 2.8.7).
pub(crate) fn table_entry(piece: &Piece, _next: Option<u16>) -> [u8; 16] {
    let writes = piece.direction == Direction::DeviceWrites;
    encode(piece, 0, if writes { DESCRIPTOR_F_WRITE } else { 0 })
}
