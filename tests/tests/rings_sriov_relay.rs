//! Relays on virtual functions behind vp_vdpa, which can neither suspend nor report or accept a
//! ring's position. So every change is a reset, and rings begin at 0.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings/mod.rs"]
mod rings;

use std::error::Error as _;

use lab::endurance;
use lab::sriov::{SriovNic, VfDevice};
use vdpa::netdev::{Chains, Options};
use vdpa::relay::{Reason, Strategy, choose};

use self::rings::frame::Mac;
use self::rings::netdev::Relayed;
use self::rings::scene::{Loss, Scene, options, play, shadow_rounds};

const EVENT_IDX: u64 = 1 << 29;

fn mac(device: &VfDevice<'_>) -> Mac {
    let text = device.function().mac();
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    [(); 6].map(|()| bytes.next().unwrap().unwrap())
}

fn two_functions(options: &Options, loss: Loss, act: impl FnOnce(&mut Scene<'_>)) {
    let nic = SriovNic::enable(2).unwrap();
    let [one, other] = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let devices = [&one, &other].map(|device| (device.path(), mac(device)));
    play(devices, options, loss, act);
}

/// Nothing works without a reset, which the choice predicts.
fn no_suspend(machine: &mut Relayed) {
    let device = machine.device();
    let chosen = choose(device.info(), device.backend_features(), device.features());
    assert_eq!(chosen, (Strategy::FullShadow, Reason::NoSuspend));
    let error = machine.change(&[Strategy::UsedShadow]);
    let cause = error.source().unwrap().to_string();
    assert!(cause.contains("suspend"), "{cause}");
}

/// 100 restarts and more with `--cycles 10`.
fn often_shadowed(withhold: u64, chains: Chains) {
    let rounds = usize::try_from(endurance::cycles().unwrap().div_ceil(3)).unwrap();
    two_functions(&options(1, withhold, chains), Loss::OneFrame, |scene| {
        scene.machines.iter_mut().for_each(no_suspend);
        shadow_rounds(scene, rounds);
        scene.machines.iter_mut().for_each(no_suspend);
    });
}

#[test]
fn with_event_idx() {
    often_shadowed(0, Chains::Indirect);
}

#[test]
fn without_event_idx() {
    often_shadowed(EVENT_IDX, Chains::Single);
}

/// The switch chooses the queue of a frame.
#[test]
fn two_queue_pairs() {
    two_functions(&options(2, 0, Chains::Pair), Loss::AllUnderWay, |scene| {
        scene.shadow_often();
        scene.shadow_often();
    });
}
