//! Starts a vhost-vdpa device with the guest's rings.
//!
//! ```text
//!   negotiated -> rings, control queue -> queues enabled -> DRIVER_OK -> commands replayed
//!              -> the guest's control queue
//!                   relayed: by the relay set (`relays/start.rs`)
//! ```
//! It must not know the source of positions and commands.

use vdpa::control_queue::Command;
use vdpa::device::{Operation, VringBase};
use vdpa::uapi::BackendFeatures;

use super::device::VdpaBackend;
use super::eventfd::signal;
use super::offer::Negotiation;
use super::rings::{DataQueue, Rings};
use crate::Error;
use crate::virtio::backend::{Activation, Queue};
use crate::virtio::userspace_queue::SavedQueue;

impl VdpaBackend {
    /// Sets up all rings, starts the device and brings its control state up to date.
    pub(super) fn start(
        &mut self,
        activation: Activation,
        base_of: impl Fn(u16) -> VringBase,
        replay: &[Command],
        guest_control_queue: Option<SavedQueue>,
    ) -> Result<(), Error> {
        let negotiation = self.negotiated()?;
        let Activation { queues, .. } = activation;
        let initial = VringBase::initial(negotiation.ring().packed);
        let data = |index: &u16| Some(*index) != negotiation.control_queue;
        let known: Vec<(u16, VringBase)> = queues
            .iter()
            .map(|queue| queue.index)
            .filter(data)
            .map(|index| (index, base_of(index)))
            .collect();
        let relayed = self.plan_start(known.iter().any(|(_, base)| *base != initial))?;
        self.rings.device.check(Operation::SetUp)?;
        let mut data_queues = Vec::with_capacity(queues.len());
        let mut control_queue = None;
        for queue in queues {
            if Some(queue.index) == negotiation.control_queue {
                control_queue = Some(queue);
                continue;
            }
            let queue = DataQueue::from(queue);
            self.rings
                .prepare(&queue, base_of(queue.index), relayed.is_none())?;
            data_queues.push(queue);
        }
        self.start_control(&negotiation)?;
        self.rings.queues = data_queues;
        match relayed {
            Some(plan) => self.start_relayed(&plan, &known, replay)?,
            None => self.start_direct(replay)?,
        }
        match control_queue {
            Some(queue) => self.serve_control_queue(queue, guest_control_queue),
            None => Ok(()),
        }
    }

    /// Serves the guest's control queue from now on, from the position in `saved` if there is one.
    pub(super) fn serve_control_queue(
        &mut self,
        queue: Queue,
        saved: Option<SavedQueue>,
    ) -> Result<(), Error> {
        let ring = self.negotiated()?.ring();
        let max_size = self.max_sizes.get(usize::from(queue.index)).copied();
        let (max_size, memory) = (max_size.unwrap_or(0), &self.rings.memory);
        match &mut self.control {
            Some(control) => control.serve_guest(queue, saved, max_size, ring, memory),
            None => Ok(()),
        }
    }

    /// Gives the negotiated device its control queue, if the guest negotiated one.
    pub(super) fn start_control(&mut self, negotiation: &Negotiation) -> Result<(), Error> {
        if let (Some(control), Some(index)) = (&mut self.control, negotiation.control_queue) {
            let Rings { device, iotlb, .. } = &mut self.rings;
            control.start(device, iotlb, index, negotiation)?;
        }
        Ok(())
    }

    /// Starts the device from DRIVER_OK on, with all rings set up and no relays.
    fn start_direct(&mut self, replay: &[Command]) -> Result<(), Error> {
        // Virtio requires queues to be enabled before DRIVER_OK. But a device must not receive with
        // an outdated filter. So, if there are commands to replay and the device supports it, its
        // data queues are enabled after the replay.
        let device = &mut self.rings.device;
        let abilities = device.backend_features();
        let late =
            !replay.is_empty() && abilities.contains(BackendFeatures::ENABLE_AFTER_DRIVER_OK);
        if !late {
            for queue in &self.rings.queues {
                device.enable_vring(queue.index)?;
            }
        }
        device.start()?;
        if let Some(control) = &mut self.control {
            control.replay(replay)?;
        }
        if late {
            for queue in &self.rings.queues {
                device.enable_vring(queue.index)?;
                // The driver may kick as soon as DRIVER_OK is set, and a kick of a queue that is
                // not enabled is lost.
                signal(&queue.kick);
            }
        }
        Ok(())
    }

    /// Returns the commands that the VMM sends before any of the guest's.
    pub(super) fn own_commands(&self, negotiation: &Negotiation) -> Result<Vec<Command>, Error> {
        let Rings { device, id, .. } = &self.rings;
        let mac = self.net.mac_command(device, id, negotiation)?;
        let filter = self.net.filter_commands(negotiation);
        Ok(mac.into_iter().chain(filter).collect())
    }

    /// Starts the device as after a reset.
    pub(super) fn start_fresh(&mut self, activation: Activation) -> Result<(), Error> {
        let negotiation = self.negotiated()?;
        let packed = negotiation.ring().packed;
        let replay = self.own_commands(&negotiation)?;
        self.start(activation, |_| VringBase::initial(packed), &replay, None)
    }
}
