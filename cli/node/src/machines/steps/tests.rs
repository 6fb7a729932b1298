//! A VM's life on an in-memory host, which fails or kills the daemon at any step.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::collapsible_match, reason = "guards only look, arms do")]

mod actions;
mod incoming;
mod outgoing;
mod replacing;
mod sim_host;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::machines::incoming::IncomingMigration;
use crate::machines::spec::{ExistingDevice, NicSource, VmSpec};
use actions::{Action, Daemon, Way, action, fault, holds, lives, nic, spec, way};
use sim_host::{Fake, Fault, Killed, SimHost, device_of, devices_of, images_of};

#[test]
fn a_moved_nic_is_announced_to_the_network_and_of_no_other() {
    for (fault, stopped, expected) in [
        (Fault::None, false, vec!["net1".to_owned()]),
        // The NIC stays on its device.
        (Fault::Fails, false, Vec::new()),
        // The NIC has no backup.
        (Fault::None, true, Vec::new()),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let daemon = Daemon::new(&fake, &vm);
        let lifecycle = daemon.lifecycle();
        let mut record = lifecycle
            .create(Record::new(spec(2, stopped, Restart::Never)))
            .unwrap();
        assert!(
            fake.sim_host().announced.is_empty(),
            "it was never elsewhere"
        );
        let moved = nic(1).moved_to(ExistingDevice::Name("other".to_owned()));
        let after = record.spec.with_nic_replaced(&moved);
        // The record is stored and the VM has the NIC; then the NIC must move.
        fake.plan(vec![Fault::None, Fault::None, fault]);
        let done = lifecycle.swap_nic(&mut record, &moved, after);
        assert_eq!(done.is_ok(), fault == Fault::None);
        assert_eq!(fake.sim_host().announced, expected, "{fault:?} {stopped}");
    }
}

/// The devices' own records list them, and end with the host's boot as the devices do.
#[test]
fn devices_created_for_nics_are_recorded_once() {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let record = Daemon::new(&fake, &vm)
        .lifecycle()
        .create(Record::new(spec(2, false, Restart::Never)))
        .unwrap();
    assert_eq!(record.created_nics().len(), 2);
    let mut kept: serde_json::Value =
        serde_json::from_str(fake.sim_host().stored.as_ref().unwrap()).unwrap();
    assert_eq!(kept["steps"].as_array().unwrap().len(), 2, "{kept}");
    assert_eq!(fake.stored(&vm), Some(record.clone()));
    // The form of schema 3 and before.
    let device = json!({ "step": "Nic", "id": "net0", "device": vm.device(nic(0).id()) });
    kept["steps"].as_array_mut().unwrap().insert(1, device);
    fake.sim_host().stored = Some(kept.to_string());
    assert_eq!(fake.stored(&vm), Some(record));
}

/// Without a backup the NIC is gone until the next start; with one it is on the backup.
#[test]
fn the_rest_of_a_removed_device_is_deleted_and_the_next_start_creates_it_again() {
    for (number, backup) in [(0, false), (1, true)] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let daemon = Daemon::new(&fake, &vm);
        let lifecycle = daemon.lifecycle();
        let made = lifecycle.create(Record::new(spec(2, false, Restart::Never)));
        let mut record = made.unwrap();
        let nic = nic(number);
        let (id, device) = (nic.id().clone(), vm.device(nic.id()));
        let before = record.steps().to_vec();
        lifecycle.drop_vanished(&mut record, &id);
        assert_eq!(record.steps(), before, "it is there");
        {
            let mut sim_host = fake.sim_host();
            sim_host.devices.remove(&device);
            let nics = &mut sim_host.processes[0].nics;
            if backup {
                nics.insert(id.to_string(), vm.backup(&id));
            } else {
                nics.remove(id.as_str());
            }
        }
        if backup {
            assert_eq!(lifecycle.query_failovers(&mut record), vec![id.clone()]);
        } else {
            lifecycle.drop_vanished(&mut record, &id);
        }
        assert!(!record.has_device(&device) && record.spec.nic(&id).is_some());
        assert_eq!(record.has_created(&id), backup);
        holds(&fake, &vm).unwrap();
        lifecycle.mark_stopped(&mut record, false).unwrap();
        lifecycle.stop(&mut record).unwrap();
        lifecycle.start(&mut record).unwrap();
        assert!(record.has_device(&device));
        assert!(fake.sim_host().devices.contains(&device));
    }
}

/// A silent process may run a guest.
#[test]
fn the_next_daemon_leaves_a_process_alone_that_does_not_answer() {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let record = Daemon::new(&fake, &vm)
        .lifecycle()
        .create(Record::new(spec(2, false, Restart::OnFailure)))
        .unwrap();
    fake.sim_host().silent = true;
    let before = fake.sim_host().clone();
    assert_eq!(before.processes.len(), 1);
    let mut daemon = Daemon::new(&fake, &vm);
    assert_eq!(daemon.reconciles(), Reconciled::Running);
    assert_eq!(fake.sim_host().processes, before.processes);
    assert_eq!(fake.sim_host().started, before.started);
    assert_eq!(daemon.record, Some(record));
}

/// Its later starts boot.
#[test]
fn a_snapshot_is_restored_once_and_a_failure_leaves_nothing() {
    let vm: VmName = "web".parse().unwrap();
    let wanted = spec(2, false, Restart::Never);
    let mut failed = 0;
    for at in 0.. {
        let fake = Fake::default();
        let daemon = Daemon::new(&fake, &vm);
        let lifecycle = daemon.lifecycle();
        let mut faults = vec![Fault::None; at];
        faults.push(Fault::Fails);
        fake.plan(faults);
        let record = Record::restored(wanted.clone(), "/snapshot".into(), wanted.machine());
        let Ok(mut record) = lifecycle.create(record) else {
            failed += 1;
            holds(&fake, &vm).unwrap();
            assert_eq!(fake.stored(&vm), None, "{at}");
            let sim_host = fake.sim_host();
            assert!(sim_host.devices.is_empty() && sim_host.processes.is_empty());
            continue;
        };
        let is_restored = |from: Option<&str>| {
            let sim_host = fake.sim_host();
            let [process] = sim_host.processes.as_slice() else {
                return false;
            };
            process.restored.as_deref() == from.map(std::path::Path::new)
        };
        assert!(is_restored(Some("/snapshot")));
        assert_eq!(fake.sim_host().announced.len(), 2);
        assert_eq!(record.restore_from, None);
        if !fake.faults.lock().is_empty() {
            fake.plan(Vec::new());
            lifecycle.stop(&mut record).unwrap();
            lifecycle.start(&mut record).unwrap();
            assert!(is_restored(None));
            break;
        }
    }
    assert!(failed > 8, "{failed}");
}

/// Only this record lists it, because no device was created for it.
#[test]
fn a_nic_on_a_device_that_was_there_is_given_up_by_the_next_daemon() {
    let create = Action::Create {
        nics: 1,
        stopped: false,
        restart: Restart::Never,
    };
    let killed = || vec![Fault::None, Fault::KilledBefore];
    let remove = Action::RemoveNic {
        nic: 0,
        stubborn: false,
    };
    lives(vec![
        (create, Vec::new()),
        (Action::Swap { nic: 0, to: 0 }, killed()),
        (remove, killed()),
    ])
    .unwrap();
}

/// A guest that was requested to power off is not restarted afterwards, even if it takes its time
/// and other daemons start. After a boot of the host, VMs start whose desired state is running.
#[test]
fn a_guest_that_was_asked_to_power_off_stays_off() {
    for (until_reboot, restart, end) in [
        (false, Restart::Always, Action::PowerOff),
        (false, Restart::OnFailure, Action::Crash),
        (true, Restart::Always, Action::PowerOff),
        (true, Restart::OnFailure, Action::PowerOff),
        (true, Restart::Never, Action::Crash),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let mut daemon = Daemon::new(&fake, &vm);
        daemon.record = daemon
            .lifecycle()
            .create(Record::new(spec(2, false, restart)))
            .ok();
        daemon.does(Action::FailOver { nic: 1, seen: true });
        daemon.does(Action::AskToPowerOff { until_reboot });
        let asked = daemon.record.clone().unwrap();
        let wish = if until_reboot {
            Desired::Running
        } else {
            Desired::Stopped
        };
        assert_eq!(asked.spec.state, wish);
        assert!(asked.is_on_backup(nic(1).id()), "it still runs there");
        // The process has not answered yet: the next daemon leaves it running.
        assert_eq!(daemon.reconciles(), Reconciled::Running);
        assert_eq!(daemon.record, Some(asked));

        daemon.does(end);
        assert_eq!(
            daemon.reconciles(),
            Reconciled::Stopped,
            "{until_reboot} {end:?}"
        );
        let off = daemon.record.clone().unwrap();
        assert!(!off.is_to_start() && !off.asked_to_power_off);
        assert!(!off.is_on_backup(nic(1).id()));

        fake.sim_host().boot += 1;
        let after = daemon.reconciles();
        assert_eq!(after == Reconciled::ToStart, until_reboot, "{restart:?}");
        assert_eq!(daemon.record.unwrap().off_in_boot, None);
    }
}

#[test]
fn a_guest_that_cannot_be_asked_to_power_off_is_to_run_as_before() {
    for (faults, kept) in [
        (vec![Fault::Fails], "the record"),
        (vec![Fault::None, Fault::Fails], "the button"),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let mut daemon = Daemon::new(&fake, &vm);
        let spec = spec(0, false, Restart::Always);
        daemon.record = daemon.lifecycle().create(Record::new(spec)).ok();
        fake.plan(faults);
        daemon.does(Action::AskToPowerOff {
            until_reboot: false,
        });
        fake.plan(Vec::new());
        assert!(daemon.record.as_ref().unwrap().is_on(), "{kept}");
        assert_eq!(fake.stored(&vm), daemon.record, "{kept}");
    }
}

/// The VM has moved the NIC and reported that it has not; then the daemon is killed.
#[test]
fn a_nic_that_was_not_moved_back_is_moved_back_by_the_next_daemon() {
    let create = Action::Create {
        nics: 1,
        stopped: false,
        restart: Restart::Never,
    };
    let faults = vec![
        Fault::None,
        Fault::None,
        Fault::FailsDone,
        Fault::KilledAfter,
    ];
    let swap = Action::Swap { nic: 0, to: 0 };
    lives(vec![(create, Vec::new()), (swap, faults)]).unwrap();
}

#[test]
fn a_kill_during_a_disk_change_leaves_the_disks_of_the_record() {
    let create = |stopped| Action::Create {
        nics: 1,
        stopped,
        restart: Restart::Never,
    };
    let remove = |stubborn| Action::RemoveDisk { disk: 0, stubborn };
    for kill in [
        Fault::KilledBefore,
        Fault::KilledAfter,
        Fault::Fails,
        Fault::FailsDone,
    ] {
        for (at, stopped) in (0..6).flat_map(|at| [(at, true), (at, false)]) {
            let faults = || {
                let mut faults = vec![Fault::None; at];
                // The rollback of the failure fails, too.
                faults.extend([kill, kill]);
                faults
            };
            lives(vec![
                (create(stopped), Vec::new()),
                (Action::AddDisk(0), faults()),
                (Action::Kill, Vec::new()),
                (Action::AddDisk(0), Vec::new()),
                (remove(true), faults()),
                (Action::GiveUp, faults()),
                (Action::Kill, Vec::new()),
            ])
            .unwrap();
        }
    }
}

/// The creation of a VM without NICs.
const CREATE: Action = Action::Create {
    nics: 0,
    stopped: false,
    restart: Restart::Always,
};

/// The record contains it, so each start adds it.
#[test]
fn a_disk_is_there_after_a_stop_a_crash_and_a_reboot_and_a_removed_one_is_not() {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let mut daemon = Daemon::new(&fake, &vm);
    for action in [CREATE, Action::AddDisk(0), Action::Stop, Action::AddDisk(1)] {
        daemon.does(action);
    }
    let disks = |fake: &Fake| {
        let running = fake.sim_host().processes.first().cloned().unwrap();
        running.disks.into_keys().collect::<Vec<_>>()
    };
    daemon.does(Action::Start);
    assert_eq!(disks(&fake), ["data0", "data1"]);
    for action in [Action::Crash, Action::Start] {
        daemon.does(action);
    }
    assert_eq!(disks(&fake), ["data0", "data1"]);
    {
        let mut sim_host = fake.sim_host();
        sim_host.processes.clear();
        sim_host.boot += 1;
    }
    assert_eq!(daemon.reconciles(), Reconciled::ToStart);
    daemon.does(Action::Start);
    assert_eq!(disks(&fake), ["data0", "data1"]);
    // The guest still has it for now, but the VM's record does not.
    let stubborn = true;
    daemon.does(Action::RemoveDisk { disk: 0, stubborn });
    assert_eq!(disks(&fake), ["data0", "data1"]);
    assert_eq!(daemon.reconciles(), Reconciled::Running);
    assert_eq!(disks(&fake), ["data1"]);
}

#[test]
fn the_image_of_a_removed_disk_is_unneeded_unless_another_file_is_the_same() {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let mut daemon = Daemon::new(&fake, &vm);
    daemon.does(CREATE);
    let mut record = daemon.record.unwrap();
    let kernel = record.spec.machine().kernel.clone();
    let kernel = kernel.display().to_string();
    for (id, path) in [
        ("a", "/x"),
        ("b", "/x"),
        ("c", "/x"),
        ("d", kernel.as_str()),
    ] {
        let disk = format!("path={path},id={id},readonly=on").parse().unwrap();
        record.spec = record.spec.with_disk(disk);
    }
    let [a, b, c, d]: [DeviceId; 4] = ["a", "b", "c", "d"].map(|id| id.parse().unwrap());
    for id in [&a, &b, &d] {
        record.removes_disk(id);
        assert!(record.spec.disk(id).is_none());
        assert_eq!(record.unneeded_image(id), None, "{id}");
    }
    assert!(record.mark_disk_released(&a));
    record.removes_disk(&c);
    assert_eq!(
        record.unneeded_image(&c),
        None,
        "another removed disk has it"
    );
    assert!(record.mark_disk_released(&b));
    // A repeated request.
    record.removes_disk(&c);
    let image = std::path::Path::new("/x");
    assert_eq!(record.unneeded_image(&c), Some(image));
    let mut stored = serde_json::to_value(&record).unwrap();
    let read: Record = serde_json::from_value(stored.clone()).unwrap();
    assert_eq!(read.unneeded_image(&c), Some(image));
    // A record of an earlier version.
    stored
        .as_object_mut()
        .unwrap()
        .remove("removed_images")
        .unwrap();
    let read: Record = serde_json::from_value(stored).unwrap();
    assert!(read.removed_disks().contains(&c));
    assert_eq!(read.unneeded_image(&c), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn nothing_is_lost_or_doubled_at_any_failure(
        actions in vec((action(), vec(fault(), 0..14)), 1..12)
    ) {
        lives(actions)?;
    }
}

#[test]
fn a_kill_at_each_step_of_creation_and_deletion_leaves_a_machine_or_nothing() {
    for kill in [
        Fault::KilledBefore,
        Fault::KilledAfter,
        Fault::Fails,
        Fault::FailsDone,
    ] {
        for at in 0..16 {
            let faults = |at: usize| {
                let mut faults = vec![Fault::None; at];
                faults.push(kill);
                faults
            };
            let create = Action::Create {
                nics: 2,
                stopped: false,
                restart: Restart::OnFailure,
            };
            lives(vec![(create, faults(at)), (Action::Kill, Vec::new())]).unwrap();
            lives(vec![
                (create, Vec::new()),
                (Action::Delete, faults(at)),
                (Action::Kill, Vec::new()),
            ])
            .unwrap();
            lives(vec![
                (create, Vec::new()),
                (Action::Stop, faults(at)),
                (Action::Start, faults(at)),
            ])
            .unwrap();
        }
    }
}

#[test]
fn each_change_of_the_spec_that_is_kept_is_counted() {
    let mut record = Record::new(spec(1, true, Restart::Always));
    record.count_change(None);
    assert_eq!(record.generation, 1);
    let kept = record.clone();
    record.phase = Phase::Present;
    record.count_change(Some(&kept));
    assert_eq!(record.generation, 1);
    record.spec.state = Desired::Running;
    record.count_change(Some(&kept));
    // A step's copy may be older than the stored record.
    let (kept, mut back) = (record, kept);
    back.count_change(Some(&kept));
    assert_eq!((kept.generation, back.generation), (2, 3));
    let mut old = serde_json::to_value(&kept).unwrap();
    old.as_object_mut().unwrap().remove("generation");
    let old: Record = serde_json::from_value(old).unwrap();
    assert_eq!(old.generation, 1);
}

#[test]
fn the_policy_decides_which_vms_restart() {
    for (restart, because, back) in [
        (Restart::Never, EndReason::Crashed, false),
        (Restart::OnFailure, EndReason::Crashed, true),
        (Restart::OnFailure, EndReason::Killed, true),
        (Restart::OnFailure, EndReason::PoweredOff, false),
        (Restart::Always, EndReason::PoweredOff, true),
        (Restart::Always, EndReason::Moved, false),
        (Restart::Always, EndReason::Stopped, true),
        // Once a client has reported that the guest is here.
        (Restart::OnFailure, EndReason::Indeterminate, true),
        (Restart::Never, EndReason::Indeterminate, false),
    ] {
        assert_eq!(again(restart, because), back, "{restart:?} {because:?}");
    }
}
