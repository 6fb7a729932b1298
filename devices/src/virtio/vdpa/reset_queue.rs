//! Reset of single queues of a running device (virtio 1.3, 2.6.1, RING_RESET).
//!
//! vhost-vdpa has no such operation. It is put together from others, and so it is
//! offered only where the device can be suspended and resumed and keeps the positions of
//! its rings (see `offer.rs`):
//!
//! ```text
//!   reset    SUSPEND -> queue: enable 0, no kick, no call -> RESUME
//!   enable   SUSPEND -> queue: size, addresses, position 0, eventfds, enable 1 -> RESUME
//!            -> a kick and a call that nobody made, for every queue
//! ```
//! The device takes addresses only while it is suspended, and `enable 0` may be said
//! only to a parent with SUSPEND. A queue that is relayed comes and goes with its relay. The control queue is the VMM's, so there only
//! the guest's side is reset. Owns the order. It must not know who programs the queue.

use vdpa::device::{VringBase, VringConfig};

use super::{DataQueue, VdpaBackend, VdpaError, vring_addresses};
use crate::virtio::backend::Queue;

impl VdpaBackend {
    /// Takes a queue from the device.
    ///
    /// # Errors
    /// The device refuses: it may be suspended then, and is to be stopped.
    pub(super) fn reset_queue(&mut self, index: u16) -> Result<(), VdpaError> {
        let negotiation = self.negotiation.ok_or(VdpaError::NotNegotiated)?;
        if negotiation.control_queue == Some(index) {
            let done = match &mut self.control {
                Some(control) => control.reset_guest_queue()?,
                None => Vec::new(),
            };
            self.note(&done);
            return Ok(());
        }
        if !self.data_queues.iter().any(|queue| queue.index == index) {
            return Err(VdpaError::NotEnabled { index });
        }
        let unseen = self.unseen_of(index);
        self.park_relays()?;
        self.link.suspend()?;
        self.park_queue(index)?;
        self.mark(&unseen);
        self.link.resume()?;
        self.data_queues.retain(|queue| queue.index != index);
        self.poll_again()?;
        self.after_resume();
        tracing::debug!(device = %self.id, queue = index, "queue reset");
        Ok(())
    }

    /// Gives the device a queue that was reset.
    ///
    /// # Errors
    /// The guest's rings are not acceptable, or the device refuses: it may be suspended
    /// then, and is to be stopped.
    pub(super) fn enable_queue(&mut self, queue: Queue) -> Result<(), VdpaError> {
        let negotiation = self.negotiation.ok_or(VdpaError::NotNegotiated)?;
        let index = queue.index;
        if negotiation.control_queue == Some(index) {
            let max_size = self.max_sizes.get(usize::from(index)).copied();
            if let Some(control) = &mut self.control {
                let kick = std::sync::Arc::clone(&queue.kick);
                let max_size = max_size.unwrap_or(0);
                control.serve_guest(queue, None, max_size, negotiation.ring(), &self.memory)?;
                // The driver may have made commands available before.
                super::signal(&kick);
            }
            return Ok(());
        }
        if self.data_queues.iter().any(|known| known.index == index) {
            return Err(VdpaError::AlreadyEnabled { index });
        }
        let queue = DataQueue {
            index,
            addresses: queue.addresses,
            kick: queue.kick,
            call: queue.call,
        };
        self.park_relays()?;
        self.link.suspend()?;
        if !self.add_relayed(&queue)? {
            let config = VringConfig {
                size: queue.addresses.size,
                addresses: vring_addresses(&queue.addresses),
                base: VringBase::initial(negotiation.ring().packed),
                kick: Some(&queue.kick),
                call: Some(queue.call.as_ref().unwrap_or(&self.unrouted)),
            };
            let device = self.link.suspended()?;
            device.switch_vring(index, &config, &self.ram)?;
        }
        self.link.resume()?;
        self.poll_again()?;
        self.data_queues.push(queue);
        self.data_queues.sort_by_key(|queue| queue.index);
        self.after_resume();
        tracing::debug!(device = %self.id, queue = index, "queue enabled again");
        Ok(())
    }

    /// A device that was suspended may have missed kicks, and its driver calls.
    fn after_resume(&self) {
        self.signal_all();
        if let Some(control) = &self.control {
            control.nudge_device();
        }
    }
}
