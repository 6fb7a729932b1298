//! A packed ring in guest memory, through `vdpa::ring::packed`, which checks all
//! of it: here it only gets the words of this module. Owns no state.

use std::sync::Arc;

use vdpa::device::{VringAddresses, VringBase};
use vdpa::ring::packed::DeviceQueue;
use vdpa::ring::{Direction, RingFeatures};
use vm_memory::GuestAddress;

use super::{Chain, QueueError, Segment};
use crate::virtio::backend::{QueueAddresses, SharedMemory};

/// A packed ring at `base`, checked.
pub(super) fn new(
    addresses: &QueueAddresses,
    max_size: u16,
    base: VringBase,
    features: RingFeatures,
    memory: &SharedMemory,
) -> Result<DeviceQueue, QueueError> {
    let size = addresses.size;
    if size > max_size {
        return Err(QueueError::Size {
            size,
            max: max_size,
        });
    }
    let areas = VringAddresses {
        descriptor: addresses.descriptor,
        driver: addresses.driver,
        device: addresses.device,
    };
    Ok(DeviceQueue::new(
        Arc::clone(memory),
        size,
        areas,
        base,
        features,
    )?)
}

/// Takes the next available chain, by the direction of its pieces.
pub(super) fn pop(ring: &mut DeviceQueue) -> Result<Option<Chain>, QueueError> {
    let Some(popped) = ring.pop()? else {
        return Ok(None);
    };
    let mut chain = Chain {
        head: popped.id,
        readable: Vec::new(),
        writable: Vec::new(),
    };
    for piece in popped.pieces {
        let segment = Segment {
            address: GuestAddress(piece.iova),
            len: piece.len,
        };
        match piece.direction {
            Direction::DeviceReads => chain.readable.push(segment),
            Direction::DeviceWrites => chain.writable.push(segment),
        }
    }
    Ok(Some(chain))
}
