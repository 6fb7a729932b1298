//! The driver's reads and writes of a split ring.

use std::collections::VecDeque;
use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use super::super::guest::{DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE};
use super::super::ring_memory::{Element, RingMemory};
use super::super::{Direction, Piece, SplitLayout, Violation, no_chain};
use super::{AVAIL_F_NO_INTERRUPT, Suppression};
use crate::Error;

/// A split ring and its driver's position.
#[derive(Debug)]
pub(crate) struct Driver {
    layout: SplitLayout,
    in_order: bool,
    /// Descriptors that are in no chain; the next to take is in front.
    free: VecDeque<u16>,
    /// By descriptor: the next one of its chain.
    links: Vec<u16>,
    /// Next avail entry to write; the index that the device sees.
    next_avail: Wrapping<u16>,
    /// `next_avail` at the last decision about a kick.
    kicked: Wrapping<u16>,
    /// Next used entry to read.
    next_used: Wrapping<u16>,
}

impl Driver {
    /// An empty ring in zeroed memory, in which both indices begin at `base`.
    pub(crate) fn new(
        memory: &RingMemory,
        layout: SplitLayout,
        base: u16,
        in_order: bool,
    ) -> Result<Self, Error> {
        let ring = Self {
            layout,
            in_order,
            free: (0..layout.size).collect(),
            links: vec![0; usize::from(layout.size)],
            next_avail: Wrapping(base),
            kicked: Wrapping(base),
            next_used: Wrapping(base),
        };
        if base != 0 {
            memory.store(ring.avail(2), base, Ordering::Relaxed)?;
            memory.store(ring.used(2), base, Ordering::Relaxed)?;
            if memory.event_idx {
                memory.store(ring.used_event(), base, Ordering::Relaxed)?;
                memory.store(ring.avail_event(), base, Ordering::Relaxed)?;
            }
        }
        Ok(ring)
    }

    pub(crate) fn free(&self) -> u16 {
        // Never more than the ring's size.
        u16::try_from(self.free.len()).unwrap_or(u16::MAX)
    }

    pub(crate) fn positions(&self) -> (u16, u16) {
        (self.next_avail.0, self.next_used.0)
    }

    /// Makes a chain available; the caller has checked that there is room.
    pub(crate) fn make_available(
        &mut self,
        memory: &RingMemory,
        chain: &[Piece],
        flags: u16,
    ) -> Result<u16, Error> {
        let head = self.free.front().copied().ok_or_else(no_chain)?;
        for (number, piece) in (1..).zip(chain) {
            let index = self.free.pop_front().ok_or_else(no_chain)?;
            let next = self.free.front().filter(|_| number < chain.len()).copied();
            memory.write(16 * u64::from(index), &encode(piece, next, flags))?;
            if let (Some(link), Some(next)) = (self.links.get_mut(usize::from(index)), next) {
                *link = next;
            }
        }
        let slot = u64::from(self.next_avail.0 % self.layout.size);
        memory.store(self.avail(4 + 2 * slot), head, Ordering::Relaxed)?;
        self.next_avail += 1;
        // Release: the device must see descriptors and entry before the index that hands them over
        // (virtio 1.3, 2.7.13.3).
        memory.store(self.avail(2), self.next_avail.0, Ordering::Release)?;
        Ok(head)
    }

    pub(crate) fn needs_kick(&mut self, memory: &RingMemory) -> Result<bool, Error> {
        let (old, new) = (self.kicked, self.next_avail);
        if old == new {
            return Ok(false);
        }
        self.kicked = new;
        // Full fence: the index must be visible before the device's suppression is read, or both
        // sides may sleep (virtio 1.3, 2.7.13.4.1).
        fence(Ordering::SeqCst);
        let wish = Suppression {
            flags: memory.load(self.used(0), Ordering::Relaxed)?,
            event: memory.load(self.avail_event(), Ordering::Relaxed)?,
        };
        Ok(wish.wants(memory.event_idx, old.0, new.0))
    }

    /// The next used element. The device may have moved the index by at most `outstanding`, which
    /// is at most the number of entries.
    pub(crate) fn element(
        &self,
        memory: &RingMemory,
        outstanding: u16,
    ) -> Result<Option<Element>, Error> {
        // Acquire: the element, and the buffers that the device wrote, must not be read before the
        // index (virtio 1.3, 2.7.14).
        let index = memory.load(self.used(2), Ordering::Acquire)?;
        let moved = (Wrapping(index) - self.next_used).0;
        if moved == 0 {
            return Ok(None);
        }
        if moved > outstanding {
            return Err(Violation::IndexJump { moved, outstanding }.into());
        }
        let slot = u64::from(self.next_used.0 % self.layout.size);
        let mut element = [0; 8];
        memory.read(self.used(4 + 8 * slot), &mut element)?;
        let [i0, i1, i2, i3, l0, l1, l2, l3] = element;
        Ok(Some(Element {
            id: u32::from_le_bytes([i0, i1, i2, i3]),
            written: u32::from_le_bytes([l0, l1, l2, l3]),
            moved,
        }))
    }

    /// Frees the descriptors of the returned chain at `head`.
    pub(crate) fn reclaim(&mut self, head: u16, descriptors: u16) {
        let mut index = head;
        for _ in 0..descriptors {
            self.free.push_back(index);
            index = self.links.get(usize::from(index)).copied().unwrap_or(index);
        }
        // With IN_ORDER after all others, so that they stay in the table's order.
        if !self.in_order {
            self.free.rotate_right(usize::from(descriptors));
        }
        self.next_used += 1;
    }

    pub(crate) fn ask_for_next(&self, memory: &RingMemory) -> Result<(), Error> {
        memory.store(self.used_event(), self.next_used.0, Ordering::Relaxed)
    }

    pub(crate) fn set_interrupts(&self, memory: &RingMemory, enabled: bool) -> Result<(), Error> {
        if !memory.event_idx {
            let flags = if enabled { 0 } else { AVAIL_F_NO_INTERRUPT };
            return memory.store(self.avail(0), flags, Ordering::Relaxed);
        }
        // An event far in the past is equivalent to none: the index passes it only after another
        // full round.
        let behind = Wrapping(u16::from(!enabled));
        let event = (self.next_used - behind).0;
        memory.store(self.used_event(), event, Ordering::Relaxed)
    }

    /// Whether there is a used element.
    pub(crate) fn is_used(&self, memory: &RingMemory) -> Result<bool, Error> {
        Ok(memory.load(self.used(2), Ordering::Relaxed)? != self.next_used.0)
    }

    /// Offset of a byte of the avail ring.
    fn avail(&self, at: u64) -> u64 {
        self.layout.avail_offset + at
    }

    /// Offset of a byte of the used ring.
    fn used(&self, at: u64) -> u64 {
        self.layout.used_offset + at
    }

    fn used_event(&self) -> u64 {
        self.avail(4 + 2 * u64::from(self.layout.size))
    }

    fn avail_event(&self) -> u64 {
        self.used(4 + 8 * u64::from(self.layout.size))
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
    bytes[..8].copy_from_slice(&piece.iova.0.to_le_bytes());
    bytes[8..12].copy_from_slice(&piece.len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.unwrap_or(0).to_le_bytes());
    bytes
}

/// An entry of an indirect table (virtio 1.3, 2.7.5.3), linked to the next one.
pub(crate) fn table_entry(piece: &Piece, next: Option<u16>) -> [u8; 16] {
    encode(piece, next, 0)
}
