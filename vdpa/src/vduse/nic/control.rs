//! The kernel's messages: start, stop and memory of the queue pairs.
//!
//! ```text
//!            DRIVER_OK: memory, rings           reset
//!   idle ------------------------------> active -----> idle
//!                                        |    ^
//!     UPDATE_IOTLB: rings leave, new memory,  |
//!                   rings at their positions -+
//! ```
//! A process that follows another one begins active if the driver uses the device. Pairs that a
//! message concerns wait until it is handled, so the answer comes after their last access.

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_F_RING_PACKED,
};

use super::super::{Device, Mappings, Message, Request};
use super::features::is_usable;
use super::shared::{Shared, Stopped};
use crate::Error;
use crate::device::VringBase;

/// The state of a device between its messages.
#[derive(Debug)]
pub(super) struct Control<'nic> {
    device: &'nic Device,
    pairs: &'nic [Shared],
    /// Features.
    offered: u64,
    mappings: Mappings,
    /// Between DRIVER_OK and reset.
    is_active: bool,
}

impl<'nic> Control<'nic> {
    pub(super) fn new(device: &'nic Device, pairs: &'nic [Shared], offered: u64) -> Self {
        Self {
            device,
            pairs,
            offered,
            mappings: Mappings::default(),
            is_active: false,
        }
    }

    /// Handles all messages that wait.
    pub(super) fn messages(&mut self) -> Result<(), Error> {
        while let Some(message) = self.device.message()? {
            let (done, base) = self.handle(&message);
            // The process that waited may have been killed. That does not concern the others.
            if let Err(error) = self.device.answer(&message, done, base) {
                let error: &dyn std::error::Error = &error;
                tracing::debug!(error, "the kernel takes no answer");
            }
        }
        Ok(())
    }

    /// The answer to a message.
    fn handle(&mut self, message: &Message) -> (bool, Option<VringBase>) {
        let done = match message.request {
            Request::QueueState { index } => {
                let index = usize::try_from(index).unwrap_or(usize::MAX);
                let shared = self.pairs.get(index / 2);
                let position = shared.and_then(|shared| shared.stop().pair.position(index % 2));
                return (shared.is_some(), position);
            }
            Request::SetStatus(0) => {
                self.stop();
                Ok(())
            }
            Request::SetStatus(status) => self.set_status(status.into()),
            Request::UpdateIotlb => self.change_memory(),
            Request::Unknown => Err(Error::other("the kernel sent an unknown message")),
        };
        if let Err(error) = &done {
            let error: &dyn std::error::Error = error;
            tracing::warn!(error, request = ?message.request, "the NIC rejects a request");
        }
        (done.is_ok(), None)
    }

    fn set_status(&mut self, status: u32) -> Result<(), Error> {
        let is_set = |bit: u32| status & bit != 0;
        if !is_set(VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK) || self.is_active {
            return Ok(());
        }
        let features = self.device.features()?;
        if !is_usable(features, self.offered) {
            return Err(Error::other(format!(
                "a driver with features {features:#x} cannot use the NIC, which offers {:#x}: it \
                 needs VERSION_1 and ACCESS_PLATFORM",
                self.offered
            )));
        }
        if is_set(VIRTIO_CONFIG_S_DRIVER_OK) {
            let started = self.start(features);
            if started.is_err() {
                self.stop();
            }
            return started;
        }
        Ok(())
    }

    /// All pairs, which wait as long as this exists.
    fn stopped(&self) -> Vec<Stopped<'nic>> {
        self.pairs.iter().map(Shared::stop).collect()
    }

    fn start(&mut self, features: u64) -> Result<(), Error> {
        let memory = self.mappings.read(self.device)?;
        self.is_active = true;
        for stopped in &mut self.stopped() {
            let pair = &mut stopped.pair;
            pair.start(self.device, features, memory.clone())?;
        }
        Ok(())
    }

    /// Continues for a driver that uses the device already: it has enabled a queue, which a reset
    /// disables.
    ///
    /// # Errors
    /// The NIC waits until its driver resets it.
    pub(super) fn resume(&mut self) -> Result<(), Error> {
        let features = self.device.features()?;
        let packed = features & 1 << VIRTIO_F_RING_PACKED != 0;
        let mut is_used = false;
        for number in (0..).take(2 * self.pairs.len()) {
            is_used |= self.device.queue(number, packed)?.ready;
        }
        if !is_used || !is_usable(features, self.offered) {
            return Ok(());
        }
        let memory = self.mappings.read(self.device)?;
        self.is_active = true;
        for stopped in &mut self.stopped() {
            let pair = &mut stopped.pair;
            pair.resume(self.device, features, memory.clone())?;
        }
        Ok(())
    }

    /// Stops all use of the driver's memory.
    pub(super) fn stop(&mut self) {
        for stopped in &mut self.stopped() {
            stopped.pair.stop();
        }
        self.is_active = false;
        self.mappings.clear();
    }

    /// The rings leave the old memory before the answer, and continue in the new one.
    fn change_memory(&mut self) -> Result<(), Error> {
        if !self.is_active {
            return Ok(());
        }
        let mut pairs = self.stopped();
        pairs.iter_mut().for_each(|stopped| stopped.pair.leave());
        let memory = self.mappings.read(self.device)?;
        for stopped in &mut pairs {
            stopped.pair.enter(memory.clone());
        }
        Ok(())
    }
}
