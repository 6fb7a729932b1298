//! Replaces a vDPA network device by another one while the guest's driver keeps running.
//!
//! ```text
//!   old device                                   new device (owned, memory mapped)
//!   identity ----- MAC, MTU, queue pairs, … ---> adopt: the same for the guest, or refused
//!   hand_over ---- rings, control state -------> restore
//!     SUSPEND, positions        (can suspend and resume)
//!     reset                     (cannot, or it has failed)
//! ```
//! The properties that the guest has seen stay the same: its MAC address is laid over the new
//! device's configuration (`overlay.rs`). If that is not possible (a smaller MTU, another index of
//! the control queue) the new device is refused (`identity.rs`).
//!
//! **Where the next device begins.** A suspended device may keep buffers that it has taken from a
//! ring; a NIC that prefetches receive buffers does. They would be lost with it, so the next device
//! begins at the *used* index and takes them again. That is right only if those buffers are the
//! entries behind that index, i.e. if the old device has completed all buffers before them.
//! `Ring::check_order` looks for signs of the contrary; if there is one the old device continues.
//! The same holds for a device that is saved and continues elsewhere, or here. A device that cannot
//! be suspended and resumed is checked while it works, then reset. A frame that it has sent but not
//! returned is sent again. A packed ring has no such entries, so its suspended device must hold
//! nothing. If its device cannot suspend, relays find the position (`relays/stop.rs`), and each
//! chain must be one descriptor.
//!
//! **A device that has failed** (DEVICE_NEEDS_RESET) is not used any more: it is not suspended, and
//! neither positions nor configuration are read from it. The configuration from the start of its
//! driver applies. The device is reset, and its rings are read as those of a device that cannot be
//! suspended. This includes packed rings, since nothing is lost if their flags are inconclusive.
//!
//! **If the new device fails**, it may have worked on the rings before, since its control state
//! comes after DRIVER_OK. The old device must not take completed buffers again, so its saved
//! positions are no longer valid. Positions are read from the rings once more, after the reset of
//! the new device.
//!
//! Owns these rules. It must not know who chooses the next device, nor in what order both are
//! called.

use vdpa::device::VringBase;
use vdpa::iova::DeviceAddress;
use vdpa::memory::DeviceMemory;
use vdpa::ring::{RingFeatures, Violation, packed, split};
use vdpa::uapi::BackendFeatures;
use vm_memory::{Bytes, GuestAddress};

use super::device::VdpaBackend;
use super::identity::not_replaceable;
use super::rings::{DataQueue, Rings, vring_addresses};
use super::saved::{Saved, SavedRing};
use crate::virtio::backend::{Activation, QueueAddresses};
use crate::{Error, ErrorKind};

impl VdpaBackend {
    /// See [`Hardware::hand_over`](crate::virtio::backend::Hardware::hand_over).
    pub(super) fn hand_over_rings(&mut self) -> Result<Saved, Error> {
        let negotiation = self.negotiated()?;
        if !self.rings.is_net() {
            return Err(not_replaceable());
        }
        if self.log.poller.is_some() {
            // Relays leave nothing in flight.
            return self.save_relayed();
        }
        if !self.needs_reset && self.rings.can(BackendFeatures::SUSPEND_AND_RESUME) {
            let saved = self.suspend_and_save()?;
            self.rings.release_eventfds();
            return Ok(saved);
        }
        let RingFeatures {
            packed, in_order, ..
        } = negotiation.ring();
        if packed && !self.needs_reset {
            // Relays check first that the rings show the position.
            return self.save_relayed();
        }
        // A failed device is not waited for: the command in progress was refused.
        self.finish_commands()?;
        if !packed {
            self.rings.check_orders(in_order)?;
        }
        self.rings.device.reset()?;
        let rings = self.rings.bases_after_reset(packed)?;
        Ok(self.saved(&negotiation, rings))
    }
}

impl Rings {
    fn ring(&self, queue: &DataQueue) -> Ring<'_> {
        Ring {
            memory: &self.memory,
            index: queue.index,
            addresses: queue.addresses,
        }
    }

    /// Returns where the next device begins in the rings of a device that was reset.
    fn bases_after_reset(&self, packed: bool) -> Result<Vec<SavedRing>, Error> {
        let base = |queue: &DataQueue| {
            let ring = self.ring(queue);
            let base = if packed {
                ring.packed_used(None)?
            } else {
                let index = ring.used_index()?;
                VringBase::Split { index }
            };
            Ok(SavedRing {
                index: queue.index,
                base,
            })
        };
        self.queues.iter().map(base).collect()
    }

    /// Frees the eventfds for the next device. It works without this, but its interrupts may take a
    /// slower path.
    fn release_eventfds(&mut self) {
        for queue in &self.queues {
            if let Err(error) = self.device.release_eventfds(queue.index) {
                tracing::warn!(
                    device = %self.id,
                    queue = queue.index,
                    error = &error as &dyn std::error::Error,
                    "the device keeps the eventfds of a queue until it is closed"
                );
            }
        }
    }

    /// Returns the positions with which the next device takes the buffers that the suspended one
    /// has not completed. `in_order`: the device works in order, as negotiated or as checked just
    /// before.
    pub(super) fn suspended_bases(&self, in_order: bool) -> Result<Vec<SavedRing>, Error> {
        let queues = self.queues.iter();
        let stopped = queues.map(|queue| Ok((queue, self.device.vring_base(queue.index)?)));
        // All positions first: the device may have none.
        let stopped = stopped.collect::<Result<Vec<_>, Error>>()?.into_iter();
        let again = |(queue, base): (&DataQueue, _)| {
            let base = self.ring(queue).resume_base(base, in_order)?;
            Ok(SavedRing {
                index: queue.index,
                base,
            })
        };
        stopped.map(again).collect()
    }

    /// Checks that a device that is about to be reset works in order, as far as its rings show.
    /// Must be called while it works: once it is stopped it is too late to refuse. `in_order`:
    /// negotiated.
    pub(super) fn check_orders(&self, in_order: bool) -> Result<(), Error> {
        if in_order {
            return Ok(());
        }
        let mut queues = self.queues.iter();
        queues.try_for_each(|queue| self.ring(queue).check_order(None))
    }

    /// Returns the state that this device handed over, with the positions at which it can continue
    /// itself. The other device has failed and is reset.
    pub(super) fn rolled_back(
        &self,
        mut saved: Saved,
        activation: &Activation,
    ) -> Result<Saved, Error> {
        let in_order = RingFeatures::of(saved.features).in_order;
        for SavedRing { index, base } in &mut saved.rings {
            let mut queues = activation.queues.iter();
            if let Some(queue) = queues.find(|queue| queue.index == *index) {
                let ring = Ring {
                    memory: &self.memory,
                    index: *index,
                    addresses: queue.addresses,
                };
                *base = ring.after_another(*base, in_order)?;
            }
        }
        Ok(saved)
    }
}

/// A guest's ring, read without its device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring<'a> {
    pub(super) memory: &'a DeviceMemory,
    pub(super) index: u16,
    pub(super) addresses: QueueAddresses,
}

impl Ring<'_> {
    /// Returns where the next device begins. It must take again the buffers that the suspended
    /// device, which stopped at `base`, has taken and not completed.
    fn resume_base(self, base: VringBase, in_order: bool) -> Result<VringBase, Error> {
        match base {
            VringBase::Split { index: position } => {
                let used = self.used_index()?;
                self.check_jump(used)?;
                if used != position {
                    if !in_order {
                        self.check_order(None)?;
                    }
                    tracing::debug!(
                        queue = self.index,
                        chains = position.wrapping_sub(used),
                        "the next device repeats chains that this one has not completed"
                    );
                }
                Ok(VringBase::Split { index: used })
            }
            VringBase::Packed {
                available,
                available_wrap,
                used,
                used_wrap,
            } if available == used && available_wrap == used_wrap => Ok(base),
            VringBase::Packed { .. } => Err(self.in_flight_unknown()),
        }
    }

    /// Returns where a device that stopped at `base` continues after another device had replaced it
    /// and was reset. Only the entries behind the position were in flight there.
    fn after_another(self, base: VringBase, in_order: bool) -> Result<VringBase, Error> {
        match base {
            VringBase::Split { index: handed_over } => {
                let used = self.used_index()?;
                if used != handed_over && !in_order {
                    self.check_order(Some(handed_over))?;
                }
                Ok(VringBase::Split { index: used })
            }
            VringBase::Packed { .. } => self.packed_used(Some(base)),
        }
    }

    /// Returns the position from which another device takes the buffers that the last device of a
    /// packed ring, now reset, has not used. `since`: the last device began there with nothing in
    /// flight; this counts if it has used nothing.
    fn packed_used(self, since: Option<VringBase>) -> Result<VringBase, Error> {
        let (memory, vring) = (self.memory.clone(), vring_addresses(&self.addresses));
        let ring = packed::GuestRing::new(memory, self.addresses.size, vring, false)
            .map_err(|_| self.outside_memory())?;
        let unknown = |source| {
            let queue = self.index;
            let message = format!("queue {queue}: the position of its packed ring is unknown");
            Error::other(message).because(source)
        };
        if let Some(since) = since
            && !ring.used_since(since).map_err(unknown)?
        {
            return Ok(since);
        }
        match ring.ring_position().map_err(unknown)? {
            VringBase::Packed {
                used, used_wrap, ..
            } => Ok(VringBase::Packed {
                available: used,
                available_wrap: used_wrap,
                used,
                used_wrap,
            }),
            VringBase::Split { .. } => Err(self.in_flight_unknown()),
        }
    }

    /// Returns the guest's avail index, which its driver has written.
    pub(super) fn avail_index(self) -> Result<u16, Error> {
        self.read_index(self.addresses.driver)
    }

    /// Returns the guest's used index, which the device has written.
    fn used_index(self) -> Result<u16, Error> {
        self.read_index(self.addresses.device)
    }

    /// Reads the index in an avail or used ring at `area`.
    fn read_index(self, area: DeviceAddress) -> Result<u16, Error> {
        area.checked_add(2)
            .and_then(|address| self.memory.read_obj(GuestAddress(address.0)).ok())
            .map(u16::from_le)
            .ok_or_else(|| self.outside_memory())
    }

    /// Refuses a ring whose driver claims to have made more chains available than there are
    /// entries.
    fn check_jump(self, used: u16) -> Result<(), Error> {
        let size = self.addresses.size;
        let ahead = self.avail_index()?.wrapping_sub(used);
        if ahead <= size {
            return Ok(());
        }
        let source = Violation::AvailJump { ahead, size };
        Err(self.broken(source.into()))
    }

    /// Checks that the buffers that the device of a split ring has taken and not completed are the
    /// entries behind its used index: see [`split::GuestRing::check_order`]. `since`: check only
    /// the buffers completed from there on.
    fn check_order(self, since: Option<u16>) -> Result<(), Error> {
        let (memory, vring) = (self.memory.clone(), vring_addresses(&self.addresses));
        let ring = split::GuestRing::new(memory, self.addresses.size, vring, false)
            .map_err(|_| self.outside_memory())?;
        let order = match since {
            Some(begin) => ring.check_order_since(begin),
            None => ring.check_order(),
        };
        order.map_err(|error| match error.kind() {
            vdpa::ErrorKind::InFlightUnknown => self.in_flight_unknown(),
            _ => self.broken(error),
        })
    }

    fn outside_memory(self) -> Error {
        let queue = self.index;
        Error::other(format!(
            "the rings of queue {queue} lie outside guest memory"
        ))
    }

    /// Chains are with the device, and the ring does not show which.
    fn in_flight_unknown(self) -> Error {
        let queue = self.index;
        let message = format!(
            "queue {queue}: the device completed buffers out of order and still holds some; the \
             rings do not show which, so no other device can take them over. Try again when the \
             NIC is idle, or restart the guest's driver (unbind and bind)"
        );
        Error::new(ErrorKind::InFlightUnknown, message)
    }

    /// The guest's driver, or its device, broke the ring.
    fn broken(self, source: vdpa::Error) -> Error {
        let queue = self.index;
        let message = format!(
            "queue {queue} is broken: the guest's driver must reset the device (unbind and bind)"
        );
        Error::new(ErrorKind::BrokenRing { queue }, message).because(source)
    }
}

#[cfg(test)]
mod tests;
