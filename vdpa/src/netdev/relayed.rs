//! A driver in userspace as the guest of a [`RelaySet`]: its rings are relayed as
//! those of a virtual machine are.
//!
//! ```text
//!   RxQueue, TxQueue --- rings in Driver::guest_memory --- RelaySet --- Device
//!   (any thread)         kick and call eventfds            (any thread)
//!                                                            | start
//!                                   Driver: negotiate, then set_pairs
//! ```
//! A relay hears kicks by eventfd only: a queue that has a doorbell must be switched by
//! [`Virtqueue::set_kick_by`](super::Virtqueue::set_kick_by) before it is shadowed, and
//! may be switched back afterwards. This module must not know how queues are relayed.

use std::sync::Arc;

use super::start::{Driver, Netdev};
use crate::Error;
use crate::device::{Device, State};
use crate::memory::GuestMemory;
use crate::relay::{Dirty, RelaySet, RelayedQueue, Strategy};
use crate::ring::{GuestRing, RingFeatures};

impl Netdev {
    /// Makes all queues relayable, direct as they are: the private rings are allocated in the
    /// driver's window and mapped. `memory` is what [`Driver::guest_memory`] gave, and
    /// learns of what relays write. The queues may go elsewhere afterwards
    /// ([`Driver::pairs`] is public), the device as well.
    ///
    /// # Errors
    /// As [`RelaySet::new`].
    pub fn relay_set(&mut self, memory: &Arc<GuestMemory>) -> Result<RelaySet, Error> {
        let Self { device, driver } = self;
        let features = device.features();
        let queues = driver.relayed_queues(features, memory)?;
        let Driver { iotlb, window, .. } = driver;
        RelaySet::new(device.info(), features, queues, iotlb, window)
    }
}

impl Driver {
    /// The queues of all pairs as a relay sees a guest's; `features` are the negotiated ones.
    fn relayed_queues(
        &self,
        features: u64,
        memory: &Arc<GuestMemory>,
    ) -> Result<Vec<RelayedQueue>, Error> {
        self.pairs
            .iter()
            .flat_map(|pair| [pair.receive.queue(), pair.transmit.queue()])
            .map(|queue| {
                let index = queue.index();
                let ring = GuestRing::new(
                    Arc::clone(memory),
                    queue.size(),
                    queue.addresses(),
                    RingFeatures::of(features),
                );
                Ok(RelayedQueue {
                    index,
                    ring: ring.map_err(RelayedQueue::refused(index))?,
                    kick: Arc::clone(queue.kick_event()),
                    call: Arc::clone(queue.call_event()),
                })
            })
            .collect()
    }

    /// Brings a device up that was reset, as the driver left it and with `targets` changed: its
    /// memory, its features, its control queue and the number of its pairs. What else was set by
    /// commands is the caller's.
    ///
    /// # Errors
    /// A ring does not tell where it stands, or the device refuses; it is reset, or lost where that
    /// fails.
    pub fn start_relayed(
        &mut self,
        device: &mut Device,
        set: &mut RelaySet,
        targets: &[(u16, Strategy)],
        dirty: &dyn Dirty,
    ) -> Result<(), Error> {
        let rings = set.prepare_start(targets, &[], dirty)?;
        let remapped = self.iotlb.remap_after_reset();
        if let Err(error) = remapped.and_then(|()| self.negotiate(device)) {
            if device.state() == State::Negotiated {
                let _ = device.reset();
            }
            let message = "the device cannot be brought up again after its reset";
            return Err(Error::other(message).because(error));
        }
        set.start(device, rings, || Ok(self.set_pairs()?))
    }
}
