//! A VM that arrives from another node, or leaves for one: its waiting process, and its leftovers.

use super::*;

/// The address at which a VM is awaited.
fn incoming() -> IncomingMigration {
    IncomingMigration {
        listen: "unix:/run/web/migration.socket".to_owned(),
    }
}

/// The daemon is killed at any call while it prepares an arrival, or during the wait.
#[test]
fn a_waiting_process_exists_as_a_whole_or_not_at_all() {
    for fault in [
        Fault::Fails,
        Fault::FailsDone,
        Fault::KilledBefore,
        Fault::KilledAfter,
    ] {
        for at in 0..14 {
            let fake = Fake::default();
            let vm: VmName = "web".parse().unwrap();
            let mut daemon = Daemon::new(&fake, &vm);
            let mut faults = vec![Fault::None; at];
            faults.push(fault);
            fake.plan(faults);
            let spec = spec(2, false, Restart::Always);
            let lifecycle = daemon.lifecycle();
            let done = catch_unwind(AssertUnwindSafe(|| {
                lifecycle
                    .receive(Record::expecting(spec, incoming()), None)
                    .is_ok()
            }));
            fake.plan(Vec::new());
            let reconciled = daemon.reconciles();
            holds(&fake, &vm).unwrap();
            if done.is_ok_and(|received| received) {
                assert_eq!(reconciled, Reconciled::Awaited, "{fault:?} {at}");
            }
            match reconciled {
                Reconciled::Awaited => {
                    assert_eq!(fake.sim_host().processes.len(), 1);
                    assert!(!daemon.record.as_ref().unwrap().is_to_start());
                }
                reconciled => assert_eq!(reconciled, Reconciled::None, "{fault:?} {at}"),
            }
        }
    }
}

#[test]
fn an_incoming_vm_is_rolled_back_kept_or_left_open_by_the_report_of_its_process() {
    let killed = EndReason::Killed;
    for (reason, left) in [
        (EndReason::Moved, false),
        (EndReason::Failed, true),
        (EndReason::Stopped, true),
        (EndReason::Indeterminate, true),
        (EndReason::PoweredOff, true),
        (EndReason::Crashed, true),
        (killed, true),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let daemon = Daemon::new(&fake, &vm);
        let lifecycle = daemon.lifecycle();
        let spec = spec(1, false, Restart::Always);
        let mut record = lifecycle
            .receive(Record::expecting(spec, incoming()), None)
            .unwrap();
        assert_eq!(fake.sim_host().devices.len(), 1);
        fake.sim_host().processes.clear();
        lifecycle.stop(&mut record).unwrap();
        let detail = String::new();
        let end = lifecycle.ends(&mut record, End { reason, detail }).unwrap();
        assert_eq!(end.is_some(), left, "{reason:?}");
        assert_eq!(fake.stored(&vm).is_some(), left, "{reason:?}");
        assert_eq!(fake.sim_host().devices.len(), usize::from(left));
        // The daemon does not start a VM that may run at its source.
        let open = [
            killed,
            EndReason::Failed,
            EndReason::Stopped,
            EndReason::Indeterminate,
        ]
        .contains(&reason);
        assert_eq!(record.migration_unknown().is_some(), open, "{reason:?}");
        assert!(!open || !record.is_to_start());
    }
}

#[test]
fn a_starting_daemon_keeps_waiting_machines_and_adopts_arrived_ones() {
    for (incoming_report, reconciled) in [
        (IncomingReport::UnderWay, Reconciled::Awaited),
        (IncomingReport::Indeterminate, Reconciled::Awaited),
        (IncomingReport::Silent, Reconciled::Awaited),
        (IncomingReport::Arrived, Reconciled::Running),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let mut daemon = Daemon::new(&fake, &vm);
        let spec = spec(1, false, Restart::Always);
        daemon
            .lifecycle()
            .receive(Record::expecting(spec, incoming()), None)
            .unwrap();
        fake.sim_host().incoming_report = Some(incoming_report);
        assert_eq!(daemon.reconciles(), reconciled, "{incoming_report:?}");
        // A query finds a guest that has arrived.
        let expected: &[String] = match incoming_report {
            IncomingReport::Arrived => &["net0".to_owned()],
            _ => &[],
        };
        assert_eq!(fake.sim_host().announced, expected, "{incoming_report:?}");
        let mut record = daemon.record.clone().unwrap();
        daemon.lifecycle().query_incoming(&mut record);
        assert_eq!(
            fake.sim_host().announced,
            expected,
            "told again: {incoming_report:?}"
        );
        let record = daemon.record.as_ref().unwrap();
        assert_eq!(record.incoming.is_some(), reconciled == Reconciled::Awaited);
        assert_eq!(fake.sim_host().processes.len(), 1);
        // An arrived VM cannot be cancelled.
        let called_off = daemon.lifecycle().cancel_incoming(record).unwrap();
        assert_eq!(called_off, incoming_report != IncomingReport::Arrived);
    }
}

#[test]
fn a_machine_that_has_moved_to_a_node_leaves_nothing_and_one_that_stays_is_withdrawn_there() {
    let peer = Peer {
        node: "https://b:1".to_owned(),
        name: "web".to_owned(),
    };
    for (report, there, told_to_stop) in [
        (MigrationReport::Here, false, false),
        (MigrationReport::There, true, false),
        (MigrationReport::There, false, false),
        (MigrationReport::There, true, true),
        (MigrationReport::There, false, true),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let daemon = Daemon::new(&fake, &vm);
        let lifecycle = daemon.lifecycle();
        let mut record = lifecycle
            .create(Record::new(spec(1, false, Restart::Always)))
            .unwrap();
        let request = SendRequest {
            destination: peer.to_string(),
            body: Bytes::new(),
            endpoint: None,
            request_id: String::new(),
            peer: Some(peer.clone()),
        };
        lifecycle.send(&mut record, &request).unwrap();
        fake.sim_host().processes[0].migration = report;
        fake.sim_host().there = there;
        lifecycle.query_migration(&mut record);
        assert_eq!(
            fake.sim_host().withdrawn,
            u32::from(report == MigrationReport::Here)
        );
        if report == MigrationReport::Here {
            assert_eq!(record.outgoing, None);
            assert_eq!(fake.sim_host().devices.len(), 1);
            continue;
        }
        // Independent of the last report of its process, and of the reason of its end.
        let end = if told_to_stop {
            lifecycle.stop(&mut record).unwrap();
            lifecycle.stopped(&mut record).unwrap()
        } else {
            fake.sim_host().processes.clear();
            lifecycle.stop(&mut record).unwrap();
            let end = End {
                reason: EndReason::Killed,
                detail: String::new(),
            };
            lifecycle.ends(&mut record, end).unwrap()
        };
        assert_eq!(end.is_none(), there);
        assert_eq!(fake.stored(&vm).is_none(), there);
        assert!(fake.sim_host().devices.is_empty(), "its NIC stays");
        assert!(there || record.last_end.unwrap().reason == EndReason::Moved);
    }
}

/// A VM that left this node, with a record and a device as leftovers.
fn one_that_left(lifecycle: &Lifecycle<'_>) -> Record {
    let mut record = lifecycle
        .create(Record::new(spec(2, false, Restart::Always)))
        .unwrap();
    lifecycle.stop(&mut record).unwrap();
    let end = End {
        reason: EndReason::Moved,
        detail: "it was sent to another process".to_owned(),
    };
    lifecycle.ended(&mut record, end);
    record
}

/// As in `bellhop vm compat`, which makes the other node wait and cancels at once.
#[test]
fn a_dry_run_keeps_the_record_of_a_departed_machine() {
    for fault in [
        Fault::None,
        Fault::Fails,
        Fault::FailsDone,
        Fault::KilledBefore,
        Fault::KilledAfter,
    ] {
        for at in 0..40 {
            let fake = Fake::default();
            let vm: VmName = "web".parse().unwrap();
            let mut daemon = Daemon::new(&fake, &vm);
            let left = one_that_left(&daemon.lifecycle());
            let mut faults = vec![Fault::None; at];
            faults.push(fault);
            fake.plan(faults);
            let lifecycle = daemon.lifecycle();
            let asked = catch_unwind(AssertUnwindSafe(|| {
                let next = spec(1, false, Restart::Never);
                let mut record = lifecycle
                    .receive(Record::expecting(next, incoming()), Some(left.clone()))
                    .ok()?;
                lifecycle.cancel_incoming(&record).ok()?;
                lifecycle.delete(&mut record).ok()?;
                Some(record)
            }));
            fake.plan(Vec::new());
            holds(&fake, &vm).unwrap();
            if let Ok(Some(record)) = asked {
                assert_eq!(record.spec, left.spec);
            }
            let reconciled = daemon.reconciles();
            // No cancellation and no source arrive; or the process is gone without a report, and an
            // operator deletes the VM.
            if let Some(mut record) = daemon.record.take()
                && record.incoming.is_some()
            {
                let waits = reconciled == Reconciled::Awaited;
                assert!(!waits || daemon.lifecycle().cancel_incoming(&record).unwrap());
                daemon.lifecycle().delete(&mut record).unwrap();
            }
            holds(&fake, &vm).unwrap();
            let mut record = fake.stored(&vm).unwrap();
            assert_eq!(
                (&record.spec, &record.last_end, record.phase),
                (&left.spec, &left.last_end, Phase::Present),
                "{fault:?} {at}"
            );
            assert!(!record.is_to_start() && record.incoming.is_none());
            // It can be started as before, and deleted completely.
            daemon.lifecycle().start(&mut record).unwrap();
            daemon.lifecycle().delete(&mut record).unwrap();
            assert_eq!(fake.stored(&vm), None);
            holds(&fake, &vm).unwrap();
        }
    }
}

#[test]
fn a_machine_that_has_come_back_is_remembered_once() {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let daemon = Daemon::new(&fake, &vm);
    let lifecycle = daemon.lifecycle();
    let left = one_that_left(&lifecycle);
    let next = spec(1, false, Restart::Never);
    let mut record = lifecycle
        .receive(Record::expecting(next, incoming()), Some(left))
        .unwrap();
    fake.sim_host().incoming_report = Some(IncomingReport::Arrived);
    assert_eq!(
        lifecycle.query_incoming(&mut record),
        IncomingReport::Arrived
    );
    lifecycle.delete(&mut record).unwrap();
    assert_eq!(fake.stored(&vm), None);
    holds(&fake, &vm).unwrap();
}
