//! Reset of single queues of a running device (virtio 1.3, 2.6.1, RING_RESET).
//!
//! vhost-vdpa has no such operation. It is composed of others. So it is offered only if the device
//! can be suspended and resumed and keeps the positions of its rings (see `offer.rs`):
//!
//! ```text
//!   reset    SUSPEND -> queue: enable 0, no kick, no call -> RESUME
//!   enable   SUSPEND -> queue: size, addresses, position 0, eventfds, enable 1 -> RESUME
//!            -> a spurious kick and call for every queue
//! ```
//! The device takes addresses only while it is suspended, and only a parent with SUSPEND accepts
//! `enable 0`. A relayed queue is removed and added together with its relay. The control queue
//! belongs to the VMM, so only the guest's side of it is reset. Owns the order. It must not know
//! who programs the queue.

use std::sync::Arc;

use vdpa::device::VringBase;

use super::control::Control;
use super::device::VdpaBackend;
use super::eventfd::signal;
use super::rings::DataQueue;
use super::write_log::mark;
use crate::Error;
use crate::virtio::backend::Queue;

impl VdpaBackend {
    /// Removes a queue from the device.
    ///
    /// # Errors
    /// The device refuses: it may be suspended then, and must be stopped.
    pub(super) fn reset_queue(&mut self, index: u16) -> Result<(), Error> {
        let negotiation = self.negotiated()?;
        if negotiation.control_queue == Some(index) {
            // Wait for a command that the device has, at most until its deadline. Its answer must
            // not be taken for the answer to the next command (virtio 1.3, 2.6.1).
            self.finish_commands()?;
            self.control.iter_mut().for_each(Control::release_guest);
            return Ok(());
        }
        if self.rings.queue(index).is_none() {
            return Err(Error::other(format!("queue {index} is not enabled")));
        }
        let packed = negotiation.ring().packed;
        let untracked_writes = self.log.untracked_writes_of(&self.rings, packed, index);
        self.log.park()?;
        self.rings.device.suspend()?;
        self.log.park_queue(&mut self.rings, index)?;
        mark(self.rings.memory.ram(), &untracked_writes);
        self.rings.device.resume()?;
        self.rings.queues.retain(|queue| queue.index != index);
        self.log.go()?;
        self.after_resume();
        tracing::debug!(device = %self.rings.id, queue = index, "queue reset");
        Ok(())
    }

    /// Gives a queue that was reset back to the device.
    ///
    /// # Errors
    /// The guest's rings are invalid, or the device refuses: it may be suspended then, and must be
    /// stopped.
    pub(super) fn enable_queue(&mut self, queue: Queue) -> Result<(), Error> {
        let negotiation = self.negotiated()?;
        let index = queue.index;
        if negotiation.control_queue == Some(index) {
            let kick = Arc::clone(&queue.kick);
            self.serve_control_queue(queue, None)?;
            // The driver may have made commands available before.
            signal(&kick);
            return Ok(());
        }
        if self.rings.queue(index).is_some() {
            return Err(Error::other(format!("queue {index} is enabled already")));
        }
        let queue = DataQueue::from(queue);
        self.log.park()?;
        self.rings.device.suspend()?;
        if self.log.poller.is_some() {
            let strategy = self.strategy_of(index, &self.plan()?);
            let relayed = self.rings.relayed_queue(&queue, negotiation.features)?;
            self.log.add_queue(&mut self.rings, relayed, strategy)?;
        } else {
            let base = VringBase::initial(negotiation.ring().packed);
            let config = queue.config(base, &self.rings.unrouted);
            let device = &mut self.rings.device;
            device.switch_vring(index, &config, &self.rings.memory.reach())?;
        }
        self.rings.device.resume()?;
        self.log.go()?;
        self.rings.queues.push(queue);
        self.rings.queues.sort_by_key(|queue| queue.index);
        self.after_resume();
        tracing::debug!(device = %self.rings.id, queue = index, "queue enabled again");
        Ok(())
    }

    /// A device that was suspended may have missed kicks, and its driver may have missed calls.
    fn after_resume(&self) {
        self.rings.signal_all();
        self.spurious_notify_control();
    }
}
