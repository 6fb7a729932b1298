//! One virtqueue with its buffers: the common part of receive and transmit.
//!
//! ```text
//!   | ring (whole pages) | tables: 32 bytes a slot | slots: header and frame |
//! ```
//! A slot is a fixed place for one packet. The queue tracks the slot of each chain, independently
//! of the direction of packets.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::HEADER_LEN;
use super::features::{Chains, Kick};
use crate::Error;
use crate::device::{VringAddresses, VringConfig};
use crate::doorbell::Doorbell;
use crate::iova::PAGE_SIZE;
use crate::memory::SharedBuffer;
use crate::ring::{Direction, DriverQueue, Piece, RingFeatures, RingLayout, no_chain};

/// Bytes of an indirect table of two descriptors.
const TABLE: u64 = 32;

/// Counters since the queue was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Counters {
    /// Packets received, or sent and returned.
    pub packets: u64,
    /// Bytes in their frames.
    pub bytes: u64,
    /// Kicks that the device wanted and got.
    pub kicks: u64,
    /// Kicks skipped because the device did not want one.
    pub kicks_suppressed: u64,
    /// Reads that found the call eventfd signalled.
    pub calls: u64,
    /// Received packets too short for a header; dropped.
    pub malformed: u64,
}

/// Offsets of the parts of a queue in the memory of all queues.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    pub(super) layout: RingLayout,
    ring: u64,
    tables: u64,
    slots: u64,
    slot_size: u32,
    pub(super) end: u64,
}

impl Parts {
    /// A queue with slots of `slot_size` bytes at `start`, a multiple of the page size; `None` if
    /// that overflows.
    pub(super) fn new(layout: RingLayout, slot_size: u32, start: u64) -> Option<Self> {
        let entries = u64::from(layout.entries());
        let tables = start.checked_add(layout.size())?;
        let slots = tables.checked_add((entries * TABLE).next_multiple_of(PAGE_SIZE))?;
        let bytes = entries
            .checked_mul(u64::from(slot_size))?
            .checked_next_multiple_of(PAGE_SIZE)?;
        Some(Self {
            layout,
            ring: start,
            tables,
            slots,
            slot_size,
            end: slots.checked_add(bytes)?,
        })
    }
}

/// One virtqueue of a [`super::Netdev`], for either direction.
#[derive(Debug)]
pub struct Virtqueue {
    index: u16,
    ring: DriverQueue,
    memory: Arc<SharedBuffer>,
    parts: Parts,
    chains: Chains,
    /// Slot of each chain that the device has, by the chain's head.
    slot_of: Vec<u16>,
    /// Slots that the device does not have.
    free: Vec<u16>,
    kick: Arc<EventFd>,
    call: Arc<EventFd>,
    doorbell: Option<Doorbell>,
    kick_by: Kick,
    pub(super) counters: Counters,
}

fn event(source: std::io::Error) -> Error {
    Error::other("an eventfd failed").because(source)
}

fn eventfd() -> Result<Arc<EventFd>, Error> {
    crate::eventfd::new().map(Arc::new).map_err(event)
}

impl Virtqueue {
    pub(super) fn new(
        index: u16,
        memory: Arc<SharedBuffer>,
        parts: Parts,
        features: RingFeatures,
        chains: Chains,
    ) -> Result<Self, Error> {
        let size = parts.layout.entries();
        Ok(Self {
            index,
            ring: DriverQueue::new(Arc::clone(&memory), size, parts.ring, features)?,
            memory,
            parts,
            chains,
            slot_of: vec![0; usize::from(size)],
            free: (0..size).rev().collect(),
            kick: eventfd()?,
            call: eventfd()?,
            doorbell: None,
            kick_by: Kick::Eventfd,
            counters: Counters::default(),
        })
    }

    pub(super) fn set_doorbell(&mut self, doorbell: Doorbell) {
        self.doorbell = Some(doorbell);
        self.kick_by = Kick::Doorbell;
    }

    /// Index of the queue on the device.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Entries of the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// The I/O virtual addresses of the ring's areas, which are the same in
    /// [`super::Driver::guest_memory`].
    #[must_use]
    pub fn addresses(&self) -> VringAddresses {
        self.ring.addresses()
    }

    /// The driver's position; see [`DriverQueue::positions`].
    #[must_use]
    pub fn positions(&self) -> (u16, u16) {
        self.ring.positions()
    }

    /// Chains that the device has.
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        self.ring.outstanding()
    }

    /// The counters of the queue.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The layout of packets in descriptors.
    #[must_use]
    pub fn chains(&self) -> Chains {
        self.chains
    }

    /// The eventfd by which the device is kicked.
    #[must_use]
    pub fn kick_event(&self) -> &Arc<EventFd> {
        &self.kick
    }

    /// The eventfd that the device signals. Non-blocking.
    #[must_use]
    pub fn call_event(&self) -> &Arc<EventFd> {
        &self.call
    }

    /// Replaces the kick eventfd and returns the old one. The caller sets it by
    /// [`crate::device::Device::set_kick`], before or after, and kicks once.
    pub fn replace_kick(&mut self, kick: Arc<EventFd>) -> Arc<EventFd> {
        std::mem::replace(&mut self.kick, kick)
    }

    /// Replaces the call eventfd and returns the old one. The new one must be non-blocking. The
    /// caller sets it by [`crate::device::Device::set_call`].
    pub fn replace_call(&mut self, call: Arc<EventFd>) -> Arc<EventFd> {
        std::mem::replace(&mut self.call, call)
    }

    /// The current way to kick the queue.
    #[must_use]
    pub fn kick_by(&self) -> Kick {
        self.kick_by
    }

    /// Sets the way to kick and returns the one in effect. A queue without a doorbell keeps its
    /// eventfd.
    pub fn set_kick_by(&mut self, kick_by: Kick) -> Kick {
        self.kick_by = match self.doorbell {
            Some(_) => kick_by,
            None => Kick::Eventfd,
        };
        self.kick_by
    }

    /// Kicks even if the device did not ask for it.
    ///
    /// # Errors
    /// The eventfd failed.
    pub fn force_kick(&mut self) -> Result<(), Error> {
        match (&self.doorbell, self.kick_by) {
            (Some(doorbell), Kick::Doorbell) => doorbell.ring(self.index),
            _ => self.kick.write(1).map_err(event)?,
        }
        self.counters.kicks += 1;
        Ok(())
    }

    pub(super) fn kick_if_wanted(&mut self) -> Result<(), Error> {
        if self.ring.needs_kick()? {
            self.force_kick()
        } else {
            self.counters.kicks_suppressed += 1;
            Ok(())
        }
    }

    /// Enables interrupts from the device. `true`: there may be work already that causes none, so
    /// poll again before waiting.
    ///
    /// # Errors
    /// The device broke the ring.
    pub fn enable_interrupts(&mut self) -> Result<bool, Error> {
        self.ring.set_interrupts(true)
    }

    /// Disables interrupts from the device; some may still arrive.
    ///
    /// # Errors
    /// As [`Virtqueue::enable_interrupts`].
    pub fn disable_interrupts(&mut self) -> Result<(), Error> {
        self.ring.set_interrupts(false).map(drop)
    }

    /// Takes a signal of the call eventfd; `false`: there was none.
    ///
    /// # Errors
    /// The eventfd failed.
    pub fn clear_call(&mut self) -> Result<bool, Error> {
        match self.call.read() {
            Ok(_) => {
                self.counters.calls += 1;
                Ok(true)
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(event(error)),
        }
    }

    pub(super) fn call_fd(&self) -> BorrowedFd<'_> {
        crate::eventfd::descriptor(&self.call)
    }

    pub(super) fn memory(&self) -> &SharedBuffer {
        &self.memory
    }

    /// Bytes of the largest frame.
    pub(super) fn frame_max(&self) -> u32 {
        self.parts.slot_size - HEADER_LEN
    }

    /// Offset of a slot in memory: the header, then the frame.
    pub(super) fn offset(&self, slot: u16) -> u64 {
        self.parts.slots + u64::from(slot) * u64::from(self.parts.slot_size)
    }

    /// Takes a free slot, if a chain for it fits.
    pub(super) fn take_slot(&mut self) -> Option<u16> {
        let needed = match self.chains {
            Chains::Pair => 2,
            Chains::Single | Chains::Indirect => 1,
        };
        if self.ring.free() < needed {
            return None;
        }
        self.free.pop()
    }

    pub(super) fn give_slot(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Posts a slot with `len` bytes of frame to the device.
    pub(super) fn post(&mut self, slot: u16, len: u32, direction: Direction) -> Result<(), Error> {
        let offset = self.offset(slot);
        let whole = len.checked_add(HEADER_LEN).ok_or_else(no_chain)?;
        let iova = self.memory.iova(offset, u64::from(whole))?;
        let piece = |iova, len| Piece {
            iova,
            len,
            direction,
        };
        let pair = [
            piece(iova, HEADER_LEN),
            piece(iova + u64::from(HEADER_LEN), len),
        ];
        let name = match self.chains {
            Chains::Single => self.ring.add(&[piece(iova, whole)])?,
            Chains::Pair => self.ring.add(&pair)?,
            Chains::Indirect => {
                let table = self.parts.tables + TABLE * u64::from(slot);
                self.ring.add_indirect(&pair, table)?
            }
        };
        if let Some(of_chain) = self.slot_of.get_mut(usize::from(name)) {
            *of_chain = slot;
        }
        Ok(())
    }

    /// The next slot that the device has used, and the number of bytes it wrote there.
    pub(super) fn pop(&mut self) -> Result<Option<(u16, u32)>, Error> {
        let Some(used) = self.ring.pop_used()? else {
            return Ok(None);
        };
        // The ring returns only heads below its size.
        let slot = self.slot_of.get(usize::from(used.head)).copied();
        Ok(slot.map(|slot| (slot, used.written)))
    }

    /// The description of the queue for the device.
    #[must_use]
    pub fn vring_config(&self) -> VringConfig<'_> {
        VringConfig {
            size: self.ring.size(),
            addresses: self.ring.addresses(),
            base: self.ring.initial_base(),
            kick: Some(&self.kick),
            call: Some(&self.call),
        }
    }
}
