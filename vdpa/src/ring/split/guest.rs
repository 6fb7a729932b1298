//! A split ring in guest memory: checked access to its fields, and the walk of a descriptor chain.
//! Keeps no positions.

use std::num::Wrapping;
use std::ops::Deref;
use std::sync::atomic::Ordering;

use super::super::guest::{
    Areas, ChainReader, DESCRIPTOR_F_INDIRECT, DESCRIPTOR_F_NEXT, DESCRIPTOR_SIZE,
};
use super::super::{Piece, RingFormat, Violation};
use super::AVAIL_F_NO_INTERRUPT;
use crate::Error;
use crate::device::VringAddresses;
use crate::iova::DeviceAddress;
use crate::memory::DeviceMemory;

/// The event field and flags by which one side suppresses notifications of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Suppression {
    /// `flags` of the avail ring (NO_INTERRUPT) or of the used ring (NO_NOTIFY).
    pub flags: u16,
    /// `used_event` of the avail ring or `avail_event` of the used ring.
    pub event: u16,
}

impl Suppression {
    /// Whether a side with this suppression wants a notification for the move from `old` to `new`
    /// (virtio 1.3, 2.7.7 and 2.7.10; `vring_need_event` in `include/uapi/linux/virtio_ring.h`).
    #[must_use]
    pub fn wants(self, event_idx: bool, old: u16, new: u16) -> bool {
        if event_idx {
            let (old, new) = (Wrapping(old), Wrapping(new));
            new - Wrapping(self.event) - Wrapping(1) < new - old
        } else {
            // NO_INTERRUPT and NO_NOTIFY are the same bit.
            old != new && self.flags & AVAIL_F_NO_INTERRUPT == 0
        }
    }
}

/// A split ring in guest memory.
#[derive(Debug, Clone)]
pub struct GuestRing(Areas);

impl Deref for GuestRing {
    type Target = Areas;

    fn deref(&self) -> &Areas {
        &self.0
    }
}

impl GuestRing {
    /// The guest's ring of `size` entries at `addresses`. `indirect`: whether INDIRECT_DESC was
    /// negotiated.
    ///
    /// # Errors
    /// An area is not aligned, not in guest memory or overlaps another, or the size is not a power
    /// of two up to 32768.
    pub fn new(
        memory: impl Into<DeviceMemory>,
        size: u16,
        addresses: VringAddresses,
        indirect: bool,
    ) -> Result<Self, Error> {
        Areas::new(memory.into(), size, addresses, RingFormat::Split, indirect).map(Self)
    }

    /// The avail index. Acquire: entries and descriptors are read after it.
    ///
    /// # Errors
    /// Guest memory cannot be accessed, as for all fields.
    pub fn avail_index(&self) -> Result<u16, Error> {
        self.load(self.addresses.driver + 2, Ordering::Acquire)
    }

    /// The head in the avail entry for `position` (free-running).
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn avail_entry(&self, position: u16) -> Result<u16, Error> {
        self.load(self.avail_slot(position), Ordering::Relaxed)
    }

    /// Writes an avail entry. Only for entries that the device owns, and while the device is
    /// stopped: see [`GuestRing::arrange`].
    fn set_avail_entry(&self, position: u16, head: u16) -> Result<(), Error> {
        self.store(self.avail_slot(position), head, Ordering::Relaxed)
    }

    /// The driver's suppression of interrupts.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn driver_suppression(&self) -> Result<Suppression, Error> {
        let driver = self.addresses.driver;
        Ok(Suppression {
            flags: self.load(driver, Ordering::Relaxed)?,
            event: self.load(driver + 4 + 2 * u64::from(self.size), Ordering::Relaxed)?,
        })
    }

    /// The device's suppression of kicks, as the guest sees it.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn device_suppression(&self) -> Result<Suppression, Error> {
        let device = self.addresses.device;
        Ok(Suppression {
            flags: self.load(device, Ordering::Relaxed)?,
            event: self.load(device + 4 + 8 * u64::from(self.size), Ordering::Relaxed)?,
        })
    }

    /// Sets the device's suppression of kicks for the guest.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn set_device_suppression(&self, value: Suppression) -> Result<(), Error> {
        let device = self.addresses.device;
        let event = device + 4 + 8 * u64::from(self.size);
        self.store(event, value.event, Ordering::Relaxed)?;
        self.store(device, value.flags, Ordering::Relaxed)
    }

    /// The used index as the guest sees it. The guest can write it too.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn used_index(&self) -> Result<u16, Error> {
        self.load(self.addresses.device + 2, Ordering::Relaxed)
    }

    /// Publishes the used index. Release: elements and dirty marks come before it.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn set_used_index(&self, index: u16) -> Result<(), Error> {
        self.store(self.addresses.device + 2, index, Ordering::Release)
    }

    /// Writes the used element for `position` (free-running).
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn set_used_element(&self, position: u16, id: u32, written: u32) -> Result<(), Error> {
        let address = self.addresses.device + 4 + 8 * u64::from(position % self.size);
        let mut element = [0; 8];
        element[..4].copy_from_slice(&id.to_le_bytes());
        element[4..].copy_from_slice(&written.to_le_bytes());
        self.write(address, &element)
    }

    /// Collects the pieces of the chain that begins at `head`; `pieces` is cleared first. Empty
    /// pieces are left out. Returns the number of bytes that the device may write.
    ///
    /// Every address is read once, so the checked values are the returned ones.
    ///
    /// # Errors
    /// The guest broke a rule ([`Error::violation`]).
    pub fn chain(&self, head: u16, pieces: &mut Vec<Piece>) -> Result<u32, Error> {
        let mut chain = ChainReader::new(self, pieces);
        let (mut table, mut entries) = (self.addresses.descriptor, u32::from(self.size));
        let (mut index, mut inside) = (head, false);
        loop {
            if u32::from(index) >= entries {
                let size = entries;
                return Err(Violation::NoDescriptor { index, size }.into());
            }
            let at = table + DESCRIPTOR_SIZE * u64::from(index);
            let (address, len, flags, next) = self.descriptor(at)?;
            if flags & DESCRIPTOR_F_INDIRECT != 0 {
                if inside {
                    return Err(Violation::Indirect.into());
                }
                entries = chain.table(address, len, flags)?;
                (table, index, inside) = (address, 0, true);
                continue;
            }
            chain.take(address, len, flags)?;
            if flags & DESCRIPTOR_F_NEXT == 0 {
                return Ok(chain.finish()?);
            }
            index = next;
        }
    }

    /// Makes the avail entries `from .. from + heads.len()` name `heads`, all of them chains that
    /// the device had taken and not used. Otherwise a device that completes out of order and then
    /// begins again at `from` would take some chains twice and others never.
    ///
    /// The driver does not notice. The entries between `from` and its index belong to the device,
    /// and the driver writes none of them until they are used. No device may work on the ring
    /// meanwhile.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn arrange(&self, from: u16, heads: &[u16]) -> Result<(), Error> {
        for (offset, &head) in (0..self.size).zip(heads) {
            let position = from.wrapping_add(offset);
            if self.avail_entry(position)? != head {
                self.set_avail_entry(position, head)?;
            }
        }
        Ok(())
    }

    fn avail_slot(&self, position: u16) -> DeviceAddress {
        self.addresses.driver + 4 + 2 * u64::from(position % self.size)
    }
}
