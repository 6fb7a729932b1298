//! A packed ring in guest memory: checked access to its entries, and its position.
//!
//! This module checks the areas once, and keeps no position. The guest may write all of it at any
//! moment, so a second read may differ from the first.

use std::ops::Deref;
use std::sync::atomic::Ordering;

use super::super::RingFormat;
use super::super::guest::{Areas, DESCRIPTOR_F_WRITE, DESCRIPTOR_SIZE};
use super::ring_position::{ring_position, unfinished};
use super::{
    DESCRIPTOR_F_AVAIL, DESCRIPTOR_F_USED, DESCRIPTOR_FLAGS, DESCRIPTOR_LENGTH, Position, base_of,
};
use crate::Error;
use crate::device::{VringAddresses, VringBase};
use crate::iova::DeviceAddress;
use crate::memory::DeviceMemory;

/// A descriptor as it is in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Descriptor {
    pub(super) address: DeviceAddress,
    pub(super) len: u32,
    pub(super) id: u16,
    pub(super) flags: u16,
}

impl Descriptor {
    pub(super) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Maximum number of reads of a ring that changes.
const READINGS: u32 = 64;

/// A packed ring in guest memory.
#[derive(Debug, Clone)]
pub struct GuestRing(Areas);

impl Deref for GuestRing {
    type Target = Areas;

    fn deref(&self) -> &Areas {
        &self.0
    }
}

impl GuestRing {
    /// The guest's ring of `size` entries, 1 to 32768, at `addresses`. `indirect`: whether
    /// INDIRECT_DESC was negotiated.
    ///
    /// # Errors
    /// The size is impossible, or an area is not aligned, not in guest memory or overlaps another.
    pub fn new(
        memory: impl Into<DeviceMemory>,
        size: u16,
        addresses: VringAddresses,
        indirect: bool,
    ) -> Result<Self, Error> {
        Areas::new(memory.into(), size, addresses, RingFormat::Packed, indirect).map(Self)
    }

    /// The positions of driver and device, from the flags in the ring: for a device that was reset
    /// and could not report them. Correct if the device completed chains in the order in which it
    /// got them. Then the chains are the entries from `used` to `available`.
    ///
    /// The driver may continue meanwhile. Flags read while `available` moves form no valid
    /// position, so the ring is read again, up to 64 times. `used` is correct whatever the driver
    /// adds.
    ///
    /// # Errors
    /// The ring does not show its position. All chains must be of one descriptor, which may be
    /// indirect.
    pub fn ring_position(&self) -> Result<VringBase, Error> {
        let mut told = self.read_ring_position();
        for _ in 1..READINGS {
            if told.is_ok() {
                break;
            }
            told = self.read_ring_position();
        }
        told
    }

    fn read_ring_position(&self) -> Result<VringBase, Error> {
        let flags = (0..self.size)
            .map(|index| {
                let address = self.entry(index) + DESCRIPTOR_FLAGS;
                self.load(address, Ordering::Acquire)
            })
            .collect::<Result<Vec<u16>, _>>()?;
        let (available, used) = ring_position(&flags)?;
        if available != used {
            let index = used.index;
            let before = index.checked_sub(1).unwrap_or(self.size - 1);
            let first = self.read_entry(index)?;
            let last = self.read_entry(before)?;
            let lap = Position {
                index: before,
                wrap: used.wrap ^ (index == 0),
            };
            // An entry of zeroes looks used in the lap before the first.
            let was_used = lap.is_used(last.flags) && last != Descriptor::default();
            if was_used && first.has(DESCRIPTOR_F_WRITE) && first.id == last.id {
                // It may be the rest of a used chain: see `ring_position`.
                return Err(Error::other(format!(
                    "entry {index} may be a remnant of a used chain of two descriptors"
                )));
            }
        }
        Ok(base_of(available, used))
    }

    /// Makes entries available again that a device was about to use together when it ended
    /// (`unfinished`). The driver has not seen them: it waits for the first of them. Their
    /// addresses and ids are those of the driver. Their lengths are those of the device, which are
    /// at most the buffers'. An empty one, as of a frame with an unmapped buffer, stays used. The
    /// ring does not show its position then.
    ///
    /// # Errors
    /// Guest memory cannot be used.
    pub fn restore_unfinished(&self) -> Result<(), Error> {
        let last = self.size - 1;
        let flags = std::iter::once(last).chain(0..self.size).map(|index| {
            let address = self.entry(index) + DESCRIPTOR_FLAGS;
            self.load(address, Ordering::Acquire)
        });
        let flags = flags.collect::<Result<Vec<u16>, _>>()?;
        for (index, flags) in unfinished(&flags) {
            self.store(
                self.entry(index) + DESCRIPTOR_FLAGS,
                flags,
                Ordering::Release,
            )?;
        }
        Ok(())
    }

    /// Whether a device that began at `base` has used anything since. Its first used descriptor is
    /// at the used position of `base`, until the driver overwrites it in the next lap. False for a
    /// base of a split ring, or one outside this ring.
    ///
    /// # Errors
    /// Guest memory cannot be read.
    pub fn used_since(&self, base: VringBase) -> Result<bool, Error> {
        let known = Position::of(base).filter(|(_, used)| used.index < self.size);
        let Some((_, used)) = known else {
            return Ok(false);
        };
        let entry = self.read_entry(used.index)?;
        let next_lap = Position {
            wrap: !used.wrap,
            ..used
        };
        let bits = entry.flags & (DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED);
        Ok(used.is_used(entry.flags) || bits == next_lap.available_flags())
    }

    /// Buffer ids of the entries from `used` to `available` of a base, at most one lap. The entries
    /// are chains of one descriptor each.
    ///
    /// # Errors
    /// Guest memory cannot be read.
    pub fn ids(&self, base: VringBase) -> Result<Vec<u16>, Error> {
        let Some((available, used)) = Position::of(base) else {
            return Ok(Vec::new());
        };
        let mut ids = Vec::new();
        let mut position = used;
        for _ in 0..self.size {
            if position == available || position.index >= self.size {
                break;
            }
            ids.push(self.read_entry(position.index)?.id);
            position = position.advance(1, self.size);
        }
        Ok(ids)
    }

    /// Device address of a descriptor; inside the device's reach, so no wrap.
    pub(super) fn entry(&self, index: u16) -> DeviceAddress {
        self.addresses.descriptor + DESCRIPTOR_SIZE * u64::from(index)
    }

    pub(super) fn read_entry(&self, index: u16) -> Result<Descriptor, Error> {
        let (address, len, id, flags) = self.descriptor(self.entry(index))?;
        Ok(Descriptor {
            address,
            len,
            id,
            flags,
        })
    }

    /// Writes a whole descriptor, the address first.
    pub(super) fn write_entry(&self, index: u16, descriptor: &Descriptor) -> Result<(), Error> {
        self.write(self.entry(index), &descriptor.address.0.to_le_bytes())?;
        self.write_result(index, descriptor.len, descriptor.id, descriptor.flags)
    }

    /// Writes length, id and flags of a descriptor at once. So a device that is killed leaves all
    /// of them or none.
    pub(super) fn write_result(
        &self,
        index: u16,
        len: u32,
        id: u16,
        flags: u16,
    ) -> Result<(), Error> {
        let [l0, l1, l2, l3] = len.to_le_bytes();
        let ([i0, i1], [f0, f1]) = (id.to_le_bytes(), flags.to_le_bytes());
        let result = u64::from_ne_bytes([l0, l1, l2, l3, i0, i1, f0, f1]);
        // Release: the flags hand the whole descriptor to the other side.
        self.store_as_is(
            self.entry(index) + DESCRIPTOR_LENGTH,
            result,
            Ordering::Release,
        )
    }
}
