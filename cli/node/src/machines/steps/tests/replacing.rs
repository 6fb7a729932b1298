//! One VM in place of another: failures and kills leave one of the two.

use super::*;

/// One call fails on the way there; the rollback is free of faults.
#[test]
fn a_machine_that_cannot_be_replaced_stays_with_its_nics() {
    for (fault, restores) in [
        (Fault::Fails, false),
        (Fault::FailsDone, false),
        (Fault::Fails, true),
    ] {
        let mut failed = 0;
        for at in 0.. {
            let fake = Fake::default();
            let vm: VmName = "web".parse().unwrap();
            let daemon = Daemon::new(&fake, &vm);
            let lifecycle = daemon.lifecycle();
            let made = lifecycle.create(Record::new(spec(2, true, Restart::Always)));
            let (mut record, before) = (made.unwrap(), fake.sim_host().clone());
            let former = record.clone();
            let mut faults = vec![Fault::None; at];
            faults.push(fault);
            fake.plan(faults);
            // A restored VM runs.
            let wanted = spec(3, !restores, Restart::Never);
            let next = if restores {
                Record::restored(wanted.clone(), "/snapshot".into(), wanted.machine())
            } else {
                Record::new(wanted.clone())
            };
            let replaced = lifecycle.replace(&mut record, next);
            if replaced.is_ok() && !fake.faults.lock().is_empty() {
                break;
            }
            fake.plan(Vec::new());
            holds(&fake, &vm).unwrap();
            if replaced.is_ok() {
                assert_eq!(record.spec, wanted);
                continue;
            }
            failed += 1;
            assert_eq!((&record.spec, record.phase), (&former.spec, former.phase));
            let stored = fake.stored(&vm).unwrap();
            assert_eq!((&stored.spec, stored.phase), (&former.spec, former.phase));
            let sim_host = fake.sim_host().clone();
            assert!(sim_host.directories, "{fault:?} {at}");
            let missing = before.devices.difference(&sim_host.devices).next();
            assert_eq!(missing, None, "{fault:?} {at}");
            lifecycle.start(&mut record).unwrap();
            lifecycle.delete(&mut record).unwrap();
            assert_eq!(fake.stored(&vm), None);
            holds(&fake, &vm).unwrap();
        }
        assert!(failed > 10, "{fault:?} {failed}");
    }
}

#[test]
fn a_daemon_killed_while_it_replaces_a_machine_leaves_one_of_the_two() {
    for (fault, restores) in [
        (Fault::KilledBefore, false),
        (Fault::KilledBefore, true),
        (Fault::KilledAfter, false),
        (Fault::KilledAfter, true),
    ] {
        for at in 0..40 {
            let fake = Fake::default();
            let vm: VmName = "web".parse().unwrap();
            let mut daemon = Daemon::new(&fake, &vm);
            let former = spec(2, true, Restart::Always);
            let next = spec(1, false, Restart::Never);
            let made = daemon.lifecycle().create(Record::new(former.clone()));
            let mut record = made.unwrap();
            let mut faults = vec![Fault::None; at];
            faults.push(fault);
            fake.plan(faults);
            let lifecycle = daemon.lifecycle();
            let _ = catch_unwind(AssertUnwindSafe(|| {
                let next = if restores {
                    Record::restored(next.clone(), "/snapshot".into(), next.machine())
                } else {
                    Record::new(next.clone())
                };
                lifecycle.replace(&mut record, next).unwrap();
            }));
            fake.plan(Vec::new());
            let reconciled = daemon.reconciles();
            holds(&fake, &vm).unwrap();
            let record = daemon.record.as_ref().unwrap();
            let devices = fake.sim_host().devices.len();
            if record.spec == former {
                // The second NIC has two devices.
                assert_eq!(
                    (reconciled, devices),
                    (Reconciled::Stopped, 3),
                    "{fault:?} {restores} {at}"
                );
            } else {
                assert_eq!(
                    (reconciled, devices),
                    (Reconciled::Running, 1),
                    "{fault:?} {restores} {at}"
                );
                assert_eq!(record.spec, next);
            }
            let mut record = record.clone();
            daemon.lifecycle().delete(&mut record).unwrap();
            assert_eq!(fake.stored(&vm), None, "the former one is back");
        }
    }
}

#[test]
fn a_vm_off_until_reboot_starts_after_it_though_its_replacement_failed() {
    let create = Action::Create {
        nics: 0,
        stopped: false,
        restart: Restart::Never,
    };
    let replace = Action::Replace {
        nics: 0,
        stopped: false,
    };
    for at in 0..8 {
        let mut faults = vec![Fault::None; at];
        faults.extend([Fault::Fails; 2]);
        lives(vec![
            (create, Vec::new()),
            (Action::StopUntilReboot, Vec::new()),
            (replace, faults),
            (Action::Reboot, Vec::new()),
        ])
        .unwrap();
    }
}

#[test]
fn a_machine_that_is_replaced_is_remembered_no_longer() {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let daemon = Daemon::new(&fake, &vm);
    let lifecycle = daemon.lifecycle();
    let made = lifecycle.create(Record::new(spec(2, true, Restart::Always)));
    let mut record = made.unwrap();
    lifecycle
        .replace(&mut record, Record::new(spec(1, true, Restart::Never)))
        .unwrap();
    assert_eq!(fake.sim_host().devices.len(), 1);
    assert_eq!(record.specs().count(), 1);
    assert_eq!(fake.stored(&vm), Some(record));
}
