//! Implements the transport's interface for a vhost-vdpa device by the parts of [`VdpaBackend`].
//!
//! Owns the tokens of its descriptors, and the rule that a device which fails is stopped. It must
//! not know how an operation is done.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use vdpa::memory::{DeviceMemory, Mode};
use vdpa::relay::Strategy;
use vdpa::uapi::BackendFeatures;
use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_NEEDS_RESET};
use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET, VIRTIO_ID_RNG};
use virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_ANNOUNCE;
use vmm_sys_util::eventfd::EventFd;

use super::device::VdpaBackend;
use super::eventfd::signal;
use super::identity::NetIdentity;
use super::rings::Rings;
use super::saved::Saved;
use crate::Error;
use crate::hypervisor::DevicePages;
use crate::virtio::backend::{
    Activation, Backend, DirtyTracking, Event, Hardware, Outcome, QueueChange, QueueRole,
    ReplacedDevice, SavedState, Translated,
};

const TOKEN_CONFIG: u16 = 0;
const TOKEN_CONTROL: u16 = 1;
const TOKEN_RELAY: u16 = 2;

/// The device status of a PCI function that was pulled out.
const ALL_ONES: u32 = 0xff;

/// Whether a started device with this status still runs.
fn runs(status: u32) -> bool {
    status != ALL_ONES && status & VIRTIO_CONFIG_S_DRIVER_OK != 0
}

impl Backend for VdpaBackend {
    fn device_type(&self) -> u32 {
        self.rings.device.device_id()
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.max_sizes
    }

    fn features(&self) -> u64 {
        self.net.offer.all()
    }

    fn features_for(&self, chosen: u64) -> u64 {
        self.net.offer.taking_over(chosen)
    }

    fn queue_role(&self, queue: u16) -> QueueRole {
        match self.rings.device.device_id() {
            _ if self.control_queue() == Some(queue) => QueueRole::Request,
            // receiveq1, transmitq1, receiveq2, … (virtio 1.3, 5.1.2).
            VIRTIO_ID_NET if queue.is_multiple_of(2) => QueueRole::Receive,
            VIRTIO_ID_NET | VIRTIO_ID_BLOCK | VIRTIO_ID_RNG => QueueRole::Request,
            _ => QueueRole::Other,
        }
    }

    fn config_len(&self) -> u32 {
        self.rings.device.config_size()
    }

    fn read_config(&mut self, offset: u32, data: &mut [u8]) {
        if self.closed {
            // Among other things: the link is down.
            data.fill(0);
        } else if let Err(error) = self.rings.device.read_config(offset, data) {
            tracing::warn!(device = %self.rings.id, %error, "cannot read the configuration");
            data.fill(0);
        }
        self.net.cover(offset, data);
    }

    fn write_config(&mut self, offset: u32, data: &[u8]) {
        if self.closed {
            return;
        }
        if let Err(error) = self.rings.device.write_config(offset, data) {
            tracing::warn!(device = %self.rings.id, %error, "cannot write the configuration");
        }
    }

    fn events(&mut self, _kicks: &[Arc<EventFd>]) -> Vec<Event> {
        let mut events = vec![
            Event {
                fd: self.config_changed.as_raw_fd(),
                token: TOKEN_CONFIG,
            },
            Event {
                fd: self.log.failed.as_raw_fd(),
                token: TOKEN_RELAY,
            },
        ];
        if let Some(control) = &self.control {
            events.push(Event {
                fd: control.as_raw_fd(),
                token: TOKEN_CONTROL,
            });
        }
        events
    }

    fn negotiate(&mut self, features: u64) -> Result<(), Error> {
        if self.closed {
            return Err(Error::other("the host has removed the device"));
        }
        let negotiation = self.or_stop(|backend| backend.negotiate_features(features))?;
        self.negotiation = Some(negotiation);
        Ok(())
    }

    fn memory(&self) -> Option<&DeviceMemory> {
        Some(&self.rings.memory)
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        // From here on the driver knows this device.
        self.net.replaced = None;
        self.or_stop(|backend| backend.start_fresh(activation))
    }

    fn change(&mut self, change: QueueChange) -> Result<(), Error> {
        match change {
            QueueChange::Call { index, call } => {
                if self.control_queue() == Some(index) {
                    if let Some(control) = &mut self.control {
                        control.set_call(call);
                    }
                    return Ok(());
                }
                self.set_call(index, call)
            }
            QueueChange::Enable(queue) => self.or_stop(|backend| backend.enable_queue(queue)),
            QueueChange::Reset { index } => self.or_stop(|backend| backend.reset_queue(index)),
        }
    }

    fn reset(&mut self) {
        self.stop();
        // The same after every reset, whatever the guest did: the lab's leak tests compare these
        // lines.
        tracing::debug!(
            device = %self.rings.id,
            iotlb_ranges = self.rings.iotlb.mapped_ranges(),
            iotlb_bytes = self.rings.iotlb.mapped_bytes(),
            "vDPA device reset"
        );
    }

    fn process(&mut self, token: u16) -> Outcome {
        match token {
            TOKEN_CONFIG => {
                // The only possible failure is that no event is pending.
                let _ = self.config_changed.read();
                let needs_reset = self
                    .rings
                    .device
                    .status()
                    .is_ok_and(|status| u32::from(status) & VIRTIO_CONFIG_S_NEEDS_RESET != 0);
                if needs_reset && !self.needs_reset {
                    tracing::warn!(
                        device = %self.rings.id,
                        "the device reports DEVICE_NEEDS_RESET: it works again after a reset by \
                         the guest's driver (unbind and bind), or a backup device replaces it"
                    );
                    self.fail();
                }
                Outcome {
                    config_changed: true,
                    needs_reset,
                }
            }
            TOKEN_RELAY => Outcome {
                config_changed: false,
                // The only possible failure is that no event is pending: it was reset meanwhile.
                needs_reset: self.log.failed.read().is_ok(),
            },
            _ => {
                let Some(control) = &mut self.control else {
                    return Outcome::default();
                };
                let done = control.serve();
                self.note(&done.commands);
                Outcome {
                    config_changed: false,
                    needs_reset: done.broken,
                }
            }
        }
    }

    fn save(&mut self) -> Result<SavedState, Error> {
        self.save_rings().map_err(Error::or_broken_ring)?.encode()
    }

    fn dirty_tracking(&self) -> Option<DirtyTracking> {
        let recorded = self.log.on && self.rings.is_running();
        let space = self.rings.memory.space();
        let mode = space.map(|space| space.read().mode());
        recorded.then_some(match (&self.log.poller, mode) {
            (Some(_), _) => DirtyTracking::ShadowQueues,
            (None, Some(Mode::Mapped)) => DirtyTracking::Mappings,
            (None, _) => DirtyTracking::AllMemory,
        })
    }

    fn check_state(&self, state: &SavedState) -> Result<(), Error> {
        self.check_saved(&Saved::decode(state)?)
    }

    fn restore(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error> {
        let saved = Saved::decode(state)?;
        self.or_stop(|backend| backend.restore_rings(saved, activation))
    }

    fn hardware(&mut self) -> Option<&mut dyn Hardware> {
        Some(self)
    }

    fn translated(&mut self) -> Option<&mut dyn Translated> {
        if self.translation.is_some() {
            Some(self)
        } else {
            None
        }
    }
}

impl Hardware for VdpaBackend {
    fn doorbell(&self, queue: u16) -> Option<Arc<dyn DevicePages>> {
        // Without a negotiation the guest has no queue. The control queue belongs to the VMM, which
        // takes its kicks.
        let negotiation = self.negotiation?;
        if negotiation.control_queue == Some(queue) {
            return None;
        }
        // A store would reach the device before its ring has the buffers that the guest made
        // available.
        if self.log.strategy(queue) == Some(Strategy::FullShadow) {
            return None;
        }
        self.rings
            .doorbells
            .get(queue)
            .map(|doorbell| doorbell as _)
    }

    fn announce(&mut self) -> Outcome {
        let able = self
            .negotiation
            .is_some_and(|negotiation| negotiation.has(VIRTIO_NET_F_GUEST_ANNOUNCE))
            && !self.rings.queues.is_empty();
        if able {
            self.net.announcement.set(true);
        }
        Outcome {
            config_changed: able,
            needs_reset: false,
        }
    }

    fn has_failed(&self) -> bool {
        self.needs_reset
    }

    fn removal(&mut self) -> Option<Outcome> {
        let Rings { device, .. } = &self.rings;
        let status = device.status().map(u32::from);
        if !device.is_removed() {
            if self.rings.is_running() && !self.needs_reset && !status.is_ok_and(runs) {
                tracing::warn!(
                    device = %self.rings.id,
                    "the device has lost its state: the host has reset it"
                );
                self.fail();
                signal(&self.log.failed);
            }
            return None;
        }
        let works = status.is_ok_and(|status| status != ALL_ONES);
        let stops = !self.packed() || self.rings.offers(BackendFeatures::SUSPEND_AND_RESUME);
        if !works || !stops {
            self.fail();
        }
        Some(Outcome {
            config_changed: false,
            needs_reset: self.needs_reset,
        })
    }

    fn close(&mut self) -> Box<dyn Send> {
        Box::new(self.close_device())
    }

    fn log_writes(&mut self, on: bool) -> Result<(), Error> {
        if on {
            self.relay_all().map_err(Error::or_broken_ring)
        } else {
            self.end_relaying()
        }
    }

    fn untracked_writes(&self) -> Vec<(u64, u64)> {
        self.log.untracked_writes(&self.rings, self.packed())
    }

    fn hand_over(&mut self) -> Result<SavedState, Error> {
        self.hand_over_rings()?.encode()
    }

    fn identity(&mut self) -> Result<SavedState, Error> {
        let identity = self.net.identify(&self.rings.device, self.needs_reset);
        identity?.encode()
    }

    fn adopt(&mut self, replaced: &ReplacedDevice) -> Result<(), Error> {
        let identity = NetIdentity::decode(&replaced.identity)?;
        let Rings { device, id, .. } = &self.rings;
        self.net.adopt(device, id, &identity, replaced)
    }

    fn check_adopted(&self, features: u64) -> Result<(), Error> {
        self.net.check_replaced(&self.rings.device, features)
    }

    fn roll_back(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error> {
        let saved = Saved::decode(state)?;
        self.or_stop(|backend| {
            let saved = backend.rings.rolled_back(saved, &activation)?;
            backend.restore_rings(saved, activation)
        })
    }
}
