//! Starting a vhost-vdpa device with the guest's rings.
//!
//! ```text
//!   negotiated -> rings, control queue -> queues enabled -> DRIVER_OK -> commands again -> the guest's control queue
//!                   relayed: by the relay set (`relays/start.rs`)
//! ```
//! It must not know where positions and commands come from.

use vdpa::control_queue::Command;
use vdpa::device::{VringBase, VringConfig};
use vdpa::uapi::BackendFeatures;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_MAC};

use super::control::Setup;
use super::{DataQueue, Negotiation, VdpaBackend, VdpaError, signal, vring_addresses};
use crate::virtio::backend::Activation;
use crate::virtio::userspace_queue::SavedQueue;

impl VdpaBackend {
    /// Sets up all rings, starts the device and brings its control state up to date.
    pub(super) fn start(
        &mut self,
        activation: Activation,
        base_of: impl Fn(u16) -> VringBase,
        replay: &[Command],
        guest_control_queue: Option<SavedQueue>,
    ) -> Result<(), VdpaError> {
        let negotiation = self.negotiation.ok_or(VdpaError::NotNegotiated)?;
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
        let device = self.link.negotiated()?;
        let mut data_queues = Vec::with_capacity(queues.len());
        let mut control_queue = None;
        for queue in queues {
            if Some(queue.index) == negotiation.control_queue {
                control_queue = Some(queue);
                continue;
            }
            let config = VringConfig {
                size: queue.addresses.size,
                addresses: vring_addresses(&queue.addresses),
                base: base_of(queue.index),
                kick: Some(&queue.kick),
                call: Some(queue.call.as_deref().unwrap_or(&self.unrouted)),
            };
            if relayed.is_none() {
                device.set_vring(queue.index, &config, &self.ram)?;
            }
            self.doorbells.prepare(device, &self.id, queue.index)?;
            data_queues.push(DataQueue {
                index: queue.index,
                addresses: queue.addresses,
                kick: queue.kick,
                call: queue.call,
            });
        }
        if let (Some(control), Some(index)) = (&mut self.control, negotiation.control_queue) {
            control.start(Setup {
                device,
                iotlb: &mut self.iotlb,
                index,
                ring: negotiation.ring(),
                limits: negotiation.limits,
            })?;
            device.enable_vring(index)?;
        }
        self.data_queues = data_queues;
        match relayed {
            Some(plan) => self.start_relayed(&plan, &known, replay)?,
            None => self.start_direct(replay)?,
        }
        if let (Some(control), Some(queue)) = (&mut self.control, control_queue) {
            let max_size = self.max_sizes.get(usize::from(queue.index)).copied();
            control.serve_guest(
                queue,
                guest_control_queue,
                max_size.unwrap_or(0),
                negotiation.ring(),
                &self.memory,
            )?;
        }
        Ok(())
    }

    /// From DRIVER_OK on, with all rings set up and the guest's own.
    fn start_direct(&mut self, replay: &[Command]) -> Result<(), VdpaError> {
        // Virtio wants queues enabled before DRIVER_OK. But a device must not
        // receive by an outdated filter: so, if there is anything to replay and the
        // device can wait, its data queues come after that.
        let device = self.link.negotiated()?;
        let late = !replay.is_empty()
            && device
                .backend_features()
                .contains(BackendFeatures::ENABLE_AFTER_DRIVER_OK);
        if !late {
            for queue in &self.data_queues {
                device.enable_vring(queue.index)?;
            }
        }
        self.link.start()?;
        if let Some(control) = &mut self.control {
            control.replay(replay)?;
        }
        if late {
            let device = self.link.running()?;
            for queue in &self.data_queues {
                device.enable_vring(queue.index)?;
                // The driver may kick as soon as DRIVER_OK is set, and a kick
                // of a queue that is not enabled is lost.
                signal(&queue.kick);
            }
        }
        Ok(())
    }

    /// The command that gives the device the address that the guest sees, if
    /// the device has another one now.
    pub(super) fn mac_command(
        &self,
        negotiation: &Negotiation,
    ) -> Result<Option<Command>, VdpaError> {
        let Some(mac) = &self.mac else {
            return Ok(None);
        };
        let mut shown = [0u8; 6];
        self.link.read_config(0, &mut shown)?;
        // Without the feature MAC the field means nothing (virtio 1.3, 5.1.4).
        if self.offer.passes(VIRTIO_NET_F_MAC) && shown == mac.current() {
            return Ok(None);
        }
        let settable = self.settable_mac(negotiation);
        if settable.is_none() {
            tracing::warn!(
                device = %self.id,
                "the guest's driver does not negotiate CTRL_MAC_ADDR, so the device keeps another \
                 MAC address than the guest sees and may filter its unicast frames"
            );
        }
        Ok(settable.map(Command::MacAddrSet))
    }

    /// The address that the guest sees, if the device takes it.
    pub(super) fn settable_mac(&self, negotiation: &Negotiation) -> Option<[u8; 6]> {
        let able =
            negotiation.control_queue.is_some() && negotiation.has(VIRTIO_NET_F_CTRL_MAC_ADDR);
        let mac = self.mac.as_ref().filter(|_| able)?;
        Some(mac.current())
    }

    /// Starts the device as after a reset.
    pub(super) fn start_fresh(&mut self, activation: Activation) -> Result<(), VdpaError> {
        let negotiation = self.negotiation.ok_or(VdpaError::NotNegotiated)?;
        let packed = negotiation.ring().packed;
        let replay: Vec<Command> = self.mac_command(&negotiation)?.into_iter().collect();
        self.start(activation, |_| VringBase::initial(packed), &replay, None)
    }
}
