//! A ring that one side fills and the other one empties (`struct xdp_ring` in the kernel's
//! `net/xdp/xsk_queue.h`).
//!
//! ```text
//!   consumer ≤ producer ≤ consumer + RING_SIZE      indices that wrap at 2³²
//! ```
//! This process owns one of the two indices and keeps it here. The other one, which the kernel
//! writes, is checked at each use.

use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};

use rustix::net::xdp::{XdpRingFlags, XdpRingOffset};
use vm_memory::{ByteValued, Bytes as _};

use super::super::mapping::Mapping;
use crate::Error;

/// Chunks to receive, and as many to transmit.
pub(super) const CHUNKS: u32 = 1024;
/// Entries of each ring: a power of two. Twice as many as chunks, because the kernel shows that it
/// has taken an entry only after it has shown the result (`xsk_flush` in net/xdp/xsk.c).
pub(super) const RING_SIZE: u32 = 2 * CHUNKS;

/// A ring of entries `T`.
#[derive(Debug)]
pub(super) struct Ring<T> {
    mapping: Mapping,
    producer: usize,
    consumer: usize,
    flags: usize,
    entries: usize,
    /// The index of this process.
    own: u32,
    entry: PhantomData<T>,
}

impl<T: ByteValued> Ring<T> {
    /// Maps an unused ring of `socket`: at this offset of the file, with this layout.
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        offset: u64,
        layout: &XdpRingOffset,
    ) -> Result<Self, Error> {
        let unusable = || {
            Error::other(format!(
                "the AF_XDP socket has an unusable ring: {layout:?}"
            ))
        };
        let place = |offset: u64| usize::try_from(offset).map_err(|_| unusable());
        let entries = place(layout.desc)?;
        let size = size_of::<T>() * RING_SIZE as usize;
        let len = entries.checked_add(size).ok_or_else(unusable)?;
        let mapping = Mapping::new(socket, offset, len);
        let mapping = mapping.map_err(Error::context(
            "cannot map a ring of the AF_XDP socket: Linux 6.4 or newer is needed",
        ))?;
        let ring = Self {
            mapping,
            producer: place(layout.producer)?,
            consumer: place(layout.consumer)?,
            flags: place(layout.flags.ok_or_else(unusable)?)?,
            entries,
            own: 0,
            entry: PhantomData,
        };
        for field in [ring.producer, ring.consumer, ring.flags] {
            ring.load(field)?;
        }
        Ok(ring)
    }

    /// How many entries this process may add to a ring that it fills.
    pub(super) fn room(&self) -> Result<u32, Error> {
        let filled = self.own.wrapping_sub(self.load(self.consumer)?);
        RING_SIZE.checked_sub(filled).ok_or_else(impossible)
    }

    /// Adds an entry, which the kernel sees after [`Ring::publish`]. There must be
    /// [`Ring::room`].
    pub(super) fn add(&mut self, entry: T) -> Result<(), Error> {
        let place = self.place(self.own);
        let written = self.mapping.bytes().write_obj(entry, place);
        written.map_err(Error::context("cannot write an entry of a ring"))?;
        self.own = self.own.wrapping_add(1);
        Ok(())
    }

    /// Shows all entries that were added.
    pub(super) fn publish(&self) -> Result<(), Error> {
        self.store(self.producer)
    }

    /// Whether the kernel waits for a system call (`XDP_USE_NEED_WAKEUP`).
    pub(super) fn needs_wakeup(&self) -> Result<bool, Error> {
        // The kernel sets the flag before it looks at the ring once more. So the entries must be
        // visible before the flag is read.
        fence(Ordering::SeqCst);
        Ok(self.load(self.flags)? & XdpRingFlags::XDP_RING_NEED_WAKEUP.bits() != 0)
    }

    /// Takes the next entry of a ring that the kernel fills, if there is one.
    pub(super) fn take(&mut self) -> Result<Option<T>, Error> {
        match self.load(self.producer)?.wrapping_sub(self.own) {
            0 => return Ok(None),
            1..=RING_SIZE => {}
            _ => return Err(impossible()),
        }
        let place = self.place(self.own);
        let entry = self.mapping.bytes().read_obj(place);
        let entry = entry.map_err(Error::context("cannot read an entry of a ring"))?;
        self.own = self.own.wrapping_add(1);
        self.store(self.consumer)?;
        Ok(Some(entry))
    }

    fn place(&self, index: u32) -> usize {
        // Smaller than the mapping, see `map`.
        self.entries + (index % RING_SIZE) as usize * size_of::<T>()
    }

    fn load(&self, field: usize) -> Result<u32, Error> {
        let loaded = self.mapping.bytes().load(field, Ordering::Acquire);
        loaded.map_err(Error::context("cannot read an index of a ring"))
    }

    fn store(&self, field: usize) -> Result<(), Error> {
        let stored = self
            .mapping
            .bytes()
            .store(self.own, field, Ordering::Release);
        stored.map_err(Error::context("cannot write an index of a ring"))
    }
}

fn impossible() -> Error {
    Error::other("the kernel reports an impossible position in a ring of the AF_XDP socket")
}
