//! A split ring in guest memory, through `virtio-queue`: the checks that it
//! leaves out. Owns no state; see the module above for what the gaps are.

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue as SplitRing, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory as _, Permissions};

use super::{Chain, ChainFault, MAX_DESCRIPTORS, QueueError, RingPart, Segment};
use crate::virtio::backend::{QueueAddresses, SharedMemory};

/// A split ring at its beginning, checked.
pub(super) fn new(
    addresses: &QueueAddresses,
    max_size: u16,
    event_idx: bool,
    memory: &SharedMemory,
) -> Result<SplitRing, QueueError> {
    check_layout(addresses, max_size, memory)?;
    let mut ring = SplitRing::new(max_size).map_err(QueueError::Ring)?;
    ring.try_set_size(addresses.size)
        .and_then(|()| ring.try_set_desc_table_address(GuestAddress(addresses.descriptor)))
        .and_then(|()| ring.try_set_avail_ring_address(GuestAddress(addresses.driver)))
        .and_then(|()| ring.try_set_used_ring_address(GuestAddress(addresses.device)))
        .map_err(QueueError::Ring)?;
    ring.set_event_idx(event_idx);
    ring.set_ready(true);
    Ok(ring)
}

/// Takes the next available chain, copied and checked.
pub(super) fn pop(
    ring: &mut SplitRing,
    memory: &SharedMemory,
) -> Result<Option<Chain>, QueueError> {
    let memory = &**memory;
    let Some(mut descriptors) = ring.iter(memory).map_err(QueueError::Ring)?.next() else {
        return Ok(None);
    };
    let head = descriptors.head_index();
    let fault = |fault| QueueError::Chain { head, fault };
    let mut chain = Chain {
        head,
        readable: Vec::new(),
        writable: Vec::new(),
    };
    // The iterator says nothing when it stops early, but then the last
    // descriptor it gave (if any) had a successor.
    let mut finished = false;
    for count in 0.. {
        let Some(descriptor) = descriptors.next() else {
            break;
        };
        if count == MAX_DESCRIPTORS {
            return Err(fault(ChainFault::TooLong));
        }
        finished = !descriptor.has_next();
        let writable = descriptor.is_write_only();
        if !writable && !chain.writable.is_empty() {
            return Err(fault(ChainFault::Order));
        }
        let segment = Segment {
            address: descriptor.addr(),
            len: descriptor.len(),
        };
        if segment.len == 0 {
            continue;
        }
        let len = usize::try_from(segment.len).map_err(|_| fault(ChainFault::OutsideMemory))?;
        if !memory.check_range(segment.address, len, Permissions::ReadWrite) {
            return Err(fault(ChainFault::OutsideMemory));
        }
        if writable {
            chain.writable.push(segment);
        } else {
            chain.readable.push(segment);
        }
    }
    if finished {
        Ok(Some(chain))
    } else {
        Err(fault(ChainFault::Unfinished))
    }
}

/// Whether the driver of a split ring wants an interrupt.
pub(super) fn wants_signal(
    ring: &mut SplitRing,
    memory: &SharedMemory,
) -> Result<bool, QueueError> {
    let memory = &**memory;
    if ring.event_idx_enabled() {
        return ring.needs_notification(memory).map_err(QueueError::Ring);
    }
    // The used index must be visible before the flag is read, or a driver
    // that re-enables interrupts in between would wait for ever.
    fence(Ordering::SeqCst);
    let flags: u16 = memory
        .load(GuestAddress(ring.avail_ring()), Ordering::Relaxed)
        .map(u16::from_le)
        .map_err(|error| QueueError::Ring(virtio_queue::Error::GuestMemory(error)))?;
    Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
}

/// Checks everything about a split ring that does not change while it is in use.
fn check_layout(
    addresses: &QueueAddresses,
    max_size: u16,
    memory: &SharedMemory,
) -> Result<(), QueueError> {
    let size = addresses.size;
    if !size.is_power_of_two() || size > max_size {
        return Err(QueueError::Size {
            size,
            max: max_size,
        });
    }
    let entries = u64::from(size);
    // Sizes as in virtio 1.3, 2.7: both rings with their event field.
    let parts = [
        (RingPart::Descriptor, addresses.descriptor, 16, 16 * entries),
        (RingPart::Driver, addresses.driver, 2, 6 + 2 * entries),
        (RingPart::Device, addresses.device, 4, 6 + 8 * entries),
    ];
    for (part, address, align, len) in parts {
        if address % align != 0 {
            return Err(QueueError::Misaligned { part, address });
        }
        let inside = address.checked_add(len).is_some()
            && usize::try_from(len).is_ok_and(|len| {
                memory.check_range(GuestAddress(address), len, Permissions::ReadWrite)
            });
        if !inside {
            return Err(QueueError::OutsideMemory { part, address, len });
        }
    }
    let [descriptor, driver, device] = parts;
    for other in [descriptor, driver] {
        // No wrap: every part lies in guest memory.
        if device.1 < other.1 + other.3 && other.1 < device.1 + device.3 {
            return Err(QueueError::Overlap { part: other.0 });
        }
    }
    Ok(())
}
