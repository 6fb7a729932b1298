//! A VM that was sent elsewhere: its guest runs once, whatever fails.

use super::*;

/// Actions on a VM that was sent elsewhere.
fn leaving() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => way().prop_map(Action::Migrated),
        1 => any::<bool>().prop_map(|refused| Action::Send { refused }),
        1 => any::<bool>().prop_map(Action::Silent),
        2 => Just(Action::Resolve),
        1 => Just(Action::Start),
        1 => Just(Action::Stop),
        1 => any::<bool>().prop_map(|until_reboot| Action::AskToPowerOff { until_reboot }),
        1 => Just(Action::Crash),
        2 => Just(Action::CrashUnseen),
        1 => Just(Action::PowerOff),
        1 => Just(Action::Reboot),
        1 => Just(Action::Kill),
    ]
}

/// A running VM that was sent to another process.
fn sent() -> Vec<(Action, Vec<Fault>)> {
    let create = Action::Create {
        nics: 0,
        stopped: false,
        restart: Restart::Always,
    };
    let send = Action::Send { refused: false };
    vec![(create, Vec::new()), (send, Vec::new())]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn a_migrated_guest_runs_once_at_any_failure(
        actions in vec((leaving(), vec(fault(), 0..6)), 1..10)
    ) {
        lives(sent().into_iter().chain(actions).collect())?;
    }
}

#[test]
fn a_machine_that_was_sent_is_not_started_again_whenever_its_process_or_the_daemon_dies() {
    let ways = [
        Way::Stays,
        Way::Moves,
        Way::Indeterminate { away: true },
        Way::Indeterminate { away: false },
        Way::Unreported,
    ];
    let ends = [
        Action::Crash,
        Action::CrashUnseen,
        Action::PowerOff,
        Action::Reboot,
        Action::Stop,
        Action::Kill,
    ];
    for way in ways {
        for end in ends {
            for (fault, at) in [
                (Fault::None, 0),
                (Fault::KilledBefore, 0),
                (Fault::KilledAfter, 0),
                (Fault::KilledAfter, 1),
                (Fault::Fails, 1),
                (Fault::KilledBefore, 2),
            ] {
                let mut faults = vec![Fault::None; at];
                faults.push(fault);
                let mut actions = sent();
                actions.push((Action::Migrated(way), faults.clone()));
                actions.push((end, faults.clone()));
                actions.push((Action::Kill, Vec::new()));
                actions.push((Action::Start, Vec::new()));
                actions.push((Action::Resolve, faults));
                actions.push((Action::Kill, Vec::new()));
                lives(actions).unwrap();
            }
        }
    }
}

/// A daemon is killed at any call while it forwards a request to leave; then the next one starts.
#[test]
fn a_request_to_leave_is_marked_before_it_is_passed_on() {
    for (fault, refused, marked, lived) in [
        // The record is not stored: the VM receives no request.
        (
            (Fault::KilledBefore, 0),
            false,
            false,
            MigrationReport::None,
        ),
        // The record is stored, but the VM receives no request: the next daemon queries it.
        ((Fault::KilledAfter, 0), false, false, MigrationReport::None),
        (
            (Fault::KilledBefore, 1),
            false,
            false,
            MigrationReport::None,
        ),
        (
            (Fault::KilledAfter, 1),
            false,
            true,
            MigrationReport::UnderWay,
        ),
        ((Fault::None, 1), false, true, MigrationReport::UnderWay),
        ((Fault::Fails, 0), false, false, MigrationReport::None),
        // Only the VM knows whether it received the request.
        ((Fault::Fails, 1), false, false, MigrationReport::None),
        (
            (Fault::FailsDone, 1),
            false,
            true,
            MigrationReport::UnderWay,
        ),
        ((Fault::None, 1), true, false, MigrationReport::None),
        ((Fault::KilledAfter, 1), true, false, MigrationReport::None),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let mut daemon = Daemon::new(&fake, &vm);
        let [(create, _), _] = <[_; 2]>::try_from(sent()).unwrap();
        daemon.does(create);
        let mut faults = vec![Fault::None; fault.1];
        faults.push(fault.0);
        fake.plan(faults);
        let send = Action::Send { refused };
        let done = catch_unwind(AssertUnwindSafe(|| daemon.does(send)));
        fake.plan(Vec::new());
        if done.is_err() {
            // In every case the store contains it.
            let asked = fake.sim_host().processes[0].migration == MigrationReport::UnderWay;
            let stored = fake.stored(&vm).unwrap().outgoing;
            assert!(!asked || stored.is_some(), "{fault:?}");
            assert_eq!(daemon.reconciles(), Reconciled::Running);
        }
        let record = daemon.record.unwrap();
        assert_eq!(record.outgoing.is_some(), marked, "{fault:?} {refused}");
        assert_eq!(fake.sim_host().processes[0].migration, lived, "{fault:?}");
    }
}

#[test]
fn a_record_without_the_mark_is_read() {
    let mut record = Record::new(spec(1, false, Restart::Always));
    record.outgoing = Some(crate::machines::outgoing::OutgoingMigration::to("tcp:b:1"));
    let json = serde_json::to_value(&record).unwrap();
    assert_eq!(
        serde_json::from_value::<Record>(json.clone()).unwrap(),
        record
    );
    let mut old = json;
    old.as_object_mut().unwrap().remove("departure");
    let read: Record = serde_json::from_value(old).unwrap();
    assert_eq!(read.outgoing, None);
}

#[test]
fn a_client_reports_where_the_guest_is() {
    for (here, state, reason) in [
        (true, Desired::Running, EndReason::Killed),
        (false, Desired::Stopped, EndReason::Moved),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let mut daemon = Daemon::new(&fake, &vm);
        for (action, _) in sent() {
            daemon.does(action);
        }
        fake.sim_host().processes.clear();
        assert_eq!(daemon.reconciles(), Reconciled::Stopped);
        let record = daemon.record.as_ref().unwrap();
        assert!(record.migration_unknown().is_some());
        // Its policy is kept: it applies once the place is resolved.
        assert_eq!(record.spec.state, Desired::Running);
        assert!(!record.is_to_start());
        let mut record = record.clone();
        // The record cannot be stored: the place stays unknown.
        fake.plan(vec![Fault::Fails]);
        assert!(
            daemon
                .lifecycle()
                .resolve_migration(&mut record, here)
                .is_err()
        );
        assert!(record.migration_unknown().is_some());
        daemon
            .lifecycle()
            .resolve_migration(&mut record, here)
            .unwrap();
        assert_eq!(fake.stored(&vm).unwrap(), record);
        assert_eq!(record.outgoing, None);
        assert_eq!(record.spec.state, state);
        assert_eq!(record.last_end.as_ref().unwrap().reason, reason);
        assert_eq!(record.is_to_start(), here);
    }
}

/// Also a VM that was sent by its own API: only its end reports that.
#[test]
fn a_vm_that_ends_indeterminate_does_not_start_and_keeps_its_nics() {
    for (marked, here) in [(true, true), (true, false), (false, true), (false, false)] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let daemon = Daemon::new(&fake, &vm);
        let lifecycle = daemon.lifecycle();
        let mut record = lifecycle
            .create(Record::new(spec(1, false, Restart::Always)))
            .unwrap();
        if marked {
            let request = SendRequest {
                destination: "unix:/b".to_owned(),
                body: Bytes::new(),
                endpoint: None,
                request_id: String::new(),
                peer: None,
            };
            lifecycle.send(&mut record, &request).unwrap();
        }
        fake.sim_host().processes.clear();
        lifecycle.stop(&mut record).unwrap();
        let end = End {
            reason: EndReason::Indeterminate,
            detail: String::new(),
        };
        let end = lifecycle.ends(&mut record, end).unwrap().unwrap();
        assert_eq!(end.reason, EndReason::Indeterminate);
        let reason = record.migration_unknown().unwrap().reason();
        assert_eq!(reason.contains("unix:/b"), marked, "{reason}");
        assert!(!record.is_to_start());
        assert_eq!(fake.stored(&vm).unwrap(), record);
        assert_eq!(fake.sim_host().devices.len(), 1);
        // The next daemon finds the same.
        assert_eq!(
            lifecycle.reconcile(&mut record).unwrap(),
            Reconciled::Stopped
        );
        assert!(record.migration_unknown().is_some());
        lifecycle.resolve_migration(&mut record, here).unwrap();
        assert_eq!(record.is_to_start(), here);
    }
}
