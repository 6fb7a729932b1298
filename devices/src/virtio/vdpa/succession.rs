//! One vDPA network device in the place of another while the guest's driver goes on.
//!
//! ```text
//!   old device                                   new device (owned, memory mapped)
//!   identity ----- MAC, MTU, queue pairs, … ---> succeed: the same for the guest, or refused
//!   hand_over ---- rings, control state -------> restore
//!     SUSPEND, positions        (can suspend and resume)
//!     reset                     (cannot, and its rings are split; or it has failed)
//! ```
//! What the guest has been told stays true: its MAC address is laid over the new device's
//! configuration; where that is not possible (a smaller MTU, another place of the control
//! queue) the new device is refused.
//!
//! **Where the next device begins.** A suspended device may keep buffers that it has taken from
//! a ring: a NIC that fetches receive buffers early does. They would be lost with it, so the next one begins at
//! the *used* index and takes them again. That is right only if those are the entries
//! behind that index, i.e. if the old device has completed all buffers before them. `check_order` looks
//! for signs that it has not; if there is one the old device goes on. The same holds for a device that is saved
//! and goes on elsewhere, or here. A device that cannot be suspended and
//! resumed is looked at while it works, then reset: a frame that it has sent but not given back is sent again.
//! A packed ring has no entries to look at: its device must hold nothing.
//!
//! **A device that has failed** (DEVICE_NEEDS_RESET) is asked nothing: neither to suspend, nor for positions, nor for its
//! configuration, which is the one it had when its driver began. It is reset, and its rings are read as those of a device
//! that cannot be suspended; packed ones, too, since nothing is lost if their flags do not tell.
//!
//! **If the new one fails** it may have worked on the rings before (its control state comes after
//! DRIVER_OK). What it has completed the old one must not take again, so where that one stopped is worth nothing by
//! then: positions are read from the rings once more, when the new one is reset.
//!
//! Owns these rules. It must not know who decides which device is next, nor in what order
//! both are called.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::device::{Device, Operation, VringBase};
use vdpa::memory::GuestMemory;
use vdpa::netdev::VirtioNetConfig;
use vdpa::ring::{RingFeatures, Violation, packed, split};
use vdpa::uapi::BackendFeatures;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU, VIRTIO_NET_F_RSS,
};
use vm_memory::{Bytes, GuestAddress};

use super::mac::MacOverlay;
use super::offer::Offer;
use super::overlay::{NetOverlay, configured_mac};
use super::rings::{DataQueue, Rings, vring_addresses};
use super::saved::{Saved, SavedRing};
use super::{VdpaBackend, not_negotiated, not_replaceable};
use crate::virtio::backend::{Activation, Predecessor, QueueAddresses, SavedState, SharedMemory};
use crate::virtio::saved_state;
use crate::{Error, ErrorKind};

/// Name and version of an identity.
pub(in crate::virtio) const IDENTITY_NAME: &str = "virtio-vdpa-identity";
pub(in crate::virtio) const IDENTITY_VERSION: u32 = 1;

/// What a guest was told of a network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    /// The MAC address that the guest finds after each reset.
    mac: Option<[u8; 6]>,
    /// The beginning of the device configuration; zero where it has no more.
    config: [u8; VirtioNetConfig::LEN],
}

/// Whether a driver that relies on `features` and was told `old` can go on with `new`.
fn check_config(old: &VirtioNetConfig, new: &VirtioNetConfig, features: u64) -> Result<(), Error> {
    let relies = |bit: u32| features & (1 << bit) != 0;
    let hashes = relies(VIRTIO_NET_F_RSS) || relies(VIRTIO_NET_F_HASH_REPORT);
    // With several pairs the control queue comes behind the last one (virtio 1.3, 5.1.2).
    if (relies(VIRTIO_NET_F_MQ) || hashes) && new.max_virtqueue_pairs != old.max_virtqueue_pairs {
        let (needs, has) = (old.max_virtqueue_pairs, new.max_virtqueue_pairs);
        return Err(Error::other(format!(
            "the guest uses {needs} queue pairs at most, the device has {has}: create the device \
             with max_vqp {needs}"
        )));
    }
    let (needs, has) = (old.mtu.get(), new.mtu.get());
    if relies(VIRTIO_NET_F_MTU) && has < needs {
        return Err(Error::other(format!(
            "the guest was told an MTU of {needs}, the device has {has}: create the device with \
             mtu {needs}"
        )));
    }
    let table = |config: &VirtioNetConfig| config.rss_max_indirection_table_length.get();
    let less = new.rss_max_key_size < old.rss_max_key_size
        || table(new) < table(old)
        || (old.supported_hash_types & !new.supported_hash_types).get() != 0;
    if hashes && less {
        return Err(Error::other(
            "the device hashes less than the guest was told (RSS key, table or hash types)",
        ));
    }
    Ok(())
}

impl Identity {
    /// Whether a driver that relies on `features` and was told this can go on with a device that has the configuration `new`,
    /// in which the address means nothing if it is not `addressed`.
    fn check(
        &self,
        mut new: [u8; VirtioNetConfig::LEN],
        addressed: bool,
        features: u64,
    ) -> Result<(), Error> {
        let old = VirtioNetConfig::of(self.config);
        check_config(&old, &VirtioNetConfig::of(new), features)?;
        let settable = [VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_CTRL_MAC_ADDR]
            .iter()
            .all(|bit| features & (1 << bit) != 0);
        if !addressed {
            new[..6].fill(0);
        }
        let differs = self.mac.is_some_and(|mac| mac != new[..6]);
        if features != 0 && differs && !settable {
            return Err(Error::other(
                "the device has another MAC address, and the guest's driver did not negotiate \
                 CTRL_MAC_ADDR: create the device with the guest's address (`vdpa dev add … mac \
                 ADDRESS`)",
            ));
        }
        Ok(())
    }
}

/// The beginning of the device configuration as the device says it now.
pub(super) fn tells(device: &Device) -> Result<[u8; VirtioNetConfig::LEN], Error> {
    let mut config = [0; VirtioNetConfig::LEN];
    let len = usize::try_from(device.config_size())
        .unwrap_or(VirtioNetConfig::LEN)
        .min(VirtioNetConfig::LEN);
    device.read_config(0, &mut config[..len])?;
    Ok(config)
}

impl NetOverlay {
    /// What the guest knows of `device`; `failed`: it may say anything by now.
    pub(super) fn identify(&self, device: &Device, failed: bool) -> Result<Identity, Error> {
        if device.device_id() != VIRTIO_ID_NET {
            return Err(not_replaceable());
        }
        Ok(Identity {
            mac: self.mac.as_ref().map(MacOverlay::configured),
            config: match self.told {
                Some(told) if failed => told,
                _ => tells(device)?,
            },
        })
    }

    /// See [`Hardware::succeed`](crate::virtio::backend::Hardware::succeed).
    pub(super) fn take_place(
        &mut self,
        device: &Device,
        id: &str,
        identity: &Identity,
        predecessor: &Predecessor,
    ) -> Result<(), Error> {
        device.check(Operation::Probe)?;
        if device.device_id() != VIRTIO_ID_NET {
            return Err(not_replaceable());
        }
        let config = tells(device)?;
        // An address that is the VMM's to give changes what can be offered.
        let offer = Offer::new(device, id, identity.mac.is_some())?;
        identity.check(config, offer.passes(VIRTIO_NET_F_MAC), predecessor.features)?;
        self.mac = configured_mac(device, offer, identity.mac)?;
        self.offer = offer;
        self.predecessor = Some(identity.clone());
        Ok(())
    }

    /// See [`Hardware::check_succession`](crate::virtio::backend::Hardware::check_succession).
    pub(super) fn check_predecessor(&self, device: &Device, features: u64) -> Result<(), Error> {
        match &self.predecessor {
            Some(identity) => {
                let addressed = self.offer.passes(VIRTIO_NET_F_MAC);
                identity.check(tells(device)?, addressed, features)
            }
            None => Ok(()),
        }
    }
}

impl VdpaBackend {
    /// See [`Hardware::hand_over`](crate::virtio::backend::Hardware::hand_over).
    pub(super) fn hand_over_rings(&mut self) -> Result<Saved, Error> {
        let negotiation = self.negotiation.ok_or_else(not_negotiated)?;
        if !self.rings.is_net() {
            return Err(not_replaceable());
        }
        if self.log.poller.is_some() {
            // Relays leave nothing in flight.
            return self.save_relayed();
        }
        if !self.needs_reset
            && self
                .rings
                .can(BackendFeatures::SUSPEND | BackendFeatures::RESUME)
        {
            let saved = self.suspend_and_save()?;
            self.rings.release_eventfds();
            return Ok(saved);
        }
        let RingFeatures {
            packed, in_order, ..
        } = negotiation.ring();
        if packed && !self.needs_reset {
            return Err(Error::other(
                "the device cannot be suspended, and packed rings do not show where it stands: it \
                 cannot be replaced while its driver runs",
            ));
        }
        // Nobody waits for one that has failed: the command under way was refused.
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
    /// Where the next device begins in the rings of one that was reset.
    fn bases_after_reset(&self, packed: bool) -> Result<Vec<SavedRing>, Error> {
        let base = |queue: &DataQueue| {
            let (index, addresses) = (queue.index, &queue.addresses);
            let base = if packed {
                packed_used(&self.memory, index, addresses, None)?
            } else {
                let index = used_index(&self.memory, index, addresses)?;
                VringBase::Split { index }
            };
            Ok(SavedRing { index, base })
        };
        self.queues.iter().map(base).collect()
    }

    /// The next device gets the eventfds. It works without this, too, but its interrupts may
    /// take the longer way.
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

    /// The positions with which the next device takes what the suspended one has not completed. `in_order`: it
    /// works in order, as was negotiated or looked at just before.
    pub(super) fn suspended_bases(&self, in_order: bool) -> Result<Vec<SavedRing>, Error> {
        let stopped = |queue: &DataQueue| {
            let base = self.device.vring_base(queue.index)?;
            Ok(Ring {
                index: queue.index,
                addresses: queue.addresses,
                base,
            })
        };
        // All of them first: the device may have none.
        let rings = self.queues.iter().map(stopped);
        let rings = rings.collect::<Result<Vec<_>, Error>>()?.into_iter();
        let again = |ring: Ring| {
            let index = ring.index;
            let base = ring.taken_again(&self.memory, in_order)?;
            Ok(SavedRing { index, base })
        };
        rings.map(again).collect()
    }

    /// Whether a device that is about to be reset works in order on its rings, as far as they tell. To be asked while
    /// it works: once it is stopped it would be too late to refuse. `in_order`: it was negotiated.
    pub(super) fn check_orders(&self, in_order: bool) -> Result<(), Error> {
        if in_order {
            return Ok(());
        }
        self.queues
            .iter()
            .try_for_each(|queue| check_order(&self.memory, queue.index, &queue.addresses, None))
    }

    /// What this device handed over, with the positions from which it can go on itself after another one failed
    /// at it, which is reset.
    pub(super) fn taken_back(&self, saved: Saved, activation: &Activation) -> Result<Saved, Error> {
        let in_order = RingFeatures::of(saved.features).in_order;
        let again = |ring: SavedRing| {
            let index = ring.index;
            let mut queues = activation.queues.iter();
            let Some(queue) = queues.find(|queue| queue.index == index) else {
                return Ok(ring);
            };
            let ring = Ring {
                index,
                addresses: queue.addresses,
                base: ring.base,
            };
            let base = ring.after_another(&self.memory, in_order)?;
            Ok(SavedRing { index, base })
        };
        let rings = saved.rings.into_iter().map(again);
        let rings = rings.collect::<Result<_, Error>>()?;
        Ok(Saved { rings, ..saved })
    }
}

/// A guest's ring, and where a device that does not work on it any more said that it was.
#[derive(Debug, Clone, Copy)]
struct Ring {
    index: u16,
    addresses: QueueAddresses,
    base: VringBase,
}

impl Ring {
    /// Where the next device begins, so that it takes again what the suspended one has taken and not completed.
    fn taken_again(self, memory: &SharedMemory, in_order: bool) -> Result<VringBase, Error> {
        let queue = self.index;
        match self.base {
            VringBase::Split { index: position } => {
                let used = used_index(memory, queue, &self.addresses)?;
                check_jump(memory, queue, &self.addresses, used)?;
                if used != position {
                    if !in_order {
                        check_order(memory, queue, &self.addresses, None)?;
                    }
                    tracing::debug!(
                        queue,
                        chains = position.wrapping_sub(used),
                        "the next device takes chains again that this one has not completed"
                    );
                }
                Ok(VringBase::Split { index: used })
            }
            VringBase::Packed {
                available,
                available_wrap,
                used,
                used_wrap,
            } if available == used && available_wrap == used_wrap => Ok(self.base),
            VringBase::Packed { .. } => Err(in_flight_unknown(queue)),
        }
    }

    /// Where a device goes on from whose place another one had taken, which is reset. Nothing was in flight there but
    /// what the entries behind the position name.
    fn after_another(self, memory: &SharedMemory, in_order: bool) -> Result<VringBase, Error> {
        let queue = self.index;
        match self.base {
            VringBase::Split { index: handed_over } => {
                let used = used_index(memory, queue, &self.addresses)?;
                if used != handed_over && !in_order {
                    check_order(memory, queue, &self.addresses, Some(handed_over))?;
                }
                Ok(VringBase::Split { index: used })
            }
            VringBase::Packed { .. } => {
                packed_used(memory, queue, &self.addresses, Some(self.base))
            }
        }
    }
}

/// From where another device takes what the last one of a packed ring, which is reset, has not used. `since`: that one
/// began there, with nothing in flight, which counts if it has used nothing.
fn packed_used(
    memory: &SharedMemory,
    queue: u16,
    addresses: &QueueAddresses,
    since: Option<VringBase>,
) -> Result<VringBase, Error> {
    let vring = vring_addresses(addresses);
    let ring = packed::GuestRing::new(Arc::clone(memory), addresses.size, vring, false)
        .map_err(|_| outside_memory(queue))?;
    let standing = |source| {
        let message = format!("queue {queue}: where its packed ring stands is not known");
        Error::other(message).because(source)
    };
    if let Some(since) = since
        && !ring.used_since(since).map_err(standing)?
    {
        return Ok(since);
    }
    match ring.standing().map_err(standing)? {
        VringBase::Packed {
            used, used_wrap, ..
        } => Ok(VringBase::Packed {
            available: used,
            available_wrap: used_wrap,
            used,
            used_wrap,
        }),
        VringBase::Split { .. } => Err(in_flight_unknown(queue)),
    }
}

fn outside_memory(queue: u16) -> Error {
    Error::other(format!(
        "the rings of queue {queue} lie outside guest memory"
    ))
}

/// Chains are with the device, and the ring does not say which.
fn in_flight_unknown(queue: u16) -> Error {
    let message = format!(
        "queue {queue}: the device has completed buffers out of order and still holds some; the \
         rings do not say which, so another one cannot take them over: try again when the NIC is \
         idle, or have the guest's driver start anew, as unbind and bind do"
    );
    Error::new(ErrorKind::InFlightUnknown, message)
}

/// The guest's driver, or its device, broke the ring.
fn broken_ring(queue: u16, source: vdpa::Error) -> Error {
    let message = format!(
        "queue {queue} is broken: the guest's driver must reset the device, as unbind and bind do"
    );
    Error::new(ErrorKind::BrokenRing { queue }, message).because(source)
}

/// The guest's avail index, which its driver has written.
pub(super) fn avail_index(
    memory: &GuestMemory,
    queue: u16,
    addresses: &QueueAddresses,
) -> Result<u16, Error> {
    read_index(memory, queue, addresses.driver)
}

/// The guest's used index, which the device has written.
fn used_index(memory: &GuestMemory, queue: u16, addresses: &QueueAddresses) -> Result<u16, Error> {
    read_index(memory, queue, addresses.device)
}

/// The index in an avail or used ring at `area`.
fn read_index(memory: &GuestMemory, queue: u16, area: u64) -> Result<u16, Error> {
    area.checked_add(2)
        .and_then(|address| memory.read_obj(GuestAddress(address)).ok())
        .map(u16::from_le)
        .ok_or_else(|| outside_memory(queue))
}

/// Nobody takes a ring over whose driver says that it gave more chains than there are entries.
fn check_jump(
    memory: &GuestMemory,
    queue: u16,
    addresses: &QueueAddresses,
    used: u16,
) -> Result<(), Error> {
    let size = addresses.size;
    let ahead = avail_index(memory, queue, addresses)?.wrapping_sub(used);
    if ahead <= size {
        return Ok(());
    }
    let source = Violation::AvailJump { ahead, size };
    Err(broken_ring(queue, source.into()))
}

/// Looks whether what the device of a split ring has taken and not completed are the entries
/// behind its used index: see [`split::GuestRing::check_order`]. `since`: only what was completed from there on.
fn check_order(
    memory: &SharedMemory,
    queue: u16,
    addresses: &QueueAddresses,
    since: Option<u16>,
) -> Result<(), Error> {
    let memory = Arc::clone(memory);
    let vring = vring_addresses(addresses);
    let ring = split::GuestRing::new(memory, addresses.size, vring, false)
        .map_err(|_| outside_memory(queue))?;
    let order = match since {
        Some(begin) => ring.check_order_since(begin),
        None => ring.check_order(),
    };
    order.map_err(|error| match error.kind() {
        vdpa::ErrorKind::InFlightUnknown => in_flight_unknown(queue),
        _ => broken_ring(queue, error),
    })
}

/// Encodes an identity.
pub(super) fn encode(identity: &Identity) -> Result<SavedState, Error> {
    saved_state::encode(IDENTITY_NAME, IDENTITY_VERSION, identity)
}

/// Decodes what [`encode`] wrote.
pub(super) fn decode(state: &SavedState) -> Result<Identity, Error> {
    saved_state::decode(state, IDENTITY_NAME, IDENTITY_VERSION)
}

#[cfg(test)]
mod tests;
