//! One virtqueue served by this process, as the emulated devices use it.
//!
//! Owns a queue's eventfds and whether it is broken. The ring, with the checks of the driver's data
//! and interrupt suppression, is [`vdpa::ring::DeviceQueue`]. It must not know the meaning of the
//! buffers.
//!
//! ```text
//!            pop: malformed chain, avail index ahead by more than the size; set_broken
//!   serving --------------------------------------------------------------------------> broken
//! ```
//! A broken queue hands out no chains; only a device reset ends that (virtio 1.3, 2.1.2:
//! DEVICE_NEEDS_RESET).

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::device::{VringAddresses, VringBase};
use vdpa::memory::DeviceMemory;
use vdpa::ring::{Chain, DeviceQueue, GuestRing, RingFeatures};
use vmm_sys_util::eventfd::EventFd;

use super::backend::{Queue, QueueAddresses};
use crate::Error;

#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
pub(crate) mod driver;
#[cfg(test)]
mod tests;

/// The state of a queue with nothing in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedQueue {
    position: SavedPosition,
    broken: bool,
}

/// The position of a queue, by ring format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum SavedPosition {
    Split { next_avail: u16, next_used: u16 },
    Packed { base: VringBase },
}

impl From<VringBase> for SavedPosition {
    fn from(base: VringBase) -> Self {
        match base {
            VringBase::Split { index } => Self::Split {
                next_avail: index,
                next_used: index,
            },
            VringBase::Packed { .. } => Self::Packed { base },
        }
    }
}

/// The kick eventfd of a queue; it never blocks.
#[derive(Debug, Clone)]
pub(crate) struct Kick(Arc<EventFd>);

impl Kick {
    /// Takes the eventfd and makes it non-blocking, so that a spurious wake-up cannot hang the
    /// event loop.
    pub(crate) fn new(event: Arc<EventFd>) -> io::Result<Self> {
        // SAFETY: fcntl on a descriptor that `event` keeps open; F_GETFL takes no
        // pointer. There is no safe wrapper for an eventfd of vmm-sys-util.
        let flags = unsafe { libc::fcntl(event.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(io::Error::last_os_error());
        }
        if flags & libc::O_NONBLOCK == 0 {
            // SAFETY: as above; F_SETFL takes the flags by value.
            let result =
                unsafe { libc::fcntl(event.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self(event))
    }

    /// Returns the descriptor to poll.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Takes all pending kicks.
    pub(crate) fn drain(&self) {
        // The only possible failure is that none is pending.
        let _ = self.0.read();
    }

    /// Makes the event loop return: there is more work than one turn allows.
    pub(crate) fn again(&self) {
        // The only possible failure is a counter at its maximum, which is readable too.
        let _ = self.0.write(1);
    }
}

/// The device side of one virtqueue.
#[derive(Debug)]
pub(crate) struct UserspaceQueue {
    ring: DeviceQueue,
    kick: Kick,
    call: Option<Arc<EventFd>>,
    broken: bool,
}

impl UserspaceQueue {
    /// Takes over a queue that the driver programmed, at its beginning.
    ///
    /// `max_size` is the offered maximum; `features` are negotiated.
    ///
    /// # Errors
    /// The size, alignment or address of the ring is invalid.
    pub(crate) fn new(
        queue: Queue,
        max_size: u16,
        features: RingFeatures,
        memory: impl Into<DeviceMemory>,
    ) -> Result<Self, Error> {
        let base = VringBase::initial(features.packed);
        Self::start(queue, max_size, features, memory, base)
    }

    fn start(
        queue: Queue,
        max_size: u16,
        features: RingFeatures,
        memory: impl Into<DeviceMemory>,
        base: VringBase,
    ) -> Result<Self, Error> {
        let QueueAddresses {
            size,
            descriptor,
            driver,
            device,
        } = queue.addresses;
        if size > max_size || !features.format().takes(size) {
            return Err(Error::other(format!(
                "cannot use queue size {size}: the maximum is {max_size}, and a split ring takes \
                 powers of two"
            )));
        }
        let areas = VringAddresses {
            descriptor,
            driver,
            device,
        };
        let ring = GuestRing::new(memory, size, areas, features).map_err(Error::ring)?;
        let kick = Kick::new(queue.kick);
        Ok(Self {
            ring: DeviceQueue::new(ring, base, features).map_err(Error::ring)?,
            kick: kick.map_err(Error::context("cannot use the eventfd of the queue"))?,
            call: queue.call,
            broken: false,
        })
    }

    /// As [`UserspaceQueue::new`], at the saved indices. It sends one spurious kick and one
    /// spurious interrupt, so that neither side waits for a lost one.
    ///
    /// # Errors
    /// As [`UserspaceQueue::new`], or the indices are inconsistent or belong to the other ring
    /// format.
    pub(crate) fn restore(
        queue: Queue,
        saved: SavedQueue,
        max_size: u16,
        features: RingFeatures,
        memory: impl Into<DeviceMemory>,
    ) -> Result<Self, Error> {
        let base = match saved.position {
            // A broken queue is no longer served, so any position is valid: a chain that was never
            // returned may be in flight for ever.
            _ if saved.broken => VringBase::initial(features.packed),
            SavedPosition::Split {
                next_avail,
                next_used,
            } if next_avail != next_used => {
                return Err(Error::other(format!(
                    "saved queue indices {next_avail} and {next_used} differ with nothing in flight"
                )));
            }
            SavedPosition::Split { next_used, .. } => VringBase::Split { index: next_used },
            SavedPosition::Packed { base } => base,
        };
        let mut restored = Self::start(queue, max_size, features, memory, base)?;
        restored.broken = saved.broken;
        restored.kick.again();
        restored.call_now();
        Ok(restored)
    }

    /// Returns the state to save. Every popped chain must have been returned, and signalled.
    pub(crate) fn save(&self) -> SavedQueue {
        SavedQueue {
            position: self.ring.base().into(),
            broken: self.broken,
        }
    }

    /// Returns the queue's kick.
    pub(crate) fn kick(&self) -> &Kick {
        &self.kick
    }

    /// Takes the next available chain; `None` if there is none or the queue is broken.
    ///
    /// # Errors
    /// The driver's data is malformed: the queue is broken from now on.
    pub(crate) fn pop(&mut self) -> Result<Option<Chain>, Error> {
        if self.broken {
            return Ok(None);
        }
        let popped = self.ring.pop();
        self.broken = popped.is_err();
        popped.map_err(Error::ring)
    }

    /// Stops serving the queue: the driver's chain is invalid.
    pub(crate) fn set_broken(&mut self) {
        self.broken = true;
    }

    /// Returns a chain; `len` is the number of bytes written to it. The caller has made every write
    /// to its buffers, and marked it dirty, before. The driver may see the chain only after
    /// [`UserspaceQueue::signal_used`].
    ///
    /// # Errors
    /// The used ring cannot be written: the queue is broken from now on.
    pub(crate) fn push_used(&mut self, id: u16, len: u32) -> Result<(), Error> {
        let pushed = self.ring.push_used(id, len);
        self.broken |= pushed.is_err();
        pushed.map_err(Error::ring)
    }

    /// Asks the driver to kick from now on. Returns `true` if chains were made available meanwhile,
    /// for which no kick comes.
    ///
    /// # Errors
    /// The ring cannot be accessed.
    pub(crate) fn arm(&mut self) -> Result<bool, Error> {
        Ok(!self.broken && self.ring.set_notifications(true).map_err(Error::ring)?)
    }

    /// Publishes the chains of [`UserspaceQueue::push_used`], and interrupts the driver unless it
    /// suppressed that (virtio 1.3, 2.7.7, 2.7.10 and 2.8.10).
    ///
    /// # Errors
    /// The ring cannot be accessed.
    pub(crate) fn signal_used(&mut self) -> Result<(), Error> {
        if self.ring.publish().map_err(Error::ring)? {
            self.call_now();
        }
        Ok(())
    }

    /// Changes the interrupt and sends a spurious one, so that none is lost.
    pub(crate) fn set_call(&mut self, call: Option<Arc<EventFd>>) {
        self.call = call;
        self.call_now();
    }

    fn call_now(&self) {
        if let Some(call) = &self.call {
            // The only possible failure is a counter at its maximum: the interrupt is already
            // pending.
            let _ = call.write(1);
        }
    }
}
