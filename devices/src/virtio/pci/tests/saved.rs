//! Saved states: restored by another device of the same kind, and hostile ones.

use super::rig::{FAIL_RESTORE, FAIL_SAVE, Rig, Stage, VERSION_1, WINDOW, reg};
use vdpa::causes::in_one_line;

use crate::testing::Reached;
use crate::virtio::backend::Outcome;
use crate::virtio::pci::VirtioPciState;

const BEHIND: &str = "cannot restore the device behind virtio-pci";

fn running() -> (Rig, VirtioPciState) {
    let rig = Rig::new();
    rig.start(VERSION_1);
    let state = rig.device.save().unwrap();
    (rig, state)
}

#[test]
fn a_running_device_moves() {
    let (source, state) = running();
    assert_eq!(source.stage(), Stage::Saved);
    let again = source.device.save().unwrap_err();
    assert_eq!(again.to_string(), "the device is saved already");

    let bytes = postcard::to_stdvec(&state).unwrap();
    let state: VirtioPciState = postcard::from_bytes(&bytes).unwrap();
    let target = Rig::cold();
    target.device.restore(&state).unwrap();
    target.pci.remap();
    assert_eq!((target.status(), target.stage()), (15, Stage::Active));
    assert_eq!(target.doorbells.addresses().len(), 4);
    assert_eq!(target.vectors.get(2).route().unwrap().data, 2);
    // One spurious kick and interrupt for each running queue.
    for vector in [0, 1, 2] {
        assert!(target.vectors.get(vector).delivered().is_some());
    }
    assert!(target.vectors.get(3).delivered().is_none());
    assert!(target.device.kicks[0].read().is_ok() && target.device.kicks[1].read().is_ok());
    assert!(target.device.kicks[3].read().is_err());
    target.write(reg::QUEUE_SELECT, 2, 0);
    target.write(reg::QUEUE_SIZE, 2, 256);
    assert_eq!(target.read(reg::QUEUE_SIZE, 2), 128, "still frozen");
    {
        let seen = target.seen.lock();
        let queues = &seen.activation.as_ref().unwrap().queues;
        assert_eq!(queues[0].addresses.size, 128);
        assert_eq!(queues[1].index, 1);
    }
    target.write(reg::QUEUE_SELECT, 2, 1);
    assert_eq!(target.device.save().unwrap(), state);

    // The source resumes where it was.
    source.device.restore(&state).unwrap();
    assert_eq!(source.stage(), Stage::Active);
    source.start(VERSION_1);
    assert_eq!(source.stage(), Stage::Active);
}

#[test]
fn every_stage_moves() {
    for steps in 0..4 {
        let source = Rig::new();
        for status in [1, 3].into_iter().take(steps) {
            source.set_status(status);
        }
        if steps == 3 {
            source.agree(VERSION_1);
            source.set_up_queue(0, 32, 1);
        }
        let state = source.device.save().unwrap();
        assert!(state.backend.is_none());
        let target = Rig::cold();
        target.device.restore(&state).unwrap();
        target.pci.remap();
        assert_eq!(target.status(), source.status());
        assert_eq!(target.stage(), source.stage());
        if steps == 3 {
            target.set_status(15);
            assert_eq!(target.stage(), Stage::Active);
            let seen = target.seen.lock();
            assert_eq!(
                seen.activation.as_ref().unwrap().queues[0].addresses.size,
                32
            );
        }
    }
    let source = Rig::new();
    source.start(VERSION_1);
    source.report(Outcome {
        config_changed: false,
        needs_reset: true,
    });
    let state = source.device.save().unwrap();
    assert_eq!(source.stage(), Stage::Inactive);
    let target = Rig::cold();
    target.device.restore(&state).unwrap();
    assert!(target.device.is_broken());
    assert_eq!(target.stage(), Stage::Inactive);
}

#[test]
fn a_device_in_use_is_not_overwritten() {
    let (_, state) = running();
    let target = Rig::new();
    target.start(VERSION_1);
    let refused = target.device.restore(&state).unwrap_err();
    assert!(refused.to_string().starts_with("the device is in use"));
    assert_eq!((target.status(), target.stage()), (15, Stage::Active));
}

#[test]
fn backends_that_refuse() {
    let source = Rig::new();
    source.start(VERSION_1 | FAIL_SAVE);
    let refused = source.device.save().unwrap_err();
    assert!(
        in_one_line(&refused).ends_with("not this one"),
        "{refused:?}"
    );
    assert_eq!((source.status(), source.stage()), (15, Stage::Active));

    source.start(VERSION_1 | FAIL_RESTORE);
    let state = source.device.save().unwrap();
    let target = Rig::cold();
    let refused = target.device.restore(&state).unwrap_err();
    assert_eq!(refused.to_string(), BEHIND);
    assert_eq!(target.stage(), Stage::Inactive);
    target.config_write(4, 2, 2);
    assert_eq!(target.status(), 0);
    // A saved device that cannot resume notifies its driver.
    assert!(source.device.restore(&state).is_err());
    assert_eq!(source.status(), 15 | 64);
    source.start(VERSION_1);
    assert_eq!(source.status(), 15);
}

/// A device may have worked on the rings before the first attempt failed.
#[test]
fn a_state_is_tried_again_from_where_the_rings_are_by_then() {
    let source = Rig::new();
    source.start(VERSION_1);
    let state = source.device.save().unwrap();
    let target = Rig::cold();
    target.seen.lock().fails_next_restore = true;
    assert!(target.device.restore(&state).is_err());
    assert_eq!(target.stage(), Stage::Inactive);
    assert_eq!(target.seen.lock().rolled_back, 0);
    target.seen.lock().fails_next_restore = false;
    target.device.restore_again(&state).unwrap();
    target.pci.remap();
    assert_eq!((target.status(), target.stage()), (15, Stage::Active));
    assert_eq!(target.seen.lock().rolled_back, 1);
}

/// A bad state must be detected while the source still has the guest.
#[test]
fn a_state_of_another_backend_is_known_by_looking() {
    let source = Rig::new();
    source.start(VERSION_1);
    let mut state = source.device.save().unwrap();
    let target = Rig::cold();
    target.device.check(&state).unwrap();
    state.backend.as_mut().unwrap().name = "other".into();
    let refused = target.device.check(&state).unwrap_err();
    assert_eq!(refused.to_string(), BEHIND);
    assert_eq!(target.stage(), Stage::Inactive);
}

/// A driver that breaks its ring does not prevent the machine from being saved or moved.
#[test]
fn a_broken_ring_is_saved_as_a_broken_device() {
    let source = Rig::new();
    source.start(VERSION_1);
    source.seen.lock().broken_ring = true;
    let state = source.device.save().unwrap();
    assert!(state.backend.is_none());
    assert_eq!(
        (source.status(), source.stage()),
        (15 | 64, Stage::Inactive)
    );
    let target = Rig::cold();
    target.device.restore(&state).unwrap();
    target.pci.remap();
    assert_eq!(
        (target.status(), target.stage()),
        (15 | 64, Stage::Inactive)
    );
    for rig in [&source, &target] {
        rig.seen.lock().broken_ring = false;
        rig.start(VERSION_1);
        assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
    }
}

#[test]
fn a_broken_device_does_not_prevent_recording() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    rig.seen.lock().broken_ring = true;
    rig.device.log_writes(true).unwrap();
    assert_eq!((rig.status(), rig.stage()), (15 | 64, Stage::Inactive));
    // A device that reported it before, and would refuse.
    rig.start(VERSION_1);
    rig.report(Outcome {
        config_changed: false,
        needs_reset: true,
    });
    rig.seen.lock().stage = Stage::Failed;
    rig.device.log_writes(true).unwrap();
    assert_eq!((rig.status(), rig.stage()), (15 | 64, Stage::Inactive));
}

/// A backend whose save failed after it changed how its queues reach the device.
#[test]
fn doorbells_are_asked_for_again_after_a_save_that_failed() {
    let rig = Rig::new();
    rig.seen.lock().doorbells = vec![0, 1];
    rig.start(VERSION_1 | FAIL_SAVE);
    let pages = |rig: &Rig| {
        let all = rig.doorbells.all();
        let is_page = |reached: &&Reached| matches!(reached, Reached::Page(..));
        all.iter().filter(is_page).count()
    };
    assert_eq!(pages(&rig), 2);
    assert!(rig.device.save().is_err());
    assert_eq!(pages(&rig), 2);
    rig.seen.lock().loses_doorbells = true;
    assert!(rig.device.save().is_err());
    assert_eq!(pages(&rig), 0);
}

/// Each entry: how the state is falsified, and the expected error.
#[test]
fn hostile_states_are_refused_and_change_nothing() {
    type Falsify = fn(&mut VirtioPciState);
    let cases: &[(Falsify, &str)] = &[
        (|s| s.version = 1, "state of version 1:"),
        (|s| s.isr = 1, "ISR status 0x01"),
        (|s| s.backend = None, "unexpected in device status 0x0f"),
        (
            |s| s.config_space.bytes.truncate(10),
            "has 10 bytes instead of 256",
        ),
        (
            |s| s.config_space.bytes[0x10] |= 0x10,
            "read-only byte 0x10",
        ),
        (
            |s| s.msix.entries.push(s.msix.entries[0]),
            "MSI-X table has",
        ),
        (
            |s| s.registers.status = 4,
            "no driver can reach device status 0x04",
        ),
        (
            |s| s.registers.status = 15 | 16,
            "no driver can reach device status",
        ),
        (|s| s.registers.driver_features = 0, "does not offer (0x0)"),
        (
            |s| s.registers.driver_features |= 1 << 38,
            "lack VERSION_1 or have bits",
        ),
        (
            |s| s.registers.queues[0].addresses.size = 512,
            "no driver can reach the registers of queue 0",
        ),
        (
            |s| s.registers.queues[0].addresses.size = 0,
            "no driver can reach the registers of queue 0",
        ),
        (
            |s| s.registers.queues[1].addresses.size = 63,
            "no driver can reach the registers of queue 1",
        ),
        (
            |s| s.registers.queues[2].enabled = true,
            "no driver can reach the registers of queue 2",
        ),
        (
            |s| s.registers.queues[3].vector = 5,
            "no driver can reach the registers of queue 3",
        ),
        (
            |s| s.registers.config_vector = 0x7fff,
            "a register holds a value that no driver can write",
        ),
        (
            |s| {
                s.registers.queues.pop();
            },
            "3 queues instead of 4",
        ),
        // Queues are set up although features were never negotiated.
        (
            |s| {
                s.registers.status = 3;
                s.backend = None;
            },
            "no driver can reach the registers of queue 0",
        ),
        // Features before there is a driver.
        (
            |s| {
                s.registers.status = 1;
                s.registers.queues = Rig::cold().device.save().unwrap().registers.queues;
                s.backend = None;
            },
            "a register holds a value that no driver can write",
        ),
        // A backend state for a device that does not run.
        (
            |s| s.registers.status = 11,
            "unexpected in device status 0x0b",
        ),
    ];
    let (_, good) = running();
    for (number, (falsify, expected)) in cases.iter().enumerate() {
        let target = Rig::cold();
        let before = target.device.save().unwrap();
        let mut state = good.clone();
        falsify(&mut state);
        let error = target.device.restore(&state).unwrap_err();
        let error = in_one_line(&error);
        assert!(error.contains(expected), "case {number}: {error}");
        assert_eq!(target.device.save().unwrap(), before, "case {number}");
        assert_eq!(target.stage(), Stage::Inactive, "case {number}");
        assert_eq!(target.bar(), WINDOW);
        target.device.restore(&good).unwrap();
    }
}
