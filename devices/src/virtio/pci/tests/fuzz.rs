//! Fuzzes the transport's state machine with arbitrary sequences of accesses, events, BAR moves and
//! saves. The model backend panics when it is called out of order. After each step the invariants
//! below are checked against the registers.

use proptest::prelude::*;

use super::rig::{
    FAIL_CHANGE, FAIL_RESTORE, FAIL_SAVE, FAIL_START, MAX_SIZES, PACKED, REFUSE, RING_RESET, Rig,
    Stage, VERSION_1, WINDOW, WINDOW_LEN, reg,
};
use crate::hypervisor::MsiMessage;
use crate::pci::PciFunction;
use crate::testing::Reached;
use crate::virtio::backend::Outcome;
use crate::virtio::status::{DRIVER_OK, DeviceStatus, FEATURES_OK, NEEDS_RESET};

#[derive(Debug, Clone)]
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

fn features() -> impl Strategy<Value = u64> {
    let odd = prop_oneof![
        Just(PACKED),
        Just(REFUSE),
        Just(FAIL_START),
        Just(FAIL_CHANGE),
        Just(FAIL_SAVE),
        Just(FAIL_RESTORE),
        any::<u64>(),
    ];
    prop_oneof![
        3 => Just(VERSION_1),
        2 => Just(VERSION_1 | RING_RESET),
        1 => Just(0),
        2 => (odd, any::<bool>()).prop_map(|(bit, reset)| {
            VERSION_1 | bit | if reset { RING_RESET } else { 0 }
        }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let width = prop_oneof![Just(1usize), Just(2), Just(4), Just(8), 0usize..9];
    let offset = prop_oneof![
        0u64..0x40,
        0x1000u64..0x1004,
        0x2000u64..0x2010,
        0x8000u64..0x8060,
        0xc000u64..0xc010,
        0u64..0x2_0000
    ];
    let value = prop_oneof![0u64..16, any::<u64>(), Just(u64::MAX)];
    let register = prop_oneof![
        Just(reg::CONFIG_VECTOR),
        Just(reg::QUEUE_SELECT),
        Just(reg::QUEUE_SIZE),
        Just(reg::QUEUE_VECTOR),
        Just(reg::QUEUE_ENABLE),
        Just(reg::QUEUE_RESET),
        Just(reg::DRIVER_FEATURE_SELECT),
        Just(reg::DRIVER_FEATURE),
        Just(reg::QUEUE_DESC),
        Just(reg::QUEUE_DESC + 4),
    ];
    let status = prop_oneof![
        4 => prop::sample::select(vec![1u8, 3, 11, 15]),
        1 => Just(0u8),
        1 => any::<u8>(),
    ];
    let small = prop_oneof![0u64..6, 0u64..0x1_0000, Just(64u64), Just(256)];
    let queue = (0u64..6, small.clone(), 0u64..7);
    prop_oneof![
        4 => (offset, width, value.clone()).prop_map(|(o, w, v)| Step::Bar(o, w, v)),
        6 => (register, small.clone()).prop_map(|(o, v)| Step::Common(o, v)),
        8 => status.prop_map(Step::Status),
        4 => features().prop_map(Step::Features),
        3 => (features(), queue.clone()).prop_map(|(f, q)| Step::Start(f, q)),
        4 => queue.prop_map(|(q, s, v)| Step::SetUpQueue(q, s, v)),
        4 => (0u64..3).prop_map(Step::ResetQueue),
        3 => (0u64..300, 1usize..9, value).prop_map(|(o, w, v)| Step::Config(o, w, v)),
        1 => (0u64..200).prop_map(Step::MoveBar),
        1 => any::<bool>().prop_map(Step::Decode),
        1 => (0u64..8).prop_map(Step::Kick),
        2 => (any::<bool>(), prop::bool::weighted(0.2)).prop_map(|(c, n)| Step::Event(c, n)),
        1 => Just(Step::Save),
        1 => Just(Step::Restart),
    ]
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence(
        warm in any::<bool>(),
        doorbells in prop::collection::vec(0u16..5, 0..4),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let rig = if warm { Rig::new() } else { Rig::cold() };
        rig.seen.lock().doorbells = doorbells;
        for step in steps {
            run(&rig, step);
            invariants(&rig);
        }
    }

    /// Invalid bytes, and states with one changed byte, are refused or accepted without a panic. An
    /// accepted state keeps the invariants.
    #[test]
    fn any_saved_bytes(position in any::<prop::sample::Index>(), value in any::<u8>()) {
        let source = Rig::new();
        source.start(VERSION_1);
        let mut bytes = postcard::to_stdvec(&source.device.save().unwrap()).unwrap();
        let len = bytes.len();
        bytes[position.index(len)] = value;
        if let Ok(state) = postcard::from_bytes(&bytes) {
            let target = Rig::cold();
            if let Ok(()) = target.device.restore(&state) {
                target.pci.remap();
                invariants(&target);
            }
        }
    }
}
