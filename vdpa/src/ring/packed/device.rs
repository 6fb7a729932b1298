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
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress, GuestMemory as _, GuestMemoryError, Permissions};

use super::super::{Direction, Piece, RingFeatures};
use super::{
    DESCRIPTOR_F_INDIRECT, DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE, DESCRIPTOR_FLAGS,
    DESCRIPTOR_LENGTH, DESCRIPTOR_SIZE, EVENT_FLAGS, EVENT_FLAGS_DESC, EVENT_FLAGS_DISABLE,
    EVENT_FLAGS_ENABLE, Position, base_of, event_wanted,
};
use crate::device::{RING_SIZE_MAX, VringAddresses, VringBase};
use crate::iova::IovaRange;
use crate::memory::GuestMemory;

/// Descriptors that a chain may have even if the ring is smaller: virtio limits
/// it to the ring's size, but drivers with indirect tables go further.
const CHAIN_MIN_LIMIT: usize = 256;

/// The three areas of a packed ring (virtio 1.3, 2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingArea {
    /// Descriptor Area, the ring.
    Descriptor,
    /// Driver Area, the driver's event suppression.
    Driver,
    /// Device Area, the device's event suppression.
    Device,
}

impl fmt::Display for RingArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Descriptor => "descriptor area",
            Self::Driver => "driver area",
            Self::Device => "device area",
        })
    }
}

/// What is wrong with a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainFault {
    /// It runs into descriptors that the device has already.
    Overrun,
    /// More descriptors than the ring has entries (256 in a smaller ring).
    TooLong,
    /// More than 4 GiB.
    TooLarge,
    /// An indirect table of no or a broken number of descriptors, inside
    /// another one, or with a successor.
    Indirect,
    /// A buffer or an indirect table is not, or not wholly, guest memory.
    OutsideMemory,
    /// A device-readable buffer follows a device-writable one.
    Order,
    /// Its buffer id is that of a chain which the device has.
    DuplicateId,
}

impl fmt::Display for ChainFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Overrun => "it runs into descriptors that are in use",
            Self::TooLong => "it has too many descriptors",
            Self::TooLarge => "it has more than 4 GiB",
            Self::Indirect => "its indirect table is malformed",
            Self::OutsideMemory => "a buffer lies outside guest memory",
            Self::Order => "a readable buffer follows a writable one",
            Self::DuplicateId => "its buffer id is in use",
        })
    }
}

/// Why a packed ring cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum DeviceQueueError {
    /// The size is 0 or above 32768.
    #[error("a packed ring cannot have {size} entries")]
    Size {
        /// What the driver set.
        size: u16,
    },
    /// An area breaks its alignment (16, 4 and 4 bytes).
    #[error("the {area} at {address:#x} is misaligned")]
    Misaligned {
        /// Which area.
        area: RingArea,
        /// Guest-physical address.
        address: u64,
    },
    /// An area is not wholly in guest memory.
    #[error("the {area} at {address:#x}, {len} bytes, lies outside guest memory")]
    OutsideMemory {
        /// Which area.
        area: RingArea,
        /// Guest-physical address.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Two areas lie over each other.
    #[error("the {first} overlaps the {second}")]
    Overlap {
        /// One of them.
        first: RingArea,
        /// The other one.
        second: RingArea,
    },
    /// A position of a split ring, outside the ring, or one with chains in
    /// flight: those cannot be found again, for used descriptors may have
    /// taken their places.
    #[error("a packed ring of {size} entries cannot go on at {base:?}")]
    Base {
        /// The position.
        base: VringBase,
        /// Entries of the ring.
        size: u16,
    },
    /// The driver made something available that is no valid chain.
    #[error("the descriptor chain at entry {index} is malformed: {fault}")]
    Chain {
        /// The ring's entry.
        index: u16,
        /// What is wrong.
        fault: ChainFault,
    },
    /// A chain was given back that is not in flight, or, with IN_ORDER, not the
    /// oldest one.
    #[error("buffer id {id} cannot be used now")]
    NotInFlight {
        /// The id.
        id: u16,
    },
    /// Guest memory cannot be accessed.
    #[error("guest memory cannot be accessed")]
    Memory(#[source] GuestMemoryError),
}

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
#[derive(Debug, Clone, Copy)]
struct InFlight {
    /// Entries that it takes.
    descriptors: u16,
    /// Which one it was of those that were popped, from 0.
    sequence: u64,
}

/// A descriptor as it stands in guest memory.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    id: u16,
    flags: u16,
}

impl Descriptor {
    fn parse(bytes: [u8; 16]) -> Self {
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
            i0,
            i1,
            f0,
            f1,
        ] = bytes;
        Self {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            id: u16::from_le_bytes([i0, i1]),
            flags: u16::from_le_bytes([f0, f1]),
        }
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
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

fn inside(memory: &GuestMemory, address: u64, len: u64) -> bool {
    IovaRange::from_size(address, len).is_some()
        && usize::try_from(len)
            .is_ok_and(|len| memory.check_range(GuestAddress(address), len, Permissions::ReadWrite))
}

/// The device's side of a packed virtqueue in guest memory.
#[derive(Debug)]
pub struct DeviceQueue {
    memory: Arc<GuestMemory>,
    size: u16,
    addresses: VringAddresses,
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
        check_areas(&memory, size, &addresses)?;
        let position = match base {
            VringBase::Packed {
                available,
                available_wrap,
                used,
                used_wrap,
            } if available < size && (available, available_wrap) == (used, used_wrap) => Position {
                index: available,
                wrap: available_wrap,
            },
            _ => return Err(DeviceQueueError::Base { base, size }),
        };
        Ok(Self {
            memory,
            size,
            addresses,
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
            memory: &self.memory,
            limit: CHAIN_MIN_LIMIT.max(usize::from(self.size)),
            taken: 0,
            total: 0,
            pieces: Vec::new(),
        };
        let mut position = self.next_avail;
        let mut descriptors = 0;
        let id = loop {
            if descriptors == room {
                return Err(fault(ChainFault::Overrun));
            }
            descriptors += 1;
            let descriptor = self.read(self.entry(position))?;
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
            if !more {
                // Only the last one's id counts (virtio 1.3, 2.8.6).
                break descriptor.id;
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
        if !inside(&self.memory, table.address, len) {
            return Err(fault(ChainFault::OutsideMemory));
        }
        for number in 0..len / DESCRIPTOR_SIZE {
            // Inside memory, so no wrap.
            let descriptor = self.read(table.address + DESCRIPTOR_SIZE * number)?;
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
        let chain = match self.in_flight.get(&id) {
            Some(chain) if !self.in_order || chain.sequence == self.pushed => *chain,
            _ => return Err(not_in_flight),
        };
        let place = self.entry(self.next_used);
        let mut body = [0; 6];
        body[..4].copy_from_slice(&written.to_le_bytes());
        body[4..].copy_from_slice(&id.to_le_bytes());
        self.memory
            .write_slice(&body, GuestAddress(place + DESCRIPTOR_LENGTH))
            .map_err(DeviceQueueError::Memory)?;
        let mut flags = self.next_used.used_flags();
        if written > 0 {
            // Says that the length is valid (virtio 1.3, 2.8.4).
            flags |= DESCRIPTOR_F_WRITE;
        }
        // Release: the flags make all of it the driver's.
        self.store(place + DESCRIPTOR_FLAGS, flags, Ordering::Release)?;
        self.in_flight.remove(&id);
        self.entries_in_flight -= chain.descriptors;
        self.pushed += 1;
        self.next_used = self.next_used.advance(chain.descriptors, self.size);
        let moved = u32::from(chain.descriptors);
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
        let event: u32 = self
            .memory
            .load(GuestAddress(self.addresses.driver), Ordering::Relaxed)
            .map(u32::from_le)
            .map_err(DeviceQueueError::Memory)?;
        Ok(event_wanted(
            event,
            self.next_used,
            moved,
            self.size,
            self.event_idx,
        ))
    }

    /// Asks the driver to kick, or not to; it may do so anyway. `true`: a chain
    /// is available already, which perhaps no kick will announce.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn set_notifications(&mut self, enabled: bool) -> Result<bool, DeviceQueueError> {
        let flags = match enabled {
            false => EVENT_FLAGS_DISABLE,
            true if self.event_idx => EVENT_FLAGS_DESC,
            true => EVENT_FLAGS_ENABLE,
        };
        if flags == EVENT_FLAGS_DESC {
            let off_wrap = self.next_avail.off_wrap();
            self.store(self.addresses.device, off_wrap, Ordering::Relaxed)?;
        }
        // Release: the flags make the offset valid.
        self.store(
            self.addresses.device + EVENT_FLAGS,
            flags,
            Ordering::Release,
        )?;
        // Full fence: our wish must be visible before the ring is read, or a
        // chain made available in between is missed.
        fence(Ordering::SeqCst);
        self.is_available(Ordering::Relaxed)
    }

    fn is_available(&self, ordering: Ordering) -> Result<bool, DeviceQueueError> {
        let address = self.entry(self.next_avail) + DESCRIPTOR_FLAGS;
        self.memory
            .load(GuestAddress(address), ordering)
            .map(|flags: u16| self.next_avail.is_available(u16::from_le(flags)))
            .map_err(DeviceQueueError::Memory)
    }

    fn read(&self, address: u64) -> Result<Descriptor, DeviceQueueError> {
        let mut bytes = [0; 16];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .map_err(DeviceQueueError::Memory)?;
        Ok(Descriptor::parse(bytes))
    }

    fn store(&self, address: u64, value: u16, ordering: Ordering) -> Result<(), DeviceQueueError> {
        self.memory
            .store(value.to_le(), GuestAddress(address), ordering)
            .map_err(DeviceQueueError::Memory)
    }

    /// Guest-physical address of a descriptor; inside memory, so no wrap.
    fn entry(&self, position: Position) -> u64 {
        self.addresses.descriptor + DESCRIPTOR_SIZE * u64::from(position.index)
    }
}

/// Checks everything about a ring that does not change while it is in use.
fn check_areas(
    memory: &GuestMemory,
    size: u16,
    addresses: &VringAddresses,
) -> Result<(), DeviceQueueError> {
    if size == 0 || size > RING_SIZE_MAX {
        return Err(DeviceQueueError::Size { size });
    }
    let entries = DESCRIPTOR_SIZE * u64::from(size);
    let mut checked: Vec<(RingArea, IovaRange)> = Vec::with_capacity(3);
    for (area, address, align, len) in [
        (RingArea::Descriptor, addresses.descriptor, 16, entries),
        (RingArea::Driver, addresses.driver, 4, 4),
        (RingArea::Device, addresses.device, 4, 4),
    ] {
        if !address.is_multiple_of(align) {
            return Err(DeviceQueueError::Misaligned { area, address });
        }
        let range = IovaRange::from_size(address, len).filter(|_| inside(memory, address, len));
        let range = range.ok_or(DeviceQueueError::OutsideMemory { area, address, len })?;
        if let Some(&(first, _)) = checked.iter().find(|(_, other)| other.overlaps(&range)) {
            let second = area;
            return Err(DeviceQueueError::Overlap { first, second });
        }
        checked.push((area, range));
    }
    Ok(())
}
