//! Saving a running vhost-vdpa device, and starting one from a saved state.
//!
//! ```text
//!   save      wait for the control command in progress -> SUSPEND -> positions of all rings; the
//!             next device takes again what this one took and did not complete (`hot_swap.rs`)
//!               (a position is not available: RESUME, and the guest continues; if the buffers in
//!               flight are unknown, once more by relays, which count them)
//!             relayed, or without SUSPEND: positions from the relays (`relays.rs`), with nothing
//!             in flight
//!   restore   reset -> negotiate -> check positions -> start -> replay -> spurious signals
//!             a device that can only begin at the start of rings starts shadowed
//!               (the first two are skipped if they were done before, for the same features)
//! ```
//! Owns the order and the checks of the saved state, which comes from a file or another host. It
//! must not know how the state is encoded.

use std::collections::BTreeMap;

use vdpa::device::{Operation, State, VringBase};
use vdpa::memory::DeviceMemory;
use vdpa::uapi::BackendFeatures;
use virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_ANNOUNCE;

use super::device::VdpaBackend;
use super::eventfd::signal;
use super::hot_swap::Ring;
use super::identity::read_net_config;
use super::mac::MacOverlay;
use super::offer::Negotiation;
use super::saved::{Saved, SavedRing};
use crate::virtio::backend::{Activation, Queue};
use crate::{Error, ErrorKind};

const SAVED_CONTROL: &str = "the saved control state is invalid";

impl VdpaBackend {
    pub(super) fn save_rings(&mut self) -> Result<Saved, Error> {
        // A device that cannot resume must be checked before: by its split rings, or by relays.
        let needed = if self.packed() {
            BackendFeatures::SUSPEND_AND_RESUME
        } else {
            BackendFeatures::SUSPEND
        };
        if self.log.poller.is_some() || !self.rings.can(needed) {
            return self.save_relayed();
        }
        match self.suspend_and_save() {
            Err(error) if error.kind() == ErrorKind::InFlightUnknown && self.rings.is_running() => {
                tracing::debug!(
                    device = %self.rings.id,
                    %error,
                    "counting chains in flight to save the device"
                );
                self.save_relayed()
            }
            saved => saved,
        }
    }

    /// As [`VdpaBackend::save_rings`], with the positions from the relays.
    pub(super) fn save_relayed(&mut self) -> Result<Saved, Error> {
        let negotiation = self.negotiated()?;
        self.rings.device.check(Operation::Rebind)?;
        self.finish_commands()?;
        let bases = self.stop_relayed()?.into_iter();
        let rings = bases
            .map(|(index, base)| SavedRing { index, base })
            .collect();
        Ok(self.saved(&negotiation, rings))
    }

    /// Suspends the device and saves it with positions from which the next one leaves no chain with
    /// this one. If the positions are not available the device continues.
    pub(super) fn suspend_and_save(&mut self) -> Result<Saved, Error> {
        let negotiation = self.negotiated()?;
        self.finish_commands()?;
        // A device that cannot resume is checked before: afterwards it would be too late to refuse.
        let asked = !self.rings.can(BackendFeatures::RESUME);
        if asked {
            self.rings.check_orders(negotiation.ring().in_order)?;
        }
        self.rings.device.suspend()?;
        let in_order = asked || negotiation.ring().in_order;
        match self.rings.suspended_bases(in_order) {
            Ok(rings) => Ok(self.saved(&negotiation, rings)),
            Err(error) => {
                // A failed save must not cost the guest its device.
                self.resume();
                Err(error)
            }
        }
    }

    /// Waits until the device has no control command in progress.
    pub(super) fn finish_commands(&mut self) -> Result<(), Error> {
        if let Some(control) = &mut self.control {
            let done = control.finish()?;
            self.note(&done);
        }
        Ok(())
    }

    /// Returns the saved state of a device that has stopped. The guest's commands wait from here
    /// on.
    pub(super) fn saved(&mut self, negotiation: &Negotiation, rings: Vec<SavedRing>) -> Saved {
        self.log.on = false;
        let control = self.control.as_mut().map(|control| {
            let saved = control.save();
            control.release_guest();
            saved
        });
        Saved {
            device_type: self.rings.device.device_id(),
            features: negotiation.features,
            rings,
            mac: self.net.mac.as_ref().map(MacOverlay::current),
            announce: self.net.announcement.is_pending(),
            control,
        }
    }

    /// Resumes a suspended device after its state was not available.
    pub(super) fn resume(&mut self) {
        if let Err(error) = self.rings.device.resume() {
            tracing::error!(
                device = %self.rings.id,
                error = &error as &dyn std::error::Error,
                "the device stays suspended: its driver must reset it"
            );
            self.stop();
            signal(&self.log.failed);
            return;
        }
        self.rings.signal_all();
        self.spurious_notify_control();
    }

    fn check_kind(&self, saved: &Saved) -> Result<(), Error> {
        let has = self.rings.device.device_id();
        if saved.device_type != has {
            return Err(Error::other(format!(
                "the saved state is of device type {}, the device has type {has}",
                saved.device_type
            )));
        }
        match saved.features & !self.net.offer.taking_over(saved.features) {
            0 => Ok(()),
            _ => Err(self.other_features(saved)),
        }
    }

    fn other_features(&self, saved: &Saved) -> Error {
        Error::other(format!(
            "the saved state has the features {:#x}, the device offers {:#x}",
            saved.features,
            self.net.offer.all()
        ))
    }

    /// Checks a state before anything is stopped for it. The guest's control settings are checked
    /// only if they come from another device: this one has acknowledged them itself, and may have
    /// failed since.
    pub(super) fn check_saved(&self, saved: &Saved) -> Result<(), Error> {
        self.check_kind(saved)?;
        if let (Some(_), Some(control)) = (&self.net.replaced, &saved.control) {
            let limits = self.limits(saved.features, Some(read_net_config(&self.rings.device)?));
            let validated = control.state.validate(&limits);
            validated.map_err(Error::context(SAVED_CONTROL))?;
        }
        Ok(())
    }

    pub(super) fn restore_rings(
        &mut self,
        saved: Saved,
        activation: Activation,
    ) -> Result<(), Error> {
        // A device that was negotiated for this restore and nothing else has its memory mapped;
        // mapping it again may take long.
        let prepared = self.negotiation.filter(|known| {
            known.features == saved.features && self.rings.device.state() == State::Negotiated
        });
        if prepared.is_none() {
            self.stop();
        }
        self.check_kind(&saved)?;
        if saved.features != activation.features {
            return Err(self.other_features(&saved));
        }
        let negotiation = match prepared {
            Some(negotiation) => negotiation,
            None => self.negotiate_features(saved.features)?,
        };
        self.negotiation = Some(negotiation);
        if let (Some(mac), Some(current)) = (&mut self.net.mac, saved.mac) {
            mac.restore(current);
        }
        self.net
            .announcement
            .set(saved.announce && negotiation.has(VIRTIO_NET_F_GUEST_ANNOUNCE));
        let mut replay = self.own_commands(&negotiation)?;
        let mut guest_queue = None;
        if let Some(control) = saved.control {
            let validated = control.state.validate(&negotiation.limits);
            validated.map_err(Error::context(SAVED_CONTROL))?;
            // A driver may accept CTRL_MAC_ADDR without CTRL_VQ: no queue, no commands.
            if negotiation.control_queue.is_some() {
                replay.extend(control.state.replay());
            }
            guest_queue = control.guest;
        }
        let bases = saved_bases(&self.rings.memory, &saved.rings, &negotiation, &activation)?;
        let initial = VringBase::initial(negotiation.ring().packed);
        let base_of = |index| bases.get(&index).copied().unwrap_or(initial);
        self.start(activation, base_of, &replay, guest_queue)?;
        self.net.replaced = None;
        self.rings.signal_all();
        Ok(())
    }
}

/// Returns the position of every enabled data queue, checked against the guest's rings.
fn saved_bases(
    memory: &DeviceMemory,
    rings: &[SavedRing],
    negotiation: &Negotiation,
    activation: &Activation,
) -> Result<BTreeMap<u16, VringBase>, Error> {
    let data_queues = activation
        .queues
        .iter()
        .filter(|queue| Some(queue.index) != negotiation.control_queue);
    let mut bases = BTreeMap::new();
    for &Queue {
        index, addresses, ..
    } in data_queues
    {
        let saved = rings.iter().find(|ring| ring.index == index);
        let none = || Error::other(format!("the saved state has no position for queue {index}"));
        let base = saved.ok_or_else(none)?.base;
        match base {
            VringBase::Split { index: position } => {
                let ring = Ring {
                    memory,
                    index,
                    addresses,
                };
                check_position(ring, position)?;
            }
            VringBase::Packed { .. } => check_packed_base(index, base, addresses.size)?,
        }
        bases.insert(index, base);
    }
    Ok(bases)
}

/// Checks a position. A device that starts further from the guest's avail index than the ring is
/// long would take buffers that the guest has not made available.
fn check_position(ring: Ring<'_>, position: u16) -> Result<(), Error> {
    let available = ring.avail_index()?;
    if available.wrapping_sub(position) <= ring.addresses.size {
        return Ok(());
    }
    let queue = ring.index;
    Err(Error::other(format!(
        "queue {queue} cannot resume at {position}: the guest has made buffers available up to \
         {available}"
    )))
}

/// Checks a packed ring's positions. They must lie in the ring, and the used one at most a lap
/// behind the available one. A device with more in flight than the ring has entries would use
/// buffers that the guest has not made available. The guest's own position cannot be checked: used
/// descriptors may lie over those that it made available.
fn check_packed_base(queue: u16, base: VringBase, size: u16) -> Result<(), Error> {
    let possible = match base {
        VringBase::Split { .. } => false,
        VringBase::Packed {
            available,
            available_wrap,
            used,
            used_wrap,
        } => {
            let in_one_lap = if available_wrap == used_wrap {
                used <= available
            } else {
                available <= used
            };
            available < size && used < size && in_one_lap
        }
    };
    if possible {
        return Ok(());
    }
    Err(Error::other(format!(
        "queue {queue}, a packed ring of {size} entries, cannot resume at {base:?}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_positions_lie_within_a_lap() {
        let check = |available, available_wrap, used, used_wrap| {
            let base = VringBase::Packed {
                available,
                available_wrap,
                used,
                used_wrap,
            };
            check_packed_base(0, base, 8).is_ok()
        };
        assert!(check(0, true, 0, true) && check(7, false, 3, false));
        // All entries in flight, and some beyond the end.
        assert!(check(3, false, 3, true) && check(1, true, 6, false));
        assert!(!check(3, true, 4, true) && !check(4, false, 3, true));
        assert!(!check(8, true, 0, true) && !check(0, true, 8, false));
        assert!(check_packed_base(0, VringBase::initial(false), 8).is_err());
    }
}
