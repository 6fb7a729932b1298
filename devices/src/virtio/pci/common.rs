//! The common configuration structure (virtio 1.3, section 4.1.4.3): registers, and the states in
//! which the driver can write them.
//!
//! Owns the guest's settings. It must not know the backend nor PCI: a write that needs more than a
//! register update returns an [`Effect`].
//!
//! | register | writable |
//! |---|---|
//! | selectors | always |
//! | `driver_feature` | DRIVER set, FEATURES_OK clear |
//! | queue size, addresses, enable | FEATURES_OK, no DRIVER_OK, queue not enabled; or see below |
//! | `queue_reset` | RING_RESET negotiated, DRIVER_OK set, queue enabled |
//! | vectors | always: they are re-routed at run time |
//! | `device_status` | as in the table of [`status`](crate::virtio::status) |
//!
//! With DRIVER_OK set, size, addresses and enable of a queue are writable once the queue was reset.
//!
//! The states of a queue (virtio 1.3, 2.6.1 and 4.1.4.3):
//!
//! ```text
//!              queue_enable := 1                  queue_reset := 1
//!   programmed -----------------> enabled ------------------------+
//!   (before DRIVER_OK)              ^                             v
//!                                   +------------------ reset: registers as after power-on,
//!                                    queue_enable := 1  programmable again
//! ```
//! A reset is complete when the write returns, so the driver reads 0 from `queue_reset` and from
//! `queue_enable` at once.

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_F_RING_PACKED, VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1,
};

use crate::Error;
use crate::virtio::backend::QueueAddresses;
use crate::virtio::status::{DRIVER, DRIVER_OK, DeviceStatus, FAILED, FEATURES_OK, Request};

/// A vector register that names no vector (virtio 1.3, 4.1.5.1.2).
pub(super) const NO_VECTOR: u16 = 0xffff;

/// Feature bits that are never offered, because they need code that does not exist here. An eventfd
/// would lose NOTIFICATION_DATA (38), and a queue with a mapped doorbell may fall back to an
/// eventfd. The others are SR_IOV (37), NOTIF_CONFIG_DATA (39) and ADMIN_VQ (41).
const NEVER_OFFERED: u64 = 1 << 37 | 1 << 38 | 1 << 39 | 1 << 41;

/// Returns the features that a driver is offered for a backend with `features`.
pub(super) fn offered(features: u64) -> u64 {
    features & !NEVER_OFFERED
}

/// Saved registers of one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// `queue_size`, `queue_desc`, `queue_driver`, `queue_device`.
    pub addresses: QueueAddresses,
    /// `queue_msix_vector`.
    pub vector: u16,
    /// `queue_enable`.
    pub enabled: bool,
    /// Whether the queue was reset since DRIVER_OK and not enabled again.
    pub reset: bool,
}

/// Saved registers of the common configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistersState {
    /// `device_feature_select`.
    pub device_feature_select: u32,
    /// `driver_feature_select`.
    pub driver_feature_select: u32,
    /// `driver_feature`, both words.
    pub driver_features: u64,
    /// `config_msix_vector`.
    pub config_vector: u16,
    /// `device_status`.
    pub status: u8,
    /// `config_generation`.
    pub generation: u8,
    /// `queue_select`.
    pub queue_select: u16,
    /// One per queue.
    pub queues: Vec<QueueState>,
}

/// The action that a write requires from the transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing beyond the register.
    None,
    /// Reset the device.
    Reset,
    /// Negotiate; then [`CommonConfig::set_status`] to this.
    Negotiate(DeviceStatus),
    /// Activate; then [`CommonConfig::set_status`] to this.
    Activate(DeviceStatus),
    /// The vector of this queue changed.
    QueueVector(u16),
    /// This queue was enabled while the device runs.
    QueueEnable(u16),
    /// Reset this queue; then call [`CommonConfig::queue_was_reset`].
    QueueReset(u16),
}

/// A register; the three ring addresses are split into halves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    DeviceFeatureSelect,
    DeviceFeature,
    DriverFeatureSelect,
    DriverFeature,
    ConfigVector,
    NumQueues,
    DeviceStatus,
    ConfigGeneration,
    QueueSelect,
    QueueSize,
    QueueVector,
    QueueEnable,
    QueueNotifyOffset,
    QueueReset,
    Address(Area, Half),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Area {
    Descriptor,
    Driver,
    Device,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Half {
    Low,
    High,
}

impl Register {
    /// Returns the register that an access addresses. Only the natural width is valid (virtio 1.3,
    /// 4.1.3.1). `queue_notify_config_data` belongs to a feature that is never offered: it reads
    /// zero, like every gap.
    fn of(offset: u64, len: usize) -> Option<Self> {
        Some(match (offset, len) {
            (0x00, 4) => Self::DeviceFeatureSelect,
            (0x04, 4) => Self::DeviceFeature,
            (0x08, 4) => Self::DriverFeatureSelect,
            (0x0c, 4) => Self::DriverFeature,
            (0x10, 2) => Self::ConfigVector,
            (0x12, 2) => Self::NumQueues,
            (0x14, 1) => Self::DeviceStatus,
            (0x15, 1) => Self::ConfigGeneration,
            (0x16, 2) => Self::QueueSelect,
            (0x18, 2) => Self::QueueSize,
            (0x1a, 2) => Self::QueueVector,
            (0x1c, 2) => Self::QueueEnable,
            (0x1e, 2) => Self::QueueNotifyOffset,
            (0x20, 4) => Self::Address(Area::Descriptor, Half::Low),
            (0x24, 4) => Self::Address(Area::Descriptor, Half::High),
            (0x28, 4) => Self::Address(Area::Driver, Half::Low),
            (0x2c, 4) => Self::Address(Area::Driver, Half::High),
            (0x30, 4) => Self::Address(Area::Device, Half::Low),
            (0x34, 4) => Self::Address(Area::Device, Half::High),
            (0x3a, 2) => Self::QueueReset,
            _ => return None,
        })
    }
}

/// Returns the low or high word of a 64-bit register.
fn word(value: u64, half: Half) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    match half {
        Half::Low => u32::from_le_bytes([a, b, c, d]),
        Half::High => u32::from_le_bytes([e, f, g, h]),
    }
}

fn with_word(value: u64, half: Half, new: u32) -> u64 {
    match half {
        Half::Low => (value & !0xffff_ffff) | u64::from(new),
        Half::High => (value & 0xffff_ffff) | (u64::from(new) << 32),
    }
}

/// Returns the half of a 64-bit feature set that a selector addresses.
fn selected(select: u32) -> Option<Half> {
    match select {
        0 => Some(Half::Low),
        1 => Some(Half::High),
        _ => None,
    }
}

fn u16_of(value: u32) -> u16 {
    u16::try_from(value & 0xffff).unwrap_or(0)
}

#[derive(Debug, Clone)]
struct QueueRegisters {
    max_size: u16,
    state: QueueState,
}

impl QueueRegisters {
    fn new(max_size: u16) -> Self {
        Self {
            max_size,
            state: QueueState {
                addresses: QueueAddresses {
                    size: max_size,
                    ..QueueAddresses::default()
                },
                vector: NO_VECTOR,
                enabled: false,
                reset: false,
            },
        }
    }

    fn area(&mut self, area: Area) -> &mut u64 {
        let addresses = &mut self.state.addresses;
        match area {
            Area::Descriptor => &mut addresses.descriptor.0,
            Area::Driver => &mut addresses.driver.0,
            Area::Device => &mut addresses.device.0,
        }
    }
}

/// The registers; see the module.
#[derive(Debug, Clone)]
pub(super) struct CommonConfig {
    /// The offered features.
    offer: u64,
    /// Size of the MSI-X table.
    vectors: u16,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    status: DeviceStatus,
    generation: u8,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
}

impl CommonConfig {
    /// Creates the registers as after power-on. There are at most
    /// [`MAX_QUEUES`](super::layout::MAX_QUEUES) queues; each maximum is 0 or a power of two.
    pub(super) fn new(offer: u64, max_sizes: &[u16], vectors: u16) -> Self {
        Self {
            offer,
            vectors,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            status: DeviceStatus::RESET,
            generation: 0,
            queue_select: 0,
            queues: max_sizes.iter().copied().map(QueueRegisters::new).collect(),
        }
    }

    /// Resets everything to its value after power-on, except the generation: a driver that compares
    /// two reads around a reset must see the difference.
    pub(super) fn reset(&mut self) {
        let max_sizes: Vec<u16> = self.queues.iter().map(|queue| queue.max_size).collect();
        let generation = self.generation;
        *self = Self::new(self.offer, &max_sizes, self.vectors);
        self.generation = generation;
    }

    pub(super) fn status(&self) -> DeviceStatus {
        self.status
    }

    pub(super) fn set_status(&mut self, status: DeviceStatus) {
        self.status = status;
    }

    /// Returns the offered features.
    pub(super) fn offer(&self) -> u64 {
        self.offer
    }

    /// Changes the offer to that of another device. Negotiated features stay.
    pub(super) fn set_offer(&mut self, offer: u64) {
        self.offer = offer;
    }

    /// Returns the largest size of each queue.
    pub(super) fn max_sizes(&self) -> impl Iterator<Item = u16> {
        self.queues.iter().map(|queue| queue.max_size)
    }

    /// Changes the largest sizes, as [`CommonConfig::new`] takes them. No queue is in use.
    pub(super) fn set_max_sizes(&mut self, max_sizes: &[u16]) {
        self.queues = max_sizes.iter().copied().map(QueueRegisters::new).collect();
    }

    pub(super) fn driver_features(&self) -> u64 {
        self.driver_features
    }

    pub(super) fn config_vector(&self) -> u16 {
        self.config_vector
    }

    pub(super) fn next_generation(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// Whether the driver's features are a subset of the offer with VERSION_1.
    pub(super) fn features_acceptable(&self) -> bool {
        self.driver_features & !self.offer == 0
            && self.driver_features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    /// Returns the enabled queues with their indices, ascending.
    pub(super) fn enabled_queues(&self) -> impl Iterator<Item = (u16, &QueueState)> {
        let queues = (0..).zip(self.queues.iter().map(|queue| &queue.state));
        queues.filter(|(_, queue)| queue.enabled)
    }

    /// Returns the vector register of queue `index`, if the queue is enabled.
    pub(super) fn enabled_queue_vector(&self, index: u16) -> Option<u16> {
        let queue = self.queues.get(usize::from(index))?;
        queue.state.enabled.then_some(queue.state.vector)
    }

    fn queue(&self) -> Option<&QueueRegisters> {
        self.queues.get(usize::from(self.queue_select))
    }

    /// Returns the selected queue if the driver may program it now.
    fn queue_in_window(&mut self) -> Option<&mut QueueRegisters> {
        let queue = self.queues.get_mut(usize::from(self.queue_select))?;
        let open = match self.status {
            DeviceStatus::AGREED => !queue.state.enabled,
            DeviceStatus::RUNNING => queue.state.reset,
            _ => false,
        };
        open.then_some(queue)
    }

    fn resets_queues(&self) -> bool {
        self.driver_features & (1 << VIRTIO_F_RING_RESET) != 0
    }

    /// Records that the transport has reset queue `index`.
    pub(super) fn queue_was_reset(&mut self, index: u16) {
        if let Some(queue) = self.queues.get_mut(usize::from(index)) {
            *queue = QueueRegisters::new(queue.max_size);
            queue.state.reset = true;
        }
    }

    /// Reads at `offset` from the structure's start. Gaps, and queue registers while the selector
    /// is out of range, read zero.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let value = Register::of(offset, data.len()).map_or(0, |register| self.value(register));
        data.fill(0);
        for (byte, new) in data.iter_mut().zip(value.to_le_bytes()) {
            *byte = new;
        }
    }

    fn value(&self, register: Register) -> u32 {
        let queue = |field: fn(&QueueState) -> u16| {
            u32::from(self.queue().map_or(0, |queue| field(&queue.state)))
        };
        let features = |value, select| selected(select).map_or(0, |half| word(value, half));
        match register {
            Register::DeviceFeatureSelect => self.device_feature_select,
            Register::DeviceFeature => features(self.offer, self.device_feature_select),
            Register::DriverFeatureSelect => self.driver_feature_select,
            Register::DriverFeature => features(self.driver_features, self.driver_feature_select),
            Register::ConfigVector => u32::from(self.config_vector),
            Register::NumQueues => u32::try_from(self.queues.len()).unwrap_or(0),
            Register::DeviceStatus => u32::from(self.status.bits()),
            Register::ConfigGeneration => u32::from(self.generation),
            Register::QueueSelect => u32::from(self.queue_select),
            Register::QueueSize => queue(|queue| queue.addresses.size),
            Register::QueueVector => queue(|queue| queue.vector),
            Register::QueueEnable => queue(|queue| u16::from(queue.enabled)),
            Register::QueueNotifyOffset => self.queue().map_or(0, |_| u32::from(self.queue_select)),
            // A reset is complete before the driver can read this.
            Register::QueueReset => 0,
            Register::Address(area, half) => self.queue().map_or(0, |queue| {
                let addresses = &queue.state.addresses;
                let value = match area {
                    Area::Descriptor => addresses.descriptor,
                    Area::Driver => addresses.driver,
                    Area::Device => addresses.device,
                };
                word(value.0, half)
            }),
        }
    }

    /// Writes at `offset` from the structure's start. Writes to gaps and to registers that are not
    /// writable now are ignored.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let Some(register) = Register::of(offset, data.len()) else {
            return Effect::None;
        };
        let mut bytes = [0; 4];
        for (byte, new) in bytes.iter_mut().zip(data) {
            *byte = *new;
        }
        self.set(register, u32::from_le_bytes(bytes))
    }

    fn set(&mut self, register: Register, value: u32) -> Effect {
        match register {
            Register::DeviceFeatureSelect => self.device_feature_select = value,
            Register::DriverFeatureSelect => self.driver_feature_select = value,
            Register::DriverFeature => self.set_driver_features(value),
            Register::ConfigVector => self.config_vector = self.vector(value),
            Register::DeviceStatus => {
                let [written, ..] = value.to_le_bytes();
                return self.write_status(written);
            }
            Register::QueueSelect => self.queue_select = u16_of(value),
            Register::QueueSize => self.set_queue_size(u16_of(value)),
            Register::QueueVector => return self.set_queue_vector(value),
            Register::QueueEnable => {
                // A queue with maximum 0 does not exist, and the driver must not write 0
                // (4.1.4.3.2).
                if value == 1
                    && let Some(queue) = self.queue_in_window()
                    && queue.state.addresses.size != 0
                {
                    queue.state.enabled = true;
                    queue.state.reset = false;
                    if self.status == DeviceStatus::RUNNING {
                        return Effect::QueueEnable(self.queue_select);
                    }
                }
            }
            Register::QueueReset => return self.reset_queue(value),
            Register::Address(area, half) => {
                if let Some(queue) = self.queue_in_window() {
                    let address = queue.area(area);
                    *address = with_word(*address, half, value);
                }
            }
            Register::DeviceFeature
            | Register::NumQueues
            | Register::ConfigGeneration
            | Register::QueueNotifyOffset => {}
        }
        Effect::None
    }

    /// Possible also in a device that needs a reset: its driver may clean up first, and waits for
    /// `queue_enable` to read 0.
    fn reset_queue(&self, value: u32) -> Effect {
        let runs = self.status.has(DRIVER_OK) && !self.status.has(FAILED);
        match self.queue() {
            Some(queue) if value == 1 && runs && self.resets_queues() && queue.state.enabled => {
                Effect::QueueReset(self.queue_select)
            }
            _ => Effect::None,
        }
    }

    fn set_driver_features(&mut self, value: u32) {
        let window = self.status.has(DRIVER) && self.status.bits() & (FEATURES_OK | FAILED) == 0;
        if window && let Some(half) = selected(self.driver_feature_select) {
            self.driver_features = with_word(self.driver_features, half, value);
        }
    }

    fn set_queue_size(&mut self, size: u16) {
        let packed = self.driver_features & (1 << VIRTIO_F_RING_PACKED) != 0;
        if let Some(queue) = self.queue_in_window()
            && (1..=queue.max_size).contains(&size)
            && (packed || size.is_power_of_two())
        {
            queue.state.addresses.size = size;
        }
    }

    /// Returns a valid vector, else [`NO_VECTOR`], which reports the failure to the driver.
    fn vector(&self, value: u32) -> u16 {
        let vector = u16_of(value);
        if vector < self.vectors {
            vector
        } else {
            NO_VECTOR
        }
    }

    fn set_queue_vector(&mut self, value: u32) -> Effect {
        let vector = self.vector(value);
        let index = self.queue_select;
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            return Effect::None;
        };
        if queue.state.vector == vector {
            return Effect::None;
        }
        queue.state.vector = vector;
        Effect::QueueVector(index)
    }

    /// Takes the reset state of the selected queue from a saved state, if that state is possible.
    fn set_reset(&mut self, reset: bool, status: DeviceStatus) {
        let possible = status.has(DRIVER_OK) && self.resets_queues();
        if let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) {
            queue.state.reset = reset && possible && !queue.state.enabled;
        }
    }

    fn write_status(&mut self, written: u8) -> Effect {
        match self.status.write(written) {
            Request::Nothing => Effect::None,
            Request::Reset => Effect::Reset,
            Request::Set(status) => {
                self.status = status;
                Effect::None
            }
            Request::Negotiate(status) => Effect::Negotiate(status),
            Request::Activate(status) => Effect::Activate(status),
        }
    }

    /// Returns the current registers.
    pub(super) fn save(&self) -> RegistersState {
        RegistersState {
            device_feature_select: self.device_feature_select,
            driver_feature_select: self.driver_feature_select,
            driver_features: self.driver_features,
            config_vector: self.config_vector,
            status: self.status.bits(),
            generation: self.generation,
            queue_select: self.queue_select,
            queues: self.queues.iter().map(|queue| queue.state).collect(),
        }
    }

    /// Returns registers of this device with the contents of `state`.
    ///
    /// The contents are *written*, register by register, in a window where each is writable if the
    /// saved status implies that it once was. A value that a write does not change is one that no
    /// guest could have reached.
    pub(super) fn restored(&self, state: &RegistersState) -> Result<Self, Error> {
        let status = DeviceStatus::from_bits(state.status).ok_or_else(|| {
            Error::other(format!(
                "no driver can reach device status {:#04x}",
                state.status
            ))
        })?;
        let (saved, expected) = (state.queues.len(), self.queues.len());
        if saved != expected {
            return Err(Error::other(format!(
                "{saved} queues instead of {expected}: give the device as many as it had"
            )));
        }
        let mut new = self.clone();
        new.reset();
        if status.has(DRIVER) {
            new.status = DeviceStatus::DRIVEN;
        }
        for (select, half) in [(0, Half::Low), (1, Half::High)] {
            new.driver_feature_select = select;
            new.set_driver_features(word(state.driver_features, half));
        }
        if status.has(FEATURES_OK) {
            if !new.features_acceptable() {
                return Err(Error::other(format!(
                    "the driver's features lack VERSION_1 or have bits that this device does not \
                     offer ({:#x})",
                    state.driver_features & !self.offer
                )));
            }
            new.status = DeviceStatus::AGREED;
        }
        for (index, queue) in (0..).zip(&state.queues) {
            new.queue_select = index;
            new.set_queue_size(queue.addresses.size);
            for (area, value) in [
                (Area::Descriptor, queue.addresses.descriptor),
                (Area::Driver, queue.addresses.driver),
                (Area::Device, queue.addresses.device),
            ] {
                for half in [Half::Low, Half::High] {
                    new.set(Register::Address(area, half), word(value.0, half));
                }
            }
            new.set_queue_vector(u32::from(queue.vector));
            new.set(Register::QueueEnable, u32::from(queue.enabled));
            new.set_reset(queue.reset, status);
            if new.queue().map(|queue| queue.state) != Some(*queue) {
                return Err(Error::other(format!(
                    "no driver can reach the registers of queue {index}"
                )));
            }
        }
        new.config_vector = new.vector(u32::from(state.config_vector));
        new.device_feature_select = state.device_feature_select;
        new.driver_feature_select = state.driver_feature_select;
        new.queue_select = state.queue_select;
        new.generation = state.generation;
        new.status = status;
        if new.save() == *state {
            return Ok(new);
        }
        Err(Error::other(
            "a register holds a value that no driver can write in that status",
        ))
    }
}
