//! The locked part of a virtio-pci device: registers, MSI-X, doorbells and the backend, and the
//! order in which the backend is called.
//!
//! ```text
//!             FEATURES_OK           DRIVER_OK
//!   inactive -------------> agreed -----------> active ----------> saved
//!                                                 |      save
//!                                                 |
//!                                                 | error, needs_reset
//!                                                 v
//!                                               broken <--+ no backup
//!                                                         | replaces it
//!   active, the device has failed and has --------------> failing -----> active
//!   a backup (`set_has_backup`)                                  swap
//!
//!   any, by status 0: reset --> inactive, or resetting as long as the backend is, then inactive
//!   inactive or saved, by restore --> the phase of the restored status
//!   any, by needs_reset --> broken
//!   any but saved, by a swap of the backend (`swap.rs`) --> the same
//! ```
//! While a device is resetting, its status stays as it was, and writes to its registers have no
//! effect. A driver waits until the status is 0 (virtio 1.3, 4.1.4.3.2). So no vCPU waits for
//! storage under the lock. A refused FEATURES_OK leaves the phase unchanged.
//!
//! It must not know who maps the BAR, nor how the backend works.

use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, error, warn};
use vdpa::causes::in_one_line;
use vdpa::memory::DeviceMemory;
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use vmm_sys_util::eventfd::EventFd;

use super::common::{CommonConfig, Effect};
use super::describe::{DeviceDescription, RunningRing};
use super::layout::{BAR, Capabilities, Region, notified_queue};
use super::notify::{NotifyDoorbells, kick};
use crate::Error;
use crate::pci::{Bar, ConfigSpace, MSIX_CONTROL_OFFSET, Msix};
use crate::virtio::backend::{Activation, Backend, Outcome, Queue, QueueChange};
use crate::virtio::status::{DRIVER_OK, DeviceStatus, FEATURES_OK, NEEDS_RESET};

/// ISR status (virtio 1.3, 4.1.4.5). Bit 0, a queue interrupt, is never set:
/// it belongs to INTx, which the device does not have.
pub(super) const ISR_CONFIG_CHANGED: u8 = 2;

// `struct virtio_pci_cfg_cap` (virtio 1.3, 4.1.4.9), offsets from its start.
const ACCESS_BAR: u16 = 4;
const ACCESS_OFFSET: u16 = 8;
const ACCESS_LENGTH: u16 = 12;
const ACCESS_DATA: u16 = 16;
const ACCESS_DATA_LEN: usize = 4;

/// The phase of the backend; see the module's diagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Inactive,
    /// The driver has reset the device, and the backend has not ended that.
    Resetting,
    Agreed,
    Active,
    /// The device has failed, and its driver is not notified: a backup will replace it. The backend
    /// gets only events, the swap and reset.
    Failing,
    /// NEEDS_RESET is set: the backend gets only events and reset.
    Broken,
    Saved,
}

/// The locked state; see the module.
#[derive(Debug)]
pub(super) struct Transport {
    pub(super) config_space: ConfigSpace,
    pub(super) capabilities: Capabilities,
    pub(super) msix: Msix,
    pub(super) common: CommonConfig,
    pub(super) doorbells: NotifyDoorbells,
    /// The eventfd of each MSI-X vector.
    calls: Vec<Arc<EventFd>>,
    pub(super) backend: Box<dyn Backend>,
    pub(super) isr: u8,
    pub(super) phase: Phase,
    /// There is a backup for a device that fails.
    has_backup: bool,
    /// How often the device, or one of its queues, was started.
    starts: u64,
}

impl Transport {
    /// Creates an inactive device. `calls` are the eventfds of the vectors of `msix`.
    pub(super) fn new(
        (config_space, capabilities): (ConfigSpace, Capabilities),
        msix: Msix,
        calls: Vec<Arc<EventFd>>,
        common: CommonConfig,
        doorbells: NotifyDoorbells,
        backend: Box<dyn Backend>,
    ) -> Self {
        Self {
            config_space,
            capabilities,
            msix,
            calls,
            common,
            doorbells,
            backend,
            isr: 0,
            phase: Phase::Inactive,
            has_backup: false,
            starts: 0,
        }
    }

    // ---- configuration space ----

    pub(super) fn read_config(&mut self, offset: u16, data: &mut [u8]) {
        if self.touches_access_data(offset, data.len())
            && let Some((bar_offset, len)) = self.window_access()
        {
            let mut value = [0; ACCESS_DATA_LEN];
            if let Some(value) = value.get_mut(..len) {
                self.read_bar(bar_offset, value);
            }
            self.config_space
                .set(self.capabilities.pci_cfg.saturating_add(16), &value);
        }
        self.config_space.read(offset, data);
    }

    pub(super) fn write_config(&mut self, offset: u16, data: &[u8]) {
        self.config_space.write(offset, data);
        let control = u16::from(self.capabilities.msix) + MSIX_CONTROL_OFFSET;
        if meets(offset, data.len(), control, 2) {
            self.msix.set_control(self.config_space.read_u16(control));
        }
        if self.touches_access_data(offset, data.len())
            && let Some((bar_offset, len)) = self.window_access()
        {
            let data_offset = u16::from(self.capabilities.pci_cfg) + ACCESS_DATA;
            let value = self.config_space.read_u32(data_offset).to_le_bytes();
            if let Some(value) = value.get(..len) {
                self.write_bar(bar_offset, value);
            }
        }
    }

    pub(super) fn bars(&self) -> Vec<Bar> {
        self.config_space.bars()
    }

    fn touches_access_data(&self, offset: u16, len: usize) -> bool {
        let data = u16::from(self.capabilities.pci_cfg) + ACCESS_DATA;
        meets(offset, len, data, ACCESS_DATA_LEN)
    }

    /// Returns the offset in the BAR and the width of the access that the driver set up in
    /// `virtio_pci_cfg_cap`, if it is valid.
    fn window_access(&self) -> Option<(u64, usize)> {
        let capability = u16::from(self.capabilities.pci_cfg);
        let [bar, ..] = self
            .config_space
            .read_u32(capability + ACCESS_BAR)
            .to_le_bytes();
        let offset = self.config_space.read_u32(capability + ACCESS_OFFSET);
        let length = self.config_space.read_u32(capability + ACCESS_LENGTH);
        if bar != BAR || !matches!(length, 1 | 2 | 4) || !offset.is_multiple_of(length) {
            return None;
        }
        let offset = u64::from(offset);
        let size = self.bars().first().map_or(0, |bar| bar.size);
        let inside = offset + u64::from(length) <= size;
        inside.then_some((offset, usize::try_from(length).ok()?))
    }

    // ---- BAR 0 ----

    pub(super) fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match Region::of(offset) {
            Some(Region::Common(offset)) => self.common.read(offset, data),
            Some(Region::Isr) => {
                if let Some(byte) = data.first_mut() {
                    *byte = std::mem::take(&mut self.isr);
                }
            }
            Some(Region::Device(offset)) => {
                if let Some(offset) = self.config_access(offset, data.len()) {
                    self.backend.read_config(offset, data);
                }
            }
            Some(Region::MsixTable(offset)) => self.msix.read_table(offset, data),
            Some(Region::MsixPending(offset)) => self.msix.read_pending(offset, data),
            None => {}
        }
    }

    pub(super) fn write_bar(&mut self, offset: u64, data: &[u8]) {
        if let Some(queue) = notified_queue(offset) {
            self.kicked(queue);
            return;
        }
        match Region::of(offset) {
            Some(Region::Common(_) | Region::Device(_)) if self.phase == Phase::Resetting => {}
            Some(Region::Common(offset)) => {
                let effect = self.common.write(offset, data);
                self.apply(effect);
            }
            Some(Region::Device(offset)) => {
                if let Some(offset) = self.config_access(offset, data.len()) {
                    self.backend.write_config(offset, data);
                }
            }
            Some(Region::MsixTable(offset)) => self.msix.write_table(offset, data),
            Some(Region::Isr | Region::MsixPending(_)) | None => {}
        }
    }

    /// Returns the offset of an access to device configuration if all of it is inside.
    fn config_access(&self, offset: u64, len: usize) -> Option<u32> {
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        let inside = len > 0 && end <= u64::from(self.backend.config_len());
        inside.then_some(u32::try_from(offset).ok()?)
    }

    // ---- the backend's life ----

    fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::Reset => self.reset_device(),
            Effect::Negotiate(agreed) => self.negotiate(agreed),
            Effect::Activate(running) => self.activate(running),
            Effect::QueueVector(index) => self.queue_vector_changed(index),
            Effect::QueueEnable(index) => self.queue_enabled(index),
            Effect::QueueReset(index) => self.reset_queue(index),
        }
    }

    fn negotiate(&mut self, agreed: DeviceStatus) {
        let features = self.common.driver_features();
        if !self.common.features_acceptable() {
            debug!(
                features,
                "refusing the driver's features: VERSION_1 is missing or a bit was not offered"
            );
            return;
        }
        match self.backend.negotiate(features) {
            Ok(()) => {
                self.common.set_status(agreed);
                self.enter(Phase::Agreed);
            }
            Err(error) => warn!(
                features,
                error = in_one_line(&error),
                "the device refuses the driver's features"
            ),
        }
    }

    fn activate(&mut self, running: DeviceStatus) {
        let activation = self.activation(&self.common);
        // Set in either case: NEEDS_RESET is reported by an interrupt only to a driver that has
        // written DRIVER_OK (virtio 1.3, 2.1.2).
        self.common.set_status(running);
        match self.backend.activate(activation) {
            Ok(()) => self.enter(Phase::Active),
            Err(error) => {
                error!(error = in_one_line(&error), "the device cannot start");
                self.needs_reset();
            }
        }
    }

    fn queue_vector_changed(&mut self, index: u16) {
        if self.phase != Phase::Active {
            return;
        }
        let Some(vector) = self.common.enabled_queue_vector(index) else {
            return;
        };
        let call = self.call(vector);
        if let Err(error) = self.backend.change(QueueChange::Call { index, call }) {
            error!(
                queue = index,
                error = in_one_line(&error),
                "the device rejects a new interrupt vector"
            );
            self.needs_reset();
        }
    }

    /// Enables a queue again that was reset.
    fn queue_enabled(&mut self, index: u16) {
        let queue = self
            .activation(&self.common)
            .queues
            .into_iter()
            .find(|queue| queue.index == index);
        let Some(queue) = queue.filter(|_| self.phase == Phase::Active) else {
            return;
        };
        match self.backend.change(QueueChange::Enable(queue)) {
            Ok(()) => {
                self.starts = self.starts.wrapping_add(1);
                let hardware = self.backend.hardware();
                let doorbell = hardware.and_then(|hardware| hardware.doorbell(index));
                self.doorbells.set(index, doorbell);
            }
            Err(error) => {
                error!(
                    queue = index,
                    error = in_one_line(&error),
                    "the device rejects a queue after its reset"
                );
                self.needs_reset();
            }
        }
    }

    /// When this returns, nothing accesses the queue's memory, whatever the result.
    fn reset_queue(&mut self, index: u16) {
        // First: from here on the guest's stores reach only the VMM's eventfd.
        self.doorbells.set(index, None);
        match self.phase {
            Phase::Active => {
                if let Err(error) = self.backend.change(QueueChange::Reset { index }) {
                    error!(
                        queue = index,
                        error = in_one_line(&error),
                        "cannot reset a queue of the device"
                    );
                    self.backend.reset();
                    self.needs_reset();
                }
            }
            // Only a reset of the device ends its work on this queue; then no backup can continue
            // from its position.
            Phase::Failing => {
                self.backend.reset();
                self.needs_reset();
            }
            // Its driver has to reset the whole device anyway.
            Phase::Broken => self.backend.reset(),
            // The vCPUs are stopped, so no guest waits for this.
            Phase::Inactive | Phase::Resetting | Phase::Agreed | Phase::Saved => return,
        }
        self.common.queue_was_reset(index);
        self.doorbells.drain_queue(index);
    }

    fn reset_device(&mut self) {
        // First: from here on the guest's stores reach only the VMM's eventfds.
        self.enter(Phase::Inactive);
        self.backend.reset();
        if self.backend.is_resetting() {
            warn!("the device's reset waits for its storage");
            self.phase = Phase::Resetting;
        } else {
            self.complete_reset();
        }
    }

    fn complete_reset(&mut self) {
        self.phase = Phase::Inactive;
        self.common.reset();
        self.isr = 0;
        // After the backend: a kick of the old driver must not reach the next.
        self.doorbells.drain();
    }

    /// Waits for the end of the device's reset, at most for `limit`. Returns whether it has ended.
    pub(super) fn await_reset(&mut self, limit: Duration) -> bool {
        if self.phase == Phase::Resetting && self.backend.await_reset(limit) {
            self.complete_reset();
        }
        self.phase != Phase::Resetting
    }

    /// Resets the whole function, as after power-on.
    pub(super) fn reset_function(&mut self) {
        self.reset_device();
        self.config_space.reset();
        self.msix.reset();
        self.doorbells.forgive();
    }

    /// Changes the phase. The guest has the device's doorbells exactly while the device is active
    /// and their queues are enabled.
    pub(super) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        if phase != Phase::Active {
            self.doorbells.stop();
            return;
        }
        self.starts = self.starts.wrapping_add(1);
        self.show_doorbells();
    }

    /// Maps the doorbells that the backend has for the guest now.
    pub(super) fn show_doorbells(&mut self) {
        let Self {
            common,
            backend,
            doorbells,
            ..
        } = self;
        doorbells.run(|queue| {
            let enabled = common.enabled_queue_vector(queue).is_some();
            let hardware = backend.hardware().filter(|_| enabled)?;
            hardware.doorbell(queue)
        });
    }

    fn call(&self, vector: u16) -> Option<Arc<EventFd>> {
        self.calls.get(usize::from(vector)).map(Arc::clone)
    }

    /// Returns the activation of the backend for `common`.
    pub(super) fn activation(&self, common: &CommonConfig) -> Activation {
        let queue = |(index, state): (u16, &super::state::QueueState)| {
            Some(Queue {
                index,
                addresses: state.addresses,
                kick: Arc::clone(self.doorbells.kicks().get(usize::from(index))?),
                call: self.call(state.vector),
            })
        };
        Activation {
            features: common.driver_features(),
            queues: common.enabled_queues().filter_map(queue).collect(),
        }
    }

    /// The guest stored to the notify page of `queue`.
    pub(super) fn kicked(&mut self, queue: usize) {
        let inline = u16::try_from(queue).ok();
        match inline.filter(|queue| self.backend.serves_inline(*queue)) {
            Some(queue) if self.phase == Phase::Active => {
                let outcome = self.backend.kicked(queue);
                self.take(outcome);
            }
            Some(_) => {}
            None => kick(self.doorbells.kicks(), queue),
        }
    }

    // ---- the device's side ----

    /// Returns `true` if the device has just failed, its driver is not notified, and a backup will
    /// replace it.
    pub(super) fn process(&mut self, token: u16) -> bool {
        let was_failing = self.phase == Phase::Failing;
        let outcome = self.backend.process(token);
        if self.phase == Phase::Resetting {
            self.await_reset(Duration::ZERO);
            return false;
        }
        self.take(outcome);
        self.phase == Phase::Failing && !was_failing
    }

    pub(super) fn set_has_backup(&mut self, on: bool) {
        self.has_backup = on;
    }

    /// No backup replaces the failed device: notifies its driver that it needs a reset.
    pub(super) fn give_up(&mut self) {
        if self.phase == Phase::Failing {
            self.needs_reset();
        }
    }

    /// Whether the host removes the device: see [`VirtioPciDevice::is_removed`].
    ///
    /// [`VirtioPciDevice::is_removed`]: super::VirtioPciDevice::is_removed
    pub(super) fn is_removed(&mut self) -> bool {
        let hardware = self.backend.hardware();
        let Some(outcome) = hardware.and_then(|hardware| hardware.removal()) else {
            return false;
        };
        if self.phase == Phase::Active {
            self.take(outcome);
        }
        true
    }

    /// Closes the device, which the host removes. A saved device gets NEEDS_RESET when it is
    /// restored.
    pub(super) fn close(&mut self) -> Option<Box<dyn Send>> {
        // First: a page that the guest has keeps the device open.
        self.doorbells.stop();
        let closed = self.backend.hardware()?.close();
        let has_driver = self.common.status() != DeviceStatus::RESET;
        if has_driver && self.phase != Phase::Saved && !self.is_broken() {
            self.needs_reset();
        }
        // The link is down.
        self.take(Outcome {
            config_changed: true,
            needs_reset: false,
        });
        Some(closed)
    }

    /// See [`Hardware::log_writes`](crate::virtio::backend::Hardware::log_writes). Doorbells are
    /// released before, and the remaining ones are mapped again afterwards.
    pub(super) fn log_writes(&mut self, on: bool) -> Result<(), Error> {
        if on {
            self.give_up();
            if self.phase == Phase::Broken {
                // It may still write, and is unusable until its driver resets it.
                self.backend.reset();
            }
        }
        self.doorbells.stop();
        let logged = log_writes(&mut *self.backend, on);
        if self.phase == Phase::Active {
            self.show_doorbells();
        }
        match logged {
            Err(error) if on && error.is_broken_ring() => {
                self.ring_broke(&error);
                // From the driver's next start on.
                log_writes(&mut *self.backend, on)
            }
            logged => logged,
        }
    }

    /// A guest that breaks its own ring must not prevent the whole machine from being saved or
    /// moved. Its device is treated as one that reports DEVICE_NEEDS_RESET.
    pub(super) fn ring_broke(&mut self, error: &Error) {
        error!(
            error = in_one_line(error),
            "broken ring: the device stops until its driver resets it"
        );
        self.backend.reset();
        self.needs_reset();
    }

    pub(super) fn untracked_writes(&mut self) -> Vec<(u64, u64)> {
        let hardware = self.backend.hardware();
        hardware.map_or_else(Vec::new, |hardware| hardware.untracked_writes())
    }

    /// Asks the guest to announce itself; returns `false` if it cannot.
    pub(super) fn announce(&mut self) -> bool {
        if self.phase != Phase::Active {
            return false;
        }
        let hardware = self.backend.hardware();
        let outcome = hardware.map_or_else(Outcome::default, |hardware| hardware.announce());
        self.take(outcome);
        outcome.config_changed
    }

    pub(super) fn take(&mut self, outcome: Outcome) {
        if outcome.config_changed {
            self.common.next_generation();
            self.config_interrupt();
        }
        if !outcome.needs_reset || self.is_broken() || self.phase == Phase::Failing {
            return;
        }
        let hardware = self.backend.hardware();
        let awaits = self.has_backup && self.phase == Phase::Active;
        if awaits && hardware.is_some_and(|hardware| hardware.has_failed()) {
            warn!("the device has failed: waiting for its backup device");
            self.enter(Phase::Failing);
            return;
        }
        error!("device needs reset");
        self.needs_reset();
    }

    pub(super) fn describe(&self) -> DeviceDescription {
        DeviceDescription::new(&*self.backend, &self.common, &self.doorbells)
    }

    /// Passes the queues on which the backend works now to `visit`, with the memory of their rings.
    pub(super) fn running_rings(&self, mut visit: impl FnMut(&RunningRing, Option<&DeviceMemory>)) {
        if !matches!(self.phase, Phase::Active | Phase::Saved) {
            return;
        }
        let packed = self.common.driver_features() & (1 << VIRTIO_F_RING_PACKED) != 0;
        for (index, queue) in self.common.enabled_queues() {
            let ring = RunningRing {
                index,
                addresses: queue.addresses,
                packed,
                role: self.backend.queue_role(index),
                start: self.starts,
            };
            visit(&ring, self.backend.memory());
        }
    }

    /// Sends a spurious kick and a spurious interrupt.
    pub(super) fn spurious_notify(&self, queue: u16) -> bool {
        if self.phase != Phase::Active {
            return false;
        }
        let Some(vector) = self.common.enabled_queue_vector(queue) else {
            return false;
        };
        kick(self.doorbells.kicks(), usize::from(queue));
        self.msix.signal(vector);
        true
    }

    pub(super) fn is_broken(&self) -> bool {
        self.common.status().has(NEEDS_RESET)
    }

    pub(super) fn needs_reset(&mut self) {
        self.common.set_status(self.common.status().broken());
        self.enter(Phase::Broken);
        self.config_interrupt();
    }

    /// Notifies the driver that configuration or status changed, once it has set DRIVER_OK (virtio
    /// 1.3, 2.1.2 and 2.3).
    fn config_interrupt(&mut self) {
        if self.common.status().has(DRIVER_OK) {
            self.isr |= ISR_CONFIG_CHANGED;
            self.msix.signal(self.common.config_vector());
        }
    }

    /// Sends one spurious kick and interrupt to all queues: signals that were pending when the
    /// state was saved are not part of it.
    pub(super) fn spurious_notify_all(&self) {
        if self.phase != Phase::Active {
            return;
        }
        for (index, queue) in self.common.enabled_queues() {
            kick(self.doorbells.kicks(), usize::from(index));
            self.msix.signal(queue.vector);
        }
        if self.backend.changes_config() {
            self.msix.signal(self.common.config_vector());
        }
    }
}

/// Returns the features on which a driver with these registers relies: see
/// [`ReplacedDevice::features`](crate::virtio::backend::ReplacedDevice::features).
pub(super) fn relied_on(common: &CommonConfig, phase: Phase) -> u64 {
    let status = common.status();
    if phase == Phase::Broken || status == DeviceStatus::RESET {
        // It has to restart, or has not started.
        0
    } else if status.has(FEATURES_OK) {
        common.driver_features()
    } else {
        common.offer()
    }
}

/// See [`Hardware::log_writes`](crate::virtio::backend::Hardware::log_writes).
fn log_writes(backend: &mut dyn Backend, on: bool) -> Result<(), Error> {
    match backend.hardware() {
        Some(hardware) => hardware.log_writes(on),
        None => Ok(()),
    }
}

/// Whether `len` bytes at `offset` overlap `other_len` bytes at `other`.
fn meets(offset: u16, len: usize, other: u16, other_len: usize) -> bool {
    let (offset, other) = (usize::from(offset), usize::from(other));
    offset < other.saturating_add(other_len) && other < offset.saturating_add(len)
}
