//! The device's side of a split virtqueue (virtio 1.3, section 2.7) in guest
//! memory, for a VMM that answers in the device's place.
//!
//! ```text
//!   guest's avail ring -- pop --> Chain -- (somebody works) -- push_used --> guest's used ring
//!        position: next_avail                                    position: next_used
//! ```
//! It owns the two positions. Each chain popped is pushed once; a caller that
//! doesn't can only hurt the guest whose ring it is.

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use super::super::Piece;
use super::super::guest::{
    GuestRing, GuestRingError, GuestViolation, Suppression, USED_F_NO_NOTIFY,
};

/// A chain taken from the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestChain {
    /// Its first descriptor, which names it in the used ring.
    pub head: u16,
    /// Its pieces, all inside guest memory, none empty.
    pub pieces: Vec<Piece>,
    /// Bytes the device may write.
    pub writable: u32,
}

/// The device's side of one of the guest's split rings.
#[derive(Debug)]
pub struct DeviceQueue {
    ring: GuestRing,
    event_idx: bool,
    next_avail: Wrapping<u16>,
    next_used: Wrapping<u16>,
    /// What the guest was last shown of `next_used`.
    published: Wrapping<u16>,
    /// `next_used` at the last decision about an interrupt.
    signalled: Wrapping<u16>,
}

impl DeviceQueue {
    /// Goes on where `avail` chains had been taken and `used` given back
    /// (free-running). `event_idx`: whether that feature was negotiated.
    #[must_use]
    pub fn new(ring: GuestRing, event_idx: bool, avail: u16, used: u16) -> Self {
        Self {
            ring,
            event_idx,
            next_avail: Wrapping(avail),
            next_used: Wrapping(used),
            published: Wrapping(used),
            signalled: Wrapping(used),
        }
    }

    /// The ring.
    #[must_use]
    pub fn ring(&self) -> &GuestRing {
        &self.ring
    }

    /// Index of the next avail entry to take, free-running.
    #[must_use]
    pub fn next_avail(&self) -> u16 {
        self.next_avail.0
    }

    /// Index of the next used entry to write, free-running.
    #[must_use]
    pub fn next_used(&self) -> u16 {
        self.next_used.0
    }

    /// Takes the next chain, if there is one.
    ///
    /// # Errors
    /// [`GuestRingError::Guest`]: the guest broke a rule. The position stays.
    pub fn pop(&mut self) -> Result<Option<GuestChain>, GuestRingError> {
        let avail = Wrapping(self.ring.avail_index()?);
        if avail == self.next_avail {
            return Ok(None);
        }
        // Chains that the guest has not got back count too: a driver never has
        // more than the ring's size under way (virtio 1.3, 2.7.13.3.1).
        let ahead = (avail - self.next_used).0;
        let taken = (self.next_avail - self.next_used).0;
        let size = self.ring.size();
        if ahead > size || ahead < taken {
            return Err(GuestViolation::AvailJump { ahead, size }.into());
        }
        let head = self.ring.avail_entry(self.next_avail.0)?;
        let mut pieces = Vec::new();
        let writable = self.ring.chain(head, &mut pieces)?;
        self.next_avail += 1;
        Ok(Some(GuestChain {
            head,
            pieces,
            writable,
        }))
    }

    /// Gives a chain back; the guest sees it after [`DeviceQueue::publish`].
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn push_used(&mut self, head: u16, written: u32) -> Result<(), GuestRingError> {
        self.ring
            .set_used_element(self.next_used.0, u32::from(head), written)?;
        self.next_used += 1;
        Ok(())
    }

    /// Shows the guest what was pushed. `true`: it wants an interrupt.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn publish(&mut self) -> Result<bool, GuestRingError> {
        if self.published != self.next_used {
            self.ring.set_used_index(self.next_used.0)?;
            self.published = self.next_used;
        }
        // Full fence: the index must be visible before the guest's wish is
        // read, or both sides go to sleep (virtio 1.3, 2.7.7.2).
        fence(Ordering::SeqCst);
        let wish = self.ring.driver_suppression()?;
        let wanted = wish.wants(self.event_idx, self.signalled.0, self.next_used.0);
        self.signalled = self.next_used;
        Ok(wanted)
    }

    /// Asks the guest for kicks, or not; it may kick anyway. `true`: chains
    /// are waiting already, perhaps without a kick.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn set_notifications(&mut self, enabled: bool) -> Result<bool, GuestRingError> {
        // With event-idx an event that lies behind is as good as none.
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
        // Full fence: the wish must be visible before the index is read.
        fence(Ordering::SeqCst);
        Ok(self.ring.avail_index()? != self.next_avail.0)
    }

    /// Whether the guest, as it wishes just now, is to be interrupted for any of the chains that
    /// were popped and not given back. It may change its wish at any time.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn wants_interrupt(&self) -> Result<bool, GuestRingError> {
        let wish = self.ring.driver_suppression()?;
        Ok(wish.wants(self.event_idx, self.next_used.0, self.next_avail.0))
    }
}
