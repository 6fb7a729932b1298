//! The device's side of a split virtqueue (virtio 1.3, section 2.7) in guest memory, for a VMM that
//! acts as the device.
//!
//! ```text
//!   guest's avail ring -- pop --> Chain -- (the device works) -- push_used --> guest's used ring
//!        position: next_avail                                      position: next_used
//! ```
//! It tracks the two positions. Each popped chain must be pushed once; a caller that does not do so
//! can only hurt the guest that owns the ring.

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use super::super::{Chain, Piece, Violation};
use super::USED_F_NO_NOTIFY;
use super::guest::{GuestRing, Suppression};
use crate::Error;

/// The device's side of one of the guest's split rings. The methods are described at
/// [`DeviceQueue`](super::super::DeviceQueue).
#[derive(Debug)]
pub struct DeviceQueue {
    ring: GuestRing,
    event_idx: bool,
    next_avail: Wrapping<u16>,
    next_used: Wrapping<u16>,
    /// The last value of `next_used` shown to the guest.
    published: Wrapping<u16>,
    /// `next_used` at the last decision about an interrupt.
    signalled: Wrapping<u16>,
}

impl DeviceQueue {
    /// Resumes at `index` (free-running) with nothing in flight. `event_idx`: whether that
    /// feature was negotiated.
    pub(crate) fn new(ring: GuestRing, event_idx: bool, index: u16) -> Self {
        let index = Wrapping(index);
        Self {
            ring,
            event_idx,
            next_avail: index,
            next_used: index,
            published: index,
            signalled: index,
        }
    }

    /// The ring.
    pub(crate) fn ring(&self) -> &GuestRing {
        &self.ring
    }

    /// Indices of the next avail entry to take and of the next used entry to write, free-running.
    pub(crate) fn positions(&self) -> (u16, u16) {
        (self.next_avail.0, self.next_used.0)
    }

    pub(crate) fn pop(&mut self) -> Result<Option<Chain>, Error> {
        let mut pieces = Vec::new();
        let popped = self.pop_into(&mut pieces)?;
        Ok(popped.map(|id| Chain { id, pieces }))
    }

    pub(crate) fn pop_into(&mut self, pieces: &mut Vec<Piece>) -> Result<Option<u16>, Error> {
        let avail = Wrapping(self.ring.avail_index()?);
        if avail == self.next_avail {
            return Ok(None);
        }
        // Chains not yet returned to the guest count too: a driver never has more chains in flight
        // than the ring's size (virtio 1.3, 2.7.13.3.1).
        let ahead = (avail - self.next_used).0;
        let taken = (self.next_avail - self.next_used).0;
        let size = self.ring.size();
        if ahead > size || ahead < taken {
            return Err(Violation::AvailJump { ahead, size }.into());
        }
        let id = self.ring.avail_entry(self.next_avail.0)?;
        self.ring.chain(id, pieces)?;
        self.next_avail += 1;
        Ok(Some(id))
    }

    pub(crate) fn push_used(&mut self, id: u16, written: u32) -> Result<(), Error> {
        self.ring
            .set_used_element(self.next_used.0, u32::from(id), written)?;
        self.next_used += 1;
        Ok(())
    }

    pub(crate) fn show(&mut self) -> Result<(), Error> {
        if self.published != self.next_used {
            self.ring.set_used_index(self.next_used.0)?;
            self.published = self.next_used;
        }
        Ok(())
    }

    pub(crate) fn publish(&mut self) -> Result<bool, Error> {
        self.show()?;
        // Full fence: the index must be visible before the guest's suppression is read, or both
        // sides sleep (virtio 1.3, 2.7.7.2).
        fence(Ordering::SeqCst);
        let wish = self.ring.driver_suppression()?;
        let wanted = wish.wants(self.event_idx, self.signalled.0, self.next_used.0);
        self.signalled = self.next_used;
        Ok(wanted)
    }

    pub(crate) fn set_notifications(&mut self, enabled: bool) -> Result<bool, Error> {
        // With event-idx an event in the past is equivalent to none.
        let event = if enabled {
            self.next_avail
        } else {
            self.next_avail - Wrapping(1)
        };
        // With event-idx the flags must be 0 (virtio 1.3, 2.7.10).
        let flags = if enabled || self.event_idx {
            0
        } else {
            USED_F_NO_NOTIFY
        };
        self.ring.set_device_suppression(Suppression {
            flags,
            event: event.0,
        })?;
        if !enabled {
            return Ok(false);
        }
        // Full fence: the suppression must be visible before the index is read.
        fence(Ordering::SeqCst);
        Ok(self.ring.avail_index()? != self.next_avail.0)
    }

    pub(crate) fn wants_interrupt(&self) -> Result<bool, Error> {
        let wish = self.ring.driver_suppression()?;
        Ok(wish.wants(self.event_idx, self.next_used.0, self.next_avail.0))
    }
}
