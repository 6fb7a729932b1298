//! Queues that come and go while a set is used: one that the guest resets and enables
//! again, one that gets another interrupt, and all of them when the set is done with.
//!
//! It must not know how a queue is relayed.

use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::lane::{Lane, Mode, RelayedQueue, signal};
use super::{RelaySet, no_such_queue, refused};
use crate::Error;
use crate::device::{Device, DeviceInfo, State, VringBase};
use crate::iotlb::Iotlb;
use crate::relay::{Dirty, Strategy};
use crate::window::PrivateWindow;

impl RelaySet {
    /// How each queue reaches the device, by queue index.
    pub fn strategies(&self) -> impl Iterator<Item = (u16, Strategy)> {
        let lanes = self.lanes.iter();
        lanes.map(|lane| (lane.queue.index, lane.mode.strategy()))
    }

    /// Interrupts of `queue` go to `call` from now on; it is signalled once. The answer says how the
    /// queue reaches the device: one that is direct signals its eventfd itself, so the caller
    /// tells the device. `None`: the queue is not in the set.
    pub fn set_call(&mut self, queue: u16, call: Arc<EventFd>) -> Option<Strategy> {
        let mut lanes = self.lanes.iter_mut();
        let lane = lanes.find(|lane| lane.queue.index == queue)?;
        lane.queue.call = call;
        // An eventfd that can't be written belongs to nobody any more.
        let _ = signal(&lane.queue.call);
        Some(lane.mode.strategy())
    }

    /// Where a device is to begin in each ring that takes all of them over, by queue index. `device` is
    /// suspended, or was reset. What relays have is shown to the guest first.
    /// Where nobody has counted what the device holds, as in a queue in which it took buffers in advance and that has no traffic,
    /// the guest's split ring has to show that it works in order, and the next device takes them again.
    ///
    /// # Errors
    /// It is not known what the device holds, and the ring does not tell; see
    /// [`Relay::settle`](crate::relay::Relay::settle). The relays can go on.
    pub fn bases(
        &mut self,
        device: &Device,
        dirty: &dyn Dirty,
    ) -> Result<Vec<(u16, VringBase)>, Error> {
        let in_order = self.features.in_order;
        let lanes = self.lanes.iter_mut();
        lanes
            .map(|lane| {
                let index = lane.queue.index;
                // With IN_ORDER the entries from the used index on name what it holds.
                let asked = device.state() == State::Suspended && !in_order;
                let base = if asked && matches!(lane.mode, Mode::Direct) {
                    lane.take_over(device.vring_base(index))
                } else {
                    lane.settle(dirty)
                };
                Ok((index, base.or_else(|error| lane.taken_again(error))?))
            })
            .collect()
    }

    /// Takes a queue from a suspended device and from the set.
    ///
    /// # Errors
    /// The device refuses; the queue may be disabled then, and only a reset makes it whole.
    pub fn remove(
        &mut self,
        queue: u16,
        device: &mut Device,
        dirty: &dyn Dirty,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<(), Error> {
        let position = self.lanes.iter().position(|lane| lane.queue.index == queue);
        let position = position.ok_or_else(|| no_such_queue(queue))?;
        device.park_vring(queue).map_err(refused)?;
        let mut lane = self.lanes.swap_remove(position);
        lane.last_pass(dirty);
        lane.unmap(iotlb, window)
            .map_err(|source| private_failed(queue, source))
    }

    /// Gives a suspended device a queue, new to it and to the set, that stands at its start.
    ///
    /// # Errors
    /// As [`RelaySet::new`], or the device refuses; the queue may be half set up then, and only a
    /// reset makes it whole.
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
            let Some(lane) = self.lanes.get(position) else {
                continue;
            };
            let base = lane.initial_base();
            let mode = lane.make(strategy, features, base, base);
            let mode = mode.map_err(|source| lane.failed(source))?;
            self.switch(device, position, mode, base)?;
        }
        Ok(())
    }

    /// The end of the set: shows the guest what the relays still have, and gives all private memory
    /// back. The device must be reset, or all queues direct.
    ///
    /// # Errors
    /// What can't be unmapped stays mapped until the device is closed.
    pub fn finish(
        mut self,
        dirty: &dyn Dirty,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<(), Error> {
        for lane in &mut self.lanes {
            lane.last_pass(dirty);
        }
        self.dismantle(iotlb, window)
    }

    /// Gives all private memory back.
    pub(super) fn dismantle(
        self,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        for lane in self.lanes {
            result = result.and(lane.unmap(iotlb, window));
        }
        result
    }

    /// Adds a queue, direct.
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
                "the ring of queue {queue} is {found} and {negotiated} rings were negotiated"
            )));
        }
        let known = info.queue(queue.index);
        let known = known.map_err(Error::context("the queue cannot be relayed"))?;
        let lane = Lane::new(queue, known.max_size, iotlb, window)?;
        self.lanes.push(lane);
        Ok(())
    }
}

/// A queue's private memory can't be had, or not be given back.
fn private_failed(queue: u16, source: Error) -> Error {
    let message = format!("the private memory of queue {queue} cannot be changed");
    Error::other(message).because(source)
}
