//! The life cycle of a driver: start, kicks, interrupts, errors, reset, BAR moves.

use std::time::Duration;

use super::rig::{FAIL_CHANGE, FAIL_START, Rig, Stage, VERSION_1, WINDOW, reg};
use crate::pci::PciFunction;
use crate::virtio::backend::Outcome;

const BROKEN: Outcome = Outcome {
    config_changed: false,
    needs_reset: true,
};
const CHANGED: Outcome = Outcome {
    config_changed: true,
    needs_reset: false,
};

fn notify_addresses(bar: u64) -> Vec<u64> {
    (0..4).map(|queue| bar + 0x1_0000 + queue * 4096).collect()
}

#[test]
fn a_hundred_drivers() {
    let rig = Rig::new();
    for round in 1..=100 {
        rig.start(VERSION_1);
        assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
        assert_eq!(rig.seen.lock().activations, round);
        assert!(rig.doorbells.ring(WINDOW + 0x1_0000));
        rig.set_status(0);
        assert_eq!((rig.status(), rig.stage()), (0, Stage::Inactive));
        assert!(rig.device.kicks[0].read().is_err(), "a stale kick");
        assert_eq!(rig.read(reg::CONFIG_VECTOR, 2), 0xffff);
        rig.write(reg::QUEUE_SELECT, 2, 0);
        assert_eq!(rig.read(reg::QUEUE_SIZE, 2), 256);
        assert_eq!(rig.read(reg::QUEUE_ENABLE, 2), 0);
        assert_eq!(rig.doorbells.addresses(), notify_addresses(WINDOW));
    }
}

/// A driver waits until it reads 0; meanwhile nothing that it writes has an effect.
#[test]
fn a_reset_that_lasts_is_seen_in_the_status() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    rig.seen.lock().resetting = true;
    rig.set_status(0);
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Inactive));
    for status in [0, 1, 3, 11, 15, 128] {
        rig.set_status(status);
        assert_eq!(rig.status(), 15);
    }
    rig.write(reg::CONFIG_VECTOR, 2, 3);
    assert_eq!(rig.read(reg::CONFIG_VECTOR, 2), 0);
    rig.write(0x2000, 1, 0xff);
    rig.report(BROKEN);
    // One is that of the start.
    assert_eq!((rig.status(), rig.seen.lock().resets), (15, 2));
    let error = rig.device.save().unwrap_err().to_string();
    assert!(error.contains("does not answer"), "{error}");
    assert!(!rig.device.await_reset(Duration::ZERO));
    // The machine's reset does not end it either.
    rig.device.reset();
    rig.seen.lock().resetting = false;
    assert_eq!(rig.seen.lock().config, *b"0123456789");
    rig.report(Outcome::default());
    assert_eq!(rig.seen.lock().resets, 3);
    assert!(rig.device.await_reset(Duration::ZERO));
    assert!(rig.device.save().is_ok());
}

#[test]
fn a_driver_starts_the_device_after_a_reset_that_lasted() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    rig.seen.lock().resetting = true;
    rig.set_status(0);
    rig.seen.lock().resetting = false;
    rig.report(Outcome::default());
    assert_eq!((rig.status(), rig.stage()), (0, Stage::Inactive));
    assert_eq!(rig.read(reg::CONFIG_VECTOR, 2), 0xffff);
    assert!(rig.device.kicks[0].read().is_err(), "a stale kick");
    rig.start(VERSION_1);
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
}

#[test]
fn interrupts_reach_the_vector_that_the_guest_chose() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    let call = |queue: usize| {
        let seen = rig.seen.lock();
        seen.activation.as_ref().unwrap().queues[queue].call.clone()
    };
    call(0).unwrap().write(1).unwrap();
    assert_eq!(rig.vectors.get(1).delivered().unwrap().data, 1);
    assert!(rig.vectors.get(2).delivered().is_none());

    // Both queues share a vector; then one has none.
    rig.write(reg::QUEUE_SELECT, 2, 0);
    rig.write(reg::QUEUE_VECTOR, 2, 2);
    call(0).unwrap().write(1).unwrap();
    call(1).unwrap().write(1).unwrap();
    assert!(rig.vectors.get(2).delivered().is_some());
    rig.write(reg::QUEUE_VECTOR, 2, 0xffff);
    assert!(call(0).is_none());
    // An identical write is no change, nor is a write for a queue that is not enabled.
    let calls = rig.seen.lock().calls.len();
    rig.write(reg::QUEUE_VECTOR, 2, 99);
    rig.write(reg::QUEUE_SELECT, 2, 3);
    rig.write(reg::QUEUE_VECTOR, 2, 3);
    assert_eq!(rig.seen.lock().calls.len(), calls);
    assert_eq!(calls, 2);
}

#[test]
fn configuration_changes_are_notified() {
    let rig = Rig::new();
    rig.agree(VERSION_1);
    rig.write(reg::CONFIG_VECTOR, 2, 0);
    rig.report(CHANGED);
    assert_eq!(rig.read(reg::GENERATION, 1), 1);
    assert_eq!(rig.read(0x1000, 1), 0, "no interrupt before DRIVER_OK");
    assert!(rig.vectors.get(0).delivered().is_none());
    rig.set_status(15);
    rig.report(CHANGED);
    assert_eq!(rig.read(reg::GENERATION, 1), 2);
    assert!(rig.vectors.get(0).delivered().is_some());
    assert_eq!(rig.read(0x1000, 1), 2);
    assert_eq!(rig.read(0x1000, 1), 0, "reading clears");
    assert_eq!(rig.seen.lock().tokens, [7, 7]);
    // Another vector at run time, then none.
    rig.write(reg::CONFIG_VECTOR, 2, 4);
    rig.report(CHANGED);
    assert!(rig.vectors.get(4).delivered().is_some());
    rig.write(reg::CONFIG_VECTOR, 2, 0xffff);
    rig.report(CHANGED);
    assert!(rig.vectors.get(4).delivered().is_none());
}

#[test]
fn a_device_that_cannot_start_reports_needs_reset() {
    let rig = Rig::new();
    rig.start(VERSION_1 | FAIL_START);
    assert_eq!((rig.status(), rig.stage()), (15 | 64, Stage::Failed));
    assert!(rig.device.is_broken());
    assert!(rig.vectors.get(0).delivered().is_some());
    // Only FAILED and reset are accepted.
    for status in [1, 3, 11, 15, 15 | 64] {
        rig.set_status(status);
        assert_eq!(rig.status(), 15 | 64);
    }
    rig.write(reg::QUEUE_SELECT, 2, 0);
    rig.write(reg::QUEUE_VECTOR, 2, 3);
    rig.set_status(15 | 128);
    assert_eq!(rig.status(), 15 | 64 | 128);
    rig.start(VERSION_1);
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
}

#[test]
fn a_broken_device_reports_needs_reset() {
    let rig = Rig::new();
    rig.start(VERSION_1 | FAIL_CHANGE);
    rig.write(reg::QUEUE_SELECT, 2, 1);
    rig.write(reg::QUEUE_VECTOR, 2, 3);
    assert_eq!((rig.status(), rig.stage()), (15 | 64, Stage::Failed));
    assert!(rig.vectors.get(0).delivered().is_some());
    rig.set_status(0);
    assert!(!rig.device.is_broken());

    rig.start(VERSION_1);
    rig.report(BROKEN);
    rig.report(BROKEN);
    assert_eq!(rig.status(), 15 | 64);
    assert!(rig.vectors.get(0).delivered().is_some());
    rig.set_status(0);

    // Also before anything runs, but then without an interrupt.
    rig.report(BROKEN);
    assert_eq!(rig.status(), 64);
    rig.set_status(64 | 1);
    assert_eq!(rig.status(), 64);
    assert!(rig.vectors.get(0).delivered().is_none());
    rig.start(VERSION_1);
    assert_eq!(rig.status(), 15);
}

#[test]
fn doorbells_follow_the_bar() {
    let rig = Rig::cold();
    assert!(rig.doorbells.addresses().is_empty());
    rig.config_write(4, 2, 2);
    assert_eq!(rig.doorbells.addresses(), notify_addresses(WINDOW));
    rig.start(VERSION_1);

    let there = WINDOW + 0x40_0000;
    rig.config_write(0x10, 4, there & 0xffff_ffff);
    assert_eq!(rig.bar(), there);
    assert_eq!(rig.doorbells.addresses(), notify_addresses(there));
    assert!(!rig.doorbells.ring(WINDOW + 0x1_0000));
    assert!(rig.doorbells.ring(there + 0x1_1000));
    assert_eq!(rig.device.kicks[1].read().unwrap(), 1);
    assert_eq!(rig.status(), 15, "a move does not disturb the device");

    rig.config_write(4, 2, 0);
    assert!(rig.doorbells.addresses().is_empty());
    // One doorbell is refused: writes to it exit and are signalled all the same.
    let refused = there + 0x1_0000;
    *rig.doorbells.refused.lock() = Some(refused);
    rig.config_write(4, 2, 2);
    assert_eq!(rig.doorbells.addresses(), notify_addresses(there)[1..]);
    assert!(!rig.doorbells.ring(refused));
    rig.write(0x1_0000, 2, 0);
    assert_eq!(rig.device.kicks[0].read().unwrap(), 1);
    rig.write(0x1_4000, 4, 0);
    rig.write(0x1_fffc, 4, 0);

    rig.pci.remove(rig.slot).unwrap();
    assert!(rig.doorbells.addresses().is_empty());
}

#[test]
fn power_cycle_clears_everything() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    rig.config_write(0x10, 4, 0x80_0000);
    rig.pci.reset();
    assert_eq!(rig.stage(), Stage::Inactive);
    assert_eq!(rig.bar(), WINDOW);
    assert!(rig.doorbells.addresses().is_empty());
    assert!(rig.vectors.get(0).route().is_none());
    assert_eq!(rig.config_read(4, 2), 0);
    rig.config_write(4, 2, 2);
    assert_eq!(rig.status(), 0);
    rig.start(VERSION_1);
    assert_eq!(rig.status(), 15);
}

#[test]
fn dropping_the_device_detaches_its_doorbells() {
    let rig = Rig::new();
    let doorbells = rig.doorbells.clone();
    rig.device.bar_moved(1, None);
    assert_eq!(doorbells.addresses().len(), 4);
    drop(rig);
    assert!(doorbells.addresses().is_empty());
}

/// Register accesses by vCPUs, BAR moves and the event loop run concurrently: no deadlock, and a
/// consistent device at the end.
#[test]
fn threads_meet() {
    let rig = Rig::new();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..200 {
                    rig.start(VERSION_1);
                    rig.set_status(0);
                }
            });
        }
        scope.spawn(|| {
            for round in 0..200u64 {
                rig.config_write(0x10, 4, (round % 16) << 20);
                rig.config_write(4, 2, round & 2);
            }
        });
        scope.spawn(|| {
            for _ in 0..500 {
                rig.device.process(0);
                rig.write(0x1_0000, 2, 0);
            }
        });
    });
    rig.config_write(4, 2, 2);
    rig.start(VERSION_1);
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
    assert_eq!(rig.doorbells.addresses(), notify_addresses(rig.bar()));
}
