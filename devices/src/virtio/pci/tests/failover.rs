//! A device with a backup fails: its driver continues, or is notified.

use super::rig::{FAIL_SAVE, Model, Rig, Shape, Stage, VERSION_1, WINDOW, reg};
use crate::ErrorKind;
use crate::testing::Reached;
use crate::virtio::backend::Outcome;

const NEEDS_RESET: u64 = 64;

/// A running device with a doorbell and a backup.
fn protected(shape: Shape, features: u64) -> Rig {
    let rig = Rig::with(shape);
    rig.seen.lock().doorbells = vec![0];
    rig.device.set_has_backup(true);
    rig.start(features);
    rig
}

#[test]
fn its_driver_notices_nothing_and_continues_with_the_backup() {
    let rig = protected(Shape::default(), VERSION_1);
    assert!(rig.fail(), "it is said once");
    assert!(!rig.fail(), "it is said once");
    assert_eq!(rig.status(), 15);
    // No store reaches a device that has failed, and it sees no changes meanwhile.
    assert!(matches!(rig.doorbells.all()[0], Reached::Eventfd(_)));
    rig.write(reg::QUEUE_SELECT, 2, 1);
    rig.write(reg::QUEUE_VECTOR, 2, 4);
    assert!(rig.seen.lock().calls.is_empty());
    assert!(!rig.device.spurious_notify(0) && !rig.device.announce());
    let mut rings = 0;
    rig.device.running_rings(|_, _| rings += 1);
    assert_eq!(rings, 0, "they are not the device's to be judged by");

    let (next, seen) = Model::new(Shape::default());
    seen.lock().doorbells = vec![1];
    let swapped = rig
        .device
        .swap(rig.device.replacement(Box::new(next)), None);
    assert!(swapped.unwrap().gap.is_some());
    assert_eq!(rig.status(), 15);
    let notify = WINDOW + 0x1_0000;
    assert_eq!(rig.doorbells.all()[1], Reached::Page(notify + 4096, 1));
    let seen = seen.lock();
    assert_eq!(seen.stage, Stage::Active);
    let replaced = seen.replaced.as_ref().unwrap();
    assert_eq!((replaced.features, replaced.running), (VERSION_1, true));
    let call = seen.activation.as_ref().unwrap().queues[1].call.clone();
    assert!(call.is_some(), "as it was changed meanwhile");
    drop(seen);
    // Too late for a notification.
    rig.device.give_up();
    assert_eq!(rig.status(), 15);
}

#[test]
fn only_a_running_device_that_has_failed_itself_waits_for_another_one() {
    let needs_reset = Outcome {
        config_changed: false,
        needs_reset: true,
    };
    // The driver broke its own ring.
    let rig = protected(Shape::default(), VERSION_1);
    rig.report(needs_reset);
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    assert!(!rig.fail(), "its driver knows already");
    // The backup was removed.
    let rig = protected(Shape::default(), VERSION_1);
    rig.device.set_has_backup(false);
    assert!(!rig.fail());
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    // No driver would lose anything.
    let rig = Rig::new();
    rig.device.set_has_backup(true);
    rig.agree(VERSION_1);
    assert!(!rig.fail());
    assert_eq!(rig.status(), 11 | NEEDS_RESET);
}

#[test]
fn its_driver_is_notified_when_no_backup_comes() {
    let rig = protected(Shape::default(), VERSION_1);
    assert!(rig.fail());
    rig.vectors.get(0).delivered();
    rig.device.give_up();
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    assert!(rig.vectors.get(0).delivered().is_some());
    // Its driver restarts it, and it may fail again.
    rig.start(VERSION_1);
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
    assert!(rig.fail());
    // Or its driver resets it without a notification.
    rig.start(VERSION_1);
    rig.device.give_up();
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
}

#[test]
fn it_never_continues_after_a_failed_swap() {
    let fails = Shape {
        fails_restore: true,
        ..Shape::default()
    };
    let keeps = Shape {
        keeps_place: true,
        ..Shape::default()
    };
    let refuses = Shape {
        refuses: Some("no"),
        ..Shape::default()
    };
    for (old, features, next) in [
        (Shape::default(), VERSION_1, fails),
        (keeps, VERSION_1, Shape::default()),
        (Shape::default(), VERSION_1 | FAIL_SAVE, Shape::default()),
        (Shape::default(), VERSION_1, refuses),
    ] {
        let rig = protected(old, features);
        assert!(rig.fail());
        let (next, seen) = Model::new(next);
        let swapped = rig
            .device
            .swap(rig.device.replacement(Box::new(next)), None);
        let error = swapped.unwrap_err().error;
        assert_ne!(seen.lock().stage, Stage::Active);
        // A device that does not fit is refused before any change: another may fit.
        let notified = error.kind() != ErrorKind::Incompatible;
        let status = if notified { 15 | NEEDS_RESET } else { 15 };
        assert_eq!(rig.status(), status, "{error}");
        assert_eq!(rig.seen.lock().rolled_back, 0);
        assert!(!error.to_string().contains("it continues"), "{error}");
        rig.device.give_up();
        assert_eq!(rig.status(), 15 | NEEDS_RESET);
        assert!(matches!(rig.doorbells.all()[0], Reached::Eventfd(_)));
    }
}

#[test]
fn operations_that_cannot_wait_for_a_failover_notify_the_driver() {
    let rig = protected(Shape::default(), VERSION_1 | 1 << 40);
    assert!(rig.fail());
    rig.write(reg::QUEUE_SELECT, 2, 0);
    rig.write(reg::QUEUE_RESET, 2, 1);
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    assert_eq!(rig.stage(), Stage::Inactive, "nothing touches the queue");

    let rig = protected(Shape::default(), VERSION_1);
    assert!(rig.fail());
    assert!(rig.device.save().unwrap().backend.is_none());
    assert_eq!(
        (rig.status(), rig.stage()),
        (15 | NEEDS_RESET, Stage::Inactive)
    );

    let rig = protected(Shape::default(), VERSION_1);
    assert!(rig.fail());
    rig.device.log_writes(true).unwrap();
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
}
