//! A driver in userspace as the guest of an [`SvqSet`], which relays its rings like those of a
//! virtual machine.
//!
//! ```text
//!   RxQueue, TxQueue --- rings in Driver::guest_memory --- SvqSet --- Device
//!   (any thread)         kick and call eventfds            (any thread)
//!                                                            | start
//!                                   Driver: negotiate, then set_pairs
//! ```
//! A relay receives kicks by eventfd only. So a queue with a doorbell must be switched by
//! [`Virtqueue::set_kick_by`](super::Virtqueue::set_kick_by) before it is shadowed. It may be
//! switched back afterwards. The relay decides how queues are relayed.

use std::sync::Arc;

use super::start::{Driver, Netdev};
use crate::Error;
use crate::device::{Device, State};
use crate::memory::GuestMemory;
use crate::relay::{Dirty, RelayedQueue, Strategy, SvqSet};
use crate::ring::{GuestRing, RingFeatures};

impl Netdev {
    /// Makes all queues relayable, still direct: the private rings are allocated in the driver's
    /// window and mapped. `memory` comes from [`Driver::guest_memory`] and records the relays'
    /// writes. The queues may move elsewhere afterwards ([`Driver::pairs`] is public), and so may
    /// the device.
    ///
    /// # Errors
    /// As [`SvqSet::new`].
    pub fn relay_set(&mut self, memory: &Arc<GuestMemory>) -> Result<SvqSet, Error> {
        let Self { device, driver } = self;
        let features = device.features();
        let queues = driver.relayed_queues(features, memory)?;
        let Driver { iotlb, window, .. } = driver;
        SvqSet::new(device.info(), features, queues, iotlb, window)
    }
}

impl Driver {
    /// The queues of all pairs as a relay expects a guest's; `features` are the negotiated ones.
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

    /// Starts a device after a reset, as the driver left it and with `targets` changed. Restores
    /// its memory, its features, its control queue and the number of its pairs. The caller restores
    /// other settings made by commands.
    ///
    /// # Errors
    /// A ring's position is unknown, or the device refuses. The device is reset then, or lost if
    /// that fails.
    pub fn start_relayed(
        &mut self,
        device: &mut Device,
        set: &mut SvqSet,
        targets: &[(u16, Strategy)],
        dirty: &dyn Dirty,
    ) -> Result<(), Error> {
        let rings = set.prepare_start(targets, &[], dirty)?;
        let remapped = self.iotlb.remap_after_reset();
        if let Err(error) = remapped.and_then(|()| self.negotiate(device)) {
            if device.state() == State::Negotiated {
                let _ = device.reset();
            }
            let message = "cannot restart the device after its reset";
            return Err(Error::other(message).because(error));
        }
        set.start(device, rings, || Ok(self.set_pairs()?))
    }
}
