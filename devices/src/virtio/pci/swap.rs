//! Hot swap: replaces a device's backend while its driver keeps running.
//!
//! ```text
//!   check      the new one supports everything the driver relies on; features are negotiated
//!                (nothing was stopped so far: a failure has no effect)
//!   switch     doorbells -> eventfds, hand_over of the old, restore of the new
//!                (on failure the new one is reset, and the old one resumes,
//!                 or is reported as broken if it had failed before)
//!   resume     doorbells of the new, a spurious kick and interrupt for all, announcement
//! ```
//! All of it happens under the transport's lock, and under that of the IOMMU's domains for a device
//! behind the guest's IOMMU. vCPUs keep running: a register access waits for
//! the lock, and a kick stays in its eventfd. Events that the old device signalled by interrupts
//! are in the rings. The old backend is returned, stopped, because closing it may take long.
//!
//! A device without a driver, or in the middle of its negotiation, is exchanged without a switch. A
//! device that needs a reset gets a fresh backend for the time after the reset.
//!
//! Owns the order and the checks that apply to any class of device. It must not know how backends
//! are opened, nor who polls their descriptors.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::error;
use vdpa::causes::in_one_line;
use vdpa::features;

use super::common::offered;
use super::transport::{Phase, Transport, relied_on};
use crate::virtio::backend::{Backend, Event, Hardware, Outcome, ReplacedDevice, SavedState};
use crate::{Error, ErrorKind};

/// A prepared backend that has not replaced another one yet.
#[derive(Debug)]
pub struct Replacement {
    pub(super) backend: Box<dyn Backend>,
    pub(super) events: Vec<Event>,
}

impl Replacement {
    /// Returns its descriptors. The event loop must poll them before
    /// [`VirtioPciDevice::swap`](super::VirtioPciDevice::swap): from then on their tokens belong to
    /// the device.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the backend, if it does not replace another one after all.
    #[must_use]
    pub fn into_backend(self) -> Box<dyn Backend> {
        self.backend
    }
}

/// The result of a swap.
#[derive(Debug)]
pub struct Swapped {
    /// The old backend's events, which the event loop must stop polling.
    pub events: Vec<Event>,
    /// The old backend, stopped.
    pub retired: Box<dyn Backend>,
    /// The time from the stop of the old device until the new one worked; `None` if no driver was
    /// using it.
    pub gap: Option<Duration>,
}

/// The device keeps its backend.
pub struct SwapFailed {
    /// The reason. Its kind tells whether the present backend works.
    pub error: Error,
    /// The backend that was to replace it, not working. The event loop must stop polling its
    /// descriptors.
    pub replacement: Box<dyn Backend>,
}

vdpa::opaque_debug!(SwapFailed, this => error: this.error);

/// The properties of a device on which a guest relies, for a device at another host that replaces
/// it. This comes from that host, so it is trusted no more than a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestView {
    /// Virtio device type (virtio 1.3, section 5).
    device_type: u32,
    /// The result of [`Hardware::identity`]; `None` for a device that is like any other of its
    /// type.
    identity: Option<SavedState>,
    /// As [`ReplacedDevice::features`].
    features: u64,
    /// Whether its driver works on its rings.
    running: bool,
    /// The largest size of each queue.
    queue_sizes: Vec<u16>,
    /// Bytes of the device configuration.
    config_len: u32,
}

const NOT_REPLACEABLE: &str = "cannot replace devices of this kind while the machine runs";
const CANNOT_REPLACE: &str = "devices of this kind cannot replace others while the machine runs";

/// The error for a new device of another class than the guest's, which has the virtio type `needs`.
#[must_use]
pub fn other_device_type(needs: u32, has: u32) -> Error {
    incompatible(format!(
        "the new device has virtio type {has}, but the guest uses type {needs}"
    ))
}

fn incompatible(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Incompatible, message)
}

/// For `map_err`: one of the two devices refuses before anything is stopped.
fn refused(source: Error) -> Error {
    incompatible("the new device cannot replace the old one").because(source)
}

/// Returns the operations of a backend that can be replaced while its driver runs.
fn replaceable(backend: &mut dyn Backend) -> Result<&mut dyn Hardware, Error> {
    let hardware = backend.hardware();
    hardware.ok_or_else(|| Error::other(NOT_REPLACEABLE))
}

/// See [`Hardware::identity`].
pub(super) fn identity(backend: &mut dyn Backend) -> Result<SavedState, Error> {
    replaceable(backend)?.identity()
}

/// The error when neither device works. `old`: the old device's failure; `source`: the new one's.
fn lost(old: &str, source: Error) -> Error {
    let message = format!(
        "the new device does not start, and the old one does not restart ({old}): reset the device \
         from the guest's driver (unbind and bind)"
    );
    Error::new(ErrorKind::Lost, message).because(source)
}

impl GuestView {
    /// As the view of a device that is like any other of its type.
    #[cfg(test)]
    pub(super) fn without_identity(self) -> Self {
        Self {
            identity: None,
            ..self
        }
    }

    /// Makes an unused backend look like this, or returns the reason why it cannot.
    fn fits(&self, replacement: &mut dyn Backend) -> Result<(), Error> {
        let (needs, has) = (self.device_type, replacement.device_type());
        if needs != has {
            return Err(other_device_type(needs, has));
        }
        let adopted = match (&self.identity, replacement.hardware()) {
            (Some(identity), Some(replacement)) => replacement.adopt(&ReplacedDevice {
                identity: identity.clone(),
                features: self.features,
                running: self.running,
            }),
            (Some(_), None) => Err(Error::other(CANNOT_REPLACE)),
            (None, _) => Ok(()),
        };
        // Check the features first, because their names are the most useful. The offer may depend
        // on the adopted identity.
        let missing = self.features & !offered(replacement.features_for(self.features));
        if missing != 0 {
            let missing = features::describe(missing, needs);
            let message =
                format!("the new device lacks features that the guest's driver uses: {missing}");
            return Err(Error::new(ErrorKind::MissingFeatures, message));
        }
        adopted.map_err(refused)?;
        self.check_queue_count(replacement)?;
        let (needs, has) = (self.config_len, replacement.config_len());
        // A device with an identity has compared the fields itself.
        if self.identity.is_none() && has < needs {
            return Err(incompatible(format!(
                "the new device has {has} bytes of configuration, but the guest has seen {needs}"
            )));
        }
        Ok(())
    }

    fn check_queue_count(&self, replacement: &dyn Backend) -> Result<(), Error> {
        let (needs, has) = (self.queue_sizes.len(), replacement.queue_max_sizes().len());
        if needs == has {
            return Ok(());
        }
        let message = format!(
            "the new device has {has} queues, but the guest has seen {needs}: create it with as \
             many queue pairs (max_vqp)"
        );
        Err(Error::new(ErrorKind::OtherQueueCount, message))
    }

    /// Compares the sizes of the queues. A device for a running driver has negotiated its features,
    /// which decide which queue is the control queue. The next driver accepts all.
    fn check_queue_sizes(&self, replacement: &mut dyn Backend) -> Result<(), Error> {
        let compared = self.compare_queue_sizes(replacement);
        if compared.is_ok() || self.running {
            return compared;
        }
        let features = match self.features {
            0 => offered(replacement.features_for(0)),
            features => features,
        };
        replacement.reset();
        learn_sizes(replacement, features).map_err(refused)?;
        self.compare_queue_sizes(replacement)
    }

    fn compare_queue_sizes(&self, replacement: &dyn Backend) -> Result<(), Error> {
        let sizes = replacement.queue_max_sizes();
        // A queue with 0 entries does not exist.
        for (index, (&needs, &has)) in self.queue_sizes.iter().zip(sizes).enumerate() {
            if has < needs {
                return Err(incompatible(format!(
                    "queue {index} of the new device takes {has} entries, but the guest has seen \
                     {needs}"
                )));
            }
        }
        Ok(())
    }
}

/// Lets a device that no driver uses report the queue sizes that it has with these features.
fn learn_sizes(device: &mut dyn Backend, features: u64) -> Result<(), Error> {
    device.negotiate(features)?;
    device.reset();
    Ok(())
}

impl Transport {
    /// Replaces the backend by `replacement`; see the module.
    pub(super) fn swap(
        &mut self,
        mut replacement: Box<dyn Backend>,
    ) -> Result<(Box<dyn Backend>, Option<Duration>), SwapFailed> {
        let gap = match self.prepare(&mut *replacement) {
            Ok(()) if self.drives() => match self.switch(&mut *replacement) {
                Ok(gap) => Some(gap),
                Err(error) => return Err(SwapFailed { error, replacement }),
            },
            Ok(()) => {
                if self.phase == Phase::Broken {
                    // It may still write, and from here on its driver's reset reaches only the new
                    // one.
                    self.backend.reset();
                }
                None
            }
            Err(error) => return Err(SwapFailed { error, replacement }),
        };
        let relied_on = relied_on(&self.common, self.phase);
        let offer = offered(replacement.features_for(relied_on));
        self.common.set_offer(offer);
        let retired = std::mem::replace(&mut self.backend, replacement);
        if gap.is_some() {
            self.enter(Phase::Active);
            self.spurious_notify_all();
            self.announce();
        }
        // The device's own configuration may differ, such as the link state.
        self.take(Outcome {
            config_changed: true,
            needs_reset: false,
        });
        Ok((retired, gap))
    }

    /// Whether a driver works with the device, even if the device itself has failed.
    fn drives(&self) -> bool {
        matches!(self.phase, Phase::Active | Phase::Failing)
    }

    /// Returns the properties on which the guest relies, with this identity of the backend.
    fn view_with(&self, identity: Option<SavedState>) -> GuestView {
        GuestView {
            device_type: self.backend.device_type(),
            identity,
            features: relied_on(&self.common, self.phase),
            running: self.drives(),
            queue_sizes: self.common.max_sizes().collect(),
            config_len: self.backend.config_len(),
        }
    }

    /// Returns the properties on which the guest relies, for a device at another host.
    pub(super) fn guest_view(&mut self) -> GuestView {
        // A device that cannot be replaced in place may be like any other of its type: the random
        // number generator.
        let identity = identity(&mut *self.backend).ok();
        self.view_with(identity)
    }

    /// Makes the backend, which no driver uses yet, look like one at another host.
    pub(super) fn adopt(&mut self, guest_view: &GuestView) -> Result<(), Error> {
        if self.phase != Phase::Inactive {
            let message = "a driver already uses the device";
            return Err(Error::new(ErrorKind::CannotHandOver, message));
        }
        guest_view.fits(&mut *self.backend)?;
        // A device of the VMM's own has the same sizes with any features.
        if guest_view.running && guest_view.identity.is_some() {
            learn_sizes(&mut *self.backend, guest_view.features).map_err(refused)?;
        }
        guest_view.check_queue_sizes(&mut *self.backend)?;
        self.common.set_max_sizes(self.backend.queue_max_sizes());
        let offer = offered(self.backend.features_for(guest_view.features));
        self.common.set_offer(offer);
        Ok(())
    }

    /// Takes the queue sizes that the backend, which no driver uses yet, has with these features.
    pub(super) fn take_sizes(&mut self, features: u64) -> Result<(), Error> {
        learn_sizes(&mut *self.backend, features)?;
        self.common.set_max_sizes(self.backend.queue_max_sizes());
        Ok(())
    }

    /// Makes all checks that can refuse a replacement before anything is stopped.
    fn prepare(&mut self, replacement: &mut dyn Backend) -> Result<(), Error> {
        if self.phase == Phase::Saved {
            let message = "the device is saved: replace it after the restore";
            return Err(Error::new(ErrorKind::CannotHandOver, message));
        }
        // The type first: only some types can be replaced at all.
        let (needs, has) = (self.backend.device_type(), replacement.device_type());
        if needs != has {
            return Err(other_device_type(needs, has));
        }
        let identity = identity(&mut *self.backend).map_err(refused)?;
        let guest_view = self.view_with(Some(identity));
        guest_view.fits(replacement)?;
        self.enter_space(replacement).map_err(refused)?;
        match self.phase {
            Phase::Agreed | Phase::Active | Phase::Failing => replacement
                .negotiate(self.common.driver_features())
                .map_err(refused)?,
            Phase::Inactive | Phase::Resetting | Phase::Broken | Phase::Saved => {}
        }
        guest_view.check_queue_sizes(replacement)
    }

    /// Puts a replacement behind the guest's IOMMU where the old device is. Both reach it until the
    /// old one is closed.
    fn enter_space(&mut self, replacement: &mut dyn Backend) -> Result<(), Error> {
        match (self.backend.translated(), replacement.translated()) {
            (None, None) => Ok(()),
            (Some(old), Some(new)) => match old.space() {
                Some(space) => new.enter(&space),
                None => Ok(()),
            },
            _ => Err(Error::other(
                "only one of the two devices is behind the guest's IOMMU",
            )),
        }
    }

    /// Switches from the old device to the new one, or back. Returns how long neither worked.
    fn switch(&mut self, replacement: &mut dyn Backend) -> Result<Duration, Error> {
        // From here on the guest's stores reach only the VMM's eventfds.
        self.doorbells.stop();
        let stopped = Instant::now();
        let failed = self.phase == Phase::Failing;
        let old = replaceable(&mut *self.backend);
        let state = match old.and_then(|old| old.hand_over()) {
            Ok(state) => state,
            Err(error) if failed => {
                self.needs_reset();
                let message = "the old device has failed and cannot hand over: reset the device \
                               from the guest's driver (unbind and bind)";
                return Err(Error::new(ErrorKind::Lost, message).because(error));
            }
            Err(error) => {
                self.resume();
                let message = "the old device cannot hand over; it continues";
                return Err(Error::new(ErrorKind::CannotHandOver, message).because(error));
            }
        };
        match replacement.restore(&state, self.activation(&self.common)) {
            Ok(()) => Ok(stopped.elapsed()),
            Err(error) => {
                replacement.reset();
                if failed {
                    self.backend.reset();
                    self.needs_reset();
                    return Err(lost("it has failed", error));
                }
                Err(self.roll_back(&state, error))
            }
        }
    }

    /// Restarts the old device after both have left the rings.
    fn roll_back(&mut self, state: &SavedState, error: Error) -> Error {
        let activation = self.activation(&self.common);
        let old = replaceable(&mut *self.backend);
        match old.and_then(|old| old.roll_back(state, activation)) {
            Ok(()) => {
                self.resume();
                let message = "the new device does not start; the old one continues";
                Error::new(ErrorKind::CannotStart, message).because(error)
            }
            Err(old) => {
                let old = in_one_line(&old);
                error!(error = old, "a device cannot resume after a failed swap");
                self.backend.reset();
                self.needs_reset();
                lost(&old, error)
            }
        }
    }

    /// Gives the old device its doorbells back, and makes up for lost notifications.
    fn resume(&mut self) {
        self.enter(Phase::Active);
        self.spurious_notify_all();
    }
}
