//! A split ring that lies in guest memory: checked access to its fields, and
//! the walk over a descriptor chain.
//!
//! Owns where the areas are. It keeps no positions and draws no conclusions:
//! the device's side ([`super::split::DeviceQueue`]) and the relay do. The
//! guest writes all of it at any moment, so nothing read twice is the same
//! thing, and every walk is bounded by the ring's size (virtio 1.3, 2.7.5:
//! no chain is longer than the ring, indirect table included).

use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend};

use super::{Direction, Piece};
use crate::device::{VringAddresses, VringBase, VringConfig, VringError};
use crate::iova::IovaRange;
use crate::memory::GuestMemory;

pub(crate) const DESCRIPTOR_F_NEXT: u16 = 1;
pub(crate) const DESCRIPTOR_F_WRITE: u16 = 2;
pub(crate) const DESCRIPTOR_F_INDIRECT: u16 = 4;
pub(crate) const AVAIL_F_NO_INTERRUPT: u16 = 1;
pub(crate) const USED_F_NO_NOTIFY: u16 = 1;
/// Bytes of a descriptor.
const DESCRIPTOR: u64 = 16;

/// What a guest's driver did that no driver may do (virtio 1.3, 2.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GuestViolation {
    /// A head or a next field is not an entry of its table.
    #[error("descriptor {index} does not exist in a table of {size}")]
    NoDescriptor {
        /// The entry named.
        index: u16,
        /// Entries of the table.
        size: u32,
    },
    /// A chain has more descriptors than the ring has entries, or a loop.
    #[error("a descriptor chain is longer than the ring or loops")]
    ChainTooLong,
    /// A table in a table, an indirect descriptor with a successor, a table whose
    /// length is 0 or no multiple of 16, or without the feature.
    #[error("an indirect descriptor is malformed")]
    Indirect,
    /// A piece for the device to read follows one for it to write.
    #[error("a readable buffer follows a writable one")]
    Order,
    /// A chain with no byte in it, or with 4 GiB or more.
    #[error("a descriptor chain has a length of 0 or of more than 4 GiB")]
    Length,
    /// A piece lies outside guest memory.
    #[error("a buffer of {len} bytes at {address:#x} is not in guest memory")]
    Outside {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        len: u32,
    },
    /// The avail index is further ahead than the ring has entries.
    #[error("the avail index is {ahead} ahead in a ring of {size}")]
    AvailJump {
        /// Entries between what was used and the index.
        ahead: u16,
        /// Entries of the ring.
        size: u16,
    },
}

/// Why a ring in guest memory can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum GuestRingError {
    /// The ring's description breaks a rule.
    #[error("the ring cannot lie where the guest put it")]
    Place {
        /// The rule.
        #[source]
        source: VringError,
    },
    /// Guest memory refused an access that had been checked.
    #[error("the ring in guest memory cannot be accessed at {address:#x}")]
    Access {
        /// Guest-physical address.
        address: u64,
        /// What guest memory said.
        #[source]
        source: vm_memory::GuestMemoryError,
    },
    /// The guest broke the rules.
    #[error("the guest broke the ring")]
    Guest {
        /// What it did.
        #[source]
        source: GuestViolation,
    },
}

impl From<GuestViolation> for GuestRingError {
    fn from(source: GuestViolation) -> Self {
        Self::Guest { source }
    }
}

/// One descriptor as it was at one moment. Little-endian in memory: u64
/// address, u32 length, u16 flags, u16 next.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn has(self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// The event fields and flags that one side tells the other to be left alone by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Suppression {
    /// `flags` of the avail ring (NO_INTERRUPT) or of the used ring (NO_NOTIFY).
    pub flags: u16,
    /// `used_event` of the avail ring or `avail_event` of the used ring.
    pub event: u16,
}

impl Suppression {
    /// Whether a side that asks so wants to hear of the move from `old` to
    /// `new` (virtio 1.3, 2.7.7 and 2.7.10; `vring_need_event` in
    /// `include/uapi/linux/virtio_ring.h`).
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

/// A split ring in guest memory; IOVA = guest-physical address.
#[derive(Debug, Clone)]
pub struct GuestRing {
    memory: Arc<GuestMemory>,
    size: u16,
    addresses: VringAddresses,
    indirect: bool,
}

impl GuestRing {
    /// The ring of `size` entries that the guest put at `addresses`.
    /// `indirect`: whether INDIRECT_DESC was negotiated.
    ///
    /// # Errors
    /// [`GuestRingError::Place`]: an area is not aligned, not in guest memory or
    /// overlaps another, or the size is no power of two up to 32768.
    pub fn new(
        memory: Arc<GuestMemory>,
        size: u16,
        addresses: VringAddresses,
        indirect: bool,
    ) -> Result<Self, GuestRingError> {
        let config = VringConfig {
            size,
            addresses,
            base: VringBase::initial(false),
            kick: None,
            call: None,
        };
        config
            .check(crate::device::RING_SIZE_MAX, false, &ram(&memory))
            .map_err(|source| GuestRingError::Place { source })?;
        Ok(Self {
            memory,
            size,
            addresses,
            indirect,
        })
    }

    /// Entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Where its areas are.
    #[must_use]
    pub fn addresses(&self) -> VringAddresses {
        self.addresses
    }

    /// The memory it lies in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The avail index. Acquire: entries and descriptors are read after it.
    ///
    /// # Errors
    /// [`GuestRingError::Access`], as for all fields.
    pub fn avail_index(&self) -> Result<u16, GuestRingError> {
        self.load(self.addresses.driver + 2, Ordering::Acquire)
    }

    /// The head in the avail entry for `position` (free-running).
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn avail_entry(&self, position: u16) -> Result<u16, GuestRingError> {
        self.load(self.avail_slot(position), Ordering::Relaxed)
    }

    /// Writes an avail entry. Only for entries that the device owns and with the
    /// device stopped: see [`GuestRing::arrange`].
    fn set_avail_entry(&self, position: u16, head: u16) -> Result<(), GuestRingError> {
        self.store(self.avail_slot(position), head, Ordering::Relaxed)
    }

    /// How the driver wants interrupts.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn driver_suppression(&self) -> Result<Suppression, GuestRingError> {
        let driver = self.addresses.driver;
        Ok(Suppression {
            flags: self.load(driver, Ordering::Relaxed)?,
            event: self.load(driver + 4 + 2 * u64::from(self.size), Ordering::Relaxed)?,
        })
    }

    /// How the device's side wants kicks, as the guest sees it.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn device_suppression(&self) -> Result<Suppression, GuestRingError> {
        let device = self.addresses.device;
        Ok(Suppression {
            flags: self.load(device, Ordering::Relaxed)?,
            event: self.load(device + 4 + 8 * u64::from(self.size), Ordering::Relaxed)?,
        })
    }

    /// Tells the guest how the device's side wants kicks.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn set_device_suppression(&self, value: Suppression) -> Result<(), GuestRingError> {
        let device = self.addresses.device;
        let event = device + 4 + 8 * u64::from(self.size);
        self.store(event, value.event, Ordering::Relaxed)?;
        self.store(device, value.flags, Ordering::Relaxed)
    }

    /// The used index as the guest sees it. The guest can write it too.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn used_index(&self) -> Result<u16, GuestRingError> {
        self.load(self.addresses.device + 2, Ordering::Relaxed)
    }

    /// Publishes the used index. Release: elements and dirty marks before it.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn set_used_index(&self, index: u16) -> Result<(), GuestRingError> {
        self.store(self.addresses.device + 2, index, Ordering::Release)
    }

    /// Writes the used element for `position` (free-running).
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn set_used_element(
        &self,
        position: u16,
        id: u32,
        written: u32,
    ) -> Result<(), GuestRingError> {
        let address = self.addresses.device + 4 + 8 * u64::from(position % self.size);
        let mut element = [0; 8];
        element[..4].copy_from_slice(&id.to_le_bytes());
        element[4..].copy_from_slice(&written.to_le_bytes());
        self.memory
            .write_slice(&element, GuestAddress(address))
            .map_err(|source| GuestRingError::Access { address, source })
    }

    /// Collects the pieces of the chain that begins at `head`; `pieces` is
    /// cleared first. Empty pieces are left out. Gives the bytes that the
    /// device may write.
    ///
    /// Every address is read once, so what is checked is what is given.
    ///
    /// # Errors
    /// [`GuestRingError::Guest`] with what the guest did.
    pub fn chain(&self, head: u16, pieces: &mut Vec<Piece>) -> Result<u32, GuestRingError> {
        pieces.clear();
        let (mut table, mut entries) = (self.addresses.descriptor, u32::from(self.size));
        let (mut index, mut inside) = (head, false);
        let (mut total, mut writable) = (0u32, 0u32);
        // An indirect descriptor is no piece of the chain.
        let mut left = u32::from(self.size) + 1;
        loop {
            left = left.checked_sub(1).ok_or(GuestViolation::ChainTooLong)?;
            if u32::from(index) >= entries {
                let size = entries;
                return Err(GuestViolation::NoDescriptor { index, size }.into());
            }
            let descriptor = self.descriptor(table + DESCRIPTOR * u64::from(index))?;
            if descriptor.has(DESCRIPTOR_F_INDIRECT) {
                let len = u64::from(descriptor.len);
                let malformed = inside
                    || !self.indirect
                    || !pieces.is_empty()
                    || descriptor.has(DESCRIPTOR_F_NEXT)
                    || len == 0
                    || !len.is_multiple_of(DESCRIPTOR);
                if malformed {
                    return Err(GuestViolation::Indirect.into());
                }
                self.inside(descriptor.address, descriptor.len)?;
                (table, entries) = (descriptor.address, descriptor.len / 16);
                (index, inside) = (0, true);
                continue;
            }
            if !inside && left == 0 {
                return Err(GuestViolation::ChainTooLong.into());
            }
            let Descriptor { address, len, .. } = descriptor;
            total = total.checked_add(len).ok_or(GuestViolation::Length)?;
            let direction = if descriptor.has(DESCRIPTOR_F_WRITE) {
                writable += len;
                Direction::DeviceWrites
            } else if writable > 0 {
                return Err(GuestViolation::Order.into());
            } else {
                Direction::DeviceReads
            };
            if len > 0 {
                self.inside(address, len)?;
                pieces.push(Piece {
                    iova: address,
                    len,
                    direction,
                });
            }
            if !descriptor.has(DESCRIPTOR_F_NEXT) {
                break;
            }
            index = descriptor.next;
        }
        if pieces.is_empty() {
            return Err(GuestViolation::Length.into());
        }
        Ok(writable)
    }

    /// Makes the avail entries `from .. from + heads.len()` name `heads`, each
    /// of which the device had taken and not used. Without it a device that
    /// completes out of order and then begins anew at `from` would take chains
    /// twice and others never.
    ///
    /// The driver does not see it: from `from` to its index the entries belong
    /// to the device, and it writes none of them until they are used. No device
    /// may work on the ring meanwhile.
    ///
    /// # Errors
    /// [`GuestRingError::Access`].
    pub fn arrange(&self, from: u16, heads: &[u16]) -> Result<(), GuestRingError> {
        for (offset, &head) in (0..self.size).zip(heads) {
            let position = from.wrapping_add(offset);
            if self.avail_entry(position)? != head {
                self.set_avail_entry(position, head)?;
            }
        }
        Ok(())
    }

    fn descriptor(&self, address: u64) -> Result<Descriptor, GuestRingError> {
        let mut bytes = [0; 16];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .map_err(|source| GuestRingError::Access { address, source })?;
        let [
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            a6,
            a7,
            l0,
            l1,
            l2,
            l3,
            f0,
            f1,
            n0,
            n1,
        ] = bytes;
        Ok(Descriptor {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        })
    }

    fn inside(&self, address: u64, len: u32) -> Result<(), GuestRingError> {
        let outside = GuestViolation::Outside { address, len };
        let count = usize::try_from(len).map_err(|_| outside)?;
        let fits = GuestAddress(address).checked_add(u64::from(len)).is_some()
            && GuestMemoryBackend::check_range(&*self.memory, GuestAddress(address), count);
        if fits { Ok(()) } else { Err(outside.into()) }
    }

    fn avail_slot(&self, position: u16) -> u64 {
        self.addresses.driver + 4 + 2 * u64::from(position % self.size)
    }

    fn load(&self, address: u64, ordering: Ordering) -> Result<u16, GuestRingError> {
        self.memory
            .load::<u16>(GuestAddress(address), ordering)
            .map(u16::from_le)
            .map_err(|source| GuestRingError::Access { address, source })
    }

    fn store(&self, address: u64, value: u16, ordering: Ordering) -> Result<(), GuestRingError> {
        self.memory
            .store(value.to_le(), GuestAddress(address), ordering)
            .map_err(|source| GuestRingError::Access { address, source })
    }
}

/// Guest RAM as ranges, neighbours joined.
pub(crate) fn ram(memory: &GuestMemory) -> Vec<IovaRange> {
    use vm_memory::GuestMemoryRegion;
    let mut ranges: Vec<IovaRange> = Vec::new();
    for region in memory.iter() {
        let (first, last) = (region.start_addr().0, region.last_addr().0);
        let joined = ranges
            .last()
            .filter(|before| before.last().checked_add(1) == Some(first))
            .and_then(|before| IovaRange::new(before.first(), last));
        if let Some(joined) = joined {
            ranges.pop();
            ranges.push(joined);
        } else {
            ranges.extend(IovaRange::new(first, last));
        }
    }
    ranges
}
