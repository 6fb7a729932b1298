//! A driver in userspace as the guest of a [`RelaySet`]: its rings are relayed as
//! those of a virtual machine are.
//!
//! ```text
//!   RxQueue, TxQueue --- rings in Driver::guest_memory --- RelaySet --- Device<Running>
//!   (any thread)         kick and call eventfds            (any thread)
//!                                                            | restart
//!                                   Driver: negotiate, then set_pairs
//! ```
//! A relay hears kicks by eventfd only: a queue that has a doorbell must be switched by
//! [`Virtqueue::set_kick_by`](super::Virtqueue::set_kick_by) before it is shadowed, and
//! may be switched back afterwards. This module must not know how queues are relayed.

use std::error::Error;
use std::sync::Arc;

use super::start::{Driver, Netdev};
use crate::device::{Device, Negotiated, Owned, Running};
use crate::memory::GuestMemory;
use crate::relay::{RelaySet, RelaySetError, RelayedQueue, Restart, RestartFailed};
use crate::ring::{GuestRing, RingFeatures};

impl Netdev<Running> {
    /// Makes all queues relayable, direct as they are: the private rings are allocated in the
    /// driver's window and mapped. `memory` is what [`Driver::guest_memory`] gave, and
    /// learns of what relays write. The queues may go elsewhere afterwards
    /// ([`Driver::pairs`] is public), the device as well.
    ///
    /// # Errors
    /// As [`RelaySet::new`].
    pub fn relay_set(&mut self, memory: &Arc<GuestMemory>) -> Result<RelaySet, RelaySetError> {
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
    ) -> Result<Vec<RelayedQueue>, RelaySetError> {
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
                    ring: ring.map_err(|source| RelaySetError::Guest {
                        queue: index,
                        source,
                    })?,
                    kick: Arc::clone(queue.kick_event()),
                    call: Arc::clone(queue.call_event()),
                })
            })
            .collect()
    }
}

/// Brings the device up as the driver left it: its memory, its features, its control
/// queue and the number of its pairs. What else was set by commands is the caller's.
impl Restart for Driver {
    fn negotiate(&mut self, device: Device<Owned>) -> Result<Device<Negotiated>, RestartFailed> {
        if let Err(error) = self.iotlb.remap_after_reset() {
            return Err(RestartFailed {
                device: Some(device),
                source: Box::new(error),
            });
        }
        let mut device = device.negotiate(self.features())?;
        match self.set_up_control(&mut device) {
            Ok(()) => Ok(device),
            Err(error) => Err(RestartFailed {
                device: device.reset().ok(),
                source: Box::new(error),
            }),
        }
    }

    fn replay(&mut self, _: &mut Device<Running>) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(self.set_pairs()?)
    }
}
