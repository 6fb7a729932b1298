//! Queue reset (virtio 1.3, 2.6.1 and 4.1.4.3): legal and illegal writes of a driver, and devices
//! that fail to reset.

use std::sync::Arc;

use vdpa::causes::in_one_line;

use super::rig::{FAIL_CHANGE, RING_RESET, Rig, Stage, VERSION_1, WINDOW, reg};
use crate::testing::Reached;
use crate::virtio::backend::Outcome;

const PAGE_OF_QUEUE_0: u64 = WINDOW + 0x1_0000;

fn running() -> Rig {
    let rig = Rig::new();
    rig.seen.lock().doorbells = vec![0, 1];
    rig.start(VERSION_1 | RING_RESET);
    rig
}

fn reset_queue(rig: &Rig, index: u64) {
    rig.write(reg::QUEUE_SELECT, 2, index);
    rig.write(reg::QUEUE_RESET, 2, 1);
}

fn enabled(rig: &Rig, index: u64) -> bool {
    rig.write(reg::QUEUE_SELECT, 2, index);
    rig.read(reg::QUEUE_ENABLE, 2) == 1
}

/// Returns the queues on which the backend works.
fn working(rig: &Rig) -> Vec<u16> {
    let seen = rig.seen.lock();
    let queues = &seen.activation.as_ref().unwrap().queues;
    queues.iter().map(|queue| queue.index).collect()
}

fn reached_by_kicks_of_queue_0(rig: &Rig) -> Reached {
    rig.doorbells.all()[0]
}

#[test]
fn a_queue_is_reset_and_enabled_with_another_size() {
    let rig = running();
    let page = Reached::Page(PAGE_OF_QUEUE_0, 0);
    let eventfd = Reached::Eventfd(PAGE_OF_QUEUE_0);
    assert_eq!(reached_by_kicks_of_queue_0(&rig), page);
    rig.device.kicks[0].write(1).unwrap();

    reset_queue(&rig, 0);
    assert_eq!(rig.read(reg::QUEUE_RESET, 2), 0);
    assert!(!enabled(&rig, 0));
    assert_eq!(rig.read(reg::QUEUE_SIZE, 2), 256, "as after power-on");
    assert_eq!(rig.read(reg::QUEUE_VECTOR, 2), 0xffff);
    assert_eq!(rig.read(reg::QUEUE_DESC, 4), 0);
    assert_eq!(working(&rig), [1]);
    assert_eq!(reached_by_kicks_of_queue_0(&rig), eventfd);
    assert!(rig.device.kicks[0].read().is_err(), "kicks of before");

    rig.set_up_queue(0, 32, 3);
    assert!(enabled(&rig, 0));
    assert_eq!(working(&rig), [0, 1]);
    assert_eq!(reached_by_kicks_of_queue_0(&rig), page);
    {
        let seen = rig.seen.lock();
        let queue = &seen.activation.as_ref().unwrap().queues[0];
        assert_eq!(queue.addresses.size, 32);
        assert!(queue.call.is_some());
    }
    // The queue cannot be programmed any more.
    rig.write(reg::QUEUE_SELECT, 2, 0);
    rig.write(reg::QUEUE_SIZE, 2, 64);
    assert_eq!(rig.read(reg::QUEUE_SIZE, 2), 32);
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
}

#[test]
fn resets_that_are_none() {
    // Not negotiated.
    let rig = Rig::new();
    rig.start(VERSION_1);
    reset_queue(&rig, 0);
    assert!(enabled(&rig, 0));

    let rig = running();
    for value in [0, 2, 0xffff] {
        rig.write(reg::QUEUE_SELECT, 2, 0);
        rig.write(reg::QUEUE_RESET, 2, value);
        assert!(enabled(&rig, 0), "{value}");
    }
    // An access of another width addresses no register.
    rig.write(reg::QUEUE_RESET, 4, 1);
    rig.write(reg::QUEUE_RESET, 1, 1);
    assert!(enabled(&rig, 0));
    // Queues that were never enabled, have no size, or do not exist. They cannot be programmed or
    // enabled afterwards either.
    for index in [2, 3, 4, 0xffff] {
        reset_queue(&rig, index);
        rig.set_up_queue(index, 64, 1);
        assert!(!enabled(&rig, index), "{index}");
    }
    // A second reset of the same queue.
    reset_queue(&rig, 0);
    reset_queue(&rig, 0);
    assert_eq!(working(&rig), [1]);
    // A driver that gave up.
    rig.set_status(15 | 128);
    reset_queue(&rig, 1);
    assert!(enabled(&rig, 1));
    rig.set_up_queue(0, 64, 1);
    assert!(!enabled(&rig, 0));

    // Before DRIVER_OK.
    rig.agree(VERSION_1 | RING_RESET);
    rig.set_up_queue(0, 64, 1);
    reset_queue(&rig, 0);
    assert!(enabled(&rig, 0));
    rig.set_status(15);
    assert_eq!(working(&rig), [0]);
}

#[test]
fn a_device_reset_forgets_a_reset_queue() {
    let rig = running();
    reset_queue(&rig, 1);
    rig.start(VERSION_1 | RING_RESET);
    assert_eq!(working(&rig), [0, 1]);
}

#[test]
fn a_failure_stops_the_device_and_leaves_no_driver_waiting() {
    let rig = Rig::new();
    rig.start(VERSION_1 | RING_RESET | FAIL_CHANGE);
    reset_queue(&rig, 0);
    assert_eq!(rig.status(), 15 | 64);
    assert_eq!(rig.stage(), Stage::Inactive, "nothing touches its memory");
    assert!(!enabled(&rig, 0));
    // The other queue is released too, and neither can be enabled again.
    reset_queue(&rig, 1);
    assert!(!enabled(&rig, 1));
    rig.set_up_queue(1, 64, 1);
    assert!(!enabled(&rig, 1));

    rig.start(VERSION_1 | RING_RESET);
    assert_eq!(rig.stage(), Stage::Active);
}

#[test]
fn a_broken_device_is_stopped_by_the_reset_of_a_queue() {
    let rig = running();
    rig.report(Outcome {
        config_changed: false,
        needs_reset: true,
    });
    assert_eq!(rig.stage(), Stage::Active);
    reset_queue(&rig, 0);
    assert!(!enabled(&rig, 0));
    assert_eq!(rig.stage(), Stage::Inactive);
}

#[test]
fn a_reset_queue_is_saved_as_such() {
    let source = running();
    reset_queue(&source, 0);
    let state = source.device.save().unwrap();
    let target = Rig::cold();
    target.device.restore(&state).unwrap();
    target.pci.remap();
    assert_eq!(working(&target), [1]);
    target.set_up_queue(0, 16, 1);
    assert_eq!(working(&target), [0, 1]);

    // All of these are impossible.
    let refused = |change: fn(&mut crate::virtio::pci::RegistersState), queue| {
        let mut hostile = state.clone();
        change(&mut hostile.registers);
        let error = Rig::cold().device.restore(&hostile).unwrap_err();
        let expected = format!("no driver can reach the registers of queue {queue}");
        assert!(in_one_line(&error).ends_with(&expected), "{error:?}");
    };
    refused(|registers| registers.queues[0].enabled = true, 0);
    refused(|registers| registers.queues[1].reset = true, 1);
    refused(|registers| registers.driver_features &= !RING_RESET, 0);
    refused(|registers| registers.status = 11, 0);
}

#[test]
fn announcing_is_for_a_device_that_runs() {
    let rig = Rig::new();
    assert!(!rig.device.announce());
    rig.start(VERSION_1);
    let generation = rig.read(reg::GENERATION, 1);
    assert!(rig.device.announce());
    assert_eq!(rig.read(reg::GENERATION, 1), generation + 1);
    assert!(rig.vectors.get(0).delivered().is_some());
    let device = Arc::clone(&rig.device);
    device.save().unwrap();
    assert!(!rig.device.announce(), "a saved device");
}
