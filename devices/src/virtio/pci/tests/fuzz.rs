//! Fuzzes the transport's state machine with arbitrary sequences of accesses, events, BAR moves and
//! saves. The model backend panics when it is called out of order. After each step the invariants
//! below are checked against the registers. The fuzz target `transport` sends any sequence of steps
//! through the same function.

#[cfg(test)]
mod properties;

use serde::{Deserialize, Serialize};

use super::rig::{
    FAIL_RESTORE, MAX_SIZES, PACKED, RING_RESET, Rig, Stage, WINDOW, WINDOW_LEN, reg,
};
use crate::hypervisor::MsiMessage;
use crate::pci::PciFunction;
use crate::testing::Reached;
use crate::virtio::backend::Outcome;
use crate::virtio::status::{DRIVER_OK, DeviceStatus, FEATURES_OK, NEEDS_RESET};

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Step {
    /// Any access anywhere in the BAR.
    Bar(u64, usize, u64),
    /// A write of a common register at its width.
    Common(u64, u64),
    Status(u8),
    Features(u64),
    /// A complete start by a driver, with one queue set up arbitrarily.
    Start(u64, (u64, u64, u64)),
    SetUpQueue(u64, u64, u64),
    ResetQueue(u64),
    Config(u64, usize, u64),
    MoveBar(u64),
    Decode(bool),
    Kick(u64),
    Event(bool, bool),
    /// Save; then resume in the same device, or in a fresh one.
    Save,
    Restart,
}

impl Step {
    /// The step with numbers within the reach of a guest.
    fn bounded(self) -> Self {
        match self {
            Self::Bar(offset, width, value) => Self::Bar(offset % 0x2_0000, width % 9, value),
            Self::Common(offset, value) => Self::Common(offset % 0x1000, value),
            Self::Config(offset, width, value) => Self::Config(offset % 0x1000, width % 9, value),
            Self::MoveBar(place) => Self::MoveBar(place % 200),
            Self::Kick(queue) => Self::Kick(queue % 16),
            step => step,
        }
    }
}

/// Runs any sequence of accesses, events, BAR moves and saves against the model.
pub fn transport_anything(input: &[u8]) {
    let Some((&variant, rest)) = input.split_first() else {
        return;
    };
    let rig = if variant & 1 == 0 {
        Rig::new()
    } else {
        Rig::cold()
    };
    let doorbells = (0..5).filter(|queue| variant >> 1 >> queue & 1 == 1);
    rig.seen.lock().doorbells = doorbells.collect();
    for step in crate::steps::steps::<Step>(rest) {
        run(&rig, step.bounded());
        invariants(&rig);
    }
}

fn run(rig: &Rig, step: Step) {
    match step {
        Step::Bar(offset, width, value) => {
            rig.write(offset, width, value);
            rig.read(offset, width);
        }
        Step::Common(offset, value) => {
            let narrow = (0x10..0x20).contains(&offset) || offset == reg::QUEUE_RESET;
            let width = if narrow { 2 } else { 4 };
            rig.write(offset, width, value);
        }
        Step::Status(status) => {
            let sized = u64::from(status);
            rig.set_status(sized);
            if status == 0 && mapped(rig) {
                assert_eq!((rig.status(), rig.stage()), (0, Stage::Inactive));
            }
        }
        Step::Features(features) => rig.set_features(features),
        Step::Start(features, (queue, size, vector)) => {
            if !mapped(rig) {
                run(rig, Step::MoveBar(3));
                run(rig, Step::Decode(true));
            }
            rig.agree(features);
            rig.write(reg::CONFIG_VECTOR, 2, vector);
            rig.set_up_queue(queue, size, vector);
            rig.set_up_queue(0, 128, 1);
            rig.set_status(15);
        }
        Step::SetUpQueue(queue, size, vector) => rig.set_up_queue(queue, size, vector),
        Step::ResetQueue(queue) => {
            rig.write(reg::QUEUE_SELECT, 2, queue);
            rig.write(reg::QUEUE_RESET, 2, 1);
            // A driver that waits for the reset does not wait for ever.
            if mapped(rig) {
                assert_eq!(rig.read(reg::QUEUE_RESET, 2), 0);
            }
        }
        Step::Config(offset, width, value) => {
            rig.config_write(offset, width, value);
            rig.config_read(offset, width);
        }
        Step::MoveBar(place) => {
            let address = WINDOW + place * 0x2_0000;
            rig.config_write(0x14, 4, address >> 32);
            rig.config_write(0x10, 4, address & 0xffff_ffff);
        }
        Step::Decode(on) => rig.config_write(4, 2, if on { 6 } else { 0 }),
        Step::Kick(queue) => rig.write(0x1_0000 + 4096 * queue, 2, queue),
        Step::Event(config_changed, needs_reset) => rig.report(Outcome {
            config_changed,
            needs_reset,
        }),
        Step::Save => save(rig),
        Step::Restart => rig.pci.reset(),
    }
}

/// A state that a guest has reached is always accepted, here and elsewhere, and is saved again
/// unchanged.
fn save(rig: &Rig) {
    let Ok(state) = rig.device.save() else { return };
    let fails = state.registers.driver_features & FAIL_RESTORE != 0;
    let other = Rig::cold();
    match other.device.restore(&state) {
        Ok(()) => {
            other.pci.remap();
            invariants(&other);
            let mut again = other.device.save().unwrap();
            for (entry, saved) in again.msix.entries.iter_mut().zip(&state.msix.entries) {
                // A restore triggers vectors itself, so more vectors may be pending, but not fewer.
                assert!(entry.pending || !saved.pending);
                entry.pending = saved.pending;
            }
            assert_eq!(again, state);
        }
        Err(error) => assert!(fails && state.backend.is_some(), "{error:?}"),
    }
    if state.backend.is_some() {
        assert_eq!(rig.device.restore(&state).is_err(), fails);
    }
}

fn mapped(rig: &Rig) -> bool {
    let bar = rig.device.bars()[0];
    let last = WINDOW + WINDOW_LEN - bar.size;
    bar.decoded && (WINDOW..=last).contains(&bar.address)
}

fn invariants(rig: &Rig) {
    let transport = rig.device.transport.lock();
    let registers = transport.common.save();
    let table = transport.msix.save();
    let control = {
        let offset = u16::from(transport.capabilities.msix) + 2;
        transport.config_space.read_u16(offset)
    };
    drop(transport);

    let status = DeviceStatus::from_bits(registers.status).expect("a status that can be");
    let stage = rig.stage();
    if status.has(NEEDS_RESET) {
        assert!(rig.device.is_broken());
    } else if status.has(DRIVER_OK) {
        assert_eq!(stage, Stage::Active);
    } else if status.has(FEATURES_OK) {
        assert_eq!(stage, Stage::Negotiated);
    } else {
        assert_eq!(stage, Stage::Inactive);
    }

    for (queue, max) in registers.queues.iter().zip(MAX_SIZES) {
        let size = queue.addresses.size;
        assert!(
            size <= max && (size > 0 || max == 0),
            "size {size} of {max}"
        );
        let packed = registers.driver_features & PACKED != 0;
        assert!(packed || size == 0 || size.is_power_of_two());
        assert!(queue.vector <= 4 || queue.vector == 0xffff);
        assert!(!queue.reset || !queue.enabled);
        let resets = registers.driver_features & RING_RESET != 0;
        assert!(!queue.reset || resets && status.has(DRIVER_OK));
    }

    // The active state matches the registers.
    if stage == Stage::Active {
        let seen = rig.seen.lock();
        let activation = seen.activation.as_ref().unwrap();
        assert_eq!(activation.features, registers.driver_features);
        let enabled: Vec<_> = (0u16..)
            .zip(&registers.queues)
            .filter(|(_, queue)| queue.enabled)
            .collect();
        assert_eq!(activation.queues.len(), enabled.len());
        for (running, (index, queue)) in activation.queues.iter().zip(enabled) {
            assert_eq!(running.index, index);
            assert_eq!(running.addresses, queue.addresses);
            if !status.has(NEEDS_RESET) {
                assert_eq!(running.call.is_some(), queue.vector != 0xffff);
            }
        }
    }

    // Kicks have a target wherever the BAR is decoded: the device's own page if it has one and the
    // queue runs, else the eventfd.
    let bar = rig.device.bars()[0];
    let pages = rig.seen.lock().doorbells.clone();
    let runs = stage == Stage::Active && !status.has(NEEDS_RESET);
    let expected: Vec<Reached> = if mapped(rig) {
        (0u16..)
            .zip(&registers.queues)
            .map(|(index, queue)| {
                let address = bar.address + 0x1_0000 + u64::from(index) * 4096;
                if runs && queue.enabled && pages.contains(&index) {
                    Reached::Page(address, u64::from(index))
                } else {
                    Reached::Eventfd(address)
                }
            })
            .collect()
    } else {
        Vec::new()
    };
    assert_eq!(rig.doorbells.all(), expected);

    // Vectors are routed according to the table and Message Control.
    for (number, entry) in table.entries.iter().enumerate() {
        let deliver = control & 0xc000 == 0x8000 && !entry.masked;
        let message = MsiMessage {
            address: entry.address,
            data: entry.data,
        };
        assert_eq!(rig.vectors.get(number).route(), deliver.then_some(message));
    }
}
