//! A VM that arrives from another node, or leaves for one: its waiting process, and its leftovers.

use super::*;

/// The address at which a VM is awaited.
fn arrival() -> Arrival {
    Arrival {
        listen: "unix:/run/web/migration.socket".to_owned(),
    }
}

/// The daemon is killed at any call while it prepares an arrival, or during the wait.
#[test]
fn what_waits_for_a_machine_is_there_as_a_whole_or_not_at_all() {
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
            let life = daemon.life();
            let done = catch_unwind(AssertUnwindSafe(|| {
                life.receive(Record::coming(spec, arrival()), None).is_ok()
            }));
            fake.plan(Vec::new());
            let settled = daemon.settles();
            holds(&fake, &vm).unwrap();
            if done.is_ok_and(|received| received) {
                assert_eq!(settled, Settled::Awaited, "{fault:?} {at}");
            }
            match settled {
                Settled::Awaited => {
                    assert_eq!(fake.world().processes.len(), 1);
                    assert!(!daemon.record.as_ref().unwrap().is_to_start());
                }
                settled => assert_eq!(settled, Settled::None, "{fault:?} {at}"),
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
        (EndReason::Unsettled, true),
        (EndReason::PoweredOff, true),
        (EndReason::Crashed, true),
        (killed, true),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let daemon = Daemon::new(&fake, &vm);
        let life = daemon.life();
        let spec = spec(1, false, Restart::Always);
        let mut record = life.receive(Record::coming(spec, arrival()), None).unwrap();
        assert_eq!(fake.world().devices.len(), 1);
        fake.world().processes.clear();
        life.stop(&mut record).unwrap();
        let detail = String::new();
        let end = life.ends(&mut record, End { reason, detail }).unwrap();
        assert_eq!(end.is_some(), left, "{reason:?}");
        assert_eq!(fake.stored(&vm).is_some(), left, "{reason:?}");
        assert_eq!(fake.world().devices.len(), usize::from(left));
        // The daemon does not start a VM that may run at its source.
        let open = [
            killed,
            EndReason::Failed,
            EndReason::Stopped,
            EndReason::Unsettled,
        ]
        .contains(&reason);
        assert_eq!(record.may_be_elsewhere().is_some(), open, "{reason:?}");
        assert!(!open || !record.is_to_start());
    }
}

#[test]
fn a_daemon_that_starts_leaves_what_waits_and_knows_what_has_come() {
    for (coming, settled) in [
        (Coming::UnderWay, Settled::Awaited),
        (Coming::Unsettled, Settled::Awaited),
        (Coming::Silent, Settled::Awaited),
        (Coming::Arrived, Settled::Running),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let mut daemon = Daemon::new(&fake, &vm);
        let spec = spec(1, false, Restart::Always);
        daemon
            .life()
            .receive(Record::coming(spec, arrival()), None)
            .unwrap();
        fake.world().coming = Some(coming);
        assert_eq!(daemon.settles(), settled, "{coming:?}");
        // A query finds a guest that has arrived.
        let expected: &[String] = match coming {
            Coming::Arrived => &["net0".to_owned()],
            _ => &[],
        };
        assert_eq!(fake.world().announced, expected, "{coming:?}");
        let mut record = daemon.record.clone().unwrap();
        daemon.life().look_for_arrival(&mut record);
        assert_eq!(fake.world().announced, expected, "told again: {coming:?}");
        let record = daemon.record.as_ref().unwrap();
        assert_eq!(record.arrival.is_some(), settled == Settled::Awaited);
        assert_eq!(fake.world().processes.len(), 1);
        // An arrived VM cannot be cancelled.
        let called_off = daemon.life().call_off(record).unwrap();
        assert_eq!(called_off, coming != Coming::Arrived);
    }
}

#[test]
fn a_machine_that_has_moved_to_a_node_leaves_nothing_and_one_that_stays_is_withdrawn_there() {
    let peer = Peer {
        node: "https://b:1".to_owned(),
        name: "web".to_owned(),
    };
    for (account, there, told_to_stop) in [
        (Account::Here, false, false),
        (Account::There, true, false),
        (Account::There, false, false),
        (Account::There, true, true),
        (Account::There, false, true),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let daemon = Daemon::new(&fake, &vm);
        let life = daemon.life();
        let mut record = life
            .create(Record::new(spec(1, false, Restart::Always)))
            .unwrap();
        let request = SendRequest {
            destination: peer.to_string(),
            body: Bytes::new(),
            request_id: String::new(),
            peer: Some(peer.clone()),
        };
        life.send(&mut record, &request).unwrap();
        fake.world().processes[0].migration = account;
        fake.world().there = there;
        life.look_for_guest(&mut record);
        assert_eq!(fake.world().withdrawn, u32::from(account == Account::Here));
        if account == Account::Here {
            assert_eq!(record.departure, None);
            assert_eq!(fake.world().devices.len(), 1);
            continue;
        }
        // Independent of the last report of its process, and of the reason of its end.
        let end = if told_to_stop {
            life.stop(&mut record).unwrap();
            life.stopped(&mut record).unwrap()
        } else {
            fake.world().processes.clear();
            life.stop(&mut record).unwrap();
            let end = End {
                reason: EndReason::Killed,
                detail: String::new(),
            };
            life.ends(&mut record, end).unwrap()
        };
        assert_eq!(end.is_none(), there);
        assert_eq!(fake.stored(&vm).is_none(), there);
        assert!(fake.world().devices.is_empty(), "its NIC stays");
        assert!(there || record.last_end.unwrap().reason == EndReason::Moved);
    }
}

/// A VM that left this node, with a record and a device as leftovers.
fn one_that_left(life: &Life<'_>) -> Record {
    let mut record = life
        .create(Record::new(spec(2, false, Restart::Always)))
        .unwrap();
    life.stop(&mut record).unwrap();
    let end = End {
        reason: EndReason::Moved,
        detail: "it was sent to another process".to_owned(),
    };
    life.ended(&mut record, end);
    record
}

/// As in `bellhop vm compat`, which makes the other node wait and cancels at once.
#[test]
fn who_only_asks_whether_a_machine_could_come_back_leaves_what_is_remembered_of_it() {
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
            let left = one_that_left(&daemon.life());
            let mut faults = vec![Fault::None; at];
            faults.push(fault);
            fake.plan(faults);
            let life = daemon.life();
            let asked = catch_unwind(AssertUnwindSafe(|| {
                let coming = spec(1, false, Restart::Never);
                let mut record = life
                    .receive(Record::coming(coming, arrival()), Some(left.clone()))
                    .ok()?;
                life.call_off(&record).ok()?;
                life.delete(&mut record).ok()?;
                Some(record)
            }));
            fake.plan(Vec::new());
            holds(&fake, &vm).unwrap();
            if let Ok(Some(record)) = asked {
                assert_eq!(record.spec, left.spec);
            }
            let settled = daemon.settles();
            // No cancellation and no source arrive; or the process is gone without a report, and an
            // operator deletes the VM.
            if let Some(mut record) = daemon.record.take()
                && record.arrival.is_some()
            {
                let waits = settled == Settled::Awaited;
                assert!(!waits || daemon.life().call_off(&record).unwrap());
                daemon.life().delete(&mut record).unwrap();
            }
            holds(&fake, &vm).unwrap();
            let mut record = fake.stored(&vm).unwrap();
            assert_eq!(
                (&record.spec, &record.last_end, record.phase),
                (&left.spec, &left.last_end, Phase::Present),
                "{fault:?} {at}"
            );
            assert!(!record.is_to_start() && record.arrival.is_none());
            // It can be started as before, and deleted completely.
            daemon.life().start(&mut record).unwrap();
            daemon.life().delete(&mut record).unwrap();
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
    let life = daemon.life();
    let left = one_that_left(&life);
    let coming = spec(1, false, Restart::Never);
    let mut record = life
        .receive(Record::coming(coming, arrival()), Some(left))
        .unwrap();
    fake.world().coming = Some(Coming::Arrived);
    assert_eq!(life.look_for_arrival(&mut record), Coming::Arrived);
    life.delete(&mut record).unwrap();
    assert_eq!(fake.stored(&vm), None);
    holds(&fake, &vm).unwrap();
}
