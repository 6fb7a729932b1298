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
            let life = daemon.life();
            let made = life.create(Record::new(spec(2, true, Restart::Always)));
            let (mut record, before) = (made.unwrap(), fake.world().clone());
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
            let replaced = life.replace(&mut record, next);
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
            let world = fake.world().clone();
            assert!(world.directories, "{fault:?} {at}");
            let missing = before.devices.difference(&world.devices).next();
            assert_eq!(missing, None, "{fault:?} {at}");
            life.start(&mut record).unwrap();
            life.delete(&mut record).unwrap();
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
            let made = daemon.life().create(Record::new(former.clone()));
            let mut record = made.unwrap();
            let mut faults = vec![Fault::None; at];
            faults.push(fault);
            fake.plan(faults);
            let life = daemon.life();
            let _ = catch_unwind(AssertUnwindSafe(|| {
                let next = if restores {
                    Record::restored(next.clone(), "/snapshot".into(), next.machine())
                } else {
                    Record::new(next.clone())
                };
                life.replace(&mut record, next).unwrap();
            }));
            fake.plan(Vec::new());
            let settled = daemon.settles();
            holds(&fake, &vm).unwrap();
            let record = daemon.record.as_ref().unwrap();
            let devices = fake.world().devices.len();
            if record.spec == former {
                // The second NIC has two devices.
                assert_eq!(
                    (settled, devices),
                    (Settled::Stopped, 3),
                    "{fault:?} {restores} {at}"
                );
            } else {
                assert_eq!(
                    (settled, devices),
                    (Settled::Running, 1),
                    "{fault:?} {restores} {at}"
                );
                assert_eq!(record.spec, next);
            }
            let mut record = record.clone();
            daemon.life().delete(&mut record).unwrap();
            assert_eq!(fake.stored(&vm), None, "the former one is back");
        }
    }
}

#[test]
fn a_vm_off_until_reboot_starts_after_it_though_its_replacement_failed() {
    let create = Deed::Create {
        nics: 0,
        stopped: false,
        restart: Restart::Never,
    };
    let replace = Deed::Replace {
        nics: 0,
        stopped: false,
    };
    for at in 0..8 {
        let mut faults = vec![Fault::None; at];
        faults.extend([Fault::Fails; 2]);
        lives(vec![
            (create, Vec::new()),
            (Deed::StopUntilReboot, Vec::new()),
            (replace, faults),
            (Deed::Reboot, Vec::new()),
        ])
        .unwrap();
    }
}

#[test]
fn a_machine_that_is_replaced_is_remembered_no_longer() {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let daemon = Daemon::new(&fake, &vm);
    let life = daemon.life();
    let made = life.create(Record::new(spec(2, true, Restart::Always)));
    let mut record = made.unwrap();
    life.replace(&mut record, Record::new(spec(1, true, Restart::Never)))
        .unwrap();
    assert_eq!(fake.world().devices.len(), 1);
    assert_eq!(record.specs().count(), 1);
    assert_eq!(fake.stored(&vm), Some(record));
}
