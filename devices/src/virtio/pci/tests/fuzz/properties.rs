//! Sequences for the state machine, and the replay of the seed corpus.

use proptest::prelude::*;

use super::super::rig::{FAIL_CHANGE, FAIL_SAVE, FAIL_START, REFUSE, VERSION_1};
use super::*;

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

#[test]
fn the_corpus_of_the_transport_keeps_the_invariants() {
    let seeds = || crate::steps::generated(32, step());
    crate::corpus::replay("transport", seeds, transport_anything);
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

    #[test]
    fn any_input(input in prop::collection::vec(any::<u8>(), 0..300)) {
        transport_anything(&input);
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
