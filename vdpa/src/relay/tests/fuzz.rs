//! Relays between any driver and any device, in both ring formats: for the fuzz target `relay`, and
//! for the tests below, which need no fuzzer.
//!
//! The first byte selects the format, the features and the mode. In the honest mode both models
//! follow the rules, in any order: each chain comes back once, and no signal is lost. In the
//! hostile mode driver and device write anything into the rings: a pass ends, and the relay reports
//! only guest memory.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::model::{RingSim, SIZE, Space, layout};
use super::packed;
use crate::iova::DeviceAddress;
use crate::relay::{Dirty, Strategy as How, UsedShadow};
use crate::{Error, ErrorKind};

/// One action of the driver, the device or the VMM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Step {
    Add,
    Fetch(u8),
    Complete(u8),
    Pass,
    Take,
    Interrupts(bool),
    Change(u8),
    /// The device is reset and starts again (packed rings).
    Restart(u8),
    /// One side writes any bytes into a ring (hostile mode).
    Scribble {
        private: bool,
        at: u64,
        bytes: Vec<u8>,
    },
    /// The device returns any chain (hostile mode).
    Use {
        id: u32,
        len: u32,
    },
}

pub(super) fn how(number: u8) -> How {
    match number % 3 {
        0 => How::Direct,
        1 => How::UsedShadow,
        _ => How::FullShadow,
    }
}

/// Runs any steps; see the module.
pub fn relay_anything(input: &[u8]) {
    let Some((&variant, rest)) = input.split_first() else {
        return;
    };
    let steps = crate::steps::steps(rest);
    match variant & 3 {
        0 => honest(variant, steps),
        1 => hostile(variant, steps),
        2 => packed::fuzz::honest(variant, steps),
        _ => packed::fuzz::hostile(variant, steps),
    }
}

/// Whether the variant has this bit.
pub(super) fn has(variant: u8, bit: u8) -> bool {
    variant >> bit & 1 == 1
}

/// A change is only refused while the device holds chains from before the relay.
pub(super) fn check_change(changed: Result<(), Error>) {
    if let Err(error) = changed {
        assert_eq!(error.kind(), ErrorKind::InFlightUnknown, "{error}");
    }
}

fn honest(variant: u8, steps: impl Iterator<Item = Step>) {
    let (event_idx, indirect, reorders) = (has(variant, 2), has(variant, 3), has(variant, 4));
    let start = if has(variant, 5) { 65533 } else { 0 };
    let mut sim = RingSim::new(event_idx, indirect, start);
    if has(variant, 6) {
        sim.guest.sends();
    }
    for step in steps {
        match step {
            Step::Add => sim.add(),
            Step::Fetch(most) => sim.fetch(most.into()),
            Step::Complete(which) => sim.complete(if reorders { which.into() } else { 0 }),
            Step::Pass => {
                sim.pass();
            }
            Step::Take => sim.take(),
            Step::Interrupts(enabled) => sim.napi(enabled),
            Step::Change(target) => {
                let is_direct = sim.strategy() == How::Direct;
                if is_direct && how(target) == How::FullShadow && !sim.device.held.is_empty() {
                    sim.change(How::UsedShadow).unwrap();
                }
                check_change(sim.change(how(target)));
            }
            Step::Restart(_) | Step::Scribble { .. } | Step::Use { .. } => {}
        }
    }
    sim.settle();
}

/// Writes a few bytes into a ring, as either side might.
pub(super) fn scribble(space: &Space, private: bool, at: u64, bytes: &[u8]) {
    let bytes = bytes.get(..bytes.len().min(16)).unwrap_or_default();
    if private {
        let size = layout().size() + UsedShadow::memory_size(SIZE);
        space.write((1 << 40) + at % (size - 16), bytes);
    } else {
        // Descriptors, avail and used ring and indirect tables.
        let area = [0x1000, 0x2000, 0x3000, 0x8000][usize::try_from(at % 4).unwrap()];
        space.write(area + (at / 4) % 140, bytes);
    }
}

/// Accepts only guest memory as written.
#[derive(Debug)]
pub(super) struct GuestOnly;

impl Dirty for GuestOnly {
    fn mark(&self, DeviceAddress(address): DeviceAddress, len: u32) {
        assert!(
            address.saturating_add(len.into()) <= 1 << 20,
            "{address:#x}"
        );
    }
}

fn hostile(variant: u8, steps: impl Iterator<Item = Step>) {
    let mut sim = RingSim::new(has(variant, 2), has(variant, 3), 0);
    let shadow = if has(variant, 4) {
        How::UsedShadow
    } else {
        How::FullShadow
    };
    sim.change(shadow).unwrap();
    if has(variant, 5) {
        // IN_ORDER, which the honest models do not follow.
        let private = Arc::clone(&sim.space.private);
        let (at, events) = (layout().size(), has(variant, 2));
        let queue = UsedShadow::new(sim.ring(), private, at, events, true, 0).unwrap();
        sim.relay = Some(Box::new(queue));
    }
    for step in steps {
        match step {
            Step::Add => sim.add(),
            Step::Scribble { private, at, bytes } => {
                scribble(&sim.space, private, at, &bytes);
            }
            Step::Use { id, len } => {
                sim.device.put(id, len);
                sim.device.publish(sim.device.used.wrapping_add(1));
            }
            _ => {
                let relay = sim.relay.as_mut().unwrap();
                if relay.pass(&GuestOnly).is_err() {
                    // Another pass, and giving up, must stay harmless.
                    let _ = relay.pass(&GuestOnly);
                    let _ = relay.finish(&GuestOnly).and_then(|_| relay.settle());
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::relay::used_shadow::{self, PASS};
    use crate::steps::{encoded, generated};

    fn step() -> impl Strategy<Value = Step> + Clone {
        let bytes = prop::collection::vec(prop_oneof![0u8..9, Just(0x80), any::<u8>()], 1..16);
        let scribble = (any::<bool>(), any::<u64>(), bytes);
        let scribble =
            scribble.prop_map(|(private, at, bytes)| Step::Scribble { private, at, bytes });
        prop_oneof![
            5 => Just(Step::Add),
            4 => (1..=8u8).prop_map(Step::Fetch),
            5 => any::<u8>().prop_map(Step::Complete),
            5 => Just(Step::Pass),
            4 => Just(Step::Take),
            2 => any::<bool>().prop_map(Step::Interrupts),
            1 => (0..3u8).prop_map(Step::Change),
            1 => (0..3u8).prop_map(Step::Restart),
            2 => scribble,
            1 => (0..9u32, 0..65u32).prop_map(|(id, len)| Step::Use { id, len }),
        ]
    }

    /// Traffic through each strategy; the ring wraps.
    fn valid() -> Vec<Step> {
        let mut steps = Vec::new();
        for target in [1, 2, 0] {
            steps.push(Step::Change(target));
            for round in 0..4 {
                steps.extend([
                    Step::Add,
                    Step::Pass,
                    Step::Add,
                    Step::Fetch(3),
                    Step::Interrupts(round % 2 == 0),
                    Step::Complete(round),
                    Step::Pass,
                    Step::Take,
                ]);
            }
        }
        steps
    }

    #[test]
    fn the_corpus_of_the_relays_loses_nothing() {
        let seeds = || {
            let variants = [0, 4, 12, 28, 36, 68, 2, 6, 14, 26];
            let valid = variants.map(|variant| encoded(variant, &valid()));
            let mut seeds = valid.to_vec();
            seeds.extend(generated(48, step()));
            seeds
        };
        crate::corpus::replay("relay", seeds, relay_anything);
    }

    /// The corpus finds a relay whose pass lacks any one step. Fences are the explorer's part: the
    /// models here run one after the other.
    #[test]
    fn the_corpus_of_the_relays_finds_each_mutant() {
        for (at, step) in PASS.into_iter().enumerate() {
            if step == used_shadow::Step::Fence {
                continue;
            }
            used_shadow::LEFT_OUT.set(Some(at));
            let failing = crate::corpus::failing("relay", relay_anything);
            used_shadow::LEFT_OUT.set(None);
            assert_ne!(failing, Vec::<String>::new(), "{step:?} can be left out");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn any_steps_lose_nothing(
            variant in any::<u8>(),
            steps in prop::collection::vec(step(), 1..100),
        ) {
            relay_anything(&encoded(variant, &steps));
        }
    }
}
