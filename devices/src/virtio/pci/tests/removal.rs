//! The host removes a device: its driver continues with another one, or is notified.

use super::rig::{Model, Rig, Shape, Stage, VERSION_1, reg};
use crate::testing::Reached;
use crate::virtio::backend::Outcome;

const NEEDS_RESET: u64 = 64;

/// A device that the host removes. With `failed` it does not work any more.
fn remove(rig: &Rig, failed: bool) {
    let mut seen = rig.seen.lock();
    seen.watched = Some(rig.doorbells.clone());
    seen.removal = Some(Outcome {
        config_changed: false,
        needs_reset: failed,
    });
}

#[test]
fn a_removed_device_that_works_hands_over_in_an_orderly_way() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    rig.device.set_has_backup(true);
    assert!(!rig.device.is_removed());
    remove(&rig, false);
    assert!(rig.device.is_removed());
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
    let (next, seen) = Model::new(Shape::default());
    let swapped = rig
        .device
        .swap(rig.device.replacement(Box::new(next)), None);
    assert!(swapped.unwrap().gap.is_some());
    assert_eq!((rig.status(), seen.lock().stage), (15, Stage::Active));
    assert!(!rig.device.is_removed());
}

#[test]
fn a_removed_device_that_does_not_answer_has_failed() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    rig.device.set_has_backup(true);
    remove(&rig, true);
    for _ in 0..2 {
        assert!(rig.device.is_removed());
        // It waits for its backup.
        assert_eq!(rig.status(), 15);
    }
    assert!(!rig.device.spurious_notify(0));
    rig.device.give_up();
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
}

#[test]
fn a_closed_device_needs_a_reset_and_never_starts_again() {
    let rig = Rig::new();
    rig.seen.lock().doorbells = vec![0];
    rig.start(VERSION_1);
    assert!(matches!(rig.doorbells.all()[0], Reached::Page(..)));
    let generation = rig.read(reg::GENERATION, 1);
    rig.vectors.get(0).delivered();
    remove(&rig, false);
    assert!(rig.device.close().is_some());
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    assert_ne!(rig.read(reg::GENERATION, 1), generation);
    assert!(rig.vectors.get(0).delivered().is_some());
    assert!(matches!(rig.doorbells.all()[0], Reached::Eventfd(_)));
    assert!(!rig.device.is_removed());
    // Each attempt of its driver to start it is refused.
    rig.agree(VERSION_1);
    assert_eq!(rig.status(), 3);
}

#[test]
fn a_device_without_a_driver_is_closed_silently() {
    let rig = Rig::new();
    remove(&rig, false);
    assert!(rig.device.is_removed() && rig.device.close().is_some());
    assert_eq!(rig.status(), 0);
}

#[test]
fn a_saved_device_that_was_closed_needs_a_reset_when_it_is_restored() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    let state = rig.device.save().unwrap();
    remove(&rig, true);
    assert!(rig.device.is_removed() && rig.device.close().is_some());
    assert_eq!(rig.status(), 15);
    rig.seen.lock().fails_next_restore = true;
    rig.seen.lock().stage = Stage::Inactive;
    rig.device.restore(&state).unwrap_err();
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
}
