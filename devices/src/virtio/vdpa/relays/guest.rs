//! What the guest changes about its queues while they are relayed.
//!
//! The relay of each queue goes with it. It must not know how a queue is relayed.

use std::sync::Arc;

use vdpa::relay::Strategy;
use vmm_sys_util::eventfd::EventFd;

use super::super::{DataQueue, VdpaBackend, VdpaError};

impl VdpaBackend {
    /// The guest has another interrupt for a queue, or none. `false`: the queue is not relayed.
    ///
    /// # Errors
    /// The device refuses it.
    pub(in crate::virtio::vdpa) fn set_relayed_call(
        &mut self,
        queue: u16,
        call: Option<&Arc<EventFd>>,
    ) -> Result<bool, VdpaError> {
        if self.poller.is_none() {
            return Ok(false);
        }
        let call = Arc::clone(call.unwrap_or(&self.unrouted));
        let mut relayed = false;
        self.with_poller(|_, poller| {
            let strategy = poller.park()?.set_call(queue, call);
            relayed = !matches!(strategy, None | Some(Strategy::Direct));
            Ok(())
        })?;
        Ok(relayed)
    }

    /// Takes a queue from the suspended device, and from the relays if there are any.
    pub(in crate::virtio::vdpa) fn park_queue(&mut self, index: u16) -> Result<(), VdpaError> {
        let Some(poller) = &mut self.poller else {
            self.link.suspended()?.park_vring(index)?;
            return Ok(());
        };
        let set = poller.park()?;
        let device = self.link.suspended()?;
        let Self { iotlb, window, .. } = self;
        Ok(set.remove(index, device, &*self.memory, iotlb, window)?)
    }

    /// Gives the suspended device a queue that was reset; `false`: no queue is relayed, so this is not either.
    pub(in crate::virtio::vdpa) fn add_relayed(
        &mut self,
        queue: &DataQueue,
    ) -> Result<bool, VdpaError> {
        let negotiation = self.negotiation.ok_or(VdpaError::NotNegotiated)?;
        if self.poller.is_none() {
            return Ok(false);
        }
        let strategy = self.strategy_of(queue.index, &self.plan()?);
        let relayed = self.relayed_queue(queue, negotiation.features)?;
        let Self {
            iotlb,
            window,
            poller: Some(poller),
            ..
        } = self
        else {
            return Ok(false);
        };
        let set = poller.park()?;
        let device = self.link.suspended()?;
        set.add(relayed, strategy, device, iotlb, window)?;
        Ok(true)
    }

    /// Nobody polls from here on, until [`VdpaBackend::poll_again`].
    pub(in crate::virtio::vdpa) fn park_relays(&mut self) -> Result<(), VdpaError> {
        if let Some(poller) = &mut self.poller {
            poller.park()?;
        }
        Ok(())
    }

    pub(in crate::virtio::vdpa) fn poll_again(&mut self) -> Result<(), VdpaError> {
        match &mut self.poller {
            Some(poller) => poller.go(),
            None => Ok(()),
        }
    }
}
