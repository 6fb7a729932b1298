//! A VM that was sent elsewhere: its guest runs once, whatever fails.

use super::*;

/// Actions on a VM that was sent elsewhere.
fn leaving() -> impl Strategy<Value = Deed> {
    prop_oneof![
        3 => way().prop_map(Deed::Migrated),
        1 => any::<bool>().prop_map(|refused| Deed::Send { refused }),
        1 => any::<bool>().prop_map(Deed::Silent),
        2 => Just(Deed::SayWhere),
        1 => Just(Deed::Start),
        1 => Just(Deed::Stop),
        1 => any::<bool>().prop_map(|until_reboot| Deed::AskToPowerOff { until_reboot }),
        1 => Just(Deed::Crash),
        2 => Just(Deed::CrashUnseen),
        1 => Just(Deed::PowerOff),
        1 => Just(Deed::Reboot),
        1 => Just(Deed::Kill),
    ]
}

/// A running VM that was sent to another process.
fn sent() -> Vec<(Deed, Vec<Fault>)> {
    let create = Deed::Create {
        nics: 0,
        stopped: false,
        restart: Restart::Always,
    };
    let send = Deed::Send { refused: false };
    vec![(create, Vec::new()), (send, Vec::new())]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn a_guest_that_leaves_runs_once_whatever_fails(
        deeds in vec((leaving(), vec(fault(), 0..6)), 1..10)
    ) {
        lives(sent().into_iter().chain(deeds).collect())?;
    }
}

#[test]
fn a_machine_that_was_sent_is_not_started_again_whenever_its_process_or_the_daemon_dies() {
    let ways = [
        Way::Stays,
        Way::Moves,
        Way::Unsettled { away: true },
        Way::Unsettled { away: false },
        Way::Unsaid,
    ];
    let ends = [
        Deed::Crash,
        Deed::CrashUnseen,
        Deed::PowerOff,
        Deed::Reboot,
        Deed::Stop,
        Deed::Kill,
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
                let mut deeds = sent();
                deeds.push((Deed::Migrated(way), faults.clone()));
                deeds.push((end, faults.clone()));
                deeds.push((Deed::Kill, Vec::new()));
                deeds.push((Deed::Start, Vec::new()));
                deeds.push((Deed::SayWhere, faults));
                deeds.push((Deed::Kill, Vec::new()));
                lives(deeds).unwrap();
            }
        }
    }
}

/// A daemon is killed at any call while it forwards a request to leave; then the next one starts.
#[test]
fn a_request_to_leave_is_marked_before_it_is_passed_on() {
    for (fault, refused, marked, lived) in [
        // The record is not stored: the VM receives no request.
        ((Fault::KilledBefore, 0), false, false, Account::None),
        // The record is stored, but the VM receives no request: the next daemon queries it.
        ((Fault::KilledAfter, 0), false, false, Account::None),
        ((Fault::KilledBefore, 1), false, false, Account::None),
        ((Fault::KilledAfter, 1), false, true, Account::UnderWay),
        ((Fault::None, 1), false, true, Account::UnderWay),
        ((Fault::Fails, 0), false, false, Account::None),
        // Only the VM knows whether it received the request.
        ((Fault::Fails, 1), false, false, Account::None),
        ((Fault::FailsDone, 1), false, true, Account::UnderWay),
        ((Fault::None, 1), true, false, Account::None),
        ((Fault::KilledAfter, 1), true, false, Account::None),
    ] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let mut daemon = Daemon::new(&fake, &vm);
        let [(create, _), _] = <[_; 2]>::try_from(sent()).unwrap();
        daemon.does(create);
        let mut faults = vec![Fault::None; fault.1];
        faults.push(fault.0);
        fake.plan(faults);
        let send = Deed::Send { refused };
        let done = catch_unwind(AssertUnwindSafe(|| daemon.does(send)));
        fake.plan(Vec::new());
        if done.is_err() {
            // In every case the store contains it.
            let asked = fake.world().processes[0].migration == Account::UnderWay;
            let stored = fake.stored(&vm).unwrap().departure;
            assert!(!asked || stored.is_some(), "{fault:?}");
            assert_eq!(daemon.settles(), Settled::Running);
        }
        let record = daemon.record.unwrap();
        assert_eq!(record.departure.is_some(), marked, "{fault:?} {refused}");
        assert_eq!(fake.world().processes[0].migration, lived, "{fault:?}");
    }
}

#[test]
fn a_record_without_the_mark_is_read() {
    let mut record = Record::new(spec(1, false, Restart::Always));
    record.departure = Some(crate::machines::departure::Departure::to("tcp:b:1"));
    let json = serde_json::to_value(&record).unwrap();
    assert_eq!(
        serde_json::from_value::<Record>(json.clone()).unwrap(),
        record
    );
    let mut old = json;
    old.as_object_mut().unwrap().remove("departure");
    let read: Record = serde_json::from_value(old).unwrap();
    assert_eq!(read.departure, None);
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
        for (deed, _) in sent() {
            daemon.does(deed);
        }
        fake.world().processes.clear();
        assert_eq!(daemon.settles(), Settled::Stopped);
        let record = daemon.record.as_ref().unwrap();
        assert!(record.may_be_elsewhere().is_some());
        // Its policy is kept: it applies once the place is resolved.
        assert_eq!(record.spec.state, Desired::Running);
        assert!(!record.is_to_start());
        let mut record = record.clone();
        // The record cannot be stored: the place stays unknown.
        fake.plan(vec![Fault::Fails]);
        assert!(daemon.life().say_where(&mut record, here).is_err());
        assert!(record.may_be_elsewhere().is_some());
        daemon.life().say_where(&mut record, here).unwrap();
        assert_eq!(fake.stored(&vm).unwrap(), record);
        assert_eq!(record.departure, None);
        assert_eq!(record.spec.state, state);
        assert_eq!(record.last_end.as_ref().unwrap().reason, reason);
        assert_eq!(record.is_to_start(), here);
    }
}

/// Also a VM that was sent by its own API: only its end reports that.
#[test]
fn a_vm_that_ends_unsettled_does_not_start_and_keeps_its_nics() {
    for (marked, here) in [(true, true), (true, false), (false, true), (false, false)] {
        let fake = Fake::default();
        let vm: VmName = "web".parse().unwrap();
        let daemon = Daemon::new(&fake, &vm);
        let life = daemon.life();
        let mut record = life
            .create(Record::new(spec(1, false, Restart::Always)))
            .unwrap();
        if marked {
            let request = SendRequest {
                destination: "unix:/b".to_owned(),
                body: Bytes::new(),
                request_id: String::new(),
                peer: None,
            };
            life.send(&mut record, &request).unwrap();
        }
        fake.world().processes.clear();
        life.stop(&mut record).unwrap();
        let end = End {
            reason: EndReason::Unsettled,
            detail: String::new(),
        };
        let end = life.ends(&mut record, end).unwrap().unwrap();
        assert_eq!(end.reason, EndReason::Unsettled);
        let reason = record.may_be_elsewhere().unwrap().reason();
        assert_eq!(reason.contains("unix:/b"), marked, "{reason}");
        assert!(!record.is_to_start());
        assert_eq!(fake.stored(&vm).unwrap(), record);
        assert_eq!(fake.world().devices.len(), 1);
        // The next daemon finds the same.
        assert_eq!(life.settle(&mut record).unwrap(), Settled::Stopped);
        assert!(record.may_be_elsewhere().is_some());
        life.say_where(&mut record, here).unwrap();
        assert_eq!(record.is_to_start(), here);
    }
}
