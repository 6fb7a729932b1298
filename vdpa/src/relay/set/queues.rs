//! Changes of queues while a set is in use: a guest resets and enables a queue, a queue gets
//! another interrupt, or the set ends. Independent of the relay strategy.

use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::svq_queue::{Mode, RelayedQueue, SvqQueue, signal};
use super::{SvqSet, no_such_queue, refused};
use crate::Error;
use crate::device::{Device, DeviceInfo, State, VringBase};
use crate::iotlb::Iotlb;
use crate::relay::{Dirty, Strategy};
use crate::window::PrivateWindow;

impl SvqSet {
    /// The strategy of each queue, by queue index.
    pub fn strategies(&self) -> impl Iterator<Item = (u16, Strategy)> {
        let svqs = self.svqs.iter();
        svqs.map(|svq| (svq.queue.index, svq.mode.strategy()))
    }

    /// Sets the eventfd for interrupts of `queue` to `call`, and signals it once. Returns the
    /// strategy of the queue. A direct queue's device signals its eventfd itself, so the caller
    /// sets it on the device too. `None`: the queue is not in the set.
    pub fn set_call(&mut self, queue: u16, call: Arc<EventFd>) -> Option<Strategy> {
        let mut svqs = self.svqs.iter_mut();
        let svq = svqs.find(|svq| svq.queue.index == queue)?;
        svq.queue.call = call;
        // An eventfd that cannot be written is no longer in use.
        let _ = signal(&svq.queue.call);
        Some(svq.mode.strategy())
    }

    /// The position in each ring for a device that takes them all over, by queue index. `device` is
    /// suspended, or was reset. The relays first show the guest all used chains.
    ///
    /// The chains that the device holds may be uncounted, for instance in a queue without traffic
    /// in which it took buffers in advance. Then the guest's split ring must show that the device
    /// works in order, and the next device takes them again.
    ///
    /// # Errors
    /// The chains that the device holds are unknown, and the ring does not show them; see
    /// [`Svq::settle`](crate::relay::Svq::settle). The relays can continue.
    pub fn bases(
        &mut self,
        device: &Device,
        dirty: &dyn Dirty,
    ) -> Result<Vec<(u16, VringBase)>, Error> {
        let in_order = self.features.in_order;
        let svqs = self.svqs.iter_mut();
        svqs.map(|svq| {
            let index = svq.queue.index;
            // With IN_ORDER the entries from the used index on are the chains that it holds.
            let asked = device.state() == State::Suspended && !in_order;
            let base = if asked && matches!(svq.mode, Mode::Direct) {
                svq.take_over(device.vring_base(index))
            } else {
                svq.settle(dirty)
            };
            Ok((index, base.or_else(|error| svq.resume_base(error))?))
        })
        .collect()
    }

    /// Removes a queue from a suspended device and from the set.
    ///
    /// # Errors
    /// The device refuses; the queue may be disabled then, until the device is reset.
    pub fn remove(
        &mut self,
        queue: u16,
        device: &mut Device,
        dirty: &dyn Dirty,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<(), Error> {
        let position = self.svqs.iter().position(|svq| svq.queue.index == queue);
        let position = position.ok_or_else(|| no_such_queue(queue))?;
        device.park_vring(queue).map_err(refused)?;
        let mut svq = self.svqs.swap_remove(position);
        svq.last_pass(dirty);
        svq.unmap(iotlb, window)
            .map_err(|source| private_failed(queue, source))
    }

    /// Adds a queue at its start to a suspended device and to the set.
    ///
    /// # Errors
    /// As [`SvqSet::new`], or the device refuses; the queue may be half set up then, until the
    /// device is reset.
    pub fn add(
        &mut self,
        queue: RelayedQueue,
        strategy: Strategy,
        device: &mut Device,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<(), Error> {
        let index = queue.index;
        self.push(device.info(), queue, iotlb, window)
            .map_err(|source| private_failed(index, source))?;
        let wanted = self.check(&[(index, strategy)])?;
        for (position, strategy) in wanted {
            let features = self.features;
            let Some(svq) = self.svqs.get(position) else {
                continue;
            };
            let base = svq.initial_base();
            let mode = svq.make(strategy, features, base, base);
            let mode = mode.map_err(|source| svq.failed(source))?;
            self.switch(device, position, mode, base)?;
        }
        Ok(())
    }

    /// Ends the set: shows the guest the remaining used chains, and frees all private memory. The
    /// device must be reset, or all queues direct.
    ///
    /// # Errors
    /// Memory that cannot be unmapped stays mapped until the device is closed.
    pub fn finish(
        mut self,
        dirty: &dyn Dirty,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<(), Error> {
        for svq in &mut self.svqs {
            svq.last_pass(dirty);
        }
        self.dismantle(iotlb, window)
    }

    /// Frees all private memory.
    pub(super) fn dismantle(
        self,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        for svq in self.svqs {
            result = result.and(svq.unmap(iotlb, window));
        }
        result
    }

    /// Adds a direct queue.
    pub(super) fn push(
        &mut self,
        info: &DeviceInfo,
        queue: RelayedQueue,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<(), Error> {
        let (found, negotiated) = (queue.ring.format(), self.features.format);
        if found != negotiated {
            let queue = queue.index;
            return Err(Error::other(format!(
                "the ring of queue {queue} is {found}, but {negotiated} rings were negotiated"
            )));
        }
        let known = info.queue(queue.index);
        let known = known.map_err(Error::context("cannot relay the queue"))?;
        let svq = SvqQueue::new(queue, known.max_size, iotlb, window)?;
        self.svqs.push(svq);
        Ok(())
    }
}

/// A queue's private memory cannot be allocated or freed.
fn private_failed(queue: u16, source: Error) -> Error {
    let message = format!("cannot change the private memory of queue {queue}");
    Error::other(message).because(source)
}
