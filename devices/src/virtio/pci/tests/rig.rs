//! A machine with one virtio function, and the model backend behind it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use crate::bus::{Bus, BusDevice};
use crate::hypervisor::DevicePages;
use crate::pci::{Ecam, MmioWindow, PciBus, PciFunction, Slot};
use crate::testing::{FakeDeviceMappings, FakePage, FakeVectors, Reached};
use crate::virtio::backend::{
    Activation, Backend, Event, Hardware, Outcome, QueueChange, ReplacedDevice, SavedState,
    Translated,
};
use crate::virtio::iommu::Recorder;
use crate::virtio::pci::VirtioPciDevice;
use crate::{Error, ErrorKind};

pub(super) const WINDOW: u64 = 0x80_0000_0000;
pub(super) const WINDOW_LEN: u64 = 0x100_0000;
pub(super) const VERSION_1: u64 = 1 << 32;
pub(super) const PACKED: u64 = 1 << 34;
pub(super) const RING_RESET: u64 = 1 << 40;
/// The model refuses negotiation with this bit.
pub(super) const REFUSE: u64 = 1 << 3;
/// The model fails to activate with this bit.
pub(super) const FAIL_START: u64 = 1 << 4;
/// The model fails at changes with this bit.
pub(super) const FAIL_CHANGE: u64 = 1 << 5;
/// The model cannot be saved with this bit.
pub(super) const FAIL_SAVE: u64 = 1 << 6;
/// The model fails to restore with this bit.
pub(super) const FAIL_RESTORE: u64 = 1 << 7;
pub(super) const OFFER: u64 =
    VERSION_1 | PACKED | RING_RESET | REFUSE | FAIL_START | FAIL_CHANGE | FAIL_SAVE | FAIL_RESTORE;
pub(super) const MAX_SIZES: [u16; 4] = [256, 64, 0, 32768];
pub(super) const CONFIG_LEN: u32 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Inactive,
    Negotiated,
    Active,
    /// An error was returned: only reset may follow.
    Failed,
    Saved,
}

/// The model's record for a test.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) stage: Stage,
    pub(super) resets: usize,
    pub(super) activations: usize,
    pub(super) activation: Option<Activation>,
    pub(super) calls: Vec<(u16, Option<Arc<EventFd>>)>,
    pub(super) config: [u8; 10],
    pub(super) outcome: Outcome,
    pub(super) tokens: Vec<u16>,
    /// The queues for which the device has a doorbell.
    pub(super) doorbells: Vec<u16>,
    /// The features that were requested at each restore.
    pub(super) checked_features: Vec<u64>,
    /// The device that it was to replace.
    pub(super) replaced: Option<ReplacedDevice>,
    pub(super) fails_next_restore: bool,
    /// Saving leaves no queue with a doorbell.
    pub(super) loses_doorbells: bool,
    /// A ring is broken: the model can neither be saved nor log writes.
    pub(super) broken_ring: bool,
    /// The device itself asks for a reset.
    pub(super) failed: bool,
    /// A reset does not end.
    pub(super) resetting: bool,
    /// The host removes the device.
    pub(super) removal: Option<Outcome>,
    pub(super) closed: bool,
    /// The guest's doorbells, to be inspected in `hand_over` and `close`.
    pub(super) watched: Option<Arc<FakeDeviceMappings>>,
    /// The targets of the guest's kicks in `hand_over`.
    pub(super) reached: Vec<Reached>,
    /// How often it took its place back.
    pub(super) rolled_back: usize,
    pub(super) dropped: bool,
}

/// The properties of a model that differs from the default.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub(super) device_type: u32,
    pub(super) offer: u64,
    pub(super) max_sizes: Vec<u16>,
    /// The sizes from the first negotiation on, if they differ.
    pub(super) negotiated_sizes: Option<Vec<u16>>,
    pub(super) config_len: u32,
    /// The error with which it refuses to replace another device.
    pub(super) refuses: Option<&'static str>,
    /// Negotiates everything but fails to restore.
    pub(super) fails_restore: bool,
    /// Refuses to be replaced.
    pub(super) keeps_place: bool,
    /// The features that a driver may rely on at a restore.
    pub(super) bears: u64,
    pub(super) events: Vec<Event>,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            device_type: 1,
            // NOTIFICATION_DATA must not be offered.
            offer: OFFER | 1 << 38,
            max_sizes: MAX_SIZES.to_vec(),
            negotiated_sizes: None,
            config_len: CONFIG_LEN,
            refuses: None,
            fails_restore: false,
            keeps_place: false,
            bears: u64::MAX,
            events: Vec::new(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) seen: Arc<Mutex<Seen>>,
    shape: Shape,
    /// It is behind an IOMMU, and reaches what this records.
    pub(super) translated: Option<Arc<Mutex<Recorder>>>,
}

impl Drop for Model {
    fn drop(&mut self) {
        self.seen.lock().dropped = true;
    }
}

impl Model {
    pub(super) fn new(shape: Shape) -> (Self, Arc<Mutex<Seen>>) {
        let seen = Arc::new(Mutex::new(Seen {
            stage: Stage::Inactive,
            resets: 0,
            activations: 0,
            activation: None,
            calls: Vec::new(),
            config: *b"0123456789",
            outcome: Outcome::default(),
            tokens: Vec::new(),
            doorbells: Vec::new(),
            replaced: None,
            checked_features: Vec::new(),
            fails_next_restore: shape.fails_restore,
            loses_doorbells: false,
            broken_ring: false,
            failed: false,
            resetting: false,
            removal: None,
            closed: false,
            watched: None,
            reached: Vec::new(),
            rolled_back: 0,
            dropped: false,
        }));
        let model = Self {
            seen: Arc::clone(&seen),
            shape,
            translated: None,
        };
        (model, seen)
    }
}

fn check(activation: &Activation) {
    assert_eq!(activation.features & !OFFER, 0);
    assert_ne!(activation.features & VERSION_1, 0);
    let mut last = None;
    for queue in &activation.queues {
        let max = MAX_SIZES[usize::from(queue.index)];
        let size = queue.addresses.size;
        assert!(size > 0 && size <= max, "queue size {size} of {max}");
        assert!(size.is_power_of_two() || activation.features & PACKED != 0);
        assert!(last < Some(queue.index), "queues ascend");
        last = Some(queue.index);
    }
}

impl Backend for Model {
    fn device_type(&self) -> u32 {
        self.shape.device_type
    }
    fn queue_max_sizes(&self) -> &[u16] {
        &self.shape.max_sizes
    }
    fn features(&self) -> u64 {
        self.shape.offer
    }
    fn config_len(&self) -> u32 {
        self.shape.config_len
    }
    fn read_config(&mut self, offset: u32, data: &mut [u8]) {
        let offset = usize::try_from(offset).unwrap();
        data.copy_from_slice(&self.seen.lock().config[offset..offset + data.len()]);
    }
    fn write_config(&mut self, offset: u32, data: &[u8]) {
        let offset = usize::try_from(offset).unwrap();
        self.seen.lock().config[offset..offset + data.len()].copy_from_slice(data);
    }
    fn events(&mut self, kicks: &[Arc<EventFd>]) -> Vec<Event> {
        // The kicks of the transport, whose number another backend's queues may have determined.
        assert!([MAX_SIZES.len(), self.shape.max_sizes.len()].contains(&kicks.len()));
        self.shape.events.clone()
    }
    fn negotiate(&mut self, features: u64) -> Result<(), Error> {
        let mut seen = self.seen.lock();
        assert_eq!(seen.stage, Stage::Inactive, "negotiate");
        if seen.closed {
            return Err(Error::other("removed"));
        }
        assert_eq!(features & !OFFER, 0);
        assert_ne!(features & VERSION_1, 0);
        if features & REFUSE != 0 {
            return Err(Error::other("refused"));
        }
        seen.stage = Stage::Negotiated;
        if let Some(sizes) = self.shape.negotiated_sizes.take() {
            self.shape.max_sizes = sizes;
        }
        Ok(())
    }
    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        let mut seen = self.seen.lock();
        assert_eq!(seen.stage, Stage::Negotiated, "activate");
        check(&activation);
        if activation.features & FAIL_START != 0 {
            seen.stage = Stage::Failed;
            return Err(Error::other("no start"));
        }
        seen.stage = Stage::Active;
        seen.activations += 1;
        seen.activation = Some(activation);
        Ok(())
    }
    fn change(&mut self, change: QueueChange) -> Result<(), Error> {
        let mut seen = self.seen.lock();
        assert_eq!(seen.stage, Stage::Active, "change");
        let activation = seen.activation.as_mut().unwrap();
        let features = activation.features;
        match change {
            QueueChange::Call { index, call } => {
                let queue = activation
                    .queues
                    .iter_mut()
                    .find(|queue| queue.index == index);
                queue.unwrap().call = call.clone();
                seen.calls.push((index, call));
            }
            QueueChange::Enable(queue) => {
                assert!(activation.queues.iter().all(|one| one.index != queue.index));
                activation.queues.push(queue);
                activation.queues.sort_by_key(|queue| queue.index);
                check(activation);
            }
            QueueChange::Reset { index } => {
                let before = activation.queues.len();
                activation.queues.retain(|queue| queue.index != index);
                assert_eq!(activation.queues.len(), before - 1, "it was enabled");
            }
        }
        if features & FAIL_CHANGE != 0 {
            seen.stage = Stage::Failed;
            return Err(Error::other("no change"));
        }
        Ok(())
    }
    fn reset(&mut self) {
        let mut seen = self.seen.lock();
        seen.stage = Stage::Inactive;
        seen.activation = None;
        seen.failed = false;
        seen.resets += 1;
    }
    fn is_resetting(&self) -> bool {
        self.seen.lock().resetting
    }
    fn await_reset(&mut self, _limit: Duration) -> bool {
        !self.is_resetting()
    }
    fn process(&mut self, token: u16) -> Outcome {
        let mut seen = self.seen.lock();
        seen.tokens.push(token);
        std::mem::take(&mut seen.outcome)
    }
    fn save(&mut self) -> Result<SavedState, Error> {
        let mut seen = self.seen.lock();
        assert_eq!(seen.stage, Stage::Active, "save");
        if seen.broken_ring {
            return Err(broken_ring());
        }
        if seen.loses_doorbells {
            seen.doorbells.clear();
        }
        if seen.activation.as_ref().unwrap().features & FAIL_SAVE != 0 {
            return Err(Error::other("not this one"));
        }
        seen.stage = Stage::Saved;
        Ok(SavedState {
            name: "model".into(),
            version: 1,
            payload: vec![1, 2, 3],
        })
    }
    fn check_state(&self, state: &SavedState) -> Result<(), Error> {
        match state.name.as_str() {
            "model" => Ok(()),
            _ => Err(Error::other("of another device")),
        }
    }
    fn restore(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error> {
        let mut seen = self.seen.lock();
        assert!(
            matches!(
                seen.stage,
                Stage::Inactive | Stage::Negotiated | Stage::Saved
            ),
            "restore"
        );
        check(&activation);
        if seen.fails_next_restore {
            return Err(Error::other("cannot now"));
        }
        if (state.version, state.payload.as_slice()) != (1, &[1, 2, 3]) {
            return Err(Error::other("not mine"));
        }
        if activation.features & FAIL_RESTORE != 0 {
            return Err(Error::other("cannot"));
        }
        seen.stage = Stage::Active;
        seen.activation = Some(activation);
        Ok(())
    }
    fn hardware(&mut self) -> Option<&mut dyn Hardware> {
        Some(self)
    }
    fn translated(&mut self) -> Option<&mut dyn Translated> {
        self.translated.as_mut().map(|recorder| recorder as _)
    }
}

impl Hardware for Model {
    fn doorbell(&self, queue: u16) -> Option<Arc<dyn DevicePages>> {
        let seen = self.seen.lock();
        assert_eq!(seen.stage, Stage::Active, "doorbell");
        let activation = seen.activation.as_ref().unwrap();
        let enabled = activation.queues.iter().any(|one| one.index == queue);
        assert!(enabled, "the doorbell of a queue that is not enabled");
        let has = seen.doorbells.contains(&queue);
        has.then(|| Arc::new(FakePage(queue)) as _)
    }
    fn announce(&mut self) -> Outcome {
        let seen = self.seen.lock();
        assert_eq!(seen.stage, Stage::Active, "announce");
        Outcome {
            config_changed: true,
            needs_reset: false,
        }
    }
    fn has_failed(&self) -> bool {
        self.seen.lock().failed
    }
    fn removal(&mut self) -> Option<Outcome> {
        let mut seen = self.seen.lock();
        let removal = seen.removal.filter(|_| !seen.closed);
        seen.failed |= removal.is_some_and(|outcome| outcome.needs_reset);
        removal
    }
    fn close(&mut self) -> Box<dyn Send> {
        let mut seen = self.seen.lock();
        let pages = seen.watched.as_ref().map_or(Vec::new(), |one| one.all());
        let pages = pages.iter().any(|page| matches!(page, Reached::Page(..)));
        assert!(!pages, "a page of the device is mapped");
        seen.closed = true;
        seen.stage = Stage::Failed;
        Box::new(())
    }
    fn hand_over(&mut self) -> Result<SavedState, Error> {
        {
            let mut seen = self.seen.lock();
            seen.reached = seen.watched.as_ref().map_or(Vec::new(), |one| one.all());
        }
        if self.shape.keeps_place {
            assert_eq!(self.seen.lock().stage, Stage::Active, "hand_over");
            return Err(Error::other("it is mine"));
        }
        self.save()
    }
    fn identity(&mut self) -> Result<SavedState, Error> {
        Ok(SavedState {
            name: "identity".into(),
            version: 1,
            payload: self.seen.lock().config.to_vec(),
        })
    }
    fn adopt(&mut self, replaced: &ReplacedDevice) -> Result<(), Error> {
        let mut seen = self.seen.lock();
        assert_eq!(seen.stage, Stage::Inactive, "adopt");
        seen.replaced = Some(replaced.clone());
        match self.shape.refuses {
            Some(words) => Err(Error::other(words)),
            None => Ok(()),
        }
    }
    fn check_adopted(&self, features: u64) -> Result<(), Error> {
        self.seen.lock().checked_features.push(features);
        match features & !self.shape.bears {
            0 => Ok(()),
            _ => Err(Error::other("smaller than the guest has seen")),
        }
    }
    fn roll_back(&mut self, state: &SavedState, activation: Activation) -> Result<(), Error> {
        let stage = self.seen.lock().stage;
        assert!(matches!(stage, Stage::Saved | Stage::Inactive), "roll_back");
        self.seen.lock().rolled_back += 1;
        self.restore(state, activation)
    }
    fn untracked_writes(&self) -> Vec<(u64, u64)> {
        Vec::new()
    }
    fn log_writes(&mut self, on: bool) -> Result<(), Error> {
        let seen = self.seen.lock();
        match seen.stage {
            _ if !on => Ok(()),
            Stage::Failed => Err(Error::other("it does not even stop")),
            Stage::Active if seen.broken_ring => Err(broken_ring()),
            _ => Ok(()),
        }
    }
}

fn broken_ring() -> Error {
    Error::new(ErrorKind::BrokenRing { queue: 1 }, "too far ahead")
}

/// Offsets in the common configuration.
pub(super) mod reg {
    pub(crate) const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub(crate) const DEVICE_FEATURE: u64 = 0x04;
    pub(crate) const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub(crate) const DRIVER_FEATURE: u64 = 0x0c;
    pub(crate) const CONFIG_VECTOR: u64 = 0x10;
    pub(crate) const NUM_QUEUES: u64 = 0x12;
    pub(crate) const STATUS: u64 = 0x14;
    pub(crate) const GENERATION: u64 = 0x15;
    pub(crate) const QUEUE_SELECT: u64 = 0x16;
    pub(crate) const QUEUE_SIZE: u64 = 0x18;
    pub(crate) const QUEUE_VECTOR: u64 = 0x1a;
    pub(crate) const QUEUE_ENABLE: u64 = 0x1c;
    pub(crate) const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub(crate) const QUEUE_DESC: u64 = 0x20;
    pub(crate) const QUEUE_RESET: u64 = 0x3a;
}

pub(super) struct Rig {
    pub(super) memory: Arc<Bus>,
    pub(super) pci: Arc<PciBus>,
    pub(super) ecam: Ecam,
    pub(super) slot: Slot,
    pub(super) device: Arc<VirtioPciDevice>,
    pub(super) vectors: FakeVectors,
    pub(super) doorbells: Arc<FakeDeviceMappings>,
    pub(super) seen: Arc<Mutex<Seen>>,
}

impl Rig {
    /// Creates a rig with BAR 0 at [`WINDOW`] and decoded, MSI-X enabled, and vector *n* unmasked
    /// with data *n*.
    pub(super) fn new() -> Self {
        Self::with(Shape::default())
    }

    /// As [`Rig::new`], in front of a model of this shape.
    pub(super) fn with(shape: Shape) -> Self {
        let rig = Self::cold_with(shape);
        rig.config_write(4, 2, 6);
        rig.config_write(rig.capability(0x11) + 2, 2, 0x8000);
        for vector in 0..=4 {
            let entry = 0x8000 + vector * 16;
            rig.write(entry, 8, 0xfee0_0000);
            rig.write(entry + 8, 4, vector);
            rig.write(entry + 12, 4, 0);
        }
        rig
    }

    /// Creates a rig as after power-on.
    pub(super) fn cold() -> Self {
        Self::cold_with(Shape::default())
    }

    /// Creates a rig as after power-on, in front of a model of this shape.
    pub(super) fn cold_with(shape: Shape) -> Self {
        let memory = Arc::new(Bus::new());
        let window = MmioWindow::new(WINDOW, WINDOW_LEN).unwrap();
        let pci = Arc::new(PciBus::new(&memory, window, None));
        let vectors = FakeVectors::new(100);
        let doorbells = Arc::new(FakeDeviceMappings::default());
        let (model, seen) = Model::new(shape);
        let device = VirtioPciDevice::new(Box::new(model), &vectors, doorbells.clone()).unwrap();
        let device = Arc::new(device);
        let slot = pci.add(None, device.clone()).unwrap();
        Self {
            memory,
            ecam: Ecam::new(Arc::clone(&pci)),
            pci,
            slot,
            device,
            vectors,
            doorbells,
            seen,
        }
    }

    pub(super) fn config_read(&self, offset: u64, width: usize) -> u64 {
        let mut data = [0; 8];
        let base = u64::from(self.slot.number()) << 15;
        self.ecam.read(base + offset, &mut data[..width]);
        u64::from_le_bytes(data)
    }

    pub(super) fn config_write(&self, offset: u64, width: usize, value: u64) {
        let base = u64::from(self.slot.number()) << 15;
        self.ecam
            .write(base + offset, &value.to_le_bytes()[..width]);
    }

    /// Returns the offset of the first capability with this ID.
    pub(super) fn capability(&self, id: u64) -> u64 {
        let capabilities = self.capabilities();
        let found = capabilities
            .iter()
            .find(|offset| self.config_read(**offset, 1) == id);
        *found.unwrap()
    }

    pub(super) fn capabilities(&self) -> Vec<u64> {
        let mut offsets = Vec::new();
        let mut next = self.config_read(0x34, 1);
        while next != 0 {
            offsets.push(next);
            assert!(offsets.len() < 48, "capability loop");
            next = self.config_read(next + 1, 1);
        }
        offsets
    }

    pub(super) fn bar(&self) -> u64 {
        self.device.bars()[0].address
    }

    pub(super) fn read(&self, offset: u64, width: usize) -> u64 {
        let mut data = [0; 8];
        self.memory.read(self.bar() + offset, &mut data[..width]);
        u64::from_le_bytes(data)
    }

    pub(super) fn write(&self, offset: u64, width: usize, value: u64) {
        self.memory
            .write(self.bar() + offset, &value.to_le_bytes()[..width]);
    }

    pub(super) fn status(&self) -> u64 {
        self.read(reg::STATUS, 1)
    }

    pub(super) fn set_status(&self, status: u64) {
        self.write(reg::STATUS, 1, status);
    }

    pub(super) fn set_features(&self, features: u64) {
        for select in 0..2 {
            self.write(reg::DRIVER_FEATURE_SELECT, 4, select);
            self.write(
                reg::DRIVER_FEATURE,
                4,
                features >> (32 * select) & 0xffff_ffff,
            );
        }
    }

    /// Runs the driver's sequence up to FEATURES_OK.
    pub(super) fn agree(&self, features: u64) {
        for status in [0, 1, 3] {
            self.set_status(status);
        }
        self.set_features(features);
        self.set_status(11);
    }

    pub(super) fn set_up_queue(&self, index: u64, size: u64, vector: u64) {
        self.write(reg::QUEUE_SELECT, 2, index);
        self.write(reg::QUEUE_SIZE, 2, size);
        self.write(reg::QUEUE_VECTOR, 2, vector);
        for area in 0..6 {
            self.write(reg::QUEUE_DESC + 4 * area, 4, 0x1000 * (area + 1));
        }
        self.write(reg::QUEUE_ENABLE, 2, 1);
    }

    /// Runs a driver with queues 0 and 1 on vectors 1 and 2, and vector 0 for configuration
    /// changes.
    pub(super) fn start(&self, features: u64) {
        self.agree(features);
        self.write(reg::CONFIG_VECTOR, 2, 0);
        self.set_up_queue(0, 128, 1);
        self.set_up_queue(1, 64, 2);
        self.set_status(15);
    }

    pub(super) fn stage(&self) -> Stage {
        self.seen.lock().stage
    }

    pub(super) fn report(&self, outcome: Outcome) {
        self.seen.lock().outcome = outcome;
        self.device.process(7);
    }

    /// Makes the device report that it needs a reset. Returns whether a backup is to replace it.
    pub(super) fn fail(&self) -> bool {
        {
            let mut seen = self.seen.lock();
            seen.failed = true;
            seen.outcome = Outcome {
                config_changed: true,
                needs_reset: true,
            };
        }
        self.device.process(7)
    }
}
