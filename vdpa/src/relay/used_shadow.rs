//! Shadows the used ring of one split queue.
//!
//! The device works on the guest's descriptors and avail ring, and on a private used ring. This
//! module copies elements and suppression fields between that ring and the guest's. The table
//! [`PASS`] is the order of a pass. The relay runs it, and the explorer in the tests runs the same
//! table against all interleavings with guest and device.
//!
//! ```text
//!            elements, index                      elements, index
//!   device ------------------> private used ring -- [check, mark] --> guest's used ring --> guest
//!            avail_event, flags                   avail_event, flags
//! ```
//! Outstanding chains are of two kinds:
//! ```text
//!   counted[head]  avail entries from the device's base on; exact. Not with IN_ORDER, where the
//!                  avail entries themselves have the order
//!   earlier        chains that the device took before the used shadow began: their number
//!                  is known, but not their heads, for it may complete out of order. They
//!                  are among the heads neither made available nor used since. If there
//!                  are exactly as many of those, as in a full ring, they are those heads
//! ```

use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::{Dirty, PASS_LIMIT, Pass, Position, Strategy, Svq, in_flight_unknown};
use crate::Error;
use crate::device::VringAddresses;
use crate::iova::{DeviceAddress, PAGE_SIZE};
use crate::memory::SharedBuffer;
use crate::ring::split::{GuestRing, Suppression, USED_F_NO_NOTIFY};
use crate::ring::{Direction, Piece, Violation};

/// One step of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Check new elements, mark what the device wrote, copy them.
    Collect,
    /// Store the guest's used index.
    Publish,
    /// A full fence.
    Fence,
    /// Read the guest's interrupt suppression; interrupt it if it wants that.
    Signal,
    /// Copy `avail_event` and flags from the private ring to the guest's.
    CopySuppression,
    /// Read the avail index; kick the device if a kick may have been skipped.
    Recheck,
}

/// The order of a pass. Index before suppression, and suppression before index, each with a full
/// fence between. The relay acts as the device for the guest and as the guest for the device.
pub(super) const PASS: [Step; 7] = [
    Step::Collect,
    Step::Publish,
    Step::Fence,
    Step::Signal,
    Step::CopySuppression,
    Step::Fence,
    Step::Recheck,
];

#[cfg(test)]
thread_local! {
    /// The step of the pass that a mutant lacks.
    pub(super) static LEFT_OUT: std::cell::Cell<Option<usize>> =
        const { std::cell::Cell::new(None) };
}

/// Whether a mutant lacks this step of the pass.
#[cfg(test)]
fn is_left_out(step: usize) -> bool {
    LEFT_OUT.get() == Some(step)
}

#[cfg(not(test))]
const fn is_left_out(_: usize) -> bool {
    false
}

/// Whether the device must be kicked after the guest's view of its suppression became `wish`. The
/// guest has made `avail` available and may have acted on an older one.
pub(super) fn recheck_kicks(wish: Suppression, event_idx: bool, size: u16, avail: u16) -> bool {
    if event_idx {
        // The index has passed the event: by 1 to `size` entries.
        (Wrapping(avail) - Wrapping(wish.event) - Wrapping(1)).0 < size
    } else {
        wish.flags & USED_F_NO_NOTIFY == 0
    }
}

/// One queue with a shadowed used ring.
#[derive(Debug)]
pub struct UsedShadow {
    ring: GuestRing,
    private: Arc<SharedBuffer>,
    /// Start of the private used ring in `private`.
    offset: u64,
    device: DeviceAddress,
    event_idx: bool,
    in_order: bool,
    /// Next element; the guest's used index after a pass.
    next: Wrapping<u16>,
    published: Wrapping<u16>,
    signalled: Wrapping<u16>,
    /// Avail entries before this one are counted.
    avail: Wrapping<u16>,
    /// By head: chains that the device took since the beginning, or can take, and has not used.
    counted: Vec<u16>,
    /// Chains that it took before and has not used yet.
    earlier: u16,
    /// By head: whether the chain became available or used since the beginning.
    met: Vec<bool>,
    /// The device used a chain ahead of its turn, before an earlier one that it held from before
    /// the used shadow.
    disordered: bool,
    /// The device's suppression as the guest sees it.
    wish: Suppression,
    wish_changed: bool,
    pieces: Vec<Piece>,
}

impl UsedShadow {
    /// Bytes of private memory for the used ring of `size` entries, in whole pages that hold
    /// nothing else.
    #[must_use]
    pub fn memory_size(size: u16) -> u64 {
        (6 + 8 * u64::from(size)).next_multiple_of(PAGE_SIZE)
    }

    /// Starts used-ring shadowing of `ring` at the guest's used index, with the private used ring
    /// at `offset` of `private`, at a page boundary. The device must be stopped, or not use the
    /// private ring yet. It continues at the avail entry `base` and keeps the chains it had taken
    /// before. On a parent that counts by the used index it then has none.
    ///
    /// # Errors
    /// The memory is too small, or the indices are implausible.
    pub fn new(
        ring: GuestRing,
        private: Arc<SharedBuffer>,
        offset: u64,
        event_idx: bool,
        in_order: bool,
        base: u16,
    ) -> Result<Self, Error> {
        let size = ring.size();
        let device = private.iova(offset, Self::memory_size(size))?;
        let used = ring.used_index()?;
        let avail = ring.avail_index()?;
        let ahead = avail.wrapping_sub(used);
        if ahead > size {
            return Err(Violation::AvailJump { ahead, size }.into());
        }
        let earlier = base.wrapping_sub(used);
        if earlier > ahead {
            return Err(Violation::IndexJump {
                moved: earlier,
                outstanding: ahead,
            }
            .into());
        }
        let wish = ring.device_suppression()?;
        let zeroes = [0; 4096];
        for page in (0..Self::memory_size(size)).step_by(zeroes.len()) {
            private.write(offset + page, &zeroes)?;
        }
        private.store_u16(wish.flags, offset, Ordering::Relaxed)?;
        private.store_u16(
            wish.event,
            offset + 4 + 8 * u64::from(size),
            Ordering::Relaxed,
        )?;
        private.store_u16(used, offset + 2, Ordering::Release)?;
        Ok(Self {
            private,
            offset,
            device,
            event_idx,
            in_order,
            next: Wrapping(used),
            published: Wrapping(used),
            signalled: Wrapping(used),
            avail: Wrapping(base),
            counted: vec![0; usize::from(size)],
            earlier,
            met: vec![false; usize::from(size)],
            disordered: false,
            wish,
            // The guest may have decided about kicks by a suppression that the device changed just
            // before it stopped.
            wish_changed: true,
            pieces: Vec::new(),
            ring,
        })
    }

    /// Chains that the device may still hold from before the used shadow.
    #[must_use]
    pub fn earlier(&self) -> u16 {
        self.earlier
    }

    /// Whether the device used a chain ahead of one that it held from before the used shadow.
    pub(super) fn is_disordered(&self) -> bool {
        self.disordered
    }

    /// Counts the chains made available since the last call.
    fn count_available(&mut self) -> Result<(), Error> {
        let avail = Wrapping(self.ring.avail_index()?);
        let size = self.ring.size();
        let ahead = (avail - self.next).0;
        if ahead > size || ahead < (self.avail - self.next).0 {
            return Err(Violation::AvailJump { ahead, size }.into());
        }
        while self.avail != avail {
            let head = self.ring.avail_entry(self.avail.0)?;
            self.meet(head);
            let entry = self.counted.get_mut(usize::from(head));
            let counted = entry.ok_or(Violation::NoDescriptor {
                index: head,
                size: u32::from(size),
            })?;
            // With IN_ORDER the avail ring itself has the chains in flight, and none is reclaimed.
            if !self.in_order {
                // At most `size` are outstanding, so it cannot overflow.
                *counted += 1;
            }
            self.avail += 1;
        }
        Ok(())
    }

    fn collect(&mut self, dirty: &dyn Dirty) -> Result<(u16, bool), Error> {
        // Acquire: reads of elements, and of the avail index that the device saw, come after it.
        let index = self.private.load_u16(self.offset + 2, Ordering::Acquire)?;
        let moved = (Wrapping(index) - self.next).0;
        if moved == 0 {
            return Ok((0, false));
        }
        self.count_available()?;
        let outstanding = (self.avail - self.next).0;
        if moved > outstanding {
            return Err(Violation::IndexJump { moved, outstanding }.into());
        }
        let mut done = 0;
        while done < moved.min(PASS_LIMIT) {
            done += self.element(moved - done, dirty)?;
        }
        Ok((done, done < moved))
    }

    /// Relays the element at the current position; returns the number of chains that it completes,
    /// at most `moved`.
    fn element(&mut self, moved: u16, dirty: &dyn Dirty) -> Result<u16, Error> {
        let slot = u64::from(self.next.0 % self.ring.size());
        let mut element = [0; 8];
        self.private
            .read(self.offset + 4 + 8 * slot, &mut element)?;
        let [i0, i1, i2, i3, l0, l1, l2, l3] = element;
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        let written = u32::from_le_bytes([l0, l1, l2, l3]);
        let head = u16::try_from(id)
            .ok()
            .filter(|head| *head < self.ring.size())
            .ok_or(Violation::NotOutstanding { id })?;
        let batch = if self.in_order {
            self.batch(head, moved, dirty)?
        } else {
            if self.earlier > 0 {
                // The entry of the oldest outstanding chain cannot have been overwritten.
                self.disordered |= head != self.ring.avail_entry(self.next.0)?;
            }
            self.reclaim(head)?;
            1
        };
        let offered = self.mark(head, dirty)?;
        if written > offered {
            return Err(Violation::TooLong { written, offered }.into());
        }
        self.ring.set_used_element(self.next.0, id, written)?;
        self.next += batch;
        Ok(batch)
    }

    /// With IN_ORDER one element completes all chains up to its own, and has the place of the first
    /// of them (virtio 1.3, 2.7.9). Marks the buffers of the earlier ones.
    fn batch(&mut self, head: u16, moved: u16, dirty: &dyn Dirty) -> Result<u16, Error> {
        for position in 0..moved {
            let available = self.ring.avail_entry((self.next + Wrapping(position)).0)?;
            if available == head {
                return Ok(position + 1);
            }
            self.mark(available, dirty)?;
        }
        let id = u32::from(head);
        Err(Violation::NotOutstanding { id }.into())
    }

    /// From here on it is known whether the device has `head`.
    fn meet(&mut self, head: u16) {
        if let Some(met) = self.met.get_mut(usize::from(head)) {
            *met = true;
        }
    }

    fn reclaim(&mut self, head: u16) -> Result<(), Error> {
        self.meet(head);
        // In range: the caller checked it.
        if let Some(counted @ 1..) = self.counted.get_mut(usize::from(head)) {
            *counted -= 1;
            return Ok(());
        }
        let id = u32::from(head);
        self.earlier = self
            .earlier
            .checked_sub(1)
            .ok_or(Violation::NotOutstanding { id })?;
        Ok(())
    }

    /// Marks all buffers that the device may have written in a chain; returns the chain's writable
    /// length.
    fn mark(&mut self, head: u16, dirty: &dyn Dirty) -> Result<u32, Error> {
        let writable = self.ring.chain(head, &mut self.pieces)?;
        for piece in &self.pieces {
            if piece.direction == Direction::DeviceWrites {
                dirty.mark(piece.iova, piece.len);
            }
        }
        Ok(writable)
    }

    fn copy_suppression(&mut self) -> Result<(), Error> {
        let event = self.offset + 4 + 8 * u64::from(self.ring.size());
        let wish = Suppression {
            flags: self.private.load_u16(self.offset, Ordering::Relaxed)?,
            event: self.private.load_u16(event, Ordering::Relaxed)?,
        };
        if wish != self.wish {
            self.ring.set_device_suppression(wish)?;
            self.wish = wish;
            self.wish_changed = true;
        }
        Ok(())
    }

    /// The heads of all chains that the device has and did not use.
    fn in_flight(&self) -> Result<Vec<u16>, Error> {
        let counted = (0..self.ring.size()).zip(&self.counted);
        let counted =
            counted.flat_map(|(head, &count)| std::iter::repeat_n(head, usize::from(count)));
        Ok(self.earlier_heads()?.into_iter().chain(counted).collect())
    }

    /// The heads of the chains taken before the used shadow began, if only one set is possible.
    fn earlier_heads(&self) -> Result<Vec<u16>, Error> {
        let unknown = self.earlier;
        if unknown == 0 {
            return Ok(Vec::new());
        }
        let heads = (0..self.ring.size()).zip(&self.met);
        let possible: Vec<u16> = heads
            .filter_map(|(head, met)| (!met).then_some(head))
            .collect();
        if possible.len() == usize::from(unknown) {
            return Ok(possible);
        }
        Err(in_flight_unknown(unknown))
    }
}

/// Sorts `outstanding` into the order of the avail entries from `from` on, where those name its
/// heads. Heads that they do not name fill the other positions.
fn in_ring_order(ring: &GuestRing, from: u16, outstanding: &[u16]) -> Result<Vec<u16>, Error> {
    let mut left = vec![0u16; usize::from(ring.size())];
    for &head in outstanding {
        if let Some(count) = left.get_mut(usize::from(head)) {
            *count += 1;
        }
    }
    let mut places = Vec::with_capacity(outstanding.len());
    for position in (0..ring.size()).take(outstanding.len()) {
        let head = ring.avail_entry(from.wrapping_add(position))?;
        match left.get_mut(usize::from(head)) {
            Some(count @ 1..) => {
                *count -= 1;
                places.push(Some(head));
            }
            _ => places.push(None),
        }
    }
    let mut missing = (0..ring.size())
        .zip(left)
        .flat_map(|(head, count)| std::iter::repeat_n(head, usize::from(count)));
    Ok(places
        .into_iter()
        .filter_map(|place| place.or_else(|| missing.next()))
        .collect())
}

impl Svq for UsedShadow {
    fn strategy(&self) -> Strategy {
        Strategy::UsedShadow
    }

    fn addresses(&self) -> VringAddresses {
        VringAddresses {
            device: self.device,
            ..self.ring.addresses()
        }
    }

    fn size(&self) -> u16 {
        self.ring.size()
    }

    fn pass(&mut self, dirty: &dyn Dirty) -> Result<Pass, Error> {
        // Hints only: the device reads the guest's own interrupt suppression.
        let mut pass = Pass::default();
        for (at, step) in PASS.into_iter().enumerate() {
            if is_left_out(at) {
                continue;
            }
            match step {
                Step::Collect => (pass.used, pass.more) = self.collect(dirty)?,
                Step::Publish => {
                    if self.published != self.next {
                        self.ring.set_used_index(self.next.0)?;
                        self.published = self.next;
                    }
                }
                Step::Fence => fence(Ordering::SeqCst),
                Step::Signal => {
                    if self.signalled != self.published {
                        let wish = self.ring.driver_suppression()?;
                        pass.interrupt =
                            wish.wants(self.event_idx, self.signalled.0, self.published.0);
                        self.signalled = self.published;
                    }
                }
                Step::CopySuppression => self.copy_suppression()?,
                Step::Recheck => {
                    if std::mem::take(&mut self.wish_changed) {
                        let avail = self.ring.avail_index()?;
                        let size = self.ring.size();
                        pass.kick = recheck_kicks(self.wish, self.event_idx, size, avail);
                    }
                }
            }
        }
        Ok(pass)
    }

    fn settle(&mut self) -> Result<Position, Error> {
        self.count_available()?;
        let used = self.next.0;
        let outstanding = if self.in_order {
            (0..(self.avail - self.next).0)
                .map(|position| self.ring.avail_entry(used.wrapping_add(position)))
                .collect::<Result<_, _>>()?
        } else {
            self.in_flight()?
        };
        let in_flight = in_ring_order(&self.ring, used, &outstanding)?;
        self.ring.arrange(used, &in_flight)?;
        Ok(Position::Split {
            used,
            available: self.avail.0,
            in_flight,
        })
    }
}
